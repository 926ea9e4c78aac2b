"""The KV cache of a compressed-tensors checkpoint: what the config asks for, and the scales that go with it.

    kv_cache_scheme, strategy tensor       k_scale, v_scale [1] on each attention
    kv_cache_scheme, strategy attn_head    k_scale, v_scale [heads, 1, 1]
    a group that targets ...Attention      the same, and q_scale

Source: compressed-tensors 0.20 (quantization/lifecycle/initialize.py), vLLM 0.32 (compressed_tensors.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from narrowcast.containers.caches import cache_scales
from narrowcast.containers.compressed_tensors.groups import Groups
from narrowcast.containers.contents import CacheScale, Source, contradiction
from narrowcast.store.checkpoint import text_config
from narrowcast.store.folder import some

_ZERO = re.compile(r"\.([qkv]_zero_point|[qkv]_proj\.output_zero_point)$")


@dataclass(frozen=True)
class Cache:
    """The name of the scheme or None, the scales, zero points that are only zero, and notes."""

    scheme: str | None
    scales: tuple[CacheScale, ...]
    taken: tuple[str, ...]
    notes: tuple[str, ...]


def cache_of(source: Source, groups: Groups) -> Cache:
    """CheckpointError where the scales are not those of the config."""
    scales = cache_scales(source.entries)
    args = _arguments(source, groups)
    if args is None:
        if scales:
            raise contradiction(
                "scales of a KV cache that the config does not mention", source,
                got=some([scale.tensor for scale in scales], 3), wanted="a kv_cache_scheme",
            )  # fmt: skip
        return Cache(None, (), (), ())
    heads = args.get("strategy") == "attn_head"
    for scale in scales:
        size, wanted = prod(source.entries[scale.tensor].shape), _heads(source, scale.which) if heads else 1
        if wanted is not None and size != wanted:
            raise contradiction(
                f"{scale.tensor} is not a scale of the cache that the config names", source, got=f"{size} numbers",
                wanted=f"{wanted}, as strategy {args.get('strategy') or 'tensor'} says",
            )  # fmt: skip
    zeros = [name for name in source.entries if _ZERO.search(name)]
    wrong = [name for name in zeros if source.checkpoint.array(name).any()]
    if wrong:
        raise contradiction(
            "the KV cache has zero points, which engines ignore", source, got=some(wrong, 3),
            wanted="a symmetric cache",
        )  # fmt: skip
    notes = () if scales or args.get("dynamic") is True else (
        "kv_cache_scheme asks for scales of the KV cache, and the file has none; engines take 1.0",
    )  # fmt: skip
    return Cache(mode_of(source, groups), scales, tuple(zeros), notes)


def mode_of(source: Source, groups: Groups) -> str | None:
    """What the config calls the cache, in our words where we have some."""
    args = _arguments(source, groups)
    if args is None:
        return None
    told = (args.get("num_bits", 8), str(args.get("type", "float")))
    heads = args.get("strategy") == "attn_head"
    return ("fp8_head" if heads else "fp8") if told == (8, "float") else f"{told[1]}{told[0]}"


def _arguments(source: Source, groups: Groups) -> Mapping[str, Any] | None:
    scheme = source.config.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme
    targets = ("Attention", "attention)$", "self_attn$")
    attention = (g for g in groups.groups if any(target.endswith(targets) for target in g.targets))
    return next((group.inputs for group in attention), None)


def _heads(source: Source, which: str) -> int | None:
    """How many heads q, or k and v have, where the config says it."""
    config = text_config(source.checkpoint.config or {})
    heads = config.get("num_attention_heads")
    if which != "q":
        heads = config.get("num_key_value_heads") or heads
    return heads if isinstance(heads, int) else None
