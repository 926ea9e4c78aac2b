"""FP8 with scales that are known beforehand: one for a layer's keys and one for its values, or one for each head.

    store   code = cast(x / scale), true division in fp32, saturating at ±448 (E4M3) or ±57344 (E5M2), ties to even
    read    x' = fp32(code) · scale, one rounding to the run's dtype

This is what vLLM's ``reshape_and_cache`` kernels store and what its attention backends read (an FP8 code goes through
half on the way, which holds every E4M3 and E5M2 number). Infinity saturates; NaN stays NaN.

Error of an element that is not clipped, before the last rounding: at most 2^-4 |x| in E4M3 (2^-3 in E5M2), or half a
subnormal step, 2^-10 · scale (2^-17 · scale), whichever is larger.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Fp8:
    """``number`` is torch's dtype of the codes; ``scale`` float32 [1] or [heads]."""

    number: torch.dtype
    scale: torch.Tensor

    @property
    def largest(self) -> float:
        return torch.finfo(self.number).max

    @property
    def by_head(self) -> torch.Tensor:
        """The scale as it meets [batch, heads, tokens, dim]."""
        return self.scale.reshape(-1, 1, 1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x.float() / self.by_head
        return scaled.clamp(-self.largest, self.largest).to(self.number).view(torch.uint8)

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """The codes as numbers, float32, without their scale."""
        return rows.view(self.number).float()

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (self.values(rows) * self.by_head).to(dtype)

    def clipped(self, x: torch.Tensor) -> int:
        """How many elements lie beyond the largest code."""
        return int((x.float().abs() / self.by_head > self.largest).sum())
