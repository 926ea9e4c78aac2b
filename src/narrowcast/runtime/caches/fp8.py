"""FP8 with scales that are known beforehand: one for a layer's keys and one for its values, or one for each head.

    store   code = cast(x / scale), true division in fp32, saturating at ±448 (E4M3) or ±57344 (E5M2), ties to even
    read    x' = fp32(code) · scale, one rounding to the run's dtype

This is what vLLM's ``reshape_and_cache`` kernels store and what its attention backends read (an FP8 code goes through
half on the way, which holds every E4M3 and E5M2 number). Infinity saturates; NaN stays NaN. SGLang's memory pool
divides in the model's dtype, so that a quotient is rounded twice; that is left out.

Error of an element that is not clipped, before the last rounding and but for fp32's own 2^-23 |x|: at most 2^-4 |x| in
E4M3 (2^-3 in E5M2), or half a subnormal step, 2^-10 · scale (2^-17 · scale), whichever is larger.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowcast.errors import UsageError

ROUNDED = (
    1 + 2.0**-22
)  # amax divided by its own scale, amax / 448 in fp32, may come out two roundings above 448


@dataclass(frozen=True)
class Fp8:
    """``number`` is torch's dtype of the codes; ``scale`` float32 [1] or [heads]."""

    number: torch.dtype
    scale: torch.Tensor

    @property
    def by_head(self) -> torch.Tensor:
        """The scale as it meets [batch, heads, tokens, dim]."""
        return self.scale.reshape(-1, 1, 1)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Raises UsageError where there is neither one scale nor one for each head."""
        if self.scale.numel() not in (1, x.shape[1]):
            got, wanted = f"{self.scale.numel()} scales", f"one, or {x.shape[1]}: one for each head"
            raise UsageError("KV scales do not fit the layer", got=got, wanted=wanted)
        scaled = x.float() / self.by_head
        beyond = scaled.abs() > torch.finfo(self.number).max * ROUNDED
        return saturated(scaled, self.number).view(torch.uint8), int(beyond.sum())

    def codes(self, rows: torch.Tensor) -> torch.Tensor:
        """The codes as float32 numbers, without their scale."""
        return rows.view(self.number).float()

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (self.codes(rows) * self.by_head).to(dtype)


def saturated(x: torch.Tensor, number: torch.dtype) -> torch.Tensor:
    """Float32 numbers cast to an FP8 dtype, ties to even; what is out of range, infinity too, becomes the largest."""
    largest = torch.finfo(number).max
    return x.clamp(-largest, largest).to(number)
