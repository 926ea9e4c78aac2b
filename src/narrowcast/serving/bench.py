"""What a model really does on this machine, beside what it could do at most: ``bench``.

    bandwidth   measured first, over arrays as large as what one step reads: a model that fits a cache is bounded by it
    rate        of large bf16 products, which bounds a prefill; of int8 codes too, where inputs are integers, and where
                vLLM's CPU build may make integers of them (it computes W4A16 as W4A8)
    floor       the bytes of a step over the bandwidth, its FLOP over the rate, and the larger of both (``steps``)
    ratio       measured / floor

What is not quantized runs in 16 bits, so what is stored in fp32 counts half. Our runtime holds the cache in bf16. vLLM
is timed in its own Python; on a machine with a GPU its floor is that of the GPU's published numbers.

The bandwidth is what numpy's loops reach, and a compiled kernel may reach a little more: a ratio somewhat below 1 says
that, not that physics broke.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast.errors import UsageError
from narrowcast.hardware.bandwidth import Bandwidth, measure
from narrowcast.hardware.gpus import GPU, gpus
from narrowcast.hardware.host import free_memory
from narrowcast.hardware.machine import cards
from narrowcast.jobs.stream import ProgressFactory, Silent
from narrowcast.numbers.formats import FP32, Kind
from narrowcast.serving.bench_child import interpreter, time_vllm
from narrowcast.serving.loading import load
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served
from narrowcast.serving.steps import Step, steps
from narrowcast.serving.timing import Ran, Timing
from narrowcast.serving.traffic import streamed

ENGINES = ("ours", "vllm")
SECONDS = 1.0  # that the bandwidth is measured for
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
    ran: Ran
    bandwidth: Bandwidth | None
    measured: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        band = self.bandwidth
        return {
            "model": self.served.name,
            "runs_as": self.ran.runs_as,
            "running": list(self.ran.running),
            "notes": list(self.ran.notes),
            "weight_bytes": self.served.nbytes,
            "bandwidth": None if band is None else vars(band) | {"best": band.best},
            "measured": [row.to_json() for row in self.measured],
        }


@dataclass(frozen=True)
class Bench:
    """``gpu`` is the row that the floors are of; ``rates`` FLOP a second of products that were measured, by dtype."""

    gpu: GPU
    threads: int
    rates: Mapping[str, float]
    contestants: tuple[Contestant, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.gpu.name, "threads": self.threads, "product_flop_per_second": dict(self.rates),
            "models": [each.to_json() for each in self.contestants],
        }  # fmt: skip


@dataclass(frozen=True)
class _Asked:
    """What is measured, of every model alike."""

    engine: str
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    threads: int
    python: str | None
    extra: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Of one model, for the progress."""
        return len(self.batches) * (self.tokens + 3)

    def question(self, gpu: GPU) -> Question:
        """Of the longest and largest that is run."""
        return Question(
            gpu, "vllm" if self.engine == "vllm" else "transformers", context=self.prompt + self.tokens + 1,
            batch=max(self.batches), kv="auto" if self.engine == "vllm" else "bf16",
        )  # fmt: skip


def bench(
    model: str | Path, *, against: str | Path | None = None, batches: tuple[int, ...] = (1, 32), prompt: int = 64,
    tokens: int = 32, engine: str = "ours", python: str | None = None, threads: int | None = None,
    extra: Sequence[str] = (), progress: ProgressFactory = Silent,
) -> Bench:  # fmt: skip
    """Time ``model``, and its parent in the same run.

    ``engine`` is "ours" or "vllm", ``python`` an interpreter that has vLLM, ``extra`` flags of vLLM's. Raises
    UsageError for what cannot be asked or does not fit this machine's memory, and what loading a model raises.
    """
    threads = len(os.sched_getaffinity(0)) if threads is None else threads
    asked = _Asked(engine, batches, prompt, tokens, threads, python, tuple(extra))
    _check(asked)
    loaded = [load(path) for path in ([model] if against is None else [model, against])]
    machine = next(iter(cards([]) if engine == "vllm" else ()), gpus["cpu"])
    for served in loaded:
        _check_fits(served, asked.question(machine))
    on_cpu = machine.vendor == "cpu"
    rates = _rates(threads, any(_integers(served, engine) for served in loaded)) if on_cpu else {}
    shown = progress(len(loaded) * asked.steps, "measuring")
    contestants = []
    for served in loaded:
        band = measure(SECONDS, threads, 2 * max(int(streamed(served)), _LEAST)) if on_cpu else None
        gpu = _row(machine, band, rates, engine == "vllm" and _integers(served, engine))
        ran = _run(served, asked, machine, shown.advance)
        measured = tuple(
            Measured(row, *_floors(_in_16_bits(served), asked.question(gpu), row)) for row in ran.timings
        )
        contestants.append(Contestant(served, ran, band, measured))
    shown.done()
    return Bench(machine, threads, rates, tuple(contestants))


