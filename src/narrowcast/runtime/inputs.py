"""Inputs of linear layers, quantized on the fly or with a stored scale, as operands of a product.

    dynamic   scales from the rows themselves, per token, per group, MX; NVFP4 with its outer scale given
    static    one stored scale for all; what it cannot hold is clipped, and counted

Codes and scales are those of ``kernels.reference.quantize``, bit for bit. NaN and infinity are no error here, as they
are none in an engine: a row that holds one comes out as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from narrowcast.kernels.reference.quantize import quantize
from narrowcast.runtime.product import Operand
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.schemes import Scheme

if TYPE_CHECKING:
    from narrowcast.runtime.linear import Seen


@dataclass(frozen=True)
class Inputs:
    """How a layer's input is quantized; ``static`` is its stored scale (of NVFP4: the outer one) as a multiplier."""

    scheme: Scheme
    static: float | None = None

    def operand(self, x: torch.Tensor, seen: Seen) -> Operand:
        """Rows [M, K] of any float dtype as an operand; ``seen`` counts."""
        wide = x.float()
        finite = torch.isfinite(wide).all(dim=-1)
        whole = bool(finite.all())
        values = (wide if whole else torch.where(finite[:, None], wide, 0.0)).numpy()
        outer = None if self.static is None else np.full((1, 1), self.static, np.float32)
        q = quantize(values, self.scheme, outer=outer)
        seen.elements += values.size
        if self.static is not None:
            seen.clipped += int((np.abs(values) > np.float32(self.static) * self.reach).sum())
        made = operand_of(q)
        if whole:
            return made
        bad = torch.where(finite, 1.0, torch.nan)[:, None]
        return Operand(made.matrix * bad, made.scale, made.narrow)

    @property
    def reach(self) -> float:
        """The largest magnitude that a static scale of 1 holds."""
        return self.scheme.element.max * (
            self.scheme.inner.format.max if len(self.scheme.scales) == 2 else 1.0
        )


def operand_of(q: QTensor) -> Operand:
    """A quantized matrix [rows, K] as an operand: codes with their row's scale aside, or codes times scales."""
    scheme = q.scheme
    elements = q.elements()
    inner = q.scale_values(0)
    outer = torch.from_numpy(q.scale_values(1)) if len(q.scales) == 2 else None
    if scheme.inner.tile in ((0, 0), (1, 0)):
        scale: Any = torch.from_numpy(inner)
        return Operand(torch.from_numpy(elements), scale if outer is None else scale * outer, True)
    if scheme.inner.format.bits == 8 and scheme.element.bits <= 8 and not scheme.scales[-1].divides:
        # E8M0 moves the point; E4M3 times E2M1 has six significant bits: bf16 holds both.
        folded = QTensor(
            scheme if outer is None else _inner_only(scheme), q.codes, q.scales[:1], q.zero
        ).dequantize()
        return Operand(torch.from_numpy(folded), outer, True)
    return Operand(torch.from_numpy(q.dequantize()))


def _inner_only(scheme: Scheme) -> Scheme:
    from dataclasses import replace

    return replace(scheme, scales=scheme.scales[:1])
