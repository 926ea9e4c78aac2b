"""An independent definition of decoding and encoding, from bit layouts typed in spec/*.csv.

Nothing here reads narrowcast's formats or codec. Codes are read as strings of bits and given a meaning over
exact fractions. Encoding divides |x| by the quantum of its binade and rounds the quotient to an integer,
where the codec under test searches a table of values; what they share is only the specification.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import floor
from pathlib import Path

SPEC = Path(__file__).parents[1] / "numbers" / "spec"
Meaning = Fraction | str  # 'nan', 'inf', '-inf' and '-0' are not fractions


def rows(name: str) -> list[dict[str, str]]:
    """The rows of one table of spec/."""
    with (SPEC / name).open(newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> Fraction:
    """A product such as ``255*2^120``, ``2^-9`` or ``15.5``, exactly."""
    product = Fraction(1)
    for factor in text.split("*"):
        base, _, power = factor.partition("^")
        product *= Fraction(base) ** int(power or 1)
    return product


def scaled(count: int, exponent: int) -> Fraction:
    """count · 2^exponent."""
    return Fraction(count << exponent) if exponent >= 0 else Fraction(count, 1 << -exponent)


def floor_log2(x: Fraction) -> int:
    """The exponent of the binade that a positive x lies in."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess - (scaled(1, guess) > x)


def code_set(text: str) -> frozenset[int]:
    """Codes from ``7D-7F FD-FF``, in hexadecimal."""
    codes: set[int] = set()
    for part in text.split():
        first, _, last = part.partition("-")
        codes.update(range(int(first, 16), int(last or first, 16) + 1))
    return frozenset(codes)


@dataclass(frozen=True)
class Layout:
    """A format as the specification lays out its bits; ``step`` is set for integers, else it is a float."""

    name: str
    sign_bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    subnormals: bool
    nan: frozenset[int]
    inf: frozenset[int]
    minus_zero: int | None
    cast_nan: int | None
    step: Fraction | None = None

    @property
    def bits(self) -> int:
        return self.sign_bits + self.exponent_bits + self.mantissa_bits

    def decode(self, code: int) -> Meaning:
        """What a code means."""
        if code in self.nan:
            return "nan"
        text = f"{code:0{self.bits}b}"
        negative = self.sign_bits == 1 and text[0] == "1"
        if self.step is not None:
            return (int(text, 2) - (1 << self.bits if negative else 0)) * self.step
        if code in self.inf:
            return "-inf" if negative else "inf"
        if code == self.minus_zero:
            return "-0"
        split = self.sign_bits + self.exponent_bits
        exponent, mantissa = int(text[self.sign_bits : split], 2), int(text[split:] or "0", 2)
        if exponent == 0 and self.subnormals:
            exponent = 1
        else:
            mantissa += 2**self.mantissa_bits
        value = scaled(mantissa, exponent - self.bias - self.mantissa_bits)
        return -value if negative else value

    @cached_property
    def values(self) -> dict[Fraction, int]:
        """Every finite value with its code, in ascending order."""
        meanings = ((self.decode(code), code) for code in range(1 << self.bits))
        return dict(sorted((m, c) for m, c in meanings if isinstance(m, Fraction)))

    @cached_property
    def lowest(self) -> Fraction:
        return next(iter(self.values))

    @cached_property
    def highest(self) -> Fraction:
        return next(reversed(self.values))

    def quantum(self, magnitude: Fraction) -> Fraction:
        """The spacing of the grid at a positive magnitude, as if the exponent field had no upper end."""
        if self.step is not None:
            return self.step
        exponent = floor_log2(magnitude)
        if self.subnormals:
            exponent = max(exponent, 1 - self.bias)
        return Fraction(2) ** (exponent - self.mantissa_bits)

    def odd(self, count: int, quantum: Fraction) -> bool:
        """Whether the code of the value count · quantum is odd."""
        if self.step is not None or self.mantissa_bits:
            return count % 2 == 1
        # Without mantissa bits the last bit of the code belongs to the exponent.
        exponent = quantum.numerator.bit_length() - quantum.denominator.bit_length()
        return count > 0 and (exponent + (count == 2) + self.bias) % 2 == 1

    def round(self, x: Fraction, rounding: str, noise: Fraction | None = None) -> Fraction:
        """x on the grid that continues beyond the largest value."""
        quantum = self.quantum(abs(x)) if x else Fraction(1)
        count = abs(x) / quantum
        whole = floor(count)
        rest = count - whole
        if rest == 0:
            return x
        to_even = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and self.odd(whole, quantum))
        away = {
            "nearest_even": to_even,
            "nearest_away": rest >= Fraction(1, 2),
            "nearest_zero": rest > Fraction(1, 2),
            "toward_zero": False,
            "up": x > 0,
            "down": x < 0,
            "stochastic": noise is not None and (rest > noise if x > 0 else 1 - rest <= noise),
        }[rounding]
        rounded = (whole + away) * quantum
        return -rounded if x < 0 else rounded


