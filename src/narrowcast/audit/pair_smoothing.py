"""Smoothing: rows and columns of a weight that were multiplied on purpose, and who takes the factors back.

    W' ≈ diag(r) W diag(c)        AWQ, SmoothQuant: c_j beside the norm before, 1/c_j in it; r_i likewise in v and up

Weights that were smoothed are far from the parent's, and the model computes the same. Whether it does is seen in
the module before: the norm's weight has the reciprocal of the columns' factors, or the matrix before has it in its
rows. The factors are found by alternating least squares on a sample, one for each row and column.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from narrowcast.jobs.diagnosing import ENOUGH, GAIN, sqnr

F = NDArray[np.floating]
ROUNDS = 4
NEEDED = 16  # rows that a sample must have, so that factors of columns are not fitted to noise
LIMIT = 1.03  # factors of nothing but rounding: within 3 % of 1 in geometric mean
# The matrix whose columns meet the rows of another, and can take their factors back.
_AFTER = (("up_proj", "down_proj"), ("v_proj", "o_proj"), ("w3", "w2"))
# What the columns of a matrix meet: the norm before it, or the matrix whose rows are its columns.
BEFORE = (
    (r"self_attn\.(q|k|v|qkv|q_a|kv_a)_proj(_with_mqa)?$", ("input_layernorm", "ln_1")),
    (r"mlp\.(gate|up|gate_up)_proj$", ("post_attention_layernorm", "pre_feedforward_layernorm", "ln_2")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Smoothing:
    """dB of the sample as it is and without the factors; how far those of columns and of rows are from 1, in
    geometric mean; and the factors of columns, float32 [K]."""

    before: float
    after: float
    columns: float
    rows: float
    factors: NDArray[np.float32]

    @property
    def of_rows(self) -> bool:
        """Whether only rows have factors of their own: those of columns are one and the same."""
        size = np.abs(self.factors[self.factors != 0]).astype(np.float64)
        return not size.size or _spread(size / np.median(size)) < LIMIT


def smoothing(a: F, b: F) -> Smoothing | None:
    """The factors by which b's rows and columns differ from a's, where they explain the difference."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    if len(x) < NEEDED or x.shape != y.shape or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    before = sqnr(x, y)
    rows: F = np.ones((len(x), 1))
    columns: F = np.ones((1, x.shape[1]))
    for _ in range(ROUNDS):
        columns = _fit(x * rows, y, 0)
        rows = _fit(x * columns, y, 1)
    after = sqnr(x * rows * columns, y)
    if before == inf or not after >= max(before + GAIN, ENOUGH):
        return None
    middle = float(np.exp(np.median(np.log(np.abs(rows[rows != 0])))))
    columns, rows = columns * middle, rows / middle
    return Smoothing(before, after, _spread(columns), _spread(rows), columns.ravel().astype(np.float32))


def _fit(x: F, y: F, axis: int) -> F:
    energy = np.square(x).sum(axis, keepdims=True)
    found = (x * y).sum(axis, keepdims=True) / np.where(energy, energy, 1)
    return np.where(energy, found, 1)


def _spread(factors: F) -> float:
    size = np.abs(factors[factors != 0])
    return float(np.exp(np.abs(np.log(size)).mean())) if size.size else 1.0


def norms_before(module: str) -> list[str]:
    """The norms, one of which a matrix's input comes from, by name; none where that is not known."""
    for pattern, names in BEFORE:
        match = re.search(pattern, module)
        if match is not None:
            return [f"{module[: match.start()]}{name}.weight" for name in names]
    return []


def matrix_after(module: str) -> str | None:
    """The matrix whose columns are the rows of this one, by name."""
    stem, _, leaf = module.rpartition(".")
    return next((f"{stem}.{after}" for before, after in _AFTER if leaf == before), None)
