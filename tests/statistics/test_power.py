"""What can be seen: the tables of minimum detectable changes and sizes, and power by simulation."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from scipy import stats

from narrowcast.statistics.mcnemar import exact_p
from narrowcast.statistics.power import detectable, detectable_mean, mean_needed, questions_needed

TABLE = {
    1319: (1.09, 1.72, 2.43),
    12032: (0.36, 0.57, 0.81),
    14042: (0.33, 0.53, 0.75),
    541: (1.69, 2.67, 3.78),
    500: (1.76, 2.78, 3.93),
    198: (2.76, 4.37, 6.17),
}


@pytest.mark.parametrize("n", TABLE)
def test_detectable(n: int) -> None:
    assert tuple(round(100 * detectable(n, flips), 2) for flips in (0.02, 0.05, 0.1)) == TABLE[n]


@pytest.mark.parametrize(
    ("effect", "needed"),
    [(0.005, (6271, 15690, 31388)), (0.01, (1562, 3917, 7841)), (0.03, (None, None, 865))],
)
def test_needed(effect: float, needed: tuple[int | None, ...]) -> None:
    """The design's table rounds to the nearest question; a number of questions is rounded up."""
    for flips, n in zip((0.02, 0.05, 0.1), needed, strict=True):
        if n is not None:
            assert questions_needed(effect, flips) in (n, n + 1)


def test_each_is_the_others_inverse() -> None:
    n = questions_needed(0.01, 0.05)
    assert detectable(n, 0.05) <= 0.01 < detectable(n - 1, 0.05)
    assert questions_needed(0.01, 0.05, design=3) == pytest.approx(3 * n, abs=3)
    assert detectable_mean(sqrt(0.2 / mean_needed(0.03, 0.2))) == pytest.approx(0.03, rel=1e-3)


def test_power() -> None:
    """1319 questions of which 5 % flip: a change of 1.72 points is significant in about 80 % of runs. The formula is
    the normal one and the test exact, hence conservative: 77 % here, and the simulation scatters by 1.3 %."""
    rng, n, flips = np.random.default_rng(5), 1319, 0.05
    change, runs = detectable(n, flips), 1000
    lost, gained, _ = rng.multinomial(n, ((flips + change) / 2, (flips - change) / 2, 1 - flips), runs).T
    seen = sum(exact_p(int(x), int(y)) <= 0.05 for x, y in zip(lost, gained, strict=True))
    assert stats.binom.ppf(1e-4, runs, 0.75) <= seen <= stats.binom.ppf(1 - 1e-4, runs, 0.82)
