"""INT4 for each token and head: vectors are rotated first, so that no coordinate stands out, then asymmetric codes.

    r = H (d ∘ x)           random signs d, Hadamard matrix H of ±1; rounded to the run's dtype, as vLLM does
    s = max((max r - min r) / 15, 1e-6)
    z = clamp(away(-min r / s), 0, 15)          away: ties away from zero
    q = clamp(away(r · (1 / s) + z), 0, 15)     even elements in low nibbles
    stored scale = bits(s) with its low four bits replaced by z;   s' = bits with the low four cleared
    read   r' = (q - z) · s';   x' = d ∘ (H r') / b

H is Sylvester's matrix of size b, the largest power of two that divides the head size, once for each block of b. With
D = diag(d), the rotation R = H D satisfies Rᵀ R = b I, so that q·x = (R q)·(R x) / b: vLLM rotates the query and
divides the softmax scale by b, and rotates the output back; this rotates keys and values back as they are read, which
is the same in exact arithmetic and leaves attention as it is. What differs is where bf16 rounds: vLLM rounds R q and
the output, this rounds x'. Its fp32 transform is vLLM's for CPUs; the tensor-core transform on GPUs works in bf16.
Divisions are IEEE here, and products and sums are not fused.

The signs are vLLM's: Bernoulli draws of torch's CPU generator, seed 0x9E3779B9.

A range that does not hold zero cannot be held: the zero point stops at 0 or 15, and every code with it. That is the
fate of a vector whose first element (of a block) stands out so far that R x has one sign; ``encode`` counts it.

Error where the range holds zero, before the last rounding: a rotated coordinate errs by at most
e = s/2 + 15 · 2^-19 · s (the cleared bits) + half a unit of r in the run's dtype. Rᵀ/b shrinks 2-norms by √b, so the
error of a whole block has a 2-norm of at most e, that of an element a root mean square of e / √b.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from narrowcast.errors import UsageError
from narrowcast.runtime.caches.dynamic import SCALE_BYTES, SMALLEST_SCALE, away, with_scales, without_scales

SEED = 0x9E3779B9
ZERO_BITS = 0xF


@cache
def signs(size: int) -> torch.Tensor:
    """The ±1 of a block, float32 [size]; the signs of a shorter block are the first of a longer one."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(SEED)
    return 2.0 * torch.bernoulli(torch.full((size,), 0.5), generator=generator) - 1.0


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """H x along the last axis, a power of two, in fp32: sums and differences of halves, the butterfly."""
    half = 1
    while half < x.shape[-1]:
        pairs = x.reshape(*x.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([low + high, low - high], dim=-2).reshape(x.shape)
        half *= 2
    return x


def block_size(dim: int) -> int:
    """The largest power of two that divides a head size."""
    return dim & -dim


def rotate(x: torch.Tensor) -> torch.Tensor:
    """R x for float32 x [..., dim], block by block."""
    blocks = x.reshape(*x.shape[:-1], -1, block_size(x.shape[-1]))
    return hadamard(blocks * signs(blocks.shape[-1])).reshape(x.shape)


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """Rᵀ x / b, the inverse."""
    blocks = x.reshape(*x.shape[:-1], -1, block_size(x.shape[-1]))
    size = blocks.shape[-1]
    return (hadamard(blocks) * signs(size) / size).reshape(x.shape)


def quantize(r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rotated float32 vectors [..., dim] as codes uint8 [..., dim] and stored scales float32 [..., 1] with the zero
    point inside; and how many elements lay more than a step outside the codes."""
    low, high = r.amin(dim=-1, keepdim=True), r.amax(dim=-1, keepdim=True)
    scale = ((high - low) / 15.0).clamp(min=SMALLEST_SCALE)
    zero = away(-low / scale).clamp(0, 15)
    level = r * (1.0 / scale) + zero
    codes = away(level).clamp(0, 15)
    bits = (scale.view(torch.int32) & ~ZERO_BITS) | zero.to(torch.int32)
    return codes.to(torch.uint8), bits.view(torch.float32), int(((level - codes).abs() > 1.0).sum())


@dataclass(frozen=True)
class RotatedInt4:
    """The mode has nothing to set."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Raises UsageError for an odd head size, whose codes fill no whole bytes."""
        if x.shape[-1] % 2:
            raise UsageError("two codes share a byte", got=f"head size {x.shape[-1]}", wanted="an even one")
        codes, scale, clipped = quantize(rotate(x.float()).to(x.dtype).float())
        return with_scales(packed(codes), scale), clipped

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes, scales = without_scales(rows, SCALE_BYTES)
        bits = scales.view(torch.int32)
        zero, scale = bits & ZERO_BITS, (bits & ~ZERO_BITS).view(torch.float32)
        return rotate_back((unpacked(codes).float() - zero) * scale).to(dtype)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., n] two to a byte [..., n/2], the even ones in low nibbles."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """The inverse of ``packed``."""
    return torch.stack([pairs & 0xF, pairs >> 4], dim=-1).reshape(*pairs.shape[:-1], -1)
