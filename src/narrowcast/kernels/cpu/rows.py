"""The compiled backend: chunks of packed rows through four kernels, bitwise equal to the numpy reference."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import InputError
from narrowcast.kernels import Rows, Scan
from narrowcast.kernels.cpu.compile import Kernel, kernel
from narrowcast.kernels.cpu.parameters import (
    FLOAT_ELEMENT,
    INT_ELEMENT,
    SCALE_DTYPES,
    SCALE_KINDS,
    UNIT,
    element_row,
    scale_row,
    unsupported_element,
)
from narrowcast.kernels.reference.rows import REFERENCE
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import BF16, E8M0, FP16, FP32, Format, Kind
from narrowcast.tensors.metrics import Errors, half_steps
from narrowcast.tensors.packing import BYTES, Packing, pack, unpack
from narrowcast.tensors.scaling import MANTISSA_RULES, outer_scale, store_scale
from narrowcast.tensors.schemes import OURS, Scheme, tile_grid

F32 = NDArray[np.float32]


class Cpu:
    """Compiled loops; each call allocates its result and a few rows of scratch, and holds no interpreter lock."""

    name = "cpu"

    def supports(self, scheme: Scheme, source: Format, packing: Packing) -> str | None:
        """None when this backend computes exactly what the reference does, else why it does not try."""
        if source not in (BF16, FP16, FP32):
            return f"no compiled kernel reads {source.name}"
        if packing.bits < scheme.element.bits:
            return f"{scheme.element.name} does not fit {packing.name}"
        return _unsupported(scheme)

    def scan(self, stored: NDArray[Any], source: Format) -> Scan:
        bits = _carrier(stored, source)
        peak = np.zeros(1, bits.dtype)
        call(kernel("peak", bits.dtype.name), bits, bits.size, peak)
        amax = float((widen(peak, BF16) if peak.dtype == np.uint16 else peak.view(np.float32))[0])
        return Scan(amax) if np.isfinite(amax) else REFERENCE.scan(stored, source)

    def quantize(
        self,
        stored: NDArray[Any],
        source: Format,
        scheme: Scheme,
        packing: Packing,
        outer: float | None = None,
    ) -> Rows:
        bits, level = _carrier(stored, source), scheme.inner
        n, k = bits.shape
        if not bits.size:
            return REFERENCE.quantize(stored, source, scheme, packing, outer)  # which refuses it
        if scheme.outer is not None and outer is None:
            amax = np.full((1, 1), self.scan(stored, source).amax, np.float32)
            outer = float(outer_scale(amax, scheme, source)[0, 0])
        rows, tiles = tile_grid((n, k), level.tile)
        codes, zeros = _with_slack(rows * tiles, np.uint32), _with_slack(rows * tiles, np.uint8)
        given = len(scheme.scales) == 1 and outer is not None
        if given:
            codes[0] = _pattern(store_scale(np.full(1, outer, np.float32), level.format))[0]
        fused = _fused(packing)
        packed = _room(n, k, fused)
        _run(
            "quantize", bits.dtype, scheme, fused, bits, n, k, level.tile[0] or n, level.tile[1] or k, tiles,
            element_row(scheme.element), scale_row(scheme), _factor(scheme, outer), given, scheme.zero is not None,
            fused.flip, packed, packed.shape[1], codes, zeros,
            _with_slack(tiles, bits.dtype), _with_slack(tiles, bits.dtype), _with_slack(tiles), _with_slack(tiles),
            *_unit_scratch(k, tiles), _with_slack(0, bits.dtype), _with_slack(0, np.uint8),
        )  # fmt: skip
        if fused is not packing:
            packed = pack(packed, packing)
        codes, zeros = (a[: rows * tiles].reshape(rows, tiles) for a in (codes, zeros))
        scales = codes.view(np.float32) if level.format is FP32 else codes.astype(SCALE_DTYPES[level.format])
        return Rows(packed, scales, None if scheme.zero is None else zeros)

    def check(
        self,
        stored: NDArray[Any],
        source: Format,
        scheme: Scheme,
        packing: Packing,
        rows: Rows,
        outer: float | None = None,
    ) -> Errors:
        bits, level = _carrier(stored, source), scheme.inner
        n, k = bits.shape
        packed, fused = _codes(rows, scheme, packing, n, k)
        tiles = rows.scales.shape[1]
        counts, energies = np.zeros(3, np.int64), np.zeros(2)
        _run(
            "check", bits.dtype, scheme, fused, bits, n, k, packed, packed.shape[1], level.tile[0] or n,
            level.tile[1] or k, tiles, element_row(scheme.element), _half_steps(scheme.element),
            SCALE_KINDS[level.format], _factor(scheme, outer), scheme.zero is not None, fused.flip,
            _pattern(rows.scales), _zeros(rows), counts, energies, *_unit_scratch(k, tiles),
            np.zeros(UNIT, np.uint32), np.zeros(UNIT), np.zeros(UNIT), _with_slack(0), _with_slack(0, np.uint8),
            _with_slack(0, np.uint8),
        )  # fmt: skip
        clipped, underflowed, beyond = (int(count) for count in counts)
        return Errors(bits.size, float(energies[0]), float(energies[1]), clipped, underflowed, beyond)

    def dequantize(
        self, rows: Rows, scheme: Scheme, packing: Packing, k: int, out: Format, outer: float | None = None
    ) -> NDArray[Any]:
        n, level = len(rows.packed), scheme.inner
        packed, fused = _codes(rows, scheme, packing, n, k)
        decoded: NDArray[Any] = np.empty((n, k), np.uint16 if out is BF16 else np.float32)
        tiles = rows.scales.shape[1]
        _run(
            "dequantize", decoded.dtype, scheme, fused, packed, packed.shape[1], n, k, level.tile[0] or n,
            level.tile[1] or k, tiles, element_row(scheme.element), SCALE_KINDS[level.format], _factor(scheme, outer),
            scheme.zero is not None, fused.flip, _pattern(rows.scales), _zeros(rows), decoded,
            *_unit_scratch(k, tiles), _with_slack(0, decoded.dtype), _with_slack(0, np.uint8),
        )  # fmt: skip
        if out is FP16:
            with np.errstate(over="ignore"):
                return decoded.astype(np.float16)
        return decoded


@cache
def _unsupported(scheme: Scheme) -> str | None:
    """Why a scheme has no compiled kernel, or None."""
    if scheme.arithmetic != OURS:
        return "compiled kernels compute in fp32 with true division; this scheme's arithmetic is another"
    reason = unsupported_element(scheme.element)
    if reason:
        return reason
    level, last, (rows, cols) = scheme.inner, scheme.scales[-1], scheme.inner.tile
    if level.format not in SCALE_KINDS:
        return f"no compiled kernel stores {level.format.name} scales"
    if any(scale.floor for scale in scheme.scales):
        return "no compiled kernel keeps scales above a floor"
    if level.format is E8M0 and level.rule == "log2":
        return "no compiled kernel computes logarithms"
    if level.format is not E8M0 and level.rule not in MANTISSA_RULES:
        return f"no compiled kernel for the rule {level.rule}"
    if cols % UNIT or (cols and not rows):
        return f"tiles of {rows} x {cols} are not whole rows or multiples of {UNIT} columns"
    if last.divides or len(scheme.scales) > 2 or (len(scheme.scales) == 2 and last.tile != (0, 0)):
        return "the outer scale divides, or is not per tensor"
    if scheme.zero is not None and (
        scheme.zero.kind is not Kind.INT or scheme.zero.signed or level.format is E8M0
    ):
        return "zero points are not unsigned integers under a scale with a mantissa"
    if scheme.zero is not None and not rows:
        return "a zero point for the whole tensor needs its least and largest value before any row"
    return None


def _run(name: str, carrier: np.dtype[Any], scheme: Scheme, fused: Packing, *arguments: Any) -> None:
    """Call the kernel for a scheme's kind of element."""
    kind = INT_ELEMENT if scheme.element.kind is Kind.INT else FLOAT_ELEMENT
    call(kernel(name, carrier.name, kind, fused.bits), *arguments)


