"""What a container is: a way to spell matrices, to describe them in a config, and to read both again.

    write:   spelling(linear, source) per matrix, places(...) where they lie, document(layers) for the config
    read:    claims(source) whether the checkpoint is one, read(source) what is in it

Each container is one file (or folder) with a row of this type called ``CONTAINER``; ``narrowcast.containers``
has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowcast.containers.contents import Contents, Source
from narrowcast.containers.spelling import Place, Spelling
from narrowcast.numbers.formats import Format
from narrowcast.tensors.presets import LinearScheme


@dataclass(frozen=True)
class Group:
    """Matrices that are written alike, by module name."""

    linear: LinearScheme
    how: Spelling
    names: tuple[str, ...]


@dataclass(frozen=True)
class Layers:
    """What a config has to tell: the groups; every linear module, quantized or not; what is kept, by exact name or
    ``re:`` pattern; the KV cache scheme (``fp8``, ``fp8_head``, ``nvfp4``); the model's own
    config.json; and which of the quantized modules are embeddings."""

    groups: tuple[Group, ...]
    linear_names: tuple[str, ...]
    ignore: tuple[str, ...]
    kv: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Document:
    """The quantization_config (None: the config has none) and files beside the weights, by name."""

    config: dict[str, Any] | None
    beside: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheSpelling:
    """How a KV cache scale is written: what follows the attention's path for q, k and v, dtype and shape."""

    suffixes: Mapping[str, str]
    dtype: str = "F32"
    shape: tuple[int, ...] = (1,)


def _own_places(shapes: Mapping[str, tuple[int, int]], config: Mapping[str, Any]) -> dict[str, Place]:
    return {name: Place(name, n) for name, (n, _) in shapes.items()}


@dataclass(frozen=True)
class Container:
    """One container. ``spelling`` is None where it is only read. ``files`` are the side files that belong to it and
    are dropped or replaced when a checkpoint leaves it. ``places`` says where matrices [N, K] of the given
    modules lie; most
    containers give each its own tensors. ``one_group``: one group size holds for the whole checkpoint."""

    name: str
    title: str
    claims: Callable[[Source], bool]
    read: Callable[[Source], Contents]
    spelling: Callable[[LinearScheme, Format], Spelling] | None = None
    document: Callable[[Layers], Document] | None = None
    places: Callable[[Mapping[str, tuple[int, int]], Mapping[str, Any]], Mapping[str, Place]] = _own_places
    cache: CacheSpelling | None = None
    cache_schemes: Sequence[str] = ()
    files: tuple[str, ...] = ()
    one_group: bool = False
