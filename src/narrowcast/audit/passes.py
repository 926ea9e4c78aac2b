"""The passes over the data: each matrix and each plain tensor is read once, in chunks, and shown to the rules.

One matrix is one piece of work: a thread reads its chunks, counts, and runs the rules of its scope while the grids
are there. Memory is a chunk and the grids of one matrix for each worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from narrowcast.audit.findings import Finding
from narrowcast.audit.found import Refusal
from narrowcast.audit.matrix import Matrix, ranks
from narrowcast.audit.rules import Rule
from narrowcast.audit.subject import Subject, Summary
from narrowcast.errors import CheckpointError, InputError
from narrowcast.jobs.coded import Coded
from narrowcast.jobs.matching import Held
from narrowcast.jobs.stream import CHUNK_BYTES, ProgressFactory, Workers, chunks
from narrowcast.kernels import Scan, choose, choose_survey
from narrowcast.kernels.reference.survey import Counts, Ranks
from narrowcast.numbers.formats import formats
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.packing import BYTES
from narrowcast.tensors.schemes import schemes

BATCH = 64
Looked = tuple[Matrix | Refusal, Summary | None, list[tuple[Rule, Finding]]]


def look(held: Held, codes: bool) -> Matrix:
    """Read a matrix: its scales, and with ``codes`` its codes as well."""
    coded = held.coded
    assert coded is not None
    source, how = held.checkpoint, coded.how
    n = coded.shape[0]
    scales, zero = how.scales(source, coded.place, coded.shape, 0, n)
    outer = coded.outer(source)
    if outer and how.scheme.scales[-1].divides:
        outer = 1 / outer  # in double precision, so that the stored divisor can be had back
    part = how.part("input")
    given = part is not None and coded.place.stem + part.suffix in source.entries
    inputs = float(how.static(source, coded.place, coded.shape, "input")[0]) if given else None
    counts, peaks = _codes(coded, source) if codes else (None, None)
    return Matrix(held, coded, scales, zero, outer, inputs, counts, peaks)


def _codes(coded: Coded, source: Checkpoint) -> tuple[Counts, Ranks]:
    how, scheme = coded.how, coded.how.scheme
    n, k = coded.shape
    table, survey = ranks(scheme.element), choose_survey(how.packing)
    counts = np.zeros(len(table), np.int64)
    part = how.part("codes")
    assert part is not None
    across = 8 if part.across else 1
    grids = []
    for i, j in chunks(n, how.packing.row_bytes(k), how.row_multiple, across * CHUNK_BYTES):
        rows = how.codes(source, coded.place, coded.shape, i, j)
        found, peaks = survey(rows, how.packing, k, scheme.inner.tile, table)
        counts += found
        grids.append(peaks)
    if scheme.inner.tile[0]:
        return counts, np.concatenate(grids) if grids else np.zeros((0, 0), np.uint8)
    return counts, np.maximum.reduce(grids)


def matrix_pass(
    subject: Subject, rules: Sequence[Rule], pool: Workers, progress: ProgressFactory
) -> Iterator[tuple[Rule, Finding]]:
    """Every quantized matrix under the rules of its scope."""
    codes = subject.depth in ("codes", "parent")
    todo = list(subject.quantized.values())
    bar = progress(sum(one.nbytes for one in todo), "reading codes" if codes else "reading scales")

    def one(held: Held) -> Looked:
        try:
            matrix = look(held, codes)
        except (
            CheckpointError,
            InputError,
        ) as error:  # what headers cannot show, such as bytes that are no codes
            return Refusal(error, held.name), None, []
        with np.errstate(all="ignore"):  # what a broken scale makes of values may be anything
            found = [(rule, finding) for rule in rules for finding in rule.check(matrix)]
            summary = subject.summarize(matrix)
        bar.advance(held.nbytes)
        return matrix, summary, found

    def work(batch: Sequence[Held]) -> list[Looked]:
        return [one(held) for held in batch]

    with pool.map(work, _batches(todo, codes)) as results:
        for matrix, summary, found in chain.from_iterable(results):
            if isinstance(matrix, Refusal):
                subject.found.layer_refusals.append(matrix)
            else:
                assert summary is not None
                subject.add(matrix, summary)
                yield from found
    bar.done()


def _batches(todo: Sequence[Held], codes: bool) -> Iterator[list[Held]]:
    """Small matrices together, so that a task of a thread costs less than what it does: up to 64 that read a megabyte
    in all, since results wait for their turn with their grids."""
    batch: list[Held] = []
    size = 0
    for held in todo:
        batch.append(held)
        size += held.nbytes if codes else _scale_bytes(held)
        if len(batch) == BATCH or size >= CHUNK_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _scale_bytes(held: Held) -> int:
    coded = held.coded
    assert coded is not None
    part = coded.how.part("scales")
    entry = held.checkpoint.entries.get(coded.place.stem + part.suffix) if part is not None else None
    return entry.nbytes // (coded.place.experts or 1) if entry is not None else 0


def float_pass(
    subject: Subject, rules: Sequence[Rule], pool: Workers, progress: ProgressFactory
) -> Iterator[tuple[Rule, Finding]]:
    """Every plain tensor of floats: amax and what is not finite, and the rules of its scope."""
    todo = [one for one in subject.held.values() if one.coded is None and _is_float(one)]
    bar = progress(sum(one.nbytes for one in todo), "reading floats")

    def work(held: Held) -> Scan:
        found = scan(held)
        bar.advance(held.nbytes)
        return found

    with pool.map(work, todo) as results:
        for held, seen in zip(todo, results, strict=True):
            subject.floats[held.name] = seen
            for rule in rules:
                yield from ((rule, finding) for finding in rule.check((held, seen)))
    bar.done()


def _is_float(held: Held) -> bool:
    return (
        held.dtype is not None and held.dtype.format in ("bf16", "fp16", "fp32") and held.source.shape[1] > 0
    )


def scan(held: Held) -> Scan:
    """amax and non-finite values of a plain tensor; the first index is flat over its matrix."""
    assert held.dtype is not None
    fmt = formats[str(held.dtype.format)]
    backend = choose(schemes["fp8_channel"], fmt, BYTES).backend  # every scheme scans alike
    (n, k), found = held.source.shape, Scan(0.0)
    for i, j in chunks(n, k * held.carrier.itemsize, 1, held.source.chunk_bytes):
        seen = backend.scan(np.ascontiguousarray(held.stored(i, j)), fmt)
        first = found.first if found.first >= 0 or seen.first < 0 else seen.first + i * k
        found = Scan(max(found.amax, seen.amax), found.nan + seen.nan, found.inf + seen.inf, first)
    return found


def pair_pass(
    subject: Subject, rules: Sequence[Rule], pool: Workers, progress: ProgressFactory
) -> Iterator[tuple[Rule, Finding]]:
    """Every tensor beside the parent's. What is far from it is looked into afterwards, so that which ones those are
    does not depend on threads; then the rules see what is left of each pair."""
    from narrowcast.audit.pairs import Pair, explain, look_at_pair
    from narrowcast.jobs.matching import CACHE_SCALE, INPUT_SCALE

    todo = [
        (one, original)
        for name, one in subject.held.items()
        if one.role not in (INPUT_SCALE, CACHE_SCALE)
        and (original := subject.originals.get(name)) is not None
    ]
    bar = progress(sum(a.nbytes + b.nbytes for a, b in todo), "comparing with the parent")

    def work(both: tuple[Held, Held]) -> Pair:
        pair = look_at_pair(*both)
        bar.advance(both[0].nbytes + both[1].nbytes)
        return pair

    with pool.map(work, todo) as results:
        subject.pairs.update((pair.name, pair) for pair in results)
    bar.done()
    explain(subject, pool)
    for pair in subject.pairs.values():
        yield from ((rule, finding) for rule in rules for finding in rule.check(pair))
