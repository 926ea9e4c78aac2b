"""One scale for each token and head, found from its own vector and stored behind its codes: INT8 and FP8.

    scale = max(amax / Q, 1e-6)          Q = 127 or 448
    y = x · (1 / scale)                  the reciprocal in fp32, then a product
    int8   code = trunc(clamp(y ± 1/2, -128, 127))     ties away from zero
    fp8    code = cast(clamp(y, ±448))                 ties to even
    read   x' = code · scale             scale fp32, 4 bytes in the row

The formulas are those of vLLM's Triton kernel for ``int8_per_token_head`` and ``fp8_per_token_head``, with IEEE
divisions. Its attention multiplies scores and probabilities by the scale in fp32 where this decodes each element and
rounds it to the run's dtype once: the two differ by at most that rounding, and not at all in float32 but for the order
of products.

Error before that rounding: (1/2 + 2^-15) · scale in INT8; in FP8 as for a given scale. Nothing is clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowcast.runtime.caches.fp8 import saturated

SMALLEST_SCALE = 1e-6
SCALE_BYTES = 4


@dataclass(frozen=True)
class PerTokenHead:
    """``number`` is torch.int8 or an FP8 dtype."""

    number: torch.dtype

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        wide = x.float()
        largest = 127.0 if self.number == torch.int8 else torch.finfo(self.number).max
        scale = (wide.abs().amax(dim=-1, keepdim=True) / largest).clamp(min=SMALLEST_SCALE)
        scaled = wide * (1.0 / scale)
        if self.number == torch.int8:
            codes = away(scaled).clamp(-128, 127).to(torch.int8)
        else:
            codes = saturated(scaled, self.number)
        return with_scales(codes.view(torch.uint8), scale), 0

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes, scale = without_scales(rows, SCALE_BYTES)
        return (codes.view(self.number).float() * scale.view(torch.float32)).to(dtype)


def away(x: torch.Tensor) -> torch.Tensor:
    """To an integer as kernels do it: one half is added in fp32 away from zero, then the fraction is cut."""
    return torch.where(x >= 0, x + 0.5, x - 0.5).trunc()


def with_scales(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of bytes: codes uint8 [..., n], then the bytes of ``scales`` [..., m] in memory order."""
    return torch.cat([codes, scales.contiguous().view(torch.uint8)], dim=-1)


def without_scales(rows: torch.Tensor, scale_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of a row as bytes, each contiguous."""
    at = rows.shape[-1] - scale_bytes
    return rows[..., :at].contiguous(), rows[..., at:].contiguous()
