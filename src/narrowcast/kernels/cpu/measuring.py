"""The kernel that measures a chunk beside its original: ``kernels.reference.pair``, sixteen elements at a time.

A unit whose elements are all surely rounded, by the float32 test of ``check``, adds its energies and is done. Any other
unit is decided in float64 by the definition's own formulas.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from narrowcast.kernels.cpu import codes as one
from narrowcast.kernels.cpu import units
from narrowcast.kernels.cpu.check import SLACK
from narrowcast.kernels.cpu.decode import copy_last, decoder
from narrowcast.kernels.cpu.lanes import Lane, Pointer, at, greater, traced
from narrowcast.kernels.cpu.loops import as_float, larger, loop, value
from narrowcast.kernels.cpu.packs import unpack
from narrowcast.kernels.cpu.parameters import DECODING, FLOAT_ELEMENT, HALF_TOP, HIGH, LOW, UNIT
from narrowcast.kernels.cpu.scales import load_tiles
from narrowcast.kernels.cpu.units import Codes

f64 = np.float64
ENERGIES, COUNTS = 5, 4  # of ``kernels.reference.pair``, each in 16 lanes
ORIGINAL, DECODED, UNSURE = (
    1,
    2,
    4,
)  # bits of a state: something there is not zero; the float32 test did not do
INFINITY = float("inf")


@traced("f32", result="u32")
def magnitude_bits(x: Lane) -> Lane:
    """The pattern of |x|."""
    return x.bits & 0x7FFFFFFF


def _size(x: Lane) -> Lane:
    return (x < 0.0).select(-x, x)


def _add(pointer: Pointer, lane: Lane) -> None:
    pointer.store(pointer.load() + lane)


def _which(mask: Lane) -> Lane:
    """A vector of conditions as the bits of a number."""
    builder = mask.builder
    bits = builder.bitcast(mask.value, ir.IntType(mask.count))
    return Lane(builder, builder.zext(bits, ir.IntType(32)))


def _raise(pointer: Pointer, bits: Lane) -> None:
    pointer.store(greater(pointer.load(), bits))


@cache
def judge_unit(how: Codes) -> Any:
    """The function that says what of a unit is not zero (ORIGINAL, DECODED), and whether it is UNSURE, else which
    elements are lost to underflow, from bit 16 on."""

    @traced("p", "p", "f32", "f32", "f32", "f32", "f32", "u32", *("u32",) * 5, result="u32")
    def unit(
        stored: Pointer, packed: Pointer, divisor: Lane, zero: Lane, top: Lane, bottom: Lane, half: Lane, flip: Lane,
        *decoding: Lane,
    ) -> Lane:  # fmt: skip
        code, x = unpack(packed, how.bits) ^ flip, stored.load().stored
        y = how.value(code, divisor, zero, decoding)
        step = one.float_step(code, *decoding[:3]) if how.kind == FLOAT_ELEMENT else half
        fields = one.fields(x, y, step * divisor, divisor, zero, top, bottom, half)
        lost = fields.equals(one.UNDERFLOWED)
        unsure = (fields > 0) & (lost ^ 1)
        here, there = _which((x.bits & 0x7FFFFFFF) > 0), _which((y.bits & 0x7FFFFFFF) > 0)
        state = (here > 0).select(here & 0 | ORIGINAL, 0) | (there > 0).select(here & 0 | DECODED, 0)
        return state | (_which(unsure) > 0).select(here & 0 | UNSURE, _which(lost) << 16)

    return unit


@cache
def add_unit(how: Codes) -> Any:
    """The function that adds the energies of a unit all of whose elements are rounded or lost to underflow."""

    @traced(*("p",) * 9, "f32", "f32", "u32", *("u32",) * 5)
    def unit(
        signal: Pointer, noise: Pointer, underflowed: Pointer, row_peak: Pointer, column_signal: Pointer,
        column_noise: Pointer, column_peak: Pointer, stored: Pointer, packed: Pointer, divisor: Lane, zero: Lane,
        flip: Lane, *decoding: Lane,
    ) -> None:  # fmt: skip
        x = stored.load().stored
        y = how.value(unpack(packed, how.bits) ^ flip, divisor, zero, decoding)
        wide, lost = x.double, y.equals(0.0).select(x, 0.0).double
        error = wide - y.double
        power, energy = wide * wide, error * error
        for lanes, amount in (
            (signal, power),
            (column_signal, power),
            (noise, energy),
            (column_noise, energy),
        ):
            _add(lanes, amount)
        _add(underflowed, lost * lost)
        for peak in (row_peak, column_peak):
            _raise(peak, x.bits & 0x7FFFFFFF)

    return unit


@cache
def decide_unit(how: Codes) -> Any:
    """The function that adds a unit's energies and counts to their lanes, whatever they are."""

    @traced(*("p",) * 15, "f32", "f32", "f32", "f32", "f32", "u32", *("u32",) * 5)
    def unit(
        signal: Pointer, noise: Pointer, clipped: Pointer, underflowed: Pointer, beyond: Pointer,
        many_clipped: Pointer, many_underflowed: Pointer, many_beyond: Pointer, many_broken: Pointer,
        row_peak: Pointer, column_signal: Pointer, column_noise: Pointer, column_peak: Pointer,
        stored: Pointer, packed: Pointer, divisor: Lane, zero: Lane, top: Lane, bottom: Lane, half: Lane, flip: Lane,
        *decoding: Lane,
    ) -> None:  # fmt: skip
        code, x = unpack(packed, how.bits) ^ flip, stored.load().stored
        y = how.value(code, divisor, zero, decoding)
        step = one.float_step(code, *decoding[:3]) if how.kind == FLOAT_ELEMENT else half
        s, z, wide = divisor.double, zero.double, x.double
        error, slack = wide - y.double, _size(wide) * SLACK
        reach = step.double * _size(s) + slack + _size(z) * SLACK * _size(s)
        high, low = (top.double - z + half.double) * s, (bottom.double - z - half.double) * s
        high, low = (s < 0.0).select(low, high), (s < 0.0).select(high, low)
        outside = (wide > high + slack) | (wide < low - slack)
        far = (_size(error) <= reach) ^ 1
        zeroed = y.equals(0.0) & (x.size > 0.0) & ((outside | far) ^ 1)
        far = far & (outside ^ 1)
        known = _size(error) < INFINITY
        energy = known.select(error * error, 0.0)
        power = (_size(wide) < INFINITY).select(wide * wide, 0.0)
        ones = x.bits & 0 | 1
        for mask, lanes, many in (
            (outside, clipped, many_clipped), (zeroed, underflowed, many_underflowed), (far, beyond, many_beyond),
        ):  # fmt: skip
            _add(lanes, mask.select(energy, 0.0))
            _add(many, mask.select(ones, 0))
        _add(many_broken, known.select(0, ones))
        for lanes, amount in (
            (signal, power),
            (column_signal, power),
            (noise, energy),
            (column_noise, energy),
        ):
            _add(lanes, amount)
        for peak in (row_peak, column_peak):
            _raise(peak, x.bits & 0x7FFFFFFF)

    return unit


