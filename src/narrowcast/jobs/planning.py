"""Before a byte is written: what will be quantized, kept and copied, and how large the result will be.

Everything that can be refused is refused here: unknown names, patterns without matches, fused siblings that
disagree, widths that no group divides, sources that are quantized already. The plan holds the exact layout of
every output shard, so its forecast is the size to the byte (the record and the model card, whose numbers are
not known yet, come on top and are counted apart).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast._version import __version__
from narrowcast.containers import compressed_tensors as container
from narrowcast.containers.compressed_tensors import Spelling
from narrowcast.errors import InputError, UsageError
from narrowcast.jobs.stream import CHUNK_BYTES, Slice
from narrowcast.model.fused import fused_groups
from narrowcast.model.modules import Module, modules
from narrowcast.model.recipe import Recipe
from narrowcast.model.resolve import Assignment, Resolved, Target, resolve
from narrowcast.numbers.formats import Format, formats
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.config_text import edit_config
from narrowcast.store.writer import Layout, Spec, layout
from narrowcast.tensors.presets import LinearScheme, presets
from narrowcast.tensors.schemes import schemes

SOURCES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Unit:
    """One output matrix: its module name, where it is read from, how it is written, and its fused group."""

    module: str
    source: Slice
    role: str
    dtype: Format
    carrier: np.dtype[Any]
    how: Spelling
    linear: LinearScheme
    group: int = 0

    @property
    def nbytes(self) -> int:
        n, k = self.source.shape
        return n * k * self.carrier.itemsize


@dataclass(frozen=True)
class Copy:
    """A tensor that is carried over byte for byte, or a slice of a stacked bias under a new name."""

    name: str
    tensor: str
    nbytes: int
    expert: int | None = None
    channels: slice | None = None


@dataclass(frozen=True)
class Shard:
    """One output file: the same name as the source's, what goes into it, and its exact layout."""

    name: str
    units: tuple[Unit, ...]
    copies: tuple[Copy, ...]
    specs: tuple[Spec, ...]
    metadata: dict[str, str]
    layout: Layout


@dataclass(frozen=True)
class Plan:
    """A quantize job, settled and validated. Sizes in bytes, coverage as shares of the source's weights."""

    model: str
    out: Path
    title: str
    container: str
    recipe: Recipe
    resolved: Resolved
    shards: tuple[Shard, ...]
    config: bytes
    index: dict[str, Any] | None
    side_files: tuple[Path, ...]
    fallbacks: tuple[str, ...]
    warnings: tuple[str, ...]
    coverage_params: float
    coverage_bytes: float
    bits_per_weight: float
    source_bytes: int
    forecast_bytes: int
    workers: int | None
    nonfinite: str
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(unit for shard in self.shards for unit in shard.units)

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines whose loaders read every spelling in the plan."""
        common = [set(unit.how.engines) for unit in self.units]
        return tuple(sorted(set.intersection(*common))) if common else ()

    @property
    def peak_memory(self) -> int:
        """An estimate: the interpreter with compiled kernels, and a few chunks for each worker."""
        widest = max((u.source.shape[1] * u.carrier.itemsize * u.how.row_multiple for u in self.units), default=0)
        return (250 << 20) + 6 * max(widest, CHUNK_BYTES) * (self.workers or 2)

    @property
    def formats(self) -> dict[str, int]:
        """Format string to number of matrices."""
        counts: dict[str, int] = {}
        for unit in self.units:
            counts[unit.how.format] = counts.get(unit.how.format, 0) + 1
        return counts

    def job(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What makes two runs the same job: the source as it is now, and everything that shapes the bytes."""
        stamps = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in checkpoint.shards]
        return {
            "narrowcast": __version__,
            "source": source_hash(checkpoint),
            "stamps": stamps,
            "container": self.container,
            "layout": hashlib.sha256(b"".join(s.layout.header for s in self.shards)).hexdigest(),
            "recipe": [f"{unit.module}: {unit.how.scheme.name} {unit.how.scheme.inner.rule}" for unit in self.units],
            "nonfinite": self.nonfinite,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "model": self.model,
            "out": str(self.out),
            "recipe": self.title,
            "container": self.container,
            "formats": self.formats,
            "lines": [
                {"pattern": m.line.pattern.text, "target": m.line.target, "matched": m.count, "taken": m.taken,
                 "examples": list(m.names)}
                for m in self.resolved.matches
            ],
            "kept": {why: {"tensors": count, "bytes": size} for why, (count, size) in self.kept.items()},
            "fallbacks": list(self.fallbacks),
            "warnings": list(self.warnings),
            "coverage": {"parameters": self.coverage_params, "bytes": self.coverage_bytes},
            "bits_per_weight": self.bits_per_weight,
            "source_bytes": self.source_bytes,
            "forecast_bytes": self.forecast_bytes,
            "peak_memory": self.peak_memory,
            "engines": list(self.engines),
            "matrices": len(self.units),
        }  # fmt: skip


