"""A safetensors file that grows in place: all sizes are known first, then bytes arrive in any order.

    size = 8 + header + Σ bytes(dtype, shape)

Because every size is known before the first value is computed, the whole file is reserved at the start (a
full disk fails then, not an hour later), the header is written at once, and each chunk has its final place:
workers write concurrently with ``pwrite`` and nothing is ever moved. The file carries the suffix ``.tmp``
until ``finish`` has seen every byte of every tensor written exactly once and safely on disk; only then is it
renamed, so a file under its final name is complete.

Order in the file: dtype rank downwards, then name, the order in which the safetensors package writes. The
data start is padded to 8 bytes and element sizes only shrink along the file, so every tensor is aligned to
its carrier; and the bytes depend on nothing but the tensors, not on the order in which they were listed. The
header is spelled as that package spells it, so the same tensors give the same file.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from narrowcast.errors import StorageError, UsageError
from narrowcast.store.dtypes import DType, nbytes
from narrowcast.store.header import MAX_HEADER


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor to be written: name, dtype, logical shape."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything goes: the first bytes of the file (length and header), the place of each tensor, the
    total.

    ``offsets`` maps a name to (absolute offset, bytes), in file order; ``size`` is the size of the file.
    """

    header: bytes
    offsets: dict[str, tuple[int, int]]
    size: int


def layout(specs: Sequence[Spec], metadata: Mapping[str, str] | None = None) -> Layout:
    """Lay tensors out in a file; the same tensors and metadata give the same bytes, in whatever order they
    come.

    Raises UsageError for a name given twice, an impossible shape or name, or a header beyond the format's
    limit.
    """
    ordered = sorted(specs, key=lambda spec: (-spec.dtype.rank, spec.name))
    table: dict[str, Any] = {}
    if metadata:
        table["__metadata__"] = dict(sorted(metadata.items()))
    cursor, places = 0, {}
    for spec in ordered:
        if spec.name in table or spec.name == "__metadata__":
            raise UsageError(f"the tensor name {spec.name!r} is taken", wanted="one tensor for each name")
        if any(size < 0 for size in spec.shape):
            raise UsageError(f"tensor {spec.name!r} has a negative size", got=list(spec.shape))
        size = nbytes(spec.dtype, spec.shape)
        places[spec.name] = (cursor, size)
        shape = [int(axis) for axis in spec.shape]
        table[spec.name] = {"dtype": spec.dtype.name, "shape": shape, "data_offsets": [cursor, cursor + size]}
        cursor += size
    text = _spell(table)
    start = 8 + len(text)
    offsets = {name: (start + begin, size) for name, (begin, size) in places.items()}
    return Layout(len(text).to_bytes(8, "little") + text, offsets, start + cursor)


def _spell(table: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            "a tensor name or metadata text is not Unicode", got=repr(error.object[:80])
        ) from None
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise UsageError(
            "the header would be too large for the format",
            got=f"{len(text)} bytes for {len(table)} tensors",
            wanted=f"at most {MAX_HEADER} bytes",
            remedy="spread the tensors over more shards",
        )
    return text


