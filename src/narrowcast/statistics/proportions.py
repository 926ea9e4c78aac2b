"""Shares: two that are not paired, of one look; several p-values at once; pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt

from narrowcast.errors import UsageError
from narrowcast.statistics.bootstrap import Interval
from narrowcast.statistics.quantiles import normal_quantile


def wilson(events: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share of ``events`` of ``n``."""
    z2 = normal_quantile((1 + confidence) / 2) ** 2
    centre, half = events + z2 / 2, sqrt(z2 * (events * (n - events) / n + z2 / 4))
    return max(0.0, (centre - half) / (n + z2)), min(1.0, (centre + half) / (n + z2))


def unpaired_interval(a_events: int, a_n: int, b_events: int, b_n: int, confidence: float = 0.95) -> Interval:
    """B's share less A's, of independent counts looked at once: Newcombe's interval from both Wilson intervals.

    Newcombe, Statistics in Medicine 17, 1998, 873-890, method 10.
    """
    for events, n in ((a_events, a_n), (b_events, b_n)):
        if not 0 <= events <= n or n < 1:
            raise UsageError("not a count of events", got=f"{events} of {n}")
    a, b = a_events / a_n, b_events / b_n
    (a_low, a_high), (b_low, b_high) = wilson(a_events, a_n, confidence), wilson(b_events, b_n, confidence)
    low = b - a - sqrt((b - b_low) ** 2 + (a_high - a) ** 2)
    high = b - a + sqrt((b_high - b) ** 2 + (a - a_low) ** 2)
    return Interval(b - a, low, high, a_n + b_n, "score", confidence)


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for being many (Holm 1979), in the order given: at or below α where Holm rejects at α."""
    adjusted, floor = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        floor = max(floor, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = floor
    return adjusted


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that one of ``k`` draws passes, without bias from ``passed`` of ``samples``: 1 - C(n-c, k)/C(n, k).

    Chen et al. 2021, arXiv 2107.03374, equation 1. Raises UsageError for fewer samples than ``k``.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise UsageError(f"pass@{k} needs {k} samples", got=f"{passed} passed of {samples}")
    return 1 - prod((samples - passed - i) / (samples - i) for i in range(k))
