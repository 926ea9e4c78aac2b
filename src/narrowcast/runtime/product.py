"""The product of two matrices as engines form it: exact products, sums in fp32 or int32, one narrowing cast at the end.

    y[m, n] = narrow( (Σ_k x[m, k] · w[n, k]) · s_x[m] · s_w[n] + b[n] )

An ``Operand`` is a matrix of values and what is left to multiply. Where one scale is shared by a whole row (a token,
an output channel, a tensor), the matrix holds decoded codes and the scale folds out of the sum: that is what a scaled
GEMM does. Where scales change along k, the matrix holds codes times scales, rounded to fp32, as
``QTensor.dequantize`` gives them.

**Floats.** The sum runs in BLAS, whose order is its own: it lies within ``kernels.reference.gemm.bound`` of the exact
sum. Where both matrices hold numbers of eight significant bits or fewer that bf16 holds (FP8, FP6, FP4, INT8 codes, MX
and NVFP4 products), a machine with bf16 matrix units computes the same products with them, summed in fp32 (oneDNN's
``fp32_precision = "bf16"``; units that flush subnormal products add 2^-126 a term to the bound). Elsewhere that changes
nothing.

**Integers.** Codes of eight bits are summed in int32, exactly: |Σ| ≤ 2^14·K < 2^31 for K below 2^17. oneDNN's integer
units do it, except where a CPU has none and saturates pairs of products in 16 bits: ``_exact`` finds out by the pairs
that would, and float32 stands in there, on stretches of 1024 columns, whose sums stay below 2^24. With scales that
change along k in groups, every group is one exact sum, and groups add up in fp32; a zero point of an input row comes
off as z · Σ_k w[n, k].

**Outlier columns** that stay wide (LLM.int8) are a second product, added in fp32.

Left out: the partial sums of tensor cores; ``kernels.reference.accumulate`` has them, too slow for whole models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product as pairs
from typing import Any

import torch

FEW_ROWS = 16  # below, fp32 kernels beat the conversion of both matrices to bf16
EXACT_COLUMNS = 1024  # 2^7 · 2^7 · 2^10 = 2^24, the last integer that float32 counts to


@dataclass(frozen=True)
class Columns:
    """Columns of an input that stay as they came: their places [c] and values float32 [rows, c]."""

    places: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Operand:
    """``matrix`` [rows, K], float32 values or int8 codes; ``scale`` float32 [rows, 1] or [1, 1], what every element of
    a row is still to be multiplied by (None: nothing), or of integers [rows, groups], one for every ``group`` columns.
    ``narrow`` says that bf16 holds every element of a float matrix as a normal number. ``zero`` int32 [rows, 1] is
    still to be taken off integer codes, ``outliers`` is still to be added."""

    matrix: torch.Tensor
    scale: torch.Tensor | None = None
    narrow: bool = False
    group: int = 0
    zero: torch.Tensor | None = None
    outliers: Columns | None = None

    @property
    def integer(self) -> bool:
        return self.matrix.dtype == torch.int8

    def values(self) -> torch.Tensor:
        """The matrix in float32, without its scale."""
        return self.matrix if self.matrix.dtype == torch.float32 else self.matrix.float()

    def decoded(self) -> torch.Tensor:
        """Everything multiplied: float32 [rows, K]."""
        values = self.values()
        if self.zero is not None:
            values = values - self.zero
        if self.scale is not None:
            scale = (
                self.scale.repeat_interleave(self.group, 1)[:, : values.shape[1]]
                if self.group
                else self.scale
            )
            values = values * scale
        if self.outliers is not None:
            values = values.index_copy(1, self.outliers.places, self.outliers.values)
        return values


def product(x: Operand, w: Operand) -> torch.Tensor:
    """x · wᵀ as float32 [M, N], scales folded in; nothing is narrowed yet."""
    if w.group and not x.integer:
        w = Operand(w.decoded())
    if x.zero is not None and not w.integer:
        small = (
            int(x.zero.abs().max()) <= 128 if len(x.zero) else True
        )  # then differences are integers up to 256
        x = Operand(x.values() - x.zero, x.scale, small, outliers=x.outliers)
    if x.integer and w.integer:
        sums = _integers(x, w)
    else:
        narrow = (x.narrow or x.integer) and (w.narrow or w.integer)
        with _units(narrow and len(x.matrix) >= FEW_ROWS):
            sums = x.values() @ w.values().T
    if x.scale is not None:
        sums.mul_(x.scale)
    if w.scale is not None and not w.group:
        sums.mul_(w.scale.T)
    return sums if x.outliers is None else sums.add_(_wide(x.outliers, w))


@contextmanager
def _units(bf16: bool) -> Iterator[None]:
    """oneDNN's matrix products with bf16 units, for matrices that lose nothing by it."""
    backend: Any = torch.backends.mkldnn
    backend = backend.matmul
    before = backend.fp32_precision
    if bf16:
        backend.fp32_precision = "bf16"
    try:
        yield
    finally:
        if bf16:
            backend.fp32_precision = before


def _wide(columns: Columns, w: Operand) -> torch.Tensor:
    """The outlier columns' share of the product, with their columns of the weight decoded."""
    chosen = Operand(w.matrix[:, columns.places], w.scale).decoded()
    return columns.values @ chosen.T


def _integers(x: Operand, w: Operand) -> torch.Tensor:
    """The sums of integer codes; those of groups with the scales of the weight's groups."""
    if not w.group:
        return int_sums(x.matrix, w.matrix, x.zero).float()
    assert w.scale is not None
    total = torch.zeros(len(x.matrix), len(w.matrix))
    for g, first in enumerate(range(0, x.matrix.shape[1], w.group)):
        part = slice(first, first + w.group)
        sums = int_sums(x.matrix[:, part].contiguous(), w.matrix[:, part], x.zero)
        total.addcmul_(sums.float(), w.scale[:, g].expand_as(total))
    return total


def int_sums(x: torch.Tensor, w: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    """Σ_k (x[m, k] - zero[m]) · w[n, k] of int8 codes, exact, int32 [M, N], with zero points int64: those of a token
    whose elements are nearly one number are large."""
    # A weight of one column is read across itself by torch 2.13's product, whose result is then none.
    units = _exact() and len(x) > 0 and x.shape[1] > 1
    sums = torch._int_mm(x, w.T) if units else _float_sums(x, w)
    return sums if zero is None else sums.long() - zero.long() * w.sum(1)


def _float_sums(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same sums by float32 products of so few columns that no sum rounds."""
    total = torch.zeros(len(x), len(w), dtype=torch.int32)
    for first in range(0, x.shape[1], EXACT_COLUMNS):
        part = slice(first, first + EXACT_COLUMNS)
        total += (x[:, part].float() @ w[:, part].float().T).int()
    return total


@cache
def _exact() -> bool:
    """Whether integer products here are exact. Units that are not add two products in 16 bits and saturate; saturation
    is monotone, so the largest and smallest pairs show it, and a long sum shows an accumulator of less than 32 bits."""
    ends = torch.tensor(list(pairs((-128, 127), repeat=4)), dtype=torch.int8).repeat(1, 64)
    try:
        found = torch._int_mm(ends, ends.T)
    except RuntimeError:
        return False
    return torch.equal(found, _float_sums(ends, ends))
