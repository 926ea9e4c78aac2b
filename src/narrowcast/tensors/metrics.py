"""What a quantization cost: signal, noise, and what kind of noise.

    SQNR = 10 · log10(Σ x² / Σ (x - x̂)²) dB

Errors are told apart by their cause. *Clipping*: |x / s| rounds beyond the element's range. Everything else has
a bound, half the local step of the element format times the scale, plus what fp32 adds,

    |x - x̂| ≤ s · step(code) / 2 + 2^-22 · |x|

because the quotient, the product, the difference and the scale's own product each round once by at most 2^-24
relative. Within it, *underflow* is a nonzero x that became zero and *rounding* is the rest. What is neither
clipped nor within the bound cannot come from the format, a large x that became zero included.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from math import inf, log10
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import Format, Kind
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import element_divisor, load_scale, reduce_tiles, spread

F32 = NDArray[np.float32]
FP32_SLACK = 2.0**-22


@dataclass(frozen=True)
class Errors:
    """Sums over elements, so that chunks add: energies in x's units squared, counts in elements.

    ``beyond``: elements outside the rounding bound that were not clipped.
    """

    elements: int = 0
    signal: float = 0.0
    noise: float = 0.0
    clipped: int = 0
    underflowed: int = 0
    beyond: int = 0

    def __add__(self, other: Errors) -> Errors:
        return Errors(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise in dB; infinite when nothing was lost, minus infinity when all was."""
        if self.noise == 0:
            return inf
        return 10 * log10(self.signal / self.noise) if self.signal and self.noise < inf else -inf


@dataclass(frozen=True)
class ErrorReport:
    """One tensor under one scheme, for people: every number that tells formats and rules apart."""

    errors: Errors
    relative_mse: float
    max_relative_error: float
    mean_relative_error: float
    max_error: float
    saturated: int
    codes_used: float
    blocks_lost: float
    noise_from_clipping: float
    noise_from_underflow: float
    noise_from_rounding: float

    @property
    def sqnr(self) -> float:
        return self.errors.sqnr


@cache
def half_steps(fmt: Format) -> F32:
    """Half the distance from each code's value to its farther neighbour within reach of nearest rounding."""
    table = decode_table(fmt)
    if fmt.kind is Kind.TABLE:
        ordered = np.sort(table)
        gaps = np.diff(ordered)
        widest = np.maximum(np.r_[gaps, 0], np.r_[0, gaps])
        return np.asarray(widest[np.searchsorted(ordered, table)] / 2, np.float32)
    steps = [fmt.spacing(float(v)) if np.isfinite(v) else 0.0 for v in table]
    return np.asarray(np.array(steps) / 2, np.float32)


def classify(
    x: F32, q: QTensor, decoded: F32
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks of clipped, underflowed and beyond-the-bound elements of x under q."""
    element = q.scheme.element
    outer = q.scale_values(1) if len(q.scales) == 2 else None
    scale = element_divisor(q.scales[0], q.scheme, outer)
    tile, shape = q.scheme.inner.tile, q.shape
    half = half_steps(element)
    # Everything is compared in float64, so that the bound is tested and not the test's own rounding.
    s = spread(scale, tile, shape).astype(np.float64)
    low, high = element.min, element.max
    zero: Any = 0.0
    if q.zero is not None and q.scheme.zero is not None:
        zero = spread(load_scale(q.zero, q.scheme.zero), tile, shape).astype(np.float64)
    x64 = x.astype(np.float64)
    slack = FP32_SLACK * np.abs(x64)
    above, below = (high - zero + half[element.max_code]) * s, (low - zero - half[element.max_code]) * s
    above, below = (
        np.where(s < 0, below, above),
        np.where(s < 0, above, below),
    )  # some methods have negative scales
    clipped = (x64 > above + slack) | (x64 < below - slack)
    bound = half[q.codes] * np.abs(s) + slack
    if q.zero is not None:
        bound = bound + FP32_SLACK * np.abs(zero) * np.abs(s)  # the zero point is added in fp32 as well
    within = np.abs(x64 - decoded) <= bound  # false for NaN, which is beyond every bound
    return clipped, (decoded == 0) & (x != 0) & within & ~clipped, ~within & ~clipped


def errors(x: F32, q: QTensor, decoded: F32) -> Errors:
    """The additive sums for x [..., N, K] float32 against its exact decode."""
    clipped, underflowed, beyond = classify(x, q, decoded)
    difference = x.astype(np.float64) - decoded
    signal = float(np.square(x, dtype=np.float64).sum())
    noise = float(np.square(difference).sum())
    return Errors(x.size, signal, noise, int(clipped.sum()), int(underflowed.sum()), int(beyond.sum()))


def error_report(x: F32, q: QTensor) -> ErrorReport:
    """Compare float32 x with its quantization. Relative errors are over nonzero elements of x."""
    decoded = q.dequantize()
    total = errors(x, q, decoded)
    clipped, underflowed, _ = classify(x, q, decoded)
    difference = x.astype(np.float64) - decoded
    power = np.square(difference)
    nonzero = x != 0
    relative = np.abs(difference[nonzero] / x[nonzero].astype(np.float64))
    signal = total.signal or 1.0
    element, table = q.scheme.element, decode_table(q.scheme.element)
    tile = q.scheme.inner.tile
    had = reduce_tiles(np.abs(x), tile) > 0
    lost = had & (reduce_tiles(np.abs(decoded), tile) == 0)
    return ErrorReport(
        errors=total,
        relative_mse=total.noise / signal,
        max_relative_error=float(relative.max(initial=0.0)),
        mean_relative_error=float(relative.mean()) if relative.size else 0.0,
        max_error=float(np.abs(difference).max(initial=0.0)),
        saturated=int(((table == element.max) | (table == element.min))[q.codes].sum()),
        codes_used=len(np.unique(q.codes)) / (1 << element.bits),
        blocks_lost=float(lost.sum() / had.sum()) if had.any() else 0.0,
        noise_from_clipping=float(power[clipped].sum()) / signal,
        noise_from_underflow=float(power[underflowed].sum()) / signal,
        noise_from_rounding=float(power[~clipped & ~underflowed].sum()) / signal,
    )
