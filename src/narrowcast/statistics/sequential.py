"""Two counters that are looked at again and again: an interval that holds at every look at once.

An ordinary 95 % interval is wrong at some look far more often than 5 % when it is looked at all day and the rollout is
stopped at the first alarm. For one counter with s events of n, and any prior chosen before the data, the ratio

    M(p) = ∫ q^s (1-q)^(n-s) dBeta(q; 1/2, 1/2) / (p^s (1-p)^(n-s))

is a martingale of mean 1 under the true p (Robbins 1970; as prior over posterior Waudby-Smith and Ramdas 2020,
arXiv 2006.04347). So is M_a(p_a) · M_b(p_b) for two independent counters in whatever order their events arrive. Ville's
inequality bounds the chance that it ever reaches 1/α by α, and the least of it over all pairs with p_b - p_a = Δ

    E(Δ) = min over p of M_a(p) · M_b(p + Δ)

is below the true pair's (Wasserman, Ramdas and Balakrishnan 2020, arXiv 1912.11436). The interval holds the Δ with
E(Δ) < 1/α; p = 1/E(0). Both depend on the four counts alone, not on the order or on when one looked before.

Assumes: events are independent of each other, and the rates do not drift; a rate that drifts alike in both arms needs
traffic that is split evenly at all times.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, lgamma, log, pi

from narrowcast.errors import UsageError
from narrowcast.statistics.bootstrap import Interval

_STEPS = 60


@dataclass(frozen=True)
class Counter:
    """``events`` of ``n`` trials."""

    events: int
    n: int

    def __post_init__(self) -> None:
        if not 0 <= self.events <= self.n or self.n < 1:
            raise UsageError(
                "not a count of events", got=f"{self.events} of {self.n}", wanted="0 <= EVENTS <= N"
            )

    @property
    def rate(self) -> float:
        return self.events / self.n

    @property
    def log_mixture(self) -> float:
        """log ∫ q^s (1-q)^(n-s) dBeta(q; 1/2, 1/2)."""
        return lgamma(self.events + 0.5) + lgamma(self.n - self.events + 0.5) - lgamma(self.n + 1) - log(pi)

    def log_likelihood(self, p: float) -> float:
        return _times_log(self.events, p) + _times_log(self.n - self.events, 1 - p)

    def slope(self, p: float) -> float:
        """The derivative of ``log_likelihood``."""
        up = self.events / p if self.events else 0.0
        return up - ((self.n - self.events) / (1 - p) if self.n > self.events else 0.0)


def log_evidence(a: Counter, b: Counter, delta: float) -> float:
    """log E(Δ), the evidence against p_b - p_a = ``delta`` (-1 <= Δ <= 1)."""
    low, high = max(0.0, -delta), min(1.0, 1 - delta)
    for _ in range(
        _STEPS
    ):  # the likelihood is concave in p: its slope has one root, or none and an end is best
        p = (low + high) / 2
        if p in (low, high):
            break
        if a.slope(p) + b.slope(p + delta) > 0:
            low = p
        else:
            high = p
    best = max(a.log_likelihood(p) + b.log_likelihood(p + delta) for p in (low, (low + high) / 2, high))
    return a.log_mixture + b.log_mixture - best


def sequential_interval(a: Counter, b: Counter, confidence: float = 0.95) -> Interval:
    """B's rate less A's, with an interval that holds the truth at all looks together with ``confidence``."""
    limit, estimate = -log(1 - confidence), b.rate - a.rate
    ends = []
    for end in (-1.0, 1.0):
        inside, outside = estimate, end  # E(Δ) is convex with its least value, at most 1, at the estimate
        for _ in range(_STEPS):
            middle = (inside + outside) / 2
            if log_evidence(a, b, middle) < limit:
                inside = middle
            else:
                outside = middle
        ends.append(outside)
    return Interval(estimate, ends[0], ends[1], a.n + b.n, "mixture", confidence)


def sequential_p(a: Counter, b: Counter) -> float:
    """p of equal rates, valid at whatever look: at most 1/E(0)."""
    return min(1.0, exp(-log_evidence(a, b, 0.0)))


def _times_log(count: int, p: float) -> float:
    if not count:
        return 0.0
    return count * log(p) if p > 0 else -inf
