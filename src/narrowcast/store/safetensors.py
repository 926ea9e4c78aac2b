"""Safetensors in both directions: views and reads of a file that exists, a streaming writer for one that
will.

Why not the safetensors package: the job needs a numpy-only core, dtypes below a byte without torch, a reader
that names the tensor, the numbers and the remedy when a header lies, reads into a buffer that is reused, and
a writer that takes row chunks of many tensors in any order from many threads. That is little code; the
package stays the outside judge in the tests, both ways.

Two ways to read. ``Reader.array`` is a zero-copy view of the mapped file: good for looking, but every page
that is touched stays resident until ``release``. ``Reader.read_into`` and ``Reader.rows`` read with
``preadv`` into memory of the caller's choice: bounded, safe from many threads at once, and the interpreter
lock is free meanwhile.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import HeaderError, UsageError
from narrowcast.store.header import DOWNLOAD, Entry, Header, header_of, open_file, read_header, unreadable
from narrowcast.store.writer import Layout, Spec, Writer, as_bytes, layout

__all__ = ["Entry", "Header", "Layout", "Reader", "Spec", "Writer", "layout", "read_header"]


class Reader:
    """An open safetensors file: checked entries, views, and reads into memory of the caller's choice.

    Use it as a context manager, or ``close`` it. Views handed out by ``array`` stay valid after that: they
    hold the mapping. Every method may be called from several threads.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = open_file(self.path)
        try:
            self.header = header_of(self._fd, self.path)
        except BaseException:
            os.close(self._fd)
            raise
        self.entries = self.header.entries
        self.metadata = self.header.metadata
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Arrays that were handed out keep their pages."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._map = -1, None

    def entry(self, name: str) -> Entry:
        """The entry of a tensor; UsageError when the file has none of that name."""
        try:
            return self.entries[name]
        except KeyError:
            raise UsageError(f"no tensor {name!r} in this file", where=self.path) from None

    def array(self, name: str) -> NDArray[Any]:
        """A read-only view of a tensor in its carrier dtype and logical shape (sub-byte dtypes: 1-D bytes).

        Old files may place a tensor off its natural alignment; then ``flags.aligned`` of the view is False.
        """
        entry = self.entry(name)
        count = entry.nbytes // entry.dtype.carrier.itemsize
        if count == 0:
            flat = np.empty(0, entry.dtype.carrier)
            flat.flags.writeable = False
        else:
            flat = np.frombuffer(self._mapping(), entry.dtype.carrier, count, entry.offset)
        return flat if entry.dtype.packed else flat.reshape(entry.shape)

    def read_into(self, name: str, buffer: Any, start: int = 0) -> None:
        """Fill ``buffer`` (writable, contiguous) with bytes of the tensor, from its byte ``start`` on."""
        entry, view = self.entry(name), _writable(buffer)
        self._check_span(entry, start, len(view))
        self._fill(entry, view, entry.offset + start)

    def read_pieces(self, name: str, buffer: NDArray[Any], start: int, stride: int) -> None:
        """Fill each row of ``buffer`` (writable, contiguous, of two axes) with bytes of the tensor: row i from
        byte start + i · stride on. Rows that follow each other in the file are read at once."""
        entry, view = self.entry(name), _writable(buffer)
        if not len(view):
            return
        width = len(view) // len(buffer)
        self._check_span(entry, start, (len(buffer) - 1) * stride + width)
        at = entry.offset + start
        if width == stride:
            self._fill(entry, view, at)
            return
        for i in range(0, len(view), width):
            self._fill(entry, view[i : i + width], at)
            at += stride

    def _check_span(self, entry: Entry, start: int, size: int) -> None:
        if start < 0 or start + size > entry.nbytes:
            raise UsageError(
                f"a read beyond tensor {entry.name!r}",
                where=self.path,
                got=f"bytes {start} to {start + size}",
                wanted=f"within 0 to {entry.nbytes}",
            )

    def _fill(self, entry: Entry, view: memoryview, at: int) -> None:
        """Read bytes of the file from ``at`` on, as many as the view takes."""
        while len(view):
            try:
                done = os.preadv(self._fd, [view], at)
            except OSError as error:
                raise unreadable(error, self.path) from error
            if done == 0:
                raise HeaderError(
                    f"the file ends inside tensor {entry.name!r}: it shrank after it was opened",
                    where=self.path,
                    got=f"{at} bytes",
                    wanted=f"{self.header.file_size} bytes",
                    remedy=DOWNLOAD,
                )
            view, at = view[done:], at + done

    def rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        """A fresh array of rows ``first:last`` of the tensor seen as a matrix, all axes but the last
        flattened.

        Shape (last − first, columns) in the carrier dtype; for sub-byte dtypes the columns are packed bytes.
        A vector is one row, a scalar one row of one column.
        """
        entry = self.entry(name)
        count, columns = matrix_shape(entry)
        if not 0 <= first <= last <= count:
            raise UsageError(
                f"rows beyond tensor {name!r}",
                where=self.path,
                got=f"{first}:{last}",
                wanted=f"within 0:{count}",
            )
        out = np.empty((last - first, columns), entry.dtype.carrier)
        self.read_into(name, out, first * columns * entry.dtype.carrier.itemsize)
        return out

    def release(self) -> None:
        """Give the pages that views have touched back to the system; views stay valid, and reload on use."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def _mapping(self) -> mmap.mmap:
        with self._lock:
            if self._map is None:
                try:
                    self._map = mmap.mmap(self._fd, self.header.file_size, access=mmap.ACCESS_READ)
                except OSError as error:
                    raise unreadable(error, self.path) from error
            return self._map


def _writable(buffer: Any) -> memoryview:
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise UsageError("cannot read into this buffer", wanted="writable memory, contiguous in C order")
    return as_bytes(buffer)


def matrix_shape(entry: Entry) -> tuple[int, int]:
    """(rows, stored columns) of a tensor with all axes but the last flattened; packed columns are bytes.

    Raises UsageError when a row of a sub-byte tensor does not fill whole bytes.
    """
    columns = entry.shape[-1] if entry.shape else 1
    rows = math.prod(entry.shape[:-1])
    if not entry.dtype.packed:
        return rows, columns
    if columns * entry.dtype.bits % 8:
        raise UsageError(
            f"rows of tensor {entry.name!r} do not start at whole bytes",
            where=entry.path,
            got=f"{columns} {entry.dtype.name} elements in a row",
        )
    return rows, columns * entry.dtype.bits // 8
