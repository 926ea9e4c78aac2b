"""The quantizing kernel: rows of tiles, each in three passes (peaks, scales, codes) while it is in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.kernels.cpu import units
from narrowcast.kernels.cpu.lanes import at
from narrowcast.kernels.cpu.loops import loop
from narrowcast.kernels.cpu.parameters import ENCODING, KIND, UNIT
from narrowcast.kernels.cpu.scales import (
    load_tiles,
    make_scales,
    row_peak,
    tile_extremes,
    tile_peaks,
)
from narrowcast.kernels.cpu.units import Codes

u8 = np.uint8


@loop
def measure(x: Any, n: int, k: int, cols: int, tiles: int, asymmetric: int, peaks: Any, lows: Any) -> None:
    """Peaks (or the largest and most negative elements) of the tiles of n rows, in the carrier."""
    for t in range(tiles):
        peaks[t] = 0
        lows[t] = 0
    for i in range(n):
        if asymmetric:
            tile_extremes(at(x, i * k), k, cols, peaks, lows)
        elif cols < k:
            tile_peaks(at(x, i * k), k, cols, peaks)
        else:
            peaks[0] = row_peak(at(x, i * k), k, peaks[0])


def row_encoder(how: Codes) -> Any:
    """The function that packs the codes of a row."""
    encode, bits = units.encode(how), how.bits

    @loop
    def encode_row(
        x: Any,
        k: int,
        element: Any,
        flip: int,
        divisors: Any,
        offsets: Any,
        packed: Any,
        last: Any,
        last_packed: Any,
    ) -> None:
        a, b, c = element[ENCODING], element[ENCODING + 1], element[ENCODING + 2]
        d, e, f = element[ENCODING + 3], element[ENCODING + 4], element[ENCODING + 5]
        whole, rest = k // UNIT, k % UNIT
        for u in range(whole):
            encode(at(packed, 2 * u * bits), at(x, u * UNIT), divisors[u], offsets[u], flip, a, b, c, d, e, f)
        if rest:  # what lies beyond whole units goes through a padded copy
            for j in range(UNIT):
                last[j] = x[whole * UNIT + j] if j < rest else 0
            encode(last_packed, last, divisors[whole], offsets[whole], flip, a, b, c, d, e, f)
            keep_last(last_packed, rest * bits, at(packed, 2 * whole * bits))

    return encode_row


@loop
def keep_last(last_packed: Any, bits: int, packed: Any) -> None:
    """Copy the first ``bits`` bits; what pads the last byte is zero, whatever the flip."""
    for j in range(bits // 8):
        packed[j] = last_packed[j]
    if bits % 8:
        packed[bits // 8] = u8(last_packed[bits // 8] & ((1 << (bits % 8)) - 1))


def quantize_kernel(how: Codes) -> Any:
    """The function that quantizes x [n, k] into packed [n, row_bytes], scales and zero points [tile rows, tiles].

    Scales are uint32 codes or patterns; ``given`` says that ``codes`` hold them already. The last row of arguments is
    scratch, of which ``offsets`` begins as zeros; ``codes``, ``zeros`` and all scratch over tiles have room for a whole
    last unit.
    """
    encode_row = row_encoder(how)

    def quantize(
        x: Any, n: int, k: int, tile_rows: int, cols: int, tiles: int, element: Any, scale: Any, outer: float,
        given: int, asymmetric: int, flip: int, packed: Any, row_bytes: int, codes: Any, zeros: Any,
        peaks: Any, lows: Any, high: Any, low: Any, values: Any, divisors: Any, offsets: Any, last: Any,
        last_packed: Any,
    ) -> None:  # fmt: skip
        for i in range(n):
            if i % tile_rows == 0:
                r = i // tile_rows * tiles
                if not given:
                    measure(at(x, i * k), min(tile_rows, n - i), k, cols, tiles, asymmetric, peaks, lows)
                    make_scales(
                        peaks, lows, tiles, element, scale, outer, asymmetric, at(codes, r), at(zeros, r),
                        high, low, values,
                    )  # fmt: skip
                load_tiles(
                    at(codes, r), at(zeros, r), tiles, scale[KIND], outer, cols, k, asymmetric,
                    values, divisors, offsets,
                )  # fmt: skip
            encode_row(
                at(x, i * k), k, element, flip, divisors, offsets, at(packed, i * row_bytes), last, last_packed
            )  # fmt: skip

    return quantize


def peak_kernel(how: Codes | None) -> Any:
    """The function that raises peak[0] to the largest magnitude of x [count], in its carrier; a pattern above
    infinity's is a NaN."""

    def scan(x: Any, count: int, peak: Any) -> None:
        peak[0] = row_peak(x, count, peak[0])

    return scan
