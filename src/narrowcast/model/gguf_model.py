"""A GGUF file as the Hugging Face model that it was made of: tensors by their names there, rows in their order.

``GGUFModel`` reads; ``specs`` and ``placed`` write. Both move rows as stored, so a matrix of blocks travels without
being decoded; values are computed only where somebody asks for them, or where a norm is shifted.

A vector counts as a column: its rows are its elements. Rows in rotary order are read from whole heads and written in
whole heads, ``row_multiple`` rows at a time, so that a chunk is one range of the file on both sides.

Which tensors stay wide when a matrix type is asked for follows llama.cpp: vectors, norms and routers are F32; of
four-bit types the embedding and the head are Q8_0; rows that fill no whole blocks fall back to Q8_0, then to BF16.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.gguf_blocks import dequantize
from narrowcast.errors import CheckpointError
from narrowcast.model.gguf_config import config_of_gguf
from narrowcast.model.gguf_names import Family, Move, Shape, family_of_gguf, moves_from_gguf, rotary_order
from narrowcast.model.gguf_rope import FREQS, LONG, SHORT
from narrowcast.store.gguf import GGML_TYPES, GGMLType, GGUFFile, GGUFTensor
from narrowcast.store.gguf_writer import GGUFSpec

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass
class GGUFModel:
    """An open GGUF file: its family, the config.json that it stands for, and every tensor by its Hugging Face name."""

    file: GGUFFile
    family: Family
    config: dict[str, Any]
    moves: dict[str, Move]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFModel:
        """Open a model. Raises UsageError for an architecture without a table, CheckpointError for tensors or metadata
        that do not fit it, HeaderError for a bad file."""
        file = GGUFFile(path)
        try:
            family = family_of_gguf(file.fields, file.path)
            shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
            ropes = {
                name: file.array(name).astype(np.float32) for name in (FREQS, LONG, SHORT) if name in shapes
            }
            config = config_of_gguf(family, file.fields, shapes, ropes)
            moves = {move.name: move for move in moves_from_gguf(family, shapes, file.fields)}
        except BaseException:
            file.close()
            raise
        return cls(file, family, config, moves)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()

    def tensor(self, name: str) -> GGUFTensor:
        """The tensor of the file that a Hugging Face tensor lies in."""
        return self.file.tensors[self.moves[name].gguf]

    def shape(self, name: str) -> Shape:
        """The shape of a Hugging Face tensor."""
        shape = self.tensor(name).shape
        return shape if self.moves[name].expert is None else shape[1:]

    def rows(self, name: str, start: int, stop: int) -> U8:
        """Rows start:stop as stored, uint8 [n, bytes], in Hugging Face order; before any shift."""
        move, tensor = self.moves[name], self.tensor(name)
        count, width = _matrix(tensor.type, self.shape(name))
        if not move.heads:
            return self._stored(tensor, (move.expert or 0) * count + start, stop - start, width)
        order = rotary_order(start, stop, count, move.heads)
        size = count // move.heads
        first, last = start // size * size, -(-stop // size) * size
        return self._stored(tensor, first, last - first, width)[order - first]

    def _stored(self, tensor: GGUFTensor, first: int, count: int, width: int) -> U8:
        buffer = np.empty((count, width), np.uint8)
        self.file.read_into(tensor.name, buffer, first * width)
        return buffer

    def outer(self, name: str) -> np.float32 | None:
        """The outer scale of an NVFP4 matrix, 1 where the file has none; None for other types."""
        move = self.moves[name]
        if self.tensor(name).type.name != "NVFP4":
            return None
        if move.outer not in self.file.tensors:
            return np.float32(1)
        scales = self.file.array(move.outer).reshape(-1)
        index = move.expert or 0
        if scales.dtype != np.float32 or index >= len(scales):
            raise CheckpointError(
                f"tensor {move.outer!r} is not one fp32 scale for each matrix", got=len(scales)
            )
        return np.float32(scales[index])

    def values(self, name: str, start: int, stop: int) -> F32:
        """Rows start:stop as float32 [n, K], [n] of a vector: decoded exactly, then the outer scale or the shift."""
        move, kind = self.moves[name], self.tensor(name).type
        decoded = dequantize(kind, self.rows(name, start, stop))
        outer = self.outer(name)
        if outer is not None:
            decoded = decoded * outer
        if move.shift:
            decoded = decoded - np.float32(move.shift)
        return decoded.reshape(-1) if len(self.shape(name)) == 1 else decoded


def _matrix(kind: GGMLType, shape: Shape) -> tuple[int, int]:
    """Rows and bytes of a row of one Hugging Face tensor; a vector is a column."""
    return (shape[0], kind.nbytes) if len(shape) == 1 else (prod(shape[:-1]), kind.row_bytes(shape[-1]))


Choose = Callable[[str, Shape, Sequence[Move]], GGMLType]


def specs(moves: Sequence[Move], shapes: Mapping[str, Shape], choose: Choose) -> list[GGUFSpec]:
    """The tensors of a GGUF file. ``shapes``: of the Hugging Face tensors; ``choose`` gives the type of each from its
    name, shape and members.

    Raises CheckpointError where the experts of a stack are missing or differ in shape.
    """
    stacks: dict[str, list[Move]] = {}
    for move in moves:
        stacks.setdefault(move.gguf, []).append(move)
    found = []
    for name, members in stacks.items():
        shape = shapes[members[0].name]
        if members[0].expert is not None:
            numbers = [member.expert for member in members]
            if numbers != list(range(len(members))) or len({shapes[member.name] for member in members}) > 1:
                raise CheckpointError(f"the experts of {name!r} are not a whole stack", got=numbers)
            shape = (len(members), *shape)
        found.append(GGUFSpec(name, choose(name, shape, members), shape))
    return found


def tensor_type(name: str, shape: Shape, wanted: str, plain: str = "BF16") -> GGMLType:
    """The type of one tensor of a file whose matrices have type ``wanted``."""
    part = name.split(".")[-2]
    if len(shape) == 1 or part.endswith("norm") or part == "ffn_gate_inp":
        return GGML_TYPES["F32"]
    kind = GGML_TYPES[wanted]
    if kind.nbytes < kind.block and part in ("token_embd", "output"):
        kind = GGML_TYPES["Q8_0"]
    for choice in (kind, GGML_TYPES["Q8_0"] if kind.block > 1 else kind):
        if shape[-1] % choice.block == 0:
            return choice
    return GGML_TYPES[plain]


def row_multiple(move: Move, shape: Shape) -> int:
    """Rows that a chunk of a Hugging Face tensor must be a multiple of, to be one range of the GGUF tensor."""
    return shape[0] // move.heads if move.heads else 1


def placed(move: Move, kind: GGMLType, shape: Shape, start: int, rows: U8) -> tuple[str, U8, int]:
    """A chunk of stored rows that begins at Hugging Face row ``start``: tensor, rows in its order, byte of the first.

    ``start`` and the length are multiples of ``row_multiple``.
    """
    count, width = _matrix(kind, shape)
    if move.heads:
        rows = rows[rotary_order(start, start + len(rows), count, move.heads, to_gguf=True) - start]
    return move.gguf, rows, ((move.expert or 0) * count + start) * width
