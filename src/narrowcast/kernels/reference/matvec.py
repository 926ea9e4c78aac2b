"""The definition of a matrix-vector product that reads packed codes: one to eight wide rows times a coded weight.

    y[m, n] = (Σ_k x[m, k] · ŵ[n, k]) · factor[n]

What a row shares is its ``factor``: the scale of its channel or tensor, or the outer scale above finer ones. ŵ is the
rest, (element - zero) · scale of its group, rounded once; mostly it is exact (INT4 times bf16, E2M1 times E4M3).

An E4M3 code enters as 2^-8 of its value, and 2^8 is in the factor: its fields, one place further up, are an fp16.

The sum has an order, so that vector units of any width give the same bits. Lane l of ``LANES`` sums the columns with
k mod LANES = l, in rising order, each by one fused multiply-add in fp32, from +0; K is filled up with zeros to whole
blocks. Then halves of the lanes are added until one is left, a sum of -0 becomes +0, and the factor comes last:

    lane[l] ← fma(x[k], ŵ[n, k], lane[l])        s ← s[:half] + s[half:]        y = (s + 0) · factor[n]

A term is rounded at most K / LANES + log2 LANES + 2 times, far fewer than in a serial sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.kernels import Rows
from narrowcast.numbers.codec import decode, widen
from narrowcast.numbers.formats import BF16, E4M3FN
from narrowcast.tensors.packing import Packing, unpack
from narrowcast.tensors.scaling import load_scale, spread
from narrowcast.tensors.schemes import Scheme

F32 = NDArray[np.float32]
LANES = 64


def matvec(
    x: F32, rows: Rows, scheme: Scheme, packing: Packing, outer: float | None = None
) -> NDArray[np.float32]:
    """x float32 [M, K] times the weight [N, K] of ``rows``, as float32 [M, N]. UsageError where K does not fit."""
    m, k = x.shape
    weight, factor = decoded(rows, scheme, packing, k, outer)
    width = -(-k // LANES) * LANES
    wide_x, wide_w = (np.zeros((len(a), width), np.float32) for a in (x, weight))
    wide_x[:, :k], wide_w[:, :k] = x, weight
    sums = np.zeros((m, len(weight), LANES), np.float32)
    for j in range(0, width, LANES):
        sums = fused(wide_x[:, None, j : j + LANES], wide_w[None, :, j : j + LANES], sums)
    with np.errstate(over="ignore", invalid="ignore"):
        while sums.shape[-1] > 1:
            half = sums.shape[-1] // 2
            sums = sums[..., :half] + sums[..., half:]
        y: F32 = (sums[..., 0] + np.float32(0)) * factor
    return y


def decoded(
    rows: Rows, scheme: Scheme, packing: Packing, k: int, outer: float | None = None
) -> tuple[F32, F32]:
    """ŵ float32 [N, K] and factor float32 [N]."""
    n = len(rows.packed)
    if rows.packed.shape[1] != packing.row_bytes(k):
        raise UsageError(
            "these do not multiply", got=f"{rows.packed.shape[1]} bytes a row", wanted=f"{k} codes"
        )
    elements = decode(unpack(rows.packed, packing, k), scheme.element) / shift(scheme)
    tile = scheme.inner.tile
    if rows.zero is not None and scheme.zero is not None:
        elements = elements - spread(decode(rows.zero, scheme.zero), tile, elements.shape)
    factor = factors(rows, scheme, n, outer)
    if not tile[1]:
        return elements, factor
    return elements * spread(load_scale(rows.scales, scheme.inner.format), tile, elements.shape), factor


def factors(rows: Rows, scheme: Scheme, n: int, outer: float | None) -> F32:
    """What each row's sum is multiplied by, float32 [N]."""
    factor = np.full((n, 1), shift(scheme))
    if len(scheme.scales) == 2:
        assert outer is not None
        factor *= np.float32(1) / np.float32(outer) if scheme.scales[1].divides else np.float32(outer)
    if not scheme.inner.tile[1]:
        factor = factor * spread(load_scale(rows.scales, scheme.inner.format), scheme.inner.tile, (n, 1))
    return factor[:, 0]


def shift(scheme: Scheme) -> np.float32:
    """The power of two that is in the factor instead of the elements."""
    return np.float32(2.0**8 if scheme.element is E4M3FN else 1.0)


def fused(a: Any, b: Any, c: Any) -> NDArray[np.float32]:
    """a · b + c of float32 arrays, rounded once to float32.

    The product is exact in float64. The sum is rounded there to odd (Boldo and Melquiond, Emulation of FMA and
    correctly rounded sums): of the two neighbours of an inexact sum the one whose last bit is set, so that the second
    rounding, to float32, sees on which side of a tie the exact sum lies.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        wide = c.astype(np.float64)
        total = product + wide
        back = total - product
        error = (product - (total - back)) + (wide - back)
        bits = total.view(np.int64)
        even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        bits += even * np.where((error > 0) == (total > 0), 1, -1)
        rounded: NDArray[np.float32] = total.astype(np.float32)
    return rounded


class Matvec:
    """A weight [N, K] to multiply with, by the definition."""

    def __init__(self, rows: Rows, scheme: Scheme, packing: Packing, outer: float | None) -> None:
        self._weight = (rows, scheme, packing, outer)

    def product(self, x: NDArray[Any]) -> F32:
        """x [M, K], float32 or bf16 as uint16, times the weight: float32 [M, N]."""
        return matvec(widen(x, BF16) if x.dtype == np.uint16 else x, *self._weight)
