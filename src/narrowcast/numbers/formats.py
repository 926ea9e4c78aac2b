"""Number formats as rows: one frozen record per format, everything else derived from it.

A float code is ``sign | exponent | mantissa`` from the most significant bit down, and means

    (-1)^s · 2^(E - bias) · (1 + M / 2^m)        for E > 0 (or always, where the format has no subnormals)
    (-1)^s · 2^(1 - bias) · M / 2^m              for E = 0

except for the few codes that ``specials`` reserves:

    IEEE      all-ones exponent: infinity (M = 0) and NaN (M > 0)
    FN        all-ones exponent and mantissa: one NaN per sign, no infinity
    FNUZ      the code of minus zero is the only NaN; no infinity, no minus zero
    EXTENDED  as FNUZ, and the largest code of each sign is infinity (P3109)
    FINITE    every code is a number

An integer code is a two's complement (or unsigned) integer times 2^-bias, which is all that MXINT8 needs.
A table format (NF4, bitsandbytes' FP4) lists its values by code.

Left out: formats above 16 bits have no code tables (fp32, fp64 and tf32 are rounded as values, see codec);
decimal and posit formats, which no engine stores weights in.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property
from math import frexp, log2
from typing import Any

from narrowcast.errors import UsageError


class Specials(Enum):
    """Which codes are not finite numbers; see the module docstring."""

    IEEE = "ieee"
    FN = "fn"
    FNUZ = "fnuz"
    EXTENDED = "extended"
    FINITE = "finite"


class Kind(Enum):
    """How a code is read: as a float, as an integer, or through a table."""

    FLOAT = "float"
    INT = "int"
    TABLE = "table"


@dataclass(frozen=True)
class Format:
    """One number format. The ten facts are fields, everything else is derived from them.

    ``bias`` is the exponent bias of a float; for an integer the value is code · 2^-bias.
    ``subnormals`` False means that exponent field 0 is an ordinary exponent, so there is no zero (E8M0).
    ``source`` says where the layout was read.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    signed: bool
    specials: Specials
    subnormals: bool
    kind: Kind
    source: str
    aliases: tuple[str, ...] = ()
    table: tuple[float, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)  # formats are keys of caches in hot code; equal ones have equal names

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or an unpickled row is the row itself: rows are compared by identity in hot code."""
        return _row, tuple(getattr(self, name) for name in self.__dataclass_fields__)

    @property
    def storable(self) -> bool:
        """Whether an array of codes exists on disk: a whole power-of-two width, or the packed 6 bits."""
        return self.bits in (2, 4, 6, 8, 16, 32, 64)

    @property
    def coded(self) -> bool:
        """Whether codes are enumerable (at most 16 bits); wider formats are rounded as values."""
        return self.bits <= 16

    @property
    def has_nan(self) -> bool:
        return self.specials is not Specials.FINITE

    @property
    def has_inf(self) -> bool:
        return self.specials in (Specials.IEEE, Specials.EXTENDED)

    @property
    def has_minus_zero(self) -> bool:
        kept = self.specials not in (Specials.FNUZ, Specials.EXTENDED)
        return self.kind is Kind.FLOAT and self.signed and self.subnormals and kept

    @property
    def sign_code(self) -> int:
        """The sign bit of a signed format."""
        return 1 << (self.bits - 1)

    @cached_property
    def max_code(self) -> int:
        """Code of the largest finite value, sign bit clear."""
        if self.kind is Kind.TABLE:
            return max(range(len(self.table)), key=self.table.__getitem__)
        top = (1 << (self.bits - (1 if self.signed else 0))) - 1
        if self.kind is Kind.INT or self.specials in (Specials.FINITE, Specials.FNUZ):
            return top
        if self.specials is Specials.IEEE:
            return ((((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1) & top
        return top - 1  # FN gives its top code to NaN, EXTENDED to infinity

    def value(self, code: int) -> Fraction | str:
        """Exact meaning of one code: a Fraction, or 'nan', 'inf', '-inf', '-0'."""
        if not 0 <= code < 1 << self.bits:
            raise UsageError(
                "not a code of this format", where=self.name, got=code, wanted=f"{self.bits} bits"
            )
        if self.kind is Kind.TABLE:
            return Fraction(self.table[code])
        if self.kind is Kind.INT:
            signed = code - (1 << self.bits) if self.signed and code & self.sign_code else code
            return Fraction(signed) / Fraction(2) ** self.bias
        return self._float_value(code)

    def _float_value(self, code: int) -> Fraction | str:
        negative = self.signed and bool(code & self.sign_code)
        magnitude_code = code & (self.sign_code - 1) if self.signed else code
        if negative and magnitude_code == 0 and self.specials in (Specials.FNUZ, Specials.EXTENDED):
            return "nan"
        if magnitude_code > self.max_code:
            first_special = magnitude_code == self.max_code + 1
            return ("-inf" if negative else "inf") if self.has_inf and first_special else "nan"
        exponent = magnitude_code >> self.mantissa_bits
        mantissa = Fraction(magnitude_code & ((1 << self.mantissa_bits) - 1), 1 << self.mantissa_bits)
        if exponent == 0 and self.subnormals:
            magnitude = mantissa * Fraction(2) ** (1 - self.bias)
        else:
            magnitude = (1 + mantissa) * Fraction(2) ** (exponent - self.bias)
        if negative and magnitude == 0:
            return "-0"
        return -magnitude if negative else magnitude

    def _number(self, code: int) -> Fraction:
        value = self.value(code)
        if not isinstance(value, Fraction):
            raise AssertionError(f"{self.name} code {code} is {value}")
        return value

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        return float(self._number(self.max_code))

    @cached_property
    def min(self) -> float:
        """Most negative finite value (0 or the smallest positive value for an unsigned format)."""
        if self.kind is Kind.TABLE:
            return float(min(self.table))
        if self.kind is Kind.INT:
            return float(self._number(self.sign_code)) if self.signed else 0.0
        return -self.max if self.signed else float(self._number(0))

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest binade: floor(log2 max)."""
        value = Fraction(self.max)
        guess = value.numerator.bit_length() - value.denominator.bit_length()
        return guess if Fraction(2) ** guess <= value else guess - 1

    @cached_property
    def smallest_normal(self) -> float | None:
        """Smallest value with a full significand, floats only."""
        if self.kind is not Kind.FLOAT:
            return None
        return 2.0 ** ((1 if self.subnormals else 0) - self.bias)

    @cached_property
    def smallest_subnormal(self) -> float | None:
        """Smallest positive value below the normals, where the format has any."""
        if self.kind is not Kind.FLOAT or not self.subnormals or self.mantissa_bits == 0:
            return None
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @cached_property
    def smallest(self) -> float:
        """Smallest positive value of any kind."""
        if self.kind is Kind.TABLE:
            return min(v for v in self.table if v > 0)
        if self.kind is Kind.INT:
            return float(2.0**-self.bias)
        return self.smallest_subnormal or float(self.smallest_normal or 0)

    @property
    def epsilon(self) -> float | None:
        """Gap between 1 and the next value: 2^-m whatever the exponent width. Floats only."""
        return 2.0**-self.mantissa_bits if self.kind is Kind.FLOAT else None

    @property
    def unit_roundoff(self) -> float | None:
        """Bound of the relative error of nearest rounding to a normal: 2^-(m+1). Floats only."""
        return 2.0 ** -(self.mantissa_bits + 1) if self.kind is Kind.FLOAT else None

    @cached_property
    def finite_values(self) -> int:
        """Number of distinct finite values; plus and minus zero count once."""
        if self.kind is Kind.TABLE:
            return len(set(self.table))
        if self.kind is Kind.INT:
            return 1 << self.bits
        per_sign = self.max_code + 1
        if not self.signed:
            return per_sign
        # Minus zero is no value of its own, or its code is NaN.
        lost = self.subnormals or self.specials in (Specials.FNUZ, Specials.EXTENDED)
        return 2 * per_sign - 1 if lost else 2 * per_sign

    @cached_property
    def binades(self) -> float:
        """Dynamic range log2(max / smallest) in binades, subnormals included."""
        ratio = Fraction(self.max) / Fraction(self.smallest)
        whole = ratio.numerator.bit_length() - ratio.denominator.bit_length()
        return whole + log2(ratio / Fraction(2) ** whole)

    def spacing(self, x: float) -> float:
        """Distance between neighbouring values around |x|; the widest one beyond the range.

        Within a binade [2^k, 2^(k+1)) it is 2^(k - m), and constant below the smallest normal.
        """
        if self.kind is Kind.INT:
            return float(2.0**-self.bias)
        if self.kind is Kind.TABLE:
            ordered = sorted(self.table)
            above = next((i for i, v in enumerate(ordered) if v > x), len(ordered) - 1)
            return ordered[max(above, 1)] - ordered[max(above, 1) - 1]
        lowest = (1 if self.subnormals else 0) - self.bias
        exponent = frexp(abs(x))[1] - 1 if x else lowest
        return float(2.0 ** (max(min(exponent, self.emax), lowest) - self.mantissa_bits))

    def fields(self, code: int) -> str:
        """The bits of a code, split into sign, exponent and mantissa: '0 1111 110'."""
        text = f"{code:0{self.bits}b}"
        if self.kind is not Kind.FLOAT:
            return text
        cuts = [1 if self.signed else 0, self.exponent_bits, self.mantissa_bits]
        parts, at = [], 0
        for width in cuts:
            parts.append(text[at : at + width])
            at += width
        return " ".join(part for part in parts if part)


