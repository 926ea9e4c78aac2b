"""A linear layer that computes its LinearScheme: the input quantized, exact products summed in fp32, one cast.

    wide input       y = narrow( x · ŵᵀ + b )                              ŵ decoded, rounded once to the run's dtype
    quantized input  y = narrow( (Σ cx · cw) · s_x · s_w + b )             scales folded where a row shares one

The output is narrowed once, to the dtype of the residual stream. In a float32 run a wide layer is torch's own
``linear`` on decoded weights, so that it gives the bits that a library gives which decodes and multiplies.

A layer counts what it saw (``seen``): how many inputs its static scale clipped, of how many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from narrowcast.runtime.inputs import Inputs
from narrowcast.runtime.product import Operand, product


@dataclass
class Seen:
    """What passed through a layer's input: elements, and those beyond what its scale can hold."""

    elements: int = 0
    clipped: int = 0


class ScaledLinear(nn.Module):
    """One linear layer. ``inputs`` None keeps the input as it comes."""

    def __init__(
        self,
        name: str,
        weight: Operand,
        inputs: Inputs | None,
        bias: torch.Tensor | None,
        plain: bool = False,
    ) -> None:
        super().__init__()
        self.name, self.weight, self.inputs, self.bias, self.plain = name, weight, inputs, bias, plain
        self.out_features, self.in_features = weight.matrix.shape
        self.seen = Seen()

    def operand(self, x: torch.Tensor) -> Operand:
        """The input [M, K], any float dtype, as it enters the product."""
        if self.inputs is None:
            return Operand(x.float(), None, x.dtype == torch.bfloat16)
        return self.inputs.operand(x, self.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inputs is None and self.plain and x.dtype == torch.float32:
            return nn.functional.linear(x, self.weight.matrix, self.bias)
        rows = x.reshape(-1, x.shape[-1])
        y = product(self.operand(rows), self.weight)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        scheme = self.inputs.scheme.name if self.inputs is not None else "wide"
        return f"{self.in_features}, {self.out_features}, inputs={scheme}"
