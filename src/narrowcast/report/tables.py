"""Plain terminal tables and the spelling of numbers, sized to the terminal.

A page is a list of lines. A table takes the width it needs; when that is more than the terminal has, first
the gaps between columns narrow, then the widest text columns lose the middle of their longest cells (names
of tensors differ at both ends). Numbers are never cut.

Sizes are decimal (1 GB = 10^9 bytes), as disks and model cards count them.

Left out: colour, boxes and wrapping inside cells; a table must survive being pasted into a bug report.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from math import frexp, isfinite
from shutil import get_terminal_size

GAPS = (2, 1)
SHORTEST = 8  # a text column is not cut below this


def terminal_width() -> int:
    """Columns of the terminal: COLUMNS when set, else what the terminal says, else 80."""
    return max(get_terminal_size((80, 24)).columns, 40)


def printable(line: str) -> str:
    """A line whose every character is shown and takes its place: names come from files that anybody wrote, and
    what they hold of control characters would move the cursor, retitle the window or reverse the text."""
    return line if line.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in line)


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    align: str,
    width: int | None = None,
    indent: int = 0,
) -> list[str]:
    """Lines of a table with a rule under its titles.

    ``align`` has one letter per column: ``l`` or ``L`` left, ``r`` right; only ``L`` columns may be cut.
    """
    cells = [list(titles), *(list(row) for row in rows)]
    room = (width or terminal_width()) - indent
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    gap = next((g for g in GAPS if sum(widths) + g * (len(widths) - 1) <= room), GAPS[-1])
    _shrink(widths, [i for i, a in enumerate(align) if a == "L"], room - gap * (len(widths) - 1))
    lines = []
    for number, row in enumerate(cells):
        parts = (_cell(text, w, a) for text, w, a in zip(row, widths, align, strict=True))
        lines.append((" " * indent + (" " * gap).join(parts)).rstrip())
        if number == 0:
            lines.append(" " * indent + "─" * (sum(widths) + gap * (len(widths) - 1)))
    return lines


def _shrink(widths: list[int], soft: list[int], room: int) -> None:
    """Take columns from the widest of the ``soft`` ones until the table fits or none can give more."""
    while sum(widths) > room:
        able = [i for i in soft if widths[i] > SHORTEST]
        if not able:
            return
        widths[max(able, key=widths.__getitem__)] -= 1


def _cell(text: str, width: int, align: str) -> str:
    short = middle(text, width)
    return short.rjust(width) if align == "r" else short.ljust(width)


def middle(text: str, width: int) -> str:
    """``text`` without its middle when it is longer than ``width``."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def facts(pairs: Iterable[tuple[str, str]], indent: int = 2, width: int | None = None) -> list[str]:
    """Aligned ``name  value`` lines; a long value continues under itself."""
    kept = [(name, value) for name, value in pairs if value]
    column = max((len(name) for name, _ in kept), default=0)
    lines = []
    for name, value in kept:
        start = " " * indent + name.ljust(column) + "  "
        lines += textwrap.wrap(
            value, width or terminal_width(), initial_indent=start, subsequent_indent=" " * len(start)
        )
    return lines


def paragraph(text: str, indent: int = 0, width: int | None = None) -> list[str]:
    """``text`` wrapped to the terminal."""
    space, whole = " " * indent, text.replace(" %", "\N{NO-BREAK SPACE}%")
    lines = textwrap.wrap(whole, width or terminal_width(), initial_indent=space, subsequent_indent=space)
    return [line.replace("\N{NO-BREAK SPACE}%", " %") for line in lines]


def hanging(line: str, width: int | None = None) -> list[str]:
    """One line of a message wrapped to the terminal, the rest set in below it; paths, names and percentages stay
    whole."""
    space = " " * (len(line) - len(line.lstrip()))
    lines = textwrap.wrap(
        line.strip().replace(" %", "\N{NO-BREAK SPACE}%"),
        width or terminal_width(),
        initial_indent=space,
        subsequent_indent=space + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [one.replace("\N{NO-BREAK SPACE}%", " %") for one in lines] or [""]


def number(x: float | None, digits: int = 6) -> str:
    """A number in at most ``digits`` significant digits; exact powers of two outside [1/8, 2^16] as 2^k."""
    if x is None:
        return "-"
    if not isfinite(x):
        return str(x)
    half, exponent = frexp(x)
    if half == 0.5 and not -3 <= exponent - 1 <= 16:
        return f"2^{exponent - 1}"
    return f"{x:.{digits}g}"


def exact(x: float) -> str:
    """A value of a format, with every digit that tells it apart; powers of two as in ``number``."""
    half, exponent = frexp(x)
    if isfinite(x) and abs(half) == 0.5 and not -3 <= exponent - 1 <= 16:
        return f"{'-' if half < 0 else ''}2^{exponent - 1}"
    return repr(int(x)) if isfinite(x) and x == int(x) and 0 < abs(x) < 1e16 else repr(x).removesuffix(".0")


def size(count: float) -> str:
    """Bytes in decimal units: ``513 B``, ``1.31 GB``."""
    return f"{count:.0f} B" if abs(count) < 1000 else _scaled(count, ("kB", "MB", "GB", "TB", "PB"))


def quantity(count: float) -> str:
    """A large count: ``942``, ``134.5 M``, ``8.03 G``."""
    return f"{count:.0f}" if abs(count) < 10_000 else _scaled(count, ("k", "M", "G", "T", "P"))


def _scaled(value: float, units: Sequence[str]) -> str:
    for unit in units:
        value /= 1000
        if abs(value) < 999.5 or unit == units[-1]:
            break
    return f"{value:.{0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2}f} {unit}"


def rate(bytes_per_second: float) -> str:
    return f"{size(bytes_per_second)}/s"


def seconds(time: float) -> str:
    """A duration: ``0.84 s``, ``12.3 s``, ``4 min 05 s``, ``2 h 07 min``."""
    if time < 59.95:
        return f"{time:.{2 if time < 9.995 else 1}f} s"
    whole = round(time)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def duration(time: float | None) -> str:
    """A short time in three digits: ``27.1 ms``, ``1.24 s``; ``-`` where it is not known."""
    if time is None:
        return "-"
    return f"{number(1e3 * time, 3)} ms" if time < 0.9995 else f"{number(time, 3)} s"


def decibel(value: float, digits: int = 1) -> str:
    """An SQNR, the unit left to the column; ``exact`` when nothing was lost."""
    if value == float("inf"):
        return "exact"
    return f"{value:.{digits}f}" if isfinite(value) else "-"


def percent(share: float, digits: int = 3) -> str:
    """A share as ``4.17 %``; tiny ones in scientific notation rather than as zero."""
    return f"{100 * share:.{digits}g} %"
