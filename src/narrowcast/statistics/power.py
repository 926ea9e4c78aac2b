"""What a comparison of this size can see, and how large one must be to see an effect.

A paired comparison of n questions whose differences have variance σ² shows a change d of the mean with probability
``POWER`` at level α when n = (z_α + z_power)² σ²/d². Right or wrong answers of which a share f flips have
σ² = f - d², so that

    n = (z_α + z_power)² (f - d²)/d²        d = √(f / (n/(z_α + z_power)² + 1))

Questions that share a document tell less: ``design`` is how many times the variance of the mean is larger than that of
as many independent questions (1 without clusters).
"""

from __future__ import annotations

from math import ceil, inf, sqrt

from narrowcast.statistics.quantiles import normal_quantile

POWER = 0.8


def _z2(confidence: float) -> float:
    return (normal_quantile((1 + confidence) / 2) + normal_quantile(POWER)) ** 2


def detectable(n: int, flips: float, confidence: float = 0.95, design: float = 1.0) -> float:
    """The smallest change of accuracy that ``n`` questions show when a share ``flips`` of answers changes."""
    return min(1.0, sqrt(flips / (n / (design * _z2(confidence)) + 1)))


def questions_needed(effect: float, flips: float, confidence: float = 0.95, design: float = 1.0) -> int:
    """How many questions show a change of accuracy of ``effect`` when a share ``flips`` of answers changes.

    A change of ``effect`` flips at least that share, whatever was seen.
    """
    return max(1, ceil(design * _z2(confidence) * (max(flips, effect) - effect**2) / effect**2))


def detectable_mean(error: float, confidence: float = 0.95) -> float:
    """The smallest change of a mean that shows when its standard error is ``error``."""
    return sqrt(_z2(confidence)) * error if error < inf else inf


def mean_needed(effect: float, variance: float, confidence: float = 0.95) -> int:
    """How many units of ``variance`` show a change of their mean of ``effect``."""
    return max(1, ceil(_z2(confidence) * variance / effect**2))
