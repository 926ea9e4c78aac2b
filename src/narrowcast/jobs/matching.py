"""The tensors of a checkpoint under the names that every container's version of the model shares.

    held(opened)    name -> Held       a matrix [N, K] whatever it lies in: alone, quantized, in a stack of experts

A quantized matrix has its module's name, as an unquantized one has; stacks and their biases are seen expert by expert
and projection by projection, so that a stacked and an unstacked layout of one model meet. What is no matrix of a
layer keeps its tensor's name. Scales of inputs and of the KV cache are small tensors of their own, as multipliers.

A head that a tied model does not store is its embedding: it meets the other side's head, where that is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.spelling import widened
from narrowcast.errors import UsageError
from narrowcast.jobs.coded import Coded, Logical, Opened
from narrowcast.jobs.stream import Floats, Slice
from narrowcast.model.modules import Module, Part
from narrowcast.model.patterns import Pattern, near_misses
from narrowcast.model.roles import classify
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import FP32, FP64, Format, formats
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.dtypes import DTYPES, DType
from narrowcast.store.safetensors import Entry, matrix_shape

INPUT_SCALE, CACHE_SCALE = "input scale", "KV cache scale"


@dataclass(frozen=True)
class Constant:
    """A few numbers that were read already, float32 [1, n]."""

    shape: tuple[int, int]
    numbers: tuple[float, ...]
    chunk_bytes: int = 1 << 20

    def read(self, source: Checkpoint, carrier: np.dtype[Any], start: int, stop: int) -> NDArray[Any]:
        return np.array([self.numbers], np.float32)[start:stop]


@dataclass(frozen=True)
class Strip:
    """The bias of one projection of one expert in a stack [E, out]: [1, n]."""

    tensor: str
    shape: tuple[int, int]
    expert: int
    part: Part
    chunk_bytes: int = 1 << 20

    def read(self, source: Checkpoint, carrier: np.dtype[Any], start: int, stop: int) -> NDArray[Any]:
        row = source.rows(self.tensor, self.expert, self.expert + 1)
        found = row[start:stop, self.part.start : self.part.stop : self.part.step]
        return np.ascontiguousarray(found)


@dataclass(frozen=True)
class Held:
    """One tensor of one checkpoint.

    ``shape`` is that of the unquantized model, ``source.shape`` the matrix that is read; ``scheme`` names the scheme
    or the dtype, ``nbytes`` what it takes in the file. ``dtype`` is None for quantized matrices.
    """

    name: str
    role: str
    kind: str
    scheme: str
    shape: tuple[int, ...]
    nbytes: int
    source: Coded | Slice | Floats | Constant | Strip
    checkpoint: Checkpoint
    dtype: DType | None = None

    @property
    def coded(self) -> Coded | None:
        """The source, if it is quantized."""
        return self.source if isinstance(self.source, Coded) else None

    @property
    def carrier(self) -> np.dtype[Any]:
        return self.dtype.carrier if self.dtype is not None else np.dtype("<f4")

    @property
    def row_multiple(self) -> int:
        """Rows that a chunk of codes must be a multiple of."""
        return self.coded.how.row_multiple if self.coded is not None else 1

    @property
    def element(self) -> Format:
        """The format of one element."""
        if self.coded is not None:
            element: Format = self.coded.how.scheme.element
            return element
        return formats[self.dtype.format] if self.dtype is not None and self.dtype.format else FP32

    @cached_property
    def spelling(self) -> tuple[object, ...]:
        """What the stored bytes depend on beside the numbers: container, parts, orientation, stacking."""
        source = self.source
        if isinstance(source, Coded):
            how = source.how
            return how.container, how.format, *((p.suffix, p.dtype) for p in how.parts), source.place.experts
        stack = getattr(source, "expert", None) is not None
        return self.scheme, getattr(source, "orientation", "out_in"), stack

    def columns(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """Of a quantized matrix whose container has them: the column that each stored column belongs to, and the
        factor of each stored column."""
        coded = self.coded
        if coded is None:
            return None, None
        scaled = coded.how.part("pre_scale") is not None
        factors = coded.how.static(self.checkpoint, coded.place, coded.shape, "pre_scale") if scaled else None
        return coded.order(self.checkpoint), factors

    def stored(self, start: int, stop: int) -> NDArray[Any]:
        """Rows start:stop of an unquantized tensor in its carrier dtype."""
        return self.source.read(self.checkpoint, self.carrier, start, stop)

    def values(self, start: int, stop: int) -> NDArray[Any]:
        """Rows start:stop as exact values: float32, or the dtype itself where float32 does not hold it."""
        found = self.stored(start, stop)
        if self.dtype is None:
            return found
        if self.dtype.format is None or self.dtype.format == FP64.name:
            views = {"c": "<f4", "b": "u1"}
            return found.view(views.get(found.dtype.kind, found.dtype))
        return widen(found, formats[self.dtype.format])


@dataclass(frozen=True)
class Tensors:
    """Every tensor by name; ``tied`` has heads as their embeddings, for when they are not stored."""

    found: dict[str, Held]
    tied: dict[str, Held]

    def get(self, name: str) -> Held | None:
        return self.found.get(name) or self.tied.get(name)


def held(opened: Opened) -> Tensors:
    """What a checkpoint holds, in file order, scales of inputs and caches last."""
    modules = {module.tensor: module for module in opened.modules}
    biases = {module.bias: module for module in opened.modules if module.bias and list(module.splits())}
    found: dict[str, Held] = {}
    for name, entry in opened.entries.items():
        module = modules.get(name)
        if isinstance(entry, Logical):
            members = list(_coded(opened, module, entry))
        elif name in biases:
            members = list(_biases(opened, biases[name], entry))
        else:
            members = list(_plain(opened, module, entry))
        found |= {member.name: member for member in members}
    for member in [*found.values()]:
        scale = _input_scale(member)
        if scale is not None:
            found[scale.name] = scale
    found |= {scale.name: scale for scale in _cache_scales(opened)}
    tied = {
        module.tied: replace(found[module.name], name=module.tied, role="lm_head")
        for module in opened.modules
        if module.tied is not None and module.name in found
    }
    return Tensors(found, tied)


def _coded(opened: Opened, module: Module | None, logical: Logical) -> Iterator[Held]:
    named = opened.coded(module) if module is not None else []
    if not named:  # no layer that a recipe could name, or a stack that no rule can split
        whole = opened.whole(logical)
        stem = logical.name.removesuffix(".weight")
        named = [(stem if len(whole) == 1 else f"{stem}.{e}", coded) for e, coded in enumerate(whole)]
    role, kind = _role(opened, module, logical.name, logical.shape)
    for name, coded in named:
        size = logical.nbytes // len(named)
        scheme = coded.how.scheme.name
        yield Held(name, role, kind, scheme, coded.shape, size, coded, opened.checkpoint)


def _plain(opened: Opened, module: Module | None, entry: Entry) -> Iterator[Held]:
    role, kind = _role(opened, module, entry.name, entry.shape)
    scheme = entry.dtype.format or entry.dtype.name.lower()
    splits = list(module.splits()) if module is not None else []
    for split in splits:
        assert module is not None
        part = split.part
        shape = (len(range(part.start, part.stop, part.step)), module.out_in[1])
        source = Slice(entry.name, shape, module.orientation, split.expert, part)
        size = prod(shape) * entry.dtype.bits // 8
        yield Held(split.name, role, kind, scheme, shape, size, source, opened.checkpoint, entry.dtype)
    if splits:
        return
    if module is not None and module.experts is None and len(entry.shape) == 2:
        matrix: Slice | Floats = Slice(entry.name, module.out_in, module.orientation)
        yield Held(
            module.name, role, kind, scheme, module.out_in, entry.nbytes, matrix, opened.checkpoint, entry.dtype
        )  # fmt: skip
    else:
        matrix = Floats(entry.name, matrix_shape(entry))
        yield Held(
            entry.name, role, kind, scheme, entry.shape, entry.nbytes, matrix, opened.checkpoint, entry.dtype
        )  # fmt: skip


def _biases(opened: Opened, module: Module, entry: Entry) -> Iterator[Held]:
    """A stack of biases, cut as its matrices are."""
    scheme = entry.dtype.format or entry.dtype.name.lower()
    for split in module.splits():
        size = len(range(split.part.start, split.part.stop, split.part.step))
        source = Strip(entry.name, (1, size), split.expert, split.part)
        nbytes = size * entry.dtype.carrier.itemsize
        yield Held(
            f"{split.name}.bias", "bias", "", scheme, (size,), nbytes, source, opened.checkpoint, entry.dtype
        )


def _role(opened: Opened, module: Module | None, name: str, shape: Sequence[int]) -> tuple[str, str]:
    if module is not None:
        return str(module.role), module.kind
    return str(classify(name, shape, opened.checkpoint.config or {})), ""


def _input_scale(matrix: Held) -> Held | None:
    """The static scale of a matrix's input, where the file has one."""
    coded = matrix.coded
    part = coded.how.part("input") if coded is not None else None
    if coded is None or part is None or coded.place.stem + part.suffix not in matrix.checkpoint.entries:
        return None
    value = coded.how.static(matrix.checkpoint, coded.place, coded.shape, "input")
    return _small(f"{matrix.name} (input scale)", INPUT_SCALE, value, matrix.checkpoint)


