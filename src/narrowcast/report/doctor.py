"""The pages of ``narrowcast doctor``: what a log says that runs and what is wrong with it; symptoms and causes."""

from __future__ import annotations

from collections.abc import Iterator

from narrowcast.doctor import Cause, Finding, Report, Symptom, symptoms
from narrowcast.doctor.rows import NAMES, SEVERITIES, Severity
from narrowcast.report.tables import facts, hanging

_TITLES: dict[Severity, tuple[str, str]] = {
    "error": ("error", "errors"),
    "warning": ("warning", "warnings"),
    "info": ("note", "notes"),
}
_NOTHING = "Nothing."


def doctor_page(report: Report) -> list[str]:
    """What runs, what the log does not say, then findings by severity, each with consequence and remedy."""
    running = facts(_running(report))
    lines = [_head(report), *([""] if running else []), *running]
    if report.unsaid:
        lines += ["", *hanging(f"  Not said in this log: {', '.join(report.unsaid)}.")]
    for severity in SEVERITIES:
        found = report.by_severity(severity)
        if found:
            lines += ["", f"{_count(severity, len(found))}:"]
            lines += [line for finding in found for line in _finding(finding)]
    return lines if report.findings else [*lines, "", "Nothing to report."]


def symptoms_page() -> list[str]:
    """Every symptom by name, with what people see."""
    rows = [(row.name, row.seen) for row in symptoms.values()]
    return [
        "symptoms:",
        *facts(rows),
        "",
        "`narrowcast doctor --symptom NAME` gives causes, in the order to check them.",
    ]


def symptom_page(symptom: Symptom) -> list[str]:
    """What may be behind a symptom, in the order to check it, with what to run and what helps."""
    lines = hanging(f"{symptom.name}: {symptom.seen}")
    for number, cause in enumerate(symptom.causes, 1):
        lines += ["", *hanging(f"{number}. {cause.title}"), *_cause(cause)]
    return [
        *lines,
        "",
        *hanging("MODEL is the quantized checkpoint, PARENT what it was made from, LOG a start-up log."),
    ]


def _cause(cause: Cause) -> Iterator[str]:
    for name, text in (("why", cause.why), ("check", cause.check), ("remedy", cause.remedy)):
        yield from hanging(f"   {name}: {text}")  # flags stay whole


def _head(report: Report) -> str:
    name = " or ".join(NAMES[engine] for engine in report.engine.split(" or "))
    return f"{name} {report.version or '(version not said)'}, {report.lines} lines"


def _running(report: Report) -> Iterator[tuple[str, str]]:
    """Kinds once, further facts of the same kind below."""
    before = ""
    for one in report.running:
        yield ("" if one.kind == before else one.kind, one.what)
        before = one.kind


def _finding(finding: Finding) -> Iterator[str]:
    where = f"line {finding.first}"
    often = f"{finding.count} times, first in {where}" if finding.count > 1 else where
    yield from hanging(f"  {finding.name} ({often}): {finding.said}")
    if finding.severity == "error" and finding.line:
        yield from hanging(f"    says: {finding.line}")
    for detail in finding.details:
        yield from hanging(f"    - {detail}")
    yield from hanging(f"    consequence: {finding.consequence}")
    if finding.remedy != _NOTHING:
        yield from hanging(f"    remedy: {finding.remedy}")


def _count(severity: Severity, count: int) -> str:
    return f"{count} {_TITLES[severity][count != 1]}"
