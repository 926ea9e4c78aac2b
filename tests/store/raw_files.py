"""Safetensors files spelled by hand, so that a test can say anything a header may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import TensorSpec

from narrowcast.store.dtypes import DType, nbytes


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of this header (text, bytes or an object) and data; ``length`` replaces the true one."""
    dumped = header if isinstance(header, str | bytes) else json.dumps(header)
    text = dumped.encode() if isinstance(dumped, str) else dumped
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype: str = "BF16", shape: Any = (2, 4), begin: Any = 0, end: Any = 16) -> dict[str, Any]:
    """One entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def package_spec(dtype: DType, shape: tuple[int, ...], memory: NDArray[Any]) -> TensorSpec:
    """The package's spec of a tensor in memory; of packed F4 it wants the storage shape."""
    storage = (*shape[:-1], shape[-1] // 2) if dtype.name == "F4" else shape
    size = nbytes(dtype, shape)
    return TensorSpec(dtype=dtype.torch, shape=storage, data_ptr=memory.ctypes.data, data_len=size)


def put(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    """Write a file and return its path."""
    path = folder / name
    path.write_bytes(content)
    return path
