"""The quantizing kernel: rows of tiles, each in three passes (peaks, scales, codes) while it is in the cache."""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu.bits import f32, inlined, widen
from narrowcast.kernels.cpu.encode import STRETCH, UNIT, add_zeros, divide, encode, pack_row
from narrowcast.kernels.cpu.parameters import KIND
from narrowcast.kernels.cpu.scales import (
    row_peak, spread_divisors, store_scales, tile_extremes, tile_peaks, zero_points,
)  # fmt: skip


@inlined
def measure(stored: Any, first: int, last: int, cols: int, asymmetric: bool, peaks: Any, lows: Any) -> None:
    """Peaks (or the largest and most negative elements) of the tiles of rows first:last, in the carrier."""
    peaks[:] = 0
    lows[:] = 0
    for i in range(first, last):
        if asymmetric:
            tile_extremes(stored[i], cols, peaks, lows)
        elif cols:
            tile_peaks(stored[i], cols, peaks)
        else:
            peaks[0] = row_peak(stored[i], peaks[0])


@inlined
def quantize_kernel(
    stored: Any, tile_rows: int, cols: int, element: Any, scale: Any, outer: float, given: bool, asymmetric: bool,
    bits: int, flip: int, packed: Any, codes: Any, zeros: Any,
    peaks: Any, lows: Any, high: Any, low: Any, divisors: Any, offsets: Any, y: Any, buffer: Any,
) -> None:  # fmt: skip
    """Quantize stored [n, K] into packed [n, row bytes], scale codes uint32 [tile rows, tiles] and zeros.

    ``given`` says that ``codes`` hold the scale already. The last row of arguments is scratch.
    """
    n, k = stored.shape
    for r in range(codes.shape[0]):
        first, last = r * tile_rows, min(n, (r + 1) * tile_rows)
        if not given:
            measure(stored, first, last, cols, asymmetric, peaks, lows)
            for t in range(len(peaks)):
                high[t] = widen(peaks[t])
            if asymmetric:
                for t in range(len(peaks)):
                    low[t] = widen(lows[t])
                    low[t] = min(low[t], f32(0))
                    y[t] = f32(high[t] - low[t])
                store_scales(y[: len(high)], scale, outer, codes[r])
                zero_points(high, low, scale[KIND], element, codes[r], zeros[r])
                for u in range(len(offsets)):
                    offsets[u] = f32(zeros[r, u * UNIT // cols if cols else 0])
            else:
                store_scales(high, scale, outer, codes[r])
        spread_divisors(codes[r], scale[KIND], outer, cols, divisors)
        for i in range(first, last):
            for j in range(0, k, STRETCH):
                count = min(STRETCH, k - j)
                divide(stored[i], j, count, divisors, y)
                if asymmetric:
                    add_zeros(y, j, count, offsets)
                encode(y, count, element, flip, buffer)
                pack_row(buffer, j, count, bits, packed[i])
