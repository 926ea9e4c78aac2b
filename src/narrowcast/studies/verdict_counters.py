"""A canary: two counters of production that are looked at while they grow.

    A is what runs now, B the canary;  d = B's rate of success - A's

    worse, better        the interval that holds at all looks together leaves out 0
    no difference shown  it lies within ± effect, where an effect was named
    undecided            anything else

A rate of failures may be 0.4 % or 40 %, so no effect is a sensible default, and without one the absence of a difference
is never shown. See statistics.sequential for the interval and what it assumes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from narrowcast.errors import UsageError
from narrowcast.statistics.bootstrap import Interval
from narrowcast.statistics.power import mean_needed
from narrowcast.statistics.proportions import unpaired_interval
from narrowcast.statistics.sequential import Counter, sequential_interval, sequential_p
from narrowcast.studies.verdict import LEAST, Reading

Kind = Literal["failures", "successes"]


@dataclass(frozen=True)
class Canary:
    """The verdict on two counters. Intervals are of B's rate of what is counted less A's; ``once`` is the one for a
    single look whose time was set beforehand. ``needed`` counts trials in each arm for one such look."""

    reading: Reading
    kind: Kind
    a: Counter
    b: Counter
    interval: Interval
    once: Interval
    p: float
    effect: float | None
    needed: int | None

    def to_json(self) -> dict[str, Any]:
        sides = {
            side: asdict(counter) | {"rate": counter.rate} for side, counter in (("a", self.a), ("b", self.b))
        }
        return {
            "verdict": self.reading.value,
            "exit_code": self.reading.exit_code,
            "counted": self.kind,
            **sides,
            "difference": self.interval.estimate,
            "interval": self.interval.to_json(),
            "single_look": self.once.to_json(),
            "p": self.p,
            "effect": self.effect,
            "needed": self.needed,
        }


def canary(
    a: Counter, b: Counter, kind: Kind = "failures", *, effect: float | None = None, confidence: float = 0.95
) -> Canary:
    """Judge counter ``b`` against ``a``, at whatever moment and however often. Raises UsageError for an effect or a
    confidence that is none."""
    if effect is not None and not LEAST <= effect < 1:
        raise UsageError(
            "an effect is a change of a share",
            got=effect,
            wanted=f"from {LEAST:g} to below 1, 0.001 for 0.1 points",
        )
    if not 0.5 <= confidence < 1:
        raise UsageError("not a confidence", got=confidence, wanted="from 0.5 to below 1, such as 0.95")
    interval = sequential_interval(a, b, confidence)
    up, down = interval.low > 0, interval.high < 0
    reading = Reading.UNDECIDED
    if up or down:
        reading = Reading.WORSE if up == (kind == "failures") else Reading.BETTER
    elif effect is not None and interval.within(effect):
        reading = Reading.NO_DIFFERENCE
    once = unpaired_interval(a.events, a.n, b.events, b.n, confidence)
    # with Laplace's rule for a rate, or a counter without an event would need no trials
    variance = sum(rate * (1 - rate) for rate in ((c.events + 1) / (c.n + 2) for c in (a, b)))
    needed = None if effect is None else mean_needed(effect, variance, confidence)
    return Canary(reading, kind, a, b, interval, once, sequential_p(a, b), effect, needed)
