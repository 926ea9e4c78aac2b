"""Audit a checkpoint: choose rules, read as deep as they need, run them, and say what was found.

    depth = the deepest that a chosen rule reads        --quick: scales at most

Rules that would need more than is read are counted as not run, never as passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast.audit.cache_sample import read_sample
from narrowcast.audit.findings import SEVERITIES, Finding
from narrowcast.audit.opening import module_of, open_anyway
from narrowcast.audit.passes import float_pass, matrix_pass, pair_pass
from narrowcast.audit.rules import DEPTHS, Reads, Rule, Silence, chosen, read_settings, silence
from narrowcast.audit.subject import Subject
from narrowcast.errors import UsageError
from narrowcast.hardware.engines import ENGINES
from narrowcast.jobs.coded import open_coded
from narrowcast.jobs.opening import open_model
from narrowcast.jobs.stream import ProgressFactory, Silent, Workers

REFUSED = "NC001"  # what a container refuses, which other rules may explain better


@dataclass(frozen=True)
class Audit:
    """What came of an audit. ``findings`` are sorted, silenced ones included; ``skipped`` are rules that were chosen
    and not run, with the reason; ``idle`` are silences about single tensors that no finding fits."""

    subject: Subject
    findings: tuple[Finding, ...]
    ran: tuple[Rule, ...]
    skipped: tuple[tuple[Rule, str], ...]
    idle: tuple[Silence, ...] = ()

    @property
    def open_findings(self) -> list[Finding]:
        """Those that are not silenced."""
        return [one for one in self.findings if one.silenced is None]

    @property
    def passed(self) -> bool:
        """Whether there is no error."""
        return not any(one.severity == "error" for one in self.open_findings)

    def counts(self) -> dict[str, int]:
        """Open findings by severity, and those that are silenced."""
        found = {s: sum(one.severity == s for one in self.open_findings) for s in SEVERITIES}
        return found | {"silenced": len(self.findings) - len(self.open_findings)}

    def to_json(self) -> dict[str, Any]:
        subject = self.subject
        return {
            "model": subject.model, "container": subject.container, "passed": self.passed, "depth": subject.depth,
            "for": subject.engine, "gpu": subject.gpu.name if subject.gpu else None, "tp": subject.tp,
            "against": str(subject.parent.checkpoint.root) if subject.parent else None,
            "counts": self.counts(), "findings": [one.to_json() for one in self.findings],
            "rules_run": [rule.code for rule in self.ran],
            "rules_skipped": [{"rule": rule.code, "reason": reason} for rule, reason in self.skipped],
            "idle_silences": [
                {"rules": sorted(one.codes), "tensor": one.tensor, "reason": one.reason} for one in self.idle
            ],
        }  # fmt: skip


def audit(
    model: str | Path,
    *,
    against: str | Path | None = None,
    engine: str | None = None,
    gpu: str | None = None,
    tp: int = 1,
    kv_sample: str | Path | None = None,
    quick: bool = False,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    settings: str | Path | None = None,
    workers: int | None = None,
    progress: ProgressFactory = Silent,
) -> Audit:
    """Audit a checkpoint, see the module docstring.

    ``select`` and ``ignore`` take codes or their beginnings, ``ignore`` also ``CODE=reason``; ``settings`` is a TOML
    file with both (see ``rules.read_settings``); ``kv_sample`` is a file with keys and values of a run of the model
    (see ``cache_sample.read_sample``). UsageError for names that do not exist, InputError where there is nothing to
    open.
    """
    told, silences = read_settings(Path(settings)) if settings is not None else ([], [])
    silences += [silence(text) for text in ignore]
    if engine is not None and engine not in ENGINES:
        raise UsageError("no such engine", got=engine, wanted=", ".join(ENGINES))
    if tp < 1:
        raise UsageError("the tensor-parallel size is not positive", got=tp, wanted="1 or more")
    row = None
    if gpu is not None:
        from narrowcast.hardware.own_gpus import named

        row = named(gpu)
    sample = read_sample(kv_sample) if kv_sample is not None else ()
    picked = chosen([*told, *select])
    todo, skipped = _runnable(picked, quick, against is not None)
    found = open_anyway(model)
    with found.checkpoint, Workers(workers) as pool:
        subject = Subject(str(model), found, _depth(todo), engine, row, tp, sample=sample)
        if against is None:
            findings = list(_run(subject, todo, pool, progress))
        else:
            with open_model(against) as checkpoint:
                subject.parent = open_coded(checkpoint)
                findings = list(_run(subject, todo, pool, progress))
    settled = _settled(findings, silences)
    ran = {rule.code for rule in todo}
    idle = tuple(
        one for one in silences if one.tensor and one.codes & ran and not any(map(one.covers, settled))
    )
    return Audit(subject, tuple(settled), tuple(todo), tuple(skipped), idle)


def _runnable(picked: Sequence[Rule], quick: bool, parent: bool) -> tuple[list[Rule], list[tuple[Rule, str]]]:
    todo, skipped = [], []
    for rule in picked:
        if rule.needs_parent and not parent:
            skipped.append((rule, "no parent: --against"))
        elif quick and rule.reads in ("codes", "parent"):
            skipped.append((rule, "--quick"))
        else:
            todo.append(rule)
    return todo, skipped


def _depth(rules: Iterable[Rule]) -> Reads:
    return DEPTHS[max((DEPTHS.index(rule.reads) for rule in rules), default=0)]


def _run(
    subject: Subject, todo: Sequence[Rule], pool: Workers, progress: ProgressFactory
) -> Iterator[Finding]:
    """Passes first, since rules of the model's scope use what they leave."""
    _ = subject.held  # reads input scales, which a report could not once the files are closed
    of = {
        scope: [rule for rule in todo if rule.scope == scope]
        for scope in ("matrix", "tensor", "pair", "model")
    }
    if subject.depth != "headers" and subject.quantized:
        yield from _named(matrix_pass(subject, of["matrix"], pool, progress))
    if subject.depth in ("codes", "parent"):
        yield from _named(float_pass(subject, of["tensor"], pool, progress))
    if subject.depth == "parent" and subject.parent is not None:
        yield from _named(pair_pass(subject, of["pair"], pool, progress))
    yield from _named((rule, finding) for rule in of["model"] for finding in rule.check(subject))


def _named(found: Iterable[tuple[Rule, Finding]]) -> Iterator[Finding]:
    for rule, finding in found:
        yield replace(finding, rule=rule.code, severity=finding.severity or rule.severity)


def _settled(findings: Sequence[Finding], silences: Sequence[Silence]) -> list[Finding]:
    """Sorted by severity and rule, silenced where that was asked for; a refusal of a layer stays only where no other
    error explains it."""
    others = [one for one in findings if one.severity == "error" and one.rule != REFUSED]
    explained = {module_of(one.tensor) for one in others if one.tensor} | {one.said for one in others}
    kept = [
        one for one in findings
        if one.rule != REFUSED or not explained & ({one.tensor} if one.tensor else {one.said})
    ]  # fmt: skip
    kept.sort(key=lambda one: (SEVERITIES.index(one.severity or "info"), one.rule))
    return [replace(one, silenced=_reason(one, silences)) for one in kept]


def _reason(finding: Finding, silences: Sequence[Silence]) -> str | None:
    return next((silence.reason for silence in silences if silence.covers(finding)), None)
