"""An open GGUF file in the shape of a checkpoint, so that every job takes one.

    a matrix in blocks of a scheme       its codes and scales, apart (containers/gguf), bit for bit
    a matrix in other blocks             float32, decoded exactly when it is read
    an embedding or head in blocks       float32 too: no engine takes them quantized
    numbers                              as they are; of a shifted norm float32

Nothing is decoded before it is read, and nothing is kept: a row range of a shown tensor is computed from the rows of
the file that it comes from. ``Checkpoint.decoded`` names tensors that have no dtype of their own: what was decoded,
and vectors, which GGUF always stores as F32.

config.json is rebuilt from the metadata, and so are the tokenizer's files, which ``Checkpoint.beside`` makes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.gguf import CODES, NAME, OUTER, SCALES, SPELLINGS
from narrowcast.containers.gguf_blocks import BLOCKS, split
from narrowcast.errors import NarrowcastError, UsageError
from narrowcast.model.gguf_model import GGUFModel
from narrowcast.model.gguf_tokenizer import tokenizer_files
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.header import Entry
from narrowcast.store.writer import as_bytes
from narrowcast.tensors.packing import pack

Rows = Callable[[int, int], NDArray[Any]]
TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def open_gguf(path: str | os.PathLike[str]) -> Checkpoint:
    """A GGUF file as a checkpoint. Raises what ``GGUFModel.open`` raises."""
    model = GGUFModel.open(path)
    shown = ShownTensors(model)
    where = model.file.path.absolute()
    config = model.config | {"torch_dtype": shown.dtype}
    text = json.dumps(config, indent=2).encode() + b"\n"
    tied = (("lm_head.weight", "model.embed_tokens.weight"),) if config["tie_word_embeddings"] else ()
    return Checkpoint(
        root=where,
        config=config
        | {"quantization_config": {"quant_method": NAME, "types": shown.types, "blocks": shown.blocks}},
        config_bytes=text,
        shards=(where,),
        entries=shown.entries,
        index=None,
        metadata={where.name: {}},
        side_files=(),
        foreign_weights=(),
        tied=tied,
        beside=partial(_beside, model.file.fields),
        decoded=shown.decoded,
        _readers={where: shown},  # type: ignore[dict-item]
    )


def _beside(fields: Mapping[str, Any]) -> tuple[dict[str, bytes], list[str]]:
    """The tokenizer's files, or why there are none."""
    try:
        return tokenizer_files(fields), []
    except NarrowcastError as error:
        return {}, [f"the result has no tokenizer: {error.problem} ({error.got or error.wanted})"]


@dataclass(frozen=True)
class _Shown:
    """One shown tensor: how many bytes a row has, and where its rows come from."""

    width: int
    rows: Rows


