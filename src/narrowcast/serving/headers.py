"""The groups of a checkpoint, from its headers: every matrix as its container reads it, equal ones together.

    bytes(group) = Σ over its tensors          codes, scales, zero points, outer and input scales, bias
    bytes of the rest = all bytes - those      norms, convolutions, routers' corrections, scales of a cache

No weights are read; containers look at single scales and zero points where headers leave something open. What a matrix
is (its split, heads, siblings, active experts) is what the family's geometry says of that name; where it says nothing,
the split follows from the last part of the name. A stack of experts counts as experts, whole or as the projections that
the family names. The output head that a tied model stores a second time is not counted, since engines load it once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from narrowcast.errors import CheckpointError
from narrowcast.jobs.coded import Logical, Opened, open_coded
from narrowcast.model.geometry import Attention, Geometry, Matrix, split_of
from narrowcast.model.modules import Module
from narrowcast.model.roles import Role, find_place, quantization_config
from narrowcast.numbers.formats import BF16, FP32, Format, formats
from narrowcast.serving.served import TOWERS, Group
from narrowcast.store.checkpoint import Checkpoint, text_config
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.presets import LinearScheme

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_TAIL = re.compile(r"(?:^|\.)(layers\..*)$")
# What families keep as buffers, which no geometry counts: corrections of routers, Gemma 4's scalars.
BUFFERS = re.compile(
    r"\b(e_score_correction\w*|expert_bias|moe_statics\.\w+|tid2eid|layer_scalar|act_fn\.(beta|eps))$"
)
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")


@dataclass(frozen=True)
class Kind:
    """What equal matrices have in common. ``nbytes`` are those of one matrix."""

    name: str
    role: Role
    shape: tuple[int, int]
    linear: LinearScheme | None
    format: str | None
    dtype: Format
    nbytes: float
    bias: int
    stack: int | None  # experts in one tensor


@dataclass
class Found:
    """The matrices of one kind: a module of them, the layers that have some, how many there are."""

    module: Module
    layers: set[str] = field(default_factory=set)
    count: int = 0


@dataclass(frozen=True)
class Read:
    """``groups`` and a module of each; bytes and elements of the rest, and bytes of towers among it; layers of the text
    model by their numbers."""

    groups: tuple[Group, ...]
    modules: tuple[Module, ...]
    vector_bytes: int
    tower_bytes: int
    vectors: int
    layers: int
    kv: str | None
    kv_scales: bool
    container: str
    notes: tuple[str, ...]


def read(checkpoint: Checkpoint, geometry: Geometry | None) -> Read:
    """What a checkpoint's headers hold, with the family's words for it where there are any. Raises what its container
    raises for contradictions."""
    opened = open_coded(checkpoint)
    config = checkpoint.config or {}
    blocks = quantization_config(config).get("blocks") or {}
    family, sizes = _Family(geometry, config), _Sizes(opened, blocks)
    kinds: dict[Kind, Found] = {}
    notes = list(opened.contents.notes)
    skipped = 0
    matrices = [module for module in opened.modules if module.kind]  # no norms of two axes
    for module in matrices:
        if module.role is Role.LM_HEAD and module.tied is not None:
            skipped += opened.entries[module.tensor].nbytes
            notes.append(f"{module.name} is stored and tied to {module.tied}: engines load one of them")
            continue
        for kind, layer, count in _kinds(opened, module, family, sizes):
            found = kinds.setdefault(kind, Found(module))
            found.layers.add(layer)
            found.count += count
    kinds = dict(sorted(kinds.items(), key=lambda item: family.place(item[0])))
    groups = tuple(family.group(kind, found) for kind, found in kinds.items())
    total = sum(blocks.get(name, ("", entry.nbytes))[1] for name, entry in checkpoint.entries.items())
    inside = {name for module in matrices for name in (module.tensor, module.bias) if name is not None}
    rest = [entry for name, entry in opened.entries.items() if name not in inside]
    tower = {entry.name: entry for entry in rest if _tower(entry.name, config)}
    tower_bytes = sum(entry.nbytes for entry in tower.values())
    return Read(
        groups, tuple(_one(kind, found.module) for kind, found in kinds.items()),
        total - skipped - tower_bytes - sum(group.nbytes for group in groups), tower_bytes,
        sum(prod(entry.shape) for entry in rest if entry.name not in tower and not BUFFERS.search(entry.name)),
        len({layer for kind, found in kinds.items() for layer in found.layers if layer and kind.role not in TOWERS}),
        opened.contents.kv, bool(opened.contents.cache_scales), opened.contents.container, tuple(notes),
    )  # fmt: skip


def _one(kind: Kind, module: Module) -> Module:
    """A module of a kind under the name that stands for all of them; of a part of a stack, that part alone."""
    name = kind.name.replace("*", "0")
    if module.parts and kind.stack is None:
        return replace(module, name=name, shape=kind.shape, experts=None, orientation="out_in", parts=())
    return replace(module, name=name)


def _tower(name: str, config: Mapping[str, Any]) -> bool:
    place = find_place(name, config)
    return place is not None and place.role in TOWERS


def _kinds(opened: Opened, module: Module, family: _Family, sizes: _Sizes) -> Iterable[tuple[Kind, str, int]]:
    """The kinds of a module's matrices, with the layer and how many there are."""
    entry = opened.entries[module.tensor]
    bias = opened.entries.get(module.bias or "")
    size, linear, word, dtype = sizes.of(entry)
    numbers = _NUMBER.findall(module.name)
    layer = numbers[0] if numbers else ""
    pattern = _NUMBER.sub("*", module.name)
    experts = entry.stored.experts if isinstance(entry, Logical) else module.experts
    experts = experts if experts is not None or len(entry.shape) == 2 else entry.shape[0]
    n, k = entry.stored.shape if isinstance(entry, Logical) else module.out_in
    for name, rows in family.parts(pattern, module, n) if experts else [(pattern, n)]:
        each = (size + (bias.nbytes if bias is not None else 0)) * rows / n / (experts or 1)
        elements = prod(bias.shape) * rows // n // (experts or 1) if bias is not None else 0
        stack = experts if experts and name == pattern else None
        yield (
            Kind(name, module.role, (rows, k), linear, word, dtype, each, elements, stack),
            layer,
            experts or 1,
        )


