"""The dequantizing kernel: packed codes to (value - zero) · divisor, one rounding each, then one to the output."""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu import units
from narrowcast.kernels.cpu.lanes import at
from narrowcast.kernels.cpu.loops import loop
from narrowcast.kernels.cpu.parameters import DECODING, UNIT
from narrowcast.kernels.cpu.scales import load_tiles
from narrowcast.kernels.cpu.units import Codes


def decoder(how: Codes) -> Any:
    """The function that makes values of ``count`` whole units of codes."""
    decode, bits = units.decode(how), how.bits

    @loop
    def decode_units(
        packed: Any, count: int, element: Any, flip: int, divisors: Any, offsets: Any, out: Any
    ) -> None:  # fmt: skip
        a, b, c = element[DECODING], element[DECODING + 1], element[DECODING + 2]
        d, e = element[DECODING + 3], element[DECODING + 4]
        for u in range(count):
            decode(at(out, u * UNIT), at(packed, 2 * u * bits), divisors[u], offsets[u], flip, a, b, c, d, e)

    return decode_units


@loop
def copy_last(packed: Any, bits: int, last_packed: Any) -> None:
    """The bytes that hold ``bits`` bits, to where a whole unit can be read."""
    for j in range((bits + 7) // 8):
        last_packed[j] = packed[j]


def dequantize_kernel(how: Codes) -> Any:
    """The function that decodes into out [n, k], float32 or bf16 patterns; the last row of arguments is scratch as in
    ``quantize``."""
    decode_units, bits = decoder(how), how.bits

    def dequantize(
        packed: Any, row_bytes: int, n: int, k: int, tile_rows: int, cols: int, tiles: int, element: Any, kind: int,
        outer: float, asymmetric: int, flip: int, codes: Any, zeros: Any, out: Any,
        values: Any, divisors: Any, offsets: Any, last: Any, last_packed: Any,
    ) -> None:  # fmt: skip
        whole, rest = k // UNIT, k % UNIT
        for i in range(n):
            if i % tile_rows == 0:
                r = i // tile_rows * tiles
                load_tiles(
                    at(codes, r), at(zeros, r), tiles, kind, outer, cols, k, asymmetric, values, divisors, offsets
                )  # fmt: skip
            row = at(packed, i * row_bytes)
            decode_units(row, whole, element, flip, divisors, offsets, at(out, i * k))
            if rest:
                copy_last(at(row, 2 * whole * bits), rest * bits, last_packed)
                decode_units(last_packed, 1, element, flip, at(divisors, whole), at(offsets, whole), last)
                for j in range(rest):
                    out[i * k + whole * UNIT + j] = last[j]

    return dequantize
