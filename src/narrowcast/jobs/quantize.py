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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.containers import compressed_tensors as container
from narrowcast.errors import NonFiniteError, StorageError, UsageError
from narrowcast.jobs.planning import Copy, Plan, Shard, Unit, make_plan
from narrowcast.jobs.record import model_card, record
from narrowcast.jobs.stream import Progress, ProgressFactory, Silent, Workers, chunks
from narrowcast.kernels import Backend, Scan, choose
from narrowcast.model.recipe import Recipe
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.output import Output
from narrowcast.store.safetensors import Reader
from narrowcast.store.writer import Writer
from narrowcast.tensors.metrics import Errors
from narrowcast.tensors.presets import presets
from narrowcast.tensors.scaling import outer_scale

BATCH_BYTES = 256 << 20  # source bytes whose maxima are found before they are quantized, so the second read is cached
COPY_BYTES = 4 << 20


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

    @property
    def worst(self) -> list[tuple[str, Errors, str]]:
        """The ten tensors with the lowest SQNR: (module, errors, scheme)."""
        scheme = {unit.module: unit.how.scheme.name for unit in self.plan.units}
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
    container: str = container.NAME,
    ignore: Iterable[str] = (),
    targets: Iterable[str] = (),
    recipe: str | Path | Recipe | None = None,
    rule: str | None = None,
    strict: bool = False,
    nonfinite: str = "refuse",
    workers: int | None = None,
) -> Plan:
    """Validate a quantize job and lay out its result; nothing is written.

    ``preset`` with ``ignore``, ``targets`` and ``rule`` is shorthand for a ``recipe`` (a TOML file of ordered
    patterns, an llm-compressor YAML, or a Recipe). ``nonfinite="copy"`` keeps tensors with NaN or infinity
    unquantized instead of refusing. Raises UsageError for what cannot be asked, InputError for bad sources.
    """
    _check_names(container, nonfinite)
    settled, title = _recipe(preset, recipe, tuple(ignore), tuple(targets), rule)
    with Checkpoint.open(model) as checkpoint:
        keep = _nonfinite_units(checkpoint, str(model), Path(out), settled, title, workers) if nonfinite == "copy" else ()
        return make_plan(
            checkpoint, str(model), Path(out), settled, title,
            strict=strict, nonfinite=nonfinite, workers=workers, keep=keep,
        )  # fmt: skip


def _check_names(name: str, nonfinite: str) -> None:
    if name != container.NAME:
        raise UsageError("unknown container", got=name, wanted=container.NAME)
    if nonfinite not in ("refuse", "copy"):
        raise UsageError("unknown way with non-finite values", got=nonfinite, wanted="refuse or copy")


def _recipe(
    preset: str | None, recipe: str | Path | Recipe | None, ignore: Sequence[str], targets: Sequence[str], rule: str | None
) -> tuple[Recipe, str]:
    """The recipe and its title, from a preset with shorthand options or from a file."""
    if recipe is None:
        if preset is None:
            raise UsageError("neither a preset nor a recipe", remedy="--preset fp8_dynamic; `narrowcast presets` lists them")
        name = presets[preset].name
        _refuse_calibrated(name)
        return Recipe.from_preset(name, ignore, targets, rule), name
    if preset is not None or ignore or targets or rule is not None:
        raise UsageError("a recipe says everything itself", remedy="leave out --preset, --ignore, --targets and --rule")
    if isinstance(recipe, Recipe):
        return recipe, "recipe"
    path = Path(recipe)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the recipe cannot be read", where=path, got=str(error)) from None
    if path.suffix in (".yaml", ".yml"):
        return Recipe.from_llmcompressor(text, str(path)), path.name
    return Recipe.from_toml(text, str(path)), path.name


def _refuse_calibrated(name: str) -> None:
    preset = presets[name]
    if preset.calibrated:
        raise UsageError(
            f"{name} needs calibration statistics of activations, and there are none",
            remedy=f"use {preset.nearest}, the nearest preset without calibration",
        )


