"""Quantiles beside scipy's."""

from __future__ import annotations

import pytest
from scipy import stats

from narrowcast.statistics.quantiles import normal_quantile, t_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 10, 50, 199, 200, 201, 1000, 10**6])
def test_t(freedom: int) -> None:
    for share in (0.5, 0.6, 0.9, 0.975, 0.999, 0.02):
        assert t_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-9, abs=1e-12)


def test_normal() -> None:
    for share in (0.001, 0.5, 0.975):
        assert normal_quantile(share) == pytest.approx(stats.norm.ppf(share), rel=1e-12, abs=1e-15)
    assert normal_quantile(0) == -normal_quantile(1) == -float("inf")