class ShownTensors:
    """The tensors that a GGUF file shows, with the reading half of a safetensors Reader; every method may be called
    from several threads."""

    def __init__(self, model: GGUFModel) -> None:
        self.model, self.path = model, model.file.path.absolute()
        self.entries: dict[str, Entry] = {}
        self.types: dict[str, str] = {}  # of matrices whose codes are shown, by module
        self.blocks: dict[str, tuple[str, int]] = {}  # type and bytes in the file of those that are decoded
        decoded: set[str] = set()
        self._shown: dict[str, _Shown] = {}
        for name, move in model.moves.items():
            kind, shape = model.tensor(name).type, model.shape(name)
            module = name.removesuffix(".weight")
            if kind.name in BLOCKS and name.startswith("model.layers.") and name != module:
                self.types[module] = kind.name
                self._show_block(module, kind.name, shape)
            elif kind.dtype is None or move.shift:
                if kind.dtype is None:
                    self.blocks[name] = kind.name, prod(shape[:-1]) * kind.row_bytes(shape[-1])
                self._show(name, "F32", shape, partial(model.values, name))
            else:
                self._show(name, kind.dtype, shape, partial(model.rows, name))
            if name in self.entries and (
                kind.dtype is None or len(shape) == 1 or move.gguf.endswith("gate_inp.weight")
            ):
                decoded.add(name)
        self.decoded = frozenset(decoded) - {module + CODES for module in self.types}
        self.dtype = self._dtype()

    def _dtype(self) -> str:
        """What the model's config calls its dtype: that of most plain matrices, bfloat16 where there are none."""
        sizes: dict[str, int] = {}
        for name in self.model.moves.keys() - self.decoded:
            entry = self.entries[name]
            if entry.dtype.name in TORCH and len(entry.shape) > 1:
                sizes[entry.dtype.name] = sizes.get(entry.dtype.name, 0) + entry.nbytes
        return TORCH[max(sizes, key=sizes.__getitem__, default="BF16")]

    def _show(self, name: str, dtype: str, shape: tuple[int, ...], rows: Rows) -> None:
        size = DTYPES[dtype].carrier.itemsize
        row = shape[-1] * size if len(shape) > 1 else size  # a vector is a column here as in the model
        self._shown[name] = _Shown(row, rows)
        offset = self.model.tensor(name).offset if name in self.model.moves else 0
        self.entries[name] = Entry(name, DTYPES[dtype], shape, offset, prod(shape) * size, self.path)

    def _show_block(self, module: str, kind: str, shape: tuple[int, ...]) -> None:
        row, how, name = BLOCKS[kind], SPELLINGS[kind], module + ".weight"
        codes, scales = how.part("codes"), how.part("scales")
        assert codes is not None
        assert scales is not None

        def packed(i: int, j: int) -> NDArray[Any]:
            return pack(split(row, self.model.rows(name, i, j))[0], how.packing)

        def stored(i: int, j: int) -> NDArray[Any]:
            return split(row, self.model.rows(name, i, j))[1]

        n, k = shape
        self._show(module + CODES, codes.dtype, codes.shape(n, k), packed)
        self._show(module + SCALES, scales.dtype, scales.shape(n, k), stored)
        if how.part("outer") is not None:
            self._show(
                module + OUTER, "F32", (1,), lambda i, j: np.array([self.model.outer(name)], np.float32)
            )

    def close(self) -> None:
        """Close the file."""
        self.model.file.close()

    def release(self) -> None:
        """Nothing is mapped."""

    def read_into(self, name: str, buffer: Any, start: int = 0) -> None:
        """Fill ``buffer`` with bytes of a shown tensor from its byte ``start`` on."""
        shown, view = self._shown[name], as_bytes(buffer)
        stop = start + len(view)
        if start < 0 or stop > self.entries[name].nbytes:
            raise UsageError(
                f"a read beyond tensor {name!r}", where=self.path, got=f"bytes {start} to {stop}"
            )
        if len(view):
            first = start // shown.width
            rows = np.ascontiguousarray(shown.rows(first, -(-stop // shown.width)))
            skip = start - first * shown.width
            view[:] = rows.reshape(-1).view(np.uint8)[skip : skip + len(view)].data

    def read_pieces(self, name: str, buffer: NDArray[Any], start: int, stride: int) -> None:
        """Fill each row of ``buffer`` from byte start + i · stride on."""
        width = buffer.nbytes // max(len(buffer), 1)
        if width == stride:
            self.read_into(name, buffer, start)
            return
        for i in range(len(buffer)):
            self.read_into(name, buffer[i : i + 1], start + i * stride)

    def rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        """Rows first:last of a shown tensor as a matrix; a vector is one row."""
        entry = self.entries[name]
        out = np.empty((last - first, entry.shape[-1]), entry.dtype.carrier)
        self.read_into(name, out, first * entry.shape[-1] * entry.dtype.carrier.itemsize)
        return out

    def array(self, name: str) -> NDArray[Any]:
        """A whole shown tensor, computed."""
        entry = self.entries[name]
        out = np.empty(entry.shape, entry.dtype.carrier)
        self.read_into(name, out.reshape(-1))
        return out