def source_hash(checkpoint: Checkpoint) -> str:
    """SHA-256 over the shard headers: names, dtypes, shapes and places of every tensor of the source."""
    digest = hashlib.sha256()
    for name, entry in sorted(checkpoint.entries.items()):
        digest.update(f"{name}\0{entry.dtype.name}\0{list(entry.shape)}\0{entry.path.name}\0{entry.offset}\n".encode())
    return digest.hexdigest()


def make_plan(
    checkpoint: Checkpoint, model: str, out: Path, recipe: Recipe, title: str, *,
    strict: bool = False, nonfinite: str = "refuse", workers: int | None = None, keep: Sequence[str] = (),
) -> Plan:  # fmt: skip
    """Settle a job. ``keep`` names output matrices that stay unquantized whatever the recipe says."""
    config = checkpoint.config or {}
    if checkpoint.config_bytes is None:
        raise InputError("no config.json beside the weights", where=checkpoint.root, remedy="give the model's directory")
    _refuse_quantized(checkpoint, config)
    found = modules(checkpoint.entries, config)
    resolved = resolve(recipe, found, others=_others(checkpoint, found))
    linear_names = [m.name for m in found if m.kind == "Linear"]
    builder = _Builder(checkpoint, strict, frozenset(keep), linear_names)
    for assignment in resolved.assignments:
        if assignment.target is not None:
            builder.add(assignment, assignment.target)
    builder.refuse_indivisible()
    if not builder.units:
        raise UsageError("nothing to quantize", where=model, got=_why_nothing(resolved), wanted="at least one linear layer")
    shards = builder.shards()
    text = edit_config(checkpoint.config_bytes, "quantization_config", builder.config(resolved))
    index = _index(shards) if len(shards) > 1 else None
    weights = sum(s.layout.size for s in shards)
    side = sum((checkpoint.root / p).stat().st_size for p in checkpoint.side_files)
    index_size = len(index_bytes(index)) if index is not None else 0
    params = {name: int(np.prod(entry.shape, dtype=np.int64)) for name, entry in checkpoint.entries.items()}
    taken = {unit.source.tensor for unit in builder.units}
    stored = sum(size for s in shards for spec in s.specs for _, size in [s.layout.offsets[spec.name]])
    total_bytes = sum(entry.nbytes for entry in checkpoint.entries.values())
    return Plan(
        model=model, out=out, title=title, container=container.NAME, recipe=recipe, resolved=resolved, shards=shards,
        config=text, index=index, side_files=checkpoint.side_files, fallbacks=tuple(builder.fallbacks),
        warnings=tuple(_warnings(checkpoint, resolved)),
        coverage_params=sum(params[t] for t in taken) / max(sum(params.values()), 1),
        coverage_bytes=sum(checkpoint.entries[t].nbytes for t in taken) / max(total_bytes, 1),
        bits_per_weight=8 * stored / max(sum(params.values()), 1),
        source_bytes=sum(p.stat().st_size for p in checkpoint.shards), forecast_bytes=weights + side + len(text) + index_size,
        workers=workers, nonfinite=nonfinite, kept=_kept(checkpoint, resolved, builder),
    )  # fmt: skip


