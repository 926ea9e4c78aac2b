"""What a number becomes in a format, what bits mean, and what a row looks like after scaling.

    below ≤ x ≤ above,   decoded = nearest of the two (ties to the even code),   error = decoded - x

Everything here asks the codec; nothing rounds by itself. IEEE formats from 16 bits on are rounded as values:
their neighbours come from rounding down and up one float64 step away, and their bits from the machine's own
encoding, because a table of all their values is slow to make or impossible.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf, isfinite, isinf, isnan, ldexp, nan, nextafter, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import NonFiniteError, RangeError, UsageError
from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.codec import OVERFLOWS, ROUNDINGS, decode_table, encode, round_values
from narrowcast.numbers.formats import Format, formats
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.schemes import Scheme

# How IEEE formats are packed: the machine's float, the integer with its bits, and how many low ones are dropped.
_WORDS = {
    "fp64": (">d", ">Q", 0), "fp32": (">f", ">I", 0), "tf32": (">f", ">I", 13), "bf16": (">f", ">I", 16),
    "fp16": (">e", ">H", 0),
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A value of a format and its code."""

    value: float
    code: int


@dataclass(frozen=True)
class Explained:
    """One number in one format.

    ``roundings`` and ``overflows`` map a rule to what it gives, or to a refusal in words; ``goes_up`` is the
    share of times that stochastic rounding goes up. ``fate`` is how a cast would count the value: exact,
    rounded, clipped, underflowed, nan or inf.
    """

    format: Format
    value: float
    nearest: Point | None
    below: Point | None
    above: Point | None
    tie: bool
    fate: str
    roundings: dict[str, Point | str]
    overflows: dict[str, Point | str]
    goes_up: float | None

    @property
    def error(self) -> float:
        """decoded - x, rounded once; nan where there is no number to subtract."""
        if self.nearest is None or not isfinite(self.value) or not isfinite(self.nearest.value):
            return nan
        return float(Fraction(self.nearest.value) - Fraction(self.value))

    @property
    def relative_error(self) -> float:
        """|decoded - x| / |x|; nan for zero and for what is not finite."""
        return abs(self.error / self.value) if self.value else nan


def parse_value(text: str) -> float:
    """A number as people write it: 0.3, -2^-10, 1.5*2^-9, 1/3, 0x1.8p3, inf, nan.

    Raises UsageError for what is no number, and for a finite one that float64 cannot hold.
    """
    plain = text.strip().lower().replace("**", "^").replace("−", "-")
    try:
        factors = [_factor(part) for part in plain.split("*")]
        value = prod(factors)
    except (ValueError, ZeroDivisionError, OverflowError):
        wanted = "a number such as 0.3, -2^-10, 1.5*2^-9, 1/3, inf or nan"
        raise UsageError("not a number", got=text, wanted=wanted) from None
    if (isinf(value) and "inf" not in plain) or (value == 0 and re.match(r"[-+.0]*[1-9]", plain)):
        raise UsageError("beyond float64", got=text, wanted="2^-1074 to 2^1023")
    return value


def _factor(text: str) -> float:
    """``-2^-10``, ``1/3`` or a plain number, the sign outside the power."""
    if text.startswith(("-", "+")):
        return -_factor(text[1:]) if text[0] == "-" else _factor(text[1:])
    base, power, exponent = text.partition("^")
    if power:
        return ldexp(1.0, int(exponent)) if base == "2" else float(base) ** int(exponent)
    top, slash, bottom = text.partition("/")
    if slash:
        return float(top) / float(bottom)
    return float.fromhex(text) if text.startswith("0x") else float(text)


def parse_bits(text: str) -> tuple[int, int]:
    """(code, width) of bits such as 00111000, 0_0111_000 or 0x38; the digits written decide the width."""
    digits = text.strip().replace("_", "").replace(" ", "").lower()
    if re.fullmatch(r"0x[0-9a-f]+", digits):
        return int(digits, 16), 4 * (len(digits) - 2)
    binary = digits.removeprefix("0b")
    if re.fullmatch(r"[01]+", binary):
        return int(binary, 2), len(binary)
    raise UsageError(
        "not a pattern of bits", got=text, wanted="binary digits such as 00111000, or hex such as 0x38"
    )


def meanings(code: int, width: int, rows: Iterable[Format] = ()) -> list[tuple[Format, str | Fraction]]:
    """What ``code`` means in every format of ``width`` bits (or in ``rows``)."""
    chosen = [fmt for fmt in rows or formats.values() if fmt.bits == width]
    if not chosen:
        widths = sorted({fmt.bits for fmt in rows or formats.values()})
        wanted = ", ".join(map(str, widths)) + " bits; leading zeros count"
        raise UsageError("no format has this many bits", got=f"{width} bits", wanted=wanted)
    return [(fmt, fmt.value(code)) for fmt in chosen]


