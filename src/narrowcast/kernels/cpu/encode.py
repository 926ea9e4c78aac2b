"""Loops from stored elements to packed codes, one pass each over a stretch of a row that stays in the L1 cache.

    divide:  y = widen(x) / divisor          encode: y → code            pack: codes → bytes

A float code is made by arithmetic on the bits of y. Normal results: add half of the dropped bits, less one plus
the lowest kept bit, and shift (ties go to even, a carry moves into the exponent). Subnormal results: add a number
whose ulp is the smallest subnormal and read its low bits. An integer code is the low bits of y + 1.5·2^23.
"""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu.bits import as_bits, as_float, f32, inlined, u8, u32, widen
from narrowcast.kernels.cpu.parameters import (
    DROP, FLOAT_ELEMENT, GAIN, HIGH, KIND, LOW, MAGIC, MASK, NORMAL, REBIAS, SIGN, TOP,
)  # fmt: skip

UNIT = 16  # tiles are whole multiples of this many columns; one AVX-512 register of float32
STRETCH = 2048  # columns per pass: 8 KiB of quotients
ROUNDER = 1.5 * 2.0**23  # float32 has an ulp of 1 here


@inlined
def divide(stored: Any, first: int, count: int, divisors: Any, y: Any) -> None:
    """y[j] = stored[first + j] / divisor of its unit of 16 columns; ``first`` is a multiple of 16."""
    units = count // UNIT
    for u in range(units):
        divisor = divisors[first // UNIT + u]
        for j in range(UNIT):
            y[u * UNIT + j] = widen(stored[first + u * UNIT + j]) / divisor
    for j in range(units * UNIT, count):
        y[j] = widen(stored[first + j]) / divisors[(first + j) // UNIT]


@inlined
def add_zeros(y: Any, first: int, count: int, zeros: Any) -> None:
    """Add the zero point of each unit."""
    for u in range((count + UNIT - 1) // UNIT):
        zero = zeros[first // UNIT + u]
        for j in range(u * UNIT, min(count, u * UNIT + UNIT)):
            y[j] = y[j] + zero


@inlined
def float_code(y: float, drop: int, rebias: int, normal: int, magic: float, top: int, sign: int) -> int:
    """Nearest-even code of y in a float format, saturating; the sign is kept for zeros too."""
    bits = as_bits(y)
    a = u32(bits & u32(0x7FFFFFFF))
    odd = u32(u32(a >> drop) & u32(1))
    rounded = u32(u32(u32(a + rebias) + odd) >> drop)
    small = u32(as_bits(f32(as_float(a) + magic)) - as_bits(magic))
    code = rounded if a >= normal else small
    code = min(code, top)
    return u32(code | u32(u32(bits >> u32(31)) << sign))


@inlined
def encode(y: Any, count: int, element: Any, flip: int, codes: Any) -> None:
    """codes[j] = code of y[j], XORed with ``flip``."""
    flip8 = u32(flip)
    if element[KIND] == FLOAT_ELEMENT:
        drop, sign = u32(element[DROP] & u32(31)), u32(element[SIGN] & u32(31))
        rebias, normal, top, magic = element[REBIAS], element[NORMAL], element[TOP], as_float(element[MAGIC])
        for j in range(count):
            codes[j] = u8(float_code(y[j], drop, rebias, normal, magic, top, sign) ^ flip8)
    else:
        high, low, gain = as_float(element[HIGH]), as_float(element[LOW]), as_float(element[GAIN])
        mask = element[MASK]
        for j in range(count):
            clamped = min(max(y[j], low), high)
            codes[j] = u8(u32(as_bits(f32(f32(clamped * gain) + f32(ROUNDER))) & mask) ^ flip8)


@inlined
def pack_nibbles(codes: Any, count: int, packed: Any, at: int) -> None:
    """Two 4-bit codes a byte, the first in the low nibble; ``count`` is even."""
    for j in range(count // 2):
        packed[at + j] = u8(u32(codes[2 * j]) | u32(u32(codes[2 * j + 1]) << u32(4)))


@inlined
def pack_sixes(codes: Any, count: int, packed: Any, at: int) -> None:
    """Four 6-bit codes in three bytes, little-endian; ``count`` is a multiple of 4."""
    for j in range(count // 4):
        a, b, c, d = u32(codes[4 * j]), u32(codes[4 * j + 1]), u32(codes[4 * j + 2]), u32(codes[4 * j + 3])
        packed[at + 3 * j] = u8(a | u32(b << u32(6)))
        packed[at + 3 * j + 1] = u8(u32(b >> u32(2)) | u32(c << u32(4)))
        packed[at + 3 * j + 2] = u8(u32(c >> u32(4)) | u32(d << u32(2)))


@inlined
def pack_row(codes: Any, first: int, count: int, bits: int, packed: Any) -> None:
    """Pack a stretch of codes that begins at column ``first`` (a multiple of 4); pads with zero codes."""
    if bits == 8:
        for j in range(count):
            packed[first + j] = codes[j]
        return
    padded = (count + 3) // 4 * 4
    for j in range(count, padded):
        codes[j] = u8(0)
    if bits == 4:
        pack_nibbles(codes, (count + 1) // 2 * 2, packed, first // 2)
        return
    pack_sixes(codes, count // 4 * 4, packed, first // 4 * 3)
    if count % 4:
        whole = count // 4 * 4
        last = u32(0)
        for j in range(count - whole):
            last = u32(last | u32(u32(codes[whole + j]) << u32(6 * j)))
        for j in range(((count - whole) * 6 + 7) // 8):
            packed[(first + whole) // 4 * 3 + j] = u8(u32(last >> u32(8 * j)) & u32(255))
