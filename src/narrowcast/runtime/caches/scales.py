"""The scales of a KV cache, by layer: what a stored code is multiplied by to give the key or the value back.

A layer without a scale runs at unity, 1.0, as engines do where a checkpoint brings none: values beyond 448 are then
clipped, and small ones sink into the subnormals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from narrowcast.errors import InputError

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class KVScales:
    """Multipliers by index of the decoder layer, float32 [1] (per tensor) or [heads of K and V] (per head).

    ``q`` quantizes queries where attention itself runs in FP8; [query heads] are reduced to their group's maximum, as
    vLLM does, and a layer without one uses the scale of its keys.
    """

    k: Mapping[int, F32] = field(default_factory=dict)
    v: Mapping[int, F32] = field(default_factory=dict)
    q: Mapping[int, F32] = field(default_factory=dict)


UNITY = KVScales()


def scale_of(scales: Mapping[int, F32], layer: int, where: str) -> torch.Tensor:
    """A layer's scale as float32 [1] or [heads], unity where there is none.

    Raises InputError for a scale that no engine could divide by: zero, negative, NaN or infinite.
    """
    if layer not in scales:
        return torch.ones(1)
    given = np.asarray(scales[layer], np.float32).reshape(-1)
    bad = ~(np.isfinite(given) & (given > 0))
    if bad.any():
        where = f"{where}_scale of layer {layer}"
        got = float(given[bad][0])
        raise InputError(
            "a KV scale must be a positive number", where=where, got=got, remedy="calibrate it again"
        )
    return torch.from_numpy(given.copy())
