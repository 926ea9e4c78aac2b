"""Loops from stored elements to packed codes, one pass each over a stretch of a row that stays in the L1 cache.

    divide:  y = widen(x) / divisor          encode: y → code            pack: codes → bytes

A float code is made by arithmetic on the bits of y. Normal results: add half of the dropped bits, less one plus
the lowest kept bit, and shift (ties go to even, a carry moves into the exponent). Subnormal results: add a
number whose ulp is the smallest subnormal and read its low bits. An integer code is the low bits of
y + 1.5·2^23.
"""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu.bits import as_bits, as_float, at, f32, inlined, u8, u32, widen
from narrowcast.kernels.cpu.parameters import (
    DROP, FLOAT_ELEMENT, GAIN, HIGH, KIND, LOW, MAGIC, MASK, NORMAL, REBIAS, SIGN, TOP,
)  # fmt: skip

ROUNDER = 1.5 * 2.0**23  # float32 has an ulp of 1 here


@inlined
def divide(x: Any, count: int, divisors: Any, y: Any) -> None:
    """y[j] = x[j] / divisors[j]."""
    for j in range(count):
        y[j] = f32(widen(x[j]) / divisors[j])


@inlined
def add_zeros(y: Any, count: int, zeros: Any) -> None:
    """y[j] += zeros[j]."""
    for j in range(count):
        y[j] = f32(y[j] + zeros[j])


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
    flipped = u32(flip)
    if element[KIND] == FLOAT_ELEMENT:
        drop, sign = u32(element[DROP] & u32(31)), u32(element[SIGN] & u32(31))
        rebias, normal, top, magic = element[REBIAS], element[NORMAL], element[TOP], as_float(element[MAGIC])
        for j in range(count):
            codes[j] = u8(u32(float_code(y[j], drop, rebias, normal, magic, top, sign) ^ flipped))
    else:
        high, low, gain = as_float(element[HIGH]), as_float(element[LOW]), as_float(element[GAIN])
        mask = element[MASK]
        for j in range(count):
            clamped = min(max(y[j], low), high)
            codes[j] = u8(u32(u32(as_bits(f32(f32(clamped * gain) + f32(ROUNDER))) & mask) ^ flipped))


@inlined
def pack(codes: Any, count: int, bits: int, packed: Any) -> None:
    """4-bit codes two a byte, 6-bit codes four in three bytes, the first lowest; pads with zero codes."""
    if bits == 4:
        if count % 2:
            codes[count] = u8(0)
        for j in range((count + 1) // 2):
            packed[j] = u8(u32(codes[2 * j]) | u32(u32(codes[2 * j + 1]) << u32(4)))
    else:
        for j in range(count // 4):
            pack_four(at(codes, 4 * j), at(packed, 3 * j))
        if count % 4:
            pack_last(at(codes, count // 4 * 4), count % 4, at(packed, count // 4 * 3))


@inlined
def pack_four(codes: Any, packed: Any) -> None:
    """Four 6-bit codes in three bytes."""
    a, b, c, d = u32(codes[0]), u32(codes[1]), u32(codes[2]), u32(codes[3])
    packed[0] = u8(a | u32(b << u32(6)))
    packed[1] = u8(u32(b >> u32(2)) | u32(c << u32(4)))
    packed[2] = u8(u32(c >> u32(4)) | u32(d << u32(2)))


@inlined
def pack_last(codes: Any, count: int, packed: Any) -> None:
    """One to three 6-bit codes in as many bytes as they need."""
    stream = u32(0)
    for j in range(count):
        stream = u32(stream | u32(u32(codes[j]) << u32(6 * j)))
    for j in range((count * 6 + 7) // 8):
        packed[j] = u8(u32(u32(stream >> u32(8 * j)) & u32(255)))
