"""The safetensors header, read as if it were written by an enemy.

    file   = length (8 bytes, little endian) · header (that many bytes of JSON) · data
    header = {"__metadata__": {str: str}?, name: {"dtype": str, "shape": [int], "data_offsets": [begin, end]}}

A header that is believed without question makes a reader allocate, read or return the wrong bytes, so every
claim is checked against the one thing that cannot lie, the size of the file, before it is used. The accepted
headers are those in which the tensors, ordered by offset, cover the data exactly once:

    begin₀ = 0,   beginᵢ₊₁ = endᵢ,   endₙ = file size − 8 − length,   endᵢ − beginᵢ = bytes(dtypeᵢ, shapeᵢ)

Everything else is a HeaderError that names the file, the tensor, what was found and what was needed. Unknown
keys inside a tensor's entry are ignored, as the reference implementation does; duplicate names, which it
resolves by taking one of them, are refused. Names and shapes are data here: nothing is resolved as a path.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from narrowcast.errors import HeaderError, InputError, UsageError
from narrowcast.store.dtypes import DTYPES, DType
from narrowcast.store.magic import wrong_file

MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation
MAX_AXES = 64  # of a numpy array and of a torch tensor
_MAX_BITS = 2**63 - 1
_KEYS = frozenset(("dtype", "shape", "data_offsets"))
DOWNLOAD = "download or copy the file again; it is not what its writer wrote"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: ``offset`` is absolute in the file, ``nbytes`` its length, ``shape`` logical."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: entries in file order, free-form metadata, where the data starts, the file's size."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    file_size: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a safetensors file; HeaderError when any claim in it is untrue."""
    file = Path(path)
    fd = open_file(file)
    try:
        return header_of(fd, file)
    finally:
        os.close(fd)


def open_file(path: Path) -> int:
    """A read-only descriptor; UsageError without a regular file, InputError when it cannot be opened."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a fifo would block the open below
            raise UsageError("not a regular file", where=path, wanted="a .safetensors file")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        dangling = " (a symlink to nothing)" if path.is_symlink() else ""
        raise UsageError(f"no such file{dangling}", where=path, wanted="a .safetensors file") from None
    except OSError as error:
        raise unreadable(error, path) from error


def header_of(fd: int, path: Path) -> Header:
    """The checked header of an open file."""
    size = os.fstat(fd).st_size
    head = _read(fd, 512, 0, path)
    length = _length(head, size, path)
    text = _read_text(fd, length, path)
    if not text.startswith("{"):
        raise HeaderError(
            "the header is not a JSON object", where=path, got=repr(text[:20]), wanted="'{'", remedy=DOWNLOAD
        )
    claims = _parse(text, path)
    data_start = 8 + length
    metadata = _metadata(claims.pop("__metadata__", None), path)
    _check_unicode([*claims, *metadata, *metadata.values()], path)
    entries = [_entry(name, claim, data_start, path) for name, claim in claims.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_cover(entries, data_start, size, path)
    return Header({entry.name: entry for entry in entries}, metadata, data_start, size)


def _length(head: bytes, size: int, path: Path) -> int:
    other = wrong_file(head)
    if other is not None:
        raise HeaderError(
            f"not a safetensors file: {other.what}", where=path, got=other.seen, remedy=other.remedy
        )
    if size < 8 or len(head) < 8:
        raise HeaderError(
            "the file is too short for a safetensors header",
            where=path,
            got=f"{size} bytes",
            wanted="at least 10 bytes (8 of length and an empty header)",
            remedy=DOWNLOAD,
        )
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER:
        raise HeaderError(
            "the header claims an impossible length, so this is hardly a safetensors file",
            where=path,
            got=f"{length} bytes (first bytes {head[:8].hex(' ')})",
            wanted=f"at most {MAX_HEADER} bytes",
            remedy=DOWNLOAD,
        )
    if 8 + length > size:
        raise HeaderError(
            "the file ends inside its header",
            where=path,
            got=f"{size} bytes",
            wanted=f"at least {8 + length} bytes (8 + a header of {length})",
            remedy=DOWNLOAD,
        )
    return length


def _read(fd: int, length: int, at: int, path: Path) -> bytes:
    try:
        return os.pread(fd, length, at)
    except OSError as error:
        raise unreadable(error, path) from error


def unreadable(error: OSError, path: Path) -> InputError:
    """An OSError of a read, told with the file and what to do."""
    return InputError(
        "the file cannot be read",
        where=path,
        got=error.strerror,
        remedy="check the disk and the rights of the file",
    )


def _read_text(fd: int, length: int, path: Path) -> str:
    raw = _read(fd, length, 8, path)
    if len(raw) != length:
        raise HeaderError("the file shrank while it was read", where=path, got=len(raw), wanted=length)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HeaderError(
            f"the header is not UTF-8 at byte {8 + error.start}",
            where=path,
            got=f"byte 0x{raw[error.start]:02x} ({error.reason})",
            wanted="UTF-8 text",
            remedy=DOWNLOAD,
        ) from None


def _parse(text: str, path: Path) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise HeaderError(
                f"the header has {twice!r} more than once",
                where=path,
                got=f"{sum(name == twice for name, _ in pairs)} entries",
                wanted="one entry for each name",
                remedy="write the file again; which of the entries is meant cannot be known",
            )
        return found

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        claims = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise HeaderError(
            "the header nests too deeply", where=path, wanted="three levels", remedy=DOWNLOAD
        ) from None
    except ValueError as error:
        raise HeaderError("the header is not JSON", where=path, got=str(error), remedy=DOWNLOAD) from None
    if not isinstance(claims, dict):
        raise HeaderError(
            "the header is not a JSON object",
            where=path,
            got=type(claims).__name__,
            wanted="an object",
            remedy=DOWNLOAD,
        )
    return claims


def _metadata(claim: object, path: Path) -> dict[str, str]:
    if claim is None:
        return {}
    if isinstance(claim, dict):
        wrong = [key for key, value in claim.items() if not isinstance(value, str)]
        if not wrong:
            return claim
        got = f"{wrong[0]!r}: {type(claim[wrong[0]]).__name__}"
    else:
        got = type(claim).__name__
    raise HeaderError(
        "__metadata__ is not a map from string to string",
        where=path,
        got=got,
        wanted="string values",
        remedy="write the file again with its metadata turned into strings",
    )


def _check_unicode(texts: list[str], path: Path) -> None:
    """JSON can escape half a character, which no writer can spell again and other readers refuse."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise HeaderError(
                "a name or metadata text in the header is not Unicode",
                where=path,
                got=ascii(text)[:80],
                wanted="whole characters",
                remedy=DOWNLOAD,
            ) from None