@traced("u32", result="u32")
def how_many(bits: Lane) -> Lane:
    """The number of bits that are set."""
    return Lane(bits.builder, bits.builder.ctpop(bits.value))


@loop
def measure_last(
    x: Any, count: int, codes: Any, decoded: Any, element: Any, half: Any, divisor: float, offset: float,
    lanes: Any, tally: Any, row_peak: Any, columns: Any, k: int, column_peaks: Any,
) -> int:  # fmt: skip
    """The definition on fewer than 16 elements, the last ones of a row."""
    top, bottom = f64(as_float(element[HIGH])), f64(as_float(element[LOW]))
    half_top, s, zero = f64(as_float(element[HALF_TOP])), f64(divisor), f64(offset)
    state = 0
    for j in range(count):
        wide, y = f64(value(x[j])), f64(decoded[j])
        error, slack = wide - y, abs(wide) * SLACK
        reach = f64(half[codes[j]]) * abs(s) + slack
        reach += SLACK * abs(zero) * abs(s)
        above, below = (top - zero + half_top) * s, (bottom - zero - half_top) * s
        if s < 0:
            above, below = below, above
        energy = error * error if abs(error) < INFINITY else 0.0
        power = wide * wide if abs(wide) < INFINITY else 0.0
        lanes[j] += power
        lanes[UNIT + j] += energy
        columns[j] += power
        columns[k + j] += energy
        if not abs(error) < INFINITY:
            tally[3 * UNIT + j] += 1
        if wide > above + slack or wide < below - slack:
            lanes[2 * UNIT + j] += energy
            tally[j] += 1
        elif not abs(error) <= reach:
            lanes[4 * UNIT + j] += energy
            tally[2 * UNIT + j] += 1
        elif y == 0.0 and wide != 0.0:
            lanes[3 * UNIT + j] += energy
            tally[UNIT + j] += 1
        peak = magnitude_bits(value(x[j]))
        column_peaks[j] = larger(column_peaks[j], peak)
        row_peak[j] = larger(row_peak[j], peak)
        if wide != 0.0:
            state |= ORIGINAL
        if y != 0.0:
            state |= DECODED
    return state


@loop
def settle_row(lanes: Any, tally: Any, row_peak: Any, rows: Any, n: int, row_peaks: Any, counts: Any) -> None:
    """Take the lanes of a row: energies and the peak are its own, counts the matrix's."""
    for which in range(ENERGIES):
        total = 0.0
        for lane in range(UNIT):
            total += lanes[which * UNIT + lane]
            lanes[which * UNIT + lane] = 0.0
        rows[which * n] = total
    for which in range(COUNTS):
        for lane in range(UNIT):
            counts[which] += tally[which * UNIT + lane]
            tally[which * UNIT + lane] = 0
    peak = row_peak[0]
    for lane in range(UNIT):
        peak = larger(peak, row_peak[lane])
        row_peak[lane] = 0
    row_peaks[0] = peak


