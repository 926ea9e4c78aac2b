"""The encoder of fractions_oracle.py over whole float64 arrays: the same arithmetic in exact powers of two.

The quotient |x| / quantum, its floor and the rest below one are exact in float64 (a division by a power of
two and a Sterbenz difference), so the decisions are those of the fractions, to which tests hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.fractions_oracle import Layout, cast_nan

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Results:
    """Codes, and masks of what was lost; ``over`` marks what overflow='error' must refuse."""

    codes: NDArray[np.int64]
    clipped: Mask
    underflowed: Mask
    nan: Mask
    inf: Mask

    @property
    def over(self) -> Mask:
        return self.clipped | self.inf


def _exponent(magnitude: Floats) -> NDArray[np.int64]:
    return np.frexp(np.where(magnitude > 0, magnitude, 1.0))[1].astype(np.int64) - 1


def round_array(layout: Layout, x: Floats, rounding: str, noise: Floats | None = None) -> Floats:
    """Finite x on the layout's grid, continued beyond its ends."""
    # The tiniest inputs are lifted to where dividing by any quantum stays exact; no decision changes.
    magnitude = np.where(x == 0, 0.0, np.maximum(np.abs(x), 1e-250))
    if layout.step is not None:
        quantum = np.full_like(x, float(layout.step))
    else:
        exponent = _exponent(magnitude)
        if layout.subnormals:
            exponent = np.maximum(exponent, 1 - layout.bias)
        quantum = np.ldexp(1.0, (exponent - layout.mantissa_bits).astype(np.int64))
    with np.errstate(over="ignore"):
        count = np.minimum(magnitude / quantum, 2.0**62)  # far beyond every format
    whole = np.floor(count)
    rest = count - whole
    if layout.step is None and layout.mantissa_bits == 0:
        odd = (whole > 0) & ((_exponent(quantum) + layout.bias) % 2 == 1)
    else:
        odd = whole % 2 == 1
    inexact, positive = rest > 0, x > 0
    away = {
        "nearest_even": (rest > 0.5) | ((rest == 0.5) & odd),
        "nearest_away": rest >= 0.5,
        "nearest_zero": rest > 0.5,
        "toward_zero": np.zeros_like(positive),
        "up": positive & inexact,
        "down": ~positive & inexact,
    }
    if noise is not None:
        away["stochastic"] = np.where(positive, rest > noise, 1 - rest <= noise) & inexact
    with np.errstate(over="ignore"):
        return np.copysign((whole + away[rounding]) * quantum, x)


def _codes_of(layout: Layout, values: Floats) -> NDArray[np.int64]:
    """Codes of values on the grid, assembled from their exponents and significands."""
    magnitude = np.abs(values)
    if layout.step is not None:
        return (values / float(layout.step)).astype(np.int64) & ((1 << layout.bits) - 1)
    lowest = (1 if layout.subnormals else 0) - layout.bias
    exponent = np.maximum(_exponent(magnitude), lowest)
    significand = np.ldexp(magnitude, -exponent + layout.mantissa_bits).astype(np.int64)
    body = np.where(magnitude > 0, ((exponent - lowest) << layout.mantissa_bits) + significand, 0)
    if not layout.subnormals:
        body = np.where(magnitude > 0, body - (1 << layout.mantissa_bits), 0)
    sign = np.signbit(values) & bool(layout.sign_bits)
    zero_sign = sign & ((magnitude > 0) | (layout.minus_zero is not None))
    return body | np.where(zero_sign, 1 << (layout.bits - 1), 0)


def encode_array(
    layout: Layout, x: NDArray[Any], rounding: str, overflow: str, noise: Floats | None = None
) -> Results:
    """Codes of float64 x; under overflow='error' those of out-of-range inputs mean nothing."""
    x = x.astype(np.float64)
    nan, inf, negative = np.isnan(x), np.isinf(x), np.signbit(x)
    finite = np.where(nan | inf, 0.0, x)
    rounded = round_array(layout, finite, rounding, noise)
    low, high = float(layout.lowest), float(layout.highest)
    if low > 0:  # no zero: what lies below the smallest value becomes it
        small = (finite >= 0) & (finite < low)
        clipped, underflowed = (finite < 0) | ((rounded > high) & ~small), small & (finite > 0)
        rounded = np.where(small, low, rounded)
    else:
        clipped = (rounded < low) | (rounded > high)
        underflowed = (rounded == 0) & (finite != 0)
    codes = _codes_of(layout, np.where(clipped, 1.0 if low > 0 else 0.0, rounded))
    over = clipped | inf
    ends = np.where(negative, layout.values[layout.lowest], layout.values[layout.highest])
    if overflow != "special":
        codes = np.where(over, ends, codes)
    else:
        inward = {"toward_zero": np.ones_like(nan), "down": ~negative, "up": negative}
        stays = inward.get(rounding, np.zeros_like(nan)) & ~inf
        codes = np.where(over, np.where(stays, ends, _special(layout, negative)), codes)
    if layout.nan:
        codes = np.where(nan, _nan(layout, negative), codes)
    return Results(codes, clipped & ~nan, underflowed, nan, inf)


def _nan(layout: Layout, negative: Mask) -> NDArray[np.int64]:
    return np.where(negative, cast_nan(layout, True), cast_nan(layout, False))


def _special(layout: Layout, negative: Mask) -> NDArray[np.int64]:
    infinities = {layout.decode(code): code for code in layout.inf}
    nan = _nan(layout, negative)
    return np.where(negative, infinities.get("-inf", nan), infinities.get("inf", nan))
