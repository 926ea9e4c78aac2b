"""From the amax of a tile to the scale that is stored: the named rules, and the tile algebra they need.

Power-of-two scales are one family. With amax = μ·2^k, 1 ≤ μ < 2, and element E:

    exponent = k - emax(E) + [μ passes the threshold]

    floor       never             OCP's rule; values between max and 2^(emax+1) clip
    rceil       μ > max / 2^emax  the smallest power of two that does not clip
    ceil_log2   μ > 1             2^ceil(log2 amax); never clips, wastes up to a binade
    even        μ ≥ 2 - 2^-(m+1)  round amax to the element's mantissa (of its top binade) first
    bump(t)     μ ≥ t             1.75 is ``even`` for E2M1, 1.8125 the tuned "7.25" rule

``log2`` is no threshold: ceil(log2(amax / max)) with both rounded to fp32, as vLLM and torch compute it; where the
logarithm rounds down to an integer, the largest element saturates.

Scales with a mantissa: ``amax`` divides by the span and rounds to nearest even into the stored format.
``minmax`` spans [min(x, 0), max(x, 0)] and adds a zero point. Outer levels: ``pow2`` is the smallest power
of two ≥ amax / (span · largest inner scale), which inverts exactly, ``amax`` the quotient itself, and
``four_over_six`` leaves inner scales room to grow by 1.5 (256 instead of 448). An engine's ``inverse`` is the
reciprocal of the rounded divisor (span · largest inner scale) / amax.

A scale of a nonzero tile is never zero, subnormal in fp32, infinite or NaN; an all-zero tile has scale 1, or the
level's floor.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import NonFiniteError, UsageError
from narrowcast.numbers.codec import decode, encode, round_values, to_bf16
from narrowcast.numbers.formats import BF16, E8M0, FP16, FP32, Format
from narrowcast.tensors.schemes import Arithmetic, Scale, Scheme, Tile, tile_grid

F32 = NDArray[np.float32]
POWER_RULES = ("floor", "rceil", "ceil_log2", "even", "bump(T)")
MANTISSA_RULES = ("amax", "minmax")
OUTER_RULES = ("pow2", "amax", "four_over_six")
SMALLEST_FP32_SCALE = 2.0**-126  # below it, hardware that flushes subnormals would divide by zero
SMALLEST_OUTER = 2.0**-117  # times the smallest E4M3 scale, 2^-9, this is still a normal fp32


def reduce_tiles(x: NDArray[Any], tile: Tile, what: np.ufunc = np.maximum) -> NDArray[Any]:
    """``what`` over every tile of x [..., N, K], giving tile_grid(shape, tile); partial edge tiles included."""
    *_, n, k = x.shape
    rows, cols = tile
    over_cols = what.reduceat(x, np.arange(0, k, cols or k), axis=-1)
    reduced: NDArray[Any] = what.reduceat(over_cols, np.arange(0, n, rows or n), axis=-2)
    return reduced


def spread(scales: NDArray[Any], tile: Tile, shape: tuple[int, ...]) -> NDArray[Any]:
    """One scale per tile made to broadcast over x [..., N, K]: repeated along tiles, 1 along whole axes."""
    *_, n, k = shape
    rows, cols = tile
    if rows > 1:
        scales = np.repeat(scales, rows, axis=-2)[..., :n, :]
    if cols > 1:
        scales = np.repeat(scales, cols, axis=-1)[..., :k]
    return scales


def check_finite(x: NDArray[Any], where: str = "tensor") -> None:
    """Refuse NaN and infinity by name, count and first index."""
    bad = ~np.isfinite(x)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        nan = int(np.isnan(x).sum())
        raise NonFiniteError(
            f"{nan} NaN and {int(bad.sum()) - nan} infinite values",
            where=f"{where}, first at index {first}",
            wanted="finite values",
            remedy="repair the source, or keep this tensor unquantized with --ignore",
        )


@cache
def bump_threshold(rule: str, element: Format) -> tuple[float, bool]:
    """Threshold of the mantissa of amax, and whether reaching it (≥) already bumps, for a power-of-two rule."""
    if rule == "floor":
        return 2.0, False
    if rule == "rceil":
        return element.max / 2.0**element.emax, False
    if rule == "ceil_log2":
        return 1.0, False
    if rule == "even":
        return 2.0 - element.spacing(2.0**element.emax) / 2.0 ** (element.emax + 1), True
    match = re.fullmatch(r"bump\((\d+(?:\.\d+)?)\)", rule)
    if match is None or not 1.0 <= float(match[1]) <= 2.0:
        wanted = ", ".join(POWER_RULES) + " with 1 ≤ T ≤ 2"
        raise UsageError("unknown rule of a power-of-two scale", got=rule, wanted=wanted)
    return float(match[1]), True


def under_rule(scheme: Scheme, rule: str) -> Scheme:
    """The scheme with ``rule`` on the level that it is for: the power-of-two scales, or NVFP4's outer scale.

    UsageError where the scheme has no such level, so that a rule is never ignored in silence.
    """
    if scheme.inner.format is E8M0:
        bump_threshold(rule, scheme.element)
        return scheme.with_rule(rule)
    if len(scheme.scales) == 2 and rule in OUTER_RULES:
        return replace(scheme, scales=(scheme.inner, replace(scheme.scales[1], rule=rule)))
    if len(scheme.scales) == 1 and rule == scheme.inner.rule:
        return scheme
    wanted = OUTER_RULES if len(scheme.scales) == 2 else (scheme.inner.rule,)
    raise UsageError(f"{scheme.name} has no scale that takes this rule", got=rule, wanted=", ".join(wanted))


def power_of_two_codes(
    amax: NDArray[Any], rule: str, element: Format, zero_tile: str = "one"
) -> NDArray[np.uint8]:
    """E8M0 bytes for tile maxima: 127 + exponent, clamped to the format, by the family in the module docstring."""
    threshold, reached = bump_threshold(rule, element)
    half, exponent = np.frexp(amax.astype(np.float64))  # amax = half · 2^exponent, half in [1/2, 1)
    bump = 2 * half >= threshold if reached else 2 * half > threshold
    byte = np.clip(exponent - 1 - element.emax + bump + E8M0.bias, 0, E8M0.max_code)
    zero = 0 if zero_tile == "eps" else E8M0.bias
    return np.where(amax == 0, zero, byte).astype(np.uint8)


def _logarithm_codes(amax: NDArray[Any], element: Format) -> NDArray[np.uint8]:
    """E8M0 bytes by the rule ``log2``; an all-zero tile has byte 0, as every tile below the format has."""
    smallest = np.float32(SMALLEST_FP32_SCALE)
    value = np.maximum(amax.astype(np.float32), smallest) / np.float32(element.max)
    exponent = np.ceil(np.log2(value.astype(np.float64)).astype(np.float32))
    codes: NDArray[np.uint8] = np.clip(exponent + E8M0.bias, 0, E8M0.max_code).astype(np.uint8)
    return codes


def store_scale(value: NDArray[Any], fmt: Format) -> NDArray[Any]:
    """Positive scales as stored: fp32 as float32, narrower formats as codes; never zero or subnormal fp32."""
    if fmt is FP32:
        normal: F32 = np.maximum(value, SMALLEST_FP32_SCALE).astype(np.float32)
        return normal
    if fmt is BF16:
        return to_bf16(np.maximum(value, SMALLEST_FP32_SCALE).astype(np.float32))
    if fmt is FP16:
        codes: NDArray[Any] = np.clip(value, FP16.smallest, FP16.max).astype(np.float16).view(np.uint16)
        return codes
    nonzero: NDArray[Any] = np.maximum(encode(value, fmt).codes, 1)
    return nonzero


def load_scale(stored: NDArray[Any], fmt: Format) -> F32:
    """Values of stored scales as float32."""
    values: F32 = stored.astype(np.float32, copy=False) if fmt is FP32 else decode(stored, fmt)
    return values


def outer_scale(amax: NDArray[Any], scheme: Scheme, source: Format = FP32) -> F32:
    """The stored per-tensor scale for tensor maxima (shape [..., 1, 1]); fused siblings pass their common maximum.

    For a scheme of one level the outer scale is its only scale: amax / span.
    """
    level = scheme.scales[-1]
    if len(scheme.scales) == 1:
        return load_scale(inner_scale(amax, scheme, None, source), level.format)
    if level.rule == "inverse":
        return _inverted_divisor(amax, scheme)
    if level.rule not in OUTER_RULES:
        raise UsageError("unknown rule of an outer scale", got=level.rule, wanted=", ".join(OUTER_RULES))
    reach = scheme.span * (256.0 if level.rule == "four_over_six" else scheme.inner.format.max)
    if level.divides:
        return _dividing_scale(amax, reach, source)
    value = amax.astype(np.float64) / reach
    if level.rule == "pow2":
        half, exponent = np.frexp(value)
        value = np.ldexp(1.0, exponent - (half == 0.5))
    value = np.maximum(value, SMALLEST_OUTER).astype(np.float32)
    return np.where(amax == 0, np.float32(1), value)


def _inverted_divisor(amax: NDArray[Any], scheme: Scheme) -> F32:
    """1 / (reach / amax) in fp32, with amax at least what gives the level's floor."""
    reach = np.float32(scheme.span * scheme.inner.format.max)
    raised = np.maximum(amax, np.float32(scheme.scales[-1].floor * reach)).astype(np.float32)
    with np.errstate(divide="ignore"):
        value: F32 = np.float32(1) / (reach / raised)
    return np.where(raised == 0, np.float32(1), value)


