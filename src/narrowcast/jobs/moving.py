"""Matrices that move without a second rounding: codes into another spelling or scheme, and values into floats.

    recode    codes and scales as they are, repacked; or the same values in another scheme, where each has its equal
    decode    round(decode(code) · Π scale), one rounding to the output dtype

What has no equal is counted and located, and never replaced unless that was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowcast.jobs.coded import Coded
from narrowcast.jobs.plan import Unit
from narrowcast.kernels import Rows
from narrowcast.kernels.reference.dequantize import narrow
from narrowcast.kernels.reference.rows import qtensor
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import FP16, Format
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.metrics import Errors
from narrowcast.tensors.packing import pack, unpack
from narrowcast.tensors.recode import plan_outer, recode, survey
from narrowcast.tensors.storage import same_storage

F32 = NDArray[np.float32]
SURVEY_ROWS = 1024  # rows that are looked at at once when an outer scale must be found


@dataclass(frozen=True)
class Moved:
    """A chunk in its new scheme, the elements that have no equal in it, and why."""

    rows: Rows
    lost: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Move:
    """How one matrix moves, with the outer scale of the result (as a multiplier) where it has one."""

    unit: Unit
    outer: float | None

    @property
    def source(self) -> Coded:
        assert isinstance(self.unit.source, Coded)
        return self.unit.source

    def rows(self, checkpoint: Checkpoint, start: int, stop: int) -> Moved:
        """Rows start:stop in the scheme and packing of the result."""
        found, how, target = self.source.rows(checkpoint, start, stop), self.source.how, self.unit.how
        k = self.source.shape[1]
        if same_storage(how.scheme, target.scheme):
            packed = found.packed
            if how.packing != target.packing:
                packed = pack(unpack(found.packed, how.packing, k), target.packing)
            return Moved(Rows(packed, found.scales, found.zero))
        q = qtensor(found, how.scheme, how.packing, k, self.source.outer(checkpoint))
        made = recode(q, target.scheme, self.outer)
        packed = pack(made.q.codes, target.packing)
        return Moved(Rows(packed, made.q.scales[0], made.q.zero), made.elements, made.reason)

    def check(self, checkpoint: Checkpoint, start: int, stop: int, back: Rows, outer: float | None) -> Errors:
        """Rows start:stop of the result against the source: elements whose values differ are beyond."""
        how, target, k = self.source.how, self.unit.how, self.source.shape[1]
        before = qtensor(
            self.source.rows(checkpoint, start, stop),
            how.scheme,
            how.packing,
            k,
            self.source.outer(checkpoint),
        )
        after = qtensor(back, target.scheme, target.packing, k, outer)
        if same_storage(how.scheme, target.scheme):
            same = (before.codes == after.codes).all(axis=-1)
            whole = np.array_equal(
                before.scales[0], after.scales[0], equal_nan=before.scales[0].dtype.kind == "f"
            )
            zeros = before.zero is None or np.array_equal(before.zero, after.zero)
            beyond = int((~same).sum()) * k + (0 if whole and zeros else before.codes.size)
            return Errors(before.codes.size, 1.0, 0.0, beyond=beyond)
        x, y = before.dequantize(), after.dequantize()
        differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
        finite = np.isfinite(x) & np.isfinite(y)
        noise = float(np.square(np.where(finite, x.astype(np.float64) - y, 0)).sum())
        signal = float(np.square(np.where(finite, x, 0), dtype=np.float64).sum())
        expected = self.rows(checkpoint, start, stop).lost
        return Errors(x.size, signal, noise, clipped=expected, beyond=max(int(differ.sum()) - expected, 0))


def move_of(unit: Unit, checkpoint: Checkpoint) -> Move:
    """The move of a recoded unit: its outer scale is the source's, or found by a look at all block scales."""
    source, target = unit.source, unit.how.scheme
    assert isinstance(source, Coded)
    outer = source.outer(checkpoint)
    if same_storage(source.how.scheme, target) or target.outer is None:
        return Move(unit, outer if target.outer is not None else None)
    seen = None
    step = max(SURVEY_ROWS // source.how.row_multiple, 1) * source.how.row_multiple
    for start in range(0, source.shape[0], step):
        stop = min(start + step, source.shape[0])
        rows = source.rows(checkpoint, start, stop)
        part = survey(qtensor(rows, source.how.scheme, source.how.packing, source.shape[1], outer))
        seen = part if seen is None else seen + part
    assert seen is not None
    return Move(unit, plan_outer(seen, source.how.scheme, target))


@dataclass(frozen=True)
class Cast:
    """What a cast to a narrower float did: values that overflowed or became zero, and the first of each kind."""

    overflowed: int = 0
    underflowed: int = 0
    first: tuple[int, int, float] | None = None

    def __add__(self, other: Cast) -> Cast:
        firsts = [first for first in (self.first, other.first) if first is not None]
        return Cast(
            self.overflowed + other.overflowed,
            self.underflowed + other.underflowed,
            min(firsts) if firsts else None,
        )

    def __str__(self) -> str:
        row, column, value = self.first or (0, 0, 0.0)
        return f"({self.overflowed} over, {self.underflowed} under, the first {value:.6g} at row {row}, column {column})"


def narrowed(values: F32, out: Format, row: int) -> tuple[NDArray[np.generic], Cast]:
    """fp32 values [n, K] rounded once to ``out`` (saturated, where fp16 is too small), and what that did;
    ``row`` is the first's index."""
    cast = narrow(values, out)
    if out is not FP16:
        return cast, Cast()
    over = np.isinf(cast) & np.isfinite(values)
    under = (cast == 0) & (values != 0)
    bad = over | under
    if not bad.any():
        return cast, Cast()
    at = np.argwhere(bad)[0]
    first = (row + int(at[0]), int(at[1]), float(values[tuple(at)]))
    cast = np.where(over, np.copysign(np.float16(FP16.max), values), cast).astype(np.float16)
    return cast, Cast(int(over.sum()), int(under.sum()), first)


def check_cast(values: F32, packed: NDArray[np.uint8], out: Format) -> Errors:
    """Decoded values against what the file holds: one rounding away, to the bit."""
    expected, _ = narrowed(values, out, 0)
    back = packed.reshape(-1).view(expected.dtype).reshape(values.shape)
    differ = int((back.view(f"u{back.itemsize}") != expected.view(f"u{back.itemsize}")).sum())
    finite = np.isfinite(values)
    difference = np.where(finite, values.astype(np.float64) - widen(back, out), 0)
    signal = float(np.square(np.where(finite, values, 0), dtype=np.float64).sum())
    return Errors(values.size, signal, float(np.square(difference).sum()), beyond=differ)
