"""Checkpoints that upstream libraries wrote, decoded by us and by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.contents import Contents
from narrowcast.jobs.coded import Logical, open_coded
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import FP32, formats
from narrowcast.store.checkpoint import Checkpoint

FOLDER = Path(__file__).parent / "containers/upstream"


def contents(folder: Path) -> Contents:
    """What a checkpoint holds."""
    with Checkpoint.open(folder) as checkpoint:
        return open_coded(checkpoint).contents


def decoded(folder: Path, dtype: str = "fp32") -> dict[str, NDArray[np.float32]]:
    """Every quantized matrix decoded by us and rounded once to a dtype: module to float32; stacks whole."""
    found: dict[str, NDArray[np.float32]] = {}
    out = formats[dtype]
    with Checkpoint.open(folder) as checkpoint:
        opened = open_coded(checkpoint)
        for module in opened.modules:
            entry = opened.entries[module.tensor]
            if isinstance(entry, Logical):
                parts = [m.decode(checkpoint, 0, m.shape[0], out) for m in opened.whole(entry)]
                values: NDArray[Any] = np.stack(parts) if module.experts is not None else parts[0]
                found[module.name] = values if out is FP32 else widen(values, out)
    return found


def upstream(folder: Path) -> tuple[dict[str, NDArray[np.float32]], str]:
    """The library's own values, and the dtype that it answered in."""
    with np.load(folder / "decoded.npz") as file:
        values = {name: file[name] for name in file.files}
    return values, json.loads((folder / "fixture.json").read_text())["decoded_dtype"]


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same modules and the same bits."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        differ = np.argwhere(value.view(np.uint32) != theirs[name].view(np.uint32))
        assert not len(differ), f"{name} differs at {differ[0]}, {len(differ)} in all"


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor as it lies in the files: dtype, shape, bytes."""
    with Checkpoint.open(folder) as checkpoint:
        return {
            name: (entry.dtype.name, entry.shape, checkpoint.array(name).tobytes())
            for name, entry in checkpoint.entries.items()
        }
