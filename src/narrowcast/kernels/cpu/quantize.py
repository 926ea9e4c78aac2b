"""The quantizing kernel: rows of tiles, each in three passes (peaks, scales, codes) while it is in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.kernels.cpu.lanes import at
from narrowcast.kernels.cpu.loops import loop
from narrowcast.kernels.cpu.parameters import ENCODING, FLOAT_ELEMENT, KIND, UNIT
from narrowcast.kernels.cpu.scales import load_tiles, make_scales, row_peak, tile_extremes, tile_peaks
from narrowcast.kernels.cpu.units import (
    encode_float4,
    encode_float6,
    encode_float8,
    encode_integer4,
    encode_integer6,
    encode_integer8,
)

u8 = np.uint8


@loop
def measure(x: Any, n: int, k: int, cols: int, tiles: int, asymmetric: int, peaks: Any, lows: Any) -> None:
    """Peaks (or the largest and most negative elements) of the tiles of n rows, in the carrier."""
    for t in range(tiles):
        peaks[t] = 0
        lows[t] = 0
    for i in range(n):
        if asymmetric:
            tile_extremes(at(x, i * k), k, cols, peaks, lows)
        elif cols < k:
            tile_peaks(at(x, i * k), k, cols, peaks)
        else:
            peaks[0] = row_peak(at(x, i * k), k, peaks[0])


@loop
def encode(
    x: Any, units: int, kind: int, bits: int, flip: int, divisors: Any, offsets: Any,
    a: int, b: int, c: int, d: int, e: int, f: int, packed: Any,
) -> None:  # fmt: skip
    """Packed codes of whole units."""
    for u in range(units):
        xs, out, divisor, zero = at(x, u * UNIT), at(packed, 2 * u * bits), divisors[u], offsets[u]
        if kind == FLOAT_ELEMENT:
            if bits == 8:
                encode_float8(out, xs, divisor, zero, flip, a, b, c, d, e, f)
            elif bits == 4:
                encode_float4(out, xs, divisor, zero, flip, a, b, c, d, e, f)
            else:
                encode_float6(out, xs, divisor, zero, flip, a, b, c, d, e, f)
        elif bits == 8:
            encode_integer8(out, xs, divisor, zero, flip, a, b, c, d, e, f)
        elif bits == 4:
            encode_integer4(out, xs, divisor, zero, flip, a, b, c, d, e, f)
        else:
            encode_integer6(out, xs, divisor, zero, flip, a, b, c, d, e, f)


@loop
def encode_row(
    x: Any, k: int, element: Any, bits: int, flip: int, divisors: Any, offsets: Any, packed: Any, last: Any,
    last_packed: Any,
) -> None:  # fmt: skip
    """Packed codes of a row; what lies beyond whole units goes through a padded copy."""
    kind, a, b, c = element[KIND], element[ENCODING], element[ENCODING + 1], element[ENCODING + 2]
    d, e, f = element[ENCODING + 3], element[ENCODING + 4], element[ENCODING + 5]
    units, rest = k // UNIT, k % UNIT
    encode(x, units, kind, bits, flip, divisors, offsets, a, b, c, d, e, f, packed)
    if rest:
        for j in range(UNIT):
            last[j] = x[units * UNIT + j] if j < rest else 0
        tail = at(divisors, units), at(offsets, units)
        encode(last, 1, kind, bits, flip, tail[0], tail[1], a, b, c, d, e, f, last_packed)
        for j in range(rest * bits // 8):
            packed[2 * units * bits + j] = last_packed[j]
        if rest * bits % 8:  # padding is zero bits, whatever the flip
            whole = rest * bits // 8
            packed[2 * units * bits + whole] = u8(last_packed[whole] & ((1 << (rest * bits % 8)) - 1))


def quantize_kernel(
    x: Any, n: int, k: int, tile_rows: int, cols: int, tiles: int, element: Any, scale: Any, outer: float, given: int,
    asymmetric: int, bits: int, flip: int, packed: Any, row_bytes: int, codes: Any, zeros: Any,
    peaks: Any, lows: Any, high: Any, low: Any, values: Any, divisors: Any, offsets: Any, last: Any, last_packed: Any,
) -> None:  # fmt: skip
    """Quantize x [n, k] into packed [n, row_bytes], scale codes uint32 and zero points [tile rows, tiles].

    ``given`` says that ``codes`` hold the scales already. The last row of arguments is scratch, of which ``offsets``
    begins as zeros; ``codes``, ``zeros`` and all scratch over tiles have room for a whole last unit.
    """
    for i in range(n):
        if i % tile_rows == 0:
            r = i // tile_rows * tiles
            if not given:
                measure(at(x, i * k), min(tile_rows, n - i), k, cols, tiles, asymmetric, peaks, lows)
                make_scales(
                    peaks, lows, tiles, element, scale, outer, asymmetric, at(codes, r), at(zeros, r),
                    high, low, values,
                )  # fmt: skip
            load_tiles(
                at(codes, r), at(zeros, r), tiles, scale[KIND], outer, cols, k, asymmetric, values, divisors, offsets
            )  # fmt: skip
        encode_row(
            at(x, i * k), k, element, bits, flip, divisors, offsets, at(packed, i * row_bytes), last, last_packed
        )  # fmt: skip


def peak_kernel(x: Any, count: int, peak: Any) -> None:
    """peak[0] = the largest magnitude of x [count], in its carrier; a pattern above infinity's is a NaN."""
    peak[0] = row_peak(x, count, peak[0])
