"""The self-check kernel: a chunk against its quantization, counted exactly as ``tensors.metrics`` counts.

The definition compares in float64. Here float32 decides first, by a test that can only err towards doubt, and a
stretch of a row with one doubtful element is decided again in float64 by the definition's own formula.

*Within the bound.* With B = half step · s (exact: a power of two times a float32) the definition asks whether
|x - x̂| ≤ B + 2^-22·|x|. If d = fl(|x - x̂|) ≤ fl(B + fl(3/4 · 2^-23 · |x|)) then, three roundings later,
|x - x̂| ≤ B + 2^-22·|x| as long as B ≤ |x|·(1 + 2^-3); and when x̂ is not zero, |x̂| ≥ 2B up to rounding and
d ≤ B up to rounding, so that |x| ≥ B up to rounding. When x̂ is zero, d is |x|: the answer is plain if B ≥ |x|, and
if not, B is small enough for the same three roundings.
*Clipped.* With T = fl(limit · s), |x| ≤ T is surely not clipped and |x| > T·(1 + 2^-20) surely is.
Scales outside [2^-100, 2^100] are always doubted, so that no product here is subnormal or infinite; negative ones, too.

Energies: lane l of 16 sums the columns l, l + 16, ... of every row in float64, rows in order; then the lanes are
added in order. The result depends on nothing but the chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.kernels.cpu import units
from narrowcast.kernels.cpu.codes import DOUBTFUL, UNDERFLOWED
from narrowcast.kernels.cpu.decode import copy_last, decoder
from narrowcast.kernels.cpu.lanes import at
from narrowcast.kernels.cpu.loops import as_float, loop, value
from narrowcast.kernels.cpu.parameters import (
    DECODING,
    HALF_TOP,
    HIGH,
    LOW,
    STRETCH,
    UNIT,
)
from narrowcast.kernels.cpu.scales import load_tiles
from narrowcast.kernels.cpu.units import Codes

SLACK = 2.0**-22
f64 = np.float64


def fast_checker(how: Codes) -> Any:
    """The function that adds the fields of every element of ``count`` units, and their energies, by lanes."""
    check, bits = units.check(how), how.bits

    @loop
    def fast_check(
        x: Any, packed: Any, count: int, element: Any, flip: int, divisors: Any, offsets: Any,
        total: Any, signal: Any, noise: Any,
    ) -> None:  # fmt: skip
        a, b, c = element[DECODING], element[DECODING + 1], element[DECODING + 2]
        d, e = element[DECODING + 3], element[DECODING + 4]
        top, bottom, half = as_float(element[HIGH]), as_float(element[LOW]), as_float(element[HALF_TOP])
        for u in range(count):
            check(
                total, signal, noise, at(x, u * UNIT), at(packed, 2 * u * bits), divisors[u], offsets[u],
                top, bottom, half, flip, a, b, c, d, e,
            )  # fmt: skip

    return fast_check


@loop
def exact_counts(
    x: Any, count: int, codes: Any, decoded: Any, element: Any, half: Any, divisor: float, offset: float, counts: Any
) -> None:  # fmt: skip
    """The definition, in float64, on one unit: adds to counts = clipped, underflowed, beyond."""
    top, bottom = f64(as_float(element[HIGH])), f64(as_float(element[LOW]))
    half_top, s, zero = f64(as_float(element[HALF_TOP])), f64(divisor), f64(offset)
    for j in range(count):
        wide, y = f64(value(x[j])), f64(decoded[j])
        slack = SLACK * abs(wide)
        above, below = (top - zero + half_top) * s, (bottom - zero - half_top) * s
        if s < 0:
            above, below = below, above
        clipped = wide > above + slack or wide < below - slack
        bound = f64(half[codes[j]]) * abs(s) + slack
        bound += SLACK * abs(zero) * abs(s)
        if clipped:
            counts[0] += 1
        elif not abs(wide - y) <= bound:  # NaN is beyond every bound
            counts[2] += 1
        elif y == 0.0 and wide != 0.0:
            counts[1] += 1


def exact_checker(how: Codes) -> Any:
    """The function that does ``exact_counts`` on ``count`` elements; leaves the last unit's values in ``decoded``."""
    decode_units, separate, bits = decoder(how), units.separate(how), how.bits

    @loop
    def exact_check(
        x: Any, packed: Any, count: int, element: Any, half: Any, flip: int, divisors: Any, offsets: Any, counts: Any,
        decoded: Any, codes: Any, last_packed: Any,
    ) -> None:  # fmt: skip
        for u in range((count + UNIT - 1) // UNIT):
            size = min(UNIT, count - u * UNIT)
            copy_last(at(packed, 2 * u * bits), size * bits, last_packed)
            decode_units(last_packed, 1, element, flip, at(divisors, u), at(offsets, u), decoded)
            separate(codes, last_packed, flip)
            exact_counts(
                at(x, u * UNIT), size, codes, decoded, element, half, divisors[u], offsets[u], counts
            )

    return exact_check


@loop
def settle(total: Any, counts: Any) -> int:
    """Take the fields of a stretch; whether one element was doubtful, and nothing is counted."""
    fields = 0
    for lane in range(UNIT):
        fields += total[lane]
        total[lane] = 0
    if fields >= DOUBTFUL:
        return 1
    counts[0] += fields % UNDERFLOWED
    counts[1] += fields // UNDERFLOWED
    return 0


@loop
def add_energies(x: Any, count: int, decoded: Any, signal: Any, noise: Any) -> None:
    """Add x² and (x - x̂)² of fewer than 16 elements to the lanes."""
    for j in range(count):
        wide = f64(value(x[j]))
        error = wide - f64(decoded[j])
        signal[j] += wide * wide
        noise[j] += error * error


def row_checker(how: Codes) -> Any:
    """The function that adds the counts and energies of a row; fewer than 16 last elements are counted exactly."""
    fast_check, exact_check, bits = fast_checker(how), exact_checker(how), how.bits

    @loop
    def check_row(
        x: Any, k: int, packed: Any, element: Any, half: Any, flip: int, divisors: Any, offsets: Any,
        counts: Any, total: Any, signal: Any, noise: Any, decoded: Any, codes: Any, last_packed: Any,
    ) -> None:  # fmt: skip
        whole = k // UNIT * UNIT
        for j in range(0, whole, STRETCH):
            count, xs, coded = min(STRETCH, whole - j), at(x, j), at(packed, j * bits // 8)
            s, zero = at(divisors, j // UNIT), at(offsets, j // UNIT)
            fast_check(xs, coded, count // UNIT, element, flip, s, zero, total, signal, noise)
            if settle(total, counts):
                exact_check(
                    xs, coded, count, element, half, flip, s, zero, counts, decoded, codes, last_packed
                )
        if whole < k:
            xs, coded = at(x, whole), at(packed, whole * bits // 8)
            s, zero = at(divisors, whole // UNIT), at(offsets, whole // UNIT)
            exact_check(
                xs, coded, k - whole, element, half, flip, s, zero, counts, decoded, codes, last_packed
            )
            add_energies(xs, k - whole, decoded, signal, noise)

    return check_row


def check_kernel(how: Codes) -> Any:
    """The function that adds to counts (clipped, underflowed, beyond) and energies (signal, noise) of x [n, k].

    The arguments after ``energies`` are scratch, of which ``offsets``, ``total``, ``signal`` and ``noise`` begin as
    zeros.
    """
    check_row = row_checker(how)

    def check(
        x: Any, n: int, k: int, packed: Any, row_bytes: int, tile_rows: int, cols: int, tiles: int, element: Any,
        half: Any, kind: int, outer: float, asymmetric: int, flip: int, codes: Any, zeros: Any, counts: Any,
        energies: Any, values: Any, divisors: Any, offsets: Any, total: Any, signal: Any, noise: Any, decoded: Any,
        unit_codes: Any, last_packed: Any,
    ) -> None:  # fmt: skip
        for i in range(n):
            if i % tile_rows == 0:
                r = i // tile_rows * tiles
                load_tiles(
                    at(codes, r), at(zeros, r), tiles, kind, outer, cols, k, asymmetric, values, divisors, offsets
                )  # fmt: skip
            check_row(
                at(x, i * k), k, at(packed, i * row_bytes), element, half, flip, divisors, offsets, counts, total,
                signal, noise, decoded, unit_codes, last_packed,
            )  # fmt: skip
        for lane in range(UNIT):
            energies[0] += signal[lane]
            energies[1] += noise[lane]

    return check
