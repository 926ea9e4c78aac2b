"""Fake quantization for training: values as a scheme keeps them, gradients as if it did nothing.

    forward   y = dequantize(quantize(x)), in x's dtype and on x's device
    backward  dL/dx = dL/dy            the straight-through estimator (Bengio et al., arXiv 1308.3432)

The forward values are those of the numpy definition, bit for bit, so that what was trained is what is
written. Left out: gradients of the scales, and zero gradients for clipped elements, of which the default
rules make few or none.
"""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.runtime.arrays import widened
from narrowcast.runtime.tensors import quantize
from narrowcast.tensors.schemes import Scheme, schemes


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        values, source = widened(x)
        decoded = quantize(values, scheme, source).dequantize()
        return torch.from_numpy(decoded).to(device=x.device, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def fake_quantize(x: torch.Tensor, scheme: str | Scheme) -> torch.Tensor:
    """``x`` [..., N, K] (float, any device) as ``scheme`` keeps it, with a straight-through gradient.

    Raises NonFiniteError for NaN or infinity in x, UsageError for an unknown scheme or dtype.
    """
    chosen = schemes[scheme] if isinstance(scheme, str) else scheme
    result: torch.Tensor = _StraightThrough.apply(x, chosen)
    return result
