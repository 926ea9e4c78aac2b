"""McNemar's test by counting every assignment of flips, beside scipy, and by the values of the design; Tango's interval
by inverting the score test with a likelihood that is maximized numerically."""

from __future__ import annotations

from itertools import product
from math import comb, sqrt

import numpy as np
import pytest
from scipy import optimize, stats

from narrowcast.errors import UsageError
from narrowcast.statistics import mcnemar
from narrowcast.statistics.mcnemar import exact_p, mid_p, score_interval


@pytest.mark.parametrize(("lost", "gained", "p"), [(116, 95, 0.168), (30, 28, 0.896), (12, 4, 0.077)])
def test_known_values(lost: int, gained: int, p: float) -> None:
    assert round(exact_p(lost, gained), 3) == p
    assert exact_p(lost, gained) == exact_p(gained, lost)


def test_sixty_against_twenty() -> None:
    assert f"{exact_p(60, 20):.1e}" == "8.6e-06"


def test_every_assignment_of_few_flips() -> None:
    for n in range(13):
        sums = [sum(signs) for signs in product((-1, 1), repeat=n)]
        for lost in range(n + 1):
            seen = abs(n - 2 * lost)
            beyond, at = sum(abs(s) > seen for s in sums), sum(abs(s) == seen for s in sums)
            assert exact_p(lost, n - lost) == (beyond + at) / 2**n
            # the middle of the step: half of those that are as far out count, on either side
            assert mid_p(lost, n - lost) == pytest.approx((beyond + at / 2) / 2**n if n else 1, rel=1e-15)


@pytest.mark.parametrize(("lost", "gained"), [(1, 0), (3, 17), (450, 610), (5000, 5200), (10100, 9900)])
def test_beside_scipy(lost: int, gained: int) -> None:
    assert exact_p(lost, gained) == pytest.approx(stats.binomtest(lost, lost + gained).pvalue, rel=1e-9)


@pytest.mark.parametrize(("lost", "gained"), [(600_000, 602_500), (30_000, 30_000), (50_000, 40_000)])
def test_many_flips_do_not_overflow(lost: int, gained: int) -> None:
    n = lost + gained
    expected = min(1.0, 2 * stats.binom.cdf(min(lost, gained), n, 0.5))
    assert exact_p(lost, gained) == pytest.approx(expected, rel=1e-7)
    assert mid_p(lost, gained) == pytest.approx(
        min(1.0, 2 * stats.binom.cdf(min(lost, gained), n, 0.5) - stats.binom.pmf(lost, n, 0.5))
        if lost != gained
        else 1 - stats.binom.pmf(lost, n, 0.5) / 2,
        rel=1e-6,
    )


def test_both_ways_to_the_tail_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [(exact_p(k, 900 - k), mid_p(k, 900 - k)) for k in (0, 7, 300, 420, 450)]
    monkeypatch.setattr(mcnemar, "_EXACT", 10)
    found = [(exact_p(k, 900 - k), mid_p(k, 900 - k)) for k in (0, 7, 300, 420, 450)]
    # e^x carries x's absolute error: lgamma(901) is 5227, whose last bits are 1e-12
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-11)


def constrained(lost: int, gained: int, n: int, delta: float) -> float:
    """The share of lost answers that is likeliest when P(gained) - P(lost) = ``delta``."""

    def surprise(q: float) -> float:
        parts = ((lost, q), (gained, q + delta), (n - lost - gained, 1 - 2 * q - delta))
        return (
            -sum(count * np.log(p) for count, p in parts if count) if all(p > 0 for _, p in parts) else np.inf
        )

    low, high = max(0.0, -delta), (1 - delta) / 2
    return float(
        optimize.minimize_scalar(surprise, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
    )


@pytest.mark.parametrize(
    ("lost", "gained", "n"), [(60, 20, 1319), (5, 3, 100), (2, 12, 50), (0, 4, 20), (7, 7, 14)]
)
def test_interval_is_the_inverted_score_test(lost: int, gained: int, n: int) -> None:
    def statistic(delta: float) -> float:
        q = constrained(lost, gained, n, delta)
        return (gained - lost - n * delta) / sqrt(n * (2 * q + delta * (1 - delta)))

    found = score_interval(lost, gained, n)
    assert found.estimate == (gained - lost) / n
    assert statistic(found.low) == pytest.approx(1.959964, abs=1e-4)
    assert statistic(found.high) == pytest.approx(-1.959964, abs=1e-4)
    mirrored = score_interval(gained, lost, n)
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low), abs=1e-12)


def test_no_flips_leave_an_interval() -> None:
    found = score_interval(0, 0, 100)
    assert found.high == -found.low == pytest.approx(1.959964**2 / (100 + 1.959964**2), rel=1e-6)


@pytest.mark.parametrize(("p_lost", "p_gained"), [(0.04, 0.04), (0.1, 0.05), (0.01, 0.03), (0.02, 0.0)])
def test_interval_covers(p_lost: float, p_gained: float) -> None:
    """Over every outcome of 100 questions, each with its probability: no simulation. Score intervals cover 95 % on
    average over truths, and somewhat less at single ones; 92 % is the least that was seen here."""
    n, covered, truth = 100, 0.0, p_gained - p_lost
    for lost in range(41):
        for gained in range(41):
            weight = comb(n, lost) * comb(n - lost, gained) * p_lost**lost * p_gained**gained
            weight *= (1 - p_lost - p_gained) ** (n - lost - gained)
            if weight > 1e-9:
                found = score_interval(lost, gained, n)
                covered += weight * (found.low <= truth <= found.high)
    assert covered >= 0.92


@pytest.mark.parametrize(
    "call", [lambda: exact_p(-1, 2), lambda: score_interval(3, 3, 5), lambda: score_interval(0, 0, 0)]
)
def test_refuses(call: object) -> None:
    with pytest.raises(UsageError):
        call()  # type: ignore[operator]
