"""The definition of quantizing, in numpy: every faster kernel is bitwise equal to this one.

    amax → outer scale → stored inner scale → y = x / (inner · outer) → clamp → nearest even → code

Codes are always made with the scale as stored, never with the number it was rounded from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.numbers.codec import encode, round_values
from narrowcast.numbers.formats import E2M3, FP32, Format, Kind
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import (
    check_finite,
    element_divisor,
    inner_scale,
    load_scale,
    outer_scale,
    quotient,
    reciprocal,
    reduce_tiles,
    spread,
    store_scale,
    tile_scale,
)
from narrowcast.tensors.schemes import Scheme

F32 = NDArray[np.float32]


def tensor_amax(x: F32) -> F32:
    """max |x| over the last two axes, shape [..., 1, 1]."""
    amax: F32 = np.abs(x).max(axis=(-2, -1), keepdims=True)
    return amax


def quantize(
    x: F32, scheme: Scheme, *, outer: F32 | None = None, source: Format = FP32, where: str = "tensor"
) -> QTensor:
    """Quantize float32 x [..., N, K]. ``outer`` is the stored outer scale (or, for a per-tensor scheme, its only
    scale) when fused siblings share one. ``source`` is the dtype that x was widened from; it matters only to
    arithmetics that compute in it. Raises NonFiniteError naming ``where``."""
    if x.ndim < 2:
        raise UsageError(
            "quantization works on matrices", where=where, got=f"shape {x.shape}", wanted="[..., N, K]"
        )
    if x.size == 0:
        raise UsageError(
            "nothing to quantize", where=where, got=f"shape {x.shape}", wanted="at least one element"
        )
    check_finite(x, where)
    if scheme.outer is not None and outer is None:
        outer = outer_scale(tensor_amax(x), scheme, source)
    elif len(scheme.scales) == 2 and outer is None:  # an outer scale of each token
        outer = outer_scale(reduce_tiles(np.abs(x), scheme.scales[1].tile), scheme, source)
    if scheme.zero is not None:
        return _asymmetric(x, scheme, source)
    if len(scheme.scales) == 1 and outer is not None:
        stored = store_scale(outer, scheme.inner.format)
        divisor = load_scale(stored, scheme.inner.format)
        levels: tuple[NDArray[Any], ...] = (stored,)
    else:
        stored = inner_scale(reduce_tiles(np.abs(x), scheme.inner.tile), scheme, outer, source)
        divisor = element_divisor(stored, scheme, outer)
        levels = (stored,) if outer is None else (stored, outer)
    if scheme.arithmetic.operation == "inverse":
        factor = inverse_scale(reduce_tiles(np.abs(x), scheme.inner.tile), scheme)
        y = x * spread(factor, scheme.inner.tile, x.shape)
    else:
        y = divide(x, spread(divisor, scheme.inner.tile, x.shape), scheme, source)
    if scheme.arithmetic.precision == "source" and scheme.element is not E2M3:
        y = y + 0.0  # the peer adds a zero point of 0 or multiplies by sign(x): minus zero becomes zero
    return QTensor(scheme, encode(y, scheme.element).codes, levels)


def inverse_scale(amax: F32, scheme: Scheme) -> F32:
    """span / amax in fp32, what the arithmetic "inverse" multiplies by; 0 where a tile is empty."""
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.float32(scheme.span) / amax
    return np.where(amax == 0, np.float32(0), factor)


def divide(x: F32, divisor: F32, scheme: Scheme, source: Format) -> NDArray[Any]:
    """x / divisor in the scheme's arithmetic; the quotient of two float32 rounds once."""
    arithmetic = scheme.arithmetic
    if arithmetic.precision == "fp64":
        return x.astype(np.float64) / divisor
    if arithmetic.operation == "reciprocal":
        return x * reciprocal(divisor)
    if arithmetic.precision == "source" and len(scheme.scales) == 1:
        return round_values(x.astype(np.float64) / divisor, source)
    return x / divisor


def _asymmetric(x: F32, scheme: Scheme, source: Format) -> QTensor:
    """Unsigned integers with a zero point: s = (max - min) / span, z = round(-min / s), q = round(x / s + z)."""
    assert scheme.zero is not None
    assert scheme.element.kind is Kind.INT
    level = scheme.inner
    high = np.maximum(reduce_tiles(x, level.tile, np.maximum), 0)
    low = np.minimum(reduce_tiles(x, level.tile, np.minimum), 0)
    if scheme.arithmetic.precision == "source":
        extent = quotient(
            round_values(high.astype(np.float64) - low, source), scheme.span, scheme.arithmetic, source
        )
    else:
        # Halves, since the extent itself overflows fp32 in a tile that holds both -3e38 and 3e38.
        extent = quotient(high / 2 - low / 2, scheme.span / 2, scheme.arithmetic, source)
    empty, top = (high == 0) & (low == 0), scheme.element.max
    stored = tile_scale(extent, empty, level, scheme.arithmetic, source)
    scale = load_scale(stored, level.format)
    zero = np.clip(
        np.rint(_offset(divide(-low, scale, scheme, source), np.zeros_like(scale), scheme, source)), 0, top
    )
    zero = np.where(empty, (top + 1) // 2, zero).astype(np.float32)
    scale_at, zero_at = spread(scale, level.tile, x.shape), spread(zero, level.tile, x.shape)
    y = divide(x, scale_at, scheme, source)
    if scheme.arithmetic.order == "round_first":
        y = np.rint(y)
    codes = encode(_offset(y, zero_at, scheme, source), scheme.element).codes
    return QTensor(scheme, codes, (stored,), zero.astype(np.uint8))


def _offset(y: NDArray[Any], zero: F32, scheme: Scheme, source: Format) -> NDArray[Any]:
    """y + zero; peers that compute in the source's dtype do so around the signed zero point, then shift."""
    if scheme.arithmetic.precision != "source":
        return y + zero
    half = (scheme.element.max + 1) / 2
    return round_values(y + (zero - half), source) + half
