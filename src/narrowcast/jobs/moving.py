"""Matrices that move without a second rounding: codes into another spelling or scheme, and values into floats.

    recode    codes and scales as they are, repacked; or the same values in another scheme, where each has its equal
    decode    round(decode(code) · Π scale), one rounding to the output dtype

What has no equal is counted and located, and never replaced unless that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.spelling import Piece, widened
from narrowcast.jobs.coded import Coded
from narrowcast.jobs.plan import Unit
from narrowcast.kernels import Rows
from narrowcast.kernels.reference.dequantize import narrow
from narrowcast.kernels.reference.rows import qtensor
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import FP16, formats
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.metrics import Errors
from narrowcast.tensors.misfits import Misfits
from narrowcast.tensors.packing import pack, unpack
from narrowcast.tensors.recode import Survey, plan_outer, recode, survey
from narrowcast.tensors.storage import same_storage

SURVEY_ROWS = 1024  # rows that are looked at at once when an outer scale must be found


@dataclass(frozen=True)
class Move:
    """How one matrix moves, with the outer scale of the result as it is stored, where it has one. ``ulp``: how far
    the scales that are kept once for it would be off after the way back, in their last place."""

    unit: Unit
    outer: float | None
    ulp: float = 0.0

    @property
    def source(self) -> Coded:
        assert isinstance(self.unit.source, Coded)
        return self.unit.source

    def rows(self, checkpoint: Checkpoint, start: int, stop: int) -> tuple[Rows, Misfits]:
        """Rows start:stop in the scheme and packing of the result, the nearest values standing in for what has no
        equal there, and what that was."""
        found, how, target = self.source.rows(checkpoint, start, stop), self.source.how, self.unit.how
        k = self.source.shape[1]
        if same_storage(how.scheme, target.scheme):
            packed = found.packed
            if how.packing != target.packing:
                packed = pack(unpack(found.packed, how.packing, k), target.packing)
            return Rows(packed, found.scales, found.zero), Misfits(outer_ulp=self.ulp)
        q = qtensor(found, how.scheme, how.packing, k, self.source.outer(checkpoint))
        made = recode(q, target.scheme, self.outer, nearest=True, row=start)
        assert made.nearest is not None
        packed = pack(made.nearest.codes, target.packing)
        return Rows(packed, made.nearest.scales[0], made.nearest.zero), made.misfits

    def _outer_back(self) -> float | None:
        """The outer scale as a reader of the result gets it."""
        part = self.unit.how.part("outer")
        if part is None or self.outer is None:
            return None
        return float(part.decode(part.encode(np.float32([self.outer])), 0)[0])

    def check(self, checkpoint: Checkpoint, start: int, stop: int, back: Rows, outer: float | None) -> Errors:
        """Rows start:stop of the result, read back, against the source: what is not as it must be is beyond."""
        wanted, _ = self.rows(checkpoint, start, stop)
        how, target, k = self.source.how, self.unit.how, self.source.shape[1]
        codes = unpack(wanted.packed, target.packing, k)
        beyond = int((codes != unpack(back.packed, target.packing, k)).sum())
        same = wanted.scales.tobytes() == back.scales.tobytes() and _equal(wanted.zero, back.zero)
        expected = self._outer_back()
        kept = outer == expected or (outer != outer and expected != expected)  # a NaN is kept like any other
        if not same or not kept:
            beyond = codes.size
        if same_storage(how.scheme, target.scheme):
            return Errors(codes.size, beyond=beyond)
        rows, own = self.source.rows(checkpoint, start, stop), self.source.outer(checkpoint)
        x = qtensor(rows, how.scheme, how.packing, k, own).dequantize().astype(np.float64)
        y = qtensor(back, target.scheme, target.packing, k, outer).dequantize()
        finite = np.isfinite(x) & np.isfinite(y)
        noise = float(np.square(np.where(finite, x - y, 0)).sum())
        return Errors(x.size, float(np.square(np.where(finite, x, 0)).sum()), noise, beyond=beyond)


def _equal(a: NDArray[np.uint8] | None, b: NDArray[np.uint8] | None) -> bool:
    return a is b if a is None or b is None else np.array_equal(a, b)


def move_of(unit: Unit, members: Sequence[Unit], checkpoint: Checkpoint) -> Move:
    """The move of a recoded unit. Its outer scale is its source's, or found by a look at all block scales of its
    fused group, which keeps one."""
    source, target = unit.source, unit.how.scheme
    assert isinstance(source, Coded)
    if same_storage(source.how.scheme, target) or target.outer is None:
        outer = source.outer(checkpoint) if target.outer is not None else None
        return Move(unit, outer, max(_ulps(unit, source, checkpoint), default=0.0))
    seen = None
    for member in members:
        for part in _surveys(member.source, checkpoint):
            seen = part if seen is None else seen + part
    assert seen is not None
    return Move(unit, plan_outer(seen, source.how.scheme, target))


def _ulps(unit: Unit, source: Coded, checkpoint: Checkpoint) -> Iterator[float]:
    """How far outer and input scales would be off after the way back, in units of their last place: a divisor becomes
    a multiplier and the reverse, and not every fp32 number is the reciprocal of another."""
    pieces: tuple[Piece, ...] = ("outer", "input")
    for piece in pieces:
        written = unit.how.part(piece)
        if written is None or source.how.part(piece) is None:
            continue
        part, stored = source.how.as_stored(checkpoint, source.place, piece)
        back = part.encode(written.decode(written.encode(part.decode(stored, 0)), 0))
        before, after = widened(stored, part.dtype), widened(back, part.dtype)
        if not np.array_equal(after, before, equal_nan=True):
            off = np.abs(after.astype(np.float64) - before) / np.spacing(np.abs(before))
            yield float(off.max())


def _surveys(source: Coded, checkpoint: Checkpoint) -> Iterator[Survey]:
    step = max(SURVEY_ROWS // source.how.row_multiple, 1) * source.how.row_multiple
    outer = source.outer(checkpoint)
    for start in range(0, source.shape[0], step):
        rows = source.rows(checkpoint, start, min(start + step, source.shape[0]))
        yield survey(qtensor(rows, source.how.scheme, source.how.packing, source.shape[1], outer))


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
        counts = f"{self.overflowed} over, {self.underflowed} under"
        return f"({counts}, the first {value:.6g} at row {row}, column {column})"


def cast_rows(
    unit: Unit, checkpoint: Checkpoint, start: int, stop: int
) -> tuple[NDArray[np.generic], Cast | None]:
    """Rows start:stop of a matrix rounded once to its float dtype, and what that did to the range of fp16, in which
    too large values are saturated."""
    out = formats[unit.how.format]
    if isinstance(unit.source, Coded) and out is not FP16:
        return unit.source.decode(checkpoint, start, stop, out), None
    values = widen(unit.source.read(checkpoint, unit.carrier, start, stop), unit.dtype)
    cast = narrow(values, out)
    if out is not FP16:
        return cast, None
    over = np.isinf(cast) & np.isfinite(values)
    under = (cast == 0) & (values != 0)
    bad = over | under
    if not bad.any():
        return cast, None
    at = np.argwhere(bad)[0]
    first = (start + int(at[0]), int(at[1]), float(values[tuple(at)]))
    cast = np.where(over, np.copysign(np.float16(FP16.max), values), cast).astype(np.float16)
    return cast, Cast(int(over.sum()), int(under.sum()), first)
