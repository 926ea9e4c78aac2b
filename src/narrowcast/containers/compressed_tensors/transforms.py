"""Rotations of compressed-tensors (SpinQuant, QuIP): which are in the weights already, and which the model computes.

    weight_input, weight_output            multiplied into the weight when it was made: nothing is left to do
    input, output, k_cache, q_attn         computed at every step, from m.<group>_<location>.weight

A weight whose input is rotated at every step means something else without the rotation, so a checkpoint that has one
can only be copied.

Source: compressed-tensors 0.20 (transform/transform_args.py, transform/factory).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from narrowcast.containers.contents import Source, contradiction
from narrowcast.store.folder import some

_OFFLINE = ("weight_input", "weight_output")
_ONLINE = ("input", "output", "k_cache", "q_attn")
_TENSOR = re.compile(rf"\.(\w+)_({'|'.join(_ONLINE)})\.(weight|perm)$")


def transforms(source: Source) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is computed at every step, in words, and the names of transforms that are in the weights; CheckpointError
    for tensors of a transform that the config does not mention."""
    online, fused = [], []
    told = set()
    for name, group in _groups(source):
        locations = []
        for apply in group.get("apply") or ():
            where = str(apply.get("location"))
            if where in _OFFLINE:
                continue
            if where not in _ONLINE:
                raise contradiction(
                    f"transform {name} is applied where nothing is known to be", source, got=where,
                    wanted=", ".join((*_OFFLINE, *_ONLINE)),
                )  # fmt: skip
            told.add((name, where))
            locations.append(f"{where} of {', '.join(map(str, apply.get('targets') or ()))}")
        if locations:
            online.append(f"{name} ({group.get('type')}) on the {' and the '.join(locations)}")
        else:
            fused.append(name)
    stray = [
        name for name in source.entries if (found := _TENSOR.search(name)) is not None
        and (found[1], found[2]) not in told and f"{name[: found.start()]}.weight_scale" in source.entries
    ]  # fmt: skip
    if stray:
        raise contradiction(
            "tensors belong to a transform that the config does not mention", source, got=some(stray, 3),
            wanted="a transform_config with their groups",
        )  # fmt: skip
    return tuple(online), tuple(fused)


def _groups(source: Source) -> Iterator[tuple[str, Mapping[str, Any]]]:
    config = source.config.get("transform_config") or {}
    for name, group in (config.get("config_groups") or {}).items():
        if isinstance(group, Mapping):
            yield str(name), group
