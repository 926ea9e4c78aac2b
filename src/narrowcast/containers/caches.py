"""Names of KV cache scales: how checkpoints of any container call them, and which cache scale each is.

    <attention>.k_scale                    compressed-tensors, and every container's default
    <attention>.k_proj.k_scale             ModelOpt; also beside a fused qkv_proj
    <attention>.k_cache.scale, .q.scale    HunYuan
    <attention>.k_proj.output_scale        AutoFP8
    <attention>.kv_scale                   deprecated: one scale for k and v both

The attention's path is what stands before; a scale multiplies when a cache entry is read.
Source: vLLM 0.32 (model_loader/weight_utils.py, quantization/fp8.py), whose loader accepts these names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from narrowcast.containers.contents import CacheScale

# What follows the attention's path, the first that fits; the group names which of q, k and v it is.
_NAMES = tuple(
    re.compile(pattern)
    for pattern in (
        r"^(.*)\.(?:[qkv]|qkv|qkqkv)_proj\.([qkv])_scale$",
        r"^(.*)\.([qkv])_proj\.output_scale$",
        r"^(.*)\.([kv])_cache\.scale$",
        r"^(.*)\.(q)\.scale$",
        r"^(.*)\.(prob)_output_scale$",
        r"^(.*?)(?:\.attn)?\.([qkv]|kv|prob)_scale$",
    )
)
_ENDINGS = (".scale", "output_scale", *(f"{one}_scale" for one in ("q", "k", "v", "kv", "prob")))


def cache_scales(names: Iterable[str]) -> tuple[CacheScale, ...]:
    """The KV cache scales among tensor names; a ``kv_scale`` stands for both k and v."""
    found = []
    for name in names:
        if not name.endswith(_ENDINGS):
            continue  # most names of a checkpoint: one look instead of a regex each
        match = next((match for pattern in _NAMES if (match := pattern.match(name))), None)
        if match is not None:
            which = ("k", "v") if match[2] == "kv" else (match[2],)
            found += [CacheScale(match[1], one, name) for one in which]
    return tuple(found)