def _nonfinite_units(
    checkpoint: Checkpoint, model: str, out: Path, recipe: Recipe, title: str, workers: int | None
) -> list[str]:
    """Output matrices that hold NaN or infinity, with their fused siblings (a group has one scheme)."""
    draft = make_plan(checkpoint, model, out, recipe, title)
    with Workers(workers) as pool:
        scans = _scan(checkpoint, draft.units, pool, _backend(draft.units[0])[0], Silent())
    bad = {unit.group for unit in draft.units if scans[unit.module].nan or scans[unit.module].inf}
    tensors = {unit.source.tensor for unit in draft.units if unit.group in bad}
    return [unit.module for unit in draft.units if unit.group in bad or unit.source.tensor in tensors]


def run(plan: Plan, *, resume: bool = False, progress: ProgressFactory | None = None) -> Result:
    """Do a planned job; see the module docstring. Raises on the first failure and leaves no finished-looking output."""
    make = progress or Silent
    started = time.perf_counter()
    with Checkpoint.open(plan.model) as checkpoint:
        job = plan.job(checkpoint)
        output = Output.begin(plan.out, job, forecast=plan.forecast_bytes, resume=resume, source=checkpoint.root)
        try:
            with Workers(plan.workers) as pool:
                work = _Job(plan, checkpoint, output, pool, make)
                work.shards()
                work.side_files()
                output.commit(plan.config)
        except BaseException as error:
            # What no second run can mend leaves nothing behind; everything else can be resumed.
            output.abort(keep=not isinstance(error, (NonFiniteError, _CheckFailed, UsageError)))
            raise
    work.seconds["total"] = time.perf_counter() - started
    size = sum(p.stat().st_size for p in plan.out.rglob("*") if p.is_file())
    reasons = (*sorted(work.reasons), *output.notes)
    return Result(plan.out, plan, work.seconds, size, work.errors, work.roles(), reasons, "+".join(sorted(work.backends)))


class _CheckFailed(StorageError):
    """The result read back differs from what the source allows."""


