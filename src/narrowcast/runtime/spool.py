"""Hidden states on disk, for texts whose states together do not fit into memory.

    spool.put(slot, h)     h[slot] = spool.get(slot)        bytes as they are: any dtype, NaN payloads too

All states lie in one file that has no name (it is unlinked as soon as it is open), so it is gone when the process is,
whatever ends it. In memory there is the one state that is worked on; what the system keeps of the file in its page
cache it gives up when memory is short.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch

from narrowcast.errors import StorageError
from narrowcast.hardware.host import free_memory

SHARE = 4  # states go to disk by themselves when they are more than a SHARE-th of the free memory


@dataclass
class Spool:
    """One anonymous file; ``put`` appends a slot the first time and overwrites it afterwards."""

    where: Path
    _file: BinaryIO
    _slots: dict[object, tuple[int, int, torch.Size, torch.dtype]]
    _end: int = 0

    @classmethod
    def open(cls, directory: str | Path | None = None) -> Self:
        """A new spool in a directory, None for the system's temporary one. StorageError where nothing can be made."""
        where = Path(directory or tempfile.gettempdir())
        try:
            return cls(where, tempfile.TemporaryFile(dir=where, buffering=0), {})
        except OSError as error:
            raise StorageError("hidden states cannot be kept there", where=where, got=str(error)) from error

    def put(self, slot: object, state: torch.Tensor) -> None:
        """Write a tensor of any dtype and shape; a slot keeps its size."""
        raw: Any = state.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        if slot not in self._slots:
            self._slots[slot] = (self._end, raw.nbytes, state.shape, state.dtype)
            self._end += raw.nbytes
        start, nbytes, shape, dtype = self._slots[slot]
        assert (nbytes, shape, dtype) == (raw.nbytes, state.shape, state.dtype), "a state changed its kind"
        view, done = memoryview(raw), 0
        try:
            while done < nbytes:
                done += os.pwrite(self._file.fileno(), view[done:], start + done)
        except OSError as error:
            raise StorageError(
                "hidden states cannot be written", where=self.where, got=str(error),
                remedy="name a directory with more room, or take less text",
            ) from error  # fmt: skip

    def get(self, slot: object) -> torch.Tensor:
        """A fresh tensor with the bytes that were put last."""
        start, nbytes, shape, dtype = self._slots[slot]
        raw = torch.empty(nbytes, dtype=torch.uint8)
        bytes_of: Any = raw.numpy()
        view, done = memoryview(bytes_of), 0
        while done < nbytes:
            got = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if got == 0:
                raise StorageError("hidden states were lost", where=self.where)
            done += got
        return raw.view(dtype).reshape(shape)

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


def needed(tokens: int, hidden: int, itemsize: int, lanes: int) -> int:
    """Bytes of all hidden states of a text in so many lanes."""
    return tokens * hidden * itemsize * lanes


def choose(nbytes: int, directory: str | Path | None) -> tuple[Spool | None, str | None]:
    """A spool where one is named, or where the states need more than a quarter of the free memory; and a sentence that
    tells why, if there is one."""
    free = free_memory()
    if directory is None and (free is None or nbytes * SHARE <= free):
        return None, None
    spool = Spool.open(directory)
    why = f"in {spool.where}"
    if directory is None and free is not None:
        why += f", being more than a quarter of the {free / 1e9:.1f} GB of free memory"
    return spool, f"hidden states ({nbytes / 1e9:.2f} GB) are kept on disk {why}"
