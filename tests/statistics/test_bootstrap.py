"""Intervals over documents: beside scipy's bootstrap, by hand for few documents, and by how often they cover."""

from __future__ import annotations

from math import inf, sqrt

import numpy as np
import pytest
from scipy import stats

from narrowcast.errors import UsageError
from narrowcast.statistics.bootstrap import FEW, _expanded, by_cluster, ratio_interval, standard_error
from narrowcast.statistics.quantiles import NORMAL


def documents(n: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(50, 500, n).astype(float)
    return counts * rng.lognormal(0, 0.4, n), counts


def test_beside_scipy() -> None:
    """scipy's percentile interval at the level that the expanded tail stands for, on the same ratio."""
    sums, counts = documents(40)
    ours = ratio_interval(sums, counts, resamples=40000)
    tail = NORMAL.cdf(-sqrt(40 / 39) * stats.t.ppf(0.975, 39))
    theirs = stats.bootstrap(
        (sums, counts),
        lambda s, c, axis: s.sum(axis) / c.sum(axis),
        paired=True,
        method="percentile",
        confidence_level=1 - 2 * tail,
        n_resamples=40000,
        rng=np.random.default_rng(7),
    )
    # each end is a quantile of 40000 draws: its rank has a standard deviation of √(R·tail), five of which are allowed,
    # on both sides
    ranks = 2 * 5 * sqrt(40000 * tail) / 40000
    ends = np.sort(theirs.bootstrap_distribution)
    for end, share in ((ours.low, tail), (ours.high, 1 - tail)):
        assert np.quantile(ends, max(0.0, share - ranks)) <= end <= np.quantile(ends, min(1.0, share + ranks))
    assert ours.estimate == sums.sum() / counts.sum()
    assert (ours.units, ours.method) == (40, "bootstrap")


@pytest.mark.parametrize("n", [10, 40])
def test_tails_move_out(n: int) -> None:
    """Of evenly spread resamples an end is its tail's share: Φ(-√(n/(n-1)) t)."""
    tail = stats.norm.cdf(-sqrt(n / (n - 1)) * stats.t.ppf(0.975, n - 1))
    assert _expanded(np.linspace(0, 1, 100_001), n, 0.95) == pytest.approx((tail, 1 - tail), rel=1e-6)


def test_few_documents_get_the_t_interval() -> None:
    values = np.array([0.5, 1.5, 2.5, 3.0, 4.5])
    found = ratio_interval(values, np.ones(5))
    theirs = stats.ttest_1samp(values, 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    assert found.method == "t"
    two = ratio_interval([1.0, 2.0], [1.0, 1.0])
    assert two.high - two.low == pytest.approx(2 * stats.t.ppf(0.975, 1) * 0.5)


def test_no_end_is_where_the_estimate_cannot_be() -> None:
    found = ratio_interval([0.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    assert found.low < 0 < 1 < found.high
    share = found.possible(0.0, 1.0)
    assert (share.estimate, share.low, share.high) == (found.estimate, 0.0, 1.0)
    assert found.possible(-9.0, 9.0) == found
    one = ratio_interval([1.0], [2.0])
    assert one.possible(0.0, 1.0) == one


def test_one_document_says_nothing_of_others() -> None:
    found = ratio_interval([3.0], [2.0])
    assert (found.estimate, found.low, found.high, found.method) == (1.5, -inf, inf, "none")
    assert not found.within(1e9)


def test_the_same_input_gives_the_same_interval_and_no_difference_exactly_zero() -> None:
    sums, counts = documents(30)
    assert ratio_interval(sums, counts) == ratio_interval(sums, counts)
    zero = ratio_interval(np.zeros(30), counts)
    assert (zero.estimate, zero.low, zero.high) == (0, 0, 0)


def test_many_equal_rows_are_drawn_as_a_multinomial() -> None:
    """Of 1319 questions with 60 lost and 20 gained the spread of the mean is known."""
    d = np.r_[-np.ones(60), np.ones(20), np.zeros(1239)]
    found = ratio_interval(d, np.ones(1319), resamples=40000)
    sd = sqrt(80 / 1319 - (40 / 1319) ** 2) / sqrt(1319)
    # an end is a quantile of R draws: its standard deviation is √(tail(1-tail)/R) over the density there
    slack = 5 * sqrt(0.025 * 0.975 / 40000) / (NORMAL.pdf(1.96) / sd) + 1 / 1319
    assert found.low == pytest.approx(-40 / 1319 - 1.96 * sd, abs=slack)
    assert found.high == pytest.approx(-40 / 1319 + 1.96 * sd, abs=slack)


def test_clusters_and_their_standard_error() -> None:
    """Miller's clustered standard error, by its double sum, with the factor for few clusters."""
    rng = np.random.default_rng(3)
    clusters = np.repeat(np.arange(20), 5)
    values = rng.normal(size=100) + np.repeat(rng.normal(size=20), 5)
    sums, counts = by_cluster(values, clusters)
    assert list(counts) == [5.0] * 20
    mean, double = values.mean(), 0.0
    for c in range(20):
        inside = values[clusters == c] - mean
        double += sum(x * y for x in inside for y in inside)
    assert standard_error(sums, counts) == pytest.approx(sqrt(20 / 19 * double) / 100)
    alone = standard_error(values, np.ones(100))
    assert alone == pytest.approx(stats.sem(values))
    assert standard_error(sums, counts) > 1.5 * alone


def coverage(n: int, runs: int, resamples: int) -> int:
    rng, hits = np.random.default_rng(11), 0
    for _ in range(runs):
        counts = rng.integers(100, 600, n).astype(float)
        found = ratio_interval(counts * rng.normal(1, 0.5, n), counts, resamples=resamples)
        hits += found.low <= 1 <= found.high
    return hits


@pytest.mark.parametrize("n", [3, FEW, 20])
def test_covers(n: int) -> None:
    """At least as often as 95 %, less what 300 runs scatter (the chance of a false alarm is 1e-4)."""
    assert coverage(n, 300, 1000) >= stats.binom.ppf(1e-4, 300, 0.94)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 5, FEW, 15, 40])
def test_covers_closely(n: int) -> None:
    hits = coverage(n, 4000, 2000)
    assert stats.binom.ppf(1e-4, 4000, 0.94) <= hits <= stats.binom.ppf(1 - 1e-4, 4000, 0.96)


@pytest.mark.parametrize(
    ("sums", "counts"),
    [([], []), ([1.0], [1.0, 2.0]), ([1.0, np.nan], [1.0, 1.0]), ([1.0], [0.0]), ([1.0, 1.0], [2.0, -1.0])],
)
def test_refuses(sums: list[float], counts: list[float]) -> None:
    with pytest.raises(UsageError):
        ratio_interval(sums, counts)