def _dividing_scale(amax: NDArray[Any], reach: float, source: Format) -> F32:
    """reach / amax as torch divides a number by a tensor: times the rounded reciprocal, in the source's dtype.

    The maximum is kept above the dtype's smallest normal; where the quotient still overflows, the scale is 1.
    """
    floor = np.maximum(amax.astype(np.float64), source.smallest_normal or 0.0)
    value = round_values(reach * round_values(1 / floor, source), source)
    with np.errstate(over="ignore"):
        narrow = value.astype(np.float32)
    return np.where((amax == 0) | ~np.isfinite(narrow), np.float32(1), narrow)


def inner_scale(amax: NDArray[Any], scheme: Scheme, outer: F32 | None, source: Format = FP32) -> NDArray[Any]:
    """Stored innermost scales for tile maxima, given the outer scales they will be multiplied by."""
    level, arithmetic = scheme.inner, scheme.arithmetic
    if level.rule == "log2":
        return _logarithm_codes(amax, scheme.element)
    if level.format is E8M0:
        zero_tile = arithmetic.zero_tile
        if zero_tile == "eps" and source is FP16:
            # The peer masks exponent bits: a subnormal maximum is zero, or 2^-14 where the bump carries. Zero would be
            # stored as 2^-127, which underflows in fp16 and is replaced by 1.
            smallest = FP16.smallest_normal or 0.0
            carries = amax >= (bump_threshold(level.rule, scheme.element)[0] - 1) * smallest
            amax, zero_tile = np.where(carries, np.maximum(amax, smallest), 0), "one"
        return power_of_two_codes(amax, level.rule, scheme.element, zero_tile)
    if level.rule not in MANTISSA_RULES:
        wanted = ", ".join(MANTISSA_RULES)
        raise UsageError(f"rule does not apply to a {level.format.name} scale", got=level.rule, wanted=wanted)
    value = quotient(amax, scheme.span, arithmetic, source)
    if outer is not None:
        value = value * outer if scheme.scales[1].divides else value / outer
    return tile_scale(value, amax == 0, level, arithmetic, source)


