"""A checkpoint of very many tensors, known without reading each of its headers: weighed instead.

    Σ over shards (bytes of the file - 8 - length of its header)  =  bytes that the config makes of the model

Where both are the same to the byte, the config describes the files: a tensor more or less, another dtype, scales of a
cache or a head that is stored twice would weigh something. Then the config's answer stands, which takes milliseconds
where a hundred thousand headers take seconds. Where they differ the headers are read.

Left out: small checkpoints, whose headers cost nothing, and two deviations that cancel each other to the byte.
"""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

from narrowcast.errors import NarrowcastError
from narrowcast.serving.loading import load
from narrowcast.serving.served import Served
from narrowcast.store.folder import CONFIG

LONG = 1 << 20  # bytes of headers: some ten thousand tensors


def load_weighed(model: str | Path) -> Served:
    """The model as ``load`` gives it. Errors as there."""
    found = _weighed(Path(model))
    return load(model) if found is None else found


def _weighed(path: Path) -> Served | None:
    """The config's answer, where headers are long and the files weigh what it says."""
    if not os.path.isfile(path / CONFIG):
        return None
    stored = headers = 0
    for file in path.glob("*.safetensors"):
        if not file.is_file():  # a pipe would be waited for
            return None
        try:
            with open(file, "rb") as shard:
                (length,) = struct.unpack("<Q", shard.read(8))
        except (OSError, struct.error):
            return None
        stored += file.stat().st_size - 8 - length
        headers += length
    if headers < LONG:
        return None
    try:
        found = load(path / CONFIG)
    except NarrowcastError:
        return None
    if found.nbytes != stored:
        return None
    note = (
        f"{headers / 1e6:.0f} MB of headers are not read: the files weigh what the config says, to the byte"
    )
    return replace(found, name=str(path), notes=(*found.notes, note))
