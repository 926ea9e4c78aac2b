"""What opening a checkpoint brought to light: the model as far as it opens, and everything that was in the way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from narrowcast.errors import NarrowcastError
from narrowcast.jobs.coded import Opened
from narrowcast.store.checkpoint import Checkpoint

_PIECE = re.compile(
    r"\.(_?weight(_\w+)?|weight\.[\w.]+|qweight|qzeros|scales|g_idx|SCB|scale(_inv)?|blocks|input_scale"
    r"|input_global_scale|input_zero_point|activation_scale|pre_quant_scale)$"
    r"|(?<=_proj)_(blocks|scales|scale|scale_inv)$"
)


@dataclass(frozen=True)
class Refusal:
    """What a strict reader said, and the module that was set aside for it (None: the refusal names none). ``repair``
    is what ``narrowcast repair`` does about it."""

    error: NarrowcastError
    module: str | None = None
    tensors: tuple[str, ...] = ()
    repair: str | None = None


@dataclass
class Found:
    """A checkpoint as far as it opens. ``opened`` is None where no container reads it.

    Of a directory (``folder``), ``files`` are all files below it, relative, and ``links`` what is no file: symlinks
    to nothing, pipes. ``index`` is the index as it is and ``index_name`` its file; ``absent`` are shards that it or
    the numbers in the names promise, ``unnamed`` weight files that it does not know, ``damaged`` shards that cannot
    be read. ``doubled`` maps a tensor to the two files that have it. Refusals are what none of these says.
    """

    checkpoint: Checkpoint
    opened: Opened | None = None
    folder: bool = False
    files: tuple[Path, ...] = ()
    links: tuple[Path, ...] = ()
    index_name: str | None = None
    index: dict[str, Any] | None = None
    absent: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    file_refusals: list[Refusal] = field(default_factory=list)
    layer_refusals: list[Refusal] = field(default_factory=list)
    doubled: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def set_aside(self) -> set[str]:
        return {name for refusal in self.layer_refusals for name in refusal.tensors}

    @property
    def whole(self) -> bool:
        """Whether every shard could be read, so that a tensor which is not here is nowhere."""
        return not (self.absent or self.damaged)

    @cached_property
    def indexed(self) -> dict[str, str]:
        """Shard by tensor, as the index says; empty where there is none."""
        table = (self.index or {}).get("weight_map")
        return table if isinstance(table, dict) else {}

    @cached_property
    def modules(self) -> dict[str, set[str]]:
        """Tensor names by the module that they are pieces of, as the files have them."""
        return by_module(self.checkpoint.entries)

    @property
    def lost(self) -> set[str]:
        """Tensors of shards that are absent or damaged, as far as an index names them."""
        gone = {*self.absent, *self.damaged}
        return {name for name, shard in self.indexed.items() if shard in gone}


def module_of(tensor: str) -> str:
    """The module that a tensor is a piece of, by its name."""
    return _PIECE.sub("", tensor)


def by_module(names: Iterable[str]) -> dict[str, set[str]]:
    """Tensor names by the module that they are pieces of."""
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(module_of(name), set()).add(name)
    return found
