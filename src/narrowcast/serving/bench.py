"""What a model really does on this machine, beside what it could do at most: ``bench``.

    bandwidth   measured first, over arrays as large as what one step reads: a model that fits a cache is bounded by it
    rate        of large bf16 products, which bounds a prefill
    floor       the bytes of a step over the bandwidth, its FLOP over the rate, and the larger of both (``steps``)
    ratio       measured / floor

Our own runtime multiplies in 16 bits or wider whatever the checkpoint's inputs are, so its arithmetic is bounded by the
bf16 rate. vLLM is timed in its own Python; on a machine with a GPU its floor is that of the GPU's published numbers.

The bandwidth is what numpy's loops reach, and a compiled kernel may reach a little more: a ratio somewhat below 1 says
that, not that physics broke.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from narrowcast.errors import InputError, UsageError
from narrowcast.hardware.bandwidth import Bandwidth, free_memory, measure
from narrowcast.hardware.gpus import GPU, gpus
from narrowcast.hardware.machine import detected
from narrowcast.jobs.stream import ProgressFactory, Silent
from narrowcast.serving.loading import load
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served
from narrowcast.serving.steps import Step, steps
from narrowcast.serving.timing import Timing

ENGINES = ("ours", "vllm")
_LEAST = 64 << 20  # bytes over which a bandwidth means something


@dataclass(frozen=True)
class Measured:
    """One batch of one model: what was timed, and the lower bounds of the same steps. ``floor`` bounds are None where a
    number of the machine is not known."""

    timing: Timing
    decode: Step
    prefill: Step

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together."""
        return self.timing.batch / self.timing.step

    @property
    def ratio(self) -> float | None:
        """How many times the floor a decode step took."""
        return None if not self.decode.seconds else self.timing.step / self.decode.seconds

    @property
    def prefill_ratio(self) -> float | None:
        """The same of a prefill of the whole batch."""
        return None if not self.prefill.seconds else self.timing.prefill / self.prefill.seconds

    def to_json(self) -> dict[str, Any]:
        moved = self.decode.traffic.moved
        return self.timing.to_json() | {
            "tokens_per_second": self.tokens_per_second,
            "prefill_tokens_per_second": self.timing.batch * self.timing.prompt / self.timing.prefill,
            "bytes_per_step": moved,
            "bytes_per_second": moved / self.timing.step,
            "floor_seconds": self.decode.seconds,
            "waits_for": self.decode.bound.bound,
            "ratio": self.ratio,
            "prefill_floor_seconds": self.prefill.seconds,
            "prefill_ratio": self.prefill_ratio,
        }


@dataclass(frozen=True)
class Contestant:
    """One model: who ran it, the bandwidth that its floor rests on (None: the GPU's published one), its timings."""

    served: Served
    runs_as: str
    bandwidth: Bandwidth | None
    measured: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        band = self.bandwidth
        return {
            "model": self.served.name,
            "runs_as": self.runs_as,
            "weight_bytes": self.served.nbytes,
            "bandwidth": None if band is None else vars(band) | {"best": band.best},
            "measured": [row.to_json() for row in self.measured],
        }


@dataclass(frozen=True)
class Bench:
    """``gpu`` is the row that the floors are of; ``rate`` FLOP a second of bf16 products, None where not measured."""

    gpu: GPU
    threads: int
    rate: float | None
    contestants: tuple[Contestant, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.gpu.name, "threads": self.threads, "product_flop_per_second": self.rate,
            "models": [each.to_json() for each in self.contestants],
        }  # fmt: skip


def bench(
    model: str | Path, *, against: str | Path | None = None, batches: tuple[int, ...] = (1, 32), prompt: int = 64,
    tokens: int = 32, engine: str = "ours", python: str | None = None, threads: int | None = None,
    progress: ProgressFactory = Silent,
) -> Bench:  # fmt: skip
    """Time ``model``, and its parent in the same run.

    ``engine`` is "ours" or "vllm", ``python`` an interpreter that has vLLM. Raises UsageError for what cannot be asked
    or does not fit this machine's memory, and what loading a model raises.
    """
    _check(engine, batches, prompt, tokens, python)
    threads = threads or len(os.sched_getaffinity(0))
    paths = [model] if against is None else [model, against]
    loaded = [load(path) for path in paths]
    machine = detected()[0] if engine == "vllm" else _processor()
    on_cpu = machine.vendor == "cpu"
    rate = _rate(threads) if on_cpu else None
    if on_cpu:
        _check_memory(loaded)
    shown = progress(len(paths) * len(batches) * (tokens + 3), "measuring")
    contestants = []
    for served in loaded:
        band = measure(1.0, threads, 2 * max(int(served.streamed), _LEAST)) if on_cpu else None
        gpu = _row(machine, band, rate)
        rows = (
            _ours(served.name, batches, prompt, tokens, threads, shown)
            if engine == "ours"
            else _vllm(served.name, batches, prompt, tokens, threads, python)
        )
        measured = tuple(Measured(row, *_floors(served, gpu, row)) for row in rows)
        contestants.append(Contestant(served, _runs_as(served.name, engine), band, measured))
    shown.done()
    return Bench(machine, threads, rate, tuple(contestants))


