"""Matrices of torch quantized and decoded as fast as this machine can, bits as the numpy definition has them.

    quantized(x, scheme, outer) → QTensor       equal to kernels.reference.quantize(x as float32, scheme, outer=outer)
    decoded(q), elements(q) → float32           equal to q.dequantize(), q.elements()

Compiled kernels do it all where a scheme computes in our own arithmetic. For an engine's arithmetic (a floor under the
scales, a reciprocal instead of a division, an outer scale of each token) the amax of every tile is taken here, scales
come from the definition's own functions, which see one number a tile, and the kernels encode what was divided:

    y = x / s,  x · (1 / s)  or  x · (span / amax);     code = encode(y / 1)

What neither can do (tables of values, fp64, zero points under an engine's arithmetic) goes through the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowcast.kernels import Choice, Rows, choose
from narrowcast.kernels.reference import quantize as reference
from narrowcast.numbers.formats import BF16, FP16, FP32, Format
from narrowcast.tensors.packing import BYTES
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import (
    element_divisor,
    inner_scale,
    load_scale,
    outer_scale,
    reciprocal,
    reduce_tiles,
    spread,
    store_scale,
)
from narrowcast.tensors.schemes import Scale, Scheme, Tile, schemes

F32 = NDArray[np.float32]
SOURCES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
SMALL = 1 << 12  # elements that numpy decodes sooner than a kernel is called


@cache
def kernels_of(scheme: Scheme) -> Choice:
    """What quantizes float32 under this scheme."""
    return choose(scheme, FP32, BYTES)


def carried(x: torch.Tensor) -> tuple[NDArray[Any], Format]:
    """A tensor as kernels read it: bf16 patterns as uint16, else float32."""
    plain = x.detach().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(np.uint16), BF16
    return plain.float().numpy(), FP32


def quantized(x: torch.Tensor, scheme: Scheme, outer: float | None = None) -> QTensor:
    """Finite x [M, K] of any float dtype under ``scheme``; ``outer`` is a stored outer scale, or the only one of a
    scheme per tensor. Raises UsageError for what is no matrix or empty."""
    choice = kernels_of(scheme)
    if choice.reason or not x.numel():
        return _above_floor(x, scheme) or _assembled(x, scheme, outer)
    stored, source = carried(x)
    if scheme.outer is not None and outer is None:
        amax = np.full((1, 1), choice.backend.scan(stored, source).amax, np.float32)
        outer = float(outer_scale(amax, scheme)[0, 0])
    rows = choice.backend.quantize(stored, source, scheme, BYTES, outer)
    scales: tuple[NDArray[Any], ...] = (rows.scales,)
    if len(scheme.scales) == 2:
        scales = (rows.scales, np.full((1, 1), outer, np.float32))
    return QTensor(scheme, rows.packed, scales, rows.zero)


def peak(x: torch.Tensor) -> float:
    """max |x|; NaN or infinity where x holds one of them."""
    stored, source = carried(x)
    scan = kernels_of(schemes["fp8_tensor"]).backend.scan(stored, source)
    return float("nan") if scan.nan or scan.inf else scan.amax


def _above_floor(x: torch.Tensor, scheme: Scheme) -> QTensor | None:
    """The quantized matrix where no scale comes to lie below the scheme's floor, which is then as if it had none."""
    free = _without_floor(scheme)
    if free is None or not x.numel() or kernels_of(free).reason:
        return None
    q = quantized(x, free)
    if (q.scales[0] < scheme.inner.floor).any() or (q.scales[0] == 1).any():  # 1 is what an empty tile has
        return None
    return QTensor(scheme, q.codes, q.scales)


@cache
def _without_floor(scheme: Scheme) -> Scheme | None:
    level = scheme.inner
    if len(scheme.scales) > 1 or scheme.outer is not None or not level.floor:
        return None
    return replace(scheme, scales=(replace(level, floor=0.0),))


def _assembled(x: torch.Tensor, scheme: Scheme, outer: float | None) -> QTensor:
    """Scales by the definition from tile maxima, codes by kernels."""
    given = None if outer is None else np.full((1, 1), outer, np.float32)
    wide, source = x.detach().float().contiguous(), SOURCES.get(x.dtype, FP32)
    strange = scheme.zero is not None or scheme.arithmetic.precision == "fp64"
    if not x.numel() or strange or kernels_of(_plain(scheme)).reason:
        return reference.quantize(wide.numpy(), scheme, outer=given, source=source)
    one_scale = len(scheme.scales) == 1 and given is not None and scheme.arithmetic.operation != "inverse"
    amax = np.zeros((1, 1), np.float32) if one_scale else tile_amax(wide, scheme.inner.tile)
    if given is None and (scheme.outer is not None or len(scheme.scales) == 2):
        given = outer_scale(reduce_tiles(amax, scheme.scales[-1].tile), scheme, source)
    levels: tuple[NDArray[Any], ...]
    if len(scheme.scales) == 1 and given is not None:
        levels = (store_scale(given, scheme.inner.format),)
        divisor = load_scale(levels[0], scheme.inner.format)
    else:
        stored = inner_scale(amax, scheme, given, source)
        divisor = element_divisor(stored, scheme, given)
        levels = (stored,) if given is None else (stored, given)
    y = _scaled(wide, amax, divisor, scheme, x.dtype)
    one = _plain(scheme)
    codes = kernels_of(one).backend.quantize(y.numpy(), FP32, one, BYTES, 1.0).packed
    return QTensor(scheme, codes, levels)


