"""Pages that explain: one value in formats, one pattern of bits in every format, one row under schemes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import isfinite
from typing import Any

from narrowcast.jobs.explain import Explained, Point, ScaledRow
from narrowcast.numbers.formats import Format, Kind
from narrowcast.report.formats import bit_layout, hex_code
from narrowcast.report.tables import exact, facts, number, percent, table, terminal_width
from narrowcast.tensors.schemes import Scheme

_FATES = {
    "exact": "exact: a value of the format",
    "rounded": "rounded",
    "clipped": "clipped: outside the range even after rounding",
    "underflowed": "underflowed: not zero, and lost",
    "nan": "not a number",
    "inf": "infinite",
}


def value_page(e: Explained) -> list[str]:
    """One value in one format."""
    lines = [f"{exact(e.value)} in {e.format.name}", ""]
    if e.nearest is None:
        return [*lines, *_rules(e)]
    pairs = [
        ("decoded", exact(e.nearest.value)),
        ("code", code_text(e.nearest, e.format)),
        ("result", _FATES[e.fate]),
    ]
    if isfinite(e.error):
        relative = f", {percent(e.relative_error)} of the value" if e.value else ""
        pairs.append(("error", "none" if e.error == 0 else f"{e.error:+.6g}{relative}"))
    lines += [*facts(pairs), ""]
    if isfinite(e.value):
        lines += [*_neighbours(e), ""]
    return [*lines, *_rules(e)]


def values_page(explained: Sequence[Explained]) -> list[str]:
    """One value in every format."""
    rows = []
    for e in explained:
        if e.nearest is None:
            rows.append((e.format.name, str(e.roundings["nearest_even"]), "", "", ""))
            continue
        error = "" if not isfinite(e.relative_error) else "-" if e.error == 0 else percent(e.relative_error)
        rows.append(
            (
                e.format.name,
                exact(e.nearest.value),
                hex_code(e.nearest.code, e.format),
                error,
                _FATES[e.fate].partition(":")[0],
            )
        )
    head = [f"{exact(explained[0].value)} in every format, nearest-even, saturating", ""]
    return [*head, *table(("format", "decoded", "code", "error", "result"), rows, "lLlrl", indent=2)]


def code_text(point: Point, fmt: Format) -> str:
    """``0x2A  0 0101 010``."""
    return f"{hex_code(point.code, fmt)}  {fmt.fields(point.code)}"


def _neighbours(e: Explained) -> list[str]:
    rows = []
    for name, point in (("below", e.below), ("above", e.above)):
        if point is None:
            rows.append((name, "none", "", "", ""))
            continue
        away = float(Fraction(point.value) - Fraction(e.value))
        bits = e.format.fields(point.code) if e.format.coded else ""
        rows.append((name, exact(point.value), hex_code(point.code, e.format), bits, f"{away:+.6g}"))
    lines = table(
        ("neighbour", "value", "code", "bits" if e.format.coded else "", "away"), rows, "lllll", indent=2
    )
    if e.goes_up is not None and e.below is not None and e.above is not None:
        middle = float((Fraction(e.below.value) + Fraction(e.above.value)) / 2)
        where = "exactly halfway: a tie" if e.tie else f"no tie: halfway is {exact(middle)}"
        lines += ["", f"  {where}", f"  stochastic rounding goes up in {100 * e.goes_up:.4g} %"]
    return lines


def _rules(e: Explained) -> list[str]:
    """What the roundings and the overflow modes give, those with the same result together."""
    kinds: dict[str, dict[tuple[str, str], list[str]]] = {"rounding": {}, "overflow": {}}
    for kind, outcomes in (("rounding", e.roundings), ("overflow", e.overflows)):
        for rule, result in outcomes.items():
            kinds[kind].setdefault(_outcome(result, e.format), []).append(rule)
    found = [outcome for same in kinds.values() for outcome in same]
    used = (
        max(len(text) for text, _ in [("result", ""), *found]),
        max(len(code) for _, code in [("", "code"), *found]),
    )
    room = terminal_width() - sum(used) - len("  rounding") - 3 * 2
    rows = []
    for kind, same in kinds.items():
        for i, (outcome, rules) in enumerate(same.items()):
            first, *more = textwrap.wrap("any" if len(same) == 1 else ", ".join(rules), max(room, 14))
            rows.append((kind if i == 0 else "", *outcome, first))
            rows += [("", "", "", text) for text in more]
    return table(("rule", "result", "code", "under"), rows, "llll", indent=2)


def _outcome(result: Point | str, fmt: Format) -> tuple[str, str]:
    return (result, "") if isinstance(result, str) else (exact(result.value), hex_code(result.code, fmt))


def value_record(e: Explained) -> dict[str, Any]:
    def point(p: Point | str | None) -> Any:
        if not isinstance(p, Point):
            return p
        return {"value": p.value, "code": p.code, "bits": f"{p.code:0{e.format.bits}b}"}

    return {
        "format": e.format.name,
        "value": e.value,
        "nearest": point(e.nearest),
        "below": point(e.below),
        "above": point(e.above),
        "result": e.fate,
        "tie": e.tie,
        "error": e.error,
        "relative_error": e.relative_error,
        "roundings": {rule: point(p) for rule, p in e.roundings.items()},
        "stochastic_up": e.goes_up,
        "overflows": {mode: point(p) for mode, p in e.overflows.items()},
    }


def bits_page(code: int, width: int, found: Iterable[tuple[Format, str | Fraction]]) -> list[str]:
    """One pattern of bits in every format of its width."""
    rows = [(fmt.name, bit_layout(fmt), fmt.fields(code), _meaning(value)) for fmt, value in found]
    head = [("bits", f"{code:0{width}b}"), ("hex", f"0x{code:0{-(-width // 4)}X}"), ("decimal", str(code))]
    page = table(("format", "layout", "fields", "value"), rows, "llLl", indent=2)
    return [*facts(head), "", *page]


def _meaning(value: str | Fraction) -> str:
    if isinstance(value, str):
        return value.replace("nan", "NaN")
    return exact(float(value))


def bits_record(code: int, width: int, found: Iterable[tuple[Format, str | Fraction]]) -> dict[str, Any]:
    meanings = {fmt.name: value if isinstance(value, str) else float(value) for fmt, value in found}
    return {"code": code, "bits": f"{code:0{width}b}", "width": width, "values": meanings}


def row_page(row: Sequence[float], scaled: Sequence[ScaledRow]) -> list[str]:
    """A row side by side under several schemes: each element decoded with its error, then the scales."""
    names = [s.scheme.name for s in scaled]
    elements = [number(x) for x in row]
    lines: list[str] = []
    titles, columns = ["element"], [elements]
    for s in scaled:
        decoded = [number(float(v), 5) for v in s.decoded]
        errors = [_error(float(v), x) for v, x in zip(s.decoded, row, strict=True)]
        longer = [*titles, _label(s.scheme, names), "error"], [*columns, decoded, errors]
        if len(titles) > 1 and len(_columns(*longer)[1]) > terminal_width():
            lines += [*_columns(titles, columns), ""]
            longer = ["element", *longer[0][-2:]], [elements, decoded, errors]
        titles, columns = longer
    lines += [*_columns(titles, columns), ""]
    return [*lines, *facts([(_label(s.scheme, names), _scaling(s)) for s in scaled], indent=0)]


def _columns(titles: Sequence[str], columns: Sequence[Sequence[str]]) -> list[str]:
    return table(titles, list(zip(*columns, strict=True)), "r" * len(titles))


def _label(scheme: Scheme, names: Sequence[str]) -> str:
    """The scheme's name, with what varies where it is there more than once."""
    if names.count(scheme.name) == 1:
        return scheme.name
    if scheme.element.kind is Kind.INT:
        return f"{scheme.name} /{number(scheme.span)}"
    return f"{scheme.name} {scheme.scales[-1].rule}"


