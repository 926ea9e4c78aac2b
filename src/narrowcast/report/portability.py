"""Where a checkpoint runs, as a table: which engine loads which layers, through which kernel, or why not."""

from __future__ import annotations

from narrowcast.audit.findings import Finding
from narrowcast.audit.portability import Where
from narrowcast.audit.run import Audit
from narrowcast.hardware.engines import ENGINES
from narrowcast.report import tables

TOLD = ("NC600", "NC601", "NC602", "NC603")  # what the table says, of these rules
_REACH = ("runs on ", "computes in ")  # notes that say on which GPUs
TITLES = ("engine", "weights", "inputs", "layers", "computes in", "kernel")


def where(found: Audit) -> list[Where]:
    """The rows; none where no rule looked, or nothing is quantized."""
    if not any(rule.code in TOLD for rule in found.ran):
        return []
    return found.subject.where


def told(finding: Finding) -> bool:
    """Whether the table says it already."""
    return finding.rule in TOLD and finding.severity == "info"


def cells(row: Where) -> tuple[str, str, str, str, str, str]:
    """One row under ``TITLES``."""
    path = row.path
    kernel = path.kernels[0] if path.kernels and not path.refusal else ""
    needs = f"needs {path.package}: " if path.package else ""
    computes = "refused" if path.refusal else path.arithmetic
    return row.title, row.scheme, row.inputs, str(row.count), computes, needs + kernel


def reaches(rows: list[Where]) -> list[str]:
    """Of each engine its version and, where no GPU was asked for, on which the rows hold."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        notes = "; ".join(note for note in row.path.notes if note.startswith(_REACH))
        found.setdefault(row.title, {}).update({notes: None} if notes else {})
    if not any(found.values()):
        return [f"As of {', '.join(found)}."]
    return [f"{title} {' | '.join(notes)}" for title, notes in found.items() if notes]


def where_lines(rows: list[Where]) -> list[str]:
    """The table, from which versions and GPUs it is, and the reason for each refusal, once for all layers that have
    it."""
    if not rows:
        return []
    named = [(ENGINES[row.engine], *cells(row)[1:]) for row in rows]
    lines = tables.table(TITLES, named, "LLLrlL", indent=2)
    lines += [line for text in reaches(rows) for line in tables.hanging(f"  {text}")]
    reasons = {(row.title, row.path.refusal, row.path.remedy): row for row in rows if row.path.refusal}
    for title, refusal, remedy in reasons:
        lines += tables.hanging(f"  {title} refuses: {refusal}" + (f"; remedy: {remedy}" if remedy else ""))
    return lines
