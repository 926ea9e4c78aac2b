"""The findings of an audit as SARIF 2.1.0 (OASIS), which code hosts and editors show.

    rule -> reportingDescriptor      finding -> result      silence -> suppression      rule not run -> notification

A result lies in the file that holds its tensor, at the tensor's bytes, and names the tensor as its logical location.
Results keep their identity from run to run (``partialFingerprints``) by rule and tensor, whatever the numbers are.

Left out: lines, which files of tensors do not have, and fixes, which SARIF spells as edits of text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast._version import __version__
from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import Rule
from narrowcast.audit.run import Audit
from narrowcast.report.records import plain
from narrowcast.report.rules import Row, rows
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.folder import CONFIG

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
BASE = "CHECKPOINT"
LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def sarif_text(found: Audit) -> str:
    """One run, as JSON."""
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [_run(found)]}
    return json.dumps(plain(log), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _run(found: Audit) -> dict[str, Any]:
    subject = found.subject
    table = [
        rows()[rule.code] for rule in sorted([*found.ran, *(rule for rule, _ in found.skipped)], key=_code)
    ]
    index = {row.code: i for i, row in enumerate(table)}
    places = _Places(subject.checkpoint, subject.found.files)
    driver = {"name": "narrowcast", "version": __version__, "rules": [_descriptor(row) for row in table]}
    return {
        "tool": {"driver": driver},
        "originalUriBaseIds": {BASE: {"uri": f"{subject.root.absolute().as_uri()}/"}},
        "invocations": [
            {
                "executionSuccessful": True,
                "exitCode": int(not found.passed),
                "toolConfigurationNotifications": [_notification(*pair) for pair in found.skipped],
            }
        ],
        "results": [_result(one, index, places) for one in found.findings],
    }


def _code(rule: Rule) -> str:
    return rule.code


def _descriptor(row: Row) -> dict[str, Any]:
    sections = row.sections()
    text = "\n\n".join(f"{title}: {said}" for title, said in sections.items())
    markdown = "\n\n".join(f"**{title}.** {said}" for title, said in sections.items())
    return {
        "id": row.code,
        "name": "".join(word.capitalize() for word in row.name.split("-")),
        "shortDescription": {"text": f"{row.title}."},
        "fullDescription": {"text": sections.get("What", row.title)},
        "help": {"text": text, "markdown": markdown},
        "defaultConfiguration": {"level": LEVELS[row.severity]},
        "properties": {"tags": [row.family]},
    }


def _notification(rule: Rule, reason: str) -> dict[str, Any]:
    return {
        "level": "note", "message": {"text": f"{rule.code} did not run: {reason}"}, "associatedRule": {"id": rule.code},
    }  # fmt: skip


def _result(finding: Finding, index: Mapping[str, int], places: _Places) -> dict[str, Any]:
    facets = [("got", finding.got), ("wanted", finding.wanted), ("remedy", finding.remedy)]
    at = f" {list(finding.at)}" if finding.at is not None else ""
    said = f"{finding.tensor}{at}: {finding.said}" if finding.tensor else finding.said
    text = "; ".join([said, *(f"{name}: {value}" for name, value in facets if value)])
    identity = f"{finding.rule}\0{finding.tensor or ''}"
    result = {
        "ruleId": finding.rule,
        "level": LEVELS[finding.severity or "info"],
        "message": {"text": text},
        "locations": [places.location(finding.tensor)],
        "partialFingerprints": {"ruleAndTensor/v1": hashlib.sha256(identity.encode()).hexdigest()[:32]},
        "properties": {"count": finding.count, "at": finding.at, **finding.facts},
    }
    if finding.rule in index:
        result["ruleIndex"] = index[finding.rule]
    if finding.silenced is not None:
        result["suppressions"] = [{"kind": "external", "justification": finding.silenced}]
    return result


class _Places:
    """Where in a checkpoint's files a finding is: the tensor's bytes, the first tensor of its module, or the file."""

    def __init__(self, checkpoint: Checkpoint, files: Sequence[Path]) -> None:
        self.checkpoint = checkpoint
        self.files = {str(file) for file in files} or {path.name for path in checkpoint.shards}
        self.first: dict[str, str] = {}
        for name in checkpoint.entries:
            stem = name
            while stem:
                self.first.setdefault(stem, name)
                stem = stem.rpartition(".")[0]

    def location(self, name: str | None) -> dict[str, Any]:
        """A SARIF location of a tensor, a module or a file; of config.json for what is none of these."""
        file, region, kind = self._file(name)
        physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(file), "uriBaseId": BASE}}
        if region is not None:
            physical["region"] = region
        found: dict[str, Any] = {"physicalLocation": physical}
        if name is not None and kind is not None:
            found["logicalLocations"] = [
                {"name": name.rpartition(".")[2], "fullyQualifiedName": name, "kind": kind}
            ]
        return found

    def _file(self, name: str | None) -> tuple[str, dict[str, int] | None, str | None]:
        stem = name or ""
        if self._relative(stem) in self.files:
            return self._relative(stem), None, None
        while (
            stem and stem not in self.first
        ):  # a scale that is missing lies in its module, an expert in its stack
            stem = stem.rpartition(".")[0]
        if not stem:
            usual = CONFIG if CONFIG in self.files or not self.files else min(self.files)
            return usual, None, "module" if name else None
        entry = self.checkpoint.entries[self.first[stem]]
        whole = entry.name == name
        region = {"byteOffset": entry.offset, "byteLength": entry.nbytes} if whole else None
        return self._relative(str(entry.path)), region, "variable" if whole else "module"

    def _relative(self, path: str) -> str:
        root = f"{self.checkpoint.root}/"
        return path.removeprefix(root) if path.startswith(root) else path


def _uri(file: str) -> str:
    from urllib.parse import quote

    return quote(file)
