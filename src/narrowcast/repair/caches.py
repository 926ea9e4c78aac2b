"""Scales of the KV cache: under the names of the checkpoint's container, and of 1.0 where one asks for it.

An engine that does not find a scale under a name it knows takes 1.0 and says so once. Names have one right answer,
the container's own spelling. Values have none: 1.0 is written only when told to, so that it stands in the file what
the engine would do anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from narrowcast.containers import containers
from narrowcast.containers.caches import cache_scales
from narrowcast.containers.spelling import Array
from narrowcast.model.roles import Role
from narrowcast.repair.draft import Draft, Mended, New
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.writer import Spec


def kv_names(draft: Draft) -> Iterator[Mended]:
    """Rename the scales of a KV cache to the container's own spelling; a ``kv_scale`` becomes k's and v's."""
    opened = draft.opened
    cache = containers[opened.contents.container].cache if opened is not None else None
    if cache is None:
        return
    checkpoint = draft.checkpoint
    moved = []
    for scale in cache_scales(checkpoint.entries):
        wanted = scale.attention + cache.suffixes.get(scale.which, f".{scale.which}_scale")
        if scale.tensor == wanted or scale.which not in cache.suffixes or wanted in checkpoint.entries:
            continue
        if scale.tensor in draft.names:  # the other half of a kv_scale
            entry = checkpoint.entries[scale.tensor]
            spec = Spec(wanted, entry.dtype, entry.shape)
            draft.tensors[wanted] = New(spec, entry.path, lambda name=scale.tensor: checkpoint.array(name))  # type: ignore[misc]
        else:
            draft.names[scale.tensor] = wanted
        moved.append(scale.tensor)
    if moved:
        yield Mended(
            "kv_names", f"{len(moved)} scales of the KV cache are called what {opened.contents.container} calls them",  # type: ignore[union-attr]
            tuple(moved),
        )  # fmt: skip


def unity_kv(draft: Draft) -> Iterator[Mended]:
    """Write scales of 1.0 for every attention layer that has none, where the config asks for an FP8 cache."""
    opened = draft.opened
    if opened is None or opened.contents.kv is None:
        return
    cache = containers[opened.contents.container].cache
    if cache is None:
        return
    there = {(scale.attention, scale.which) for scale in cache_scales(draft.checkpoint.entries)}
    added = []
    for module in opened.modules:
        parent, _, leaf = module.name.rpartition(".")
        if module.role is not Role.ATTENTION or leaf not in ("k_proj", "qkv_proj", "kv_b_proj"):
            continue
        shard = draft.checkpoint.shards[0]
        for which in ("k", "v"):
            if (parent, which) in there:
                continue
            name = parent + cache.suffixes[which]
            draft.tensors[name] = New(
                Spec(name, DTYPES[cache.dtype], cache.shape), shard, lambda: _one(cache.shape)
            )
            added.append(name)
    if added:
        yield Mended("unity_kv", f"{len(added)} scales of 1.0 for the KV cache, as you asked", tuple(added))


def _one(shape: tuple[int, ...]) -> Array:
    return np.ones(shape, np.float32)