class _Builder:
    """Turns assignments into units, copies and specs, shard by shard."""

    def __init__(self, checkpoint: Checkpoint, strict: bool, keep: frozenset[str], linear_names: Sequence[str]) -> None:
        self.checkpoint, self.strict, self.keep = checkpoint, strict, keep
        self.linear_names = linear_names
        self.units: list[Unit] = []
        self.fallbacks: list[str] = []
        self.indivisible: dict[tuple[str, int], list[tuple[str, int]]] = {}  # (scheme, multiple) to (name, width)
        self.replaced: dict[str, list[Copy]] = {}  # source tensors that are not copied whole, with what replaces them

    def add(self, assignment: Assignment, target: Target) -> None:
        module = assignment.module
        entry = self.checkpoint.entries[module.tensor]
        if entry.dtype.format not in SOURCES:
            raise InputError(
                f"{module.name} cannot be quantized from {entry.dtype.name}", where=module.tensor,
                wanted="BF16, F16 or F32", remedy=f"--ignore {module.name}, or start from the unquantized parent",
            )  # fmt: skip
        dtype = formats[entry.dtype.format]
        n, k = module.out_in
        if module.experts is None:
            source = Slice(module.tensor, (n, k), module.orientation)
            if module.orientation == "in_out":
                self._refuse_conv1d(module)
            self._unit(module.name, source, module, target, dtype, entry.dtype.carrier)
            return
        for split in module.splits():
            part = split.part
            rows = len(range(part.start, part.stop, part.step))
            source = Slice(module.tensor, (rows, k), module.orientation, split.expert, part)
            self._unit(split.name, source, module, target, dtype, entry.dtype.carrier)
        self._split_bias(module)

    def _refuse_conv1d(self, module: Module) -> None:
        raise UsageError(
            f"{module.name} is stored [in, out] (Conv1D), which {container.NAME} cannot express",
            where=module.tensor, remedy=f"keep it: --ignore {module.name}",
        )  # fmt: skip

    def _unit(
        self, name: str, source: Slice, module: Module, target: Target, dtype: Format, carrier: np.dtype[Any]
    ) -> None:
        if name in self.keep:
            return
        linear = self._linear(target, name, source.shape[1])
        if target.rule is not None:
            linear = replace(linear, weight=linear.weight.with_rule(target.rule))
        how = container.spelling(linear, dtype)
        if source.shape[1] % how.width_multiple:
            self.indivisible.setdefault((linear.weight.name, how.width_multiple), []).append((name, source.shape[1]))
            return
        self.units.append(Unit(name, source, str(module.role), dtype, carrier, how, linear))

    def refuse_indivisible(self) -> None:
        """Name every layer whose width the scheme cannot divide, all at once."""
        for (scheme, multiple), layers in self.indivisible.items():
            names = [name for name, _ in layers]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            widths = sorted({width for _, width in layers})
            raise UsageError(
                f"{len(names)} layers have a width that {scheme} cannot divide",
                where=", ".join(names[:3]) + more, got=f"{', '.join(map(str, widths))} columns",
                wanted=f"a multiple of {multiple}",
                remedy="keep them: " + " ".join(f"--ignore '{t}'" for t in container.targets(names, self.linear_names)[:4]),
            )  # fmt: skip

    def _linear(self, target: Target, name: str, k: int) -> LinearScheme:
        """The linear scheme for a layer of width k: group 128 falls back to 64, then 32, and says so."""
        if target.kind == "scheme":
            return LinearScheme(schemes[target.name])
        preset = presets[target.name]
        if preset.calibrated:
            raise UsageError(
                f"{preset.name} needs calibration statistics of activations, and there are none",
                remedy=f"use {preset.nearest}, the nearest preset without calibration",
            )  # fmt: skip
        group = preset.linear.weight.group
        if group not in (64, 128) or k % group == 0 or "_g" not in preset.linear.weight.name:
            return preset.linear
        for smaller in (64, 32):
            if smaller < group and k % smaller == 0:
                if self.strict:
                    raise UsageError(
                        f"{name} has {k} columns, which groups of {group} do not divide",
                        remedy=f"without --strict this layer takes groups of {smaller}",
                    )  # fmt: skip
                self.fallbacks.append(f"{name}: groups of {smaller}, because {group} does not divide {k} columns")
                return preset.with_group(smaller).linear
        return preset.linear

    def _split_bias(self, module: Module) -> None:
        """The stacked bias [E, out] follows its experts, under the names of their modules."""
        if module.bias is None:
            return
        entry = self.checkpoint.entries[module.bias]
        item = entry.dtype.carrier.itemsize
        self.replaced[module.bias] = [
            Copy(f"{split.name}.bias", module.bias, len(range(split.part.start, split.part.stop, split.part.step)) * item,
                 split.expert, slice(split.part.start, split.part.stop, split.part.step))
            for split in module.splits()
        ]  # fmt: skip

    def shards(self) -> tuple[Shard, ...]:
        group_of = {name: i for i, names in enumerate(fused_groups(u.module for u in self.units)) for name in names}
        self.units = [replace(unit, group=group_of[unit.module]) for unit in self.units]
        taken: dict[str, list[Unit]] = {}
        for unit in self.units:
            taken.setdefault(unit.source.tensor, []).append(unit)
        return tuple(self._shard(path, taken) for path in self.checkpoint.shards)

    def _shard(self, path: Path, taken: dict[str, list[Unit]]) -> Shard:
        units: list[Unit] = []
        copies: list[Copy] = []
        specs: list[Spec] = []
        for name, entry in self.checkpoint.entries.items():
            if entry.path != path:
                continue
            if name in taken:
                units += taken[name]
                for unit in taken[name]:
                    specs += container.specs(unit.module, unit.how, unit.source.shape)
            elif name in self.replaced:
                copies += self.replaced[name]
                specs += [Spec(c.name, entry.dtype, (c.nbytes // entry.dtype.carrier.itemsize,)) for c in self.replaced[name]]
            else:
                copies.append(Copy(name, name, entry.nbytes))
                specs.append(Spec(name, entry.dtype, entry.shape))
        metadata = {"format": "pt"} | self.checkpoint.metadata[path.name]
        return Shard(path.name, tuple(units), tuple(copies), tuple(specs), metadata, layout(specs, metadata))

    def config(self, resolved: Resolved) -> dict[str, Any]:
        """The quantization_config: groups of equal linear schemes, and every other linear module by exact name."""
        groups: dict[tuple[LinearScheme, str], list[str]] = {}
        for unit in self.units:
            groups.setdefault((replace(unit.linear, weight=unit.how.scheme), unit.how.format), []).append(unit.module)
        names = [u.module for u in self.units]
        inside = set(names)
        ignore = [a.module.name for a in resolved.assignments if a.module.kind == "Linear" and a.module.name not in inside
                  and a.module.experts is None]  # fmt: skip
        heads = [head for a in resolved.assignments if (head := a.module.tied) is not None and head not in ignore]
        ignore += [head for head in heads if "embed" not in head and head not in inside]
        listed = [(linear, fmt, members) for (linear, fmt), members in groups.items()]
        return container.quantization_config(listed, [*names, *ignore], ignore)


def _refuse_quantized(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    method = config.get("quantization_config", {}) or {}
    if method:
        raise InputError(
            "the model is quantized already", where=checkpoint.root,
            got=f"quant_method {method.get('quant_method', 'unknown')}", wanted="an unquantized BF16, FP16 or FP32 model",
            remedy="start from its unquantized parent; a second rounding only adds loss",
        )  # fmt: skip


def _others(checkpoint: Checkpoint, found: Sequence[Module]) -> list[str]:
    matrices = {module.tensor for module in found}
    return [name.rsplit(".", 1)[0] for name in checkpoint.entries if name not in matrices]


def _why_nothing(resolved: Resolved) -> str:
    reasons: dict[str, int] = {}
    for assignment in resolved.kept:
        reasons[assignment.why] = reasons.get(assignment.why, 0) + 1
    return "; ".join(f"{count} × {why}" for why, count in reasons.items()) or "no matrices in the checkpoint"


def _kept(checkpoint: Checkpoint, resolved: Resolved, builder: _Builder) -> dict[str, tuple[int, int]]:
    """Why tensors stay as they are: reason to (tensors, bytes)."""
    quantized = {unit.source.tensor for unit in builder.units}
    reasons = {a.module.tensor: a.why for a in resolved.kept}
    kept: dict[str, tuple[int, int]] = {}
    for name, entry in checkpoint.entries.items():
        if name not in quantized:
            why = reasons.get(name, "asked to keep" if name in {m.module.tensor for m in resolved.quantized} else "not a matrix")
            count, size = kept.get(why, (0, 0))
            kept[why] = (count + 1, size + entry.nbytes)
    return kept


def _warnings(checkpoint: Checkpoint, resolved: Resolved) -> list[str]:
    found = [f"{path} holds weights in another format; it is not copied" for path in checkpoint.foreign_weights]
    quantized = {a.module.name for a in resolved.quantized}
    unknown = [name for name in resolved.unknown if name in quantized]
    if unknown:
        found.append(f"{len(unknown)} quantized layers have names that no rule knows, such as {unknown[0]}")
    return found


def _index(shards: Sequence[Shard]) -> dict[str, Any]:
    sizes = [size for shard in shards for _, size in shard.layout.offsets.values()]
    names = {spec.name: shard.name for shard in shards for spec in shard.specs}
    return {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(names.items()))}


def index_bytes(index: dict[str, Any]) -> bytes:
    return (json.dumps(index, indent=2) + "\n").encode()
