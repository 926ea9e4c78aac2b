"""A GGUF file that grows in place: all sizes are known first, then rows arrive in any order.

    size = header + Σ ⌈bytes(tensor) / 32⌉ · 32

Only the header differs from a safetensors file, so the writer is the same one: everything reserved at the start,
row ranges written at their final places from any thread, a temporary name until each byte is written once and
synced. Tensors lie in the order in which they are given, padded with zeros, as the gguf package writes them: the same
metadata and tensors give the same file.

Plain values are spelled in the types that llama.cpp reads: whole numbers as uint32 (in lists int32), floats as fp32.
A numpy scalar or array keeps its own dtype.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from narrowcast.errors import UsageError
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.gguf import ALIGNMENT, ARRAY, MAGIC, MAX_AXES, SCALARS, STRING, VERSION, GGMLType
from narrowcast.store.writer import Layout, Spec, Writer

_KINDS = {dtype: number for number, dtype in SCALARS.items()}
_UINT32, _INT32, _FLOAT32, _BOOL, _UINT64, _INT64 = 4, 5, 6, 7, 10, 11


@dataclass(frozen=True, slots=True)
class GGUFSpec:
    """A tensor to be written: name, type, logical shape in numpy's order."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.type.row_bytes(self.shape[-1])


def gguf_writer(path: str | os.PathLike[str], specs: Sequence[GGUFSpec], fields: Mapping[str, Any]) -> Writer:
    """A Writer of one GGUF file; rows of a tensor of blocks are written as their bytes."""
    stored = [Spec(spec.name, DTYPES[spec.type.dtype or "U8"], spec.shape) for spec in specs]
    return Writer(path, stored, places=gguf_layout(specs, fields))


def gguf_layout(specs: Sequence[GGUFSpec], fields: Mapping[str, Any]) -> Layout:
    """Header and places of a file of these tensors and metadata.

    Raises UsageError for a name given twice, a shape that GGUF cannot hold, or a value without a GGUF type.
    """
    pairs = [_text(key) + _pair(key, value) for key, value in fields.items()]
    infos, places, cursor = [], {}, 0
    for spec in specs:
        if spec.name in places:
            raise UsageError(f"the tensor name {spec.name!r} is taken", wanted="one tensor for each name")
        if not 1 <= len(spec.shape) <= MAX_AXES or not all(size > 0 for size in spec.shape):
            raise UsageError(
                f"GGUF cannot hold the shape of {spec.name!r}", got=list(spec.shape), wanted="1 to 4 axes"
            )
        sizes = struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *reversed(spec.shape))
        infos.append(_text(spec.name) + sizes + struct.pack("<IQ", spec.type.number, cursor))
        places[spec.name] = (cursor, spec.nbytes)
        cursor += spec.nbytes + -spec.nbytes % ALIGNMENT
    counts = struct.pack("<IQQ", VERSION, len(specs), len(pairs))
    header = MAGIC + counts + b"".join(pairs) + b"".join(infos)
    header += bytes(-len(header) % ALIGNMENT)
    offsets = {name: (len(header) + begin, size) for name, (begin, size) in places.items()}
    return Layout(header, offsets, len(header) + cursor)


def _text(text: str) -> bytes:
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError("a name or metadata text is not Unicode", got=repr(error.object[:80])) from None
    return struct.pack("<Q", len(raw)) + raw


def _pair(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    if isinstance(value, list | tuple | np.ndarray) and len(value):
        items = np.asarray(value)
        kind = _kind(key, items.dtype, items) if isinstance(value, np.ndarray) else _list_kind(key, items)
        return struct.pack("<IIQ", ARRAY, kind, items.size) + items.astype(SCALARS[kind]).tobytes()
    if isinstance(value, np.generic):
        kind = _kind(key, value.dtype, value)
    elif isinstance(value, bool | int | float):
        kind = _number_kind(value)
    else:
        raise _no_kind(key, value)
    return struct.pack("<I", kind) + np.asarray(value).astype(SCALARS[kind]).tobytes()


def _number_kind(value: bool | int | float) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, float):
        return _FLOAT32
    if value < 0:
        return _INT32 if value >= -(2**31) else _INT64
    return _UINT32 if value < 2**32 else _UINT64


def _list_kind(key: str, items: np.ndarray[Any, Any]) -> int:
    """The type of a list of plain numbers."""
    if items.ndim != 1 or items.dtype.kind not in "bif":
        raise _no_kind(key, items.tolist())
    return {"b": _BOOL, "i": _INT32, "f": _FLOAT32}[items.dtype.kind]


def _kind(key: str, dtype: np.dtype[Any], value: Any) -> int:
    kind = _KINDS.get(dtype.newbyteorder("<") if dtype.itemsize > 1 else dtype)
    if kind is None or np.ndim(value) > 1:
        raise _no_kind(key, value)
    return kind


def _no_kind(key: str, value: Any) -> UsageError:
    wanted = "a text, a number, or a list of one of them that is not empty"
    return UsageError(f"GGUF has no type for the value of {key!r}", got=repr(value)[:80], wanted=wanted)
