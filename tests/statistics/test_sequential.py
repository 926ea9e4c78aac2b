"""Counters that are watched: the chance that the truth is ever left out, counted exactly, and by simulation."""

from __future__ import annotations

from functools import cache
from math import comb, exp, log

import numpy as np
import pytest
from scipy import optimize, stats

from narrowcast.errors import UsageError
from narrowcast.statistics.proportions import unpaired_interval
from narrowcast.statistics.sequential import Counter, log_evidence, sequential_interval, sequential_p


def ever_missed(p_a: float, p_b: float, looks: int, limit: float) -> float:
    """The exact chance that at one of ``looks`` looks the evidence against the true difference reaches ``limit``, when
    one trial comes to each arm before every look: the paths that have not crossed are carried along, state by state."""
    alive, lost, truth = {(0, 0): 1.0}, 0.0, p_b - p_a
    for n in range(1, looks + 1):
        step: dict[tuple[int, int], float] = {}
        for (a, b), weight in alive.items():
            for x in (0, 1):
                for y in (0, 1):
                    part = weight * (p_a if x else 1 - p_a) * (p_b if y else 1 - p_b)
                    step[a + x, b + y] = step.get((a + x, b + y), 0.0) + part
        alive = {}
        for (a, b), weight in step.items():
            if log_evidence(Counter(a, n), Counter(b, n), truth) >= log(limit):
                lost += weight
            else:
                alive[a, b] = weight
    return lost


@pytest.mark.parametrize(("p_a", "p_b"), [(0.5, 0.5), (0.1, 0.3)])
def test_never_misses_more_often_than_it_says(p_a: float, p_b: float) -> None:
    assert ever_missed(p_a, p_b, 16, 1 / 0.05) <= 0.05
    assert 0 < ever_missed(p_a, p_b, 16, 1 / 0.5) <= 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("p_a", "p_b"), [(0.5, 0.5), (0.05, 0.05), (0.1, 0.3), (0.9, 0.6)])
def test_never_misses_more_often_than_it_says_for_long(p_a: float, p_b: float) -> None:
    assert ever_missed(p_a, p_b, 60, 1 / 0.2) <= 0.2


def missed(runs: int, looks: int, each: int, p: float) -> tuple[int, int]:
    """Runs of two equal arms in which an alarm is raised at some look: by the sequential p, and by the interval that is
    meant for one look. Arms get unequal traffic that depends on what was seen so far."""
    rng, safe, naive = np.random.default_rng(4), 0, 0
    for _ in range(runs):
        events, n = [0, 0], [0, 0]
        alarms = [False, False]
        for _ in range(looks):
            ahead = events[1] * n[0] > events[0] * n[1]
            for arm, size in ((0, each), (1, each // 4 if ahead else each)):
                events[arm] += int(rng.binomial(size, p))
                n[arm] += size
            alarms[0] |= sequential_p(Counter(events[0], n[0]), Counter(events[1], n[1])) <= 0.05
            once = unpaired_interval(events[0], n[0], events[1], n[1])
            alarms[1] |= once.low > 0 or once.high < 0
        safe, naive = safe + alarms[0], naive + alarms[1]
    return safe, naive


def test_watched_while_it_grows() -> None:
    safe, naive = missed(120, 60, 200, 0.02)
    assert safe <= stats.binom.ppf(1 - 1e-4, 120, 0.05)
    assert naive > 3 * 0.05 * 120  # what the other interval does when it is watched


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.004, 0.3])
def test_watched_for_long(p: float) -> None:
    safe, naive = missed(1000, 300, 200, p)
    assert safe <= stats.binom.ppf(1 - 1e-4, 1000, 0.05)
    assert naive > 0.2 * 1000


@pytest.mark.parametrize(("events", "n"), [(0, 1), (3, 10), (412, 98231)])
def test_mixture_beside_scipy(events: int, n: int) -> None:
    """The mixture is the beta-binomial probability of one order of the events."""
    expected = stats.betabinom.logpmf(events, n, 0.5, 0.5)
    expected -= log(comb(n, events))
    assert Counter(events, n).log_mixture == pytest.approx(expected, rel=1e-9)


@cache
def grid_evidence(a: Counter, b: Counter, delta: float) -> float:
    """The same minimum by a search that knows nothing of slopes."""
    low, high = max(0.0, -delta), min(1.0, 1 - delta)
    found = optimize.minimize_scalar(
        lambda p: -(a.log_likelihood(p) + b.log_likelihood(p + delta)), bounds=(low, high), method="bounded",
        options={"xatol": 1e-12},
    )  # fmt: skip
    return a.log_mixture + b.log_mixture + float(found.fun)


@pytest.mark.parametrize(
    ("a", "b"), [((3, 10), (7, 12)), ((412, 98231), (655, 99120)), ((0, 50), (4, 40)), ((9, 9), (8, 9))]
)
def test_interval_is_where_the_evidence_reaches_its_limit(a: tuple[int, int], b: tuple[int, int]) -> None:
    arm_a, arm_b = Counter(*a), Counter(*b)
    found = sequential_interval(arm_a, arm_b)
    for end in (found.low, found.high):
        if abs(end) < 1:
            assert log_evidence(arm_a, arm_b, end) == pytest.approx(log(20), abs=1e-6)
            assert grid_evidence(arm_a, arm_b, end) == pytest.approx(log(20), abs=1e-4)
    p = sequential_p(arm_a, arm_b)
    assert (p <= 0.05) == (found.low > 0 or found.high < 0)
    assert p == pytest.approx(min(1.0, exp(-grid_evidence(arm_a, arm_b, 0.0))), rel=1e-3)
    swapped = sequential_interval(arm_b, arm_a)
    assert (swapped.low, swapped.high) == pytest.approx((-found.high, -found.low), abs=1e-12)


def test_extremes() -> None:
    one = sequential_interval(Counter(0, 1), Counter(1, 1))
    assert one.low < 0 < one.high == 1
    many = sequential_interval(Counter(0, 10**9), Counter(3000, 10**9))
    assert 0 < many.low < 3e-6 < many.high < 4e-6
    same = sequential_interval(Counter(0, 100), Counter(0, 100))
    assert same.low == pytest.approx(-same.high)


@pytest.mark.parametrize("counts", [(5, 4), (-1, 3), (0, 0)])
def test_refuses(counts: tuple[int, int]) -> None:
    with pytest.raises(UsageError):
        Counter(*counts)