def _check(engine: str, batches: tuple[int, ...], prompt: int, tokens: int, python: str | None) -> None:
    if engine not in ENGINES:
        raise UsageError("no such runner", got=engine, wanted=", ".join(ENGINES))
    if not batches or min(*batches, prompt, tokens) < 1:
        raise UsageError("batches, prompt and tokens must be at least 1", got=[*batches, prompt, tokens])
    if engine == "vllm" and python is None and find_spec("vllm") is None:
        raise UsageError(
            "vLLM is not installed beside narrowcast", remedy="--python FILE names an interpreter that has it, or "
            "--engine ours",
        )  # fmt: skip


def _check_memory(loaded: list[Served]) -> None:
    """Models are timed one after the other, so the largest must fit, and as much again while it is loaded."""
    free, largest = free_memory(), max(loaded, key=lambda served: served.nbytes)
    if free is not None and largest.nbytes > free:
        raise UsageError(
            "the model does not fit this machine's memory", where=largest.name, got=f"{largest.nbytes} bytes",
            wanted=f"at most the {free} bytes that are free",
        )  # fmt: skip


def _processor() -> GPU:
    return gpus["cpu"]


def _rate(threads: int) -> float:
    from narrowcast.serving.bench_ours import product_rate

    return product_rate(threads)


def _row(machine: GPU, band: Bandwidth | None, rate: float | None) -> GPU:
    """The row that the floor is of: a processor's with what was measured, everything multiplied in bf16."""
    if band is None:
        return machine
    return replace(
        machine, bandwidth_tb_s=band.best / 1e12, formats=frozenset({"bf16"}),
        peaks={"bf16": rate / 1e12} if rate is not None else {},
    )  # fmt: skip


def _floors(served: Served, gpu: GPU, timing: Timing) -> tuple[Step, Step]:
    """Lower bounds of a decode step in the middle of the timed ones, and of the prefill of the whole batch."""
    asked = Question(gpu, "transformers", context=timing.context, batch=timing.batch)
    decode = steps(served, asked).decode
    return decode, _batched(steps(served, replace(asked, context=timing.prompt)).prefill, timing.batch)


def _batched(step: Step, batch: int) -> Step:
    """One prompt's prefill, of ``batch`` prompts at once: weights are read once, all else for each."""
    traffic = step.traffic
    each = replace(
        traffic,
        gathered=traffic.gathered * batch,
        cache_read=traffic.cache_read * batch,
        cache_written=traffic.cache_written * batch,
        states=traffic.states * batch,
        flops={name: flops * batch for name, flops in traffic.flops.items()},
    )
    compute = None if step.bound.compute is None else step.bound.compute * batch
    memory = None if step.bound.memory is None else step.bound.memory * each.moved / traffic.moved
    return replace(step, traffic=each, bound=replace(step.bound, memory=memory, compute=compute))


def _ours(
    model: str, batches: tuple[int, ...], prompt: int, tokens: int, threads: int, shown: Any
) -> Iterator[Timing]:
    from narrowcast.serving.bench_ours import timings

    return timings(model, batches, prompt, tokens, threads, shown.advance)


def _runs_as(model: str, engine: str) -> str:
    if engine == "vllm":
        return "vLLM"
    from narrowcast.serving.bench_ours import runs_as

    return runs_as(model)


def _vllm(
    model: str, batches: tuple[int, ...], prompt: int, tokens: int, threads: int, python: str | None
) -> tuple[Timing, ...]:
    """Timings by a script in vLLM's own Python. InputError with the end of its log where it fails."""
    script = Path(__file__).with_name("bench_vllm.py")
    argv = [
        python or sys.executable,
        str(script),
        model,
        json.dumps(batches),
        str(prompt),
        str(tokens),
        str(threads),
    ]
    try:
        ran = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise UsageError("vLLM's Python cannot be started", got=argv[0], wanted=error.strerror) from None
    found = _last_json(ran.stdout) if ran.returncode == 0 else None
    if found is None:
        tail = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()][-8:]
        raise InputError(
            "vLLM did not run the model", where=model, got="\n".join(tail) or f"exit code {ran.returncode}",
            remedy="`narrowcast serve MODEL` runs it with the doctor reading along",
        )  # fmt: skip
    return tuple(
        Timing(int(batch), prompt, tokens, prefill, step) for batch, prefill, step in found["timings"]
    )


def _last_json(text: str) -> Mapping[str, Any] | None:
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found: Mapping[str, Any] = json.loads(line)
            except ValueError:
                return None
            return found
    return None