def _entry(name: str, claim: object, data_start: int, path: Path) -> Entry:
    if not isinstance(claim, dict):
        raise _lie(name, path, "has no entry object", type(claim).__name__, "{dtype, shape, data_offsets}")
    if not claim.keys() >= _KEYS:
        missing = ", ".join(sorted(_KEYS - claim.keys()))
        raise _lie(name, path, f"has no {missing}", sorted(claim)[:8], "dtype, shape and data_offsets")
    dtype = DTYPES.get(claim["dtype"]) if isinstance(claim["dtype"], str) else None
    if dtype is None:
        raise _lie(name, path, "has an unknown dtype", repr(claim["dtype"])[:80], ", ".join(DTYPES))
    shape = claim["shape"]
    bits = _bits(name, shape, dtype, path)
    begin, end = _offsets(name, claim["data_offsets"], path)
    if bits % 8:
        raise _lie(name, path, "does not fill whole bytes", f"{bits} bits ({dtype.name} {shape})", "8·n bits")
    if end - begin != bits // 8:
        raise _lie(
            name,
            path,
            "has a size that its dtype and shape deny",
            f"{end - begin} bytes (data_offsets [{begin}, {end}])",
            f"{bits // 8} bytes ({dtype.name} {shape})",
        )
    return Entry(name, dtype, tuple(shape), data_start + begin, end - begin, path)


def _bits(name: str, shape: object, dtype: DType, path: Path) -> int:
    """Bits of a tensor of the claimed shape, once it is one; a size of 0 does not hide a huge one."""
    if not isinstance(shape, list):
        raise _lie(name, path, "has a shape that is no list", repr(shape)[:80], "a list of sizes")
    if len(shape) > MAX_AXES:
        raise _lie(name, path, "has too many axes", len(shape), f"at most {MAX_AXES}")
    bits = dtype.bits
    for size in shape:
        if type(size) is not int or not 0 <= size <= _MAX_BITS:
            raise _lie(
                name,
                path,
                "has an impossible size in its shape",
                repr(size)[:80],
                "integers from 0 to 2^63 − 1",
            )
        bits *= size or 1
    if bits > _MAX_BITS:
        raise _lie(name, path, "has a shape beyond any memory", shape, f"at most {_MAX_BITS} bits")
    return 0 if 0 in shape else bits


def _offsets(name: str, claim: object, path: Path) -> tuple[int, int]:
    if isinstance(claim, list) and len(claim) == 2 and type(claim[0]) is type(claim[1]) is int:
        begin, end = claim
        if 0 <= begin <= end:
            return begin, end
        raise _lie(
            name, path, "has reversed or negative data_offsets", f"[{begin}, {end}]", "0 ≤ begin ≤ end"
        )
    raise _lie(name, path, "has data_offsets that are no pair of integers", repr(claim)[:80], "[begin, end]")


def _check_cover(entries: list[Entry], data_start: int, size: int, path: Path) -> None:
    """Entries, sorted by offset, must tile the data: no overlap, no hole, no missing or trailing bytes."""
    cursor, previous = data_start, "the start of the data"
    for entry in entries:
        if entry.offset != cursor:
            raise _lie(
                entry.name,
                path,
                f"overlaps {previous}" if entry.offset < cursor else f"leaves a hole after {previous}",
                f"begins at data byte {entry.offset - data_start}",
                f"data byte {cursor - data_start}",
            )
        cursor, previous = entry.offset + entry.nbytes, repr(entry.name)
    if cursor > size:
        cut = next(entry for entry in entries if entry.offset + entry.nbytes > size)
        raise HeaderError(
            f"the file is cut short: tensor {cut.name!r} ends behind the end of the file",
            where=path,
            got=f"{size} bytes",
            wanted=f"{cursor} bytes ({cursor - size} are missing)",
            remedy="finish or repeat the download or copy of this file",
        )
    if cursor < size:
        raise HeaderError(
            f"the file has {size - cursor} bytes that belong to no tensor",
            where=path,
            got=f"{size} bytes",
            wanted=f"{cursor} bytes (where {previous} ends)",
            remedy=DOWNLOAD,
        )


def _lie(name: str, path: Path, problem: str, got: object, wanted: object) -> HeaderError:
    return HeaderError(f"tensor {name!r} {problem}", where=path, got=got, wanted=wanted, remedy=DOWNLOAD)
