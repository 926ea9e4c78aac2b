"""The dequantizing kernel: packed codes to (value - zero) · divisor, one rounding each, then one to the output."""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu.lanes import at
from narrowcast.kernels.cpu.loops import loop
from narrowcast.kernels.cpu.parameters import DECODING, FLOAT_ELEMENT, KIND, UNIT
from narrowcast.kernels.cpu.scales import load_tiles
from narrowcast.kernels.cpu.units import (
    decode_float4,
    decode_float6,
    decode_float8,
    decode_integer4,
    decode_integer6,
    decode_integer8,
)


@loop
def decode(
    packed: Any, units: int, element: Any, bits: int, flip: int, divisors: Any, offsets: Any, out: Any
) -> None:  # fmt: skip
    """Values of whole units."""
    kind, a, b, c = element[KIND], element[DECODING], element[DECODING + 1], element[DECODING + 2]
    d, e = element[DECODING + 3], element[DECODING + 4]
    for u in range(units):
        codes, y, divisor, zero = at(packed, 2 * u * bits), at(out, u * UNIT), divisors[u], offsets[u]
        if kind == FLOAT_ELEMENT:
            if bits == 8:
                decode_float8(y, codes, divisor, zero, flip, a, b, c, d, e)
            elif bits == 4:
                decode_float4(y, codes, divisor, zero, flip, a, b, c, d, e)
            else:
                decode_float6(y, codes, divisor, zero, flip, a, b, c, d, e)
        elif bits == 8:
            decode_integer8(y, codes, divisor, zero, flip, a, b, c, d, e)
        elif bits == 4:
            decode_integer4(y, codes, divisor, zero, flip, a, b, c, d, e)
        else:
            decode_integer6(y, codes, divisor, zero, flip, a, b, c, d, e)


@loop
def copy_last(packed: Any, rest: int, bits: int, last_packed: Any) -> None:
    """The bytes of fewer than 16 codes, where a whole unit can be read."""
    for j in range((rest * bits + 7) // 8):
        last_packed[j] = packed[j]


def dequantize_kernel(
    packed: Any, row_bytes: int, n: int, k: int, tile_rows: int, cols: int, tiles: int, element: Any, kind: int,
    outer: float, asymmetric: int, bits: int, flip: int, codes: Any, zeros: Any, out: Any,
    values: Any, divisors: Any, offsets: Any, last: Any, last_packed: Any,
) -> None:  # fmt: skip
    """Decode into out [n, k], float32 or bf16 patterns; the last row of arguments is scratch as in ``quantize``."""
    units, rest = k // UNIT, k % UNIT
    for i in range(n):
        if i % tile_rows == 0:
            r = i // tile_rows * tiles
            load_tiles(
                at(codes, r), at(zeros, r), tiles, kind, outer, cols, k, asymmetric, values, divisors, offsets
            )  # fmt: skip
        row = at(packed, i * row_bytes)
        decode(row, units, element, bits, flip, divisors, offsets, at(out, i * k))
        if rest:
            copy_last(at(row, 2 * units * bits), rest, bits, last_packed)
            decode(last_packed, 1, element, bits, flip, at(divisors, units), at(offsets, units), last)
            for j in range(rest):
                out[i * k + units * UNIT + j] = last[j]
