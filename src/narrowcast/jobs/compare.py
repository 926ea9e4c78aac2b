"""Two checkpoints, tensor by tensor, as the numbers that they decode to, in whatever containers they lie.

    identical    the same codes and scales, stored the same way (of floats: the same bits)
    respelled    the same codes and scales in another orientation, packing or stack, or with an outer scale, or a
                 scale of inputs, that is the other's reciprocal, rounded once
    equal        the same value for every element, from other codes or scales, or in another dtype
    differs      SQNR = 10 log10(Σ a² / Σ (a - b)²), largest |a - b|, largest |a - b| / |a|, first difference
    shape        not the same matrix at all

A is the reference. NaN equals NaN; an element that is not finite on one side alone is an infinite error. Matrices go
through in row chunks that begin on tiles of both sides, so memory does not depend on the size of a tensor; where
codes and scales agree, nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, lcm
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.jobs.coded import Coded, Opened, open_coded
from narrowcast.jobs.diagnosing import Case, Diagnosis, diagnose, suspicious
from narrowcast.jobs.matching import CACHE_SCALE, INPUT_SCALE, Constant, Held, Tensors, held, restricted
from narrowcast.jobs.opening import open_model
from narrowcast.jobs.stream import ProgressFactory, Silent, Workers, chunks
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.metrics import Errors
from narrowcast.tensors.packing import unpack
from narrowcast.tensors.schemes import Scheme
from narrowcast.tensors.storage import same_storage

Grade = Literal["identical", "respelled", "equal", "differs", "shape"]
BLOCK = 1 << 16  # elements that are subtracted at once: float64 copies that stay in a second-level cache
GRADES: tuple[Grade, ...] = ("identical", "respelled", "equal", "differs", "shape")


@dataclass(frozen=True)
class Tally:
    """Sums over chunks. ``alike``: codes, scales and zero points agree so far (of floats: bits). ``codes`` and
    ``scales`` count those that do not, where both sides have the same scheme. ``undecoded`` are row ranges whose
    signal was not needed yet."""

    errors: Errors = field(default_factory=Errors)
    differing: int = 0
    max_error: float = 0.0
    max_relative: float = 0.0
    first: tuple[int, int] | None = None
    alike: bool = True
    codes: int = 0
    scales: int = 0
    undecoded: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.errors + other.errors,
            self.differing + other.differing,
            max(self.max_error, other.max_error),
            max(self.max_relative, other.max_relative),
            self.first if self.first is not None else other.first,
            self.alike and other.alike,
            self.codes + other.codes,
            self.scales + other.scales,
            self.undecoded + other.undecoded,
        )


@dataclass(frozen=True)
class Difference:
    """The first element that differs, row by row of [N, K]: its values, and its codes (of floats: their bits) in
    binary."""

    row: int
    column: int
    a: float
    b: float
    a_code: str
    b_code: str


@dataclass(frozen=True)
class Compared:
    """One tensor of both sides: ``a`` and ``b`` name scheme or dtype."""

    name: str
    role: str
    a: str
    b: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    grade: Grade
    tally: Tally = field(default_factory=Tally)
    first: Difference | None = None
    diagnosis: Diagnosis | None = None

    @property
    def same(self) -> bool:
        """Whether every value is equal."""
        return self.grade in ("identical", "respelled", "equal")

    @property
    def sqnr(self) -> float:
        """dB of A over the difference; infinite where there is none, minus infinity where shapes differ."""
        return inf if self.same else -inf if self.grade == "shape" else self.tally.errors.sqnr

    def to_json(self) -> dict[str, Any]:
        tally = self.tally
        facts: dict[str, Any] = {
            "name": self.name, "role": self.role, "grade": self.grade,
            "a": {"scheme": self.a, "shape": self.shapes[0]}, "b": {"scheme": self.b, "shape": self.shapes[1]},
            "sqnr": self.sqnr,
        }  # fmt: skip
        if self.grade == "differs":
            facts |= {
                "elements": tally.errors.elements, "differing": tally.differing, "max_error": tally.max_error,
                "max_relative_error": tally.max_relative, "codes_differ": tally.codes, "scales_differ": tally.scales,
                "first": vars(self.first) if self.first is not None else None,
            }  # fmt: skip
        diagnosis = self.diagnosis
        return facts | {"diagnosis": diagnosis.to_json() if diagnosis is not None else None}


@dataclass(frozen=True)
class Comparison:
    """All tensors of both sides; ``only_a`` and ``only_b`` are (name, scheme) that the other side does not have."""

    paths: tuple[str, str]
    containers: tuple[str, str]
    tensors: tuple[Compared, ...]
    only_a: tuple[tuple[str, str], ...] = ()
    only_b: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    min_sqnr: float = inf

    @property
    def passed(self) -> bool:
        """Whether both sides have the same tensors, equal or, where less was asked for, within ``min_sqnr`` dB."""
        near = all(tensor.same or inf > self.min_sqnr <= tensor.sqnr for tensor in self.tensors)
        return near and not self.only_a and not self.only_b

    @property
    def worst(self) -> list[Compared]:
        """Tensors that differ, the worst first."""
        found = [tensor for tensor in self.tensors if not tensor.same]
        return sorted(found, key=lambda tensor: tensor.sqnr)

    def grades(self) -> dict[Grade, int]:
        """How many tensors there are of each grade."""
        return {grade: sum(tensor.grade == grade for tensor in self.tensors) for grade in GRADES}

    def roles(self) -> dict[tuple[str, str, str], list[Compared]]:
        """Tensors by role and by what A and B store them as."""
        found: dict[tuple[str, str, str], list[Compared]] = {}
        for tensor in self.tensors:
            found.setdefault((tensor.role, tensor.a, tensor.b), []).append(tensor)
        return found

    def to_json(self) -> dict[str, Any]:
        a, b = ({"path": path, "container": c} for path, c in zip(self.paths, self.containers, strict=True))
        return {
            "a": a, "b": b, "passed": self.passed, "min_sqnr": None if self.min_sqnr == inf else self.min_sqnr,
            "grades": self.grades(),
            "worst_sqnr": min((tensor.sqnr for tensor in self.tensors), default=inf),
            "only_a": [{"name": name, "scheme": scheme} for name, scheme in self.only_a],
            "only_b": [{"name": name, "scheme": scheme} for name, scheme in self.only_b],
            "notes": self.notes,
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }  # fmt: skip


def compare(
    a: str | Path,
    b: str | Path,
    *,
    only: str | Sequence[str] = (),
    min_sqnr: float | None = None,
    workers: int | None = None,
    progress: ProgressFactory = Silent,
) -> Comparison:
    """Compare two checkpoints of one model, see the module docstring.

    ``only`` restricts to tensors by exact name, ``re:`` pattern or class; ``min_sqnr`` (dB) is what ``passed`` asks
    of every tensor instead of equality. UsageError for a pattern that matches nothing, InputError for a checkpoint
    that contradicts itself.
    """
    patterns = (only,) if isinstance(only, str) else tuple(only)
    with open_model(a) as first, open_model(b) as second, Workers(workers) as pool:
        opened = open_coded(first), open_coded(second)
        sides = held(opened[0]), held(opened[1])
        kinds = {name: own.kind for side in sides for name, own in side.found.items()}
        taken = restricted(kinds, patterns)
        pairs = [
            (x, y)
            for name in kinds
            if name in taken and (x := sides[0].get(name)) is not None and (y := sides[1].get(name)) is not None
        ]  # fmt: skip
        tensors = _compare(pairs, pool, progress)
        tensors = _diagnose(tensors, sides, pool)
        only_a, only_b, notes = _unmatched(sides, taken)
        containers = opened[0].contents.container, opened[1].contents.container
        return Comparison(
            (str(a), str(b)), containers, tuple(tensors), only_a, only_b,
            (*_own_notes(opened), *notes), inf if min_sqnr is None else min_sqnr,
        )  # fmt: skip


def _own_notes(opened: tuple[Opened, Opened]) -> list[str]:
    found = []
    for x, contents in zip("AB", (side.contents for side in opened), strict=True):
        found += [f"{x}: {note}" for note in contents.notes]
        if contents.online:
            found.append(
                f"{x} computes more than its matrices, which changes them: {'; '.join(contents.online)}"
            )
    return found


def _unmatched(sides: tuple[Tensors, Tensors], taken: set[str]) -> tuple[Any, Any, list[str]]:
    """What one side alone has. A scale of inputs beside a matrix that the other side quantizes without one, or not
    at all, is no lost tensor, and only noted."""
    missing, notes = [], []
    for x, own, other in (("A", *sides), ("B", *sides[::-1])):
        left = [t for name, t in own.found.items() if name in taken and other.get(name) is None]
        inputs = [tensor for tensor in left if tensor.role == INPUT_SCALE]
        missing.append(tuple((tensor.name, tensor.scheme) for tensor in left if tensor.role != INPUT_SCALE))
        if inputs:
            notes.append(f"only {x} has static input scales, {len(inputs)} of them")
    return missing[0], missing[1], notes


def _compare(pairs: Sequence[tuple[Held, Held]], pool: Workers, progress: ProgressFactory) -> list[Compared]:
    """Every pair, its chunks spread over the workers; chunks that agree are decoded only where others do not."""
    readable = [(x, y) for x, y in pairs if x.shape == y.shape]
    bar = progress(sum(x.nbytes + y.nbytes for x, y in readable), "comparing")

    def work(task: tuple[int, int, int]) -> tuple[int, Tally]:
        index, start, stop = task
        x, y = pairs[index]
        found = _chunk(x, y, start, stop)
        bar.advance((x.nbytes + y.nbytes) * (stop - start) // max(x.source.shape[0], 1))
        return index, found

    def signal(task: tuple[int, int, int]) -> tuple[int, Errors]:
        index, start, stop = task
        return index, _signal(pairs[index][0].values(start, stop))

    tallies: dict[int, Tally] = {}
    tasks = ((k, i, j) for k, (x, y) in enumerate(pairs) if x.shape == y.shape for i, j in _ranges(x, y))
    with pool.map(work, tasks) as found:
        for index, tally in found:
            tallies[index] = tallies.get(index, Tally()) + tally
    later = ((k, i, j) for k, tally in tallies.items() if tally.differing for i, j in tally.undecoded)
    with pool.map(signal, later) as sums:
        for index, errors in sums:
            tallies[index] = replace(tallies[index], errors=tallies[index].errors + errors)
    bar.done()
    return [_compared(x, y, tallies.get(index, Tally())) for index, (x, y) in enumerate(pairs)]


def _ranges(x: Held, y: Held) -> list[tuple[int, int]]:
    rows, columns = x.source.shape
    size = max(x.source.chunk_bytes, y.source.chunk_bytes)
    return chunks(rows if columns else 0, 4 * columns, lcm(x.row_multiple, y.row_multiple), size)


def _compared(x: Held, y: Held, tally: Tally) -> Compared:
    def made(grade: Grade, first: Difference | None = None) -> Compared:
        return Compared(x.name, x.role, x.scheme, y.scheme, (x.shape, y.shape), grade, tally, first)

    if x.shape != y.shape:
        return made("shape")
    if tally.alike and _comparable(x, y):
        return made("identical" if x.spelling == y.spelling and _outers(x, y) else "respelled")
    if tally.first is not None and _divided(x, y):
        return made("respelled")
    if tally.first is None:
        return made("equal")
    row, column = tally.first
    a, b = (float(side.values(row, row + 1)[0, column]) for side in (x, y))
    return made("differs", Difference(row, column, a, b, code(x, row, column), code(y, row, column)))


def code(side: Held, row: int, column: int) -> str:
    """The code of one element in binary, its last bit last: of a quantized matrix without its scale, else all bits."""
    coded = side.coded
    if coded is None:
        raw = side.stored(row, row + 1)[:, column : column + 1].tobytes()
        return f"{int.from_bytes(raw, 'little'):0{8 * len(raw)}b}"
    start = row // side.row_multiple * side.row_multiple
    stop = min(start + side.row_multiple, coded.shape[0])
    codes, order = coded.codes(side.checkpoint, start, stop)[row - start], side.columns()[0]
    at = column if order is None else int(np.flatnonzero(order == column)[0])
    return f"{int(codes[at]):0{side.element.bits}b}"


def _comparable(x: Held, y: Held) -> bool:
    """Whether stored codes mean the same on both sides, so that comparing them says something."""
    if x.coded is not None and y.coded is not None:
        a, b = (_multiplying(side.how.scheme) for side in (x.coded, y.coded))
        columns = all(_equal(mine, other) for mine, other in zip(x.columns(), y.columns(), strict=True))
        if any(side.how.part("offset") is not None for side in (x.coded, y.coded)):
            return False  # equal codes under other offsets are other numbers
        return same_storage(a, b) and columns and _outers(x, y) is not None
    return x.coded is None and y.coded is None and x.dtype == y.dtype


def _multiplying(scheme: Scheme) -> Scheme:
    """The scheme with its outer scale taken as a multiplier."""
    return replace(scheme, scales=tuple(replace(level, divides=False) for level in scheme.scales))


def _outers(x: Held, y: Held) -> bool | None:
    """True: the same outer scale, stored the same way; False: one is the other's reciprocal, rounded once;
    None: they are different numbers."""
    if x.coded is None or y.coded is None:
        return True
    a, b = x.coded.outer(x.checkpoint), y.coded.outer(y.checkpoint)
    divides = [side.how.scheme.scales[-1].divides for side in (x.coded, y.coded)]
    if a is None or b is None or divides[0] == divides[1]:
        return True if a == b else None
    return False if a and b and (_inverse(a) == np.float32(b) or np.float32(a) == _inverse(b)) else None


def _inverse(scale: float | NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # of the smallest numbers, which then are nobody's reciprocal
        return np.asarray(np.float32(1) / np.asarray(scale, np.float32))


def _divided(x: Held, y: Held) -> bool:
    """Whether two scales of inputs, as multipliers, are one number that one side stores as its reciprocal, rounded."""
    if x.role != INPUT_SCALE or y.role != INPUT_SCALE:
        return False
    a, b = x.values(0, 1), y.values(0, 1)
    if not (a.all() and b.all()):
        return False
    return np.array_equal(_inverse(_inverse(a)), b) or np.array_equal(a, _inverse(_inverse(b)))


def _equal(a: NDArray[Any] | None, b: NDArray[Any] | None) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return a is b
    x, y = (np.ascontiguousarray(side).reshape(-1).view(np.uint8) for side in (a, b))
    return np.array_equal(x, y)


def _chunk(x: Held, y: Held, start: int, stop: int) -> Tally:
    """Rows start:stop: stored things first, values where those differ or cannot be compared."""
    tally = Tally(alike=False)
    if _comparable(x, y):
        if x.coded is not None and y.coded is not None:
            tally = _stored(x.coded, y.coded, (x.checkpoint, y.checkpoint), start, stop)
        else:
            tally = Tally(alike=_equal(x.stored(start, stop), y.stored(start, stop)))
        if tally.alike and (x.coded is None or _outers(x, y)):
            elements = (stop - start) * x.source.shape[1]
            return replace(tally, errors=Errors(elements), undecoded=((start, stop),))
    a, b = x.values(start, stop), y.values(start, stop)
    height = max(BLOCK // max(a.shape[1], 1), 1)
    for i in range(0, len(a), height):
        tally += differences(a[i : i + height], b[i : i + height], start + i)
    return tally


def _stored(a: Coded, b: Coded, sources: tuple[Checkpoint, Checkpoint], start: int, stop: int) -> Tally:
    """Codes and scales of two matrices of one scheme."""
    x, y = a.rows(sources[0], start, stop), b.rows(sources[1], start, stop)
    codes = 0
    if a.how.packing != b.how.packing or not np.array_equal(x.packed, y.packed):
        k = a.shape[1]
        codes = int((unpack(x.packed, a.how.packing, k) != unpack(y.packed, b.how.packing, k)).sum())
    scales = _unequal(x.scales, y.scales) if a.how.part("scales") is not None else 0
    zeros = _unequal(x.zero, y.zero) if x.zero is not None and y.zero is not None else 0
    return Tally(alike=not codes + scales + zeros, codes=codes, scales=scales)


def _unequal(a: NDArray[Any], b: NDArray[Any]) -> int:
    if _equal(a, b):
        return 0
    bits = [np.ascontiguousarray(side).view(f"u{side.itemsize}") for side in (a, b)]
    return int((bits[0] != bits[1]).sum())


def _signal(values: NDArray[Any]) -> Errors:
    energy = float(np.square(values, dtype=np.float64).sum())
    if not isfinite(energy):
        energy = float(np.square(values[np.isfinite(values)], dtype=np.float64).sum())
    return Errors(signal=energy)


def differences(a: NDArray[Any], b: NDArray[Any], row: int = 0) -> Tally:
    """Values [n, K] of both sides, beginning at ``row``; see the module docstring."""
    x = a.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(x - b)
    differing = error != 0
    if a.dtype.kind in "iu" or b.dtype.kind in "iu":  # numbers that float64 may not tell apart
        differing = a != b
    noise = float(np.square(error).sum())
    if not isfinite(noise):
        differing = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        error = np.where(differing, np.where(np.isfinite(error), error, inf), 0)
        noise = float(np.square(error).sum())
    errors = _signal(a) + Errors(a.size, noise=noise)
    if not differing.any():
        return Tally(errors)
    size = np.abs(x)
    with np.errstate(invalid="ignore", over="ignore"):
        relative = np.divide(error, size, out=np.zeros_like(error), where=size > 0)
    at = int(differing.argmax())
    return Tally(
        errors, int(np.count_nonzero(differing)), float(error.max()), float(np.fmax.reduce(relative, None)),
        (row + at // a.shape[1], at % a.shape[1]),
    )  # fmt: skip


def _diagnose(tensors: list[Compared], sides: tuple[Tensors, Tensors], pool: Workers) -> list[Compared]:
    """The same tensors, with a diagnosis where the values differ by more than their formats can cause."""

    def work(tensor: Compared) -> Compared:
        a, b = sides[0].get(tensor.name), sides[1].get(tensor.name)
        assert a is not None
        assert b is not None
        if tensor.same or tensor.role in (INPUT_SCALE, CACHE_SCALE) or isinstance(a.source, Constant):
            return tensor
        if tensor.grade != "shape" and not suspicious(tensor.sqnr, a, b):
            return tensor
        return replace(tensor, diagnosis=diagnose(Case(a, b, sides[0].get, sides[1].get)))

    with pool.map(work, tensors) as found:
        return list(found)
