"""Exact values of quantized tensors, as fractions, from the layouts in spec/; and tensors to try it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from narrowcast.numbers.formats import BF16, E8M0, FP16, FP32, Format
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import scales_shape
from narrowcast.tensors.schemes import Scheme, schemes, tile_grid
from reference.fractions_oracle import LAYOUTS

Value = Fraction | str


@cache
def meaning(name: str, code: int) -> Value:
    """What a code is by the layouts typed from the specifications; minus zero is zero."""
    found = LAYOUTS[name].decode(code)
    return Fraction(0) if found == "-0" else found


@cache
def small(name: str) -> list[Value]:
    """The meaning of every code."""
    return [meaning(name, code) for code in range(1 << LAYOUTS[name].bits)]


def scale_value(stored: Any, fmt: Format) -> Fraction:
    value = Fraction(float(stored)) if fmt is FP32 else meaning(fmt.name, int(stored))
    assert isinstance(value, Fraction)
    return value


def exact(q: QTensor) -> list[Value]:
    """Every element of [..., N, K] in C order, as a fraction."""
    codes = q.codes.reshape(-1, *q.shape[-2:])
    levels = []
    for level, stored in zip(q.scheme.scales, q.scales, strict=True):
        flat = stored.reshape(-1, *stored.shape[-2:])
        rows = [[[scale_value(s, level.format) for s in row] for row in matrix] for matrix in flat]
        levels.append((level, rows))
    zeros = None if q.zero is None else q.zero.reshape(-1, *q.zero.shape[-2:])
    decoded = small(q.scheme.element.name)
    out: list[Value] = []
    for lead, i, j in product(*(range(n) for n in codes.shape)):
        value = decoded[int(codes[lead, i, j])]
        factor = Fraction(1)
        for level, rows in levels:
            tall, wide = level.tile
            scale = rows[lead][i // tall if tall else 0][j // wide if wide else 0]
            factor = factor / scale if level.divides else factor * scale
        if isinstance(value, Fraction):
            if zeros is not None:
                tall, wide = q.scheme.inner.tile
                value = value - int(zeros[lead, i // tall if tall else 0, j // wide if wide else 0])
            value = value * factor
        out.append(value)
    return out


def made(
    scheme: Scheme,
    shape: tuple[int, ...],
    seed: int = 0,
    scale: Callable[..., Any] | None = None,
    span: int = 4,
) -> QTensor:
    """Every finite code somewhere, random otherwise, under scales of 2^-span .. 2^span."""
    rng = np.random.default_rng(seed)
    numbers = [c for c, v in enumerate(small(scheme.element.name)) if isinstance(v, Fraction)]
    codes = rng.choice(numbers, shape).astype(np.uint8)
    codes.reshape(-1)[: len(numbers)] = numbers
    scales = []
    for level, grid in zip(scheme.scales, scales_shape(shape, scheme), strict=True):
        exponent = rng.integers(-span, span + 1, grid)
        scales.append(stored_power(exponent, level.format) if scale is None else scale(rng, grid, level))
    zero = None
    if scheme.zero is not None:
        zero = rng.integers(0, 1 << scheme.zero.bits, scales[0].shape).astype(np.uint8)
    return QTensor(scheme, codes, tuple(scales), zero)


def stored_power(exponent: Any, fmt: Format) -> NDArray[Any]:
    """2^exponent as a stored scale."""
    exponent = np.asarray(exponent)
    if fmt is E8M0:
        return (exponent + 127).astype(np.uint8)
    numbers = np.ldexp(1.0, exponent)
    if fmt is FP32:
        return numbers.astype(np.float32)
    if fmt is BF16:
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if fmt is FP16:
        return numbers.astype(np.float16).view(np.uint16)
    return numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def with_scale(name: str, fmt: Format) -> Scheme:
    return schemes[name].with_scale_format(fmt)


def divisor(name: str) -> Scheme:
    inner, outer = schemes[name].scales
    return replace(schemes[name], scales=(inner, replace(outer, divides=True)))


def mxfp4(exponents: list[int], code: int = 1) -> QTensor:
    """One row with a block per exponent; every block holds 6 and the code, by default 1/2: no shift fits but 0."""
    codes = np.full((1, 32 * len(exponents)), 7, np.uint8)
    codes[:, ::2] = code
    return QTensor(schemes["mxfp4"], codes, (np.array([exponents]).astype(np.uint8) + np.uint8(127),))


def one_row(scheme: Scheme, codes: Any, scale: float = 0.375) -> QTensor:
    row = np.array([codes], np.uint8)
    return QTensor(scheme, row, (np.full(tile_grid(row.shape, scheme.inner.tile), scale, np.float32),))


def nvfp4(outer: float, scheme: Scheme = schemes["nvfp4"]) -> QTensor:
    q = made(scheme, (4, 64))
    return replace(q, scales=(q.scales[0], np.full((1, 1), outer, np.float32)))