def float_format(
    name: str,
    e: int,
    m: int,
    specials: Specials,
    source: str,
    *,
    bias: int | None = None,
    aliases: tuple[str, ...] = (),
) -> Format:
    """A signed float row with subnormals; the bias defaults to IEEE's 2^(e-1) - 1."""
    bias = 2 ** (e - 1) - 1 if bias is None else bias
    return Format(name, 1 + e + m, e, m, bias, True, specials, True, Kind.FLOAT, source, aliases)


def int_format(
    name: str, bits: int, signed: bool, source: str, *, bias: int = 0, aliases: tuple[str, ...] = ()
) -> Format:
    """An integer row: two's complement or unsigned, value = code · 2^-bias."""
    return Format(name, bits, 0, 0, bias, signed, Specials.FINITE, True, Kind.INT, source, aliases)


_IEEE, _FN, _FNUZ, _FINITE = Specials.IEEE, Specials.FN, Specials.FNUZ, Specials.FINITE
_OCP8 = "OCP 8-bit Floating Point Specification 1.0"
_OCPMX = "OCP Microscaling Formats 1.0"
_IEEE754 = "IEEE 754-2019"
_QLORA = "QLoRA (arXiv 2305.14314), appendix E"
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
# Twelfths in fp32: 0, 1/16, 8, 12, 4, 6, 2, 3, and the same below zero.
_BNB_FP4 = (
    0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
    0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
)  # fmt: skip

