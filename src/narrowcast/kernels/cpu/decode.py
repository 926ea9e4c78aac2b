"""Loops from packed codes back to values: unpack, then (element - zero) · divisor, one rounding each."""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.kernels.cpu.codes import bf16_value, float_value, high_nibble, integer_value, low_nibble
from narrowcast.kernels.cpu.lanes import as_float, at
from narrowcast.kernels.cpu.loops import loop
from narrowcast.kernels.cpu.parameters import (
    BIAS, FLOAT_ELEMENT, INF, KIND, MANTISSA, MASK, OFFSET, SIGN, STEP, STRETCH, TOP, UNIT,
)  # fmt: skip
from narrowcast.kernels.cpu.scales import load_scales, to_elements, to_units

u8 = np.uint8


@loop
def unpack(packed: Any, count: int, bits: int, flip: int, codes: Any) -> None:
    """The codes of a stretch; a last byte brings its padding along."""
    if bits == 8:
        for j in range(count):
            codes[j] = packed[j]
    elif bits == 4:
        for j in range((count + 1) // 2):
            codes[2 * j] = low_nibble(packed[j])
            codes[2 * j + 1] = high_nibble(packed[j])
    else:
        for j in range(count // 4):
            unpack_four(at(packed, 3 * j), 3, at(codes, 4 * j))
        if count % 4:
            unpack_four(at(packed, count // 4 * 3), (count % 4 * 6 + 7) // 8, at(codes, count // 4 * 4))
    if flip:
        for j in range(count):
            codes[j] = u8(codes[j] ^ flip)


@loop
def unpack_four(packed: Any, size: int, codes: Any) -> None:
    """Four 6-bit codes from three bytes, of which the first ``size`` are read."""
    a, b, c = packed[0], u8(0), u8(0)
    if size > 1:
        b = packed[1]
    if size > 2:
        c = packed[2]
    codes[0] = u8(a & 63)
    codes[1] = u8(((a >> 6) | (b << 2)) & 63)
    codes[2] = u8(((b >> 4) | (c << 4)) & 63)
    codes[3] = u8(c >> 2)


@loop
def decode(codes: Any, count: int, element: Any, divisors: Any, zeros: Any, y: Any) -> None:
    """y[j] = (value of codes[j] - zeros[j]) · divisors[j]."""
    if element[KIND] == FLOAT_ELEMENT:
        m, bias, sign, top, inf = element[MANTISSA], element[BIAS], element[SIGN], element[TOP], element[INF]
        for j in range(count):
            y[j] = float_value(codes[j], divisors[j], m, bias, sign, top, inf)
    else:
        mask, sign, step = element[MASK], element[OFFSET], as_float(element[STEP])
        for j in range(count):
            y[j] = integer_value(codes[j], divisors[j], zeros[j], mask, sign, step)


@loop
def load_tiles(
    codes: Any, zeros: Any, tiles: int, kind: int, outer: float, cols: int, k: int, asymmetric: int, values: Any,
    divisors: Any, offsets: Any,
) -> None:  # fmt: skip
    """Divisors and zero points of one row of tiles, spread over units of 16 columns."""
    load_scales(codes, tiles, kind, outer, values)
    to_units(values, cols, k, divisors)
    if asymmetric:
        for t in range(tiles):
            values[t] = zeros[t]
        to_units(values, cols, k, offsets)


@loop
def store(y: Any, count: int, wide: int, out32: Any, out16: Any) -> None:
    """Values as float32, or as bf16 patterns."""
    if wide:
        for j in range(count):
            out32[j] = y[j]
    else:
        for j in range(count):
            out16[j] = bf16_value(y[j])


def dequantize_kernel(
    packed: Any, row_bytes: int, n: int, k: int, tile_rows: int, cols: int, tiles: int, element: Any, kind: int,
    outer: float, asymmetric: int, bits: int, flip: int, codes: Any, zeros: Any, wide: int, out32: Any, out16: Any,
    values: Any, divisors: Any, offsets: Any, spread: Any, zeros_spread: Any, y: Any, buffer: Any,
) -> None:  # fmt: skip
    """Decode into out32 [n, k] when ``wide``, else into the bf16 patterns out16 [n, k].

    The last row of arguments is scratch, of which ``zeros_spread`` begins as zeros.
    """
    for i in range(n):
        if i % tile_rows == 0:
            r = i // tile_rows * tiles
            load_tiles(
                at(codes, r), at(zeros, r), tiles, kind, outer, cols, k, asymmetric, values, divisors, offsets
            )  # fmt: skip
        for j in range(0, k, STRETCH):
            count = min(STRETCH, k - j)
            to_elements(at(divisors, j // UNIT), count, spread)
            if asymmetric:
                to_elements(at(offsets, j // UNIT), count, zeros_spread)
            unpack(at(packed, i * row_bytes + j * bits // 8), count, bits, flip, buffer)
            decode(buffer, count, element, spread, zeros_spread, y)
            store(y, count, wide, at(out32, i * k + j), at(out16, i * k + j))
