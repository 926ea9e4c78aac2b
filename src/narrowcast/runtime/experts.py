"""Experts of a mixture, each projection a ScaledLinear of its own, whatever the layout on disk.

    y = Σ_e p_e · down_e( act(gate_e(x)) · up_e(x) )        over the experts that the router chose for a token

It stands in for transformers' stacked experts (two parameters ``gate_up_proj`` and ``down_proj``) and is called as they
are: hidden states [tokens, H], chosen experts [tokens, k], their weights [tokens, k]. It counts tokens per expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from narrowcast.runtime.weights import Weights


def is_experts(module: nn.Module) -> bool:
    """Whether a module is a stack of experts as transformers 5 has them."""
    own = dict(module.named_parameters(recurse=False))
    return {"gate_up_proj", "down_proj"} <= set(own) and own["down_proj"].ndim == 3


class Experts(nn.Module):
    """All experts of a layer."""

    def __init__(self, stack: Any, path: str, weights: Weights) -> None:
        super().__init__()
        count, hidden, inner = stack.down_proj.shape
        self.act_fn = stack.act_fn
        self.gate, self.up, self.down = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for e in range(count):
            self.gate.append(weights.linear(f"{path}.{e}.gate_proj", shape=(inner, hidden)))
            self.up.append(weights.linear(f"{path}.{e}.up_proj", shape=(inner, hidden)))
            self.down.append(weights.linear(f"{path}.{e}.down_proj", shape=(hidden, inner)))
        self.tokens = torch.zeros(count, dtype=torch.int64)

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        self.tokens += torch.bincount(chosen.flatten(), minlength=len(self.tokens))
        for e in torch.unique(chosen).tolist():
            row, slot = torch.where(chosen == e)
            x = hidden[row]
            y = self.down[e](self.act_fn(self.gate[e](x)) * self.up[e](x))
            out.index_add_(0, row, (y * share[row, slot, None]).to(out.dtype))
        return out
