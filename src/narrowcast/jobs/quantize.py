"""Quantize a checkpoint: settle the plan, stream the weights, read everything back.

    plan      names, patterns, groups, sizes: all that can be refused is refused before a byte is written
    write     per shard: scan (outer scales of fused groups), then quantize by row chunks, straight to its place
    check     per shard: read source and result back, element by element
    commit    side files, record, model card, index and config last, one rename

The check is not a statistic: every element must lie within half its local step times its scale, or be counted
as clipped or underflowed, and every carried tensor must be equal byte for byte. SQNR is reported beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from narrowcast.containers import containers
from narrowcast.containers.container import Container
from narrowcast.errors import InputError, NarrowcastError, NonFiniteError, RangeError, UsageError
from narrowcast.jobs.calibrated import Calibration, opened, refusal
from narrowcast.jobs.opening import open_model
from narrowcast.jobs.parent import Loss, losses, rounded_again
from narrowcast.jobs.plan import Plan, source_identity
from narrowcast.jobs.planning import make_plan
from narrowcast.jobs.scanning import scan_units
from narrowcast.jobs.shards import CheckFailed, Work, backend_of
from narrowcast.jobs.stream import ProgressFactory, Silent, Workers
from narrowcast.model.keeping import keep_patterns
from narrowcast.model.patterns import Pattern
from narrowcast.model.recipe import Line, Recipe
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.output import Output
from narrowcast.tensors.metrics import Errors
from narrowcast.tensors.presets import presets


@dataclass
class Result:
    """What a finished job did. ``seconds`` by phase; errors by role and by tensor, worst first."""

    out: Path
    plan: Plan
    seconds: dict[str, float]
    bytes: int
    tensors: dict[str, Errors]
    roles: dict[str, Errors] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    backend: str = ""
    losses: dict[str, Loss] = field(default_factory=dict)

    @property
    def worst(self) -> list[tuple[str, Errors, str]]:
        """The ten tensors with the lowest SQNR: (module, errors, scheme)."""
        scheme = {unit.module: unit.scheme_name for unit in self.plan.units}
        ordered = sorted(self.tensors.items(), key=lambda item: item[1].sqnr)
        return [(name, errors, scheme[name]) for name, errors in ordered[:10]]

    @property
    def total(self) -> Errors:
        return sum(self.tensors.values(), Errors())

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "out": str(self.out),
            "seconds": {phase: round(value, 3) for phase, value in self.seconds.items()},
            "bytes": self.bytes,
            "source_bytes": self.plan.source_bytes,
            "backend": self.backend,
            "notes": list(self.reasons),
            "fallbacks": list(self.plan.fallbacks),
            "coverage": {"parameters": self.plan.coverage_params, "bytes": self.plan.coverage_bytes},
            "bits_per_weight": self.plan.bits_per_weight,
            "engines": list(self.plan.engines),
            "total": errors_json(self.total),
            "roles": {role: errors_json(errors) for role, errors in self.roles.items()},
            "second_rounding": {role: loss.to_json() for role, loss in self.losses.items()},
            "worst": [{"tensor": n, "scheme": s, **errors_json(e)} for n, e, s in self.worst],
        }


def errors_json(errors: Errors) -> dict[str, Any]:
    """Stable keys; an infinite SQNR (nothing lost) is null."""
    return {
        "sqnr_db": round(errors.sqnr, 3) if isfinite(errors.sqnr) else None,
        "elements": errors.elements,
        "clipped": errors.clipped,
        "underflowed": errors.underflowed,
    }


def plan(
    model: str | Path,
    out: str | Path,
    preset: str | None = None,
    *,
    container: str = "compressed-tensors",
    ignore: str | Iterable[str] = (),
    targets: str | Iterable[str] = (),
    recipe: str | Path | Recipe | None = None,
    rule: str | None = None,
    strict: bool = False,
    nonfinite: str = "refuse",
    workers: int | None = None,
    stats: str | Path | None = None,
    stat: str | None = None,
) -> Plan:
    """Validate a quantize job and lay out its result; nothing is written.

    ``preset`` with ``ignore``, ``targets`` and ``rule`` is shorthand for a ``recipe`` (a TOML file of ordered
    patterns, an llm-compressor YAML, or a Recipe). ``nonfinite="copy"`` keeps tensors with NaN or infinity
    unquantized instead of refusing. ``stats`` is a file of ``narrowcast calibrate`` for presets with static inputs or
    a KV cache, ``stat`` what of it their scales are made from (amax). Raises UsageError for what cannot be asked,
    InputError for bad sources.
    """
    row = _check_options(container, nonfinite, workers)
    found = opened(stats, stat)
    settled, title = _recipe(preset, recipe, patterns(ignore), patterns(targets), rule)
    if found is None and settled.default is not None and presets[settled.default].calibrated:
        raise refusal(presets[settled.default])  # before a model is opened
    with open_model(model) as checkpoint:
        if nonfinite == "copy":
            settled = _sparing(checkpoint, str(model), Path(out), settled, title, row, workers, found)
        return make_plan(
            checkpoint, str(model), Path(out), settled, title, row,
            strict=strict, nonfinite=nonfinite, workers=workers, calibration=found,
        )  # fmt: skip


def patterns(given: str | Iterable[str]) -> tuple[str, ...]:
    """One pattern or several."""
    return (given,) if isinstance(given, str) else tuple(given)


def _check_options(name: str, nonfinite: str, workers: int | None) -> Container:
    Workers.count_of(workers)
    if nonfinite not in ("refuse", "copy"):
        raise UsageError("unknown way with non-finite values", got=nonfinite, wanted="refuse or copy")
    row = containers[name]
    if row.spelling is None:
        written = [name for name, row in containers.items() if row.spelling is not None]
        raise UsageError(
            f"{row.name} is no container to quantize into", wanted=", ".join(written),
            remedy=f"`narrowcast convert --to {row.name}` makes it; `narrowcast convert --help` has examples"
            if row.document is not None or row.name == "gguf" else None,
        )  # fmt: skip
    return row


def _recipe(
    preset: str | None,
    recipe: str | Path | Recipe | None,
    ignore: Sequence[str],
    targets: Sequence[str],
    rule: str | None,
) -> tuple[Recipe, str]:
    """The recipe and its title, from a preset with shorthand options or from a file."""
    if recipe is None:
        if preset is None:
            raise UsageError(
                "neither a preset nor a recipe",
                remedy="--preset fp8_dynamic; `narrowcast presets` lists them",
            )
        name = presets[preset].name
        return Recipe.from_preset(name, ignore, targets, rule), name
    if preset is not None or ignore or targets or rule is not None:
        raise UsageError(
            "a recipe says everything itself", remedy="leave out --preset, --ignore, --targets and --rule"
        )
    if isinstance(recipe, Recipe):
        return recipe, "recipe"
    path = Path(recipe)
    try:
        text = path.read_text("utf-8-sig")  # whatever the locale is; some editors put a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the recipe cannot be read", where=path, got=str(error)) from None
    if path.suffix.lower() in (".yaml", ".yml"):
        return Recipe.from_llmcompressor(text, str(path)), path.name
    return Recipe.from_toml(text, str(path)), path.name


def _sparing(
    checkpoint: Checkpoint,
    model: str,
    out: Path,
    recipe: Recipe,
    title: str,
    row: Container,
    workers: int | None,
    found: Calibration | None,
) -> Recipe:
    """The recipe with lines in front that keep what holds NaN or infinity, and all that must stay with it."""
    draft = make_plan(checkpoint, model, out, recipe, title, row, calibration=found)
    with Workers(workers) as pool:
        scans = scan_units(checkpoint, draft.units, pool, backend_of(draft.units[0])[0], Silent())
    bad = {unit.source.tensor for unit in draft.units if scans[unit.module].nan or scans[unit.module].inf}
    keep = keep_patterns(draft.modules, [module.name for module in draft.modules if module.tensor in bad])
    lines = [Line(Pattern.parse(text), None, source="NaN or infinity") for text in keep]
    return replace(recipe, lines=(*lines, *recipe.lines))


def run(plan: Plan, *, resume: bool = False, progress: ProgressFactory | None = None) -> Result:
    """Do a planned job; see the module docstring. Raises on the first failure and leaves no finished-looking output."""
    make = progress or Silent
    started = time.perf_counter()
    with open_model(plan.root) as checkpoint:
        _check_unchanged(plan, checkpoint)
        output = Output.begin(
            plan.place, plan.job(), forecast=plan.forecast_bytes, resume=resume, source=checkpoint.root
        )
        try:
            with Workers(plan.workers) as pool:
                work = Work(plan, checkpoint, output, pool, make)
                work.shards()
                work.refuse_casts()
                work.side_files()
                _check_unchanged(plan, checkpoint)  # a result of two sources would look like one of either
                output.commit(plan.config)
        except BaseException as error:
            # What no second run can mend leaves nothing behind; everything else can be resumed.
            lost = isinstance(error, (NonFiniteError, RangeError, CheckFailed, SourceChanged, UsageError))
            output.abort(keep=not lost)
            if not lost:
                tell_of_resuming(error)
            raise
    found = losses(plan, plan.parent, plan.place) if plan.parent is not None and rounded_again(plan) else {}
    work.seconds["total"] = time.perf_counter() - started
    size = sum(p.stat().st_size for p in plan.place.rglob("*") if p.is_file())
    reasons = (*sorted(work.reasons), *work.remarks(), *output.notes)
    return Result(
        plan.place,
        plan,
        work.seconds,
        size,
        work.errors,
        work.roles(),
        reasons,
        "+".join(sorted(work.backends)),
        found,
    )


class SourceChanged(InputError):
    """The source is not the one that was planned for."""


def _check_unchanged(plan: Plan, checkpoint: Checkpoint) -> None:
    try:
        seen = source_identity(checkpoint)
    except OSError as error:
        raise SourceChanged(
            "a shard of the source is gone", where=error.filename, got=error.strerror
        ) from None
    if seen != plan.source:
        raise SourceChanged(
            "the source changed after it was planned",
            where=plan.root,
            remedy="wait for its download or copy to end, and start again",
        )


def tell_of_resuming(error: BaseException) -> None:
    """Raise the same error with the way to go on; errors that have no remedy to show are left alone."""
    advice = "--resume goes on from what is finished"
    if isinstance(error, NarrowcastError):
        told = f"{error.remedy}; {advice}" if error.remedy else advice
        raise type(error)(
            error.problem, where=error.where, got=error.got, wanted=error.wanted, remedy=told
        ) from error
    if isinstance(error, KeyboardInterrupt):
        raise KeyboardInterrupt(advice) from None


def quantize(model: str | Path, out: str | Path, preset: str | None = None, **options: Any) -> Result:
    """Plan and run in one call: ``quantize(src, out, preset="FP8_DYNAMIC", ignore=["lm_head"])``.

    Options are those of ``plan``, and ``resume`` and ``progress`` of ``run``.
    """
    later: dict[str, Any] = {key: options.pop(key) for key in ("resume", "progress") if key in options}
    return run(plan(model, out, preset, **options), **later)


__all__: Sequence[str] = ("Plan", "Result", "errors_json", "plan", "quantize", "run")