def _cache_scales(opened: Opened) -> Iterator[Held]:
    for scale in opened.contents.cache_scales:
        entry = opened.checkpoint.entries[scale.tensor]
        value = widened(opened.checkpoint.array(scale.tensor), entry.dtype.name)
        yield _small(f"{scale.attention} ({scale.which} scale)", CACHE_SCALE, value, opened.checkpoint)


def _small(name: str, role: str, value: NDArray[Any], checkpoint: Checkpoint) -> Held:
    source = Constant((1, value.size), tuple(value.reshape(-1).tolist()))
    shape, size = (value.size,), 4 * value.size
    return Held(name, role, "", FP32.name, shape, size, source, checkpoint, DTYPES["F32"])


def restricted(names: dict[str, str], only: Sequence[str]) -> set[str]:
    """Names that a pattern of ``only`` matches; ``names`` maps each to its class. UsageError, with what was probably
    meant, for a pattern that matches nothing."""
    if not only:
        return set(names)
    taken: set[str] = set()
    for text in only:
        pattern = Pattern.parse(text)
        fits = {name for name, kind in names.items() if pattern.fits_name(name) or text == kind}
        if not fits:
            near = near_misses(pattern, list(names))
            raise UsageError(
                "the pattern matches no tensor", got=text,
                remedy=f"did you mean {' or '.join(near)}?" if near else "`narrowcast inspect` lists what is there",
            )  # fmt: skip
        taken |= fits
    return taken
