"""Wilson's and Newcombe's intervals, Holm's p-values, pass@k."""

from __future__ import annotations

from itertools import combinations

import pytest
from scipy import stats

from narrowcast.errors import UsageError
from narrowcast.statistics.proportions import holm, pass_at_k, unpaired_interval, wilson


@pytest.mark.parametrize(("events", "n"), [(0, 10), (3, 10), (80, 100), (1055, 1319), (7, 7)])
def test_wilson_beside_scipy(events: int, n: int) -> None:
    theirs = stats.binomtest(events, n).proportion_ci(method="wilson")
    assert wilson(events, n) == pytest.approx((theirs.low, theirs.high), rel=1e-9, abs=1e-12)


def test_newcombe_published_example() -> None:
    """56 of 70 against 48 of 80 in Newcombe's table II, method 10."""
    found = unpaired_interval(48, 80, 56, 70)
    assert (round(found.low, 4), round(found.high, 4)) == (0.0524, 0.3339)


@pytest.mark.parametrize(("n", "half"), [(100, 11.1), (198, 7.9), (1319, 3.1)])
def test_half_widths_at_eighty_percent(n: int, half: float) -> None:
    """The design's values are of the plain normal interval; the score interval is within 0.1 points of them."""
    found = unpaired_interval(round(0.8 * n), n, round(0.8 * n), n)
    assert 100 * (found.high - found.low) / 2 == pytest.approx(half, abs=0.1)


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1, 1]


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 2), (8, 7), (10, 3)])
def test_pass_at_k_by_all_draws(n: int, c: int) -> None:
    results = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        draws = list(combinations(results, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), rel=1e-12, abs=1e-15)


def test_refuses() -> None:
    with pytest.raises(UsageError):
        pass_at_k(4, 1, 5)
    with pytest.raises(UsageError):
        unpaired_interval(5, 4, 1, 4)
