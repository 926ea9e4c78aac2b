"""Tile maxima and scales, per row of tiles: short vectors, a sixteenth of the elements or fewer."""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu.codes import (
    e4m3_scale, e4m3_value, e8m0_value, power_of_two_scale, wide_scale, wide_value, zero_point,
)  # fmt: skip
from narrowcast.kernels.cpu.lanes import as_float, at, larger, larger_signed, magnitude, unit_peak
from narrowcast.kernels.cpu.loops import loop
from narrowcast.kernels.cpu.parameters import E4M3_SCALE, E8M0_SCALE, EMAX, KIND, SPAN, THRESHOLD, UNIT


@loop
def row_peak(x: Any, k: int, peak: Any) -> Any:
    """The larger of ``peak`` and the magnitudes of a row, in the carrier."""
    for j in range(k):
        peak = larger(peak, magnitude(x[j]))
    return peak


@loop
def tile_peaks(x: Any, k: int, cols: int, peaks: Any) -> None:
    """Raise peaks[t] to the largest magnitude of a row in tile t."""
    for t in range(k // cols):
        peak = peaks[t]
        for j in range(t * cols, (t + 1) * cols, UNIT):
            peak = larger(peak, unit_peak(at(x, j)))
        peaks[t] = peak
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
        for j in range(t * cols, min(k, (t + 1) * cols)):
            high = larger_signed(high, x[j])
            low = larger(low, x[j])
        highs[t], lows[t] = high, low


@loop
def store_scales(amax: Any, tiles: int, scale: Any, outer: float, codes: Any) -> None:
    """codes[t] = the stored scale of a tile with this amax, by the scheme's rule and scale format."""
    kind, span, threshold, emax = scale[KIND], as_float(scale[SPAN]), scale[THRESHOLD], scale[EMAX]
    if kind == E8M0_SCALE:
        for t in range(tiles):
            codes[t] = power_of_two_scale(amax[t], threshold, emax)
    elif kind == E4M3_SCALE:
        for t in range(tiles):
            codes[t] = e4m3_scale(amax[t], span, outer)
    else:
        for t in range(tiles):
            codes[t] = wide_scale(amax[t], span, outer, kind)


@loop
def load_scales(codes: Any, tiles: int, kind: int, outer: float, values: Any) -> None:
    """values[t] = the stored scale times the outer one."""
    if kind == E8M0_SCALE:
        for t in range(tiles):
            values[t] = e8m0_value(codes[t]) * outer
    elif kind == E4M3_SCALE:
        for t in range(tiles):
            values[t] = e4m3_value(codes[t]) * outer
    else:
        for t in range(tiles):
            values[t] = wide_value(codes[t], kind) * outer


@loop
def zero_points(highs: Any, lows: Any, tiles: int, scales: Any, top: float, zeros: Any) -> None:
    """zeros[t] = the zero point of a tile, whose scale is 1 where all of it is zero."""
    for t in range(tiles):
        zeros[t] = zero_point(highs[t], lows[t], scales[t], top)


@loop
def to_units(tiles: Any, cols: int, k: int, units: Any) -> None:
    """units[u] = the number of u's tile, for every unit of 16 columns."""
    for t in range((k + cols - 1) // cols):
        for u in range(t * cols // UNIT, (min(k, (t + 1) * cols) + UNIT - 1) // UNIT):
            units[u] = tiles[t]


@loop
def to_elements(units: Any, count: int, elements: Any) -> None:
    """elements[j] = the number of j's unit of 16 columns; runs to the end of the last unit."""
    for u in range((count + UNIT - 1) // UNIT):
        number = units[u]
        for j in range(u * UNIT, u * UNIT + UNIT):
            elements[j] = number
