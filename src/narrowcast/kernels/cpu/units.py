"""The bodies of the kernels' loops: everything that is done to 16 neighbouring elements, or tiles, at once.

Each works on pointers to whole units; what differs by the look of the codes is made once per look. Elements of a
unit are divided by one divisor: a tile is a whole number of units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from narrowcast.kernels.cpu import codes as one
from narrowcast.kernels.cpu.lanes import Lane, Pointer, smaller, traced
from narrowcast.kernels.cpu.packs import pack, unpack
from narrowcast.kernels.cpu.parameters import FLOAT_ELEMENT


@traced("p", result="p")
def peak(x: Pointer) -> Lane:
    """The largest magnitude, in the carrier; magnitudes order like unsigned integers."""
    return (x.load() & ((1 << (x.dtype.bitwidth - 1)) - 1)).greatest()


@traced("p", result="p")
def most_positive(x: Pointer) -> Lane:
    """The largest element read as a signed integer: a positive float, if there is one."""
    return x.load().greatest(signed=True)


@traced("p", result="p")
def most_negative(x: Pointer) -> Lane:
    """The largest element read as an unsigned integer: the most negative float, if there is one."""
    return x.load().greatest()


@traced("p", "p")
def widen(values: Pointer, stored: Pointer) -> None:
    """Values of stored elements."""
    values.store(stored.load().stored)


@traced("p", "p", "p")
def extents(low: Pointer, extent: Pointer, high: Pointer) -> None:
    """Low becomes negative or zero (a positive "most negative" element is none), extent half of high - low.

    Halves, since the extent itself overflows in a tile that holds both -3e38 and 3e38. Only an all-zero tile has an
    extent of zero: halves that vanish become the smallest float32, whose scale is the smallest one as well.
    """
    highest, lowest = high.load(), smaller(low.load(), 0.0)
    half = highest * 0.5 - lowest * 0.5
    vanished = half.equals(0.0) & ((highest > 0.0) | (lowest < 0.0))
    low.store(lowest)
    extent.store(vanished.select(2.0**-149, half))


@traced("p", "p", "u32", "u32")
def store_e8m0(codes: Pointer, amax: Pointer, threshold: Lane, emax: Lane) -> None:
    """E8M0 scales by a rule of the power-of-two family."""
    codes.store(one.power_of_two_scale(amax.load(), threshold, emax))


@traced("p", "p", "f32", "f32")
def store_e4m3(codes: Pointer, amax: Pointer, span: Lane, outer: Lane) -> None:
    """E4M3 scales of amax / span / outer; 1.0 for an all-zero tile."""
    x = amax.load()
    codes.store(x.equals(0.0).select(0x38, one.e4m3_scale(x / span / outer)))


@traced("p", "p", "f32", "f32", "u32")
def store_wide(codes: Pointer, amax: Pointer, span: Lane, outer: Lane, kind: Lane) -> None:
    """fp32, bf16 or fp16 scales of amax / span / outer; 1.0 for an all-zero tile."""
    x = amax.load()
    codes.store(x.equals(0.0).select(one.wide_one(kind), one.wide_scale(x / span / outer, kind)))


@traced("p", "p", "f32")
def load_e8m0(values: Pointer, codes: Pointer, outer: Lane) -> None:
    """Values of E8M0 scales times the outer one."""
    values.store(one.e8m0_value(codes.load()) * outer)


@traced("p", "p", "f32")
def load_e4m3(values: Pointer, codes: Pointer, outer: Lane) -> None:
    """Values of E4M3 scales times the outer one."""
    values.store(one.e4m3_value(codes.load()) * outer)


@traced("p", "p", "f32", "u32")
def load_wide(values: Pointer, codes: Pointer, outer: Lane, kind: Lane) -> None:
    """Values of fp32, bf16 or fp16 scales times the outer one."""
    values.store(one.wide_value(codes.load(), kind) * outer)


@traced("p", "p", "p", "p", "f32")
def zero_points(zeros: Pointer, high: Pointer, low: Pointer, scales: Pointer, top: Lane) -> None:
    """Zero-point codes."""
    zeros.store(one.zero_point(high.load(), low.load(), scales.load(), top))


@dataclass(frozen=True)
class Codes:
    """How a kernel's codes look: ``kind`` FLOAT_ELEMENT or INT_ELEMENT, packed ``bits`` each: 4, 6 or 8."""

    kind: int
    bits: int

    def value(self, code: Lane, divisor: Lane, zero: Lane, decoding: tuple[Lane, ...]) -> Lane:
        """(value - zero) · divisor."""
        if self.kind == FLOAT_ELEMENT:
            return one.decode_float(code, *decoding) * divisor
        return (one.decode_integer(code, *decoding[:3]) - zero) * divisor


@cache
def encode(how: Codes) -> Any:
    """The function that packs the codes of a unit."""

    @traced("p", "p", "f32", "f32", "u32", *("u32",) * 6)
    def unit(packed: Pointer, x: Pointer, divisor: Lane, zero: Lane, flip: Lane, *encoding: Lane) -> None:
        y = x.load().stored / divisor
        if how.kind == FLOAT_ELEMENT:
            codes = one.encode_float(y, *encoding)
        else:
            codes = one.encode_integer(y + zero, *encoding[:4])
        pack(codes ^ flip, how.bits, packed)

    return unit


@cache
def decode(how: Codes) -> Any:
    """The function that makes float32 of a unit, or bf16 where its first argument is of that carrier."""

    @traced("p", "p", "f32", "f32", "u32", *("u32",) * 5)
    def unit(out: Pointer, packed: Pointer, divisor: Lane, zero: Lane, flip: Lane, *decoding: Lane) -> None:
        y = how.value(unpack(packed, how.bits) ^ flip, divisor, zero, decoding)
        out.store(y if out.dtype.bitwidth == 32 else one.to_bf16(y))

    return unit


@cache
def separate(how: Codes) -> Any:
    """The function that unpacks the codes of a unit, one a byte."""

    @traced("p", "p", "u32")
    def unit(codes: Pointer, packed: Pointer, flip: Lane) -> None:
        codes.store(unpack(packed, how.bits) ^ flip)

    return unit


@cache
def check(how: Codes) -> Any:
    """The function that adds a unit's fields of the count, x² and (x - x̂)² to their totals, by lanes."""

    @traced("p", "p", "p", "p", "p", "f32", "f32", "f32", "f32", "f32", "u32", *("u32",) * 5)
    def unit(
        total: Pointer, signal: Pointer, noise: Pointer, stored: Pointer, packed: Pointer,
        divisor: Lane, zero: Lane, top: Lane, bottom: Lane, half: Lane, flip: Lane, *decoding: Lane,
    ) -> None:  # fmt: skip
        code, x = unpack(packed, how.bits) ^ flip, stored.load().stored
        y = how.value(code, divisor, zero, decoding)
        step = one.float_step(code, *decoding[:3]) if how.kind == FLOAT_ELEMENT else half
        total.store(total.load() + one.fields(x, y, step * divisor, divisor, zero, top, bottom, half))
        wide = x.double
        error = wide - y.double
        signal.store(signal.load() + wide * wide)
        noise.store(noise.load() + error * error)

    return unit
