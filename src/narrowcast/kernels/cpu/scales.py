"""Tile maxima and scales, one row of tiles at a time. Arrays over tiles have room for a whole last unit."""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu.lanes import at
from narrowcast.kernels.cpu.loops import (
    as_float,
    larger,
    larger_signed,
    loop,
    magnitude,
)
from narrowcast.kernels.cpu.parameters import (
    E4M3_SCALE,
    E8M0_SCALE,
    EMAX,
    HIGH,
    KIND,
    SPAN,
    THRESHOLD,
    UNIT,
)
from narrowcast.kernels.cpu.units import (
    extents,
    load_e4m3,
    load_e8m0,
    load_wide,
    most_negative,
    most_positive,
    peak,
    store_e4m3,
    store_e8m0,
    store_wide,
    widen,
    zero_points,
)


@loop
def row_peak(x: Any, k: int, largest: Any) -> Any:
    """The larger of ``largest`` and the magnitudes of a row, in the carrier."""
    for j in range(k):
        largest = larger(largest, magnitude(x[j]))
    return largest


@loop
def tile_peaks(x: Any, k: int, cols: int, peaks: Any) -> None:
    """Raise peaks[t] to the largest magnitude of a row in tile t."""
    for t in range(k // cols):
        largest = peaks[t]
        for j in range(t * cols, (t + 1) * cols, UNIT):
            largest = larger(largest, peak(at(x, j)))
        peaks[t] = largest
    t = k // cols
    if t * cols < k:
        peaks[t] = row_peak(at(x, t * cols), k - t * cols, peaks[t])


@loop
def tile_extremes(x: Any, k: int, cols: int, highs: Any, lows: Any) -> None:
    """highs[t], lows[t]: the largest positive and the most negative element of tile t, in the carrier.

    As signed integers positive floats order like their values and lie above all negative ones; as unsigned
    integers the most negative float is the largest of all.
    """
    for t in range((k + cols - 1) // cols):
        high, low = highs[t], lows[t]
        last = min(k, (t + 1) * cols)
        whole = t * cols + (last - t * cols) // UNIT * UNIT
        for j in range(t * cols, whole, UNIT):
            high, low = larger_signed(high, most_positive(at(x, j))), larger(low, most_negative(at(x, j)))
        for j in range(whole, last):
            high, low = larger_signed(high, x[j]), larger(low, x[j])
        highs[t], lows[t] = high, low


@loop
def store_scales(amax: Any, tiles: int, scale: Any, outer: float, codes: Any) -> None:
    """codes[t] = the stored scale of a tile with this amax, by the scheme's rule and scale format."""
    kind, span, threshold, emax = scale[KIND], as_float(scale[SPAN]), scale[THRESHOLD], scale[EMAX]
    for t in range(0, tiles, UNIT):
        if kind == E8M0_SCALE:
            store_e8m0(at(codes, t), at(amax, t), threshold, emax)
        elif kind == E4M3_SCALE:
            store_e4m3(at(codes, t), at(amax, t), span, outer)
        else:
            store_wide(at(codes, t), at(amax, t), span, outer, kind)


@loop
def load_scales(codes: Any, tiles: int, kind: int, outer: float, values: Any) -> None:
    """values[t] = the stored scale times the outer one."""
    for t in range(0, tiles, UNIT):
        if kind == E8M0_SCALE:
            load_e8m0(at(values, t), at(codes, t), outer)
        elif kind == E4M3_SCALE:
            load_e4m3(at(values, t), at(codes, t), outer)
        else:
            load_wide(at(values, t), at(codes, t), outer, kind)


@loop
def make_scales(
    peaks: Any, lows: Any, tiles: int, element: Any, scale: Any, outer: float, asymmetric: int, codes: Any, zeros: Any,
    high: Any, low: Any, extent: Any,
) -> None:  # fmt: skip
    """Stored scales, and zero points, of one row of tiles."""
    for t in range(0, tiles, UNIT):
        widen(at(high, t), at(peaks, t))
    if not asymmetric:
        store_scales(high, tiles, scale, outer, codes)
        return
    for t in range(0, tiles, UNIT):
        widen(at(low, t), at(lows, t))
        extents(at(low, t), at(extent, t), at(high, t))
    store_scales(extent, tiles, scale, outer, codes)
    load_scales(codes, tiles, scale[KIND], outer, extent)
    for t in range(0, tiles, UNIT):
        zero_points(at(zeros, t), at(high, t), at(low, t), at(extent, t), as_float(element[HIGH]))


@loop
def load_tiles(
    codes: Any, zeros: Any, tiles: int, kind: int, outer: float, cols: int, k: int, asymmetric: int, values: Any,
    divisors: Any, offsets: Any,
) -> None:  # fmt: skip
    """Divisors and zero points of one row of tiles, for every unit of 16 columns. Without zero points ``offsets``
    stays as it is: zeros."""
    load_scales(codes, tiles, kind, outer, values)
    for t in range(tiles):
        for u in range(t * cols // UNIT, (min(k, (t + 1) * cols) + UNIT - 1) // UNIT):
            divisors[u] = values[t]
            if asymmetric:
                offsets[u] = zeros[t]
