"""Encode and decode whole arrays, exactly, under any rounding and overflow rule.

Encoding is two steps that never swap. *Round first*: pick a neighbour of x on the format's grid, continued
beyond its largest value with the same spacing. *Then decide overflow*: what lies outside the range saturates,
becomes the format's special value, or raises. So 464 is E4M3's 448 (a tie, to even) while the next float
above it overflows.

Inputs are compared with midpoints, which are exact in float64 for formats up to 16 bits, so the rounding
decision is exact for any float64 input; stochastic rounding subtracts the nearer neighbour, exact as well.
Formats above 16 bits have no code table and are rounded as values on a power-of-two quantum, exact again.

Minus zero keeps its sign where the format has one; a negative that rounds to zero becomes minus zero there.
NaN becomes the format's NaN, or is refused where the format has none. Infinity saturates or becomes special
by the overflow mode, and is counted apart from finite values that were clipped.

Left out: flags for "inexact" (compare the decoded value) and flush-to-zero inputs (no checkpoint needs them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import NonFiniteError, RangeError, UsageError
from narrowcast.numbers.formats import BF16, FP16, FP32, FP64, Format, Kind, Specials

Rounding = Literal["nearest_even", "nearest_away", "nearest_zero", "toward_zero", "up", "down", "stochastic"]
Overflow = Literal["saturate", "special", "error"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)
OVERFLOWS: tuple[str, ...] = get_args(Overflow)

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Counts:
    """What a cast lost, in elements. ``clipped``: finite and beyond the range after rounding;
    ``underflowed``: nonzero and rounded to zero (or, without a zero, below the smallest value)."""

    clipped: int = 0
    underflowed: int = 0
    nan: int = 0
    inf: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Encoded:
    """Codes (uint8 up to 8 bits, else uint16; the shape of the input) and what the cast lost."""

    codes: NDArray[Any]
    counts: Counts


@dataclass(frozen=True)
class _Grid:
    """Finite values of a format in ascending order, the code of each, and one virtual step past each end."""

    values: Floats
    codes: NDArray[np.uint16]
    middles: Floats  # middles[i] lies between values[i-1] and values[i]; the ends are the overflow thresholds
    even: Mask


@cache
def _grid(fmt: Format) -> _Grid:
    """The grid of all codes but NaN, infinity and minus zero."""
    table = decode_table(fmt)
    numbers = np.flatnonzero(np.isfinite(table) & ~((table == 0) & np.signbit(table)))
    codes = numbers[np.argsort(table[numbers], kind="stable")].astype(np.uint16)
    codes = codes[
        np.diff(table[codes], prepend=-np.inf) != 0
    ]  # a table may say a number twice: the first code
    values = table[codes]
    # One step beyond each end, as wide as the grid is there: the largest value may be the first of its binade.
    below, above = values[0] - fmt.spacing(float(values[0])), values[-1] + fmt.spacing(float(values[-1]))
    extended = np.concatenate([[below], values, [above]])
    middles = extended[:-1] / 2 + extended[1:] / 2
    return _Grid(values, codes, middles, codes % 2 == 0)


def encode(
    x: NDArray[Any],
    fmt: Format,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "saturate",
    noise: NDArray[Any] | None = None,
) -> Encoded:
    """Codes of ``x`` (any real dtype, any shape) in ``fmt`` (at most 16 bits).

    ``noise`` in [0, 1), shaped like x, drives stochastic rounding: up when the fraction of the way to the
    upper neighbour exceeds it. Raises NonFiniteError for NaN where the format has none, RangeError under
    ``overflow="error"``, UsageError for ``overflow="special"`` where the format has neither inf nor NaN.
    """
    if not fmt.coded:
        raise UsageError(
            "format has no codes", where=fmt.name, remedy="round_values rounds to formats above 16 bits"
        )
    _check_rules(rounding, overflow, fmt, noise)
    with np.errstate(invalid="ignore"):  # a signalling NaN is counted below, not warned about
        wide = np.asarray(x, np.float64)
    nan, inf = np.isnan(wide), np.isinf(wide)
    if nan.any() and not fmt.has_nan:
        first = tuple(int(i) for i in np.argwhere(nan)[0])
        raise NonFiniteError(
            f"{int(nan.sum())} NaN values, and {fmt.name} has no NaN code",
            where=f"first at index {first}",
            remedy="remove them from the input; a NaN must not become a number",
        )
    finite = np.where(nan | inf, 0.0, wide)
    grid = _grid(fmt)
    index = _neighbour(finite, grid, rounding, noise)  # 0 and len+1 are the virtual steps
    last = len(grid.values)
    # A directed rounding stops at the last value it passes, but what lies a whole step beyond is out of range.
    below, above = _ends(grid)
    low, high = (index == 0) | (finite <= below), (index == last + 1) | (finite >= above)
    clamped = np.clip(index - 1, 0, last - 1)
    codes = grid.codes[clamped].astype(np.uint8 if fmt.bits <= 8 else np.uint16)
    clipped, underflowed = _lost(finite, grid.values[clamped], low, high, fmt)
    counts = Counts(int(clipped.sum()), int(underflowed.sum()), int(nan.sum()), int(inf.sum()))
    if fmt.has_minus_zero:
        codes = np.where(
            (grid.values[clamped] == 0) & np.signbit(finite), codes.dtype.type(fmt.sign_code), codes
        )
    codes = _overflowed(codes, wide, clipped | inf, fmt, rounding, overflow)
    if nan.any():
        codes = np.where(nan, _nan_codes(np.signbit(wide), fmt, codes.dtype), codes)
    return Encoded(codes, counts)


def _check_rules(rounding: str, overflow: str, fmt: Format, noise: NDArray[Any] | None) -> None:
    if rounding not in ROUNDINGS:
        raise UsageError("unknown rounding", got=rounding, wanted=", ".join(ROUNDINGS))
    if overflow not in OVERFLOWS:
        raise UsageError("unknown overflow mode", got=overflow, wanted=", ".join(OVERFLOWS))
    if rounding == "stochastic" and noise is None:
        raise UsageError("stochastic rounding needs noise", wanted="an array in [0, 1) shaped like the input")
    if overflow == "special" and not fmt.has_nan:
        remedy = 'use overflow="saturate" or "error"'
        raise UsageError(f"{fmt.name} has neither infinity nor NaN to overflow to", remedy=remedy)


def _neighbour(x: Floats, grid: _Grid, rounding: str, noise: NDArray[Any] | None) -> NDArray[np.intp]:
    """Index (1-based; 0 and len+1 are one step past the ends) of the grid value that ``x`` rounds to."""
    last = len(grid.values)
    at_or_below = np.searchsorted(grid.values, x, "right")  # 1-based index of the largest value <= x
    exact = (at_or_below > 0) & (grid.values[np.maximum(at_or_below, 1) - 1] == x)
    lower, upper = at_or_below, np.where(exact, at_or_below, at_or_below + 1)
    if rounding == "down":
        return lower
    if rounding == "up":
        return upper
    if rounding == "toward_zero":
        return np.where(x < 0, upper, lower)
    below, above = _ends(grid)
    middle = grid.middles[np.minimum(lower, last)]
    if rounding == "stochastic":
        assert noise is not None
        steps = np.concatenate([[below], grid.values, [above]])
        # Measured from the nearer neighbour the difference is exact (Sterbenz); from the farther one it rounds.
        level = np.asarray(noise, np.float64)
        gap = steps[upper] - steps[lower]
        go_up = np.where(x <= middle, x - steps[lower] > level * gap, steps[upper] - x < (1 - level) * gap)
        return np.where(go_up, upper, lower)
    tie = (x == middle) & ~exact
    up = x > middle
    if rounding == "nearest_away":
        up |= tie & (x > 0)
    elif rounding == "nearest_zero":
        up |= tie & (x < 0)
    else:
        lower_even = grid.even[np.clip(lower, 1, last) - 1] ^ (lower == 0)  # parity alternates past the end
        up |= tie & ~lower_even
    return np.where(up & ~exact, upper, lower)


def _ends(grid: _Grid) -> tuple[float, float]:
    """The virtual values one step below and above the grid."""
    return 2 * grid.middles[0] - grid.values[0], 2 * grid.middles[-1] - grid.values[-1]


def _lost(x: Floats, rounded: Floats, low: Mask, high: Mask, fmt: Format) -> tuple[Mask, Mask]:
    """Masks of clipped and underflowed elements; below a format without zero, small means underflow."""
    if not fmt.subnormals and not fmt.signed:
        small = (x >= 0) & (x < fmt.min)
        return high | (low & ~small) | (x < 0), small & (x != 0)
    return low | high, (rounded == 0) & (x != 0) & ~low & ~high


def _overflowed(
    codes: NDArray[Any], x: Floats, over: Mask, fmt: Format, rounding: str, overflow: str
) -> NDArray[Any]:
    """Apply the overflow rule to the elements that left the range (codes already hold the saturated ones)."""
    if not over.any():
        return codes
    if overflow == "error":
        first = tuple(int(i) for i in np.argwhere(over)[0])
        raise RangeError(
            f"{int(over.sum())} values outside {fmt.name}",
            where=f"first at index {first}",
            got=float(x[first]),
            wanted=f"{fmt.min:g} to {fmt.max:g}",
            remedy='scale the tensor first, or choose overflow="saturate"',
        )
    saturated = np.where(np.signbit(x), *_end_codes(fmt, codes.dtype))
    if overflow == "saturate":
        return np.where(over, saturated, codes)
    negative = np.signbit(x)
    special = (
        _inf_codes(negative, fmt, codes.dtype) if fmt.has_inf else _nan_codes(negative, fmt, codes.dtype)
    )
    special = np.where(_stops(rounding, x) & np.isfinite(x), saturated, special)
    return np.where(over, special, codes)


def _end_codes(fmt: Format, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Codes of the most negative and the largest finite value."""
    grid = _grid(fmt)
    return grid.codes[0].astype(dtype), grid.codes[-1].astype(dtype)