ROWS: tuple[Format, ...] = (
    float_format("fp64", 11, 52, _IEEE, _IEEE754, aliases=("float64", "double")),
    float_format("fp32", 8, 23, _IEEE, _IEEE754, aliases=("float32", "float")),
    float_format("tf32", 8, 10, _IEEE, "NVIDIA A100 white paper: a tensor-core input, 19 bits of a 32-bit register"),
    float_format("bf16", 8, 7, _IEEE, "Intel bfloat16 hardware numerics definition", aliases=("bfloat16",)),
    float_format("fp16", 5, 10, _IEEE, _IEEE754, aliases=("float16", "half")),
    float_format("e5m2", 5, 2, _IEEE, _OCP8, aliases=("fp8_e5m2", "float8_e5m2")),
    float_format("e5m2fnuz", 5, 2, _FNUZ, "arXiv 2206.02915; ONNX float8", bias=16, aliases=("float8_e5m2fnuz",)),
    float_format("e4m3fn", 4, 3, _FN, _OCP8, aliases=("e4m3", "fp8_e4m3", "float8_e4m3fn", "fp8")),
    float_format("e4m3_ieee", 4, 3, _IEEE, "ml_dtypes float8_e4m3", aliases=("float8_e4m3",)),
    float_format("e4m3fnuz", 4, 3, _FNUZ, "arXiv 2206.02915; ONNX float8", bias=8, aliases=("float8_e4m3fnuz",)),
    float_format("e4m3b11fnuz", 4, 3, _FNUZ, "ml_dtypes float8_e4m3b11fnuz", bias=11, aliases=("float8_e4m3b11fnuz",)),
    float_format("e3m4", 3, 4, _IEEE, "ml_dtypes float8_e3m4", aliases=("float8_e3m4",)),
    float_format("e3m2", 3, 2, _FINITE, _OCPMX, aliases=("fp6_e3m2", "float6_e3m2fn")),
    float_format("e2m3", 2, 3, _FINITE, _OCPMX, aliases=("fp6_e2m3", "float6_e2m3fn")),
    float_format("e2m1", 2, 1, _FINITE, _OCPMX, aliases=("fp4", "float4_e2m1fn", "fp4_e2m1")),
    Format("e8m0", 8, 8, 0, 127, False, _FN, False, Kind.FLOAT, _OCPMX, ("float8_e8m0fnu", "ue8m0")),
    int_format("int8", 8, True, "two's complement"),
    int_format("uint8", 8, False, "unsigned binary"),
    int_format("int4", 4, True, "two's complement"),
    int_format("uint4", 4, False, "unsigned binary"),
    int_format("int2", 2, True, "two's complement"),
    int_format("uint2", 2, False, "unsigned binary"),
    int_format("mxint8", 8, True, _OCPMX + ": element = int8 · 2^-6", bias=6),
    Format("nf4", 4, 0, 0, 0, True, _FINITE, False, Kind.TABLE, _QLORA, (), _NF4),
    Format("bnb_fp4", 4, 0, 0, 0, True, _FINITE, False, Kind.TABLE, "bitsandbytes 0.50 functional.py", (), _BNB_FP4),
    float_format("binary8p3", 5, 2, Specials.EXTENDED, "IEEE P3109 interim report, extended", bias=16),
    float_format("binary8p4", 4, 3, Specials.EXTENDED, "IEEE P3109 interim report, extended", bias=8),
)  # fmt: skip

