"""A linear layer that computes its LinearScheme: the input quantized, exact products summed in fp32, one cast.

    wide input       y = narrow( x · ŵᵀ + b )                              ŵ decoded, rounded once to the run's dtype
    quantized input  y = narrow( (Σ cx · cw) · s_x · s_w + b )             scales folded where a row shares one

The output is narrowed once, to the dtype of the residual stream. In a float32 run a wide layer is torch's own
``linear`` on decoded weights, so that it gives the bits that a library gives which decodes and multiplies.

A layer counts what it saw (``seen``): how many inputs its static scale clipped, of how many.

Layers that read one tensor alike (q, k and v; gate and up) quantize it once: a thread remembers its last input, by
the tensor itself and its version, so that what was changed in place is quantized again. Tensors of torch's inference
mode have no version, and are quantized by every layer.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch
from torch import nn

from narrowcast.runtime.inputs import Inputs
from narrowcast.runtime.product import Operand, product


@dataclass
class Seen:
    """What passed through a layer's input: elements, and those beyond what its scale can hold."""

    elements: int = 0
    clipped: int = 0


@dataclass
class _Last(threading.local):
    """The input that a thread quantized last, how, what came of it, and what was counted. The operand goes when the
    input goes."""

    key: tuple[object, ...] = ()
    tensor: weakref.ref[torch.Tensor] | None = None
    operand: Operand | None = None
    seen: Seen = field(default_factory=Seen)

    def forget(self, gone: object) -> None:
        if self.tensor is gone:
            self.tensor = self.operand = None


_last = _Last()


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
        """The input [..., K], any float dtype, as it enters the product: M rows."""
        rows = x.reshape(-1, x.shape[-1])
        if self.inputs is None:
            return Operand(rows.float(), None, x.dtype == torch.bfloat16)
        alike = self.inputs.shared
        if alike is None or x.is_inference():
            return self.inputs.operand(rows, self.seen)
        key, last = (x._version, *alike), _last
        if last.operand is None or last.tensor is None or last.tensor() is not x or last.key != key:
            counted = Seen()
            last.operand, last.seen = self.inputs.operand(rows, counted), counted
            last.key, last.tensor = key, weakref.ref(x, last.forget)
        self.seen.elements += last.seen.elements
        self.seen.clipped += last.seen.clipped
        return last.operand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inputs is None and self.plain and x.dtype == torch.float32:
            return nn.functional.linear(x, self.weight.matrix, self.bias)
        y = product(self.operand(x), self.weight)
        if self.bias is not None:
            y.add_(self.bias)
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        scheme = self.inputs.scheme.name if self.inputs is not None else "wide"
        return f"{self.in_features}, {self.out_features}, inputs={scheme}"
