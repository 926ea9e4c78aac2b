"""From assignments to a layout: units, copies and specs, shard by shard.

A module becomes one unit, or one for each projection of each expert of a stack. Its source may be plain floats or
quantized already; its target a linear scheme in the output's container, or plain floats. The step follows from both:

    plain      → scheme            quantize
    quantized  → floats            decode
    quantized  → same storage      recode, nothing but the spelling changes
    quantized  → other scheme      recode where values can move without rounding, quantize (again) when that was
    asked for

The result keeps the source's shards: what a source tensor becomes stays in the file that it was in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.containers.container import Container
from narrowcast.containers.plain import spell as spell_plain
from narrowcast.containers.spelling import Array, Piece, Place, Spelling
from narrowcast.errors import InputError, UsageError
from narrowcast.jobs import biases
from narrowcast.jobs.calibrated import Calibration, refusal
from narrowcast.jobs.coded import Coded, Logical, Opened
from narrowcast.jobs.plan import Copy, Shard, Step, Unit
from narrowcast.jobs.stream import Floats, Slice
from narrowcast.model.fused import fused_groups
from narrowcast.model.keeping import keep_flags
from narrowcast.model.modules import Module
from narrowcast.model.resolve import Assignment, Target
from narrowcast.model.roles import Role
from narrowcast.numbers.formats import FP32, Format, formats
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Entry, matrix_shape
from narrowcast.store.writer import Spec, layout
from narrowcast.tensors.presets import GROUPS, LinearScheme, presets
from narrowcast.tensors.recode import possible
from narrowcast.tensors.scaling import under_rule
from narrowcast.tensors.schemes import schemes
from narrowcast.tensors.storage import same_storage

SOURCES = ("bf16", "fp16", "fp32")
# Pieces that no code or scale of another spelling can take over.
IMMOVABLE: Mapping[Piece, str] = {
    "order": "its columns are shuffled over the groups",
    "pre_scale": "its input is multiplied by a scale for each column",
    "offset": "its zero points are floats",
}
ONE_SHARD = "model.safetensors"  # of a source that is one file of another format
# Pieces that some containers have no tensor for, and what they are.
UNWRITTEN: Mapping[str, str] = {
    "input": "scales of inputs",
    "input_zero": "zero points of inputs",
    "recast": "scales of the eight-bit weights that an engine makes",
}


class Builder:
    """Collects the units of a job and lays them out in shards of ``container``."""

    def __init__(
        self, opened: Opened, container: Container, *, strict: bool = False, requantize: bool = False,
        calibration: Calibration | None = None,
    ) -> None:  # fmt: skip
        self.opened, self.container, self.strict, self.requantize = opened, container, strict, requantize
        self.calibration = calibration
        self.checkpoint, self.modules = opened.checkpoint, opened.modules
        self.units: list[Unit] = []
        self.fallbacks: list[str] = []
        self.carried: set[str] = set()  # modules that keep their scheme, which no pattern is asked about
        # (scheme, multiple, axis) to (module, size)
        self.indivisible: dict[tuple[str, int, str], list[tuple[str, int]]] = {}
        self.replaced: dict[str, list[Copy]] = {}  # source tensors that are not copied whole
        self.widths: tuple[int, ...] = ()  # of all that is quantized, for containers of one group size
        self.values: dict[Path, list[tuple[str, Array]]] = {}
        self.left_out: dict[str, list[str]] = {}  # piece to modules

    def add(self, assignment: Assignment, target: Target) -> None:
        """Quantize a module to a recipe's target."""
        module = assignment.module
        for name, source, dtype in self._matrices(module):
            linear = self._linear(target, name, self._together(module, source.shape[1]))
            if target.rule is not None:
                linear = replace(linear, weight=under_rule(linear.weight, target.rule))
            self._unit(name, source, module, linear, dtype)
        self._split_bias(module)

    def carry(self, module: Module) -> None:
        """Move a quantized module in its own scheme."""
        self.carried.add(module.name)
        for name, source in self.opened.coded(module):
            self._unit(name, source, module, source.stored.linear, source.how.scheme.inner.format)
        self._split_bias(module)

    def decode(self, module: Module, out: Format) -> None:
        """Decode a quantized module to plain floats, under the name and in the orientation of its family."""
        logical = self.opened.entries[module.tensor]
        assert isinstance(logical, Logical)
        suffix = "" if logical.stored.experts is not None else ".weight"
        how = spell_plain(out, suffix, module.orientation)
        if module.problem is not None and logical.stored.experts is not None:
            self.fallbacks.append(f"{module.name}: {module.problem}; written {list(logical.shape)}")
        for source in self.opened.whole(logical):
            name = module.name if source.place.experts is None else f"{module.name}[{source.place.expert}]"
            self.units.append(
                Unit(name, source, str(module.role), FP32, np.dtype("<f4"), how, source.place, None, "decode")
            )

    def cast(self, entry: Entry, out: Format) -> None:
        """Bring a tensor of floats to another dtype."""
        rows, columns = matrix_shape(entry)
        how = spell_plain(out, "", shape=entry.shape)
        dtype = formats[str(entry.dtype.format)]
        source = Floats(entry.name, (rows, columns))
        place = Place(entry.name, rows)
        self.units.append(
            Unit(entry.name, source, "other", dtype, entry.dtype.carrier, how, place, None, "decode")
        )

    def _matrices(self, module: Module) -> list[tuple[str, Slice | Coded, Format]]:
        """The output matrices of a module with their sources and the dtype of the source's values."""
        entry = self.opened.entries[module.tensor]
        if isinstance(entry, Logical):
            return [(name, coded, FP32) for name, coded in self.opened.coded(module)]
        if entry.dtype.format not in SOURCES:
            raise InputError(
                f"{module.name} cannot be quantized from {entry.dtype.name}", where=module.tensor,
                wanted="BF16, F16 or F32",
                remedy=f"{keep_flags(self.modules, [module.name])}, or start from a parent in one of these",
            )  # fmt: skip
        dtype = formats[entry.dtype.format]
        n, k = module.out_in
        if module.experts is None:
            if module.orientation == "in_out":
                self._refuse_conv1d(module)
            return [(module.name, Slice(module.tensor, (n, k), module.orientation), dtype)]
        found: list[tuple[str, Slice | Coded, Format]] = []
        for split in module.splits():
            part = split.part
            rows = len(range(part.start, part.stop, part.step))
            found.append(
                (split.name, Slice(module.tensor, (rows, k), module.orientation, split.expert, part), dtype)
            )
        return found

    def _refuse_conv1d(self, module: Module) -> None:
        raise UsageError(
            f"{module.name} is stored [in, out] (Conv1D), which {self.container.name} cannot express",
            where=module.tensor, remedy=f"keep it: {keep_flags(self.modules, [module.name])}",
        )  # fmt: skip

    def _unit(
        self, name: str, source: Slice | Coded, module: Module, linear: LinearScheme, dtype: Format
    ) -> None:
        assert self.container.spelling is not None
        how = self.container.spelling(linear, dtype)
        for size, multiple, axis in zip(source.shape, how.multiples, ("height", "width"), strict=True):
            if size % multiple:
                self.indivisible.setdefault((linear.weight.name, multiple, axis), []).append(
                    (module.name, size)
                )
                return
        step: Step = "quantize"
        statics: dict[str, Array] = {}
        carrier: np.dtype[Any] = np.dtype("<f4")
        if isinstance(source, Coded):
            how = self._ordered(source, how)
            step = self._step(name, source, how)
            statics = self._moved(name, source, how) if step == "recode" else {}
            if step == "quantize" and linear.calibrated:
                raise UsageError(
                    f"{name} takes an input scale that was found for its old weight", where=self.checkpoint.root,
                    remedy="--preset with a scheme whose inputs are quantized on the fly",
                )  # fmt: skip
            dtype = FP32
        else:
            if linear.input is not None and linear.calibrated and self.calibration is not None:
                statics["input"] = self.calibration.input_scale(name, linear.input, self.checkpoint.root)
            carrier = DTYPES[{"bf16": "BF16", "fp16": "F16", "fp32": "F32"}[dtype.name]].carrier
        absent = {part.piece for part in how.parts} - statics.keys()
        how = how.without(
            *(p.piece for p in how.parts if p.piece in absent and (p.optional or p.piece == "input"))
        )
        if "pre_scale" in absent and how.part("pre_scale") is not None:
            statics["pre_scale"] = np.ones(source.shape[1], np.float32)  # multiplies by nothing
        if "recast" in absent and how.part("recast") is not None:
            raise UsageError(
                f"{name} has no scale for its weight in eight bits, which {how.format} asks for",
                where=self.checkpoint.root, remedy="--preset w4a16",
            )  # fmt: skip
        # Its own tensors, until ``shards`` knows what the container stacks.
        place = Place(name, source.shape[0])
        self.units.append(
            Unit(name, source, str(module.role), dtype, carrier, how, place, linear, step, statics)
        )

    def _moved(self, name: str, source: Coded, how: Spelling) -> dict[str, Array]:
        """What goes along with codes that are not rounded again; what has no place in ``how`` is noted."""
        statics = source.how.statics(self.checkpoint, source.place, source.shape)
        for piece in statics.keys() & UNWRITTEN.keys() - {part.piece for part in how.parts}:
            self.left_out.setdefault(piece, []).append(name)
        return statics

    def _ordered(self, source: Coded, how: Spelling) -> Spelling:
        """The spelling that keeps a source's order of columns, where codes move and the container can say it."""
        order = source.order(self.checkpoint)
        if order is None or how.ordered is None or possible(source.how.scheme, how.scheme) is not None:
            return how
        return how.ordered(order)

    def _step(self, name: str, source: Coded, how: Spelling) -> Step:
        """How a quantized matrix gets into another spelling; UsageError where that would round and nobody asked."""
        stuck = [
            piece for piece in IMMOVABLE if source.how.part(piece) is not None and how.part(piece) is None
        ]
        reason = IMMOVABLE[stuck[0]] if stuck else None
        if reason is None and not same_storage(source.how.scheme, how.scheme):
            reason = possible(source.how.scheme, how.scheme)
        if reason is None:
            return "recode"
        if not self.requantize:
            raise UsageError(
                f"{name} cannot become {how.scheme.name} without a second rounding",
                where=self.checkpoint.root, got=reason,
                remedy="--requantize rounds again and says what that cost; "
                "starting from the unquantized parent costs less",
            )  # fmt: skip
        return "quantize"

    def refuse_indivisible(self) -> None:
        """Name every layer whose width the scheme cannot divide, all at once."""
        for (scheme, multiple, axis), layers in self.indivisible.items():
            names = list(dict.fromkeys(name for name, _ in layers))
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            sizes = ", ".join(map(str, sorted({size for _, size in layers})))
            have = "layer has" if len(names) == 1 else "layers have"
            raise UsageError(
                f"{len(names)} {have} a {axis} that {scheme} cannot divide", where=", ".join(names[:3]) + more,
                got=f"{sizes} {'columns' if axis == 'width' else 'rows'}",
                wanted=f"a multiple of {multiple}",
                remedy=f"keep {'it' if len(names) == 1 else 'them'}: {keep_flags(self.modules, names)}"
                if not self.carried.issuperset(names)
                else "choose another container: compressed-tensors and plain hold every width",
            )  # fmt: skip

    def _together(self, module: Module, k: int) -> tuple[int, ...]:
        """The widths that must have one group: of everything where the container has one, of a layer's experts, which
        engines run under one scheme, or of the matrix alone."""
        if self.container.one_group and self.widths:
            return self.widths
        if module.role is not Role.EXPERT:
            return (k,)
        return tuple(self._experts[module.name.partition(".experts")[0]])

    @cached_property
    def _experts(self) -> dict[str, dict[int, None]]:
        """The widths of each layer's routed experts."""
        found: dict[str, dict[int, None]] = {}
        for module in self.modules:
            if module.role is Role.EXPERT:
                found.setdefault(module.name.partition(".experts")[0], {})[module.out_in[1]] = None
        return found

    def _linear(self, target: Target, name: str, widths: tuple[int, ...]) -> LinearScheme:
        """The linear scheme for matrices of these widths: group 128 falls back to 64, then 32, and says so."""
        if target.kind == "scheme":
            return LinearScheme(schemes[target.name])
        preset = presets[target.name]
        if preset.calibrated:
            if self.calibration is None:
                raise refusal(preset)
            self.calibration.ask(preset)
        fitting = preset.fitting(widths)
        if fitting is preset:
            return preset.linear
        if fitting is None:
            return preset.with_group(
                GROUPS[-1]
            ).linear  # refused with what would do: a multiple of the smallest group
        group, smaller = preset.linear.weight.group, fitting.linear.weight.group
        odd = next(w for w in widths if w % group)
        if self.strict:
            raise UsageError(
                f"{name} has {odd} columns, which groups of {group} do not divide",
                remedy=f"without --strict this layer takes groups of {smaller}",
            )  # fmt: skip
        self.fallbacks.append(f"{name}: groups of {smaller}, because {group} does not divide {odd} columns")
        return fitting.linear

    def _split_bias(self, module: Module) -> None:
        """The stacked bias [E, out] follows its experts, under the names of their modules."""
        if module.bias is None or module.experts is None:
            return
        self.replaced[module.bias] = biases.split(module, self.checkpoint.entries[module.bias])

    def shards(self) -> tuple[Shard, ...]:
        """Every unit at its place, and every shard with its layout."""
        for piece, names in self.left_out.items():
            self.fallbacks.append(
                f"{names[0]}: {self.container.name} has no {UNWRITTEN[piece]}; {len(names)} were left out"
            )
        group_of = {
            name: i for i, names in enumerate(fused_groups(u.module for u in self.units)) for name in names
        }
        config = self.checkpoint.config or {}
        shapes = {u.module: u.source.shape for u in self.units if u.step != "decode"}
        places = self.container.places(shapes, config)
        self.units = [
            replace(unit, group=group_of[unit.module], place=places.get(unit.module, unit.place))
            for unit in self.units
        ]
        self.replaced = biases.join(self.units, self.replaced, self.checkpoint.entries)
        taken: dict[str, list[Unit]] = {}
        homes: dict[str, Path] = {}  # a stack that is put together lies where its first matrix lay
        for unit in self.units:
            taken.setdefault(unit.source.tensor, []).append(unit)
            homes.setdefault(unit.place.stem, self.opened.entries[unit.source.tensor].path)
        made: dict[str, str] = {}  # tensors of the result, with the source tensors that they come from
        return tuple(self._shard(path, taken, homes, made) for path in self.checkpoint.shards)

    def _shard(
        self, path: Path, taken: dict[str, list[Unit]], homes: dict[str, Path], made: dict[str, str]
    ) -> Shard:
        units: list[Unit] = []
        copies: list[Copy] = []
        specs: dict[str, Spec] = {}
        for name, entry in self.opened.entries.items():
            mine = [unit for unit in taken.get(name, ()) if homes[unit.place.stem] == path]
            units += mine
            if name in taken:
                becomes = [s for u in mine for s in u.how.specs(u.place, u.source.shape[1])]
            elif entry.path != path:
                continue
            elif name in self.replaced and isinstance(entry, Entry):
                copies += self.replaced[name]
                becomes = [Spec(copy.name, entry.dtype, copy.shape) for copy in self.replaced[name]]
            elif isinstance(entry, Entry):
                copies.append(Copy(name, name, entry.nbytes, entry.shape))
                becomes = [Spec(name, entry.dtype, entry.shape)]
            else:
                raise self.undecided(name)
            stacked = any(unit.place.experts is not None for unit in mine)
            for spec in becomes:
                if not (stacked and specs.get(spec.name) == spec):
                    self._claim(spec, name, made)
                specs[spec.name] = spec
        values = self.values.get(path, [])
        for name, array in values:
            spec = Spec(name, _dtype(array), array.shape)
            self._claim(spec, name, made)
            specs[name] = spec
        kept = self.checkpoint.metadata[path.name].items()
        metadata = {"format": "pt"} | {k: v for k, v in kept if k not in self.opened.contents.metadata}
        ordered = tuple(specs.values())
        return Shard(
            path.name if path.suffix == ".safetensors" else ONE_SHARD,
            tuple(units),
            tuple(copies),
            tuple(values),
            ordered,
            metadata,
            layout(ordered, metadata),
        )

    def undecided(self, tensor: str) -> UsageError:
        """Why a quantized tensor goes nowhere: its names do not say which matrices it holds."""
        problem = next((module.problem for module in self.modules if module.tensor == tensor), None)
        own = self.opened.contents.container
        return UsageError(
            f"{tensor} is quantized, and cannot be taken apart", where=self.checkpoint.root,
            got=problem or "no matrix that a rule knows, or one without elements",
            remedy=f"--to {own} without a preset copies the checkpoint"
            + (", --to plain decodes it" if problem is not None else ""),
        )  # fmt: skip

    def _claim(self, spec: Spec, origin: str, made: dict[str, str]) -> None:
        """A name of the result belongs to one tensor, in whichever shards two that would have it lie."""
        if spec.name in made:
            raise InputError(
                f"two tensors of the result would be called {spec.name}", where=self.checkpoint.root,
                got=f"one from {made[spec.name]} and one from {origin}",
                remedy=f"remove or rename the one that the model does not use, or keep both: "
                f"{keep_flags(self.modules, self._owners(made[spec.name], origin))}",
            )  # fmt: skip
        made[spec.name] = origin

    def _owners(self, *tensors: str) -> list[str]:
        return [module.name for module in self.modules if module.tensor in tensors]


def _dtype(array: Array) -> Any:
    return next(row for row in DTYPES.values() if row.carrier == array.dtype and row.format == "fp32")
