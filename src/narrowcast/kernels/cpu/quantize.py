"""The quantizing kernel: rows of tiles, each in three passes (peaks, scales, codes) while it is in the cache."""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu.bits import at, f32, inlined, widen
from narrowcast.kernels.cpu.encode import add_zeros, divide, encode, pack
from narrowcast.kernels.cpu.parameters import KIND, STRETCH, UNIT
from narrowcast.kernels.cpu.scales import (
    row_peak, spread_divisors, spread_zeros, store_scales, tile_extremes, tile_peaks, widen_units, zero_points,
)  # fmt: skip


@inlined
def measure(x: Any, n: int, k: int, cols: int, tiles: int, asymmetric: int, peaks: Any, lows: Any) -> None:
    """Peaks (or the largest and most negative elements) of the tiles of n rows, in the carrier."""
    for t in range(tiles):
        peaks[t] = 0
        lows[t] = 0
    for i in range(n):
        if asymmetric:
            tile_extremes(at(x, i * k), k, cols, peaks, lows)
        elif cols:
            tile_peaks(at(x, i * k), k, cols, peaks)
        else:
            peaks[0] = row_peak(at(x, i * k), k, peaks[0])


@inlined
def make_scales(
    peaks: Any, lows: Any, tiles: int, element: Any, scale: Any, outer: float, asymmetric: int, codes: Any, zeros: Any,
    high: Any, low: Any, extent: Any,
) -> None:  # fmt: skip
    """Stored scales, and zero points, of one row of tiles."""
    for t in range(tiles):
        high[t] = widen(peaks[t])
    if asymmetric:
        for t in range(tiles):
            low[t] = min(widen(lows[t]), f32(0))  # a positive "most negative" element: there is none
            extent[t] = f32(high[t] - low[t])
        store_scales(extent, tiles, scale, outer, codes)
        zero_points(high, low, tiles, scale[KIND], element, codes, zeros)
    else:
        store_scales(high, tiles, scale, outer, codes)


@inlined
def quantize_rows(
    x: Any, n: int, k: int, element: Any, divisors: Any, offsets: Any, asymmetric: int, bits: int, flip: int,
    packed: Any, row_bytes: int, y: Any, spread: Any, buffer: Any,
) -> None:  # fmt: skip
    """Packed codes of n rows under the same divisors."""
    for i in range(n):
        for j in range(0, k, STRETCH):
            count = min(STRETCH, k - j)
            widen_units(at(divisors, j // UNIT), count, spread)
            divide(at(x, i * k + j), count, spread, y)
            if asymmetric:
                widen_units(at(offsets, j // UNIT), count, spread)
                add_zeros(y, count, spread)
            if bits == 8:
                encode(y, count, element, flip, at(packed, i * row_bytes + j))
            else:
                encode(y, count, element, flip, buffer)
                pack(buffer, count, bits, at(packed, i * row_bytes + j * bits // 8))


def quantize_kernel(
    x: Any, n: int, k: int, tile_rows: int, cols: int, tiles: int, element: Any, scale: Any, outer: float, given: int,
    asymmetric: int, bits: int, flip: int, packed: Any, row_bytes: int, codes: Any, zeros: Any,
    peaks: Any, lows: Any, high: Any, low: Any, extent: Any, divisors: Any, offsets: Any, y: Any, spread: Any, buffer: Any,
) -> None:  # fmt: skip
    """Quantize x [n, k] into packed [n, row_bytes], scale codes uint32 and zero points [tile rows, tiles].

    ``given`` says that ``codes`` hold the scales already. The last row of arguments is scratch.
    """
    for r in range((n + tile_rows - 1) // tile_rows):
        first, height = r * tile_rows, min(tile_rows, n - r * tile_rows)
        chunk, row_codes, row_zeros = at(x, first * k), at(codes, r * tiles), at(zeros, r * tiles)
        if not given:
            measure(chunk, height, k, cols, tiles, asymmetric, peaks, lows)
            make_scales(peaks, lows, tiles, element, scale, outer, asymmetric, row_codes, row_zeros, high, low, extent)
        spread_divisors(row_codes, tiles, scale[KIND], outer, cols, k, divisors)
        if asymmetric:
            spread_zeros(row_zeros, tiles, cols, k, offsets)
        out = at(packed, first * row_bytes)
        quantize_rows(chunk, height, k, element, divisors, offsets, asymmetric, bits, flip, out, row_bytes, y, spread, buffer)


def peak_kernel(x: Any, count: int, peak: Any) -> None:
    """peak[0] = the largest magnitude of x [count], in its carrier; a pattern above infinity's is a NaN."""
    peak[0] = row_peak(x, count, peak[0])
