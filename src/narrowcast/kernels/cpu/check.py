"""The self-check kernel: a chunk against its quantization, counted exactly as ``tensors.metrics`` counts.

The definition compares in float64. Here float32 decides first, by a test that can only err towards doubt, and a
stretch of a row with one doubtful element is decided again in float64 by the definition's own formula.

*Within the bound.* With B = half step · s (exact: a power of two times a float32) the definition asks whether
|x - x̂| ≤ B + 2^-22·|x|. If d = fl(|x - x̂|) ≤ fl(B + fl(3/4 · 2^-23 · |x|)) then, three roundings later,
|x - x̂| ≤ B + 2^-22·|x| as long as B ≤ |x|·(1 + 2^-3); and when x̂ is not zero, |x̂| ≥ 2B up to rounding and
d ≤ B up to rounding, so that |x| ≥ B up to rounding. When x̂ is zero the element underflowed or was zero.
*Clipped.* With T = fl(limit · s), |x| ≤ T is surely not clipped and |x| > T·(1 + 2^-20) surely is.
Scales outside [2^-100, 2^100] are always doubted, so that no product here is subnormal or infinite.

Energies: lane l of 512 sums the columns l, l + 512, ... of every row in float64, rows in order; then the lanes
are added in order. The result depends on nothing but the chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.kernels.cpu.codes import DOUBTFUL, UNDERFLOWED, fields, float_reach
from narrowcast.kernels.cpu.decode import decode, load_tiles, unpack
from narrowcast.kernels.cpu.lanes import as_float, at, widen
from narrowcast.kernels.cpu.loops import loop
from narrowcast.kernels.cpu.parameters import (
    BIAS, FLOAT_ELEMENT, HALF_TOP, HIGH, KIND, LANES, LOW, MANTISSA, SIGN, UNIT,
)  # fmt: skip
from narrowcast.kernels.cpu.scales import to_elements

SLACK = 2.0**-22
f64 = np.float64
u32 = np.uint32


@loop
def reaches(codes: Any, count: int, element: Any, divisors: Any, reach: Any) -> None:
    """reach[j] = half the step at codes[j], times the divisor."""
    if element[KIND] == FLOAT_ELEMENT:
        m, bias, sign = element[MANTISSA], element[BIAS], element[SIGN]
        for j in range(count):
            reach[j] = float_reach(codes[j], divisors[j], m, bias, sign)
    else:
        half = as_float(element[HALF_TOP])
        for j in range(count):
            reach[j] = half * divisors[j]


@loop
def fast_counts(x: Any, count: int, decoded: Any, reach: Any, element: Any, divisors: Any, zeros: Any) -> int:
    """The sum of the fields of every element."""
    top, bottom, half = as_float(element[HIGH]), as_float(element[LOW]), as_float(element[HALF_TOP])
    total = u32(0)
    for j in range(count):
        total = u32(total + fields(widen(x[j]), decoded[j], reach[j], divisors[j], zeros[j], top, bottom, half))
    return total


@loop
def exact_counts(
    x: Any, count: int, codes: Any, decoded: Any, element: Any, half: Any, divisors: Any, zeros: Any, counts: Any
) -> None:
    """The definition, in float64: adds to counts = clipped, underflowed, beyond."""
    top, bottom = f64(as_float(element[HIGH])), f64(as_float(element[LOW]))
    half_top = f64(as_float(element[HALF_TOP]))
    for j in range(count):
        s, zero = f64(divisors[j]), f64(zeros[j])
        wide, value = f64(widen(x[j])), f64(decoded[j])
        slack = f64(SLACK) * abs(wide)
        clipped = wide > (top - zero + half_top) * s + slack or wide < (bottom - zero - half_top) * s - slack
        bound = f64(half[codes[j]]) * s + slack
        bound += f64(SLACK) * abs(zero) * s
        if clipped:
            counts[0] += 1
        elif value == 0.0 and wide != 0.0:
            counts[1] += 1
        elif abs(wide - value) > bound:
            counts[2] += 1


@loop
def add_energies(x: Any, count: int, decoded: Any, signal: Any, noise: Any) -> None:
    """Add x² and (x - x̂)² to the lanes."""
    for j in range(count):
        wide = f64(widen(x[j]))
        difference = wide - f64(decoded[j])
        signal[j] += wide * wide
        noise[j] += difference * difference


@loop
def check_stretch(
    x: Any, packed: Any, count: int, element: Any, half: Any, bits: int, flip: int, counts: Any,
    divisors: Any, zeros: Any, decoded: Any, reach: Any, buffer: Any, signal: Any, noise: Any,
) -> None:  # fmt: skip
    """Counts and energies of at most LANES columns of a row."""
    unpack(packed, count, bits, flip, buffer)
    decode(buffer, count, element, divisors, zeros, decoded)
    reaches(buffer, count, element, divisors, reach)
    total = fast_counts(x, count, decoded, reach, element, divisors, zeros)
    if total >= u32(DOUBTFUL):
        exact_counts(x, count, buffer, decoded, element, half, divisors, zeros, counts)
    else:
        counts[0] += total % UNDERFLOWED
        counts[1] += total // UNDERFLOWED
    add_energies(x, count, decoded, signal, noise)


def check_kernel(
    x: Any, n: int, k: int, packed: Any, row_bytes: int, tile_rows: int, cols: int, tiles: int, element: Any, half: Any,
    kind: int, outer: float, asymmetric: int, bits: int, flip: int, codes: Any, zeros: Any, counts: Any, energies: Any,
    values: Any, divisors: Any, offsets: Any, spread: Any, zeros_spread: Any, decoded: Any, reach: Any, buffer: Any,
    signal: Any, noise: Any,
) -> None:  # fmt: skip
    """Add to counts (clipped, underflowed, beyond) and energies (signal, noise) of x [n, k].

    The arguments after ``energies`` are scratch, of which ``zeros_spread``, ``signal`` and ``noise`` begin as zeros.
    """
    for i in range(n):
        if i % tile_rows == 0:
            r = i // tile_rows * tiles
            load_tiles(
                at(codes, r), at(zeros, r), tiles, kind, outer, cols, k, asymmetric, values, divisors, offsets
            )  # fmt: skip
        for j in range(0, k, LANES):
            count = min(LANES, k - j)
            to_elements(at(divisors, j // UNIT), count, spread)
            if asymmetric:
                to_elements(at(offsets, j // UNIT), count, zeros_spread)
            check_stretch(
                at(x, i * k + j), at(packed, i * row_bytes + j * bits // 8), count, element, half, bits, flip, counts,
                spread, zeros_spread, decoded, reach, buffer, signal, noise,
            )  # fmt: skip
    for lane in range(LANES):
        energies[0] += signal[lane]
        energies[1] += noise[lane]
