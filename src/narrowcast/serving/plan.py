"""A plan: what will really run, how fast at most, what fits, which split is whole, what to choose and what not to do.

    plan(model, gpu, context=32768, batch=16)  →  Plan

One preset plans the model as it would be written; several are compared, and the first of them is planned. Without any,
an unquantized model is planned as it is and all presets are ranked beside it. Everything comes from config.json and
headers; nothing is run.

Left out: the words, which the page says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast.hardware.cost import floor
from narrowcast.hardware.gpus import GPU
from narrowcast.hardware.own_gpus import named
from narrowcast.serving.cautions import Case, Caution, cautions
from narrowcast.serving.choice import Choice, Runs, choice, runs_as
from narrowcast.serving.command import DIALECTS, Command, command
from narrowcast.serving.evaluations import Quality, qualities, unchecked
from narrowcast.serving.loading import load
from narrowcast.serving.memory import Memory, memory
from narrowcast.serving.paths import Attends, Kernels, attends, kernels
from narrowcast.serving.question import UTILISATION, Question
from narrowcast.serving.served import Served
from narrowcast.serving.side_by_side import SideBySide, side_by_side
from narrowcast.serving.splits import SIZES, Splits, splits
from narrowcast.serving.stages import Cache
from narrowcast.serving.steps import Steps, arithmetic, attention_arithmetic, steps
from narrowcast.serving.traffic import decode
from narrowcast.serving.variants import Variants
from narrowcast.serving.weighed import load_weighed
from narrowcast.tensors.presets import presets

CONTEXT = 8192  # tokens of a sequence when nobody says otherwise and the model has as many positions


@dataclass(frozen=True)
class CacheUse:
    """One mode of the cache: what fits, what attention over it is computed in, the lower bound of a decode step in
    seconds (None: not known), or why the engine refuses it here."""

    cache: Cache
    arithmetic: str
    decode: float | None
    refusal: str | None


@dataclass(frozen=True)
class Plan:
    """One model on one kind of GPU. ``caches`` are all modes of the cache that the engine has, ``one`` the steps of a
    single sequence beside those of the batch. ``choice`` is None where the checkpoint is quantized already or a single
    preset was asked for, ``quality`` what an evaluation of the planned model measured, ``command`` None for an engine
    that serves nothing; ``assumed`` says what nobody asked for."""

    served: Served
    question: Question
    kernels: tuple[Kernels, ...]
    attends: tuple[Attends, ...]
    memory: Memory
    caches: tuple[CacheUse, ...]
    steps: Steps
    one: Steps
    sides: SideBySide
    splits: Splits
    choice: Choice | None
    quality: Quality | None
    cautions: tuple[Caution, ...]
    command: Command | None
    assumed: tuple[str, ...]

    @property
    def runs(self) -> Runs:
        """What the quantized layers come to together."""
        return runs_as(self.kernels)

    def to_json(self) -> dict[str, Any]:
        """Everything under stable keys: bytes, seconds, words."""
        served, question = self.served, self.question
        return {
            "model": {
                "name": served.name, "family": served.geometry.family, "read": served.origin, "preset": served.preset,
                "container": served.container, "bytes": served.nbytes, "parameters": served.geometry.parameters,
                "notes": list(served.notes),
            },
            "question": vars(question) | {"gpu": question.gpu.name},
            "fits": self.memory.fits, "runs": self.runs,
            "path": [row.to_json() for row in self.kernels],
            "attention": [
                {"kind": each.attention.kind, "layers": each.attention.layers, **vars(each.path)}
                for each in self.attends
            ],
            "floor": self.steps.to_json(), "floor_of_one": self.one.to_json(), "formats": self.sides.to_json(),
            "memory": self.memory.to_json(),
            "caches": [
                {
                    "mode": each.cache.mode, "computed_in": each.arithmetic,
                    "decode_seconds_at_least": each.decode, "refusal": each.refusal,
                }
                for each in self.caches
            ],
            "splits": self.splits.to_json(),
            "choice": self.choice.to_json() if self.choice is not None else None,
            "quality": self.quality.to_json() if self.quality is not None else None,
            "do_not": [caution.to_json() for caution in self.cautions],
            "serve": self.command.to_json() if self.command is not None else None,
            "assumed": list(self.assumed),
        }  # fmt: skip


def plan(
    model: str | Path,
    gpu: str | GPU,
    *,
    engine: str = "vllm",
    tp: int = 1,
    pp: int = 1,
    ep: bool = False,
    context: int | None = None,
    batch: int = 1,
    preset: str | Sequence[str] = (),
    container: str | None = None,
    kv: str = "auto",
    utilisation: float = UTILISATION,
    evaluations: Sequence[str | Path] = (),
    gpus: str | Path | None = None,
) -> Plan:
    """The plan of a model (a directory, a config, a file, or a hub id) on a GPU (a row or its name, ``here`` for this
    machine's; ``gpus`` is a file of own rows). ``context`` None: the model's positions, 8192 at most.

    UsageError for names that there are not and for what cannot be asked, InputError and CheckpointError for files that
    are none and configs that are not understood.
    """
    names = [presets[name].name for name in ([preset] if isinstance(preset, str) else preset)]
    found = qualities(evaluations)
    wide = load_weighed(model)
    question = Question(
        gpu if isinstance(gpu, GPU) else named(gpu, gpus), engine, tp, pp, ep,
        context if context is not None else min(CONTEXT, wide.geometry.positions or CONTEXT), batch, kv, utilisation,
    )  # fmt: skip
    variants = Variants(model, wide, question.engine, question.gpu, container)
    if names and variants.quantized:
        load(model, preset=names[0])  # says why a quantized model takes no preset
    if container is not None and not names and not variants.quantized:
        load(model, container=container)  # says that a container alone says nothing
    ranked = None
    if not variants.quantized and len(names) != 1:
        ranked = choice(wide, question, variants.written, names or None, found)
    chosen = names[0] if len(names) == 1 else None
    if names and ranked is not None:
        chosen = (ranked.first or ranked.options[0]).preset
    served = variants.written(chosen) if chosen is not None else wide
    own = _own(found, chosen, variants.quantized)
    assumed = (*_assumed(wide, context, question), *unchecked(found, wide))
    return _plan(served, question, ranked, own, assumed)


def _own(found: Mapping[str, Quality], chosen: str | None, quantized: bool) -> Quality | None:
    """The evaluation of the model that is planned."""
    if chosen is not None:
        return found.get(chosen)
    return next(iter(found.values()), None) if quantized else None


def _plan(
    served: Served, question: Question, ranked: Choice | None, own: Quality | None, assumed: tuple[str, ...]
) -> Plan:
    rows, room = kernels(served, question), memory(served, question)
    bounds = steps(served, question, rows)
    case = Case(served, question, bounds.crossover or bounds.crossover_weights)
    sizes = tuple(sorted({*SIZES, question.tp}))
    return Plan(
        served, question, rows, attends(served, question), room, tuple(_caches(served, question, room, rows)), bounds,
        steps(served, replace(question, batch=1), rows), side_by_side(served, question),
        splits(served, question.engine, question.gpu, ep=question.ep, sizes=sizes), ranked, own, cautions(case),
        command(served, question) if question.engine in DIALECTS else None, assumed,
    )  # fmt: skip


def _caches(
    served: Served, question: Question, room: Memory, rows: tuple[Kernels, ...]
) -> Iterator[CacheUse]:
    arithmetics = arithmetic(served, question, rows)
    for cache in room.modes:
        asked = replace(question, kv=cache.mode)
        found = [each.path for each in attends(served, asked) if each.attention.kind != "state"]
        words = dict.fromkeys(path.arithmetic for path in found)
        refusal = next((path.refusal for path in found if path.refusal is not None), None)
        attention = attention_arithmetic(served, asked, engine=True)
        step = decode(served, asked, arithmetics, attention).work if refusal is None else None
        seconds = floor(step, question.gpu).seconds if step is not None else None
        yield CacheUse(cache, ", ".join(words), seconds, refusal)


def _assumed(served: Served, context: int | None, question: Question) -> Iterator[str]:
    """What nobody asked for."""
    if context is None:
        positions = served.geometry.positions
        of = (
            f" of the model's {positions:,}" if positions is not None and positions > question.context else ""
        )
        yield f"Sequences of {question.context:,} tokens{of} (no --context)."
    if question.kv == "auto" and served.kv is None:
        yield "The cache is in the model's dtype (no --kv)."
