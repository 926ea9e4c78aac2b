"""A GGUF file: metadata, tensor infos and aligned data, read as if it were written by an enemy.

    file  = "GGUF" · version 3 · tensor count · pair count · pairs · infos · padding · data
    pair  = key · type · value                      text = length (8 bytes) · UTF-8
    info  = name · axes · sizes, fastest first · type · offset from the start of the data, aligned

Sizes in the file begin with the axis that lies together in memory; here shapes are in numpy's order, the other way
round. Rows run along the last axis, and a row is whole blocks, so a row range is a byte range:

    bytes(row) = K / block · bytes(block)

A tensor of numbers has a safetensors dtype and reads like one. A tensor of blocks reads as bytes [..., N, bytes(row)],
whatever its type means, so that copying and moving rows needs no knowledge of the type.

Counts and lengths in the file are compared with the bytes that are left before anything is read or allocated: a
false one is a HeaderError, not an endless loop. The gguf package is not needed; the tests compare with it.

Left out: version 1, big-endian files, arrays of arrays (no known writer makes them), and models split over several
files, each refused by name.

Source: ggml/docs/gguf.md; block sizes from ggml/src/ggml-common.h.
"""

from __future__ import annotations

import io
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from narrowcast.errors import HeaderError, UsageError
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.header import DOWNLOAD, Entry, Header, open_file, unreadable
from narrowcast.store.magic import wrong_file
from narrowcast.store.safetensors import Reader

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
MAX_AXES = 4  # of a ggml tensor
_MAX_ELEMENTS = 2**60


@dataclass(frozen=True, slots=True)
class GGMLType:
    """How the elements of a tensor are stored: ``block`` elements of a row in ``nbytes`` bytes; ``dtype`` names the
    safetensors dtype where a block is one number."""

    name: str
    number: int
    block: int
    nbytes: int
    dtype: str | None = None

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k elements; UsageError unless they fill whole blocks."""
        if k % self.block:
            raise UsageError(
                f"a row does not fill whole blocks of {self.name}",
                got=k,
                wanted=f"a multiple of {self.block}",
            )
        return k // self.block * self.nbytes


_NUMBERS = (
    ("F32", 0, 4), ("F16", 1, 2), ("BF16", 30, 2), ("F64", 28, 8), ("I8", 24, 1), ("I16", 25, 2), ("I32", 26, 4),
    ("I64", 27, 8),
)  # fmt: skip
_BLOCKS = (
    ("Q4_0", 2, 32, 18), ("Q4_1", 3, 32, 20), ("Q5_0", 6, 32, 22), ("Q5_1", 7, 32, 24), ("Q8_0", 8, 32, 34),
    ("Q8_1", 9, 32, 40), ("Q2_K", 10, 256, 84), ("Q3_K", 11, 256, 110), ("Q4_K", 12, 256, 144),
    ("Q5_K", 13, 256, 176), ("Q6_K", 14, 256, 210), ("Q8_K", 15, 256, 292), ("IQ2_XXS", 16, 256, 66),
    ("IQ2_XS", 17, 256, 74), ("IQ3_XXS", 18, 256, 98), ("IQ1_S", 19, 256, 50), ("IQ4_NL", 20, 32, 18),
    ("IQ3_S", 21, 256, 110), ("IQ2_S", 22, 256, 82), ("IQ4_XS", 23, 256, 136), ("IQ1_M", 29, 256, 56),
    ("TQ1_0", 34, 256, 54), ("TQ2_0", 35, 256, 66), ("MXFP4", 39, 32, 17), ("NVFP4", 40, 64, 36),
    ("Q1_0", 41, 128, 18),
)  # fmt: skip

GGML_TYPES: Mapping[str, GGMLType] = MappingProxyType(
    {name: GGMLType(name, number, 1, size, name) for name, number, size in _NUMBERS}
    | {name: GGMLType(name, number, block, size) for name, number, block, size in _BLOCKS}
)
_BY_NUMBER = {row.number: row for row in GGML_TYPES.values()}

# Metadata value types: numbers by their numpy dtype, then the two that are not numbers.
SCALARS: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {
        number: np.dtype(code)
        for number, code in enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))
    }
    | {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}
)
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: its type, shape in numpy's order (fastest axis last), place in the file and bytes."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.shape[-1])


class GGUFFile(Reader):
    """An open GGUF file. ``tensors``: every tensor in file order; ``fields``: the metadata as plain Python values,
    numeric arrays as numpy arrays, fp32 numbers as the shortest decimal that is the same fp32.

    ``rows``, ``read_into`` and ``read_pieces`` read like those of a safetensors file; a tensor of blocks has dtype U8
    and its row's bytes as last axis. Raises UsageError without a file, HeaderError when a claim in it is untrue.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._fd = open_file(self.path)
        except UsageError as error:
            raise UsageError(error.problem, where=self.path, wanted="a .gguf file") from None
        try:
            with io.BufferedReader(io.FileIO(self._fd, closefd=False), 2**20) as file:
                self.fields, self.tensors, start = _read(_Cursor(file, os.fstat(self._fd).st_size, self.path))
        except BaseException:
            os.close(self._fd)
            raise
        self.entries = {tensor.name: _entry(tensor, self.path) for tensor in self.tensors.values()}
        self.header = Header(self.entries, {}, start, os.fstat(self._fd).st_size)
        self.metadata = {}
        self._map = None
        self._lock = threading.Lock()


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a GGUF file does; nothing but a file is read, since a pipe would be waited for."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def _entry(tensor: GGUFTensor, path: Path) -> Entry:
    if tensor.type.dtype is not None:
        return Entry(tensor.name, DTYPES[tensor.type.dtype], tensor.shape, tensor.offset, tensor.nbytes, path)
    shape = (*tensor.shape[:-1], tensor.row_bytes)
    return Entry(tensor.name, DTYPES["U8"], shape, tensor.offset, tensor.nbytes, path)


