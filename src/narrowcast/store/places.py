"""Where an output may lie, where it waits until it is finished, and who holds it meanwhile.

Whatever exists already is somebody's: an output never replaces anything but an empty directory, never lies in
or around its source, and only a partial output that a job began, and that no other process holds, is resumed.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from narrowcast.errors import StorageError, UsageError
from narrowcast.store.writer import storage_error


def place(out: str | os.PathLike[str]) -> Path:
    """Where ``out`` is: absolute, with the links and dots in front of its name resolved as the system does."""
    path = Path(out)
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name


def partial_path(out: Path) -> Path:
    """Where an unfinished output waits."""
    return out.with_name(out.name + ".partial")


def check_place(out: Path, source: Path) -> None:
    """UsageError when OUT is entangled with the source, or there is no directory to make it in."""
    if not out.name:
        raise UsageError("the output must be a directory that can be created", got=str(out))
    original, target = Path(os.path.realpath(source)), Path(os.path.realpath(out))
    for taken in (target, partial_path(target)):
        if taken == original:
            raise UsageError("the output is the source itself", where=out, remedy="choose another directory")
        if original in taken.parents or taken in original.parents:
            side = "inside the source" if original in taken.parents else "around the source"
            raise UsageError(
                f"the output lies {side}",
                where=out,
                got=f"source {source}",
                remedy="choose another directory",
            )
    if not os.path.isdir(out.parent):
        raise UsageError(
            "the parent of the output does not exist, is no directory or cannot be entered",
            where=out.parent,
            remedy="choose another place" if os.path.lexists(out.parent) else f"mkdir -p {out.parent}",
        )


def check_absent(out: Path) -> None:
    """UsageError when there is anything at OUT but an empty directory."""
    if not os.path.lexists(out):
        return
    try:
        if os.path.isdir(out) and not os.path.islink(out) and not os.listdir(out):
            return
    except OSError:  # not even listable, so not an empty directory to take over
        pass
    raise UsageError("the output exists already", where=out, remedy="choose another name, or remove it first")


def make_partial(partial: Path, forecast: int, resume: bool) -> bool:
    """Make the partial directory; True when it was there before, which only ``resume`` allows."""
    try:
        partial.mkdir()
        return False
    except FileExistsError:
        if not resume:
            raise UsageError(
                "a partial output is here: an earlier run was interrupted, or another one is running",
                where=partial,
                remedy=f"--resume to continue it, or remove {partial}",
            ) from None
        return True
    except OSError as error:
        raise storage_error(error, partial, forecast) from error


def lock(partial: Path) -> tuple[int, str | None]:
    """A descriptor that locks the partial output until it is closed, however the process ends; and why it does
    not, on a filesystem that has no locks."""
    try:
        fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise no_partial(partial, "a file or a link") from None
        raise storage_error(error, partial, 0) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(partial).st_ino == os.fstat(fd).st_ino:
            return fd, None
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            return (
                fd,
                f"the filesystem of {partial} cannot lock it ({error.strerror}): start no second run there",
            )
        if error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):
            os.close(fd)
            raise StorageError(
                "the partial output cannot be locked", where=partial, got=error.strerror
            ) from error
    os.close(fd)
    raise StorageError(
        "another process is writing this output", where=partial, remedy="wait for it, or stop it"
    )


def no_partial(partial: Path, got: str) -> StorageError:
    return StorageError(
        "this is not a partial output", where=partial, got=got, wanted="a directory", remedy="move it away"
    )
