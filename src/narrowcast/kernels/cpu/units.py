"""The bodies of the kernels' loops: everything that is done to 16 neighbouring elements, or tiles, at once.

Each works on pointers to whole units; what differs by the width of packed codes is made once per width. Elements
are divided by one divisor: a tile is a whole number of units.
"""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu import codes as one
from narrowcast.kernels.cpu.lanes import Lane, Pointer, smaller, traced
from narrowcast.kernels.cpu.packs import pack, unpack

_SIX, _FIVE = ("u32",) * 6, ("u32",) * 5


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


def _encode_float(bits: int) -> Any:
    @traced("p", "p", "f32", "f32", "u32", *_SIX)
    def encode_float(
        packed: Pointer, x: Pointer, divisor: Lane, zero: Lane, flip: Lane, *encoding: Lane
    ) -> None:
        """Packed float codes of x / divisor."""
        pack(one.encode_float(x.load().stored / divisor, *encoding) ^ flip, bits, packed)

    return encode_float


def _encode_integer(bits: int) -> Any:
    @traced("p", "p", "f32", "f32", "u32", *_SIX)
    def encode_integer(
        packed: Pointer, x: Pointer, divisor: Lane, zero: Lane, flip: Lane, *encoding: Lane
    ) -> None:
        """Packed integer codes of x / divisor + zero."""
        pack(one.encode_integer(x.load().stored / divisor + zero, *encoding[:4]) ^ flip, bits, packed)

    return encode_integer


def _float_value(code: Lane, divisor: Lane, zero: Lane, decoding: tuple[Lane, ...]) -> Lane:
    return one.decode_float(code, *decoding) * divisor


def _integer_value(code: Lane, divisor: Lane, zero: Lane, decoding: tuple[Lane, ...]) -> Lane:
    return (one.decode_integer(code, *decoding[:3]) - zero) * divisor


def _decode(bits: int, value: Any) -> Any:
    @traced("p", "p", "f32", "f32", "u32", *_FIVE)
    def decode(out: Pointer, packed: Pointer, divisor: Lane, zero: Lane, flip: Lane, *decoding: Lane) -> None:
        """(value - zero) · divisor as float32, or rounded to bf16 where ``out`` is of that carrier."""
        y = value(unpack(packed, bits) ^ flip, divisor, zero, decoding)
        out.store(y if out.dtype.bitwidth == 32 else one.to_bf16(y))

    return decode


def _separate(bits: int) -> Any:
    @traced("p", "p", "u32")
    def separate(codes: Pointer, packed: Pointer, flip: Lane) -> None:
        """One code per byte."""
        codes.store(unpack(packed, bits) ^ flip)

    return separate


def _check(bits: int, value: Any, step: Any) -> Any:
    @traced("p", "p", "p", "p", "p", "f32", "f32", "f32", "f32", "f32", "u32", *_FIVE)
    def check(
        total: Pointer, signal: Pointer, noise: Pointer, stored: Pointer, packed: Pointer,
        divisor: Lane, zero: Lane, top: Lane, bottom: Lane, half: Lane, flip: Lane, *decoding: Lane,
    ) -> None:  # fmt: skip
        """Add the fields of the count to ``total``, x² to ``signal`` and (x - x̂)² to ``noise``, by lanes."""
        code, x = unpack(packed, bits) ^ flip, stored.load().stored
        y = value(code, divisor, zero, decoding)
        reach = step(code, half, decoding) * divisor
        total.store(total.load() + one.fields(x, y, reach, divisor, zero, top, bottom, half))
        wide = x.double
        error = wide - y.double
        signal.store(signal.load() + wide * wide)
        noise.store(noise.load() + error * error)

    return check


def _float_step(code: Lane, half: Lane, decoding: tuple[Lane, ...]) -> Lane:
    return one.float_step(code, *decoding[:3])


def _integer_step(code: Lane, half: Lane, decoding: tuple[Lane, ...]) -> Lane:
    return half


encode_float4, encode_float6, encode_float8 = (_encode_float(bits) for bits in (4, 6, 8))
encode_integer4, encode_integer6, encode_integer8 = (_encode_integer(bits) for bits in (4, 6, 8))
decode_float4, decode_float6, decode_float8 = (_decode(bits, _float_value) for bits in (4, 6, 8))
decode_integer4, decode_integer6, decode_integer8 = (_decode(bits, _integer_value) for bits in (4, 6, 8))
separate4, separate6, separate8 = (_separate(bits) for bits in (4, 6, 8))
check_float4, check_float6, check_float8 = (_check(bits, _float_value, _float_step) for bits in (4, 6, 8))
check_integer4, check_integer6, check_integer8 = (
    _check(bits, _integer_value, _integer_step) for bits in (4, 6, 8)
)