_SPELLING = re.compile(r"(?P<unsigned>u?)e(?P<e>\d+)m(?P<m>\d+)(?::(?P<options>.*))?")


def parse_format(spelling: str) -> Format:
    """An ad hoc float from its spelling: ``e3m3``, ``e3m3:bias=3,finite``, ``ue5m3:bias=15,fn``.

    ``u`` in front makes it unsigned; options are ``bias=N``, one of ieee, fn, fnuz, extended, finite
    (default finite), and ``nosubnormals``.
    """
    integer = re.fullmatch(r"(u?)int([2-8])", spelling)
    if integer is not None:
        return int_format(spelling, int(integer[2]), not integer[1], "spelled out")
    match = _SPELLING.fullmatch(spelling)
    if match is None:
        raise KeyError(spelling)
    e, m, signed = int(match["e"]), int(match["m"]), not match["unsigned"]
    width = e + m + signed
    if not (1 <= e <= 8 and m <= 10 and width <= 16):
        wanted = "1 to 8 exponent and up to 10 mantissa bits, 16 in all"
        raise UsageError("format is too wide", got=spelling, wanted=wanted)
    bias, specials, subnormals = 2 ** (e - 1) - 1, Specials.FINITE, True
    for option in filter(None, (match["options"] or "").split(",")):
        key, _, number = option.partition("=")
        if key == "bias" and re.fullmatch(r"-?[0-2]?\d{1,2}", number):
            bias = int(number)
        elif option in Specials._value2member_map_:
            specials = Specials(option)
        elif option == "nosubnormals":
            subnormals = False
        else:
            wanted = "bias=N up to 299, ieee, fn, fnuz, extended, finite or nosubnormals"
            raise UsageError("unknown format option", where=spelling, got=option, wanted=wanted)
    made = Format(spelling, width, e, m, bias, signed, specials, subnormals, Kind.FLOAT, "spelled out", ())
    _check_spelled(made)
    return made