def _error(decoded: float, x: float) -> str:
    if decoded == x:
        return "exact"
    if x == 0:
        return f"{decoded:+.3g}"
    return "lost" if decoded == 0 else f"{100 * (decoded - x) / x:+.2f} %"


def _scaling(s: ScaledRow) -> str:
    """The stored scales in words."""
    words = [f"{s.scheme.element.name} up to {number(s.scheme.span)}"]
    for level, scale in enumerate(s.scheme.scales):
        values = s.q.scale_values(level).ravel()
        shown = ", ".join(number(float(v), 7) for v in values[:4]) + (", ..." if values.size > 4 else "")
        words.append(f"{scale.format.name} scale{'s' if values.size > 1 else ''} {shown} ({scale.rule})")
    return "; ".join(words)


def row_record(row: Sequence[float], scaled: Sequence[ScaledRow]) -> dict[str, Any]:
    results = []
    for s in scaled:
        levels = [[float(v) for v in s.q.scale_values(i).ravel()] for i in range(len(s.q.scales))]
        results.append(
            {
                "scheme": s.scheme.name,
                "rule": s.scheme.scales[-1].rule,
                "span": s.scheme.span,
                "scales": levels,
                "codes": [int(code) for code in s.q.codes[0]],
                "decoded": [float(v) for v in s.decoded],
            }
        )
    return {"row": list(row), "results": results}
