"""The quantizing kernel: rows of tiles, each in three passes (peaks, scales, codes) while it is in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.kernels.cpu.encode import add_zeros, divide, encode, pack
from narrowcast.kernels.cpu.lanes import as_float, at, widen
from narrowcast.kernels.cpu.loops import loop
from narrowcast.kernels.cpu.parameters import HIGH, KIND, STRETCH, UNIT
from narrowcast.kernels.cpu.scales import (
    load_scales, row_peak, store_scales, tile_extremes, tile_peaks, to_elements, to_units, zero_points,
)  # fmt: skip

f32 = np.float32


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
def make_scales(
    peaks: Any, lows: Any, tiles: int, element: Any, scale: Any, outer: float, asymmetric: int, codes: Any, zeros: Any,
    high: Any, low: Any, extent: Any, values: Any,
) -> None:  # fmt: skip
    """Stored scales of one row of tiles, what elements are divided by, and zero points."""
    for t in range(tiles):
        high[t] = widen(peaks[t])
        low[t] = min(widen(lows[t]), f32(0)) if asymmetric else f32(0)  # a positive "most negative" element is none
        extent[t] = high[t] - low[t]
    store_scales(extent, tiles, scale, outer, codes)
    load_scales(codes, tiles, scale[KIND], outer, values)
    if asymmetric:
        zero_points(high, low, tiles, values, as_float(element[HIGH]), zeros)


@loop
def quantize_row(
    x: Any, k: int, element: Any, divisors: Any, offsets: Any, asymmetric: int, bits: int, flip: int,
    packed: Any, y: Any, spread: Any, buffer: Any,
) -> None:  # fmt: skip
    """Packed codes of one row."""
    for j in range(0, k, STRETCH):
        count = min(STRETCH, k - j)
        to_elements(at(divisors, j // UNIT), count, spread)
        divide(at(x, j), count, spread, y)
        if asymmetric:
            to_elements(at(offsets, j // UNIT), count, spread)
            add_zeros(y, count, spread)
        if bits == 8:
            encode(y, count, element, flip, at(packed, j))
        else:
            encode(y, count, element, flip, buffer)
            pack(buffer, count, bits, at(packed, j * bits // 8))


def quantize_kernel(
    x: Any, n: int, k: int, tile_rows: int, cols: int, tiles: int, element: Any, scale: Any, outer: float, given: int,
    asymmetric: int, bits: int, flip: int, packed: Any, row_bytes: int, codes: Any, zeros: Any,
    peaks: Any, lows: Any, high: Any, low: Any, extent: Any, values: Any, divisors: Any, offsets: Any, y: Any,
    spread: Any, buffer: Any,
) -> None:  # fmt: skip
    """Quantize x [n, k] into packed [n, row_bytes], scale codes uint32 and zero points [tile rows, tiles].

    ``given`` says that ``codes`` hold the scales already. The arguments after ``zeros`` are scratch.
    """
    for i in range(n):
        if i % tile_rows == 0:
            r = i // tile_rows * tiles
            if given:
                load_scales(at(codes, r), tiles, scale[KIND], outer, values)
            else:
                measure(at(x, i * k), min(tile_rows, n - i), k, cols, tiles, asymmetric, peaks, lows)
                make_scales(
                    peaks, lows, tiles, element, scale, outer, asymmetric, at(codes, r), at(zeros, r),
                    high, low, extent, values,
                )  # fmt: skip
            to_units(values, cols, k, divisors)
            if asymmetric:
                for t in range(tiles):
                    low[t] = zeros[r + t]
                to_units(low, cols, k, offsets)
        quantize_row(
            at(x, i * k), k, element, divisors, offsets, asymmetric, bits, flip, at(packed, i * row_bytes),
            y, spread, buffer,
        )  # fmt: skip


def peak_kernel(x: Any, count: int, peak: Any) -> None:
    """peak[0] = the largest magnitude of x [count], in its carrier; a pattern above infinity's is a NaN."""
    peak[0] = row_peak(x, count, peak[0])