class _Sizes:
    """Bytes in the file: of codes with all that belongs to them, and of a GGUF file's blocks."""

    def __init__(self, opened: Opened, blocks: Mapping[str, tuple[str, int]]) -> None:
        self.blocks = blocks
        self.more: dict[str, int] = {}  # tensors that say nothing beyond the matrix that they lie beside
        entries = opened.checkpoint.entries
        for name in opened.contents.taken:
            module = name.rpartition(".")[0]
            self.more[module] = self.more.get(module, 0) + entries[name].nbytes

    def of(self, entry: Entry | Logical) -> tuple[int, LinearScheme | None, str | None, Format]:
        """Bytes, layer, the container's word and dtype of a matrix or a stack."""
        if isinstance(entry, Logical):
            stored = entry.stored
            return entry.nbytes + self.more.get(stored.module, 0), stored.linear, stored.how.format, BF16
        word, size = self.blocks.get(entry.name, (None, entry.nbytes))
        return size, None, word, formats.get(entry.dtype.format or "") or FP32


class _Family:
    """What the geometry says of names, whatever the part above the layers is called."""

    def __init__(self, geometry: Geometry | None, config: Mapping[str, Any]) -> None:
        matrices = geometry.matrices if geometry is not None else ()
        self.known = {_tail(matrix.name): matrix for matrix in matrices}
        self.shaped = {(_tail(matrix.name), matrix.shape): matrix for matrix in matrices}
        self.order = {name: i for i, name in enumerate(self.known)}
        text = text_config(config)
        self.active = next((text[key] for key in _ACTIVE if isinstance(text.get(key), int)), 1)

    def place(self, kind: Kind) -> int:
        """Where the geometry lists it; what it does not know comes last."""
        return (
            self.order.get(_tail(kind.name), len(self.order))
            if kind.role not in TOWERS
            else len(self.order) + 1
        )

    def parts(self, pattern: str, module: Module, n: int) -> list[tuple[str, int]]:
        """A stack as one matrix of each expert, or as the projections in it: whichever the family names."""
        above = pattern.rpartition(".")[0]
        above = above if above.endswith("experts") else f"{above}.experts"
        split = [
            (f"{above}.*.{part.name}", len(range(part.start, part.stop, part.step))) for part in module.parts
        ]
        named = all(_tail(name) in self.known for name, _ in split)
        return split if split and named and _tail(pattern) not in self.known else [(pattern, n)]

    def group(self, kind: Kind, found: Found) -> Group:
        """One group; counts that are no number of experts for every layer are taken for layers."""
        layers, experts = max(len(found.layers), 1), 1
        if kind.role is Role.EXPERT and found.count % layers == 0:
            experts = found.count // layers
        else:
            layers = found.count
        tail = _tail(kind.name)
        told = self.shaped.get((tail, kind.shape)) or self.known.get(tail)
        if told is None or kind.role in TOWERS:
            active = min(self.active, experts) if kind.role is Role.EXPERT else experts
            told = Matrix(
                kind.name, kind.role, kind.shape, active=active, split=split_of(kind.name) or "whole"
            )
        pieces = told.pieces if sum(told.pieces) == kind.shape[0] else ()
        matrix = replace(
            told, name=kind.name, shape=kind.shape, layers=layers, experts=experts,
            active=min(told.active, experts), bias=kind.bias, pieces=pieces,
        )  # fmt: skip
        return Group(matrix, kind.linear, round(kind.nbytes * found.count), kind.dtype, kind.format)