class Writer:
    """Writes one safetensors file through ``<path>.tmp``; the final name appears only with complete, synced
    content.

    ``write`` may be called from several threads, with chunks in any order. Leaving the ``with`` block without
    ``finish`` removes the temporary file. ``fallback`` says why the space could not be reserved, if it could
    not. ``places`` is the layout of a file of another format (GGUF), for the same tensors.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Sequence[Spec],
        metadata: Mapping[str, str] | None = None,
        places: Layout | None = None,
    ) -> None:
        self.path = Path(path)
        self.temporary = self.path.with_name(self.path.name + ".tmp")
        self.layout = layout(specs, metadata) if places is None else places
        self._widths = {spec.name: spec.dtype.carrier.itemsize for spec in specs}
        self.fallback: str | None = None
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in self.layout.offsets}
        self._pending = 0
        self._lock = threading.Lock()
        if self.path.exists():
            raise UsageError(
                "the output file exists", where=self.path, remedy="remove it or choose another name"
            )
        self._fd = self._create()
        try:
            self._reserve()
            self._pwrite(self.layout.header, 0)
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def write(self, name: str, data: Any, start: int = 0) -> None:
        """Write bytes or an array (its bytes in C order) at byte ``start`` inside tensor ``name``.

        Raises UsageError for an unknown tensor, bytes beyond its end, or bytes that were written before;
        StorageError when the disk refuses.
        """
        if name not in self.layout.offsets:
            raise UsageError(f"no tensor {name!r} was announced for this file", where=self.path)
        offset, size = self.layout.offsets[name]
        self._check_elements(name, data)
        view = as_bytes(data)
        if start < 0 or start + len(view) > size:
            raise UsageError(
                f"a write beyond tensor {name!r}",
                where=self.path,
                got=f"bytes {start} to {start + len(view)}",
                wanted=f"within 0 to {size}",
            )
        if len(view):
            with self._lock:
                self._claim(name, start, start + len(view))
                self._pending += 1
            self._pwrite(view, offset + start)
            with self._lock:  # not in a finally: a failed write stays pending, so that finish refuses
                self._pending -= 1

    def write_pieces(self, name: str, data: np.ndarray[Any, Any], start: int, stride: int) -> None:
        """Write the rows of ``data`` (two axes) at bytes start, start + stride, ... inside tensor ``name``; see
        ``write``. Rows that follow each other in the file are written at once."""
        if not data.size or data[0].nbytes == stride:
            self.write(name, data, start)
            return
        for i, row in enumerate(data):
            self.write(name, row, start + i * stride)

    def finish(self) -> None:
        """Check that every byte was written (UsageError names what is missing), sync, and rename."""
        for name, (_, size) in self.layout.offsets.items():
            spans = self._written[name]
            if size and spans != [(0, size)]:
                done = sum(end - begin for begin, end in spans)
                raise UsageError(
                    f"tensor {name!r} is not completely written",
                    where=self.path,
                    got=f"{done} bytes",
                    wanted=f"{size} bytes",
                )
        if self._pending:
            raise UsageError(
                "writes failed or are still running", where=self.path, got=f"{self._pending} writes"
            )
        try:
            os.fsync(self._fd)
            os.rename(self.temporary, self.path)
            self._close()
            sync_directory(self.path.parent)
        except OSError as error:
            raise storage_error(error, self.path, self.layout.size) from error

    def abort(self) -> None:
        """Remove the temporary file, unless ``finish`` has already made it final."""
        if self._fd >= 0:
            self.temporary.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _create(self) -> int:
        try:
            return os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise StorageError(
                "a temporary file of this name exists: another job writes it, or one was killed",
                where=self.temporary,
                remedy="if no other job is running, remove it",
            ) from None
        except OSError as error:
            raise storage_error(error, self.path, self.layout.size) from error

    def _reserve(self) -> None:
        try:
            os.posix_fallocate(self._fd, 0, self.layout.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise storage_error(error, self.path, self.layout.size) from error
            self.fallback = f"{self.path.parent}: the filesystem cannot reserve space ({error.strerror})"
            os.ftruncate(self._fd, self.layout.size)

    def _check_elements(self, name: str, data: Any) -> None:
        """An array must hold bytes or elements of the tensor's width: fp32 in a BF16 tensor is a mistake."""
        if isinstance(data, np.ndarray):
            width = self._widths[name]
            if data.itemsize not in (1, width) or data.dtype.byteorder == ">":
                raise UsageError(
                    f"the array does not hold elements of tensor {name!r}",
                    where=self.path,
                    got=str(data.dtype),
                    wanted=f"little-endian elements of {width} bytes, or single bytes",
                )

    def _claim(self, name: str, begin: int, end: int) -> None:
        """Note a byte range as written; neighbours merge, so in-order chunks keep a single range."""
        spans = self._written[name]
        at = bisect_left(spans, (begin, end))
        before, after = spans[at - 1] if at else None, spans[at] if at < len(spans) else None
        if (before and before[1] > begin) or (after and after[0] < end):
            raise UsageError(f"bytes {begin} to {end} of tensor {name!r} are written twice", where=self.path)
        low, high = at, at
        if before and before[1] == begin:
            low, begin = at - 1, before[0]
        if after and after[0] == end:
            high, end = at + 1, after[1]
        spans[low:high] = [(begin, end)]

    def _pwrite(self, data: Any, at: int) -> None:
        view = memoryview(data)
        try:
            while len(view):
                done = os.pwrite(self._fd, view, at)
                view, at = view[done:], at + done
        except OSError as error:
            raise storage_error(error, self.path, self.layout.size) from error


def as_bytes(data: Any) -> memoryview:
    """The bytes of an array or buffer in C order, without a copy when they lie that way already."""
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, so that a rename survives a power cut; where the filesystem can."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


_REASONS = {
    errno.ENOSPC: ("the disk is full", "free some space or choose another disk"),
    errno.EDQUOT: ("the disk quota is used up", "free some space or choose another disk"),
    errno.EFBIG: (
        "the file is larger than the filesystem or the process limit allows",
        "use smaller shards or another disk",
    ),
    errno.EROFS: ("the filesystem is read-only", "choose a writable directory"),
    errno.EACCES: ("no permission to write here", "choose a writable directory"),
    errno.EPERM: ("no permission to write here", "choose a writable directory"),
    errno.ENOENT: ("the directory does not exist", "create it first"),
    errno.ENOTDIR: ("a part of the path is not a directory", "choose another place"),
    errno.EBUSY: ("the directory is a mount point, which cannot be replaced", "choose a directory inside it"),
    errno.ENAMETOOLONG: ("the file name is too long", "choose a shorter name"),
}


def storage_error(error: OSError, path: Path, needed: int) -> StorageError:
    """An OSError of a write, told with the place, the bytes needed, the bytes free and what to do."""
    problem, remedy = _REASONS.get(error.errno or 0, (f"writing failed: {error.strerror}", None))
    return StorageError(
        problem, where=path, got=f"{free_bytes(path)} bytes free", wanted=f"{needed} bytes", remedy=remedy
    )


def free_bytes(path: Path) -> int | str:
    """Bytes that this process may still write on the filesystem that holds the nearest existing parent."""
    for place in (path, *path.parents):
        try:
            usage = os.statvfs(place)
        except OSError:
            continue
        return usage.f_bavail * usage.f_frsize
    return "unknown"
