"""Loops from packed codes back to values: unpack, then (element - zero) · divisor, one rounding each."""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu.bits import as_bits, as_float, f32, i32, inlined, u8, u16, u32
from narrowcast.kernels.cpu.encode import STRETCH, UNIT
from narrowcast.kernels.cpu.parameters import (
    BIAS,
    FLOAT_ELEMENT,
    INF,
    KIND,
    MANTISSA,
    MASK,
    OFFSET,
    SIGN,
    STEP,
    TOP,
)
from narrowcast.kernels.cpu.scales import bf16_code, spread_divisors

QUIET_NAN = 0x7FC00000


@inlined
def unpack_row(packed: Any, first: int, count: int, bits: int, flip: int, codes: Any) -> None:
    """codes[j] = code of column first + j; ``first`` is a multiple of 4."""
    flip8 = u32(flip)
    if bits == 8:
        for j in range(count):
            codes[j] = u8(u32(packed[first + j]) ^ flip8)
    elif bits == 4:
        for j in range((count + 1) // 2):
            both = u32(packed[first // 2 + j])
            codes[2 * j] = u8(u32(both & u32(15)) ^ flip8)
            codes[2 * j + 1] = u8(u32(both >> u32(4)) ^ flip8)
    else:
        at = first // 4 * 3
        for j in range(count // 4):
            a, b, c = u32(packed[at + 3 * j]), u32(packed[at + 3 * j + 1]), u32(packed[at + 3 * j + 2])
            codes[4 * j] = u8(u32(a & u32(63)) ^ flip8)
            codes[4 * j + 1] = u8(u32(u32(u32(a >> u32(6)) | u32(b << u32(2))) & u32(63)) ^ flip8)
            codes[4 * j + 2] = u8(u32(u32(u32(b >> u32(4)) | u32(c << u32(4))) & u32(63)) ^ flip8)
            codes[4 * j + 3] = u8(u32(c >> u32(2)) ^ flip8)
        for j in range(count // 4 * 4, count):
            byte, shift = at + j * 6 // 8, j * 6 % 8
            pair = u32(packed[byte])
            if shift > 2:
                pair = u32(pair | u32(u32(packed[byte + 1]) << u32(8)))
            codes[j] = u8(u32(u32(pair >> u32(shift)) & u32(63)) ^ flip8)


@inlined
def float_value(code: int, m: int, bias: int, sign: int, top: int, inf: int) -> float:
    """The float32 value of a code: its fields moved into place, or below the normals an integer times a step."""
    size = u32(code & u32(u32(u32(1) << sign) - u32(1)))
    negative = u32(u32(code >> sign) << u32(31))
    normal = u32(u32(size << u32(u32(u32(23) - m) & u32(31))) + u32(bias << u32(23)))
    step = as_float(u32(u32(u32(bias + u32(1)) - m) << u32(23)))
    small = as_bits(f32(f32(i32(size)) * step))
    bits = normal if u32(size >> m) != u32(0) else small
    bits = u32(bits | negative)
    special = u32(u32(0x7F800000) | negative) if size == inf else u32(QUIET_NAN)
    return as_float(special if size > top else bits)


@inlined
def integer_value(code: int, offset: int, step: float) -> float:
    """The float32 value of a two's complement or unsigned code."""
    return f32(f32(i32(i32(u32(code) ^ offset) - i32(offset))) * step)


@inlined
def decode(codes: Any, first: int, count: int, element: Any, divisors: Any, offsets: Any, y: Any) -> None:
    """y[j] = (value of codes[j] - zero) · divisor, by units of 16 columns."""
    units = (count + UNIT - 1) // UNIT
    if element[KIND] == FLOAT_ELEMENT:
        m, bias, sign = u32(element[MANTISSA] & u32(31)), element[BIAS], u32(element[SIGN] & u32(31))
        top, inf = element[TOP], element[INF]
        for u in range(units):
            divisor = divisors[first // UNIT + u]
            for j in range(UNIT):
                code = u32(codes[u * UNIT + j])
                y[u * UNIT + j] = f32(float_value(code, m, bias, sign, top, inf) * divisor)
    else:
        offset, step, mask = element[OFFSET], as_float(element[STEP]), element[MASK]
        for u in range(units):
            divisor, zero = divisors[first // UNIT + u], offsets[first // UNIT + u]
            for j in range(UNIT):
                value = integer_value(u32(u32(codes[u * UNIT + j]) & mask), offset, step)
                y[u * UNIT + j] = f32(f32(value - zero) * divisor)


@inlined
def load_tiles(
    codes: Any, zeros: Any, kind: int, outer: float, cols: int, asymmetric: bool, divisors: Any, offsets: Any
) -> None:
    """Divisors and zero points of one row of tiles, spread over units of 16 columns."""
    spread_divisors(codes, kind, outer, cols, divisors)
    offsets[:] = 0
    if asymmetric:
        for u in range(len(offsets)):
            offsets[u] = f32(zeros[u * UNIT // cols if cols else 0])


@inlined
def dequantize_kernel(
    packed: Any, k: int, tile_rows: int, cols: int, element: Any, kind: int, outer: float, asymmetric: bool,
    bits: int, flip: int, codes: Any, zeros: Any, wide: bool, out32: Any, out16: Any,
    divisors: Any, offsets: Any, y: Any, buffer: Any,
) -> None:  # fmt: skip
    """Decode into out32 [n, k] when ``wide``, else into the bf16 patterns out16 [n, k]; then come scratch arrays."""
    n = packed.shape[0]
    for r in range(codes.shape[0]):
        load_tiles(codes[r], zeros[r], kind, outer, cols, asymmetric, divisors, offsets)
        for i in range(r * tile_rows, min(n, (r + 1) * tile_rows)):
            for first in range(0, k, STRETCH):
                count = min(STRETCH, k - first)
                unpack_row(packed[i], first, count, bits, flip, buffer)
                decode(buffer, first, count, element, divisors, offsets, y)
                if wide:
                    for j in range(count):
                        out32[i, first + j] = y[j]
                else:
                    for j in range(count):
                        word = as_bits(y[j])
                        nan = u32(word & u32(0x7FFFFFFF)) > u32(0x7F800000)
                        code = u32(u32(word >> u32(16)) | u32(0x40)) if nan else bf16_code(y[j])
                        out16[i, first + j] = u16(code)