def _inf_codes(negative: Mask, fmt: Format, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Infinity with the sign of the input; an unsigned format has no place for a negative one but its NaN."""
    top = fmt.max_code + 1
    below = (
        np.full(negative.shape, top | fmt.sign_code, dtype)
        if fmt.signed
        else _nan_codes(negative, fmt, dtype)
    )
    return np.where(negative, below, top).astype(dtype)


def _nan_codes(negative: Mask, fmt: Format, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The NaN that casts produce: the quiet one with the sign of the input, or the format's only one."""
    if fmt.specials in (Specials.FNUZ, Specials.EXTENDED):
        return np.full(negative.shape, fmt.sign_code, dtype)
    if fmt.specials is Specials.FN:
        nan = (1 << (fmt.bits - (1 if fmt.signed else 0))) - 1
    else:
        nan = (fmt.max_code + 1) | (1 << (fmt.mantissa_bits - 1))
    return np.where(negative & fmt.signed, nan | (fmt.sign_code if fmt.signed else 0), nan).astype(dtype)


@cache
def decode_table(fmt: Format) -> Floats:
    """Value of every code as float64 (exact), length 2^bits; the one table that decoders use."""
    codes = np.arange(1 << fmt.bits)
    if fmt.kind is Kind.TABLE:
        table = np.array(fmt.table)
    elif fmt.kind is Kind.INT:
        wrapped = (codes & fmt.sign_code).astype(bool) & fmt.signed
        table = np.ldexp(np.where(wrapped, codes - (1 << fmt.bits), codes).astype(np.float64), -fmt.bias)
    else:
        table = _float_table(codes, fmt)
    table.flags.writeable = False
    return table


def _float_table(codes: NDArray[Any], fmt: Format) -> Floats:
    """``Format.value`` over all codes at once; the few codes that are no numbers are asked one by one."""
    magnitude = codes & (fmt.sign_code - 1) if fmt.signed else codes
    negative = (codes != magnitude) & fmt.signed
    exponent, mantissa = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    normal = (exponent > 0) | (not fmt.subnormals)
    significand = mantissa + np.where(normal, 1 << fmt.mantissa_bits, 0)
    power = np.where(normal, exponent, 1) - fmt.bias - fmt.mantissa_bits
    size = np.ldexp(significand.astype(np.float64), power)
    table: Floats = np.where(negative, -size, size)
    names = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "-0": -0.0}
    for code in np.flatnonzero((magnitude > fmt.max_code) | (negative & (magnitude == 0))):
        value = fmt.value(int(code))
        table[code] = names[value] if isinstance(value, str) else float(value)
    return table


