"""What a compiled kernel must know of a format: a row of unsigned integers, made once per format.

Kernels read the row once and keep it in registers, so one compiled function serves every format at the speed of a
special one. Floats travel as their bit patterns.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from narrowcast.numbers.formats import BF16, E4M3FN, E8M0, FP16, FP32, Format, Kind
from narrowcast.tensors.scaling import bump_threshold
from narrowcast.tensors.schemes import Scheme

U32 = NDArray[np.uint32]

UNIT = 16  # columns at a time: one AVX-512 register of float32; tiles are whole multiples of it
STRETCH = 512  # columns that the check decides at once

WORDS, TABLES = (
    8,
    8,
)  # of eight bytes that are looked at at once; of counts of bytes, one for each place in a word

# An element's row: its kind; the limits and half the widest step as float32; then what ``codes`` encodes and
# decodes with, whose meaning depends on the kind.
KIND, HIGH, LOW, HALF_TOP, ENCODING, DECODING = 0, 1, 2, 3, 4, 10
FLOAT_ELEMENT, INT_ELEMENT = 0, 1

# A scale's row.
SPAN, EMAX, THRESHOLD = 1, 2, 3
FP32_SCALE, BF16_SCALE, FP16_SCALE, E4M3_SCALE, E8M0_SCALE = 0, 1, 2, 3, 4
SCALE_KINDS = {FP32: FP32_SCALE, BF16: BF16_SCALE, FP16: FP16_SCALE, E4M3FN: E4M3_SCALE, E8M0: E8M0_SCALE}
SCALE_DTYPES: dict[Format, type[np.generic]] = {
    FP32: np.float32, BF16: np.uint16, FP16: np.uint16, E4M3FN: np.uint8, E8M0: np.uint8,
}  # fmt: skip


def float_bits(value: float) -> int:
    """The bit pattern of a value as float32."""
    return int(np.float32(value).view(np.uint32))


def encoding(fmt: Format) -> tuple[int, ...]:
    """Float: dropped bits, what to add before dropping them, smallest normal, magic, largest code, sign's place.
    Integer: lower and upper clamp, factor from value to integer, mask of a code."""
    if fmt.kind is Kind.INT:
        return float_bits(fmt.min), float_bits(fmt.max), float_bits(2.0**fmt.bias), (1 << fmt.bits) - 1, 0, 0
    drop = 23 - fmt.mantissa_bits
    # Half of the dropped bits less one, and the exponent's change of bias, in one addition before the shift.
    rebias = ((1 << (drop - 1)) - 1 - ((127 - fmt.bias) << 23)) % (1 << 32)
    magic = float_bits(2.0 ** (24 - fmt.bias - fmt.mantissa_bits))  # its ulp is the smallest subnormal
    return drop, rebias, float_bits(2.0 ** (1 - fmt.bias)), magic, fmt.max_code, fmt.bits - 1


def decoding(fmt: Format) -> tuple[int, ...]:
    """Float: mantissa bits, 127 less the bias, sign's place, largest code, code of infinity.
    Integer: mask of a code, sign bit of signed codes, factor from integer to value."""
    if fmt.kind is Kind.INT:
        return (1 << fmt.bits) - 1, fmt.sign_code if fmt.signed else 0, float_bits(2.0**-fmt.bias), 0, 0
    infinity = fmt.max_code + 1 if fmt.has_inf else 1 << 16
    return fmt.mantissa_bits, 127 - fmt.bias, fmt.bits - 1, fmt.max_code, infinity


@cache
def element_row(fmt: Format) -> U32:
    """Parameters of an element format (see ``unsupported_element`` for which ones)."""
    kind = INT_ELEMENT if fmt.kind is Kind.INT else FLOAT_ELEMENT
    limits = (float_bits(v) for v in (fmt.max, fmt.min, fmt.spacing(fmt.max) / 2))
    return np.array([kind, *limits, *encoding(fmt), *decoding(fmt)], np.uint32)


@cache
def scale_row(scheme: Scheme) -> U32:
    """Parameters of the innermost scale level: how amax becomes a stored scale."""
    span = float_bits(scheme.span if scheme.zero is None else scheme.span / 2)  # extents come as halves
    kind = SCALE_KINDS[scheme.inner.format]
    if scheme.inner.format is not E8M0:
        return np.array([kind, span, 0, 0], np.uint32)
    threshold, reached = bump_threshold(scheme.inner.rule, scheme.element)
    # amax has 24 significant bits, so a threshold between two of them acts like the next one, reached.
    significand = threshold * 2.0**23
    reach = int(np.ceil(significand)) if reached else int(np.floor(significand)) + 1
    return np.array([kind, span, scheme.element.emax % (1 << 32), reach], np.uint32)


def unsupported_element(fmt: Format) -> str | None:
    """Why a format has no compiled kernel, or None."""
    if fmt.kind is Kind.TABLE:
        return f"{fmt.name} is a table of values"
    if fmt.bits > 8:
        return f"{fmt.name} is wider than 8 bits"
    if fmt.kind is Kind.INT:
        return None if fmt.bias == 0 or fmt.signed else f"{fmt.name} is an unsigned fixed-point format"
    if not fmt.has_minus_zero or fmt.mantissa_bits < 1:
        return f"{fmt.name} has no minus zero or no mantissa"
    if not -8 <= fmt.bias <= 32:
        return f"{fmt.name} has an exotic bias"
    return None
