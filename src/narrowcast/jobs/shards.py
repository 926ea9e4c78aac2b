"""The work of a quantize job: write every shard, read it back, and remember what was seen.

Outer scales come first: a fused group's maximum is taken over all its members, in whichever shard they lie.
Then each matrix goes through in row chunks: read, scan, quantize, write. While a shard is synced to disk the
next one is computed, and then the finished one is read back and held against the source.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from narrowcast.containers.spelling import Array
from narrowcast.errors import InputError, NonFiniteError, RangeError, StorageError
from narrowcast.jobs.carrying import copied
from narrowcast.jobs.coded import Coded
from narrowcast.jobs.moving import Cast, Move, cast_rows, move_of
from narrowcast.jobs.plan import CARD, RECORD, Copy, Plan, Shard, Unit
from narrowcast.jobs.record import model_card, record
from narrowcast.jobs.scanning import ranges, scan_units
from narrowcast.jobs.stream import Progress, ProgressFactory, Silent, Workers
from narrowcast.kernels import Backend, Rows, Scan, choose
from narrowcast.model.keeping import keep_flags
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.output import Output
from narrowcast.store.safetensors import Reader
from narrowcast.store.writer import Writer
from narrowcast.tensors.metrics import Errors
from narrowcast.tensors.misfits import Misfits
from narrowcast.tensors.scaling import outer_scale

# Source bytes whose maxima are found before they are quantized, so that the second read finds them cached.
BATCH_BYTES = 256 << 20


class CheckFailed(StorageError):
    """The result read back differs from what the source allows."""


class Work:
    """One run: the open source, the output, the pool, and what was seen so far."""

    def __init__(
        self, plan: Plan, source: Checkpoint, output: Output, pool: Workers, make: ProgressFactory
    ) -> None:
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
        self.moves: dict[str, Move] = {}
        self.casts: dict[str, Cast] = {}
        self.misfits: dict[str, Misfits] = {}
        self.lock = threading.Lock()

    def shards(self) -> None:
        """Write every shard while the previous one is synced and checked."""
        total = sum(u.nbytes for u in self.plan.units) + sum(
            c.nbytes for s in self.plan.shards for c in s.copies
        )
        bar = self.make(2 * total, f"{self.plan.verb} and check")
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
                self._matrices(batch, writer, bar)
            self.pool.run(lambda copy: self._carry(copy, writer, bar), shard.copies)
            for name, value in shard.values:
                writer.write(name, value)
        except BaseException:
            writer.abort()
            raise
        self.seconds["quantize"] += time.perf_counter() - begun
        return syncer.submit(_finish, writer)

    def _outers(self, units: Sequence[Unit], bar: Progress) -> None:
        """Find the outer scale of every fused group in ``units`` that has one, over all its members in any shard."""
        groups = {
            u.group: u
            for u in units
            if u.step == "quantize" and u.how.scheme.outer is not None and u.group not in self.outer
        }
        members = [member for group in groups for member in self.members[group]]
        if not members:
            return
        scans = scan_units(self.source, members, self.pool, self._backend(members[0]), Silent())
        for member in members:
            if isinstance(member.source, Coded) and (scans[member.module].nan or scans[member.module].inf):
                raise self._nonfinite(member, self._backend(member))
        for group, unit in groups.items():
            amax = max(scans[member.module].amax for member in self.members[group])
            scale = outer_scale(np.full((1, 1), amax, np.float32), unit.how.scheme, unit.dtype)
            self.outer[group] = float(scale[0, 0])

    def _matrices(self, units: Sequence[Unit], writer: Writer, bar: Progress) -> None:
        tasks = [(unit, i, j) for unit in units for i, j in ranges(unit)]
        for unit in units:
            for name, data, at, stride in unit.how.constants(
                unit.place, unit.source.shape, self._statics(unit)
            ):
                writer.write_pieces(name, data, at, stride)

        def work(task: tuple[Unit, int, int]) -> None:
            unit, i, j = task
            rows = self._rows(unit, i, j)
            for name, data, at, stride in unit.how.pieces(unit.place, unit.source.shape[1], i, rows):
                writer.write_pieces(name, data, at, stride)
            bar.advance((j - i) * unit.source.shape[1] * unit.carrier.itemsize)

        self.pool.run(work, tasks)

    def _rows(self, unit: Unit, i: int, j: int) -> Rows:
        """Rows i:j of a matrix as they will be written."""
        if unit.step == "recode":
            moved, misfits = self._moves(unit).rows(self.source, i, j)
            with self.lock:
                self.misfits[unit.module] = self.misfits.get(unit.module, Misfits()) + misfits
            if misfits.tiles and not self.plan.requantize:
                raise self._unmapped(unit, misfits)
            return moved
        if unit.step == "decode":
            cast, seen = cast_rows(unit, self.source, i, j)
            if seen is not None:
                with self.lock:
                    self.casts[unit.module] = self.casts.get(unit.module, Cast()) + seen
            return Rows(cast.view(np.uint8).reshape(j - i, -1), np.empty((0, 0)))
        stored = unit.source.read(self.source, unit.carrier, i, j)
        backend = self._backend(unit)
        seen = isinstance(unit.source, Coded) and unit.group in self.outer  # its scan found all of it finite
        scan = Scan(0.0) if seen else backend.scan(stored, unit.dtype)
        if scan.nan or scan.inf:
            raise self._nonfinite(unit, backend)
        return backend.quantize(stored, unit.dtype, unit.how.scheme, unit.how.packing, self._outer(unit))

    def _moves(self, unit: Unit) -> Move:
        """How a matrix's codes move; found once, since an outer scale may need a look at all of it."""
        with self.lock:
            found = self.moves.get(unit.module)
        if found is None:
            found = move_of(unit, self.members[unit.group], self.source)
            with self.lock:
                self.moves[unit.module] = found
        return found

    def _statics(self, unit: Unit) -> dict[str, Array]:
        """What is written once for a matrix: its outer scale, and what its source had."""
        outer = self._outer(unit)
        return unit.statics | ({} if outer is None else {"outer": np.float32([outer])})

    def _unmapped(self, unit: Unit, misfits: Misfits) -> InputError:
        return RangeError(
            f"{unit.module} has values without an equal in {unit.scheme_name}",
            where=self.plan.root,
            got=misfits.words(unit.how.scheme),
            remedy="--requantize takes the nearest values and counts them",
        )

    def _carry(self, copy: Copy, writer: Writer, bar: Progress) -> None:
        for at, data in copied(self.source, copy):
            writer.write(copy.name, data, at)
            bar.advance(len(data))

    def _check(self, shard: Shard, synced: Future[None], bar: Progress) -> None:
        """Read one finished shard back and hold every element against the source."""
        begun = time.perf_counter()
        synced.result()
        self.seconds["sync"] += time.perf_counter() - begun
        begun = time.perf_counter()
        with Reader(self.output.staging / shard.name) as reader:
            tasks = [(unit, i, j) for unit in shard.units for i, j in ranges(unit)]
            with self.pool.map(lambda t: self._compare(reader, *t, bar), tasks) as results:
                for (unit, _, _), found in zip(tasks, results, strict=True):
                    self.errors[unit.module] = self.errors.get(unit.module, Errors()) + found
            self.pool.run(lambda copy: self._compare_copy(reader, copy, bar), shard.copies)
        for unit in shard.units:
            if self.errors[unit.module].beyond:
                raise self._beyond(shard, unit)
        self.seconds["check"] += time.perf_counter() - begun

    def _beyond(self, shard: Shard, unit: Unit) -> InputError:
        """Why elements are not what they should be: too large to be rounded, or damaged on the way."""
        count = self.errors[unit.module].beyond
        where = f"{shard.name}: {unit.module} ({unit.scheme_name})"
        amax = 0.0
        if unit.step == "quantize":
            amax = scan_units(self.source, [unit], self.pool, self._backend(unit), Silent())[unit.module].amax
        if amax >= 2.0**127:
            return RangeError(
                f"{count} elements are too large: rounded to this format they pass the end of fp32",
                where=where,
                got=f"values up to {amax:.4g}",
                wanted="values below 2^127, or 1.7e38",
                remedy=f"repair the source, or keep the layer with {self._keep(unit)}",
            )
        return CheckFailed(
            f"{count} elements of the result are not what the format can produce",
            where=where,
            remedy="the output was removed; run again, and check the disk and memory if it recurs",
        )

    def remarks(self) -> list[str]:
        """What moving codes did that is worth telling: outer scales that do not invert, tiles that were rounded."""
        found = []
        inexact = [m.outer_ulp for m in self.misfits.values() if m.outer_ulp]
        if inexact:
            found.append(
                f"{len(inexact)} matrices have an outer or input scale without an exact inverse, by at most "
                f"{max(inexact):.3g} of its last place; all codes and block scales are as they were"
            )
        tiles = sum(m.tiles for m in self.misfits.values())
        if tiles:
            of = sum(m.of for m in self.misfits.values())
            found.append(
                f"{tiles:,} of {of:,} tiles have no equal in the result's scheme and were rounded again"
            )
        if self.plan.saturate and self.casts:
            over = sum(cast.overflowed for cast in self.casts.values())
            under = sum(cast.underflowed for cast in self.casts.values())
            found.append(f"fp16 clipped {over:,} values and made {under:,} zero")
        return found

    def refuse_casts(self) -> None:
        """Refuse a cast to fp16 that overflowed or underflowed, naming every tensor with the first such value."""
        lost = {name: cast for name, cast in self.casts.items() if cast.overflowed or cast.underflowed}
        if not lost or self.plan.saturate:
            return
        over = sum(cast.overflowed for cast in lost.values())
        under = sum(cast.underflowed for cast in lost.values())
        raise RangeError(
            f"fp16 is too narrow: {over} values would overflow and {under} would become zero",
            where="; ".join(f"{name} {cast}" for name, cast in lost.items()),
            wanted="values from 2^-25 up to 65504, or zero",
            remedy="--dtype bf16 keeps the range, --saturate clips and goes on",
        )

    def _keep(self, unit: Unit) -> str:
        return keep_flags(
            self.plan.modules, [m.name for m in self.plan.modules if m.tensor == unit.source.tensor]
        )

    def _nonfinite(self, unit: Unit, backend: Backend) -> NonFiniteError:
        """The refusal, with counts over the whole tensor."""
        with Workers(1) as alone:
            scan = scan_units(self.source, [unit], alone, backend, Silent())[unit.module]
        row, column = divmod(scan.first, unit.source.shape[1])
        return NonFiniteError(
            f"{unit.module} has {scan.nan} NaN and {scan.inf} infinite values",
            where=f"{unit.source.tensor}, first at row {row}, column {column}",
            wanted="finite weights",
            remedy=f"repair the source, or keep the layer with {self._keep(unit)}"
            + (", or --nonfinite copy" if self.plan.verb == "quantize" else ""),
        )

    def _compare(self, reader: Reader, unit: Unit, i: int, j: int, bar: Progress) -> Errors:
        shape = unit.source.shape
        rows = unit.how.read(reader, unit.place, shape, i, j)
        bar.advance((j - i) * shape[1] * unit.carrier.itemsize)
        if unit.step == "recode":
            return self._moves(unit).check(self.source, i, j, rows, unit.how.outer(reader, unit.place, shape))
        if unit.step == "decode":
            wanted = cast_rows(unit, self.source, i, j)[0]
            differ = wanted.view(np.uint8).reshape(rows.packed.shape) != rows.packed
            beyond = int(differ.reshape(wanted.size, -1).any(axis=-1).sum()) if differ.any() else 0
            return Errors(wanted.size, beyond=beyond)
        stored = unit.source.read(self.source, unit.carrier, i, j)
        outer = unit.how.outer(reader, unit.place, shape)
        return self._backend(unit).check(stored, unit.dtype, unit.how.scheme, unit.how.packing, rows, outer)

    def _compare_copy(self, reader: Reader, copy: Copy, bar: Progress) -> None:
        for at, data in copied(self.source, copy):
            back = np.empty(len(data), np.uint8)
            reader.read_into(copy.name, back, at)
            if not np.array_equal(back, data):
                raise CheckFailed(
                    f"{copy.name} differs from the source", where=reader.path, wanted="the same bytes"
                )
            bar.advance(len(data))

    def side_files(self) -> None:
        """Everything that travels along, then the record for machines and the card for people."""
        begun = time.perf_counter()
        for name, kept in self.plan.side_files:
            self.output.copy(self.source.root / name, kept)
        for name, content in self.plan.beside.items():
            self.output.put(name, content)
        self.output.put(RECORD, record(self.plan, self.source, self.errors, self.roles()))
        self.output.put(CARD, model_card(self.plan, self.roles()))
        self.seconds["side files"] = time.perf_counter() - begun

    def roles(self) -> dict[str, Errors]:
        found: dict[str, Errors] = {}
        for unit in self.plan.units:
            found[unit.role] = found.get(unit.role, Errors()) + self.errors.get(unit.module, Errors())
        return found

    def _outer(self, unit: Unit) -> float | None:
        if unit.step == "recode":
            return self._moves(unit).outer
        return (
            self.outer[unit.group] if unit.step == "quantize" and unit.how.scheme.outer is not None else None
        )

    def _backend(self, unit: Unit) -> Backend:
        backend, reason = backend_of(unit)
        self.backends.add(backend.name)
        if reason:
            self.reasons.add(f"{unit.how.scheme.name} runs on the {backend.name} kernels: {reason}")
        return backend


def backend_of(unit: Unit) -> tuple[Backend, str]:
    choice = choose(unit.how.scheme, unit.dtype, unit.how.packing)
    return choice.backend, choice.reason


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


def _finish(writer: Writer) -> None:
    """Sync a shard and give it its name; when that fails the shard is gone, and so is its descriptor."""
    try:
        writer.finish()
    except BaseException:
        writer.abort()
        raise
