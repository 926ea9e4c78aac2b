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
from narrowcast.runtime.caches.blocks import Fp4Block16, Mxfp8, Nvfp4
from narrowcast.runtime.caches.dynamic import PerTokenHead
from narrowcast.runtime.caches.fp8 import Fp8
from narrowcast.runtime.caches.rotated import RotatedInt4


class Codec(Protocol):
    """One formula with its scale: vectors [batch, heads, tokens, dim] to rows uint8 [batch, heads, tokens, bytes], and
    how many elements were out of reach."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, int]: ...

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True)
class CacheMode:
    """``codec`` makes the formula from a scale, float32 [1] or [heads]; ``row_bytes`` is what a head of so many
    elements takes for one token, K or V; ``scales`` says which are known beforehand: "tensor", "head", "global" (on
    top of those in the row) or "none"; ``engines`` run it, as they spell it."""

    name: str
    engines: tuple[str, ...]
    scales: str
    row_bytes: Callable[[int], int]
    codec: Callable[[torch.Tensor], Codec]


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

_ROWS = (
    CacheMode(
        "fp8_e4m3",
        ("vLLM fp8, fp8_e4m3", "SGLang fp8_e4m3", "TensorRT-LLM FP8"),
        "tensor",
        lambda dim: dim,
        lambda scale: Fp8(_E4M3, scale),
    ),
    CacheMode(
        "fp8_e5m2",
        ("vLLM fp8_e5m2", "SGLang fp8_e5m2"),
        "tensor",
        lambda dim: dim,
        lambda scale: Fp8(_E5M2, scale),
    ),
    CacheMode(
        "fp8_head",
        ("vLLM, from a compressed-tensors checkpoint with strategy attn_head",),
        "head",
        lambda dim: dim,
        lambda scale: Fp8(_E4M3, scale),
    ),
    CacheMode(
        "fp8_per_token_head",
        ("vLLM fp8_per_token_head",),
        "none",
        lambda dim: dim + 4,
        lambda scale: PerTokenHead(_E4M3),
    ),
    CacheMode(
        "int8_per_token_head",
        ("vLLM int8_per_token_head",),
        "none",
        lambda dim: dim + 4,
        lambda scale: PerTokenHead(torch.int8),
    ),
    CacheMode(
        "int4_per_token_head",
        ("vLLM int4_per_token_head",),
        "none",
        lambda dim: dim // 2 + 4,
        lambda scale: RotatedInt4(),
    ),
    CacheMode(
        "nvfp4",
        ("vLLM nvfp4", "SGLang nvfp4", "TensorRT-LLM NVFP4"),
        "global",
        lambda dim: dim // 2 + dim // 16,
        Nvfp4,
    ),
    CacheMode(
        "mxfp8",
        ("SGLang mxfp8",),
        "none",
        lambda dim: dim + dim // 32,
        lambda scale: Mxfp8(),
    ),
    CacheMode(
        "fp4_mx_block16",
        ("SGLang fp4_mx_block16",),
        "none",
        lambda dim: dim // 2 + dim // 16,
        lambda scale: Fp4Block16(),
    ),
)

MODES: Mapping[str, CacheMode] = MappingProxyType({mode.name: mode for mode in _ROWS})
SPELLINGS = MappingProxyType(
    {"fp8": "fp8_e4m3"}
)  # vLLM's and TensorRT-LLM's word, where it is not the mode's name


def cache_mode(name: str) -> CacheMode:
    """The mode of that name, its own or an engine's. Raises UsageError, with the names there are."""
    own = SPELLINGS.get(name, name)
    if own not in MODES:
        raise UsageError("unknown mode of the KV cache", got=name, wanted=", ".join(MODES))
    return MODES[own]
