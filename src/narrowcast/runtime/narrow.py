"""Tensors as a narrower dtype holds them, and sums as a narrower accumulator makes them; float32 in, float32 out.

    cast       bf16, fp16: nearest even, FP16 overflows to infinity;  e4m3: saturates at 448, as engines cast
    scaled     e4m3(x · 448 / amax) · amax / 448, one scale for the tensor
    serial     s ← round(s + Σ of the next 16 products)          a sum whose accumulator is bf16 or fp16

Products of a linear layer are exact in float32 here as far as BLAS sums 16 of them; only what is carried from one
group to the next is rounded. 16 products is what a tensor core adds at once before it writes its accumulator.

Left out: the alignment inside a tensor core; ``kernels.reference.accumulate`` has it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from narrowcast.runtime.caches.fp8 import saturated

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
GROUP = 16

Narrowing = Callable[[torch.Tensor], torch.Tensor]


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return saturated(x.float(), torch.float8_e4m3fn).to(x.dtype)


def _e4m3_scaled(x: torch.Tensor) -> torch.Tensor:
    amax = x.abs().amax().float()
    if not bool(torch.isfinite(amax)) or amax == 0:
        return _e4m3(x)
    scale = amax / E4M3_MAX
    return (saturated(x.float() / scale, torch.float8_e4m3fn).float() * scale).to(x.dtype)


CASTS: dict[str, Narrowing] = {
    "bf16": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "fp16": lambda x: x.to(torch.float16).to(x.dtype),
    "e4m3": _e4m3,
    "e4m3 scaled": _e4m3_scaled,
}


def serial(x: torch.Tensor, weight: torch.Tensor, narrow: Narrowing) -> torch.Tensor:
    """x [M, K] · weight [N, K]ᵀ as float32 [M, N], the sum rounded behind every 16 products."""
    total = torch.zeros(len(x), len(weight), dtype=torch.float32)
    for start in range(0, x.shape[1], GROUP):
        part = slice(start, start + GROUP)
        total = narrow(total.addmm_(x[:, part], weight[:, part].T))
    return total
