"""Before a byte is written: what will be quantized, kept and copied, and how large the result will be.

Everything that can be refused is refused here: unknown names, patterns without matches, fused siblings that
disagree, widths that no group divides, sources that are quantized already. The plan holds the exact layout of
every output shard, so its forecast is the size to the byte (the record and the model card, whose numbers are
not known yet, come on top and are counted apart).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.containers import compressed_tensors as container
from narrowcast.errors import InputError, UsageError
from narrowcast.jobs.plan import CARD, RECORD, Copy, Plan, Shard, Unit, source_identity
from narrowcast.jobs.stream import Slice
from narrowcast.model.fused import fused_groups
from narrowcast.model.keeping import keep_flags
from narrowcast.model.modules import Module, modules
from narrowcast.model.recipe import Recipe
from narrowcast.model.resolve import Assignment, Resolved, Target, resolve
from narrowcast.model.roles import is_quantized_piece, quantization_config
from narrowcast.numbers.formats import Format, formats
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.config_text import edit_config
from narrowcast.store.folder import some
from narrowcast.store.output import needs_index
from narrowcast.store.places import place
from narrowcast.store.writer import Spec, layout
from narrowcast.tensors.presets import LinearScheme, presets
from narrowcast.tensors.scaling import under_rule
from narrowcast.tensors.schemes import schemes

SOURCES = ("bf16", "fp16", "fp32")


def make_plan(
    checkpoint: Checkpoint, model: str, out: Path, recipe: Recipe, title: str, *,
    strict: bool = False, nonfinite: str = "refuse", workers: int | None = None,
) -> Plan:  # fmt: skip
    """Settle a job."""
    config = checkpoint.config or {}
    if checkpoint.config_bytes is None:
        raise UsageError(
            "one file is no model to quantize: the result needs its config.json too", where=model,
            remedy=f"give its directory, {checkpoint.root}",
        )  # fmt: skip
    _refuse_quantized(checkpoint, config)
    found = modules(checkpoint.entries, config)
    resolved = resolve(recipe, found, others=_others(checkpoint, found))
    builder = _Builder(checkpoint, strict, found)
    for assignment in resolved.assignments:
        if assignment.target is not None:
            builder.add(assignment, assignment.target)
    builder.refuse_indivisible()
    if not builder.units:
        raise UsageError(
            "nothing to quantize", where=model, got=_why_nothing(resolved), wanted="at least one linear layer"
        )
    shards = builder.shards()
    text = edit_config(checkpoint.config_bytes, "quantization_config", builder.config(resolved))
    index = _index(shards) if needs_index([shard.name for shard in shards]) else None
    weights = sum(s.layout.size for s in shards)
    side_files = _side_files(checkpoint)
    side = sum((checkpoint.root / p).stat().st_size for p, _ in side_files)
    index_size = len(index_bytes(index)) if index is not None else 0
    params = {name: int(np.prod(entry.shape, dtype=np.int64)) for name, entry in checkpoint.entries.items()}
    taken = {unit.source.tensor for unit in builder.units}
    stored = sum(size for s in shards for spec in s.specs for _, size in [s.layout.offsets[spec.name]])
    total_bytes = sum(entry.nbytes for entry in checkpoint.entries.values())
    return Plan(
        model=model, root=checkpoint.root, source=source_identity(checkpoint), out=out, place=place(out),
        title=title, container=container.NAME, recipe=recipe, resolved=resolved, shards=shards,
        config=text, index=index, side_files=side_files, fallbacks=tuple(builder.fallbacks),
        warnings=tuple(_warnings(checkpoint, resolved)),
        coverage_params=sum(params[t] for t in taken) / max(sum(params.values()), 1),
        coverage_bytes=sum(checkpoint.entries[t].nbytes for t in taken) / max(total_bytes, 1),
        bits_per_weight=8 * stored / max(sum(params.values()), 1),
        source_bytes=sum(p.stat().st_size for p in checkpoint.shards),
        forecast_bytes=weights + side + len(text) + index_size,
        workers=workers, nonfinite=nonfinite, kept=_kept(checkpoint, resolved, builder),
    )  # fmt: skip


class _Builder:
    """Turns assignments into units, copies and specs, shard by shard."""

    def __init__(self, checkpoint: Checkpoint, strict: bool, modules: Sequence[Module]) -> None:
        self.checkpoint, self.strict, self.modules = checkpoint, strict, modules
        self.units: list[Unit] = []
        self.fallbacks: list[str] = []
        self.indivisible: dict[
            tuple[str, int], list[tuple[str, int]]
        ] = {}  # (scheme, multiple) to (module, width)
        self.replaced: dict[
            str, list[Copy]
        ] = {}  # source tensors that are not copied whole, with what replaces them

    def add(self, assignment: Assignment, target: Target) -> None:
        module = assignment.module
        entry = self.checkpoint.entries[module.tensor]
        if entry.dtype.format not in SOURCES:
            raise InputError(
                f"{module.name} cannot be quantized from {entry.dtype.name}", where=module.tensor,
                wanted="BF16, F16 or F32",
                remedy=f"{keep_flags(self.modules, [module.name])}, or start from a parent in one of these",
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
            where=module.tensor, remedy=f"keep it: {keep_flags(self.modules, [module.name])}",
        )  # fmt: skip

    def _unit(
        self, name: str, source: Slice, module: Module, target: Target, dtype: Format, carrier: np.dtype[Any]
    ) -> None:
        linear = self._linear(target, name, source.shape[1])
        if target.rule is not None:
            linear = replace(linear, weight=under_rule(linear.weight, target.rule))
        how = container.spelling(linear, dtype)
        if source.shape[1] % how.width_multiple:
            self.indivisible.setdefault((linear.weight.name, how.width_multiple), []).append(
                (module.name, source.shape[1])
            )
            return
        self.units.append(Unit(name, source, str(module.role), dtype, carrier, how, linear))

    def refuse_indivisible(self) -> None:
        """Name every layer whose width the scheme cannot divide, all at once."""
        for (scheme, multiple), layers in self.indivisible.items():
            names = list(dict.fromkeys(name for name, _ in layers))
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            widths = sorted({width for _, width in layers})
            raise UsageError(
                f"{len(names)} {'layer has' if len(names) == 1 else 'layers have'} a width that {scheme} cannot divide",
                where=", ".join(names[:3]) + more, got=f"{', '.join(map(str, widths))} columns",
                wanted=f"a multiple of {multiple}",
                remedy=f"keep {'it' if len(names) == 1 else 'them'}: {keep_flags(self.modules, names)}",
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
                self.fallbacks.append(
                    f"{name}: groups of {smaller}, because {group} does not divide {k} columns"
                )
                return preset.with_group(smaller).linear
        return preset.with_group(32).linear  # refused with what would do: a multiple of the smallest group

    def _split_bias(self, module: Module) -> None:
        """The stacked bias [E, out] follows its experts, under the names of their modules."""
        if module.bias is None:
            return
        entry = self.checkpoint.entries[module.bias]
        item = entry.dtype.carrier.itemsize
        copies = []
        for split in module.splits():
            part = split.part
            size = len(range(part.start, part.stop, part.step)) * item
            channels = slice(part.start, part.stop, part.step)
            copies.append(Copy(f"{split.name}.bias", module.bias, size, split.expert, channels))
        self.replaced[module.bias] = copies

    def shards(self) -> tuple[Shard, ...]:
        group_of = {
            name: i for i, names in enumerate(fused_groups(u.module for u in self.units)) for name in names
        }
        self.units = [replace(unit, group=group_of[unit.module]) for unit in self.units]
        taken: dict[str, list[Unit]] = {}
        for unit in self.units:
            taken.setdefault(unit.source.tensor, []).append(unit)
        made: dict[str, str] = {}  # tensors of the result, with the source tensors that they come from
        return tuple(self._shard(path, taken, made) for path in self.checkpoint.shards)

    def _shard(self, path: Path, taken: dict[str, list[Unit]], made: dict[str, str]) -> Shard:
        units: list[Unit] = []
        copies: list[Copy] = []
        specs: list[Spec] = []
        for name, entry in self.checkpoint.entries.items():
            if entry.path != path:
                continue
            if name in taken:
                units += taken[name]
                becomes = [s for u in taken[name] for s in container.specs(u.module, u.how, u.source.shape)]
            elif name in self.replaced:
                copies += self.replaced[name]
                becomes = [
                    Spec(c.name, entry.dtype, (c.nbytes // entry.dtype.carrier.itemsize,))
                    for c in self.replaced[name]
                ]
            else:
                copies.append(Copy(name, name, entry.nbytes))
                becomes = [Spec(name, entry.dtype, entry.shape)]
            for spec in becomes:
                self._claim(spec.name, name, made)
            specs += becomes
        metadata = {"format": "pt"} | self.checkpoint.metadata[path.name]
        return Shard(path.name, tuple(units), tuple(copies), tuple(specs), metadata, layout(specs, metadata))

    def _claim(self, name: str, origin: str, made: dict[str, str]) -> None:
        """A name of the result belongs to one tensor, in whichever shards two that would have it lie."""
        if name in made:
            raise InputError(
                f"two tensors of the result would be called {name}", where=self.checkpoint.root,
                got=f"one from {made[name]} and one from {origin}",
                remedy=f"remove or rename the one that the model does not use, or keep both: "
                f"{keep_flags(self.modules, self._owners(made[name], origin))}",
            )  # fmt: skip
        made[name] = origin

    def _owners(self, *tensors: str) -> list[str]:
        return [module.name for module in self.modules if module.tensor in tensors]

    def config(self, resolved: Resolved) -> dict[str, Any]:
        """The quantization_config: groups of equal linear schemes, and every other linear module by exact name."""
        groups: dict[tuple[LinearScheme, str], list[str]] = {}
        for unit in self.units:
            groups.setdefault((unit.linear, unit.how.format), []).append(unit.module)
        names = [u.module for u in self.units]
        inside = set(names)
        linear = [
            a.module for a in resolved.assignments if a.module.kind == "Linear" and a.module.experts is None
        ]
        ignore = [module.name for module in linear if module.name not in inside]
        # Engines build the modules of stacked experts themselves, so a kept stack is ignored by its path.
        stacks = [a.module.name for a in resolved.kept if a.module.experts is not None]
        ignore += dict.fromkeys(f"re:^{re.escape(name.rsplit('.', 1)[0])}\\..*" for name in stacks)
        heads = [
            head for a in resolved.assignments if (head := a.module.tied) is not None and head not in ignore
        ]
        ignore += [head for head in heads if "embed" not in head and head not in inside]
        listed = [(linear, fmt, members) for (linear, fmt), members in groups.items()]
        return container.quantization_config(listed, [*names, *ignore], ignore)


def _refuse_quantized(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    method = quantization_config(config)
    pieces = [name for name in checkpoint.entries if is_quantized_piece(name)]
    if method or pieces:
        got = f"quant_method {method.get('quant_method', 'unknown')}" if method else some(pieces, 3)
        raise InputError(
            "the model is quantized already", where=checkpoint.root, got=got,
            wanted="a BF16, FP16 or FP32 model",
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
            why = reasons.get(name, "not a matrix")
            count, size = kept.get(why, (0, 0))
            kept[why] = (count + 1, size + entry.nbytes)
    return kept


def _warnings(checkpoint: Checkpoint, resolved: Resolved) -> list[str]:
    found = [
        f"{path} holds weights in another format; it is not copied" for path in checkpoint.foreign_weights
    ]
    if any(str(name) == RECORD for name in checkpoint.side_files):
        found.append(f"{RECORD} of the source is not copied: this run writes its own")
    quantized = {a.module.name for a in resolved.quantized}
    unknown = [name for name in resolved.unknown if name in quantized]
    if unknown:
        found.append(f"{len(unknown)} quantized layers have names that no rule knows, such as {unknown[0]}")
    return found


def _side_files(checkpoint: Checkpoint) -> tuple[tuple[Path, Path], ...]:
    """What travels along, with its name in the result, where the record and the card are this run's."""
    names = {str(name) for name in checkpoint.side_files}
    card = "README.source.md"
    while card in names:
        card = card.replace(".md", ".source.md")
    return tuple(
        (name, Path(card) if str(name) == CARD else name)
        for name in checkpoint.side_files
        if str(name) != RECORD
    )


def _index(shards: Sequence[Shard]) -> dict[str, Any]:
    sizes = [size for shard in shards for _, size in shard.layout.offsets.values()]
    names = {spec.name: shard.name for shard in shards for spec in shard.specs}
    return {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(names.items()))}


def index_bytes(index: dict[str, Any]) -> bytes:
    return (json.dumps(index, indent=2) + "\n").encode()
