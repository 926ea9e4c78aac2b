"""Where work runs: threads of this machine, fed with row chunks that fit a core's cache.

A unit of work is one output matrix; it is cut into chunks of whole tiles, read from the source straight into
a small buffer, and handed to kernels that release the GIL. Memory is a few chunks per worker, whatever the
size of a tensor. Results come back in submission order, so sums and bytes do not depend on the workers.

Left out: machines in the plural. Units are independent and named, which is all that a cluster would need.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.model.modules import Orientation, Part
from narrowcast.store.checkpoint import Checkpoint

CHUNK_BYTES = 1 << 20  # half of a 2 MB second-level cache: source and result stay resident
COLUMN_CHUNK_BYTES = 8 * CHUNK_BYTES  # of a matrix that lies in columns, whose pieces would be too short else
BLOCK = 64  # rows and columns that are transposed at once, so that they stay in the first-level cache
STRIP = 8 * BLOCK  # rows of the file that are read before they are transposed
AHEAD = 32  # chunks in flight for each worker: enough to wait for a slow one without standing idle
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
        self.count = self.count_of(count)
        self._pool = ThreadPoolExecutor(self.count, "narrowcast")

    @staticmethod
    def count_of(asked: int | None) -> int:
        """How many threads that is: one for each core that this process may use, when nothing is asked."""
        if asked is not None and asked < 1:
            raise UsageError("the number of workers is not positive", got=asked, wanted="1 or more")
        return len(os.sched_getaffinity(0)) if asked is None else asked

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=error is not None)

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> closing[Generator[R, None, None]]:
        """``work`` over ``items``, for use in a ``with``: results in order, or the first exception in order.

        Leaving the ``with``, for whatever reason, waits for what is running: files may be closed after it.
        """
        return closing(self._results(work, items))

    def run(self, work: Callable[[T], object], items: Iterable[T]) -> None:
        """``work`` over ``items``, for its effects."""
        with self.map(work, items) as results:
            deque(results, maxlen=0)

    def _results(self, work: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
        flying: deque[Future[R]] = deque()
        try:
            for item in items:
                flying.append(self._pool.submit(work, item))
                if len(flying) > AHEAD * self.count:
                    yield flying.popleft().result()
            while flying:
                yield flying.popleft().result()
        finally:
            for future in flying:
                future.cancel()
            wait(flying)


@dataclass(frozen=True)
class Slice:
    """Where an output matrix [N, K] lies in a source tensor: the whole of it, or one projection of one expert."""

    tensor: str
    shape: tuple[int, int]
    orientation: Orientation = "out_in"
    expert: int | None = None
    part: Part | None = None

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the source that are worked on at once."""
        return CHUNK_BYTES if self.orientation == "out_in" else COLUMN_CHUNK_BYTES

    def read(self, source: Checkpoint, carrier: np.dtype[Any], start: int, stop: int) -> NDArray[Any]:
        """Rows start:stop as a fresh C-contiguous array [stop - start, K] in the carrier dtype.

        The file is read and never mapped: a mapping counts all it touched as resident, and kills the process
        when the file shrinks or the disk fails.
        """
        first, step = (self.part.start, self.part.step) if self.part else (0, 1)
        first, count, k = first + start * step, stop - start, self.shape[1]
        stored_rows, stored_columns = source.entries[self.tensor].shape[-2:]
        before = (self.expert or 0) * stored_rows * stored_columns
        if self.orientation == "out_in":
            chunk = np.empty((count, k), carrier)
            at, stride = (before + first * k) * carrier.itemsize, step * k * carrier.itemsize
            source.read_pieces(self.tensor, chunk, at, stride)
            return chunk
        chunk = np.empty((count, k), carrier)
        strip = np.empty((STRIP, (count - 1) * step + 1), carrier)
        at, stride = (before + first) * carrier.itemsize, stored_columns * carrier.itemsize
        for i in range(0, k, STRIP):
            pieces = strip[: min(STRIP, k - i)]
            source.read_pieces(self.tensor, pieces, at + i * stride, stride)
            transpose(pieces[:, ::step], chunk[:, i : i + STRIP])
        return chunk


@dataclass(frozen=True)
class Floats:
    """A whole tensor of floats, all axes but the last flattened."""

    tensor: str
    shape: tuple[int, int]
    chunk_bytes: int = CHUNK_BYTES

    def read(self, source: Checkpoint, carrier: np.dtype[Any], start: int, stop: int) -> NDArray[Any]:
        """Rows start:stop as a fresh array in the carrier dtype."""
        return source.rows(self.tensor, start, stop)


def transpose(matrix: NDArray[Any], out: NDArray[Any]) -> None:
    """Write the transpose of ``matrix`` [R, C] into ``out`` [C, R], block by block."""
    rows, columns = matrix.shape
    for i in range(0, rows, BLOCK):
        for j in range(0, columns, BLOCK):
            out[j : j + BLOCK, i : i + BLOCK] = matrix[i : i + BLOCK, j : j + BLOCK].T


def chunks(rows: int, row_bytes: int, multiple: int, size: int) -> list[tuple[int, int]]:
    """Row ranges of about ``size`` bytes that begin on multiples of ``multiple``."""
    height = max(size // max(row_bytes, 1) // multiple, 1) * multiple
    return [(i, min(i + height, rows)) for i in range(0, rows, height)]