def _check(asked: _Asked) -> None:
    if asked.engine not in ENGINES:
        raise UsageError("no such runner", got=asked.engine, wanted=", ".join(ENGINES))
    counts = [*asked.batches, asked.prompt, asked.tokens, asked.threads]
    if not asked.batches or min(counts) < 1:
        raise UsageError("batches, prompt, tokens and threads must be at least 1", got=counts)
    if asked.engine == "vllm":
        interpreter(asked.python)
    elif asked.python or asked.extra:
        raise UsageError("--python and flags behind -- are for --engine vllm", got=asked.engine)


def _check_fits(served: Served, question: Question) -> None:
    """Whether the model has weights and as many positions, and, on a processor, fits what is free of its memory: models
    are timed one after the other."""
    if served.origin == "config" and os.path.exists(served.name):  # of a hub id weights are fetched
        raise UsageError(
            "there are no weights to time", where=served.name, wanted="a directory, a .safetensors or .gguf file",
            remedy="`narrowcast plan` says what a config alone tells",
        )  # fmt: skip
    positions = served.geometry.positions
    if positions is not None and question.context > positions:
        raise UsageError(
            "the model has fewer positions", where=served.name, got=f"{question.context} tokens",
            wanted=f"at most {positions}", remedy="a smaller --prompt or --tokens",
        )  # fmt: skip
    free = free_memory() if question.gpu.vendor == "cpu" else None
    needed = served.nbytes + 2 * served.geometry.kept_elements() * question.context * question.batch
    if free is not None and needed > free:
        raise UsageError(
            "the model and its cache do not fit this machine's memory", where=served.name, got=f"{needed} bytes",
            wanted=f"at most the {free} bytes that are free",
        )  # fmt: skip


def _integers(served: Served, engine: str) -> bool:
    """Whether products may be of integers: where inputs are, and in vLLM where weights are."""
    linears = [group.linear for group in served.groups if group.linear is not None]
    sides = [linear.weight if engine == "vllm" else linear.input for linear in linears]
    return any(side is not None and side.element.kind is Kind.INT for side in sides)


def _rates(threads: int, integers: bool) -> dict[str, float]:
    from narrowcast.serving.bench_ours import product_rate

    found = {"bf16": product_rate(threads)}
    if integers:
        found["int8"] = product_rate(threads, integers=True)
    return {name: rate for name, rate in found.items() if rate is not None}


def _row(machine: GPU, band: Bandwidth | None, rates: Mapping[str, float], best: bool) -> GPU:
    """The row that the floor is of: a processor's with what was measured. ``best`` has everything at the best rate,
    where what the engine multiplies in is not known."""
    if band is None:
        return machine
    peaks = {name: rate / 1e12 for name, rate in rates.items()}
    if best:
        peaks["bf16"] = max(peaks.values())
    return replace(machine, bandwidth_tb_s=band.best / 1e12, formats=frozenset(peaks), peaks=peaks)


def _run(served: Served, asked: _Asked, machine: GPU, done: Callable[[int], None]) -> Ran:
    if asked.engine == "ours":
        from narrowcast.serving.bench_ours import time_ours

        ran = time_ours(served.name, asked.batches, asked.prompt, asked.tokens, asked.threads, done)
        wide = (f"the cache is held in bf16, the checkpoint asks for {served.kv}",) if served.kv else ()
        return replace(ran, notes=(*ran.notes, *wide))
    ran = time_vllm(
        served, asked.question(machine), asked.batches, asked.prompt, asked.tokens, asked.threads, asked.python,
        asked.extra,
    )  # fmt: skip
    done(asked.steps)
    return ran


def _in_16_bits(served: Served) -> Served:
    """The model as it runs: plain weights stored in fp32 are read in 16 bits."""
    groups = tuple(
        replace(group, nbytes=group.nbytes // 2) if group.linear is None and group.dtype is FP32 else group
        for group in served.groups
    )
    wide = served.geometry.dtype == FP32.name
    return replace(served, groups=groups, vector_bytes=served.vector_bytes // (2 if wide else 1))


def _floors(served: Served, question: Question, timing: Timing) -> tuple[Step, Step]:
    """Lower bounds of a decode step in the middle of the timed ones, and of the prefill of the whole batch."""
    asked = replace(question, context=timing.context, batch=timing.batch)
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
