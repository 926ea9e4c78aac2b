"""amax and non-finite values of matrices, by row chunks, before anything is quantized.

Of a matrix that is quantized already, a scan need not decode: in a sign-magnitude format |value| grows with the code
below its sign, and a product with one positive scale keeps that order, so a tile's amax is that of its largest code,

    amax = max over tiles  |decode(max code)| · scale        the same fp32 product that decoding makes

One byte an element is read instead of four.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from narrowcast.jobs.coded import Coded, folded
from narrowcast.jobs.plan import Unit
from narrowcast.jobs.stream import Progress, Workers, chunks
from narrowcast.kernels import Backend, Scan
from narrowcast.kernels.reference.survey import tile_maxima
from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import Kind
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.packing import BYTES
from narrowcast.tensors.scaling import element_divisor

PLAIN_PIECES = ("codes", "scales", "outer", "input", "shape")


def ranges(unit: Unit) -> list[tuple[int, int]]:
    """Row ranges of a matrix that are worked on at once."""
    n, k = unit.source.shape
    across = (
        8 if any(part.across for part in unit.how.parts) else 1
    )  # pieces of columns would be too short else
    return chunks(n, k * unit.carrier.itemsize, unit.row_multiple, across * unit.source.chunk_bytes)


def scan_units(
    source: Checkpoint, units: Sequence[Unit], pool: Workers, backend: Backend, bar: Progress
) -> dict[str, Scan]:
    """amax and non-finite counts of whole units; the first index is flat over the unit's matrix."""
    tasks = [(unit, i, j) for unit in units for i, j in ranges(unit)]

    def work(task: tuple[Unit, int, int]) -> Scan:
        unit, i, j = task
        seen = scan_codes(unit.source, source, i, j) if isinstance(unit.source, Coded) else None
        return seen or backend.scan(unit.source.read(source, unit.carrier, i, j), unit.dtype)

    found: dict[str, Scan] = {}
    with pool.map(work, tasks) as results:
        for (unit, i, _), scan in zip(tasks, results, strict=True):
            old = found.get(unit.module, Scan(0.0))
            first = old.first if old.first >= 0 or scan.first < 0 else scan.first + i * unit.source.shape[1]
            found[unit.module] = Scan(max(old.amax, scan.amax), old.nan + scan.nan, old.inf + scan.inf, first)
    return found


def scan_codes(matrix: Coded, source: Checkpoint, start: int, stop: int) -> Scan | None:
    """The scan of rows start:stop from their codes; None where codes alone do not say it, or say that something is
    not finite, which a decode then counts."""
    how, element = matrix.how, matrix.how.scheme.element
    plain = all(part.piece in PLAIN_PIECES for part in how.parts)
    if element.kind is not Kind.FLOAT or not element.signed or how.packing != BYTES or not plain:
        return None
    rows, scheme, outer = folded(matrix.rows(source, start, stop), how.scheme, matrix.outer(source))
    largest = tile_maxima(rows.packed & np.uint8((1 << (element.bits - 1)) - 1), scheme.inner.tile)
    stored = None if outer is None or len(scheme.scales) == 1 else np.full((1, 1), outer, np.float32)
    scales = element_divisor(rows.scales, scheme, stored)
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.abs(decode_table(element)[largest]) * scales
    return Scan(float(values.max(initial=0.0))) if np.isfinite(values).all() and (scales > 0).all() else None
