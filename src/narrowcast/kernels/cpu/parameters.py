"""What a compiled kernel must know of a format: a row of unsigned integers, made once per format.

    element  KIND, then either a float's shifts and limits or an integer's clamp
    scale    KIND, span, rule threshold

Floats travel as their bit patterns. Kernels read the row once and keep it in registers, so one compiled function
serves every format at the speed of a special one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.numbers.formats import BF16, E4M3FN, E8M0, FP16, FP32, Format, Kind
from narrowcast.tensors.scaling import bump_threshold
from narrowcast.tensors.schemes import Scheme

U32 = NDArray[np.uint32]

UNIT = 16  # tiles are whole multiples of this many columns; one AVX-512 register of float32
STRETCH = 2048  # columns per pass: 8 KiB of float32
LANES = 512  # columns per pass of the check, and float64 accumulators of each energy

# Rows of element parameters. Floats use the first block, integers the second.
FLOAT_ELEMENT, INT_ELEMENT = 0, 1
KIND, MASK, HIGH, LOW, HALF_TOP = 0, 1, 2, 3, 4  # kind; codes; the limits and half the widest step as float32
MANTISSA, DROP, REBIAS, NORMAL, MAGIC, TOP, SIGN, BIAS, INF = 5, 6, 7, 8, 9, 10, 11, 12, 13
GAIN, STEP, OFFSET = 5, 6, 7  # integers: 2^bias, 2^-bias, and the sign bit of signed ones
ELEMENT_SIZE = 14

# Rows of scale parameters.
FP32_SCALE, BF16_SCALE, FP16_SCALE, E4M3_SCALE, E8M0_SCALE = 0, 1, 2, 3, 4
SCALE_KINDS = {FP32: FP32_SCALE, BF16: BF16_SCALE, FP16: FP16_SCALE, E4M3FN: E4M3_SCALE, E8M0: E8M0_SCALE}
SCALE_DTYPES: dict[Format, type[np.generic]] = {
    FP32: np.float32, BF16: np.uint16, FP16: np.uint16, E4M3FN: np.uint8, E8M0: np.uint8,
}  # fmt: skip
SPAN, EMAX, THRESHOLD = 1, 2, 3


def float_bits(value: float) -> int:
    """The bit pattern of a value as float32."""
    return int(np.float32(value).view(np.uint32))


@cache
def element_row(fmt: Format) -> U32:
    """Parameters of an element format (see ``unsupported_element`` for which ones)."""
    row = np.zeros(ELEMENT_SIZE, np.uint32)
    row[MASK] = (1 << fmt.bits) - 1
    row[HIGH], row[LOW] = float_bits(fmt.max), float_bits(fmt.min)
    row[HALF_TOP] = float_bits(fmt.spacing(fmt.max) / 2)
    if fmt.kind is Kind.INT:
        row[KIND], row[GAIN], row[STEP] = INT_ELEMENT, float_bits(2.0**fmt.bias), float_bits(2.0**-fmt.bias)
        row[OFFSET] = fmt.sign_code if fmt.signed else 0
        return row
    m, drop = fmt.mantissa_bits, 23 - fmt.mantissa_bits
    row[KIND], row[MANTISSA], row[DROP], row[BIAS] = FLOAT_ELEMENT, m, drop, 127 - fmt.bias
    # Half of the dropped bits less one, and the exponent's change of bias, in one addition before the shift.
    row[REBIAS] = ((1 << (drop - 1)) - 1 - ((127 - fmt.bias) << 23)) % (1 << 32)
    row[NORMAL] = float_bits(2.0 ** (1 - fmt.bias))
    row[MAGIC] = float_bits(2.0 ** (24 - fmt.bias - m))  # its ulp is the smallest subnormal
    row[TOP], row[SIGN] = fmt.max_code, fmt.bits - 1
    row[INF] = fmt.max_code + 1 if fmt.has_inf else 1 << 16
    return row


@cache
def scale_row(scheme: Scheme) -> U32:
    """Parameters of the innermost scale level: how amax becomes a stored scale."""
    row = np.zeros(4, np.uint32)
    row[KIND] = SCALE_KINDS[scheme.inner.format]
    row[SPAN] = float_bits(scheme.span)
    if scheme.inner.format is not E8M0:
        return row
    threshold, reached = bump_threshold(scheme.inner.rule, scheme.element)
    row[EMAX] = scheme.element.emax % (1 << 32)
    # amax has 24 significant bits, so a threshold between two of them acts like the next one, reached.
    significand = threshold * 2.0**23
    row[THRESHOLD] = int(np.ceil(significand)) if reached else int(np.floor(significand)) + 1
    return row


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


def scale_dtype(fmt: Format) -> Any:
    """The numpy dtype of stored scales."""
    return SCALE_DTYPES[fmt]
