"""Experts of a mixture, each projection a ScaledLinear of its own, whatever the layout on disk.

    y = Σ_e p_e · down_e( gating(gate_e(x), up_e(x)) )        over the experts that the router chose for a token

It stands in for transformers' stacked experts (parameters ``gate_up_proj`` and ``down_proj`` with the expert axis
first) and is called as they are: hidden states [tokens, H], chosen experts [tokens, k], their weights [tokens, k]. The
gating (SiLU, or gpt-oss's clamped one) is the family's own. It counts tokens per expert.

The order of the sums is that of transformers' plain loop over experts, which a float32 run repeats bit for bit; its
grouped products (``experts_implementation="grouped_mm"``) sum in another order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowcast.runtime.linear import ScaledLinear

if TYPE_CHECKING:
    from narrowcast.runtime.weights import Weights


def is_experts(module: Any) -> bool:
    """Whether a module is a stack of experts as transformers 5 marks them."""
    own = dict(module.named_parameters(recurse=False))
    stacked = "down_proj" in own and own["down_proj"].ndim == 3
    return stacked and hasattr(module, "is_transposed") and not getattr(module, "has_post_expert_norm", False)


def projections(stack: Any, path: str) -> list[tuple[str, tuple[int, int]]]:
    """Name and shape [out, in] of every projection of every expert: gate (where there is one), up, down of the first
    expert, and so on."""
    count, hidden, inner = stack.down_proj.shape
    if stack.is_transposed:
        hidden, inner = inner, hidden
    into = ("gate_proj", "up_proj") if stack.has_gate else ("up_proj",)
    each = [(leaf, (inner, hidden)) for leaf in into] + [("down_proj", (hidden, inner))]
    return [(f"{path}.{e}.{leaf}", shape) for e in range(count) for leaf, shape in each]


class _Transposed(ScaledLinear):
    """A projection that its family stores as [K, N] and multiplies by as x @ W + b: in a float32 run so is this, whose
    bits depend on the order of sums."""

    @classmethod
    def of(cls, made: nn.Module) -> nn.Module:
        """The same projection, where its numbers are plain float32; one of ``runtime.decode`` stays as it is."""
        if not isinstance(made, ScaledLinear) or not made.plain or made.weight.matrix.dtype != torch.float32:
            return made
        weight = replace(made.weight, matrix=made.weight.matrix.T.contiguous().T)
        return cls(made.name, weight, None, made.bias, plain=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            return super().forward(x)
        y = x @ self.weight.matrix.T
        return y if self.bias is None else y + self.bias


class Experts(nn.Module):
    """All experts of a layer. ``gate`` is empty where the family has no gating."""

    def __init__(self, stack: Any, path: str, weights: Weights) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for name, shape in projections(stack, path):
            leaf = name.rpartition(".")[2]
            chosen = {"gate_proj": self.gate, "up_proj": self.up, "down_proj": self.down}[leaf]
            made = weights.linear(name, stack.has_bias, shape)
            chosen.append(_Transposed.of(made) if stack.is_transposed else made)
        self.concatenated = stack.is_concatenated
        stack._parameters.clear()  # what is left of it is the family's gating
        self.gating = stack._apply_gate if stack.has_gate else stack.act_fn
        self.tokens = torch.zeros(len(self.down), dtype=torch.int64)

    def _inner(self, e: int, x: torch.Tensor) -> torch.Tensor:
        up = self.up[e](x)
        if not self.gate:
            return self.gating(up)
        both = self.gate[e](x), up
        return self.gating(torch.cat(both, -1) if self.concatenated else torch.stack(both, -1).flatten(-2))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        self.tokens += torch.bincount(chosen.flatten(), minlength=len(self.tokens))
        for e in torch.unique(chosen).tolist():
            slot, row = torch.where((chosen == e).T)
            y = self.down[e](self._inner(e, hidden[row]))
            out.index_add_(0, row, (y * share[row, slot, None]).to(out.dtype))
        return out
