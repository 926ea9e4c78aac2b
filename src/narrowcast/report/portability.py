"""Where a checkpoint runs, as a table: which engine loads which layers, through which kernel, or why not."""

from __future__ import annotations

from narrowcast.audit.findings import Finding
from narrowcast.audit.portability import Where, table
from narrowcast.audit.run import Audit
from narrowcast.report import tables

TOLD = ("NC600", "NC601", "NC602", "NC603")  # what the table says, of these rules
TITLES = ("engine", "weights", "inputs", "layers", "computes in", "kernel")


def where(found: Audit) -> list[Where]:
    """The rows; none where no rule looked, or nothing is quantized."""
    if not any(rule.code in TOLD for rule in found.ran):
        return []
    return table(found.subject)


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


def where_lines(rows: list[Where]) -> list[str]:
    """The table, and the reason for each refusal below it, once for all layers that have it."""
    if not rows:
        return []
    lines = tables.table(TITLES, [cells(row) for row in rows], "LLLrlL", indent=2)
    reasons = {(row.title, row.path.refusal, row.path.remedy): row for row in rows if row.path.refusal}
    for title, refusal, remedy in reasons:
        lines += tables.hanging(f"  {title} refuses: {refusal}" + (f"; remedy: {remedy}" if remedy else ""))
    return lines
