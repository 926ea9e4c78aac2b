"""The pages of ``narrowcast formats``: the table of all formats, and everything about one."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor, log2
from typing import Any

from narrowcast.numbers.formats import Format, Kind, Specials, formats
from narrowcast.report.tables import exact, facts, number, paragraph, table

_SPECIAL_WORDS = {
    Specials.IEEE: "inf nan",
    Specials.FN: "nan",
    Specials.FNUZ: "nan",
    Specials.EXTENDED: "inf nan",
    Specials.FINITE: "-",
}


def formats_page() -> list[str]:
    """Every row with its derived limits."""
    titles = (
        "format",
        "bits",
        "layout",
        "bias",
        "max",
        "normal",
        "subnorm",
        "eps",
        "values",
        "range",
        "special",
    )
    rows = [_row(fmt) for fmt in formats.values()]
    return [
        *table(titles, rows, "lrlrrrrrrrl"),
        "",
        *paragraph(
            "layout: sign-exponent-mantissa bits. normal, subnorm: smallest of each. eps: gap between 1 and "
            "the next value. values: finite ones. range: binades from the smallest positive value to max."
        ),
        *paragraph(
            "`narrowcast formats e4m3fn` tells all about one; e3m3:bias=3,finite spells one of your own."
        ),
    ]


def _row(fmt: Format) -> tuple[str, ...]:
    fractional = fmt.kind is Kind.FLOAT
    return (
        fmt.name,
        str(fmt.bits),
        bit_layout(fmt),
        str(fmt.bias) if fractional or fmt.bias else "-",
        _short(fmt.max),
        number(fmt.smallest_normal),
        number(fmt.smallest_subnormal),
        number(fmt.epsilon),
        _short(fmt.finite_values),
        f"{fmt.binades:.3g}" if fmt.binades < 100 else f"{fmt.binades:.0f}",
        _SPECIAL_WORDS[fmt.specials],
    )


def _short(value: float) -> str:
    """At most seven characters: 1.8e308, 65504, 1.98438."""
    return f"{value:.6g}" if value < 100_000 else f"{value:.1e}".replace("e+", "e").replace("e0", "e")


def bit_layout(fmt: Format) -> str:
    """``1-4-3``: sign, exponent and mantissa bits; ``s8`` and ``u4`` for integers; ``table``."""
    if fmt.kind is Kind.FLOAT:
        return f"{int(fmt.signed)}-{fmt.exponent_bits}-{fmt.mantissa_bits}"
    return "table" if fmt.kind is Kind.TABLE else f"{'s' if fmt.signed else 'u'}{fmt.bits}"


def format_record(fmt: Format) -> dict[str, Any]:
    """The fields of a row and what is derived from them."""
    return {
        "name": fmt.name,
        "aliases": fmt.aliases,
        "kind": fmt.kind,
        "bits": fmt.bits,
        "signed": fmt.signed,
        "exponent_bits": fmt.exponent_bits,
        "mantissa_bits": fmt.mantissa_bits,
        "bias": fmt.bias,
        "specials": fmt.specials,
        "subnormals": fmt.subnormals,
        "has_nan": fmt.has_nan,
        "has_inf": fmt.has_inf,
        "has_minus_zero": fmt.has_minus_zero,
        "storable": fmt.storable,
        "max": fmt.max,
        "min": fmt.min,
        "emax": fmt.emax,
        "smallest_normal": fmt.smallest_normal,
        "smallest_subnormal": fmt.smallest_subnormal,
        "smallest": fmt.smallest,
        "epsilon": fmt.epsilon,
        "unit_roundoff": fmt.unit_roundoff,
        "finite_values": fmt.finite_values,
        "binades": fmt.binades,
        "table": fmt.table,
        "source": fmt.source,
    }


def format_page(fmt: Format) -> list[str]:
    """One format: layout, limits, derived facts, source, and its values where they fit a page."""
    lines = [*paragraph(f"{fmt.name}, {_described(fmt)}"), ""]
    lines += facts(
        [
            ("value", _equation(fmt)),
            ("where E = 0", _subnormal_equation(fmt)),
            ("specials", _specials(fmt)),
            ("also called", ", ".join(fmt.aliases)),
            ("source", fmt.source),
        ]
    )
    lines += ["", *_landmarks(fmt), "", *facts(_derived(fmt))]
    if fmt.bits <= 8:
        lines += ["", *_values(fmt)]
    return lines


def _described(fmt: Format) -> str:
    if fmt.kind is Kind.TABLE:
        return f"{fmt.bits} bits: a table of {1 << fmt.bits} values"
    if fmt.kind is Kind.INT:
        return f"{fmt.bits} bits: {'a signed' if fmt.signed else 'an unsigned'} integer"
    sign = "1 sign" if fmt.signed else "no sign"
    fields = f"{sign}, {fmt.exponent_bits} exponent, {fmt.mantissa_bits} mantissa"
    stored = "" if fmt.storable else "; not a width that is stored"
    return f"{fmt.bits} bits: {fields}; bias {fmt.bias}{stored}"


def _equation(fmt: Format) -> str:
    if fmt.kind is Kind.TABLE:
        return "table[code]"
    if fmt.kind is Kind.INT:
        return f"code · 2^-{fmt.bias}" if fmt.bias else "code"
    fraction = f" · (1 + M/{1 << fmt.mantissa_bits})" if fmt.mantissa_bits else ""
    exponent = f"E - {fmt.bias}" if fmt.bias >= 0 else f"E + {-fmt.bias}"
    return f"{_sign(fmt)}2^({exponent}){fraction}"


def _subnormal_equation(fmt: Format) -> str:
    if fmt.smallest_subnormal is None:
        return ""
    return f"{_sign(fmt)}2^{1 - fmt.bias} · M/{1 << fmt.mantissa_bits}"


def _sign(fmt: Format) -> str:
    return "(-1)^s · " if fmt.signed else ""


def _specials(fmt: Format) -> str:
    if fmt.kind is not Kind.FLOAT or (not fmt.has_nan and not fmt.has_minus_zero):
        return "none; every code is a number"
    words = [f"{name} {codes}" for name, codes in _special_codes(fmt).items()]
    words += [f"no {what}" for what, has in (("NaN", fmt.has_nan), ("infinity", fmt.has_inf)) if not has]
    return ", ".join(words if fmt.subnormals else [*words, "no zero"])


def _special_codes(fmt: Format) -> dict[str, str]:
    """What is not an ordinary number, by name; formats above 16 bits have too many codes to list."""
    if not fmt.coded:
        return {"inf, -inf, -0 and NaN": "as in IEEE 754"}
    top = fmt.sign_code if fmt.signed else 1 << fmt.bits
    codes = [*range(fmt.max_code + 1, top)]
    if fmt.signed:
        codes = [*codes, fmt.sign_code, *(fmt.sign_code + code for code in codes)]
    found: dict[str, list[int]] = {}
    for code in codes:
        found.setdefault(str(fmt.value(code)).replace("nan", "NaN"), []).append(code)
    return {name: _codes(codes, fmt) for name, codes in found.items()}


def _codes(codes: Sequence[int], fmt: Format) -> str:
    if len(codes) <= 2:
        return " and ".join(hex_code(code, fmt) for code in codes)
    return f"{hex_code(codes[0], fmt)} and {len(codes) - 1} more"


def hex_code(code: int, fmt: Format) -> str:
    """A code in hex, as wide as the format."""
    return f"0x{code:0{-(-fmt.bits // 4)}X}"


def _landmarks(fmt: Format) -> list[str]:
    """The ends of a format and of its normals, with their codes where codes are listed."""
    codes = {"largest": fmt.max_code}
    values = {"largest": fmt.max}
    if fmt.signed:
        codes["most negative"] = fmt.sign_code | (0 if fmt.kind is Kind.INT else fmt.max_code)
        values["most negative"] = fmt.min
    if fmt.smallest_normal is not None:
        codes["smallest normal"] = 1 << fmt.mantissa_bits if fmt.subnormals else 0
        values["smallest normal"] = fmt.smallest_normal
    if fmt.smallest_subnormal is not None:
        codes["smallest subnormal"], values["smallest subnormal"] = 1, fmt.smallest_subnormal
    if fmt.kind is not Kind.FLOAT:
        codes["smallest positive"] = fmt.table.index(fmt.smallest) if fmt.table else 1
        values["smallest positive"] = fmt.smallest
    if fmt.kind is Kind.TABLE:
        codes["most negative"] = fmt.table.index(fmt.min)
    if not fmt.coded:
        return facts([(name, _spelled(value)) for name, value in values.items()])
    rows = [
        (name, _spelled(v), hex_code(codes[name], fmt), fmt.fields(codes[name])) for name, v in values.items()
    ]
    return table(("", "value", "code", "bits"), rows, "llll", indent=2)


def _spelled(value: float) -> str:
    """A value, and its decimals where it was written as a power of two."""
    short = exact(value)
    if "^" not in short:
        return short
    decimals = f"{value:.7g}"
    return f"{short} {'=' if float(decimals) == value else '≈'} {decimals}"


def _derived(fmt: Format) -> list[tuple[str, str]]:
    pairs = []
    if fmt.epsilon is not None and fmt.unit_roundoff is not None:
        pairs.append(("epsilon", f"{exact(fmt.epsilon)}, the gap between 1 and the next value"))
        pairs.append(
            ("unit roundoff", f"{exact(fmt.unit_roundoff)}, the largest relative error of a normal result")
        )
    share = f" of {1 << fmt.bits:,} codes" if fmt.coded else ""
    pairs.append(("finite values", f"{fmt.finite_values:,}{share}"))
    pairs.append(("range", f"{fmt.binades:.4g} binades from the smallest positive value to the largest"))
    return pairs


def _values(fmt: Format) -> list[str]:
    if fmt.kind is Kind.INT:
        return facts([("values", f"{exact(fmt.min)} to {exact(fmt.max)} in steps of {exact(fmt.smallest)}")])
    if fmt.kind is Kind.TABLE:
        listed = [(str(code), fmt.fields(code), repr(value)) for code, value in enumerate(fmt.table)]
        return table(("code", "bits", "value"), listed, "rlr", indent=2)
    if fmt.mantissa_bits == 0 and not fmt.subnormals:
        ends = f"2^{-fmt.bias} to 2^{fmt.max_code - fmt.bias}"
        return facts([("values", f"the powers of two from {ends}, one per code")])
    rows = [_binade(fmt, exponent) for exponent in range((fmt.max_code >> fmt.mantissa_bits), -1, -1)]
    sign = ["", "  A set top bit negates."] if fmt.signed else []
    return [*table(("from", "codes", "step", "values"), rows, "lllL", indent=2), *sign]


def _binade(fmt: Format, field: int) -> tuple[str, str, str, str]:
    """Values with the same exponent field: written out where short, else as multiples of the step."""
    first = field << fmt.mantissa_bits
    last = min(first + (1 << fmt.mantissa_bits) - 1, fmt.max_code)
    values = [float(Fraction(fmt.value(code))) for code in range(first, last + 1)]
    step = fmt.spacing(values[-1] or values[0])
    plain = "  ".join(f"{v:.6g}" for v in values)
    if len(plain) > 44 or any(float(f"{v:.6g}") != v for v in values):
        counts = [round(v / step) for v in values]
        plain = f"{counts[0]} to {counts[-1]} times {exact(step)}"
        if len(counts) <= 8:
            plain = f"{' '.join(map(str, counts))}  times {exact(step)}"
    start = "subnormal" if field == 0 and fmt.subnormals else f"2^{floor(log2(values[0]))}"
    return start, f"{hex_code(first, fmt)}..{hex_code(last, fmt)[2:]}", exact(step), plain
