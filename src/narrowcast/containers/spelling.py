"""How one quantized matrix is spelled in a file: a table of parts, by which it is written and read.

    part = (suffix, piece, dtype, stored shape, how rows lie)        tensor = place.stem + part.suffix

A matrix [N, K] has pieces that follow its rows (codes, scales, zero points) and statics that belong to the whole
of it (the outer scale, its shape, the input's scale, an order of columns). A part says which piece its tensor holds,
how a chunk of rows becomes stored rows, and where those lie:

    down:    stored row r holds the matrix rows from r · per / makes on            offset = r · width
    across:  the matrix rows run along the last axis (GPTQ, AWQ)                   offset = column, stride = width

A ``Place`` says where the matrix lies in its tensors: alone, or as rows first::step of expert e in a stack. So the
same table reads, writes, and moves a matrix between containers, with its codes untouched and its orientation
changed once.

Left out: containers that put scales and codes into one tensor (GGUF), which have a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.kernels import Rows
from narrowcast.numbers.codec import to_bf16, widen
from narrowcast.numbers.formats import FP32, formats
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Entry
from narrowcast.store.writer import Spec
from narrowcast.tensors.packing import Packing
from narrowcast.tensors.scaling import scales_shape
from narrowcast.tensors.schemes import Scheme

Array = NDArray[Any]
Piece = Literal[
    "codes", "scales", "zero", "outer", "input", "input_zero", "shape", "order", "pre_scale", "recast", "offset"
]  # fmt: skip
FOLLOWS_ROWS = ("codes", "scales", "zero", "offset")


class Tensors(Protocol):
    """What a part is read from: a checkpoint or one file of it."""

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def read_into(self, name: str, buffer: Any, start: int = 0) -> None: ...

    def read_pieces(self, name: str, buffer: Array, start: int, stride: int) -> None: ...


def _same(array: Array) -> Array:
    return array


def _first_rows(stored: Array, count: int) -> Array:
    return stored[:count]


@dataclass(frozen=True)
class Part:
    """One tensor of a matrix.

    ``shape`` gives the stored shape from (N, K). ``per`` matrix rows become ``makes`` stored rows. ``encode`` turns
    the piece's logical rows into stored ones, and ``decode`` stored ones into the first ``count`` logical rows.
    Logical rows are
    those of ``kernels.Rows``: packed codes [n, bytes], scales [tiles, tiles] as stored, zero-point codes alike;
    where the part is ``across``, the stored chunk is [X, columns]. Statics pass whole arrays (``count`` is N),
    an outer scale and an input's
    scale as the multiplier of a decoder, float32 [1]. A pre_scale [K]
    multiplies the input, and so the columns of the weight; a recast is the scale of the eight-bit weight that an
    engine makes from the decoded one, and multiplies nothing. An offset is a float for each scale, which is added to
    the decoded values: a zero point that is no code. ``optional`` parts may be missing.
    """

    suffix: str
    piece: Piece
    dtype: str
    shape: Callable[[int, int], tuple[int, ...]]
    per: int = 1
    makes: int = 1
    across: bool = False
    encode: Callable[[Array], Array] = _same
    decode: Callable[[Array, int], Array] = _first_rows
    optional: bool = False

    @property
    def carrier(self) -> np.dtype[Any]:
        return DTYPES[self.dtype].carrier

    def matrix(self, n: int, k: int) -> tuple[int, int]:
        """The stored shape as a matrix: rows and columns (across) or bytes-carrying columns (down)."""
        shape = self.shape(n, k)
        if self.across:
            return prod(shape[:-1]), shape[-1]
        rows = self.stored(n)
        return rows, prod(shape) // max(rows, 1)

    def stored(self, rows: int) -> int:
        """How many stored rows (or columns) so many matrix rows make."""
        return -(-rows * self.makes // self.per)


@dataclass(frozen=True)
class Place:
    """Where a matrix lies: tensors called ``stem`` + suffix; of a stack of ``experts``, rows first::step of one
    whose stored
    matrix has ``rows`` rows in all."""

    stem: str
    rows: int
    experts: int | None = None
    expert: int = 0
    first: int = 0
    step: int = 1


# A piece of data and where it goes: tensor, an array of one or two axes, the byte where it begins, the stride
# of its rows.
Chunk = tuple[str, Array, int, int]


@dataclass(frozen=True)
class Spelling:
    """How one linear scheme is written in a container: its parts, the packing of codes between them and the kernels,
    and what N and K must be multiples of. ``format`` is the container's own word for it. ``scheme`` is None for plain
    floats. ``ordered`` gives the same spelling for columns that are stored in another order (the model's column of
    each), where the container can say so."""

    container: str
    format: str
    scheme: Any  # Scheme; None for plain floats, which no caller of a scheme ever sees
    packing: Packing
    parts: tuple[Part, ...]
    multiples: tuple[int, int] = (1, 1)
    ordered: Callable[[Array], Spelling] | None = None

    @property
    def row_multiple(self) -> int:
        """Rows that a chunk must be a multiple of: whole tiles and whole stored rows."""
        tile = self.scheme.inner.tile[0] if self.scheme is not None else 1
        return lcm(tile or 1, *(part.per for part in self.parts if part.piece in FOLLOWS_ROWS))

    def part(self, piece: Piece) -> Part | None:
        return next((part for part in self.parts if part.piece == piece), None)

    def without(self, *pieces: Piece) -> Spelling:
        """The same spelling without some parts, such as an input scale that nobody has."""
        return replace(self, parts=tuple(part for part in self.parts if part.piece not in pieces))

    def names(self, place: Place) -> list[str]:
        """The tensors of a matrix."""
        return [place.stem + part.suffix for part in self.parts]

    def specs(self, place: Place, k: int) -> list[Spec]:
        """The tensors that the matrix lies in: names, dtypes, shapes (of the whole stack, where it is in one)."""
        leading = () if place.experts is None else (place.experts,)
        return [
            Spec(place.stem + part.suffix, DTYPES[part.dtype], leading + part.shape(place.rows, k))
            for part in self.parts
        ]

    def pieces(self, place: Place, k: int, start: int, rows: Rows) -> Iterator[Chunk]:
        """A quantized chunk of the matrix, beginning at its row ``start``."""
        logical = {"codes": rows.packed, "scales": rows.scales, "zero": rows.zero}
        stop = start + len(rows.packed)
        for part in self.parts:
            if part.piece in FOLLOWS_ROWS:
                begin, stride, shape = _span(part, place, k, start, stop)
                stored = np.ascontiguousarray(part.encode(logical[part.piece]))
                data = stored.view(np.uint8).reshape(shape[0], -1) if shape[0] else stored.reshape(0, 0)
                yield place.stem + part.suffix, data, begin, stride

    def constants(
        self, place: Place, shape: tuple[int, int], statics: Mapping[str, Array]
    ) -> Iterator[Chunk]:
        """The parts that do not follow rows."""
        for part in self.parts:
            if part.piece in FOLLOWS_ROWS:
                continue
            value = np.array(shape, np.int64) if part.piece == "shape" else statics[part.piece]
            data = np.ascontiguousarray(part.encode(value)).view(np.uint8).reshape(1, -1)
            yield place.stem + part.suffix, data, place.expert * data.size, data.size

    def read(self, source: Tensors, place: Place, shape: tuple[int, int], start: int, stop: int) -> Rows:
        """Rows start:stop of the matrix; ``start`` is a multiple of ``row_multiple``."""
        packed = self.codes(source, place, shape, start, stop)
        return Rows(packed, *self.scales(source, place, shape, start, stop))

    def codes(self, source: Tensors, place: Place, shape: tuple[int, int], start: int, stop: int) -> Array:
        """Packed codes of rows start:stop, uint8 [rows, row_bytes], as ``Rows`` holds them."""
        part = [part for part in self.parts if part.piece == "codes"][-1]  # fillers stand before the codes
        return self._rows(part, source, place, shape, start, stop).view(np.uint8).reshape(stop - start, -1)

    def scales(
        self, source: Tensors, place: Place, shape: tuple[int, int], start: int, stop: int
    ) -> tuple[Array, Array | None]:
        """Innermost scales and zero points of rows start:stop, as ``Rows`` holds them, without the codes."""
        found: dict[str, Array] = {}
        for part in self.parts:
            if part.piece in ("scales", "zero"):
                found[part.piece] = self._rows(part, source, place, shape, start, stop)
        outer = self.part("outer")
        if "scales" not in found and self.scheme is not None and outer is not None:
            multiplier = self.static(source, place, shape, "outer")
            found["scales"] = narrowed(multiplier, outer.dtype).reshape(1, 1)
        return _as_stored(found.get("scales", np.empty((0, 0)))), found.get("zero")

    def offsets(
        self, source: Tensors, place: Place, shape: tuple[int, int], start: int, stop: int
    ) -> Array | None:
        """What is added to the decoded values of rows start:stop, float32 for each scale; None for nothing."""
        part = self.part("offset")
        return None if part is None else self._rows(part, source, place, shape, start, stop)

    def _rows(
        self, part: Part, source: Tensors, place: Place, shape: tuple[int, int], start: int, stop: int
    ) -> Array:
        begin, stride, view = _span(part, place, shape[1], start, stop)
        buffer = np.empty(view, part.carrier)
        source.read_pieces(place.stem + part.suffix, buffer, begin, stride)
        return part.decode(buffer, self._count(part, start, stop))

    def static(self, source: Tensors, place: Place, shape: tuple[int, int], piece: Piece) -> Array:
        """One static; UsageError when the file does not hold it."""
        part, stored = self.as_stored(source, place, piece)
        return part.decode(stored, shape[0])

    def as_stored(self, source: Tensors, place: Place, piece: Piece) -> tuple[Part, Array]:
        """One static as it lies in the file, with its part."""
        part = self.part(piece)
        name = place.stem + part.suffix if part is not None else place.stem
        if part is None or name not in source.entries:
            raise UsageError(f"{place.stem} has no {piece}", where=self.container)
        entry = source.entries[name]
        size = prod(entry.shape) // (place.experts or 1)
        buffer = np.empty(size, entry.dtype.carrier)
        source.read_into(name, buffer, place.expert * buffer.nbytes)
        return part, buffer

    def outer(self, source: Tensors, place: Place, shape: tuple[int, int]) -> float | None:
        """The outer scale (of a scheme of one level per tensor: its only one) as a multiplier, or None."""
        if self.part("outer") is None:
            return None
        return float(self.static(source, place, shape, "outer")[0])

    def statics(self, source: Tensors, place: Place, shape: tuple[int, int]) -> dict[str, Array]:
        """Every static that the file holds, but the shape."""
        return {
            part.piece: self.static(source, place, shape, part.piece)
            for part in self.parts
            if part.piece not in (*FOLLOWS_ROWS, "shape") and place.stem + part.suffix in source.entries
        }

    def _count(self, part: Part, start: int, stop: int) -> int:
        tile = 1 if part.piece == "codes" else self.scheme.inner.tile[0] or stop
        return -(-stop // tile) - start // tile


def _span(part: Part, place: Place, k: int, start: int, stop: int) -> tuple[int, int, tuple[int, int]]:
    """Where stored rows of the matrix rows start:stop lie: first byte, stride in bytes, shape of the chunk."""
    size = part.carrier.itemsize
    height, width = part.matrix(place.rows, k)
    before = place.expert * height * width * size
    if place.step > 1 and (part.per > 1 or part.across):
        raise UsageError(f"{place.stem}: interleaved rows cannot be told apart in {part.suffix}")
    if part.piece in FOLLOWS_ROWS and place.first % part.per:
        raise UsageError(
            f"{place.stem} begins inside a block of {part.suffix}", got=f"row {place.first}",
            wanted=f"a multiple of {part.per}",
        )  # fmt: skip
    if part.across:
        begin = part.stored(place.first + start)
        count = part.stored(place.first + stop) - begin
        return before + begin * size, width * size, (height, count)
    begin = part.stored(place.first + start * place.step)
    count = part.stored(stop) - part.stored(start)
    return before + begin * width * size, place.step * width * size, (count, width)


def _as_stored(scales: Array) -> Array:
    """Scales as the kernels hold them: float32, or the codes of a narrower format."""
    return (
        scales
        if scales.dtype == np.float32 or scales.dtype.kind == "u"
        else scales.view(f"<u{scales.itemsize}")
    )


def scale_part(suffix: str, dtype: str, scheme: Scheme, **more: Any) -> Part:
    """The usual tensor of inner scales: one row for each tile of rows, [⌈N/rows⌉, ⌈K/columns⌉]."""
    return Part(
        suffix,
        "scales",
        dtype,
        lambda n, k: scales_shape((n, k), scheme)[0],
        per=scheme.inner.tile[0] or 1,
        **more,
    )


def code_part(suffix: str, dtype: str, packing: Packing) -> Part:
    """The usual tensor of codes: a packed row for each row."""
    item = DTYPES[dtype].carrier.itemsize
    return Part(suffix, "codes", dtype, lambda n, k: (n, packing.row_bytes(k) // item))


def value_part(
    suffix: str,
    piece: Piece,
    shape: tuple[int, ...] = (1,),
    *,
    dtype: str = "F32",
    divides: bool = False,
    optional: bool = False,
) -> Part:
    """A static of one number, stored as the multiplier that it is here, or as the divisor that it is to its
    readers."""

    def encode(value: Array) -> Array:
        return narrowed(divisor_of(value) if divides else value, dtype)

    def decode(stored: Array, count: int) -> Array:
        value = widened(stored, dtype)
        return np.float32(1) / value if divides else value

    return Part(
        suffix, piece, dtype, lambda n, k: shape, per=0, encode=encode, decode=decode, optional=optional
    )


def divisor_of(multipliers: NDArray[np.float32]) -> NDArray[np.float32]:
    """The divisor d that is read as each multiplier m, fl(1 / d) = m: the roundest where there are several, which is
    the one that a library chose, and fl(1 / m) where there is none. 3584 → 1/3584 → 3584, while fl(1 / fl(1 / 3584))
    is its neighbour below."""
    with np.errstate(all="ignore"):
        nearest = np.float32(1) / multipliers
        bits = nearest.view(np.uint32)[..., None] + np.arange(-2, 3).astype(np.uint32)
        inverts = np.float32(1) / bits.view(np.float32) == multipliers[..., None]
    roundness = np.where(inverts, bits & -bits, np.uint32(0))  # the lowest bit that is set
    found = np.take_along_axis(bits, roundness.argmax(axis=-1)[..., None], -1)[..., 0].view(np.float32)
    return np.where(inverts.any(axis=-1), found, nearest)


def widened(stored: Array, dtype: str) -> NDArray[np.float32]:
    """Stored numbers of a float dtype as float32."""
    name = DTYPES[dtype].format or "fp32"
    return stored.astype(np.float32) if name == FP32.name else widen(stored, formats[name])


def narrowed(value: Array, dtype: str) -> Array:
    """float32 numbers as they are stored in a float dtype: exact where they came from it."""
    if dtype == "BF16":
        return to_bf16(value.astype(np.float32))
    return value.astype(DTYPES[dtype].carrier)
