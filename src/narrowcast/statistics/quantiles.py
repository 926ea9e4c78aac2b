"""Quantiles of the normal and of Student's t distribution.

The t distribution with an integer number of degrees of freedom ν has a finite sum as its distribution function
(Abramowitz and Stegun 26.7.3 and 26.7.4, with θ = arctan(t/√ν)), which is monotone in θ and inverted by
bisection. From ν = 200 on the expansion 26.7.5 in powers of 1/ν is exact to 1e-10.
"""

from __future__ import annotations

from math import cos, inf, pi, sin, sqrt, tan
from statistics import NormalDist

NORMAL = NormalDist()
_MANY = 200


def normal_quantile(share: float) -> float:
    """z with P(Z <= z) = ``share``; ``-inf`` and ``inf`` at 0 and 1."""
    if share <= 0 or share >= 1:
        return inf if share >= 1 else -inf
    return NORMAL.inv_cdf(share)


def t_quantile(share: float, freedom: int) -> float:
    """t with P(T <= t) = ``share`` (0 < share < 1) for ``freedom`` >= 1 degrees of freedom."""
    if share < 0.5:
        return -t_quantile(1 - share, freedom)
    if freedom >= _MANY:
        return _expanded(normal_quantile(share), freedom)
    inside, low, high = 2 * share - 1, 0.0, pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _between(middle, freedom) < inside else (low, middle)
    return tan((low + high) / 2) * sqrt(freedom)


def _between(angle: float, freedom: int) -> float:
    """P(|T| <= √ν tan θ)."""
    total = term = cos(angle) if freedom % 2 else 1.0
    for k in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= cos(angle) ** 2 * (k - 1) / k
        total += term
    if freedom % 2 == 0:
        return sin(angle) * total
    return 2 / pi * (angle + (sin(angle) * total if freedom > 1 else 0.0))


def _expanded(z: float, freedom: int) -> float:
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** (power + 1) for power, term in enumerate(terms))
