"""An output directory that is either absent or complete, and a job that continues where it was killed.

    OUT.partial/job.json     what is being made: the identity of the job, and its lock OUT.partial/model/
    finished shards (renamed from .tmp when synced), side files, then index and config.json OUT
    = OUT.partial/model, renamed in one step after everything is on disk

A directory with the final name is what other programs believe, so it must never hold half a model: not after
a kill, not after a power cut, not on a full disk. All checks that can fail are made before the first byte:
place, rights, free space against the forecast, and whether a partial output belongs to this very job. Since
shards are laid out independently of the order of work, a resumed job ends in the same bytes as an undisturbed
one.

Left out on purpose: writing into a directory that exists. An empty one is taken over, any other is refused.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Self

from narrowcast.errors import InputError, StorageError, UsageError
from narrowcast.store.folder import CONFIG, INDEX, some
from narrowcast.store.header import read_header
from narrowcast.store.places import (
    check_absent,
    check_place,
    lock,
    make_partial,
    no_partial,
    partial_path,
    place,
)
from narrowcast.store.writer import Spec, Writer, free_bytes, layout, storage_error, sync_directory

MARGIN = 16 * 2**20  # bytes kept free beyond the forecast, for the filesystem's own tables
_ONE_FILE = "model.safetensors"
_TEMPORARY = ".narrowcast-tmp"  # of small files and copies; no file of a model is called that


class Output:
    """The output of one job; get it from ``begin``, fill it, ``commit`` it.

    Leaving the ``with`` block without ``commit`` keeps the partial output, so that the job can be resumed.
    What an earlier attempt left and this one neither makes nor finds ``done`` is not part of the result.
    ``notes`` collects fallbacks worth telling the user, with their reasons. ``writer``, ``put`` and ``copy``
    may be called from several threads as long as their names differ.
    """

    def __init__(self, out: Path, lock: int) -> None:
        self.path = out
        self.partial = partial_path(out)
        self.staging = self.partial / "model"
        self.notes: list[str] = []
        self._lock = lock
        self._made: set[Path] = set()

    @classmethod
    def begin(
        cls, out: str | os.PathLike[str], job: Mapping[str, Any], *, forecast: int, resume: bool, source: Path
    ) -> Output:
        """Claim the output directory for a job whose identity is ``job`` (JSON) and whose files take
        ``forecast`` bytes.

        Raises UsageError when OUT exists, is entangled with the source, has no parent directory, or was begun
        before and ``resume`` is False; StorageError when the disk is too small or read-only, another process
        is at work on it, or the partial output belongs to another job.
        """
        path = place(out)
        check_place(path, Path(source))
        check_absent(path)
        partial = partial_path(path)
        begun = make_partial(partial, forecast, resume)
        held, note = lock(partial)
        output = cls(path, held)
        output.notes += [note] if note else []
        try:
            check_absent(path)  # again: until the lock was ours another process could finish it
            output._adopt(json.loads(_canonical(job)))
            output._check_space(forecast)
            output._check_final_step()
        except BaseException:
            output.abort(keep=begun)
            raise
        return output

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort(keep=True)

    def done(self, shard: str, specs: Sequence[Spec], metadata: Mapping[str, str] | None = None) -> bool:
        """Whether this shard was finished before a kill. StorageError when a different file has its name."""
        path = self._place(shard)
        if not path.exists():
            return False
        wanted = layout(specs, metadata)
        with open(path, "rb") as file:
            same = file.read(len(wanted.header)) == wanted.header
        size = path.stat().st_size
        if not same or size != wanted.size:
            raise StorageError(
                f"the finished shard {shard} is not the one this job makes",
                where=path,
                got=f"{size} bytes, header {'equal' if same else 'different'}",
                wanted=f"{wanted.size} bytes",
                remedy=f"remove {self.partial} and start again",
            )
        self._made.add(path)
        return True

    def writer(self, shard: str, specs: Sequence[Spec], metadata: Mapping[str, str] | None = None) -> Writer:
        """A Writer for one shard; its ``finish`` makes the shard survive a kill."""
        writer = Writer(self._place(shard), specs, metadata)
        self._made.add(writer.path)
        if writer.fallback and writer.fallback not in self.notes:
            self.notes.append(writer.fallback)
        return writer

    def put(self, name: str | PurePath, content: bytes) -> None:
        """Write a small file; subfolders are made."""
        path = self._place(name)
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            os.rename(temporary, path)
        except OSError as error:
            raise storage_error(error, path, len(content)) from error
        self._made.add(path)

    def copy(self, source: Path, name: str | PurePath) -> None:
        """Copy a file byte for byte, by the filesystem itself where it can; symlinks are followed."""
        path = self._place(name)
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            reading = open(source, "rb")  # noqa: SIM115 - a failure here is the source's, below it is the disk's
        except OSError as error:
            raise InputError(
                "a file of the source cannot be read", where=source, got=error.strerror
            ) from error
        with reading:
            size = os.fstat(reading.fileno()).st_size
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(temporary, "wb") as writing:
                    _copy_bytes(reading.fileno(), writing.fileno(), size)
                os.rename(temporary, path)
            except OSError as error:
                raise storage_error(error, path, size) from error
        self._made.add(path)

    def commit(self, config: bytes | None = None) -> Path:
        """Write the index and config.json, sync everything, and give the directory its final name.

        The index is left out when the only shard is model.safetensors, which loaders find without it. Raises
        UsageError when a shard is unfinished or a tensor is in two of them.
        """
        unfinished = sorted(path.name for path in self._unfinished())
        if unfinished:
            raise UsageError("a file is not finished", where=self.staging, got=", ".join(unfinished))
        self._drop_stale()
        index = self._index()
        if index is not None:
            self.put(INDEX, (json.dumps(index, indent=2) + "\n").encode())
        if config is not None:
            self.put(CONFIG, config)
        try:
            _sync_tree(self.staging)
            os.rename(self.staging, self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            raise storage_error(error, self.path, 0) from error
        self.abort(keep=False)
        return self.path

    def abort(self, *, keep: bool) -> None:
        """Let go of the output; ``keep`` leaves the partial output for a resume, otherwise it is removed."""
        if self._lock < 0:
            return
        if not keep:
            shutil.rmtree(self.partial, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def _place(self, name: str | PurePath) -> Path:
        relative = PurePath(name)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise UsageError("a file of the output must lie inside it", where=self.path, got=str(name))
        return self.staging / relative

    def _adopt(self, job: dict[str, Any]) -> None:
        """Record the job in a fresh partial output; in an old one, check that it is the same and tidy up."""
        record = self.partial / "job.json"
        if not self.staging.exists():
            strangers = sorted(set(os.listdir(self.partial)) - {"job.json", "job.json.tmp"})
            if strangers:  # commit removes the directory, so it must not be anybody else's
                raise no_partial(self.partial, some(strangers))
            temporary = record.with_name("job.json.tmp")
            try:
                temporary.write_bytes(_canonical(job))
                os.rename(temporary, record)
                self.staging.mkdir()
            except OSError as error:
                raise storage_error(error, record, len(_canonical(job))) from error
            return
        try:
            begun = json.loads(record.read_bytes())
        except (OSError, ValueError):
            begun = None
        if not isinstance(begun, dict):
            raise StorageError(
                "the partial output has no readable job record", where=record, remedy=f"remove {self.partial}"
            )
        if begun != job:
            differing = sorted(key for key in begun.keys() | job.keys() if begun.get(key) != job.get(key))
            raise StorageError(
                f"the partial output belongs to another job: {', '.join(differing)} differ",
                where=self.partial,
                got=_excerpt(begun, differing),
                wanted=_excerpt(job, differing),
                remedy=f"run that job again with --resume, or remove {self.partial}",
            )
        for stale in self._unfinished():
            stale.unlink()

    def _drop_stale(self) -> None:
        """Remove what only an earlier attempt made, so that a resumed job ends in the same files as any other."""
        for path in sorted(self.staging.rglob("*"), reverse=True):  # contents before their folder
            if not path.is_dir():
                if path not in self._made:
                    path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()

    def _check_final_step(self) -> None:
        """Try on an empty directory what commit does in the end: a mount point cannot be taken over by a rename."""
        if os.path.lexists(self.path):
            empty = self.partial / "empty"
            try:
                empty.mkdir(exist_ok=True)
                os.rename(empty, self.path)
            except OSError as error:
                if empty.exists():
                    empty.rmdir()
                raise storage_error(error, self.path, 0) from error

    def _unfinished(self) -> list[Path]:
        return [*self.staging.rglob("*.safetensors.tmp"), *self.staging.rglob("*" + _TEMPORARY)]

    def _check_space(self, forecast: int) -> None:
        present = sum(path.stat().st_size for path in self.staging.rglob("*") if path.is_file())
        free, needed = free_bytes(self.staging), max(0, forecast - present) + MARGIN
        if isinstance(free, int) and free < needed:
            raise StorageError(
                "the disk is too small for the output",
                where=self.path.parent,
                got=f"{free} bytes free",
                wanted=f"{needed} bytes ({forecast} in all, {present} already there, {MARGIN} to spare)",
                remedy="free some space or choose another disk",
            )

    def _index(self) -> dict[str, Any] | None:
        shards = sorted(path for path in self.staging.iterdir() if path.name.endswith(".safetensors"))
        if not needs_index([path.name for path in shards]):
            return None
        table: dict[str, str] = {}
        total = 0
        for path in shards:
            for name, entry in read_header(path).entries.items():
                if name in table:
                    raise UsageError(
                        f"tensor {name!r} is in two shards", got=f"{table[name]} and {path.name}"
                    )
                table[name] = path.name
                total += entry.nbytes
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(table.items()))}


def needs_index(shards: Sequence[str]) -> bool:
    """Whether shards of these names need an index; loaders find model.safetensors alone without one."""
    return bool(shards) and list(shards) != [_ONE_FILE]


def _canonical(job: Mapping[str, Any]) -> bytes:
    return (json.dumps(job, sort_keys=True, indent=1) + "\n").encode()


def _excerpt(job: Mapping[str, Any], keys: list[str]) -> str:
    return "; ".join(f"{key}={str(job.get(key, 'absent'))[:60]}" for key in keys[:5])


def _copy_bytes(reading: int, writing: int, size: int) -> None:
    """Copy in the kernel, which may share blocks, or with reads and writes where it cannot."""
    copied = 0
    try:
        while copied < size:
            done = os.copy_file_range(reading, writing, size - copied)
            if done == 0:
                break
            copied += done
    except OSError as error:
        if copied or error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    while block := os.read(reading, 2**20):
        view = memoryview(block)
        while len(view):
            view = view[os.write(writing, view) :]


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_directory(Path(folder))