@cache
def _decode_table32(fmt: Format) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        table = decode_table(fmt).astype(np.float32)
    table.flags.writeable = False
    return table


def decode(codes: NDArray[Any], fmt: Format) -> NDArray[np.float32]:
    """Values of codes as float32, exact for every format up to 16 bits (bf16 subnormals included)."""
    if fmt is BF16:
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.take(_decode_table32(fmt), codes)


def round_values(x: NDArray[Any], fmt: Format, rounding: Rounding = "nearest_even") -> Floats:
    """``x`` rounded to ``fmt`` as float64 values: the way for fp32, tf32 and fp64, which have no codes.

    v = rint(x / q) · q with q = 2^(max(floor(log2|x|), 1 - bias) - m): the division and the product are by a
    power of two, hence exact, and only the rounding to an integer rounds. Overflow gives infinity, or the
    largest value under a rounding directed away from it. Formats without infinity go through their codes.
    """
    wide = np.asarray(x, np.float64)
    steps: dict[str, Callable[[Floats], Floats]] = {
        "nearest_even": np.rint, "toward_zero": np.trunc, "up": np.ceil, "down": np.floor,
        "nearest_away": _nearest_away, "nearest_zero": lambda y: np.copysign(np.ceil(np.abs(y) - 0.5), y),
    }  # fmt: skip
    if rounding not in steps:
        raise UsageError("unknown rounding of values", got=rounding, wanted=", ".join(steps))
    if fmt is FP64:
        return wide
    if fmt.specials is not Specials.IEEE or not (fmt.signed and fmt.subnormals):
        return np.asarray(decode_table(fmt)[encode(wide, fmt, rounding).codes], np.float64)
    exponent = np.frexp(np.where(np.isfinite(wide), wide, 1.0))[1] - 1
    quantum = np.ldexp(1.0, np.maximum(exponent, 1 - fmt.bias) - fmt.mantissa_bits)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN pass through unchanged
        rounded = np.copysign(np.asarray(steps[rounding](wide / quantum)) * quantum, wide)
    over = np.isfinite(wide) & (np.abs(rounded) > fmt.max)
    return np.where(over, np.copysign(np.where(_stops(rounding, wide), fmt.max, np.inf), wide), rounded)


