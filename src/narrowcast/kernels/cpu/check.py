"""The self-check kernel: a chunk against its quantization, counted exactly as ``tensors.metrics`` counts.

The definition compares in float64. Here float32 decides first, by a test that can only err towards doubt, and a
stretch of a row with one doubtful element is decided again in float64 by the definition's own formula.

*Within the bound.* With B = half step · s (exact: a power of two times a float32) the definition asks whether
|x - x̂| ≤ B + 2^-22·|x|. If d = fl(|x - x̂|) ≤ fl(B + fl(3/4 · 2^-23 · |x|)) then, three roundings later,
|x - x̂| ≤ B + 2^-22·|x| as long as B ≤ |x|·(1 + 2^-3); and when x̂ is not zero, |x̂| ≥ 2B up to rounding and
d ≤ B up to rounding, so that |x| ≥ B up to rounding. When x̂ is zero the element underflowed or was zero.
*Clipped.* With T = fl(limit · s), |x| ≤ T is surely not clipped and |x| > T·(1 + 2^-20) surely is.
Scales outside [2^-100, 2^100] are always doubted, so that no product here is subnormal or infinite.

Energies: lane l of 16 sums the columns l, l + 16, ... of every row in float64, rows in order; then the lanes are
added in order. The result depends on nothing but the chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.kernels.cpu.codes import DOUBTFUL, UNDERFLOWED
from narrowcast.kernels.cpu.decode import copy_last, decode
from narrowcast.kernels.cpu.lanes import at
from narrowcast.kernels.cpu.loops import as_float, loop, value
from narrowcast.kernels.cpu.parameters import (
    DECODING,
    FLOAT_ELEMENT,
    HALF_TOP,
    HIGH,
    KIND,
    LOW,
    STRETCH,
    UNIT,
)
from narrowcast.kernels.cpu.scales import load_tiles
from narrowcast.kernels.cpu.units import (
    check_float4,
    check_float6,
    check_float8,
    check_integer4,
    check_integer6,
    check_integer8,
    separate4,
    separate6,
    separate8,
)

SLACK = 2.0**-22
f64 = np.float64


@loop
def fast_check(
    x: Any, packed: Any, units: int, element: Any, bits: int, flip: int, divisors: Any, offsets: Any,
    total: Any, signal: Any, noise: Any,
) -> None:  # fmt: skip
    """Add the fields of every element of whole units to ``total``, and their energies, by lanes."""
    kind, a, b, c = element[KIND], element[DECODING], element[DECODING + 1], element[DECODING + 2]
    d, e = element[DECODING + 3], element[DECODING + 4]
    top, bottom, half = as_float(element[HIGH]), as_float(element[LOW]), as_float(element[HALF_TOP])
    for u in range(units):
        xs, codes, s, zero = at(x, u * UNIT), at(packed, 2 * u * bits), divisors[u], offsets[u]
        if kind == FLOAT_ELEMENT:
            if bits == 8:
                check_float8(total, signal, noise, xs, codes, s, zero, top, bottom, half, flip, a, b, c, d, e)
            elif bits == 4:
                check_float4(total, signal, noise, xs, codes, s, zero, top, bottom, half, flip, a, b, c, d, e)
            else:
                check_float6(total, signal, noise, xs, codes, s, zero, top, bottom, half, flip, a, b, c, d, e)
        elif bits == 8:
            check_integer8(total, signal, noise, xs, codes, s, zero, top, bottom, half, flip, a, b, c, d, e)
        elif bits == 4:
            check_integer4(total, signal, noise, xs, codes, s, zero, top, bottom, half, flip, a, b, c, d, e)
        else:
            check_integer6(total, signal, noise, xs, codes, s, zero, top, bottom, half, flip, a, b, c, d, e)


@loop
def separate(packed: Any, bits: int, flip: int, codes: Any) -> None:
    """The codes of one unit, one a byte."""
    if bits == 8:
        separate8(codes, packed, flip)
    elif bits == 4:
        separate4(codes, packed, flip)
    else:
        separate6(codes, packed, flip)


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
        clipped = wide > (top - zero + half_top) * s + slack or wide < (bottom - zero - half_top) * s - slack
        bound = f64(half[codes[j]]) * s + slack
        bound += SLACK * abs(zero) * s
        if clipped:
            counts[0] += 1
        elif y == 0.0 and wide != 0.0:
            counts[1] += 1
        elif not abs(wide - y) <= bound:  # NaN is beyond every bound
            counts[2] += 1


@loop
def exact_check(
    x: Any, packed: Any, count: int, element: Any, half: Any, bits: int, flip: int, divisors: Any, offsets: Any,
    counts: Any, decoded: Any, codes: Any, last_packed: Any,
) -> None:  # fmt: skip
    """``exact_counts`` of a stretch; ``decoded`` is left with the last unit's values."""
    for u in range((count + UNIT - 1) // UNIT):
        size = min(UNIT, count - u * UNIT)
        copy_last(at(packed, 2 * u * bits), size, bits, last_packed)
        decode(last_packed, 1, element, bits, flip, at(divisors, u), at(offsets, u), decoded)
        separate(last_packed, bits, flip, codes)
        exact_counts(at(x, u * UNIT), size, codes, decoded, element, half, divisors[u], offsets[u], counts)


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
def check_row(
    x: Any, k: int, packed: Any, element: Any, half: Any, bits: int, flip: int, divisors: Any, offsets: Any,
    counts: Any, total: Any, signal: Any, noise: Any, decoded: Any, codes: Any, last_packed: Any,
) -> None:  # fmt: skip
    """Counts and energies of one row; fewer than 16 last elements are counted exactly."""
    whole = k // UNIT * UNIT
    for j in range(0, whole, STRETCH):
        count, at_packed, u = min(STRETCH, whole - j), at(packed, j * bits // 8), j // UNIT
        s, zero = at(divisors, u), at(offsets, u)
        fast_check(at(x, j), at_packed, count // UNIT, element, bits, flip, s, zero, total, signal, noise)
        if settle(total, counts):
            exact_check(
                at(x, j), at_packed, count, element, half, bits, flip, s, zero, counts, decoded, codes, last_packed
            )  # fmt: skip
    if whole < k:
        u, rest = whole // UNIT, k - whole
        exact_check(
            at(x, whole), at(packed, 2 * u * bits), rest, element, half, bits, flip, at(divisors, u), at(offsets, u),
            counts, decoded, codes, last_packed,
        )  # fmt: skip
        for j in range(rest):
            wide = f64(value(x[whole + j]))
            error = wide - f64(decoded[j])
            signal[j] += wide * wide
            noise[j] += error * error


def check_kernel(
    x: Any, n: int, k: int, packed: Any, row_bytes: int, tile_rows: int, cols: int, tiles: int, element: Any, half: Any,
    kind: int, outer: float, asymmetric: int, bits: int, flip: int, codes: Any, zeros: Any, counts: Any, energies: Any,
    values: Any, divisors: Any, offsets: Any, total: Any, signal: Any, noise: Any, decoded: Any, unit_codes: Any,
    last_packed: Any,
) -> None:  # fmt: skip
    """Add to counts (clipped, underflowed, beyond) and energies (signal, noise) of x [n, k].

    The arguments after ``energies`` are scratch, of which ``offsets``, ``total``, ``signal`` and ``noise`` begin as
    zeros.
    """
    for i in range(n):
        if i % tile_rows == 0:
            r = i // tile_rows * tiles
            load_tiles(
                at(codes, r), at(zeros, r), tiles, kind, outer, cols, k, asymmetric, values, divisors, offsets
            )  # fmt: skip
        check_row(
            at(x, i * k), k, at(packed, i * row_bytes), element, half, bits, flip, divisors, offsets, counts, total,
            signal, noise, decoded, unit_codes, last_packed,
        )  # fmt: skip
    for lane in range(UNIT):
        energies[0] += signal[lane]
        energies[1] += noise[lane]
