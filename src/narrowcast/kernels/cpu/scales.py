"""Tile maxima and scales, per row of tiles: short vectors, a sixteenth of the elements or fewer."""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu.bits import as_bits, as_float, at, f32, i32, inlined, larger, larger_signed, magnitude, u8, u32, unit_peak
from narrowcast.kernels.cpu.encode import ROUNDER, float_code
from narrowcast.kernels.cpu.parameters import (
    BF16_SCALE, E4M3_SCALE, E8M0_SCALE, EMAX, FP16_SCALE, HIGH, KIND, SPAN, THRESHOLD, UNIT,
)  # fmt: skip

SMALLEST = 2.0**-126  # no stored scale in fp32 or bf16 is smaller


@inlined
def row_peak(x: Any, k: int, peak: Any) -> Any:
    """The larger of ``peak`` and the magnitudes of a row, in the carrier."""
    for j in range(k):
        peak = larger(peak, magnitude(x[j]))
    return peak


@inlined
def tile_peaks(x: Any, k: int, cols: int, peaks: Any) -> None:
    """Raise peaks[t] to the largest magnitude of a row in tile t."""
    per_tile = cols // UNIT
    for t in range(k // cols):
        peak = peaks[t]
        for u in range(per_tile):
            peak = larger(peak, unit_peak(at(x, t * cols + u * UNIT)))
        peaks[t] = peak
    t = k // cols
    if t * cols < k:
        peaks[t] = row_peak(at(x, t * cols), k - t * cols, peaks[t])


@inlined
def tile_extremes(x: Any, k: int, cols: int, highs: Any, lows: Any) -> None:
    """highs[t], lows[t]: the largest positive and the most negative element of tile t, in the carrier.

    As signed integers positive floats order like their values and lie above all negative ones; as unsigned
    integers the most negative float is the largest of all.
    """
    cols = cols if cols else k
    for t in range((k + cols - 1) // cols):
        high, low = highs[t], lows[t]
        for j in range(t * cols, min(k, (t + 1) * cols)):
            high = larger_signed(high, x[j])
            low = larger(low, x[j])
        highs[t], lows[t] = high, low


@inlined
def power_of_two_code(amax: float, scale: Any) -> int:
    """The E8M0 byte: exponent of amax, less emax, plus one where its significand passes the threshold."""
    a = as_bits(amax)
    normal = a >= u32(0x800000)
    bits = a if normal else as_bits(f32(i32(a)))  # a subnormal is an integer times 2^-149
    exponent = i32(i32(bits >> u32(23)) - i32(0 if normal else 149))
    significand = u32(u32(bits & u32(0x7FFFFF)) | u32(0x800000))
    bump = i32(1 if significand >= scale[THRESHOLD] else 0)
    byte = i32(i32(exponent + bump) - i32(scale[EMAX]))
    byte = min(max(byte, i32(0)), i32(254))
    return u32(127) if a == u32(0) else u32(byte)


@inlined
def bf16_code(x: float) -> int:
    """Nearest-even bf16 pattern of a float32 that is not NaN."""
    bits = as_bits(x)
    return u32(u32(u32(bits + u32(0x7FFF)) + u32(u32(bits >> u32(16)) & u32(1))) >> u32(16))


@inlined
def fp16_code(x: float) -> int:
    """Nearest-even fp16 pattern of a float32 within its range."""
    rebias = u32((0xFFF - (112 << 23)) & 0xFFFFFFFF)
    return float_code(x, u32(13), rebias, u32(113 << 23), f32(0.5), u32(0x7BFF), u32(15))


@inlined
def e4m3_code(x: float) -> int:
    """Nearest-even saturated E4M3 code of a float32."""
    rebias = u32((0x7FFFF - (120 << 23)) & 0xFFFFFFFF)
    return float_code(x, u32(20), rebias, u32(121 << 23), f32(2.0**14), u32(126), u32(7))


@inlined
def store_scales(amax: Any, tiles: int, scale: Any, outer: float, codes: Any) -> None:
    """codes[t] = the stored scale of a tile with this amax, by the scheme's rule and scale format."""
    kind, span, tiny = scale[KIND], as_float(scale[SPAN]), f32(SMALLEST)
    if kind == E8M0_SCALE:
        for t in range(tiles):
            codes[t] = power_of_two_code(amax[t], scale)
    elif kind == E4M3_SCALE:
        for t in range(tiles):
            code = max(e4m3_code(f32(f32(amax[t] / span) / outer)), u32(1))
            codes[t] = code if amax[t] != f32(0) else u32(0x38)
    elif kind == BF16_SCALE:
        for t in range(tiles):
            code = bf16_code(max(f32(f32(amax[t] / span) / outer), tiny))
            codes[t] = code if amax[t] != f32(0) else u32(0x3F80)
    elif kind == FP16_SCALE:
        for t in range(tiles):
            value = min(max(f32(f32(amax[t] / span) / outer), f32(2.0**-24)), f32(65504.0))
            codes[t] = fp16_code(value) if amax[t] != f32(0) else u32(0x3C00)
    else:
        for t in range(tiles):
            code = as_bits(max(f32(f32(amax[t] / span) / outer), tiny))
            codes[t] = code if amax[t] != f32(0) else u32(0x3F800000)


@inlined
def small_float(code: int, m: int, bias: int, sign: int, top: int, inf: int) -> float:
    """The float32 value of a float code of at most 16 bits; ``bias`` is 127 less the format's.

    Normal codes: the fields moved into place. Below them: an integer times the smallest subnormal.
    """
    size = u32(code & u32(u32(u32(1) << sign) - u32(1)))
    negative = u32(u32(code >> sign) << u32(31))
    normal = u32(u32(size << u32(u32(u32(23) - m) & u32(31))) + u32(bias << u32(23)))
    step = as_float(u32(u32(u32(bias + u32(1)) - m) << u32(23)))
    small = as_bits(f32(f32(i32(size)) * step))
    bits = normal if u32(size >> m) != u32(0) else small
    bits = u32(bits | negative)
    special = u32(u32(0x7F800000) | negative) if size == inf else u32(0x7FC00000)
    return as_float(special if size > top else bits)


@inlined
def load_scale(code: int, kind: int) -> float:
    """The float32 value of a stored scale."""
    if kind == BF16_SCALE:
        return as_float(u32(code << u32(16)))
    if kind == E8M0_SCALE:
        bits = u32(code << u32(23)) if code != u32(0) else u32(1 << 22)
        return as_float(bits if code != u32(255) else u32(0x7FC00000))
    if kind == E4M3_SCALE:
        return small_float(code, u32(3), u32(120), u32(7), u32(126), u32(1 << 16))
    if kind == FP16_SCALE:
        return small_float(code, u32(10), u32(112), u32(15), u32(0x7BFF), u32(0x7C00))
    return as_float(code)


@inlined
def spread_divisors(codes: Any, tiles: int, kind: int, outer: float, cols: int, k: int, divisors: Any) -> None:
    """divisors[u] = stored scale times the outer one, for every unit of 16 columns."""
    units = (k + UNIT - 1) // UNIT
    per_tile = cols // UNIT if cols else units
    for t in range(tiles):
        divisor = f32(load_scale(codes[t], kind) * outer)
        for u in range(t * per_tile, min(units, (t + 1) * per_tile)):
            divisors[u] = divisor


@inlined
def spread_zeros(zeros: Any, tiles: int, cols: int, k: int, offsets: Any) -> None:
    """offsets[u] = zero point of every unit of 16 columns."""
    units = (k + UNIT - 1) // UNIT
    per_tile = cols // UNIT if cols else units
    for t in range(tiles):
        for u in range(t * per_tile, min(units, (t + 1) * per_tile)):
            offsets[u] = f32(zeros[t])


@inlined
def widen_units(units: Any, count: int, elements: Any) -> None:
    """elements[j] = the number of j's unit of 16 columns; runs to the end of the last unit."""
    for u in range((count + UNIT - 1) // UNIT):
        number = units[u]
        for j in range(UNIT):
            elements[u * UNIT + j] = number


@inlined
def zero_points(highs: Any, lows: Any, tiles: int, kind: int, element: Any, codes: Any, zeros: Any) -> None:
    """zeros[t] = round(-low / scale) clamped to the codes; the middle code for an all-zero tile.

    Such a tile has scale 1, which ``store_scales`` gave it because its extent is zero.
    """
    top = as_float(element[HIGH])
    for t in range(tiles):
        value = f32(f32(-lows[t]) / load_scale(codes[t], kind))
        value = f32(min(max(value, f32(0)), top) + f32(ROUNDER))
        middle = u8((i32(top) + 1) // 2)
        empty = highs[t] == f32(0) and lows[t] == f32(0)
        zeros[t] = middle if empty else u8(u32(as_bits(value) & u32(0xFF)))
