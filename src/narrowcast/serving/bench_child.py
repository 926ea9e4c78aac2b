"""vLLM timed as a child in its own Python: with the flags of ``serve``, by ``bench_vllm``; and what its log says runs.

The cache holds the sequences that are timed and no more. Prefixes are not kept, because a prompt is read twice, and one
step may read all prompts of a batch, because that is what a prefill is here.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from narrowcast.doctor import Report
from narrowcast.errors import InputError, UsageError
from narrowcast.serving import running
from narrowcast.serving.beside import beside
from narrowcast.serving.command import Command, command
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served
from narrowcast.serving.timing import Ran, Timing

_SHOWN = ("linear kernel", "expert kernel", "attention", "dtype", "KV cache dtype")
_TAIL = 8  # lines of a log whose end is shown


def interpreter(python: str | None) -> str:
    """A Python that has vLLM. UsageError where none is named and this one has not."""
    if python is None and find_spec("vllm") is None:
        raise UsageError(
            "vLLM is not installed beside narrowcast",
            remedy="--python FILE names an interpreter that has it, or --engine ours",
        )
    if python is not None and shutil.which(python) is None:
        raise UsageError("there is no such program", got=python, wanted="a Python that has vLLM")
    return python or sys.executable


def time_vllm(
    served: Served, question: Question, batches: Sequence[int], prompt: int, tokens: int, threads: int,
    python: str | None, extra: Sequence[str] = (),
) -> Ran:  # fmt: skip
    """Timings of each batch. ``question`` has the GPU, ``extra`` are flags of vLLM's. UsageError for what vLLM would
    refuse, InputError with what its log says where it fails."""
    words = (
        *("--max-num-seqs", str(max(batches)), "--no-enable-prefix-caching"),
        *("--max-num-batched-tokens", str(max(prompt * max(batches), question.context))),
        *extra,
    )
    made = command(served, question, extra=words, environment=os.environ)
    if made.refusals:
        raise UsageError("vLLM would refuse this model", where=served.name, got="; ".join(made.refusals))
    asked = {"batches": list(batches), "prompt": prompt, "tokens": tokens}
    script = Path(__file__).with_name("bench_vllm.py")
    argv = [interpreter(python), str(script), json.dumps(asked), "--model", made.model, *made.options]
    out, err = BytesIO(), BytesIO()
    ended = running.run(
        argv, _environment(made, question, threads), ready=lambda report: None, out=out, err=err
    )
    if ended.signal is not None:
        raise KeyboardInterrupt
    found = _last_json(out.getvalue().decode(errors="replace")) if ended.code == 0 else None
    if found is None:
        raise _failure(served, ended, out.getvalue() + err.getvalue())
    timings = tuple(
        Timing(int(batch), prompt, tokens, first, step) for batch, first, step in found["timings"]
    )
    return Ran(
        f"vLLM {found['version']}", timings, tuple(_runs(ended.report)),
        tuple(_notes(served, question, made, ended.report)),
    )  # fmt: skip


def _environment(made: Command, question: Question, threads: int) -> dict[str, str]:
    """Variables beside ours: on a CPU vLLM would keep one core for its server, which a benchmark does not have."""
    own = {"VLLM_NO_USAGE_STATS": "1"} | made.environment
    if question.gpu.vendor == "cpu":
        cores = sorted(os.sched_getaffinity(0))[:threads]
        own["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    return own


def _runs(report: Report | None) -> Iterable[str]:
    """What the log says that runs, in the order of the doctor's page."""
    for one in report.running if report is not None else ():
        if one.kind in _SHOWN:
            yield f"{one.kind} {one.what}"


def _notes(served: Served, question: Question, made: Command, report: Report | None) -> Iterable[str]:
    """What is not as it was planned, and what the log says is wrong."""
    if report is None:
        yield "its log says nothing of what runs"
        return
    for row in beside(served, question, made, report):
        if row.same is False:
            yield f"{row.kind}: {row.planned} was planned, {row.running} runs"
    for finding in report.findings:
        if finding.severity != "info":
            yield f"{finding.said} {finding.consequence}"


def _failure(served: Served, ended: running.Ended, log: bytes) -> InputError:
    """Why it did not run: the doctor's words where it has some, else the end of the log."""
    errors = ended.report.by_severity("error") if ended.report is not None else ()
    lines = [line for line in log.decode(errors="replace").splitlines() if line.strip()][-_TAIL:]
    said = [f"{one.said} ({one.line})" for one in errors] or lines or [f"exit code {ended.code}"]
    return InputError(
        "vLLM did not run the model", where=served.name, got="\n".join(said),
        remedy=errors[0].remedy if errors else "`narrowcast serve MODEL` shows its whole log",
    )  # fmt: skip


def _last_json(text: str) -> Mapping[str, Any] | None:
    """The object of the last line that looks like one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found: Mapping[str, Any] = json.loads(line)
            except ValueError:
                return None
            return found
    return None
