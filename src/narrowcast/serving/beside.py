"""What an engine's log says that runs, beside what was planned for it: ``beside``.

A kernel is the planned one when the name in the log begins with the plan's short name for it. Facts that a log gives in
the engine's own units are put beside the plan's without a verdict: an engine counts memory that a plan does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from narrowcast.doctor import Report
from narrowcast.model.roles import Role
from narrowcast.serving.command import Command
from narrowcast.serving.memory import memory
from narrowcast.serving.paths import attends, kernels
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served

_GIB = 1 << 30


@dataclass(frozen=True)
class Beside:
    """One thing, as planned and as the log says it. ``same`` is None where there is nothing to judge."""

    kind: str
    planned: str
    running: str
    same: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Stable keys."""
        return dict(vars(self))


def beside(served: Served, question: Question, command: Command, report: Report) -> tuple[Beside, ...]:
    """Every thing that the log tells and the plan said something about."""
    told: dict[str, list[str]] = {}
    for one in report.running:
        told.setdefault(one.kind, []).append(one.what)
    return tuple(_rows(served, question, command, told))


def _rows(
    served: Served, question: Question, command: Command, told: dict[str, list[str]]
) -> Iterator[Beside]:
    for kind, experts in (("linear kernel", False), ("expert kernel", True)):
        planned = _planned(served, question, experts)
        running = [name.split(" ")[0] for name in told.get(kind, ())]
        if planned and running:
            same = all(any(name.startswith(short) for short in planned) for name in running)
            yield Beside(kind, " or ".join(planned), ", ".join(dict.fromkeys(running)), same)
    first = [each.path.backends[0] for each in attends(served, question) if each.path.backends]
    for name in told.get("attention", ())[:1] if first else ():
        same = any(short.lower() in (name.lower(), name.lower().replace(" ", "_")) for short in first)
        yield Beside("attention", " or ".join(dict.fromkeys(first)), name, same)
    flags = {flag.name: flag.value for flag in command.flags}
    dtype = flags.get("--dtype") or {"bf16": "bfloat16", "fp16": "float16"}.get(served.geometry.dtype, "")
    yield from _settled("dtype", dtype, told)
    yield from _settled("KV cache dtype", flags.get("--kv-cache-dtype", "auto"), told)
    yield from _settled("tensor parallel", str(question.tp), told)
    for size in told.get("weights in memory", ())[:1]:
        planned_size = f"{served.nbytes / question.tp / question.pp / _GIB:.2f} GiB"
        yield Beside("weights in memory", planned_size, size)
    for size in told.get("KV cache size", ())[:1]:
        fits = None if question.gpu.vendor == "cpu" else memory(served, question).tokens
        asked = f"{question.batch * question.context:,} asked for"
        yield Beside("KV cache size", asked if fits is None else f"{fits:,} tokens", size)


def _settled(kind: str, planned: str, told: dict[str, list[str]]) -> Iterator[Beside]:
    running = told.get(kind, [])
    if planned and running:
        yield Beside(kind, planned, ", ".join(running), planned in running)


def _planned(served: Served, question: Question, experts: bool) -> list[str]:
    """The kernels that the engine would take first, of all layers of the kind."""
    found = [
        row.path.kernels[0]
        for row in kernels(served, question)
        if row.path.kernels and (row.groups[0].matrix.role is Role.EXPERT) is experts
    ]
    return list(dict.fromkeys(found))
