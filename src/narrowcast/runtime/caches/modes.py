"""What a KV cache may hold instead of 16-bit keys and values: the formula of each mode that runs here.

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
from narrowcast.hardware.cache_modes import CACHE_MODES, CacheModeRow
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
    """``codec`` makes the formula of a row of ``hardware.cache_modes`` from a scale, float32 [1] or [heads]."""

    row: CacheModeRow
    codec: Callable[[torch.Tensor], Codec]

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def scales(self) -> str:
        return self.row.scales

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that run it, as they spell it."""
        return self.row.spelled

    @property
    def row_bytes(self) -> Callable[[int], int]:
        """What a head of so many elements takes for one token, K or V."""
        return self.row.row_bytes


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

_CODECS: Mapping[str, Callable[[torch.Tensor], Codec]] = {
    "fp8_e4m3": lambda scale: Fp8(_E4M3, scale),
    "fp8_e5m2": lambda scale: Fp8(_E5M2, scale),
    "fp8_head": lambda scale: Fp8(_E4M3, scale),
    "fp8_per_token_head": lambda scale: PerTokenHead(_E4M3),
    "int8_per_token_head": lambda scale: PerTokenHead(torch.int8),
    "int4_per_token_head": lambda scale: RotatedInt4(),
    "nvfp4": Nvfp4,
    "mxfp8": lambda scale: Mxfp8(),
    "fp4_mx_block16": lambda scale: Fp4Block16(),
}

MODES: Mapping[str, CacheMode] = MappingProxyType(
    {name: CacheMode(CACHE_MODES[name], codec) for name, codec in _CODECS.items()}
)


def cache_mode(name: str) -> CacheMode:
    """The mode of that name, its own or an engine's. Raises UsageError, with the names there are."""
    own = CACHE_MODES[name].name if name in CACHE_MODES else name
    if own not in MODES:
        raise UsageError("unknown mode of the KV cache", got=name, wanted=", ".join(MODES))
    return MODES[own]