def _check_spelled(fmt: Format) -> None:
    """Refuse spellings whose special codes have no place, that hold no number, or that fp32 cannot decode."""
    if fmt.specials is Specials.IEEE and fmt.mantissa_bits == 0:
        raise UsageError("ieee needs a mantissa bit: infinity and NaN share an exponent", where=fmt.name)
    if fmt.specials in (Specials.FNUZ, Specials.EXTENDED) and not fmt.signed:
        raise UsageError(
            "fnuz and extended keep NaN at minus zero, which an unsigned format lacks", where=fmt.name
        )
    if fmt.finite_values < 2:
        raise UsageError("the special codes leave no numbers", where=fmt.name)
    if fmt.max >= 2.0**128 or fmt.smallest < 2.0**-149:
        got = f"{fmt.smallest:g} to {fmt.max:g}"
        remedy = f"choose the bias: {fmt.name.partition(':')[0]}:bias=N"
        raise UsageError("values must fit fp32, which decodes them", where=fmt.name, got=got, remedy=remedy)


def _row(*facts: Any) -> Format:
    """The row with these facts, or a format of its own."""
    made = Format(*facts)
    return next((row for row in ROWS if row == made), made)


class Formats(Mapping[str, Format]):
    """The rows by name and alias, case-insensitive; a spelling such as ``e3m3:bias=3`` makes one on the spot."""

    def __init__(self, rows: tuple[Format, ...]) -> None:
        self._rows = {row.name: row for row in rows}
        self._aliases = {alias: row for row in rows for alias in row.aliases}

    def __getitem__(self, name: str) -> Format:
        key = name.lower()
        found = self._rows.get(key) or self._aliases.get(key)
        if found is not None:
            return found
        try:
            return parse_format(key)
        except KeyError:
            pass
        near = difflib.get_close_matches(key, [*self._rows, *self._aliases], 3)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        remedy = hint + "`narrowcast formats` lists them; e3m3:bias=3,finite spells one"
        raise UsageError("unknown format", got=name, remedy=remedy)

    def get(self, name: str, default: Any = None, /) -> Any:
        """The format of a name, or ``default`` where there is none: unlike KeyError, UsageError is not Mapping's."""
        try:
            return self[name]
        except UsageError:
            return default

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name.lower() in self._rows or name.lower() in self._aliases)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


formats = Formats(ROWS)
FP64, FP32, TF32, BF16, FP16 = (formats[n] for n in ("fp64", "fp32", "tf32", "bf16", "fp16"))
E5M2, E4M3FN, E3M2, E2M3, E2M1, E8M0 = (
    formats[n] for n in ("e5m2", "e4m3fn", "e3m2", "e2m3", "e2m1", "e8m0")
)
INT8, INT4, UINT4, MXINT8 = (formats[n] for n in ("int8", "int4", "uint4", "mxint8"))
NF4, BNB_FP4 = formats["nf4"], formats["bnb_fp4"]