class _Cursor:
    """Reads the header front to back; every length is held against the bytes that are left."""

    def __init__(self, file: io.BufferedReader[io.FileIO], size: int, path: Path) -> None:
        self.file, self.size, self.path, self.at = file, size, path, 0

    def take(self, length: int, what: str) -> bytes:
        if length > self.size - self.at:
            raise self.lie(
                f"the file ends inside {what}", f"{self.size - self.at} bytes left", f"{length} bytes"
            )
        try:
            content = self.file.read(length)
        except OSError as error:
            raise unreadable(error, self.path) from error
        if len(content) != length:
            raise self.lie(
                "the file shrank while it was read", f"{self.at + len(content)} bytes", f"{self.size} bytes"
            )
        self.at += length
        return content

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, smallest: int) -> int:
        """A number of things of at least ``smallest`` bytes each, which must fit into what is left."""
        number = self.u64(what)
        if number * smallest > self.size - self.at:
            left = f"{self.size - self.at} bytes left, {smallest} at least for each"
            raise self.lie(f"the file claims more than it can hold: {what}", number, left)
        return number

    def text(self, what: str) -> str:
        raw = self.take(self.count(f"the length of {what}", 1), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.lie(f"{what} is not UTF-8", repr(raw[:40]), error.reason) from None

    def lie(self, problem: str, got: object, wanted: object) -> HeaderError:
        return HeaderError(problem, where=self.path, got=got, wanted=wanted, remedy=DOWNLOAD)


def _read(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GGUFTensor], int]:
    """Metadata, tensors in file order, and where the data starts."""
    _check_magic(cursor)
    tensors, pairs = (
        cursor.count("the number of tensors", 24),
        cursor.count("the number of metadata pairs", 13),
    )
    fields: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text("a metadata key")
        if key in fields:
            raise cursor.lie(f"the metadata have {key!r} twice", key, "each key once")
        fields[key] = _value(cursor, cursor.u32(f"the type of {key!r}"), key)
    _check_whole(cursor, fields)
    alignment = fields.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 2**20:
        raise cursor.lie("general.alignment is impossible", repr(alignment)[:40], "a power of two")
    infos = [_info(cursor) for _ in range(tensors)]
    start = cursor.at + -cursor.at % alignment
    return fields, _places(cursor, infos, start, alignment), start


def _check_magic(cursor: _Cursor) -> None:
    head = cursor.take(min(cursor.size, 8), "the file")
    if head[:4] != MAGIC:
        other = wrong_file(head)
        what = f"not a GGUF file{': ' + other.what if other else ''}"
        raise HeaderError(
            what, where=cursor.path, got=repr(head[:8]), wanted="a file that begins with 'GGUF'"
        )
    version = int.from_bytes(head[4:8], "little")
    if version not in (2, VERSION):
        big_endian = version & 0xFFFF == 0 and version
        raise HeaderError(
            "a GGUF file of big-endian numbers" if big_endian else "a GGUF version that cannot be read",
            where=cursor.path,
            got=int.from_bytes(head[4:8], "big") if big_endian else version,
            wanted="version 2 or 3, little endian",
            remedy="convert the model again with a current converter",
        )