@loop
def settle_tiles(states: Any, tiles: int, row: int, lost: Any) -> None:
    """Count the tiles of one row of them that were not zero and are."""
    for t in range(tiles):
        if states[t] & (ORIGINAL | DECODED) == ORIGINAL:
            if lost[0] == 0:
                lost[1], lost[2] = row, t
            lost[0] += 1
        states[t] = 0


def row_measurer(how: Codes) -> Any:
    """The function that measures a row: ``states`` of its tiles and the lanes of its energies, counts and peak."""
    judge, add, decide = judge_unit(how), add_unit(how), decide_unit(how)
    decode_units, separate, bits = decoder(how), units.separate(how), how.bits

    @loop
    def measure_row(
        x: Any, k: int, packed: Any, cols: int, tiles: int, element: Any, half: Any, flip: int, divisors: Any,
        offsets: Any, states: Any, lanes: Any, tally: Any, row_peak: Any, columns: Any, column_peaks: Any,
        decoded: Any, codes: Any, last_packed: Any,
    ) -> None:  # fmt: skip
        a, b, c = element[DECODING], element[DECODING + 1], element[DECODING + 2]
        d, e = element[DECODING + 3], element[DECODING + 4]
        top, bottom, reach = as_float(element[HIGH]), as_float(element[LOW]), as_float(element[HALF_TOP])
        for t in range(tiles):
            state = states[t]
            for u in range(t * cols // UNIT, min(k, (t + 1) * cols) // UNIT):
                j = u * UNIT
                xs, coded, s, zero = at(x, j), at(packed, 2 * u * bits), divisors[u], offsets[u]
                signals, noises, peaks = at(columns, j), at(columns, k + j), at(column_peaks, j)
                found = judge(xs, coded, s, zero, top, bottom, reach, flip, a, b, c, d, e)
                state |= found
                if found & UNSURE:
                    decide(
                        lanes, at(lanes, UNIT), at(lanes, 2 * UNIT), at(lanes, 3 * UNIT), at(lanes, 4 * UNIT),
                        tally, at(tally, UNIT), at(tally, 2 * UNIT), at(tally, 3 * UNIT), row_peak, signals, noises,
                        peaks, xs, coded, s, zero, top, bottom, reach, flip, a, b, c, d, e,
                    )  # fmt: skip
                else:
                    tally[UNIT] += how_many(found >> 16)
                    add(
                        lanes, at(lanes, UNIT), at(lanes, 3 * UNIT), row_peak, signals, noises, peaks, xs, coded, s,
                        zero, flip, a, b, c, d, e,
                    )  # fmt: skip
            states[t] = state
        whole = k // UNIT
        rest, j = k - whole * UNIT, whole * UNIT
        if rest:
            copy_last(at(packed, 2 * whole * bits), rest * bits, last_packed)
            decode_units(last_packed, 1, element, flip, at(divisors, whole), at(offsets, whole), decoded)
            separate(codes, last_packed, flip)
            states[tiles - 1] |= measure_last(
                at(x, j), rest, codes, decoded, element, half, divisors[whole], offsets[whole], lanes, tally,
                row_peak, at(columns, j), k, at(column_peaks, j),
            )  # fmt: skip

    return measure_row


def pair_kernel(how: Codes) -> Any:
    """The function that adds the rows x [n, k] to ``rows`` (float64 [5, size], from its place on), ``columns``
    (float64 [2, k]), peaks, ``counts`` and ``lost``; ``first`` is the row of tiles that x begins with, and tiles are
    lost by ``height`` rows. What follows ``lost`` is scratch, of which offsets, states, lanes, tally and row_peak begin
    as zeros."""
    measure_row = row_measurer(how)

    def pair(
        x: Any, n: int, k: int, packed: Any, row_bytes: int, tile_rows: int, height: int, cols: int, tiles: int,
        element: Any, half: Any, kind: int, outer: float, asymmetric: int, flip: int, codes: Any, zeros: Any,
        first: int, rows: Any, size: int, columns: Any, row_peaks: Any, column_peaks: Any, counts: Any, lost: Any,
        values: Any, divisors: Any, offsets: Any, states: Any, lanes: Any, tally: Any, row_peak: Any, decoded: Any,
        unit_codes: Any, last_packed: Any,
    ) -> None:  # fmt: skip
        for i in range(n):
            if i % tile_rows == 0:
                r = i // tile_rows * tiles
                load_tiles(
                    at(codes, r), at(zeros, r), tiles, kind, outer, cols, k, asymmetric, values, divisors, offsets
                )  # fmt: skip
            measure_row(
                at(x, i * k), k, at(packed, i * row_bytes), cols, tiles, element, half, flip, divisors, offsets,
                states, lanes, tally, row_peak, columns, column_peaks, decoded, unit_codes, last_packed,
            )  # fmt: skip
            settle_row(lanes, tally, row_peak, at(rows, i), size, at(row_peaks, i), counts)
            if (i + 1) % height == 0 or i + 1 == n:
                settle_tiles(states, tiles, first + i // height, lost)

    return pair