def call(function: Kernel, *arguments: Any) -> None:
    """Call a kernel with the addresses of arrays; they stay alive because the caller's tuple holds them."""
    function(*[_address(a) if isinstance(a, np.ndarray) else a for a in arguments])


def _address(a: NDArray[Any]) -> int:
    """Where an array lies. A buffer says it three times faster than ``ctypes.data``, which every array also has: what
    is read-only, or empty, has no writable buffer."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(a))
    except (TypeError, ValueError):
        return a.ctypes.data


def _carrier(stored: NDArray[Any], source: Format) -> NDArray[Any]:
    """The bit patterns kernels read: bf16 as uint16, float32 as uint32; float16 is widened first, exactly."""
    if source is BF16:
        return np.ascontiguousarray(stored)
    return np.ascontiguousarray(widen(stored, source)).view(np.uint32)


def _fused(packing: Packing) -> Packing:
    """The packing that the kernel does itself; other widths go through pack and unpack."""
    return packing if packing.bits in (4, 6, 8) else BYTES


def _codes(rows: Rows, scheme: Scheme, packing: Packing, n: int, k: int) -> tuple[NDArray[np.uint8], Packing]:
    """Packed rows as the kernel reads them, and their packing there.

    Kernels trust shapes and codes, so what does not fit, or is no code of the format, is refused here.
    """
    grid, fused, element = tile_grid((n, k), scheme.inner.tile), _fused(packing), scheme.element
    if rows.packed.shape != (n, packing.row_bytes(k)):
        wanted = f"{packing.row_bytes(k)} bytes for {k} codes, {n} times"
        raise InputError("packed rows have the wrong shape", got=rows.packed.shape, wanted=wanted)
    for name, part in (("scales", rows.scales), ("zero points", rows.zero)):
        if part is not None and part.shape != grid:
            raise InputError(f"{name} do not fit the codes", where=scheme.name, got=part.shape, wanted=grid)
    if (rows.zero is None) != (scheme.zero is None):
        raise InputError("zero points and scheme disagree", where=scheme.name)
    packed = np.ascontiguousarray(rows.packed if fused is packing else unpack(rows.packed, packing, k))
    if fused.bits == 8 > element.bits and packed.size:
        largest = int((packed ^ np.uint8(fused.flip)).max())
        if largest >> element.bits:
            raise InputError("a byte is no code of the format", where=element.name, got=largest)
    return packed, fused


@cache
def _half_steps(element: Format) -> F32:
    """The table of half steps with room for every byte."""
    table = np.zeros(256, np.float32)
    table[: 1 << element.bits] = half_steps(element)
    return table


def _room(n: int, k: int, packing: Packing) -> NDArray[np.uint8]:
    """Room for packed rows, zeroed where rows end in padding."""
    whole = packing.row_bytes(k) * 8 == k * packing.bits
    return (np.empty if whole else np.zeros)((n, packing.row_bytes(k)), np.uint8)


def _with_slack(count: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Room for ``count`` numbers and one more unit, which kernels may read and write."""
    return np.empty(count + UNIT, dtype)


def _unit_scratch(k: int, tiles: int) -> tuple[F32, F32, F32]:
    """Values of tiles, and divisors and zero points of the units of a row."""
    return _with_slack(tiles), _with_slack(k // UNIT), np.zeros(k // UNIT + UNIT, np.float32)


def _pattern(stored: NDArray[Any]) -> NDArray[np.uint32]:
    """Stored scales as the kernel reads them, with slack: float32 patterns, or codes."""
    patterns = _with_slack(stored.size, np.uint32)
    flat = np.ascontiguousarray(stored).ravel()
    patterns[: stored.size] = flat.view(np.uint32) if stored.dtype == np.float32 else flat
    return patterns


def _factor(scheme: Scheme, outer: float | None) -> float:
    """What the innermost scale is multiplied by: the outer one of a two-level scheme."""
    return outer if len(scheme.scales) == 2 and outer is not None else 1.0


def _zeros(rows: Rows) -> NDArray[np.uint8]:
    return np.empty(0, np.uint8) if rows.zero is None else np.ascontiguousarray(rows.zero)


CPU = Cpu()
