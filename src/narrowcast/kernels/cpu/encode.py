"""Loops from stored elements to packed codes, one pass each over a stretch of a row that stays in the L1 cache.

    divide:  y = x / divisor          encode: y → code            pack: codes → bytes
"""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.kernels.cpu.codes import float_code, integer_code, nibbles
from narrowcast.kernels.cpu.lanes import as_float, at, widen
from narrowcast.kernels.cpu.loops import loop
from narrowcast.kernels.cpu.parameters import (
    DROP, FLOAT_ELEMENT, GAIN, HIGH, KIND, LOW, MAGIC, MASK, NORMAL, REBIAS, SIGN, TOP,
)  # fmt: skip

u8 = np.uint8


@loop
def divide(x: Any, count: int, divisors: Any, y: Any) -> None:
    """y[j] = x[j] / divisors[j]."""
    for j in range(count):
        y[j] = widen(x[j]) / divisors[j]


@loop
def add_zeros(y: Any, count: int, zeros: Any) -> None:
    """y[j] += zeros[j]."""
    for j in range(count):
        y[j] += zeros[j]


@loop
def encode(y: Any, count: int, element: Any, flip: int, codes: Any) -> None:
    """codes[j] = code of y[j], XORed with ``flip``."""
    if element[KIND] == FLOAT_ELEMENT:
        drop, rebias, normal = element[DROP], element[REBIAS], element[NORMAL]
        magic, top, sign = element[MAGIC], element[TOP], element[SIGN]
        for j in range(count):
            codes[j] = float_code(y[j], flip, drop, rebias, normal, magic, top, sign)
    else:
        low, high, gain = as_float(element[LOW]), as_float(element[HIGH]), as_float(element[GAIN])
        mask = element[MASK]
        for j in range(count):
            codes[j] = integer_code(y[j], flip, low, high, gain, mask)


@loop
def pack(codes: Any, count: int, bits: int, packed: Any) -> None:
    """4-bit codes two a byte, 6-bit codes four in three bytes, the first lowest; pads with zero codes."""
    for j in range(count, (count + 3) // 4 * 4):
        codes[j] = u8(0)
    if bits == 4:
        for j in range((count + 1) // 2):
            packed[j] = nibbles(codes[2 * j], codes[2 * j + 1])
    else:
        for j in range(count // 4):
            pack_four(at(codes, 4 * j), 3, at(packed, 3 * j))
        if count % 4:
            pack_four(at(codes, count // 4 * 4), (count % 4 * 6 + 7) // 8, at(packed, count // 4 * 3))


@loop
def pack_four(codes: Any, size: int, packed: Any) -> None:
    """Four 6-bit codes in three bytes, of which the first ``size`` are stored."""
    a, b, c, d = codes[0], codes[1], codes[2], codes[3]
    packed[0] = u8(a | (b << 6))
    if size > 1:
        packed[1] = u8((b >> 2) | (c << 4))
    if size > 2:
        packed[2] = u8((c >> 4) | (d << 2))
