"""Loops from packed codes back to values: unpack, then (element - zero) · divisor, one rounding each."""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu.bits import as_bits, as_float, at, f32, i32, inlined, u8, u16, u32
from narrowcast.kernels.cpu.parameters import (
    BIAS, FLOAT_ELEMENT, INF, KIND, MANTISSA, MASK, OFFSET, SIGN, STEP, STRETCH, TOP, UNIT,
)  # fmt: skip
from narrowcast.kernels.cpu.scales import bf16_code, small_float, spread_divisors, spread_zeros, widen_units


@inlined
def unpack(packed: Any, count: int, bits: int, flip: int, codes: Any) -> None:
    """The codes of a stretch; an odd last nibble brings its padding along."""
    flipped = u32(flip)
    if bits == 8:
        for j in range(count):
            codes[j] = u8(u32(packed[j]) ^ flipped)
    elif bits == 4:
        for j in range((count + 1) // 2):
            both = u32(packed[j])
            codes[2 * j] = u8(u32(both & u32(15)) ^ flipped)
            codes[2 * j + 1] = u8(u32(both >> u32(4)) ^ flipped)
    else:
        for j in range(count // 4):
            unpack_four(at(packed, 3 * j), flipped, at(codes, 4 * j))
        for j in range(count // 4 * 4, count):
            pair, shift = u32(packed[j * 6 // 8]), j * 6 % 8
            if shift > 2:
                pair = u32(pair | u32(u32(packed[j * 6 // 8 + 1]) << u32(8)))
            codes[j] = u8(u32(u32(pair >> u32(shift)) & u32(63)) ^ flipped)


@inlined
def unpack_four(packed: Any, flipped: int, codes: Any) -> None:
    """Four 6-bit codes from three bytes."""
    a, b, c = u32(packed[0]), u32(packed[1]), u32(packed[2])
    codes[0] = u8(u32(a & u32(63)) ^ flipped)
    codes[1] = u8(u32(u32(u32(a >> u32(6)) | u32(b << u32(2))) & u32(63)) ^ flipped)
    codes[2] = u8(u32(u32(u32(b >> u32(4)) | u32(c << u32(4))) & u32(63)) ^ flipped)
    codes[3] = u8(u32(c >> u32(2)) ^ flipped)


@inlined
def decode(codes: Any, count: int, element: Any, divisors: Any, zeros: Any, y: Any) -> None:
    """y[j] = (value of codes[j] - zeros[j]) · divisors[j]."""
    if element[KIND] == FLOAT_ELEMENT:
        m, bias, sign = u32(element[MANTISSA] & u32(31)), element[BIAS], u32(element[SIGN] & u32(31))
        top, inf = element[TOP], element[INF]
        for j in range(count):
            y[j] = f32(small_float(u32(codes[j]), m, bias, sign, top, inf) * divisors[j])
    else:
        sign, step, mask = element[OFFSET], as_float(element[STEP]), element[MASK]
        for j in range(count):
            code = u32(u32(codes[j]) & mask)
            value = f32(f32(i32(i32(u32(code ^ sign)) - i32(sign))) * step)
            y[j] = f32(f32(value - zeros[j]) * divisors[j])


@inlined
def load_tiles(
    codes: Any, zeros: Any, tiles: int, kind: int, outer: float, cols: int, k: int, asymmetric: int, divisors: Any,
    offsets: Any,
) -> None:  # fmt: skip
    """Divisors and zero points of one row of tiles, spread over units of 16 columns."""
    spread_divisors(codes, tiles, kind, outer, cols, k, divisors)
    if asymmetric:
        spread_zeros(zeros, tiles, cols, k, offsets)


@inlined
def narrow(y: Any, count: int, out: Any) -> None:
    """Nearest-even bf16 patterns; NaN is quieted."""
    for j in range(count):
        bits = as_bits(y[j])
        nan = u32(bits & u32(0x7FFFFFFF)) > u32(0x7F800000)
        out[j] = u16(u32(u32(bits >> u32(16)) | u32(0x40)) if nan else bf16_code(y[j]))


@inlined
def copy(y: Any, count: int, out: Any) -> None:
    """out[j] = y[j]."""
    for j in range(count):
        out[j] = y[j]


def dequantize_kernel(
    packed: Any, row_bytes: int, n: int, k: int, tile_rows: int, cols: int, tiles: int, element: Any, kind: int,
    outer: float, asymmetric: int, bits: int, flip: int, codes: Any, zeros: Any, wide: int, out32: Any, out16: Any,
    divisors: Any, offsets: Any, spread: Any, zeros_spread: Any, y: Any, buffer: Any,
) -> None:  # fmt: skip
    """Decode into out32 [n, k] when ``wide``, else into the bf16 patterns out16 [n, k].

    ``zeros_spread`` begins as zeros. The last row of arguments is scratch.
    """
    for i in range(n):
        if i % tile_rows == 0:
            r = i // tile_rows
            load_tiles(
                at(codes, r * tiles), at(zeros, r * tiles), tiles, kind, outer, cols, k, asymmetric, divisors, offsets
            )  # fmt: skip
        for j in range(0, k, STRETCH):
            count = min(STRETCH, k - j)
            unpack(at(packed, i * row_bytes + j * bits // 8), count, bits, flip, buffer)
            widen_units(at(divisors, j // UNIT), count, spread)
            if asymmetric:
                widen_units(at(offsets, j // UNIT), count, zeros_spread)
            decode(buffer, count, element, spread, zeros_spread, y)
            if wide:
                copy(y, count, at(out32, i * k + j))
            else:
                narrow(y, count, at(out16, i * k + j))
