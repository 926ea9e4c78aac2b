"""Paired right and wrong answers: McNemar's test, exact and mid-p, and Tango's interval for the difference.

Of n questions both models answered, only those that flipped tell them apart: ``lost`` went from right to wrong and
``gained`` from wrong to right. Without a difference each flip is a fair coin, X ~ Binomial(lost + gained, 1/2):

    exact p = 2 · P(X <= min(lost, gained)), at most 1        never false more often than it says
    mid-p   = exact p - P(X = min(lost, gained))              nearer to what it says, may be false a little more often
            = 1 - P(X = lost)/2 where both are equal          (Fagerland, Lydersen and Laake 2013)

The interval for d = (gained - lost)/n holds every Δ that the score test does not reject (Tango, Statistics in
Medicine 17, 1998, 891-908), with q the likelihood's best share of lost answers under Δ:

    |gained - lost - nΔ| <= z √(n (2q + Δ(1 - Δ)))
    2n q² - (lost + gained + (gained - lost - 2n) Δ) q - lost · Δ(1 - Δ) = 0      (the larger root)

Unlike a bootstrap it does not shrink to a point where no answer flipped: then it is ±z²/(n + z²).
"""

from __future__ import annotations

from math import exp, lgamma, log, sqrt

from narrowcast.errors import UsageError
from narrowcast.statistics.bootstrap import Interval
from narrowcast.statistics.quantiles import normal_quantile

_EXACT = 20_000  # flips up to which whole numbers are summed; beyond, logarithms


def exact_p(lost: int, gained: int) -> float:
    """Two-sided exact p of McNemar's test; 1 without a flip."""
    below, at = _tail(lost, gained)
    return min(1.0, 2 * (below + at))


def mid_p(lost: int, gained: int) -> float:
    """Two-sided mid-p of McNemar's test; 1 without a flip."""
    below, at = _tail(lost, gained)
    if lost == gained:  # both tails begin at the same count
        return 1 - at / 2 if lost else 1.0
    return 2 * below + at


def _tail(lost: int, gained: int) -> tuple[float, float]:
    """P(X < k) and P(X = k) for k the smaller of both and X ~ Binomial(lost + gained, 1/2)."""
    if lost < 0 or gained < 0:
        raise UsageError("a count of flips is negative", got=f"{lost} and {gained}")
    n, k = lost + gained, min(lost, gained)
    if n > _EXACT:
        return _tail_of_logarithms(n, k)
    term, below = 1, 0  # C(n, i), and the sum of those before it
    for i in range(k):
        below += term
        term = term * (n - i) // (i + 1)
    return below / (1 << n), term / (1 << n)


def _tail_of_logarithms(n: int, k: int) -> tuple[float, float]:
    """The same from the largest term down: C(n, i-1)/C(n, i) = i/(n-i+1); lgamma is good to some 1e-16 · n log n."""
    at = exp(lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) - n * log(2))
    below, ratio = 0.0, 1.0
    for i in range(k, 0, -1):
        ratio *= i / (n - i + 1)
        below += ratio
        if ratio < 1e-17 * below:
            break
    return at * below, at


def score_interval(lost: int, gained: int, n: int, confidence: float = 0.95) -> Interval:
    """(gained - lost)/n with Tango's score interval. Raises UsageError for more flips than questions."""
    if lost < 0 or gained < 0 or n < 1 or lost + gained > n:
        raise UsageError("flips and questions do not fit", got=f"{lost} + {gained} flips of {n}")
    estimate, z = (gained - lost) / n, normal_quantile((1 + confidence) / 2)
    low = _edge(lost, gained, n, z, estimate, -1.0)
    high = _edge(lost, gained, n, z, estimate, 1.0)
    return Interval(estimate, low, high, n, "score", confidence)


def _edge(lost: int, gained: int, n: int, z: float, inside: float, outside: float) -> float:
    """The last Δ on the way from ``inside`` to ``outside`` that the score test does not reject."""
    for _ in range(60):
        delta = (inside + outside) / 2
        if _rejected(lost, gained, n, z, delta):
            outside = delta
        else:
            inside = delta
    return inside


def _rejected(lost: int, gained: int, n: int, z: float, delta: float) -> bool:
    linear = lost + gained + (gained - lost - 2 * n) * delta
    constant = lost * delta * (1 - delta)
    q = (linear + sqrt(max(0.0, linear * linear + 8 * n * constant))) / (4 * n)
    variance = max(0.0, n * (2 * q + delta * (1 - delta)))
    return (gained - lost - n * delta) ** 2 > z * z * variance
