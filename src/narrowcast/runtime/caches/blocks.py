"""Blocks of a head's elements with a scale each: NVFP4, MXFP8, and SGLang's FP4 with blocks of 16.

    nvfp4             g = 1 / k_scale;   B = E4M3(g · (amax · (1/6)))
                      code = E2M1(x · (1 / (B · (1 / g))));   x' = code · B · k_scale
    mxfp8             e the smallest with amax / 2^e ≤ 448
                      code = E4M3(x / 2^e);   x' = code · 2^e
    fp4_mx_block16    e = ceil(log2(max(amax / 6, 1e-10)))
                      code = E2M1(x / 2^e), ties up in magnitude;   x' = code · 2^e

Casts go to nearest, else with ties to even, and saturate. A block whose NVFP4 scale rounds to zero is stored as zeros.

NVFP4 is vLLM's ``scaled_fp4_quant`` with the checkpoint's multiplier k_scale (or v_scale). Its reciprocals are
approximate on the device (``rcp.approx``) and IEEE's here: codes may differ where x lies next to a tie. With
k_scale = amax / 448, ModelOpt's, block scales reach 75 of their 448; with amax / 2688 they use the whole range. SGLang
multiplies the checkpoint's scale by 6 on the way, which assumes the second. Data and scales lie in separate parts of
vLLM's page, scales swizzled; a row here holds the same bytes in order.

MXFP8 is SGLang's: E4M3 with E8M0 scales for 32 elements, as its FA4 kernels take them; the rule of the scale is the
one that OCP tensors are made with on Blackwell (round up, never clip), its own kernel was not read. The formula of
``fp4_mx_block16`` is that of SGLang's Python, computed in fp32; its blocks run over a token's heads one after another,
which are the blocks of each head where 16 divides the head size, and other sizes are refused here.

Error, before the last rounding: half the gap of the element's grid at |x| / scale, times the scale: 2^-4 |x| for E4M3
and scale for E2M1 at its coarsest (its numbers from 4 to 6 are 2 apart).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from narrowcast.errors import UsageError
from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import E2M1, E4M3FN, E8M0
from narrowcast.runtime.caches.dynamic import with_scales, without_scales
from narrowcast.runtime.caches.fp8 import ROUNDED, saturated
from narrowcast.runtime.caches.rotated import packed, unpacked
from narrowcast.tensors.scaling import power_of_two_codes

_NUMBERS = torch.from_numpy(decode_table(E2M1).astype(np.float32))
_POWERS = torch.from_numpy(decode_table(E8M0).astype(np.float32))
_MIDDLES = (_NUMBERS[:7] + _NUMBERS[1:8]) / 2
_ABOVE = torch.nextafter(_MIDDLES, torch.tensor(torch.inf))
# A magnitude is the count of bounds that it reaches: ties to even let every second middle belong to the lower number.
_TIES_TO_EVEN = torch.where(torch.arange(7) % 2 == 0, _ABOVE, _MIDDLES)
_E4M3 = torch.float8_e4m3fn


def _blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Float32 [..., blocks, size]. Raises UsageError for a head size that is no multiple."""
    if x.shape[-1] % size:
        got, wanted = f"head size {x.shape[-1]}", f"a multiple of {size}"
        raise UsageError("blocks of this cache mode do not fill a head", got=got, wanted=wanted)
    return x.float().reshape(*x.shape[:-1], -1, size)


def _e2m1(x: torch.Tensor, bounds: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """E2M1 codes of [..., blocks, 16] packed two to a byte [..., blocks · 8]."""
    codes = torch.bucketize(x.abs().contiguous(), bounds, right=True).to(torch.uint8) | (
        negative.to(torch.uint8) << 3
    )
    return packed(codes.flatten(-2))


@dataclass(frozen=True)
class Nvfp4:
    """``scale`` float32 [1] is the global multiplier."""

    scale: torch.Tensor

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        blocks = _blocks(x, 16)
        divisor = 1.0 / self.scale
        amax = blocks.abs().amax(dim=-1, keepdim=True)
        stored = saturated(divisor * (amax * (1.0 / torch.tensor(6.0))), _E4M3)
        wide = stored.float()
        factor = torch.where(wide == 0, 0.0, 1.0 / (wide * (1.0 / divisor)))
        scaled = blocks * factor
        codes = _e2m1(scaled, _TIES_TO_EVEN, scaled.signbit())
        reach = self.scale * (6.0 * torch.finfo(_E4M3).max * ROUNDED)
        return with_scales(codes, stored.squeeze(-1)), int((blocks.abs() > reach).sum())

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes, scales = without_scales(rows, rows.shape[-1] // 9)
        values = _NUMBERS[unpacked(codes).int()].unflatten(-1, (-1, 16))
        return (values * scales.view(_E4M3).float()[..., None] * self.scale).flatten(-2).to(dtype)


@dataclass(frozen=True)
class Mxfp8:
    """The mode has nothing to set."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        blocks = _blocks(x, 32)
        amax = blocks.abs().amax(dim=-1).detach().numpy()
        exponents = torch.from_numpy(power_of_two_codes(amax, "rceil", E4M3FN, zero_tile="eps"))
        codes = saturated(blocks / _POWERS[exponents.int()][..., None], _E4M3)
        return with_scales(codes.flatten(-2).view(torch.uint8), exponents), 0

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes, exponents = without_scales(rows, rows.shape[-1] // 33)
        values = codes.view(_E4M3).float().unflatten(-1, (-1, 32))
        return (values * _POWERS[exponents.int()][..., None]).flatten(-2).to(dtype)


@dataclass(frozen=True)
class Fp4Block16:
    """The mode has nothing to set."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        blocks = _blocks(x, 16)
        amax = blocks.abs().amax(dim=-1, keepdim=True)
        exponent = torch.ceil(torch.log2((amax / 6.0).clamp(min=1e-10)))
        scaled = blocks / torch.exp2(exponent)
        codes = _e2m1(scaled, _MIDDLES, scaled < 0)
        return with_scales(codes, (exponent + 127).squeeze(-1).to(torch.uint8)), 0

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes, exponents = without_scales(rows, rows.shape[-1] // 9)
        values = _NUMBERS[unpacked(codes).int()].unflatten(-1, (-1, 16))
        return (values * _POWERS[exponents.int()][..., None]).flatten(-2).to(dtype)
