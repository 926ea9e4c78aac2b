"""What happens to one number: float32 to code and back, amax to stored scale and back, one element's check.

A float code is made by arithmetic on the bits of y. Normal results: add half of the dropped bits, less one plus
the lowest kept bit, and shift (ties go to even, a carry moves into the exponent). Subnormal results: add a
number whose ulp is the smallest subnormal and read its low bits. An integer code is the low bits of
y + 1.5·2^23, where a float32 has an ulp of 1.
"""

from __future__ import annotations

from narrowcast.kernels.cpu.lanes import Lane, greater, smaller, traced
from narrowcast.kernels.cpu.parameters import (
    BF16_SCALE, BIAS, DROP, FP16_SCALE, INF, MAGIC, MANTISSA, NORMAL, REBIAS, SIGN, TOP, element_row,
)  # fmt: skip
from narrowcast.numbers.formats import E4M3FN, FP16, Format

ROUNDER = 1.5 * 2.0**23
SMALLEST = 2.0**-126  # no stored scale in fp32 or bf16 is smaller
QUIET_NAN, INFINITY = 0x7FC00000, 0x7F800000
UNDERFLOWED, DOUBTFUL = 1 << 10, 1 << 20  # fields of one count of up to 512 elements; clipped is the lowest
ENCODING, DECODING = (DROP, REBIAS, NORMAL, MAGIC, TOP, SIGN), (MANTISSA, BIAS, SIGN, TOP, INF)


def _constants(lane: Lane, fmt: Format, indices: tuple[int, ...]) -> list[Lane]:
    """Parameters of a fixed format."""
    return [lane.constant(int(element_row(fmt)[index])) for index in indices]


def _encode(y: Lane, drop: Lane, rebias: Lane, normal: Lane, magic: Lane, top: Lane, sign: Lane) -> Lane:
    """Nearest-even code in a float format, saturating; the sign is kept for zeros too."""
    a = y.bits & 0x7FFFFFFF
    rounded = (a + rebias + ((a >> drop) & 1)) >> drop
    small = (a.float + magic.float).bits - magic
    return smaller((a >= normal).select(rounded, small), top) | ((y.bits >> 31) << sign)


def _decode(code: Lane, m: Lane, bias: Lane, sign: Lane, top: Lane, inf: Lane) -> Lane:
    """Value of a float code. Normal: the fields moved into place. Below: an integer times the smallest subnormal."""
    size = code & ((code.constant(1) << sign) - 1)
    negative = (code >> sign) << 31
    normal = (size << (code.constant(23) - m)) + (bias << 23)
    small = (size.number * ((bias + 1 - m) << 23).float).bits
    bits = ((size >> m) > 0).select(normal, small) | negative
    special = size.equals(inf).select(negative | INFINITY, QUIET_NAN)
    return (size > top).select(special, bits).float


def _bf16(x: Lane) -> Lane:
    """Nearest-even bf16 pattern of a float32 that is not NaN."""
    return (x.bits + 0x7FFF + ((x.bits >> 16) & 1)) >> 16


@traced("u8", "f32", "u32", "u32", "u32", "u32", "u32", "u32", "u32")
def float_code(y: Lane, flip: Lane, *encoding: Lane) -> Lane:
    """A code XORed with ``flip``."""
    return _encode(y, *encoding) ^ flip


@traced("u8", "u8", "u8")
def nibbles(first: Lane, second: Lane) -> Lane:
    """Two 4-bit codes in a byte."""
    return first.wide | (second.wide << 4)


@traced("u8", "u8")
def low_nibble(byte: Lane) -> Lane:
    """The first 4-bit code of a byte."""
    return byte.wide & 15


@traced("u8", "u8")
def high_nibble(byte: Lane) -> Lane:
    """The second 4-bit code of a byte."""
    return byte.wide >> 4


@traced("u8", "f32", "u32", "f32", "f32", "f32", "u32")
def integer_code(y: Lane, flip: Lane, low: Lane, high: Lane, gain: Lane, mask: Lane) -> Lane:
    """Nearest-even two's complement or unsigned code of y · gain, clamped, XORed with ``flip``."""
    clamped = smaller(greater(y, low), high)
    return ((clamped * gain + ROUNDER).bits & mask) ^ flip


@traced("f32", "u8", "f32", "u32", "u32", "u32", "u32", "u32")
def float_value(code: Lane, divisor: Lane, *decoding: Lane) -> Lane:
    """Value of a float code times its divisor."""
    return _decode(code.wide, *decoding) * divisor


@traced("f32", "u8", "f32", "f32", "u32", "u32", "f32")
def integer_value(code: Lane, divisor: Lane, zero: Lane, mask: Lane, sign: Lane, step: Lane) -> Lane:
    """(value of an integer code - zero) · divisor; ``sign`` is the sign bit of signed codes, else 0."""
    return ((((code.wide & mask) ^ sign) - sign).number * step - zero) * divisor