@dataclass(frozen=True)
class Result:
    """A code and what was lost: 'clipped', 'underflowed', 'nan', 'inf' or ''."""

    code: int
    lost: str = ""


def finish(
    layout: Layout, x: Fraction, negative: bool, rounded: Fraction, rounding: str, overflow: str
) -> Result:
    """The code of a rounded finite x under an overflow rule; 'error' gives code -1 where it must raise."""
    if layout.lowest > 0:
        return _without_zero(layout, x, rounded, rounding, overflow)
    if layout.lowest <= rounded <= layout.highest:
        code = layout.values[rounded]
        if rounded == 0 and negative and layout.minus_zero is not None:
            code = layout.minus_zero
        return Result(code, "underflowed" if rounded == 0 and x != 0 else "")
    return Result(_over(layout, x < 0, True, rounding, overflow), "clipped")


def _without_zero(layout: Layout, x: Fraction, rounded: Fraction, rounding: str, overflow: str) -> Result:
    """A format whose smallest value is positive: what lies below becomes it, negatives are clipped."""
    if x < 0:
        return Result(_over(layout, True, True, rounding, overflow), "clipped")
    if x < layout.lowest:
        return Result(layout.values[layout.lowest], "underflowed" if x else "")
    if rounded <= layout.highest:
        return Result(layout.values[rounded])
    return Result(_over(layout, False, True, rounding, overflow), "clipped")


def _over(layout: Layout, negative: bool, finite: bool, rounding: str, overflow: str) -> int:
    """What an out-of-range input becomes (IEEE 754 section 7.4 for directed roundings)."""
    if overflow == "error":
        return -1
    end = layout.values[layout.lowest if negative else layout.highest]
    inward = (
        rounding == "toward_zero" or (rounding == "down" and not negative) or (rounding == "up" and negative)
    )
    if overflow == "saturate" or (inward and finite):
        return end
    wanted = [c for c in layout.inf if layout.decode(c) == ("-inf" if negative else "inf")]
    return wanted[0] if wanted else cast_nan(layout, negative)


def cast_nan(layout: Layout, negative: bool) -> int:
    """The NaN that a cast makes, with the sign of its input where such a code exists."""
    assert layout.cast_nan is not None
    signed = layout.cast_nan | (1 << (layout.bits - 1))
    return signed if negative and signed in layout.nan else layout.cast_nan


def encode(layout: Layout, x: float, rounding: str, overflow: str, noise: Fraction | None = None) -> Result:
    """The code of one float64 input."""
    return encode_under(layout, x, rounding, (overflow,), noise)[overflow]


def encode_under(
    layout: Layout, x: float, rounding: str, overflows: tuple[str, ...], noise: Fraction | None = None
) -> dict[str, Result]:
    """The code of one float64 input under several overflow rules, rounded once."""
    negative = str(x).startswith("-")
    if x != x:
        return dict.fromkeys(overflows, Result(cast_nan(layout, negative), "nan"))
    if x in (float("inf"), float("-inf")):
        return {rule: Result(_over(layout, negative, False, rounding, rule), "inf") for rule in overflows}
    exact = Fraction(x)
    rounded = layout.round(exact, rounding, noise)
    return {rule: finish(layout, exact, negative, rounded, rounding, rule) for rule in overflows}


def _layouts() -> dict[str, Layout]:
    table: dict[str, Layout] = {}
    for row in rows("floats.csv"):
        fields = [int(row[key]) for key in ("sign_bits", "exponent_bits", "mantissa_bits", "bias")]
        minus_zero = int(row["minus_zero"], 16) if row["minus_zero"] else None
        nan = int(row["cast_nan"], 16) if row["cast_nan"] else None
        subnormals = row["subnormals"] == "yes"
        specials = code_set(row["nan_codes"]), code_set(row["inf_codes"])
        table[row["format"]] = Layout(row["format"], *fields, subnormals, *specials, minus_zero, nan)
    for row in rows("integers.csv"):
        sign = int(row["signed"] == "yes")
        body = int(row["bits"]) - sign
        none: frozenset[int] = frozenset()
        table[row["format"]] = Layout(
            row["format"], sign, 0, body, 0, True, none, none, None, None, number(row["step"])
        )
    return table


LAYOUTS = _layouts()
EIGHT_BITS = [name for name, layout in LAYOUTS.items() if layout.bits <= 8]