def _scaled(wide: torch.Tensor, amax: F32, divisor: F32, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """x / s in the scheme's arithmetic, float32."""
    arithmetic, tile = scheme.arithmetic, scheme.inner.tile
    if arithmetic.operation == "inverse":
        return _by_tile(torch.mul, wide, reference.inverse_scale(amax, scheme), tile)
    if arithmetic.operation == "reciprocal":
        return _by_tile(torch.mul, wide, reciprocal(divisor), tile)
    y = _by_tile(torch.div, wide, divisor, tile)
    if arithmetic.precision == "source" and len(scheme.scales) == 1:
        return y.to(dtype).float()  # 24 bits are enough that rounding twice is rounding once
    return y


def _by_tile(what: Callable[..., torch.Tensor], wide: torch.Tensor, scales: F32, tile: Tile) -> torch.Tensor:
    """``what`` of every element and its tile's scale."""
    (n, k), (rows, cols) = wide.shape, tile
    if rows == 1 and cols and k % cols == 0:
        at = torch.from_numpy(np.ascontiguousarray(scales))[:, :, None]
        return what(wide.view(n, -1, cols), at).view(n, k)
    return what(wide, torch.from_numpy(np.ascontiguousarray(spread(scales, tile, (n, k)))))


def tile_amax(wide: torch.Tensor, tile: Tile) -> F32:
    """max |x| of every tile of x [M, K] float32, partial edge tiles included."""
    (n, k), (rows, cols) = wide.shape, tile
    size = wide.abs()
    if cols and k % cols:
        size = torch.nn.functional.pad(size, (0, -k % cols))
    peaks = size.reshape(n, -1, cols or k).amax(-1).numpy()
    return peaks if rows == 1 else np.maximum.reduceat(peaks, np.arange(0, n, rows or n), axis=0)


@cache
def _plain(scheme: Scheme) -> Scheme:
    """The scheme's element under one fp32 scale for all, in our arithmetic."""
    return Scheme(f"{scheme.element.name} as it is", scheme.element, (Scale(FP32, (0, 0), "amax"),))


def decoded(q: QTensor) -> torch.Tensor:
    """float32 [rows, K]: elements times all scales, as ``QTensor.dequantize``."""
    last = q.scheme.scales[-1]
    odd = len(q.scales) == 2 and (last.divides or last.tile != (0, 0))
    if odd or q.codes.size <= SMALL or kernels_of(q.scheme).reason:
        return _decoded_by_numpy(q)
    outer = float(q.scales[1][0, 0]) if len(q.scales) == 2 else None
    rows = Rows(q.codes, q.scales[0], q.zero)
    backend = kernels_of(q.scheme).backend
    return torch.from_numpy(backend.dequantize(rows, q.scheme, BYTES, q.shape[1], FP32, outer))


def _decoded_by_numpy(q: QTensor) -> torch.Tensor:
    """The same where kernels do not read the scales: float32 factors of tiles instead of them."""
    outer = q.scale_values(1) if len(q.scales) == 2 else None
    factors = element_divisor(q.scales[0], q.scheme, outer)
    folded = replace(_plain(q.scheme), scales=(Scale(FP32, q.scheme.inner.tile, "amax"),), zero=q.scheme.zero)
    if q.codes.size <= SMALL or kernels_of(folded).reason:
        return torch.from_numpy(q.dequantize())
    return decoded(QTensor(folded, q.codes, (np.ascontiguousarray(factors),), q.zero))


def elements(q: QTensor) -> torch.Tensor:
    """float32 [rows, K]: decoded codes less their zero points, as ``QTensor.elements``."""
    if q.codes.size <= SMALL:
        return torch.from_numpy(q.elements())
    one = replace(_plain(q.scheme), scales=(Scale(FP32, q.scheme.inner.tile, "amax"),), zero=q.scheme.zero)
    return decoded(QTensor(one, q.codes, (np.ones(q.scales[0].shape, np.float32),), q.zero))