class _Job:
    """One run: the open source, the output, the pool, and what was seen so far."""

    def __init__(self, plan: Plan, source: Checkpoint, output: Output, pool: Workers, make: ProgressFactory) -> None:
        self.plan, self.source, self.output, self.pool = plan, source, output, pool
        self.seconds = {"quantize": 0.0, "sync": 0.0, "check": 0.0, "side files": 0.0}
        self.outer: dict[int, float] = {}
        self.errors: dict[str, Errors] = {}
        self.reasons: set[str] = set()
        self.backends: set[str] = set()
        self.members: dict[int, list[Unit]] = {}
        for unit in plan.units:
            self.members.setdefault(unit.group, []).append(unit)
        self.make = make

    def shards(self) -> None:
        """Write every shard while the previous one is synced and checked."""
        total = sum(u.nbytes for u in self.plan.units) + sum(c.nbytes for s in self.plan.shards for c in s.copies)
        bar = self.make(2 * total, "quantize and check")
        with ThreadPoolExecutor(1, "narrowcast-sync") as syncer:
            pending: tuple[Shard, Future[None]] | None = None
            for shard in self.plan.shards:
                current = self._write(shard, syncer, bar)
                if pending is not None:
                    self._check(*pending, bar)
                pending = (shard, current)
            if pending is not None:
                self._check(*pending, bar)
        bar.done()

    def _write(self, shard: Shard, syncer: ThreadPoolExecutor, bar: Progress) -> Future[None]:
        if self.output.done(shard.name, shard.specs, shard.metadata):
            self._outers(shard.units, Silent())
            bar.advance(sum(u.nbytes for u in shard.units) + sum(c.nbytes for c in shard.copies))
            ready: Future[None] = Future()
            ready.set_result(None)
            return ready
        begun = time.perf_counter()
        writer = self.output.writer(shard.name, shard.specs, shard.metadata)
        try:
            for batch in _batches(shard.units):
                self._outers(batch, bar)
                self._quantize(batch, writer, bar)
            for _ in self.pool.map(lambda copy: self._carry(copy, writer, bar), shard.copies):
                pass
        except BaseException:
            writer.abort()
            raise
        self.seconds["quantize"] += time.perf_counter() - begun
        return syncer.submit(writer.finish)

    def _outers(self, units: Sequence[Unit], bar: Progress) -> None:
        """Find the outer scale of every fused group in ``units`` that has one, over all its members in any shard."""
        groups = {u.group: u for u in units if u.how.scheme.outer is not None and u.group not in self.outer}
        members = [member for group in groups for member in self.members[group]]
        if not members:
            return
        scans = _scan(self.source, members, self.pool, self._backend(members[0]), Silent())
        for group, unit in groups.items():
            amax = max(scans[member.module].amax for member in self.members[group])
            scale = outer_scale(np.full((1, 1), amax, np.float32), unit.how.scheme, unit.dtype)
            self.outer[group] = float(scale[0, 0])

    def _quantize(self, units: Sequence[Unit], writer: Writer, bar: Progress) -> None:
        tasks = [(unit, i, j) for unit in units for i, j in _ranges(unit)]
        for unit in units:
            for name, data, at in container.constants(unit.module, unit.how, unit.source.shape, self._outer(unit)):
                writer.write(name, data, at)

        def work(task: tuple[Unit, int, int]) -> None:
            unit, i, j = task
            backend = self._backend(unit)
            stored = unit.source.read(self.source, unit.carrier, i, j)
            scan = backend.scan(stored, unit.dtype)
            if scan.nan or scan.inf:
                raise _nonfinite(self.source, unit, backend)
            rows = backend.quantize(stored, unit.dtype, unit.how.scheme, unit.how.packing, self._outer(unit))
            for name, data, at in container.pieces(unit.module, unit.how, i, rows):
                writer.write(name, data, at)
            bar.advance(stored.nbytes)

        for _ in self.pool.map(work, tasks):
            pass

    def _carry(self, copy: Copy, writer: Writer, bar: Progress) -> None:
        for at, data in _copied(self.source, copy):
            writer.write(copy.name, data, at)
            bar.advance(len(data))

    def _check(self, shard: Shard, synced: Future[None], bar: Progress) -> None:
        """Read one finished shard back and hold every element against the source."""
        begun = time.perf_counter()
        synced.result()
        self.seconds["sync"] += time.perf_counter() - begun
        begun = time.perf_counter()
        with Reader(self.output.staging / shard.name) as reader:
            tasks = [(unit, i, j) for unit in shard.units for i, j in _ranges(unit)]
            for (unit, _, _), found in zip(tasks, self.pool.map(lambda t: self._compare(reader, *t, bar), tasks), strict=True):
                self.errors[unit.module] = self.errors.get(unit.module, Errors()) + found
            for _ in self.pool.map(lambda copy: self._compare_copy(reader, copy, bar), shard.copies):
                pass
        for unit in shard.units:
            if self.errors[unit.module].beyond:
                raise _CheckFailed(
                    f"{self.errors[unit.module].beyond} elements of the result are not what the format can produce",
                    where=f"{shard.name}: {unit.module} ({unit.how.scheme.name})",
                    remedy="the output was removed; run again, and check the disk and memory if it recurs",
                )
        self.seconds["check"] += time.perf_counter() - begun

    def _compare(self, reader: Reader, unit: Unit, i: int, j: int, bar: Progress) -> Errors:
        stored = unit.source.read(self.source, unit.carrier, i, j)
        rows = container.read_rows(reader, unit.module, unit.how, unit.source.shape, i, j)
        outer = container.read_outer(reader, unit.module, unit.how)
        found = self._backend(unit).check(stored, unit.dtype, unit.how.scheme, unit.how.packing, rows, outer)
        bar.advance(stored.nbytes)
        return found

    def _compare_copy(self, reader: Reader, copy: Copy, bar: Progress) -> None:
        for at, data in _copied(self.source, copy):
            back = np.empty(len(data), np.uint8)
            reader.read_into(copy.name, back, at)
            if not np.array_equal(back, data):
                raise _CheckFailed(f"{copy.name} differs from the source", where=reader.path, wanted="the same bytes")
            bar.advance(len(data))

    def side_files(self) -> None:
        """Everything that travels along, then the record for machines and the card for people."""
        begun = time.perf_counter()
        for name in self.plan.side_files:
            kept = Path("README.source.md") if str(name) == "README.md" else name
            self.output.copy(self.source.root / name, kept)
        self.output.put("narrowcast.json", record(self.plan, self.source, self.errors, self.roles()))
        self.output.put("README.md", model_card(self.plan, self.roles()))
        self.seconds["side files"] = time.perf_counter() - begun

    def roles(self) -> dict[str, Errors]:
        found: dict[str, Errors] = {}
        for unit in self.plan.units:
            found[unit.role] = found.get(unit.role, Errors()) + self.errors.get(unit.module, Errors())
        return found

    def _outer(self, unit: Unit) -> float | None:
        return self.outer[unit.group] if unit.how.scheme.outer is not None else None

    def _backend(self, unit: Unit) -> Backend:
        backend, reason = _backend(unit)
        self.backends.add(backend.name)
        if reason:
            self.reasons.add(f"{unit.how.scheme.name} runs on the {backend.name} kernels: {reason}")
        return backend


