"""Matrices that are quantized on disk, as sources of work: their rows as they are stored, or their exact values.

    values = decode(codes) · Π scale      fp32, never written anywhere: a second quantization starts from these

``open_coded`` looks at a checkpoint as if it were not quantized: every quantized matrix appears under the name
and shape
that the unquantized model would have, so that roles, recipes and stacked experts work the same for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.contents import Contents, Stored
from narrowcast.containers.detect import detect, open_source
from narrowcast.containers.spelling import Place, Spelling
from narrowcast.errors import CheckpointError
from narrowcast.jobs.stream import CHUNK_BYTES
from narrowcast.kernels import Rows, choose
from narrowcast.kernels.reference.dequantize import narrow
from narrowcast.model.modules import Module, modules, stack_orientation
from narrowcast.model.roles import Role, quantization_config
from narrowcast.numbers.formats import FP32, Format
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.folder import some
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.packing import unpack
from narrowcast.tensors.scaling import element_divisor, spread
from narrowcast.tensors.schemes import Scheme
from narrowcast.tensors.storage import stored_scheme

# Roles of layers that every engine builds as linears.
_SURE = frozenset({Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT})


@dataclass(frozen=True)
class Logical:
    """A quantized matrix or stack under the name and shape that it has in the unquantized model."""

    name: str
    shape: tuple[int, ...]
    path: Path
    nbytes: int
    stored: Stored


@dataclass(frozen=True)
class Coded:
    """One quantized matrix [N, K] of a checkpoint; a source like ``stream.Slice``."""

    tensor: str
    shape: tuple[int, int]
    stored: Stored
    place: Place
    orientation: str = "out_in"

    @property
    def how(self) -> Spelling:
        return self.stored.how

    @property
    def chunk_bytes(self) -> int:
        """Bytes of fp32 values that are worked on at once."""
        return 4 * CHUNK_BYTES  # what a chunk costs beside its elements is more than for plain floats

    def rows(self, source: Checkpoint, start: int, stop: int) -> Rows:
        """Rows start:stop as they are stored, ``start`` on a tile."""
        return self.how.read(source, self.place, self.shape, start, stop)

    def outer(self, source: Checkpoint) -> float | None:
        """The outer scale as a multiplier, or None."""
        return self.how.outer(source, self.place, self.shape)

    def order(self, source: Checkpoint) -> NDArray[np.int64] | None:
        """The column that each stored column belongs to, where the container shuffles them."""
        if self.how.part("order") is None:
            return None
        return self.how.static(source, self.place, self.shape, "order").astype(np.int64)

    def read(self, source: Checkpoint, carrier: np.dtype[Any], start: int, stop: int) -> NDArray[Any]:
        """Exact values of rows start:stop, float32 [rows, K]; any ``start``."""
        return self.decode(source, start, stop, FP32)

    def decode(self, source: Checkpoint, start: int, stop: int, out: Format) -> NDArray[Any]:
        """Rows start:stop as floats [rows, K]: the exact values, rounded once to ``out``; any ``start``."""
        multiple = self.how.row_multiple
        first = start // multiple * multiple
        last = min(-(-stop // multiple) * multiple, self.shape[0])
        rows, scheme, outer = folded(self.rows(source, first, last), self.how.scheme, self.outer(source))
        backend = choose(scheme, FP32, self.how.packing).backend
        scaled = self.how.part("pre_scale") is not None
        offsets = self.how.offsets(source, self.place, self.shape, first, last)
        wide = scaled or offsets is not None
        values = backend.dequantize(
            rows, scheme, self.how.packing, self.shape[1], FP32 if wide else out, outer
        )
        if offsets is not None:
            values = values + spread(offsets, scheme.inner.tile, values.shape)
        if scaled:
            # The input is multiplied by it, so this is the weight that meets the model's own input.
            values = values * self.how.static(source, self.place, self.shape, "pre_scale")
        if wide:
            values = narrow(values, out)
        order = self.order(source)
        if order is not None:
            values = in_order(values, order)
        return values[start - first : stop - first]

    def codes(self, source: Checkpoint, start: int, stop: int) -> NDArray[np.uint8]:
        """Codes of rows start:stop, one in a byte."""
        return unpack(self.rows(source, start, stop).packed, self.how.packing, self.shape[1])


def folded(rows: Rows, scheme: Scheme, outer: float | None) -> tuple[Rows, Scheme, float | None]:
    """Rows whose outer scale divides, with fp32 inner scales that hold the quotient: what the decoder computes
    first anyway, and a form that compiled kernels read. Others as they are."""
    if outer is None or not scheme.scales[-1].divides:
        return rows, scheme, outer
    scales = element_divisor(rows.scales, scheme, np.full((1, 1), outer, np.float32))
    return replace(rows, scales=scales), stored_scheme(scheme.element, scheme.inner.tile, FP32), None


def in_order(values: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
    """Columns put back: stored column c is the model's column order[c]."""
    out = np.empty_like(values)
    out[:, order] = values
    return out