def _tail(name: str) -> str:
    """The name from its layers on, or its last part."""
    found = _TAIL.search(name)
    return found[1] if found else name.rpartition(".")[2]


def unknown(found: Read, config: Mapping[str, Any]) -> Geometry:
    """What headers alone say of a model whose family is not known: sizes, and nothing of what it keeps."""
    embedding = next((g.matrix for g in found.groups if g.matrix.role is Role.EMBEDDING), None)
    hidden = embedding.shape[1] if embedding is not None else 0
    attention: tuple[Attention, ...] = ()
    head = any(g.matrix.role is Role.LM_HEAD for g in found.groups)
    sizes: dict[str, int] = {}
    for group in found.groups:
        if group.linear is None:
            sizes[group.dtype.name] = sizes.get(group.dtype.name, 0) + group.nbytes
    return Geometry(
        str(text_config(config).get("model_type") or "unknown"), found.layers, hidden,
        embedding.shape[0] if embedding is not None else 0, embedding is not None and not head,
        tuple(g.matrix for g in found.groups if g.matrix.role not in TOWERS), attention, found.vectors,
        dtype=max(sizes, key=sizes.__getitem__, default="bf16"),
    )  # fmt: skip


def agree(found: Read, geometry: Geometry, where: object) -> list[str]:
    """Hold headers against the config's geometry: CheckpointError for layers that are missing, a note for parameters
    that differ."""
    if found.layers != geometry.layers:
        raise CheckpointError(
            "config and tensors disagree about the number of layers", where=where, got=f"{found.layers} in the files",
            wanted=f"{geometry.layers}, as the config says", remedy="download or copy the checkpoint again",
        )  # fmt: skip
    held = found.vectors + sum(g.matrix.parameters for g in found.groups if g.matrix.role not in TOWERS)
    if held == geometry.parameters:
        return []
    return [
        f"the files hold {held:,} parameters, and the config makes {geometry.parameters:,} of this family; "
        "the files are what counts here"
    ]
