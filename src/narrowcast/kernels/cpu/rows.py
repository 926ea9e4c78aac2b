"""The compiled backend: chunks of packed rows through four kernels, bitwise equal to the numpy reference."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.kernels import Rows, Scan
from narrowcast.kernels.cpu.compile import kernel
from narrowcast.kernels.cpu.parameters import (
    KIND,
    SCALE_KINDS,
    element_row,
    scale_dtype,
    scale_row,
    unsupported_element,
)
from narrowcast.kernels.reference.rows import REFERENCE
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import BF16, E8M0, FP16, FP32, Format, Kind
from narrowcast.tensors.metrics import Errors, half_steps
from narrowcast.tensors.packing import BYTES, Packing, pack, unpack
from narrowcast.tensors.scaling import MANTISSA_RULES, load_scale, outer_scale, store_scale
from narrowcast.tensors.schemes import OURS, Scheme, tile_grid

UNIT, STRETCH, LANES = 16, 2048, 512
F32 = NDArray[np.float32]


class Cpu:
    """Numba kernels. Each call allocates its result and a few rows of scratch; none holds the interpreter lock."""

    name = "cpu"

    def supports(self, scheme: Scheme, source: Format, packing: Packing) -> str | None:
        """None when this backend computes exactly what the reference does, else the reason why it does not try."""
        if source not in (BF16, FP16, FP32):
            return f"no compiled kernel reads {source.name}"
        return _unsupported(scheme)

    def scan(self, stored: NDArray[Any], source: Format) -> Scan:
        bits = carrier(stored, source)
        peak = np.zeros(1, bits.dtype)
        kernel("peak", bits.dtype.name)(bits, peak)
        amax = float(_widen(peak, bits.dtype)[0])
        return Scan(amax) if np.isfinite(amax) else REFERENCE.scan(stored, source)

    def quantize(
        self,
        stored: NDArray[Any],
        source: Format,
        scheme: Scheme,
        packing: Packing,
        outer: float | None = None,
    ) -> Rows:
        bits, level = carrier(stored, source), scheme.inner
        n, k = bits.shape
        if scheme.outer is not None and outer is None:
            amax = np.full((1, 1), self.scan(stored, source).amax, np.float32)
            outer = float(outer_scale(amax, scheme, source)[0, 0])
        rows, tiles = tile_grid((n, k), level.tile)
        codes = np.empty((rows, tiles), np.uint32)
        given = len(scheme.scales) == 1 and outer is not None
        if given:
            codes[:] = _as_uint32(store_scale(np.full((1, 1), outer, np.float32), level.format))
        asymmetric = scheme.zero is not None
        zeros = np.zeros((rows, tiles), np.uint8)
        width, flip = _fused(packing)
        packed = _packed(n, k, packing if width == packing.bits else BYTES)
        units = -(-k // UNIT)
        kernel("quantize", bits.dtype.name)(
            bits, level.tile[0] or n, level.tile[1], element_row(scheme.element), scale_row(scheme),
            np.float32(1 if outer is None or given else outer), given, asymmetric, width, flip, packed, codes, zeros,
            np.empty(tiles, bits.dtype), np.empty(tiles, bits.dtype), np.empty(tiles, np.float32),
            np.empty(tiles, np.float32), np.empty(units, np.float32), np.empty(units, np.float32),
            np.empty(max(STRETCH, tiles), np.float32), np.empty(STRETCH, np.uint8),
        )  # fmt: skip
        if width != packing.bits:
            packed = pack(packed, packing)
        return Rows(packed, _stored(codes, level.format), zeros if asymmetric else None)

    def check(
        self,
        stored: NDArray[Any],
        source: Format,
        scheme: Scheme,
        packing: Packing,
        rows: Rows,
        outer: float | None = None,
    ) -> Errors:
        bits, level = carrier(stored, source), scheme.inner
        n, k = bits.shape
        width, flip = _fused(packing)
        packed = rows.packed if width == packing.bits else unpack(rows.packed, packing, k)
        counts, energies, units = np.zeros(3, np.int64), np.zeros(2), -(-k // UNIT)
        kernel("check", bits.dtype.name)(
            bits, packed, level.tile[0] or n, level.tile[1], element_row(scheme.element), half_steps(scheme.element),
            SCALE_KINDS[level.format], _factor(scheme, outer), scheme.zero is not None, width, flip,
            _as_uint32(rows.scales), _zeros(rows), counts, energies,
            np.empty(units, np.float32), np.empty(units, np.float32), np.empty(LANES, np.float32),
            np.empty(LANES, np.float32), np.empty(LANES, np.uint32), np.empty(LANES, np.uint8), np.zeros(LANES),
            np.zeros(LANES),
        )  # fmt: skip
        clipped, underflowed, beyond = (int(c) for c in counts)
        return Errors(bits.size, float(energies[0]), float(energies[1]), clipped, underflowed, beyond)

    def dequantize(
        self, rows: Rows, scheme: Scheme, packing: Packing, k: int, out: Format, outer: float | None = None
    ) -> NDArray[Any]:
        n, level = len(rows.packed), scheme.inner
        width, flip = _fused(packing)
        packed = rows.packed if width == packing.bits else unpack(rows.packed, packing, k)
        wide, units = out is not BF16, -(-k // UNIT)
        out32 = np.empty((n, k) if wide else (0, 0), np.float32)
        out16 = np.empty((0, 0) if wide else (n, k), np.uint16)
        kernel("dequantize", "uint16")(
            packed, k, level.tile[0] or n, level.tile[1], element_row(scheme.element), SCALE_KINDS[level.format],
            _factor(scheme, outer), scheme.zero is not None, width, flip, _as_uint32(rows.scales), _zeros(rows),
            wide, out32, out16, np.empty(units, np.float32), np.empty(units, np.float32),
            np.empty(STRETCH, np.float32), np.empty(STRETCH, np.uint8),
        )  # fmt: skip
        if out is FP16:
            with np.errstate(over="ignore"):
                return out32.astype(np.float16)
        return out32 if wide else out16


@cache
def _unsupported(scheme: Scheme) -> str | None:
    """Why a scheme has no compiled kernel, or None."""
    if scheme.arithmetic != OURS:
        return "compiled kernels compute in fp32 with true division; this scheme's arithmetic is another"
    reason = unsupported_element(scheme.element)
    if reason:
        return reason
    level, last = scheme.inner, scheme.scales[-1]
    if level.format not in SCALE_KINDS:
        return f"no compiled kernel stores {level.format.name} scales"
    if level.format is not E8M0 and level.rule not in MANTISSA_RULES:
        return f"no compiled kernel for the rule {level.rule}"
    if level.tile[1] % UNIT:
        return f"tiles of {level.tile[1]} columns are no multiple of {UNIT}"
    if level.tile == (0, 1) or (level.tile[0] == 0 and level.tile[1]):
        return "tiles are whole columns"
    if last.divides or len(scheme.scales) > 2 or (len(scheme.scales) == 2 and last.tile != (0, 0)):
        return "the outer scale divides, or is not per tensor"
    if scheme.zero is not None and (
        scheme.zero.kind is not Kind.INT or scheme.zero.signed or level.format is E8M0
    ):
        return "zero points are not unsigned integers under a scale with a mantissa"
    return None


def carrier(stored: NDArray[Any], source: Format) -> NDArray[Any]:
    """The bit patterns kernels read: bf16 as uint16, float32 as uint32; float16 is widened first, exactly."""
    if source is BF16:
        return np.ascontiguousarray(stored)
    return np.ascontiguousarray(widen(stored, source)).view(np.uint32)


def _widen(bits: NDArray[Any], dtype: np.dtype[Any]) -> F32:
    return widen(bits, BF16) if dtype == np.uint16 else bits.view(np.float32)


def _fused(packing: Packing) -> tuple[int, int]:
    """Width and flip that the kernel packs itself; other widths go through pack and unpack."""
    return (packing.bits, packing.flip) if packing.bits in (4, 6, 8) else (8, 0)


def _packed(n: int, k: int, packing: Packing) -> NDArray[np.uint8]:
    """Room for packed rows, zeroed where a row ends in padding."""
    whole = packing.row_bytes(k) * 8 == k * packing.bits
    return (np.empty if whole else np.zeros)((n, packing.row_bytes(k)), np.uint8)


def _as_uint32(stored: NDArray[Any]) -> NDArray[np.uint32]:
    stored = np.ascontiguousarray(stored)
    return stored.view(np.uint32) if stored.dtype == np.float32 else stored.astype(np.uint32)


def _stored(codes: NDArray[np.uint32], fmt: Format) -> NDArray[Any]:
    return codes.view(np.float32) if fmt is FP32 else codes.astype(scale_dtype(fmt))


def _factor(scheme: Scheme, outer: float | None) -> np.float32:
    """What the innermost scale is multiplied by: the outer one of a two-level scheme."""
    return np.float32(outer if len(scheme.scales) == 2 and outer is not None else 1)


def _zeros(rows: Rows) -> NDArray[np.uint8]:
    return np.zeros(rows.scales.shape, np.uint8) if rows.zero is None else np.ascontiguousarray(rows.zero)


CPU = Cpu()
_ = (load_scale, KIND)
