"""What a start-up log tells: what runs, what is wrong with it, and what it does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowcast.doctor.rows import Severity


@dataclass(frozen=True, slots=True)
class Running:
    """One thing that runs: ``what`` of ``kind``, and the number of the first line that says so, from 1."""

    kind: str
    what: str
    line: int

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "what": self.what, "line": self.line}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: a stable ``name``, the ``line`` that says it (first of ``count``), and what follows from it.

    ``details`` are further lines of the same message. ``first`` is the number of ``line``, from 1.
    """

    name: str
    severity: Severity
    said: str
    consequence: str
    remedy: str
    line: str
    count: int
    first: int
    details: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        names = ("name", "severity", "said", "consequence", "remedy", "line", "count", "first", "details")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Report:
    """``engine`` is vllm, sglang or tensorrt-llm, several with " or " where their words are the same.

    ``version`` is empty when the log does not give it. ``unsaid`` are the kinds of facts that a whole log of
    this engine has and this one has not.
    """

    engine: str
    version: str
    running: tuple[Running, ...]
    findings: tuple[Finding, ...]
    unsaid: tuple[str, ...]
    lines: int

    @property
    def failed(self) -> bool:
        """Whether anything in it is an error, which is exit code 1."""
        return any(finding.severity == "error" for finding in self.findings)

    def by_severity(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def to_json(self) -> Mapping[str, Any]:
        """Stable keys; line numbers count from 1."""
        return {
            "engine": self.engine,
            "version": self.version or None,
            "lines": self.lines,
            "running": [fact.to_json() for fact in self.running],
            "unsaid": list(self.unsaid),
            "findings": [finding.to_json() for finding in self.findings],
        }
