"""Tile maxima and scales, per row of tiles: short vectors, a sixteenth of the elements or fewer."""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu.bits import (
    as_bits, as_float, f32, i32, inlined, larger, larger_signed, magnitude, u8, u32,
)  # fmt: skip
from narrowcast.kernels.cpu.encode import UNIT, float_code
from narrowcast.kernels.cpu.parameters import (
    BF16_SCALE, E4M3_SCALE, E8M0_SCALE, EMAX, FP16_SCALE, HIGH, KIND, SPAN, THRESHOLD,
)  # fmt: skip

SMALLEST = 2.0**-126  # no stored scale in fp32 or bf16 is smaller


@inlined
def row_peak(row: Any, peak: Any) -> Any:
    """The largest magnitude of a row, in the carrier."""
    for j in range(len(row)):
        peak = larger(peak, magnitude(row[j]))
    return peak


@inlined
def tile_peaks(row: Any, cols: int, peaks: Any) -> None:
    """Raise peaks[t] to the largest magnitude of row in tile t."""
    for t in range(len(row) // cols):
        peak = peaks[t]
        for u in range(t * cols // UNIT, (t + 1) * cols // UNIT):
            unit = magnitude(row[u * UNIT])
            for j in range(1, UNIT):
                unit = larger(unit, magnitude(row[u * UNIT + j]))
            peak = larger(peak, unit)
        peaks[t] = peak
    for j in range(len(row) // cols * cols, len(row)):
        t = j // cols
        peaks[t] = larger(peaks[t], magnitude(row[j]))


@inlined
def tile_extremes(row: Any, cols: int, highs: Any, lows: Any) -> None:
    """highs[t], lows[t]: the largest positive and the most negative element of tile t, in the carrier.

    As signed integers positive floats order like their values and lie above all negative ones; as unsigned
    integers the most negative float is the largest of all.
    """
    cols = cols if cols else len(row)
    for t in range((len(row) + cols - 1) // cols):
        first, last = t * cols, min(len(row), (t + 1) * cols)
        high, low = highs[t], lows[t]
        for j in range(first, last):
            high = larger_signed(high, row[j])
            low = larger(low, row[j])
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
    """Nearest-even bf16 pattern of a finite float32."""
    bits = as_bits(x)
    return u32(u32(u32(bits + u32(0x7FFF)) + u32(u32(bits >> u32(16)) & u32(1))) >> u32(16))


@inlined
def fp16_code(x: float) -> int:
    """Nearest-even fp16 pattern of a float32 that is not NaN; beyond the range it is infinity."""
    magic = f32(2.0**-1)  # ulp 2^-24
    rebias = u32(0xFFF - (112 << 23) & 0xFFFFFFFF)
    return float_code(x, u32(13), rebias, u32(113 << 23), magic, u32(0x7C00), u32(15))


@inlined
def e4m3_code(x: float) -> int:
    """Nearest-even saturated E4M3 code of a float32."""
    magic = f32(2.0**14)  # ulp 2^-9
    rebias = u32(0x7FFFF - (120 << 23) & 0xFFFFFFFF)
    return float_code(x, u32(20), rebias, u32(121 << 23), magic, u32(126), u32(7))


@inlined
def store_scales(amax: Any, scale: Any, outer: float, codes: Any) -> None:
    """codes[t] = the stored scale of a tile with this amax, by the scheme's rule and scale format."""
    kind, span, tiny = scale[KIND], as_float(scale[SPAN]), f32(SMALLEST)
    if kind == E8M0_SCALE:
        for t in range(len(amax)):
            codes[t] = power_of_two_code(amax[t], scale)
    elif kind == E4M3_SCALE:
        for t in range(len(amax)):
            code = max(e4m3_code(f32(f32(amax[t] / span) / outer)), u32(1))
            codes[t] = code if amax[t] != f32(0) else u32(0x38)
    elif kind == BF16_SCALE:
        for t in range(len(amax)):
            code = bf16_code(max(f32(f32(amax[t] / span) / outer), tiny))
            codes[t] = code if amax[t] != f32(0) else u32(0x3F80)
    elif kind == FP16_SCALE:
        for t in range(len(amax)):
            value = min(max(f32(f32(amax[t] / span) / outer), f32(2.0**-24)), f32(65504.0))
            codes[t] = fp16_code(value) if amax[t] != f32(0) else u32(0x3C00)
    else:
        for t in range(len(amax)):
            code = as_bits(max(f32(f32(amax[t] / span) / outer), tiny))
            codes[t] = code if amax[t] != f32(0) else u32(0x3F800000)


@inlined
def load_scale(code: int, kind: int) -> float:
    """The float32 value of a stored scale; E8M0 255 and E4M3 127 are NaN."""
    if kind == BF16_SCALE:
        return as_float(u32(code << u32(16)))
    if kind == E8M0_SCALE:
        bits = u32(code << u32(23)) if code != u32(0) else u32(1 << 22)
        return as_float(bits if code != u32(255) else u32(0x7FC00000))
    if kind == E4M3_SCALE or kind == FP16_SCALE:
        eight = kind == E4M3_SCALE
        m, bias, top = u32(3 if eight else 10), u32(120 if eight else 112), u32(126 if eight else 0x7BFF)
        size = u32(code & u32(0x7F if eight else 0x7FFF))
        normal = as_float(u32(u32(size << u32(u32(23) - m)) + u32(bias << u32(23))))
        small = f32(f32(i32(size)) * (f32(2.0**-9) if eight else f32(2.0**-24)))
        value = normal if u32(size >> m) != u32(0) else small
        special = u32(0x7F800000) if not eight and size == u32(0x7C00) else u32(0x7FC00000)
        value = as_float(special) if size > top else value
        negative = u32(code >> u32(7 if eight else 15)) != u32(0) and not value != value
        return f32(-value) if negative else value
    return as_float(code)


@inlined
def spread_divisors(codes: Any, kind: int, outer: float, cols: int, divisors: Any) -> None:
    """divisors[u] = stored scale times the outer one, for every unit of 16 columns."""
    for t in range(len(codes)):
        value = f32(load_scale(codes[t], kind) * outer)
        last = min(len(divisors), (t + 1) * cols // UNIT) if cols else len(divisors)
        for u in range(t * cols // UNIT, last):
            divisors[u] = value


@inlined
def zero_points(highs: Any, lows: Any, kind: int, element: Any, codes: Any, zeros: Any) -> None:
    """zeros[t] = round(-low / scale) clamped to the codes; the middle code for an all-zero tile.

    Such a tile has scale 1, which ``store_scales`` gave it because its extent is zero.
    """
    high = as_float(element[HIGH])
    for t in range(len(codes)):
        if highs[t] == f32(0) and lows[t] == f32(0):
            zeros[t] = u8((i32(high) + 1) // 2)
            continue
        value = f32(f32(-lows[t]) / load_scale(codes[t], kind))
        value = min(max(value, f32(0)), high)
        zeros[t] = u8(as_bits(f32(value + f32(1.5 * 2.0**23))) & u32(0xFF))