def _backend(unit: Unit) -> tuple[Backend, str]:
    choice = choose(unit.how.scheme, unit.dtype, unit.how.packing)
    return choice.backend, choice.reason


def _ranges(unit: Unit) -> list[tuple[int, int]]:
    n, k = unit.source.shape
    return chunks(n, k * unit.carrier.itemsize, unit.how.row_multiple)


def _batches(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Units in order, cut into batches of about BATCH_BYTES."""
    batch: list[Unit] = []
    size = 0
    for unit in units:
        batch.append(unit)
        size += unit.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _scan(
    source: Checkpoint, units: Sequence[Unit], pool: Workers, backend: Backend, bar: Progress
) -> dict[str, Scan]:
    """amax and non-finite counts of whole units; the first index is flat over the unit's matrix."""
    tasks = [(unit, i, j) for unit in units for i, j in _ranges(unit)]

    def work(task: tuple[Unit, int, int]) -> Scan:
        unit, i, j = task
        return backend.scan(unit.source.read(source, unit.carrier, i, j), unit.dtype)

    found: dict[str, Scan] = {}
    for (unit, i, _), scan in zip(tasks, pool.map(work, tasks), strict=True):
        old = found.get(unit.module, Scan(0.0))
        first = old.first if old.first >= 0 or scan.first < 0 else scan.first + i * unit.source.shape[1]
        found[unit.module] = Scan(max(old.amax, scan.amax), old.nan + scan.nan, old.inf + scan.inf, first)
    return found


def _nonfinite(source: Checkpoint, unit: Unit, backend: Backend) -> NonFiniteError:
    """The refusal, with counts over the whole tensor."""
    with Workers(1) as alone:
        scan = _scan(source, [unit], alone, backend, Silent())[unit.module]
    row, column = divmod(scan.first, unit.source.shape[1])
    return NonFiniteError(
        f"{unit.module} has {scan.nan} NaN and {scan.inf} infinite values",
        where=f"{unit.source.tensor}, first at row {row}, column {column}",
        wanted="finite weights",
        remedy=f"repair the source, keep the layer with --ignore {unit.module}, or --nonfinite copy",
    )


def _copied(source: Checkpoint, copy: Copy) -> Iterator[tuple[int, Any]]:
    """The bytes of a carried tensor in pieces: (offset, uint8 array)."""
    if copy.channels is not None and copy.expert is not None:
        part = np.ascontiguousarray(source.array(copy.tensor)[copy.expert, copy.channels])
        yield 0, part.view(np.uint8).reshape(-1)
        return
    for at in range(0, copy.nbytes, COPY_BYTES):
        data = np.empty(min(COPY_BYTES, copy.nbytes - at), np.uint8)
        source.read_into(copy.tensor, data, at)
        yield at, data


def quantize(model: str | Path, out: str | Path, preset: str | None = None, **options: Any) -> Result:
    """Plan and run in one call: ``quantize(src, out, preset="FP8_DYNAMIC", ignore=["lm_head"])``.

    Options are those of ``plan``, and ``resume`` and ``progress`` of ``run``.
    """
    later: dict[str, Any] = {key: options.pop(key) for key in ("resume", "progress") if key in options}
    return run(plan(model, out, preset, **options), **later)


__all__: Sequence[str] = ("Plan", "Result", "errors_json", "plan", "quantize", "run")