def explain(x: float, fmt: Format) -> Explained:
    """Everything that can happen to ``x`` on its way into ``fmt``."""
    roundings = {rule: _cast(x, fmt, rule, "saturate") for rule in ROUNDINGS if rule != "stochastic"}
    overflows = {mode: _cast(x, fmt, "nearest_even", mode) for mode in OVERFLOWS}
    found = roundings["nearest_even"]
    nearest = found if isinstance(found, Point) else None
    below, above = _neighbours(x, fmt)
    share = None
    if below is not None and above is not None and (nearest is None or nearest.value != x):
        low = Fraction(below.value)
        share = float((Fraction(x) - low) / (Fraction(above.value) - low))
    return Explained(
        fmt, x, nearest, below, above, share == 0.5, _fate(x, nearest, fmt), roundings, overflows, share
    )


def _cast(x: float, fmt: Format, rounding: Any, overflow: Any) -> Point | str:
    """The value and code under the given rules, or the reason of the refusal."""
    if fmt.name in _WORDS:
        return _cast_ieee(x, fmt, rounding, overflow)
    try:
        code = int(encode(np.array([x]), fmt, rounding, overflow).codes[0])
    except NonFiniteError:
        return "refused: no NaN"
    except RangeError:
        return "refused: outside the range"
    except UsageError:
        return "refused: no infinity, no NaN"
    return Point(float(decode_table(fmt)[code]), code)


def _cast_ieee(x: float, fmt: Format, rounding: Any, overflow: str) -> Point | str:
    value = float(round_values(np.array([x]), fmt, rounding)[0])
    if isinf(value) and overflow == "error":
        return "refused: outside the range"
    if isinf(value) and overflow == "saturate":
        value = fmt.max if value > 0 else -fmt.max
    return Point(value, _ieee_code(value, fmt))


def _ieee_code(value: float, fmt: Format) -> int:
    """The bits of a value of an IEEE format; tf32 and bf16 are the top bits of fp32."""
    packed, word, drop = _WORDS[fmt.name]
    bits: int = struct.unpack(word, struct.pack(packed, value))[0]
    return bits >> drop


def _neighbours(x: float, fmt: Format) -> tuple[Point | None, Point | None]:
    """The nearest values strictly below and above x, where the format has them."""
    if not isfinite(x):
        return None, None
    if fmt.name in _WORDS:
        return _neighbours_ieee(x, fmt)
    finite = [(float(v), code) for code, v in enumerate(decode_table(fmt)) if isfinite(v)]
    below = max((p for p in finite if p[0] < x), default=None, key=lambda p: p[0])
    above = min((p for p in finite if p[0] > x), default=None, key=lambda p: p[0])
    return Point(*below) if below else None, Point(*above) if above else None


def _neighbours_ieee(x: float, fmt: Format) -> tuple[Point | None, Point | None]:
    """The same for IEEE formats: round down and up, one float64 step beside x."""
    low = float(round_values(np.array([nextafter(x, -inf)]), fmt, "down")[0])
    high = float(round_values(np.array([nextafter(x, inf)]), fmt, "up")[0])
    below = Point(low, _ieee_code(low, fmt)) if low != -inf else None
    return below, Point(high, _ieee_code(high, fmt)) if high != inf else None


def _fate(x: float, nearest: Point | None, fmt: Format) -> str:
    """See ``Explained.fate``."""
    if isnan(x) or nearest is None:
        return "nan"
    if isinf(x):
        return "inf"
    if nearest.value == x:
        return "exact"
    if fmt.name in _WORDS:
        over = isinf(float(round_values(np.array([x]), fmt)[0]))
        return "clipped" if over else "underflowed" if nearest.value == 0 else "rounded"
    counts = encode(np.array([x]), fmt).counts
    return "clipped" if counts.clipped else "underflowed" if counts.underflowed else "rounded"


@dataclass(frozen=True)
class ScaledRow:
    """A row under one scheme: the quantization and its exact decode [K]."""

    scheme: Scheme
    q: QTensor
    decoded: NDArray[np.float32]


def scaled_row(row: Sequence[float], scheme: Scheme) -> ScaledRow:
    """Quantize ``row`` as a matrix of one row."""
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as such
        x = np.array([row], np.float64).astype(np.float32)
    q = quantize(x, scheme, where="the row")
    return ScaledRow(scheme, q, q.dequantize()[0])


def parse_row(text: str) -> list[float]:
    """Numbers separated by blanks or commas."""
    parts = text.replace(",", " ").split()
    if not parts:
        raise UsageError("an empty row", wanted='numbers, such as "0.02 -0.5 1.3"')
    return [parse_value(part) for part in parts]
