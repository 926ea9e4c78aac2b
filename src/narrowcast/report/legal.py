"""The page of ``narrowcast legal``: what must stay wide first, then what costs as much as FP8, then the whole table."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from narrowcast.report.tables import facts, hanging, paragraph, percent, table
from narrowcast.studies.legal import FREE, LIKE_FP8, WIDE

if TYPE_CHECKING:
    from narrowcast.studies.legal import Cell, Legal

_MEANS = {
    WIDE: "keep wide (costs more than linear layers in FP8, or breaks):",
    LIKE_FP8: "no worse than linear layers in FP8:",
    FREE: "free (no worse than bfloat16 throughout):",
}


def legal_page(found: Legal) -> list[str]:
    """Readings by operation, the yardsticks, and every measurement."""
    count = sum(len(piece.ids) for piece in found.tokens.pieces)
    lines = [str(found.model), ""]
    for reading, title in _MEANS.items():
        lines += _group(found, reading, title)
    lines += facts(
        [
            ("text", f"{found.corpus.name}, {count} tokens, SHA-256 {found.corpus.sha256[:12]}"),
            ("yardsticks", f"bfloat16 throughout: {_said(found.bf16)}; linear layers in FP8 (fp8_dynamic): "
             f"{_said(found.fp8)}"),
        ]
    )  # fmt: skip
    rows, last = [], ""
    for cell in found.cells:
        name = "" if cell.operation == last else cell.operation
        last = cell.operation
        rows.append(
            (name, cell.dtype, _kl(cell), f"{100 * cell.top1:.1f} %", found.reading(cell), cell.broke)
        )
    lines += [
        "",
        *table(("operation", "dtype", "KL, nats", "top-1", "reading", "first broken"), rows, "llrrlL"),
        "",
    ]
    return lines + paragraph(
        "Each operation was narrowed alone, everything else ran in float32. e4m3 has scale 1 and saturates, e4m3 "
        "scaled one scale for the tensor. Several together cost more than each."
    )


def _group(found: Legal, reading: str, title: str) -> list[str]:
    """One line per operation: its dtypes of this reading, the worst of them in numbers."""
    by_operation: dict[str, list[Cell]] = {}
    for cell in found.cells:
        if found.reading(cell) == reading:
            by_operation.setdefault(cell.operation, []).append(cell)
    if not by_operation:
        return []
    lines = [title]
    for operation, cells in sorted(by_operation.items(), key=lambda pair: _badness(pair[1])):
        said = ", ".join(
            cell.dtype if reading == FREE else f"{cell.dtype} ({_short(cell)})" for cell in cells
        )
        lines += hanging(f"  {operation}: {said}")
    return [*lines, ""]


def _badness(cells: list[Cell]) -> float:
    """Operations that lose most stand first."""
    return min(-1.0 if cell.broke else cell.top1 for cell in cells)


def _short(cell: Cell) -> str:
    return f"breaks at {cell.broke}" if cell.broke else f"top-1 {percent(cell.top1, 3)}"


def _kl(cell: Cell) -> str:
    if cell.exact:
        return "0"
    return f"{cell.kl:.2e}" if isfinite(cell.kl) else "NaN"


def _said(cell: Cell) -> str:
    return f"KL {_kl(cell)}, top-1 {percent(cell.top1, 3)}"
