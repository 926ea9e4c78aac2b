"""The sign-flip test: whether the paired differences of independent units lean to one side.

If the two models are alike, a unit's difference (of a question, or summed over a cluster of questions) is as likely
its negative. The p-value is the share of the 2^m assignments of signs whose sum is at least as far from zero as the
sum that was seen; units without a difference do not count. For single questions scored 0 or 1 this is McNemar's exact
test. Up to ``ALL`` units every assignment is looked at; beyond, ``DRAWN`` are drawn, and p = (1 + hits)/(1 + drawn),
which is valid as it stands (Phipson and Smyth 2010, arXiv 1603.05766).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

ALL = 16
DRAWN = 19_999
_AT_ONCE = 1 << 22


def sign_flip_p(differences: ArrayLike) -> float:
    """Two-sided p of finite ``differences`` [units]; 1 where none differs. The same input gives the same p."""
    units = np.asarray(differences, np.float64)
    units = units[units != 0]
    if not units.size:
        return 1.0
    # sums of the same numbers in another order differ by rounding, of at most m ε Σ|d|
    slack = len(units) * float(np.finfo(np.float64).eps) * float(np.abs(units).sum())
    seen = abs(float(units.sum())) - slack
    if len(units) <= ALL:
        signs = (np.arange(1 << len(units))[:, None] >> np.arange(len(units)) & 1) * 2.0 - 1
        return float(np.mean(np.abs(signs @ units) >= seen))
    rng, hits, step = np.random.default_rng(0), 0, max(1, _AT_ONCE // len(units))
    for start in range(0, DRAWN, step):
        rows = min(step, DRAWN - start)
        hits += int(np.count_nonzero(np.abs(_flipped(units, rows, rng)) >= seen))
    return (1 + hits) / (1 + DRAWN)


def _flipped(units: NDArray[np.float64], rows: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Sums [rows] of the units under random signs: twice those with a plus less all."""
    chosen = rng.integers(0, 2, (rows, len(units)), dtype=np.int8)
    return np.asarray(2 * (chosen @ units) - units.sum(), np.float64)
