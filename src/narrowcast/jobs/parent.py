"""What a second rounding costs, measured against the unquantized parent.

    first    the source against the parent           what its quantization lost already
    second   the result against the source           what this conversion rounded
    both     the result against the parent           what a user of the result gets
    straight the parent under the result's scheme    what starting from the parent would have lost

Each is an SQNR over the matrices that were rounded again, by role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.spelling import Tensors
from narrowcast.errors import UsageError
from narrowcast.jobs.coded import Coded, Logical, Opened, open_coded
from narrowcast.jobs.opening import open_model
from narrowcast.jobs.plan import Plan, Unit
from narrowcast.jobs.scanning import ranges, scan_units
from narrowcast.jobs.shards import backend_of
from narrowcast.jobs.stream import Silent, Slice, Workers
from narrowcast.kernels import Rows
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import FP32, Format, formats
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.metrics import Errors
from narrowcast.tensors.scaling import outer_scale

NOTHING = Errors()


@dataclass(frozen=True)
class Loss:
    """Sums of the four comparisons; see the module docstring."""

    first: Errors = NOTHING
    second: Errors = NOTHING
    both: Errors = NOTHING
    straight: Errors = NOTHING

    def __add__(self, other: Loss) -> Loss:
        return Loss(*(getattr(self, f) + getattr(other, f) for f in ("first", "second", "both", "straight")))

    def to_json(self) -> dict[str, float]:
        return {name: round(getattr(self, name).sqnr, 3) for name in ("first", "second", "both", "straight")}


def rounded_again(plan: Plan) -> list[Unit]:
    """The matrices that a conversion rounds a second time."""
    return [unit for unit in plan.units if unit.step == "quantize" and isinstance(unit.source, Coded)]


def sources(opened: Opened) -> Mapping[str, tuple[Slice, Format]]:
    """Every output matrix of an unquantized model by name: where it lies and its dtype."""
    found: dict[str, tuple[Slice, Format]] = {}
    for module in opened.modules:
        entry = opened.entries[module.tensor]
        if isinstance(entry, Logical) or entry.dtype.format not in ("bf16", "fp16", "fp32"):
            continue
        n, k = module.out_in
        fmt = formats[entry.dtype.format]
        if module.experts is None:
            found[module.name] = Slice(module.tensor, (n, k), module.orientation), fmt
        for split in module.splits():
            part = split.part
            rows = len(range(part.start, part.stop, part.step))
            found[split.name] = Slice(module.tensor, (rows, k), module.orientation, split.expert, part), fmt
    return found


def losses(plan: Plan, parent: str | Path, out: Path) -> dict[str, Loss]:
    """The four comparisons by role; UsageError where the parent does not have a matrix of the same shape."""
    units = rounded_again(plan)
    found: dict[str, Loss] = {}
    with (
        open_model(plan.root) as source,
        open_model(parent) as given,
        open_model(out) as result,
        Workers(plan.workers) as pool,
    ):
        matrices = _originals(units, given, parent)
        outers = _outers(units, matrices, given, pool)
        for unit in units:
            matrix, fmt = matrices[unit.module]
            work = _Comparison(unit, matrix, fmt, source, given, result, outers.get(unit.group))
            with pool.map(work.rows, ranges(unit)) as parts:
                for part in parts:
                    found[unit.role] = found.get(unit.role, Loss()) + part
    return found


def check_parent(plan: Plan) -> None:
    """Refuse a parent that cannot be compared with before anything is written."""
    units = rounded_again(plan)
    if plan.parent is not None and units:
        with open_model(plan.parent) as given:
            _originals(units, given, plan.parent)


def _originals(
    units: list[Unit], given: Checkpoint, parent: str | Path
) -> Mapping[str, tuple[Slice, Format]]:
    """The parent's matrices by name; UsageError where one of ``units`` is missing or has another shape."""
    matrices = sources(open_coded(given))
    for unit in units:
        origin = matrices.get(unit.module)
        if origin is None or origin[0].shape != unit.source.shape:
            raise UsageError(
                f"the parent has no plain {unit.module} of this shape", where=parent,
                got=origin[0].shape if origin else "no floats of that name", wanted=unit.source.shape,
                remedy="--parent takes the model from before its quantization; leave it out to compare with nothing",
            )  # fmt: skip
    return matrices


def _outers(
    units: list[Unit], matrices: Mapping[str, tuple[Slice, Format]], parent: Checkpoint, pool: Workers
) -> dict[int, float]:
    """Outer scales that the parent's fused groups would have got."""
    amax: dict[int, float] = {}
    level = {unit.group: unit for unit in units if unit.how.scheme.outer is not None}
    for unit in units:
        if unit.group in level:
            matrix, fmt = matrices[unit.module]
            carrier = parent.entries[matrix.tensor].dtype.carrier
            wide = _as_source(unit, matrix, fmt, carrier)
            seen = scan_units(parent, [wide], pool, backend_of(wide)[0], Silent())[unit.module].amax
            amax[unit.group] = max(amax.get(unit.group, 0.0), seen)
    return {
        group: float(outer_scale(np.full((1, 1), amax[group], np.float32), unit.how.scheme, FP32)[0, 0])
        for group, unit in level.items()
    }


def _as_source(unit: Unit, matrix: Slice, fmt: Format, carrier: np.dtype[Any]) -> Unit:
    return replace(unit, source=matrix, dtype=fmt, carrier=carrier)


@dataclass(frozen=True)
class _Comparison:
    unit: Unit
    matrix: Slice
    fmt: Format
    source: Checkpoint
    parent: Checkpoint
    result: Tensors
    outer: float | None

    def rows(self, span: tuple[int, int]) -> Loss:
        i, j = span
        unit, how = self.unit, self.unit.how
        carrier = self.parent.entries[self.matrix.tensor].dtype.carrier
        stored = self.matrix.read(self.parent, carrier, i, j)
        truth = widen(stored, self.fmt)
        before = unit.source.read(self.source, np.dtype("<f4"), i, j)
        backend = backend_of(unit)[0]
        back = how.read(self.result, unit.place, unit.source.shape, i, j)
        after = self._values(back, how.outer(self.result, unit.place, unit.source.shape))
        fresh = backend.quantize(truth, FP32, how.scheme, how.packing, self.outer)
        straight = self._values(fresh, self.outer)
        return Loss(
            difference(truth, before),
            difference(before, after),
            difference(truth, after),
            difference(truth, straight),
        )

    def _values(self, rows: Rows, outer: float | None) -> NDArray[np.float32]:
        how = self.unit.how
        backend = backend_of(self.unit)[0]
        values: NDArray[np.float32] = backend.dequantize(
            rows, how.scheme, how.packing, self.unit.source.shape[1], FP32, outer
        )
        return values


def difference(x: NDArray[np.float32], y: NDArray[np.float32]) -> Errors:
    """Energies of x and of x - y, in float64."""
    noise = np.square(x.astype(np.float64) - y).sum()
    return Errors(x.size, float(np.square(x, dtype=np.float64).sum()), float(noise))