@dataclass(frozen=True)
class Opened:
    """A checkpoint and its contents; ``entries`` are those of the unquantized model, in file order, or of the file
    itself where the checkpoint is ``copied`` as it is."""

    checkpoint: Checkpoint
    contents: Contents
    entries: dict[str, Entry | Logical]
    modules: list[Module]
    copied: bool = False

    def coded(self, module: Module) -> list[tuple[str, Coded]]:
        """The quantized matrices of a module by name: itself, or each projection of each expert of a stack."""
        logical = self.entries[module.tensor]
        assert isinstance(logical, Logical)
        stored, n = logical.stored, logical.stored.shape[0]
        if stored.experts is None:
            return [(module.name, Coded(module.tensor, stored.shape, stored, stored.place))]
        found = []
        for split in module.splits():
            part, step = split.part, split.part.step
            rows = len(range(part.start, part.stop, step))
            place = Place(stored.module, n, stored.experts, split.expert, part.start, step)
            found.append((split.name, Coded(module.tensor, (rows, stored.shape[1]), stored, place)))
        return found

    def whole(self, logical: Logical) -> list[Coded]:
        """The matrices of a module as they are stored, stacks expert by expert and not split."""
        stored = logical.stored
        if stored.experts is None:
            return [Coded(logical.name, stored.shape, stored, stored.place)]
        places = [Place(stored.module, stored.shape[0], stored.experts, e) for e in range(stored.experts)]
        return [Coded(logical.name, stored.shape, stored, place) for place in places]


def open_coded(checkpoint: Checkpoint) -> Opened:
    """See a checkpoint through its container; CheckpointError where config and data disagree."""
    contents = detect(open_source(checkpoint, quantization_config(checkpoint.config or {})))
    opened = see(checkpoint, contents)
    for refuse in REFUSALS:
        refuse(opened)
    return opened


def see(checkpoint: Checkpoint, contents: Contents) -> Opened:
    """A checkpoint through what its container found; CheckpointError where a matrix is stored twice."""
    config = checkpoint.config or {}
    entries = _entries(checkpoint, contents, config)
    return Opened(checkpoint, contents, entries, modules(entries, config))


def _refuse_other_biases(opened: Opened) -> None:
    """A stack of biases is cut like its matrices, so it must have their size."""
    for module in opened.modules:
        entry = opened.entries.get(module.bias or "")
        if entry is None or module.experts is None or module.problem is not None:
            continue
        wanted = (module.experts, module.out_in[0])
        if entry.shape != wanted:
            raise CheckpointError(
                f"{entry.name} is no bias of {module.name}", where=opened.checkpoint.root, got=list(entry.shape),
                wanted=f"{list(wanted)}, one for each output of each expert",
                remedy="download or copy the checkpoint again",
            )  # fmt: skip


def _refuse_plain(opened: Opened) -> None:
    """Refuse attention and MLP layers that are plain floats where the config says that they are quantized: an engine
    would look for their scales. Of other layers, whether an engine builds them as linears is not known here."""
    takes = opened.contents.takes
    if takes is None:
        return
    plain = [m for m in opened.modules if isinstance(opened.entries[m.tensor], Entry) and m.experts is None]
    sure = [m.name for m in plain if m.role in _SURE and m.linear and m.known]
    wrong = [name for name in sure if takes(name)]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} layers are plain floats, and the config says that they are quantized",
            where=opened.checkpoint.root, got=some(wrong, 3), wanted="codes and scales, or their names under ignore",
        )  # fmt: skip


# What an opened checkpoint can be refused for, whatever its container.
REFUSALS = (_refuse_plain, _refuse_other_biases)


def as_it_is(opened: Opened) -> Opened:
    """The checkpoint as tensors that nobody looks into."""
    contents = replace(opened.contents, matrices=(), cache_scales=(), taken=(), metadata=frozenset())
    return Opened(opened.checkpoint, contents, dict(opened.checkpoint.entries), [], copied=True)


def _entries(
    checkpoint: Checkpoint, contents: Contents, config: Mapping[str, Any]
) -> dict[str, Entry | Logical]:
    """The entries of the unquantized model: a quantized matrix stands where its codes stand."""
    consumed = contents.consumed
    at: dict[str, Logical] = {}
    for stored in contents.matrices:
        codes = stored.how.part("codes")
        assert codes is not None
        first = checkpoint.entries[stored.module + codes.suffix]
        size = sum(checkpoint.entries[name].nbytes for name in stored.tensors if name in checkpoint.entries)
        name, shape = _logical(stored, config)
        at[first.name] = Logical(name, shape, first.path, size, stored)
    found: dict[str, Entry | Logical] = {}
    for name, entry in checkpoint.entries.items():
        if name not in at and name in consumed:
            continue
        logical = at.get(name)
        shown = logical.name if logical is not None else name
        if shown in found:
            raise CheckpointError(
                f"{shown} is stored quantized and plain", where=checkpoint.root, got=f"{name} beside {shown}"
                if logical is not None else f"{shown} beside its codes", wanted="one of them",
                remedy="remove the one that the model does not use",
            )  # fmt: skip
        found[shown] = logical or entry
    return found


def _logical(stored: Stored, config: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    n, k = stored.shape
    if stored.experts is None:
        return f"{stored.module}.weight", (n, k)
    if stack_orientation(stored.module, config) == "in_out":
        return stored.module, (stored.experts, k, n)
    return stored.module, (stored.experts, n, k)
