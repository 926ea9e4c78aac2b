"""What happens to a number: float32 to code and back, amax to stored scale and back, one element's check.

A float code is made by arithmetic on the bits of y. Normal results: add half of the dropped bits, less one plus
the lowest kept bit, and shift (ties go to even, a carry moves into the exponent). Subnormal results: add a number
whose ulp is the smallest subnormal and read its low bits. An integer code is the low bits of y + 1.5·2^23, where a
float32 has an ulp of 1.

Parameters are lanes in kernels that serve every format, and Python integers where the format is fixed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.kernels.cpu.lanes import Lane, greater, smaller
from narrowcast.kernels.cpu.parameters import BF16_SCALE, FP16_SCALE, decoding, encoding
from narrowcast.numbers.formats import E4M3FN, FP16

ROUNDER = 1.5 * 2.0**23
SMALLEST = 2.0**-126  # no stored scale in fp32 or bf16 is smaller
QUIET_NAN, INFINITY = 0x7FC00000, 0x7F800000
UNDERFLOWED, DOUBTFUL = 1 << 10, 1 << 20  # fields of a count of a stretch of elements; clipped is the lowest
NEAR = 1 + 2.0**-20


def _as_float(pattern: Any) -> Any:
    return pattern.float if isinstance(pattern, Lane) else float(np.uint32(pattern).view(np.float32))


def encode_float(y: Lane, drop: Any, rebias: Any, normal: Any, magic: Any, top: Any, sign: Any) -> Lane:
    """Nearest-even code in a float format, saturating; the sign is kept for zeros too."""
    a = y.bits & 0x7FFFFFFF
    rounded = (a + rebias + ((a >> drop) & 1)) >> drop
    small = (a.float + _as_float(magic)).bits - magic
    return smaller((a >= normal).select(rounded, small), top) | ((y.bits >> 31) << sign)


def decode_float(code: Lane, m: Any, bias: Any, sign: Any, top: Any, inf: Any) -> Lane:
    """Value of a float code. Normal: the fields moved into place. Below: an integer times the smallest subnormal."""
    size = code & ((1 << sign) - 1)
    negative = (code >> sign) << 31
    normal = (size << (23 - m)) + (bias << 23)
    small = (size.number * _as_float((bias + 1 - m) << 23)).bits
    bits = ((size >> m) > 0).select(normal, small) | negative
    special = size.equals(inf).select(negative | INFINITY, QUIET_NAN)
    return (size > top).select(special, bits).float


def encode_integer(y: Lane, low: Any, high: Any, gain: Any, mask: Any) -> Lane:
    """Nearest-even two's complement or unsigned code of y · gain, clamped."""
    clamped = smaller(greater(y, _as_float(low)), _as_float(high))
    return (clamped * _as_float(gain) + ROUNDER).bits & mask


def decode_integer(code: Lane, mask: Any, sign: Any, step: Any) -> Lane:
    """Value of an integer code; ``sign`` is the sign bit of signed codes, else 0."""
    return (((code & mask) ^ sign) - sign).number * _as_float(step)


def to_bf16(x: Lane) -> Lane:
    """Nearest-even bf16 pattern; NaN is quieted."""
    rounded = (x.bits + 0x7FFF + ((x.bits >> 16) & 1)) >> 16
    nan = (x.bits & 0x7FFFFFFF) > INFINITY
    return nan.select((x.bits >> 16) | 0x40, rounded)


def power_of_two_scale(amax: Lane, threshold: Lane, emax: Lane) -> Lane:
    """The E8M0 byte: exponent of amax, less emax, plus one where its significand reaches the threshold."""
    normal = amax.bits >= 0x800000
    bits = normal.select(amax.bits, amax.bits.number.bits)  # a subnormal is an integer times 2^-149
    significand = (bits & 0x7FFFFF) | 0x800000
    # Offset by 512, so that exponents below the format's stay positive until they are clamped.
    raised = (bits >> 23) + normal.select(amax.bits & 0 | 512, 512 - 149) - emax
    raised = (significand >= threshold).select(raised + 1, raised)
    byte = smaller(greater(raised, 512), 512 + 254) - 512
    return amax.equals(0.0).select(127, byte)


def e4m3_scale(value: Lane) -> Lane:
    """Nearest-even saturated E4M3 code of a positive value, never zero."""
    return greater(encode_float(value, *encoding(E4M3FN)), 1)


def wide_scale(value: Lane, kind: Lane) -> Lane:
    """Pattern of a positive fp32, bf16 or fp16 scale; never zero, and never subnormal but in fp16."""
    normal = greater(value, SMALLEST)
    narrow = encode_float(smaller(greater(value, 2.0**-24), 65504.0), *encoding(FP16))
    return kind.equals(FP16_SCALE).select(
        narrow, kind.equals(BF16_SCALE).select(to_bf16(normal), normal.bits)
    )


def wide_one(kind: Lane) -> Lane:
    """The pattern of 1.0 as such a scale."""
    one = kind & 0
    return kind.equals(FP16_SCALE).select(
        one | 0x3C00, kind.equals(BF16_SCALE).select(one | 0x3F80, one | 0x3F800000)
    )


def e8m0_value(code: Lane) -> Lane:
    """Value of an E8M0 byte; 255 is NaN."""
    bits = code.equals(0).select(1 << 22, code << 23)
    return code.equals(255).select(QUIET_NAN, bits).float


def e4m3_value(code: Lane) -> Lane:
    """Value of an E4M3 code."""
    return decode_float(code, *decoding(E4M3FN))


def wide_value(code: Lane, kind: Lane) -> Lane:
    """Value of an fp32, bf16 or fp16 pattern."""
    half = decode_float(code, *decoding(FP16))
    return kind.equals(FP16_SCALE).select(
        half, kind.equals(BF16_SCALE).select((code << 16).float, code.float)
    )


def zero_point(high: Lane, low: Lane, scale: Lane, top: Lane) -> Lane:
    """round(-low / scale) clamped to the codes; the middle code for an all-zero tile."""
    rounded = (smaller(greater(-low / scale, 0.0), top) + ROUNDER).bits & 0xFF
    middle = ((top + 1.0) * 0.5 + ROUNDER).bits & 0xFF
    return (high - low).equals(0.0).select(middle, rounded)


def float_step(code: Lane, m: Any, bias: Any, sign: Any) -> Lane:
    """Half the step of a float format at ``code``."""
    size = code & ((1 << sign) - 1)
    return ((greater(size >> m, 1) + (bias - m - 1)) << 23).float


def fields(
    x: Lane, y: Lane, reach: Lane, divisor: Lane, zero: Lane, top: Lane, bottom: Lane, half: Lane
) -> Lane:
    """One element's fields of the count: clipped, underflowed or doubtful; see ``check``."""
    high, low = (top - zero + half) * divisor, (zero - bottom + half) * divisor
    limit, near = (x < 0.0).select(low, high), (x < 0.0).select(low * NEAR, high * NEAR)
    within = (x - y).size <= reach + x.size * (0.75 * 2.0**-23)
    nothing = x.bits & 0
    lost = (x.size > 0.0).select(nothing | UNDERFLOWED, 0)
    inside = within.select(y.equals(0.0).select(lost, nothing), DOUBTFUL)
    outside = (x.size <= near).select(nothing | DOUBTFUL, 1)
    sure = (divisor >= 2.0**-100) & (divisor <= 2.0**100)
    doubt = sure.select(divisor.bits & 0, DOUBTFUL)
    return (x.size > limit).select(outside, inside) | doubt
