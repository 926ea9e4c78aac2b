"""A repair as data, before anything is written: what changes in which tensor and in which file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from narrowcast.audit.opening import Found
from narrowcast.containers.spelling import Array
from narrowcast.jobs.coded import Opened
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.header import Entry
from narrowcast.store.writer import Spec


@dataclass(frozen=True)
class Mended:
    """One thing that was put right: the repair, what it did, to how many tensors, and in dB what it cost
    (infinite: not a bit of any decoded value)."""

    repair: str
    said: str
    tensors: tuple[str, ...] = ()
    sqnr: float = inf

    def to_json(self) -> dict[str, Any]:
        return vars(self)


@dataclass(frozen=True)
class New:
    """A tensor that is written anew: where, and how its content is made once it is needed."""

    spec: Spec
    shard: Path
    make: Callable[[], Array]


@dataclass
class Draft:
    """A checkpoint as it was found, and what will be different. ``tensors`` are written anew or added, ``names`` go
    from old to new, ``beside`` holds side files that are replaced,
    or removed where it says None; ``rewritten`` are shards that change though no tensor of them does."""

    found: Found
    config: bytes | None
    tensors: dict[str, New] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    beside: dict[str, bytes | None] = field(default_factory=dict)
    rewritten: set[Path] = field(default_factory=set)
    mended: list[Mended] = field(default_factory=list)
    unmended: list[str] = field(default_factory=list)

    @property
    def checkpoint(self) -> Checkpoint:
        return self.found.checkpoint

    @property
    def opened(self) -> Opened | None:
        return self.found.opened

    def rewrite(self, name: str, make: Callable[[], Array], shape: tuple[int, ...] | None = None) -> None:
        """Write a tensor anew, with its dtype and in its shard."""
        entry = self.checkpoint.entries[name]
        spec = Spec(name, entry.dtype, entry.shape if shape is None else shape)
        self.tensors[name] = New(spec, entry.path, make)

    def shard_specs(self, shard: Path) -> dict[str, tuple[Spec, Entry | New]]:
        """Every tensor of a shard of the result: its spec, and where its bytes come from."""
        found: dict[str, tuple[Spec, Entry | New]] = {}
        for name, entry in self.checkpoint.entries.items():
            if entry.path == shard and name not in self.tensors:
                name = self.names.get(name, name)
                found[name] = Spec(name, entry.dtype, entry.shape), entry
        for name, new in self.tensors.items():
            if new.shard == shard:
                name = self.names.get(name, name)
                found[name] = replace(new.spec, name=name), new
        return found

    def changes(self, shard: Path) -> bool:
        """Whether a shard of the result is other than the source's."""
        named = any(self.checkpoint.entries[old].path == shard for old in self.names)
        return shard in self.rewritten or named or any(new.shard == shard for new in self.tensors.values())
