"""A checkpoint of very many tensors, known without reading each of its headers: weighed instead.

    Σ over shards (bytes of the file - 8 - length of its header)  =  bytes that the config makes of the model

Where both are the same to the byte, the config describes the files: a tensor more or less, another dtype, scales of a
cache or a head that is stored twice would weigh something. Then the config's answer stands, which takes milliseconds
where a hundred thousand headers take seconds. Where they differ, what no config counts is taken off by its names,
buffers of routers and layers for further tokens (MTP) behind the last, in headers that are parsed and not otherwise
looked at. Where they still differ the headers are read.

Left out: small checkpoints, whose headers cost nothing, and two deviations that cancel each other to the byte.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from narrowcast.errors import NarrowcastError
from narrowcast.serving.headers import BUFFERS
from narrowcast.serving.loading import load
from narrowcast.serving.served import Served
from narrowcast.store.folder import CONFIG

LONG = 1 << 20  # bytes of headers: some ten thousand tensors
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")


def load_weighed(model: str | Path) -> Served:
    """The model as ``load`` gives it. Errors as there."""
    found = _weighed(Path(model))
    return load(model) if found is None else found


def _weighed(path: Path) -> Served | None:
    """The config's answer, where headers are long and the files weigh what it says."""
    if not os.path.isfile(path / CONFIG):
        return None
    shards = {}
    for file in path.glob("*.safetensors"):
        if not file.is_file():  # a pipe would be waited for
            return None
        try:
            with open(file, "rb") as shard:
                (length,) = struct.unpack("<Q", shard.read(8))
        except (OSError, struct.error):
            return None
        shards[file] = length
    headers = sum(shards.values())
    if headers < LONG:
        return None
    try:
        found = load(path / CONFIG)
    except NarrowcastError:
        return None
    if found.nbytes == sum(file.stat().st_size - 8 - length for file, length in shards.items()):
        said = "headers are not read: the files weigh"
    elif (beside := _beside(shards, found.geometry.layers)) and found.nbytes == beside.rest:
        found = replace(
            found,
            vector_bytes=found.vector_bytes + beside.buffers,
            tower_bytes=found.tower_bytes + beside.further,
        )
        said = "headers are only added up: without buffers and MTP layers they come to"
    else:
        return None
    note = f"{headers / 1e6:.0f} MB of {said} what the config says, to the byte"
    return replace(found, name=str(path), notes=(*found.notes, note))


@dataclass(frozen=True)
class _Beside:
    """Bytes of buffers, of layers behind the last, and of all else."""

    buffers: int
    further: int
    rest: int


def _beside(shards: Mapping[Path, int], layers: int) -> _Beside | None:
    """What headers come to; None where one is not as it should be, which reading it says better."""
    buffers = further = rest = 0
    try:
        for file, length in shards.items():
            if length > file.stat().st_size - 8:
                return None
            with open(file, "rb") as shard:
                shard.seek(8)
                header = json.loads(shard.read(length))
            header.pop("__metadata__", None)
            before = buffers + further + rest
            for name, entry in header.items():
                first, last = entry["data_offsets"]
                layer = _LAYER.search(name)
                if layer is not None and int(layer[1]) >= layers:
                    further += last - first
                elif BUFFERS.search(name) is not None:
                    buffers += last - first
                else:
                    rest += last - first
            if buffers + further + rest - before != file.stat().st_size - 8 - length:
                return None  # holes, or places that overlap
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return _Beside(buffers, further, rest)