def _check_whole(cursor: _Cursor, fields: dict[str, Any]) -> None:
    parts = fields.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise UsageError(
            "this GGUF file is one part of a model that was split",
            where=cursor.path,
            got=f"part {fields.get('split.no', 0) + 1} of {parts}"
            if isinstance(fields.get("split.no"), int)
            else parts,
            wanted="one file",
            remedy="join the parts first: llama-gguf-split --merge FIRST_PART WHOLE.gguf",
        )


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    what = f"the value of {key!r}"
    if kind == STRING:
        return cursor.text(what)
    if kind == ARRAY:
        return _array(cursor, key, what)
    if kind not in SCALARS:
        raise cursor.lie(f"{what} has an unknown type", kind, "a GGUF value type, 0 to 12")
    dtype = SCALARS[kind]
    number = np.frombuffer(cursor.take(dtype.itemsize, what), dtype)[0]
    return float(str(number)) if dtype == np.float32 else number.item()


def _array(cursor: _Cursor, key: str, what: str) -> Any:
    kind = cursor.u32(what)
    if kind == STRING:
        return [cursor.text(what) for _ in range(cursor.count(what, 8))]
    if kind not in SCALARS:
        nested = "an array of arrays" if kind == ARRAY else kind
        raise cursor.lie(f"{what} has items that cannot be read", nested, "numbers or texts")
    dtype = SCALARS[kind]
    count = cursor.count(what, dtype.itemsize)
    return np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLType, int]:
    name = cursor.text("a tensor name")
    what = f"the info of tensor {name!r}"
    axes = cursor.u32(what)
    if not 1 <= axes <= MAX_AXES:
        raise cursor.lie(f"tensor {name!r} has an impossible number of axes", axes, f"1 to {MAX_AXES}")
    sizes = struct.unpack(f"<{axes}Q", cursor.take(8 * axes, what))
    if not all(sizes) or prod(sizes) > _MAX_ELEMENTS:
        raise cursor.lie(
            f"tensor {name!r} has an impossible shape", list(sizes), "positive sizes within any memory"
        )
    number = cursor.u32(what)
    if number not in _BY_NUMBER:
        raise HeaderError(
            f"tensor {name!r} has an unknown type",
            where=cursor.path,
            got=number,
            wanted=", ".join(GGML_TYPES),
            remedy="convert the model again to one of these types",
        )
    kind = _BY_NUMBER[number]
    if sizes[0] % kind.block:
        raise cursor.lie(
            f"tensor {name!r} does not fill whole blocks of {kind.name}", sizes[0], f"{kind.block}·n"
        )
    return name, sizes[::-1], kind, cursor.u64(what)


def _places(cursor: _Cursor, infos: list[Any], start: int, alignment: int) -> dict[str, GGUFTensor]:
    """Tensors in file order, once their places are aligned, apart from each other and inside the file."""
    found: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in sorted(infos, key=lambda info: info[3]):
        if name in found:
            raise cursor.lie(f"tensor {name!r} is in the file twice", name, "each name once")
        if offset % alignment:
            raise cursor.lie(f"tensor {name!r} is not aligned", offset, f"a multiple of {alignment}")
        found[name] = GGUFTensor(
            name, kind, shape, start + offset, prod(shape[:-1]) * kind.row_bytes(shape[-1])
        )
    cursor_at, previous = start, "the header"
    for tensor in found.values():
        if tensor.offset < cursor_at:
            raise cursor.lie(
                f"tensor {tensor.name!r} overlaps {previous}", tensor.offset, f"{cursor_at} or more"
            )
        cursor_at, previous = tensor.offset + tensor.nbytes, repr(tensor.name)
        if cursor_at > cursor.size:
            raise HeaderError(
                f"the file is cut short: tensor {tensor.name!r} ends behind the end of the file",
                where=cursor.path,
                got=f"{cursor.size} bytes",
                wanted=f"{cursor_at} bytes or more",
                remedy="finish or repeat the download or copy of this file",
            )
    return found