def _nearest_away(y: Floats) -> Floats:
    """Nearest integer, ties away from zero; adding one half to |y| would round just below one half up to one."""
    whole = np.trunc(y)
    away: Floats = np.copysign(np.abs(whole) + (np.abs(y - whole) >= 0.5), y)
    return away


def _stops(rounding: str, x: Floats) -> Mask:
    """Whether a directed rounding of an overflowing x delivers the largest finite value (IEEE 754 section 7.4)."""
    negative = np.signbit(x)
    stops = {"toward_zero": np.ones_like(negative), "up": negative, "down": ~negative}
    return stops.get(rounding, np.zeros_like(negative))


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Float32 to bf16 bit patterns, nearest-even, NaN quieted: the integer form of ``encode(x, BF16)``.

    Adding 0x7FFF plus the lowest kept bit carries into the kept half exactly when the dropped half is above
    one half, or equal to it with an odd neighbour. Finite overflow becomes infinity, as in every engine.
    """
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


def widen(stored: NDArray[Any], fmt: Format) -> NDArray[np.float32]:
    """Stored source elements (bf16 as uint16, or float16/float32/float64) as float32 values."""
    if fmt is BF16:
        return decode(stored, BF16)
    if fmt in (FP16, FP32):
        return stored.astype(np.float32, copy=False)
    if fmt is FP64:
        with np.errstate(over="ignore"):
            return stored.astype(np.float32)
    return decode(stored, fmt)
