"""What of a model is no decoder layer: embeddings, the last norm, the head.

It stays in memory for a whole walk, and in models with large vocabularies it outweighs a layer, so it is kept once and
narrow: a tied head reads the embedding's own memory, and a head whose input is not quantized keeps its weight in the
run's dtype, widened some rows at a time,

    logits[:, rows] = narrow( x · Wᵀ[rows] )          each logit is the sum that it would be in one product
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from narrowcast.jobs.matching import Held
from narrowcast.runtime.linear import ScaledLinear, Seen
from narrowcast.runtime.product import Operand, product
from narrowcast.runtime.skeleton import is_linear, linear_shape
from narrowcast.runtime.weights import Weights, fill, fill_own

ROWS = 1 << 14  # output channels that are widened at once


class Head(ScaledLinear):
    """A linear layer whose weight [N, K] stays in the dtype of the run."""

    def __init__(self, name: str, narrow: torch.Tensor, bias: torch.Tensor | None) -> None:
        nn.Module.__init__(self)
        self.name, self.inputs, self.bias, self.plain = name, None, bias, True
        self.narrow = narrow
        self.out_features, self.in_features = narrow.shape
        self.seen = Seen()

    @property
    def weight(self) -> Operand:  # type: ignore[override]
        """The whole weight, widened."""
        return Operand(self.narrow.float(), None, self.narrow.dtype == torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.narrow.dtype == torch.float32:
            return nn.functional.linear(x, self.narrow, self.bias)
        rows = self.operand(x.reshape(-1, x.shape[-1]))
        y = torch.empty(rows.matrix.shape[0], self.out_features, dtype=x.dtype)
        for start in range(0, self.out_features, ROWS):
            part = self.narrow[start : start + ROWS]
            sums = product(rows, Operand(part.float(), None, part.dtype == torch.bfloat16))
            y[:, start : start + ROWS] = sums if self.bias is None else sums + self.bias[start : start + ROWS]
        return y.reshape(*x.shape[:-1], self.out_features)


def fill_outer(model: nn.Module, layers_path: str, weights: Weights) -> None:
    """Put weights into everything but the decoder layers of a skeleton."""
    _fill(model, "", layers_path, weights, [])


def _fill(
    part: nn.Module, path: str, without: str, weights: Weights, kept: list[tuple[Held, torch.Tensor]]
) -> None:
    for name, child in part._modules.items():
        full = f"{path}.{name}" if path else name
        if child is None or full == without:
            continue
        if is_linear(child) or isinstance(child, nn.Embedding):
            part._modules[name] = _shared(child, full, weights, kept)
        else:
            _fill(child, full, without, weights, kept)
    fill_own(part, path, weights)


def _shared(module: Any, name: str, weights: Weights, kept: list[tuple[Held, torch.Tensor]]) -> nn.Module:
    """An embedding or a head, in one memory with another that reads the same tensor."""
    if is_linear(module) and not weights.wide(name):
        return fill(module, name, weights)
    one = weights.find(name)
    shape = module.weight.shape if isinstance(module, nn.Embedding) else torch.Size(linear_shape(module))
    found = next((tensor for held, tensor in kept if held.source is one.source), None)
    if found is None:
        found = weights.tensor(name, shape)
        kept.append((one, found))
    if isinstance(module, nn.Embedding):
        module._parameters["weight"] = nn.Parameter(found, requires_grad=False)
        return module
    bias = weights.tensor(f"{name}.bias", module.bias.shape).float() if module.bias is not None else None
    return Head(name, found, bias)