def tile_scale(
    value: NDArray[Any], empty: NDArray[np.bool_], level: Scale, arithmetic: Arithmetic, source: Format
) -> NDArray[Any]:
    """Tile scales as stored, with the scheme's scale where a tile is empty (or, for a peer, rounds to zero)."""
    if level.floor:
        return store_scale(np.maximum(value, np.float32(level.floor)), level.format)
    if arithmetic.zero_tile == "zero":
        return encode(value, level.format).codes
    if arithmetic.zero_tile == "eps":
        stored = value.astype(np.float32) if level.format is FP32 else encode(value, level.format).codes
        empty = load_scale(stored, level.format) == 0
    else:
        stored = store_scale(value, level.format)
    return np.where(empty, zero_tile_scale(level, arithmetic, source), stored).astype(stored.dtype)


def quotient(amax: NDArray[Any], span: float, arithmetic: Arithmetic, source: Format) -> NDArray[Any]:
    """amax / span in the scheme's arithmetic."""
    if arithmetic.precision == "fp64":
        return amax.astype(np.float64) / span
    if arithmetic.precision == "source":
        return round_values(amax.astype(np.float64) / span, source).astype(np.float32)
    return amax.astype(np.float32) / np.float32(span)


def zero_tile_scale(level: Scale, arithmetic: Arithmetic, source: Format) -> Any:
    """The stored scale of an all-zero tile: 1.0, or the epsilon that the peer library puts there."""
    if arithmetic.zero_tile == "one":
        return store_scale(np.ones(1), level.format)[0]
    epsilon = (source if level.format is FP32 else level.format).epsilon or 0.0
    return store_scale(np.full(1, epsilon), level.format)[0]


def element_divisor(stored: NDArray[Any], scheme: Scheme, outer: F32 | None) -> NDArray[Any]:
    """What elements are divided by, per innermost tile: the product of the stored scales, as float32."""
    inner = load_scale(stored, scheme.inner.format)
    if outer is None:
        return inner
    return inner / outer if scheme.scales[1].divides else inner * outer


def reciprocal(divisor: F32) -> F32:
    """1 / s in fp32, 0 where a scale is 0."""
    with np.errstate(divide="ignore"):
        factor = np.float32(1) / divisor
    return np.where(divisor == 0, np.float32(0), factor)


def scales_shape(shape: tuple[int, ...], scheme: Scheme) -> list[tuple[int, ...]]:
    """Shapes of the stored scale arrays, inner to outer."""
    return [tile_grid(shape, level.tile) for level in scheme.scales]
