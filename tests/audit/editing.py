"""Checkpoints for rules: small ones that the toolkit itself writes, and ways to break them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import narrowcast
import toys
from narrowcast.store.safetensors import Reader

Array = np.ndarray
# What becomes of a tensor: another array, a function of the old one, (dtype, array), or None: it vanishes.
Change = Array | Callable[[Array], Array] | tuple[str, Array] | None


def parent(folder: Path, **sizes: Any) -> Path:
    """A BF16 Llama with random weights, in ``folder / "parent"``, made once."""
    where = folder / "parent"
    return where if where.exists() else toys.llama(where, **sizes)


def quantized(
    folder: Path, preset: str, container: str = "compressed-tensors", name: str = "child", **sizes: Any
) -> Path:
    """The parent under a preset in a container, in ``folder / name``."""
    narrowcast.quantize(parent(folder, **sizes), folder / name, preset, container=container)
    return folder / name


def edit(model: Path, changes: Mapping[str, Change]) -> Path:
    """Change tensors of a checkpoint in place, in whichever shard they are; new names go into the first shard, with
    their dtype given. Arrays have carrier dtypes (bf16 as uint16, fp8 and scales of a byte as uint8)."""
    left = dict(changes)
    shards = sorted(model.glob("*.safetensors"))
    for i, shard in enumerate(shards):
        tensors: dict[str, tuple[str, Array]] = {}
        with Reader(shard) as reader:
            for name, entry in reader.entries.items():
                tensors[name] = entry.dtype.name, np.array(reader.array(name))
        for name in [name for name in left if name in tensors]:
            change, (dtype, old) = left.pop(name), tensors[name]
            if change is None:
                del tensors[name]
            elif isinstance(change, tuple):
                tensors[name] = change
            else:
                tensors[name] = dtype, change(old) if callable(change) else change
        if i + 1 == len(shards):
            for name, change in left.items():
                assert isinstance(change, tuple), f"{name} is new: give its dtype"
                tensors[name] = change
        write(shard, tensors)
    return model


def write(file: Path, tensors: Mapping[str, tuple[str, Array]]) -> None:
    """A safetensors file of (dtype, carrier array)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, parts = 0, []
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def edit_config(model: Path, change: Callable[[dict[str, Any]], object], file: str = "config.json") -> Path:
    """Change config.json (or another JSON file) in place."""
    config = json.loads((model / file).read_text())
    change(config)
    (model / file).write_text(json.dumps(config, indent=2))
    return model


def at(index: tuple[int, ...], value: Any) -> Callable[[Array], Array]:
    """One element replaced."""

    def change(old: Array) -> Array:
        new = old.copy()
        new[index] = value
        return new

    return change
