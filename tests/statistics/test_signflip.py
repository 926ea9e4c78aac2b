"""The sign-flip test beside McNemar's and scipy's permutation test."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from scipy import stats

from narrowcast.statistics.mcnemar import exact_p
from narrowcast.statistics.signflip import ALL, DRAWN, sign_flip_p


@pytest.mark.parametrize(("lost", "gained"), [(12, 4), (0, 1), (8, 8), (3, 0)])
def test_right_and_wrong_is_mcnemar(lost: int, gained: int) -> None:
    d = np.r_[-np.ones(lost), np.ones(gained), np.zeros(50)]
    assert sign_flip_p(d) == pytest.approx(exact_p(lost, gained), rel=1e-12)


def test_beside_scipy() -> None:
    d = np.random.default_rng(2).normal(0.4, 1, 10)
    theirs = stats.permutation_test(
        (d,), lambda x, axis: x.sum(axis), permutation_type="samples", vectorized=True, n_resamples=np.inf
    )
    assert sign_flip_p(d) == pytest.approx(theirs.pvalue, rel=1e-12)


@pytest.mark.parametrize(("lost", "gained"), [(60, 20), (30, 28), (14, 6)])
def test_drawn_signs(lost: int, gained: int) -> None:
    """More units than are enumerated: within five standard deviations of the truth, and never 0."""
    assert lost + gained > ALL
    p, truth = sign_flip_p(np.r_[-np.ones(lost), np.ones(gained)]), exact_p(lost, gained)
    assert abs(p - truth) <= 5 * sqrt(truth * (1 - truth) / DRAWN) + 1 / (1 + DRAWN)
    assert p >= 1 / (1 + DRAWN)


def test_order_and_rounding_do_not_matter() -> None:
    """0.1 + 0.2 + 0.3 in another order is another double; an assignment as far out as the seen one has to count."""
    d = np.array([0.1, 0.2, 0.3, -0.7, 0.6, 0.1])
    assert {sign_flip_p(np.roll(d, k)) for k in range(6)} == {sign_flip_p(d)}
    assert sign_flip_p(np.zeros(9)) == 1
    assert sign_flip_p([0.25]) == 1
