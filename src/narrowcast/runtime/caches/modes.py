"""What a KV cache may hold instead of 16-bit keys and values: one row for each mode that an engine knows.

Every mode turns the vector of one token and one head into a row of bytes, codes first, the scales that belong to it
behind them. A row knows nothing of its neighbours, so caches grow, shrink and change their order by rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from narrowcast.errors import UsageError
from narrowcast.runtime.caches.fp8 import Fp8


class Codec(Protocol):
    """One formula with its scale: vectors [batch, heads, tokens, dim] to rows uint8 [batch, heads, tokens, bytes]."""

    def encode(self, x: torch.Tensor) -> torch.Tensor: ...

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def clipped(self, x: torch.Tensor) -> int: ...


@dataclass(frozen=True)
class CacheMode:
    """``codec`` makes the formula from a scale, float32 [1] or [heads]; ``row_bytes`` is what a head of so many
    elements takes for one token, K or V; ``scales``: "tensor", "head", "global" or "data" (from the row itself);
    ``multiple``: head sizes that it takes; ``engines`` as they spell it."""

    name: str
    summary: str
    engines: tuple[str, ...]
    scales: str
    row_bytes: Callable[[int], int]
    codec: Callable[[torch.Tensor], Codec]
    multiple: int = 1


def _fp8(number: torch.dtype) -> Callable[[torch.Tensor], Codec]:
    return lambda scale: Fp8(number, scale)


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

_ROWS = (
    CacheMode(
        "fp8_e4m3", "FP8 E4M3, one scale for all keys of a layer and one for all values",
        ("vLLM fp8, fp8_e4m3", "SGLang fp8_e4m3", "TensorRT-LLM fp8"), "tensor", lambda n: n, _fp8(_E4M3),
    ),
    CacheMode(
        "fp8_e5m2", "FP8 E5M2, one scale for all keys of a layer and one for all values",
        ("vLLM fp8_e5m2", "SGLang fp8_e5m2"), "tensor", lambda n: n, _fp8(_E5M2),
    ),
    CacheMode(
        "fp8_head", "FP8 E4M3, one scale for each head, keys and values apart",
        ("vLLM with a compressed-tensors attn_head checkpoint",), "head", lambda n: n, _fp8(_E4M3),
    ),
)  # fmt: skip

MODES: Mapping[str, CacheMode] = MappingProxyType({mode.name: mode for mode in _ROWS})


def cache_mode(name: str) -> CacheMode:
    """The mode of that name. Raises UsageError, with the names there are."""
    if name not in MODES:
        raise UsageError("unknown mode of the KV cache", got=name, wanted=", ".join(MODES))
    return MODES[name]


def describe(name: str | None) -> str:
    """One line on what a mode stores; None is the run's own dtype."""
    return "keys and values as they are, in the run's dtype" if name is None else cache_mode(name).summary
