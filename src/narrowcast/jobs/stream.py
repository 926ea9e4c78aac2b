"""Where work runs: threads of this machine, fed with row chunks that fit a core's cache.

A unit of work is one output matrix; it is cut into chunks of whole tiles, read from the source straight into
a small buffer, and handed to kernels that release the GIL. Memory is a few chunks per worker, whatever the
size of a tensor. Results come back in submission order, so sums and bytes do not depend on the workers.

Left out: machines in the plural. Units are independent and named, which is all that a cluster would need.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from narrowcast.model.modules import Orientation, Part
from narrowcast.store.checkpoint import Checkpoint

CHUNK_BYTES = 1 << 20  # half of a 2 MB second-level cache: source and result stay resident
T = TypeVar("T")
R = TypeVar("R")


class Progress(Protocol):
    """What a job tells while it runs: bytes of source that are done."""

    def advance(self, n: int) -> None: ...

    def done(self) -> None: ...


ProgressFactory = Callable[[int, str], Progress]


class Silent:
    """Progress for nobody."""

    def __init__(self, total: int = 0, label: str = "") -> None:
        pass

    def advance(self, n: int) -> None:
        pass

    def done(self) -> None:
        pass


class Workers:
    """A thread pool that keeps order, holds few items in flight and stops at the first error."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.count, "narrowcast")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=error is not None)

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """``work`` over ``items``, results in order; the first exception in order is raised."""
        return self._pool.map(work, items)


@dataclass(frozen=True)
class Slice:
    """Where an output matrix [N, K] lies in a source tensor: the whole of it, or one projection of one expert."""

    tensor: str
    shape: tuple[int, int]
    orientation: Orientation = "out_in"
    expert: int | None = None
    part: Part | None = None

    def read(self, source: Checkpoint, carrier: np.dtype[Any], start: int, stop: int) -> NDArray[Any]:
        """Rows start:stop as a fresh C-contiguous array [stop - start, K] in the carrier dtype."""
        k = self.shape[1]
        first, step = (self.part.start, self.part.step) if self.part else (0, 1)
        if self.orientation == "out_in" and step == 1:
            rows_before = first + start
            if self.expert is not None:
                rows_before += self.expert * source.entries[self.tensor].shape[1]
            chunk = np.empty((stop - start, k), carrier)
            source.read_into(self.tensor, chunk, rows_before * k * carrier.itemsize)
            return chunk
        stored = source.array(self.tensor)
        matrix = stored if self.expert is None else stored[self.expert]
        if self.orientation == "in_out":
            matrix = matrix.T
        rows = matrix[first + start * step : first + (stop - 1) * step + 1 : step]
        chunk = np.ascontiguousarray(rows)
        del stored, matrix, rows
        source.reader(source.entries[self.tensor].path).release()
        return chunk


def chunks(rows: int, row_bytes: int, multiple: int) -> list[tuple[int, int]]:
    """Row ranges of about CHUNK_BYTES that begin on multiples of ``multiple``."""
    height = max(CHUNK_BYTES // max(row_bytes, 1) // multiple, 1) * multiple
    return [(i, min(i + height, rows)) for i in range(0, rows, height)]