@traced("u16", "f32")
def bf16_value(x: Lane) -> Lane:
    """Nearest-even bf16 pattern of any float32; NaN is quieted."""
    nan = (x.bits & 0x7FFFFFFF) > INFINITY
    return nan.select((x.bits >> 16) | 0x40, _bf16(x))


@traced("u32", "f32", "u32", "u32")
def power_of_two_scale(amax: Lane, threshold: Lane, emax: Lane) -> Lane:
    """The E8M0 byte: exponent of amax, less emax, plus one where its significand reaches the threshold."""
    normal = amax.bits >= 0x800000
    bits = normal.select(amax.bits, amax.bits.number.bits)  # a subnormal is an integer times 2^-149
    bump = (((bits & 0x7FFFFF) | 0x800000) >= threshold).select(amax.constant(1), 0)
    # Offset by 512, so that exponents below the format's stay positive until they are clamped.
    raised = (bits >> 23) + bump + normal.select(amax.constant(512), 512 - 149) - emax
    byte = smaller(greater(raised, 512), 512 + 254) - 512
    return amax.equals(0.0).select(127, byte)


def _value(amax: Lane, span: Lane, outer: Lane) -> Lane:
    return amax / span / outer


@traced("u32", "f32", "f32", "f32", "u32")
def wide_scale(amax: Lane, span: Lane, outer: Lane, kind: Lane) -> Lane:
    """Pattern of an fp32, bf16 or fp16 scale; never zero, and never subnormal but in fp16."""
    value = _value(amax, span, outer)
    normal = greater(value, SMALLEST)
    narrow = _encode(smaller(greater(value, 2.0**-24), 65504.0), *_constants(amax, FP16, ENCODING))
    fp16, bf16 = kind.equals(FP16_SCALE), kind.equals(BF16_SCALE)
    code = fp16.select(narrow, bf16.select(_bf16(normal), normal.bits))
    one = fp16.select(amax.constant(0x3C00), bf16.select(amax.constant(0x3F80), 0x3F800000))
    return amax.equals(0.0).select(one, code)


@traced("u32", "f32", "f32", "f32")
def e4m3_scale(amax: Lane, span: Lane, outer: Lane) -> Lane:
    """E4M3 code of amax / span / outer, never zero."""
    code = _encode(_value(amax, span, outer), *_constants(amax, E4M3FN, ENCODING))
    return amax.equals(0.0).select(0x38, greater(code, 1))


@traced("f32", "u32")
def e8m0_value(code: Lane) -> Lane:
    """Value of an E8M0 byte; 255 is NaN."""
    bits = code.equals(0).select(1 << 22, code << 23)
    return code.equals(255).select(QUIET_NAN, bits).float


@traced("f32", "u32")
def e4m3_value(code: Lane) -> Lane:
    """Value of an E4M3 code."""
    return _decode(code, *_constants(code, E4M3FN, DECODING))


@traced("f32", "u32", "u32")
def wide_value(code: Lane, kind: Lane) -> Lane:
    """Value of an fp32, bf16 or fp16 pattern."""
    half = _decode(code, *_constants(code, FP16, DECODING))
    return kind.equals(FP16_SCALE).select(half, kind.equals(BF16_SCALE).select((code << 16).float, code.float))


@traced("u8", "f32", "f32", "f32", "f32")
def zero_point(high: Lane, low: Lane, scale: Lane, top: Lane) -> Lane:
    """round(-low / scale) clamped to the codes; the middle code for an all-zero tile."""
    rounded = (smaller(greater(-low / scale, 0.0), top) + ROUNDER).bits & 0xFF
    middle = ((top + 1.0) * 0.5 + ROUNDER).bits & 0xFF
    return ((high - low).equals(0.0)).select(middle, rounded)


@traced("f32", "u8", "f32", "u32", "u32", "u32")
def float_reach(code: Lane, divisor: Lane, m: Lane, bias: Lane, sign: Lane) -> Lane:
    """Half the step of a float format at ``code``, times the divisor."""
    size = code.wide & ((code.constant(1) << sign) - 1)
    return ((greater(size >> m, 1) + bias - m - 1) << 23).float * divisor


@traced("u32", "f32", "f32", "f32", "f32", "f32", "f32", "f32", "f32")
def fields(x: Lane, y: Lane, reach: Lane, divisor: Lane, zero: Lane, top: Lane, bottom: Lane, half: Lane) -> Lane:
    """One element's fields of the count: clipped, underflowed or doubtful; see ``check``."""
    limit = (x < 0.0).select(zero - bottom, top - zero) + half
    limit = limit * divisor
    near = x.size <= limit * (1 + 2.0**-20)
    within = (x - y).size <= reach + x.size * (0.75 * 2.0**-23)
    lost = (x.size > 0.0).select(x.constant(UNDERFLOWED), 0)
    inside = y.equals(0.0).select(lost, within.select(x.constant(0), DOUBTFUL))
    counted = (x.size > limit).select(near.select(x.constant(DOUBTFUL), 1), inside)
    sure = (divisor >= 2.0**-100) & (divisor <= 2.0**100)
    return sure.select(counted, DOUBTFUL)

