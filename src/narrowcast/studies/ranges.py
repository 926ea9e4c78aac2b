"""Watch a decoder layer while text runs through it: the inputs of its linears, and its keys, values and queries.

    linear      a hook in front of every ScaledLinear sees the input as it comes, before any quantization
    k, v        a cache that keeps nothing sees them as a cache would store them, after rotary embedding
    q           the attention function sees it, after rotary embedding as well

Linears that are given the very same tensor (q, k and v; gate and up) share what was counted, so equal inputs have
equal statistics, and cost one look.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from narrowcast.errors import NonFiniteError
from narrowcast.jobs.stats import Batch, Range, Stats, batch
from narrowcast.runtime.experts import Experts
from narrowcast.runtime.linear import ScaledLinear
from narrowcast.runtime.walk import Running

ATTENTION = "sdpa"  # the one that skeletons are built with
_OF_EXPERTS = re.compile(r"^(.*experts)\.\d+\.")


class Passing(DynamicCache):
    """A cache that keeps nothing and remembers what it was last given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.given = key_states, value_states
        return self.given


class Watch:
    """What one layer sees; ``piece`` is the index of the text that runs. Fills ``stats``."""

    def __init__(self, run: Running, index: int, layer: nn.Module, stats: Stats, pieces: int) -> None:
        self.run, self.index, self.layer, self.stats, self.pieces = run, index, layer, stats, pieces
        self.piece = 0
        self.cache = Passing()
        self._paths = {id(module): name for name, module in layer.named_modules()}
        self._last: tuple[torch.Tensor, Batch] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks in place, and gone again afterwards; then the experts' tokens are known."""
        linears = [module for module in self.layer.modules() if isinstance(module, ScaledLinear)]
        hooks = [self._hook(linear) for linear in linears]
        plain = ALL_ATTENTION_FUNCTIONS[ATTENTION]

        def attention(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._attention(module, query)
            return plain(module, query, *args, **kwargs)

        ALL_ATTENTION_FUNCTIONS[ATTENTION] = attention
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS[ATTENTION] = plain
            for hook in hooks:
                hook.remove()
        for module in self.layer.modules():
            if isinstance(module, Experts):
                match = _OF_EXPERTS.match(self._name(str(module.gate[0].name)))
                if match is not None:
                    self.stats.experts[match[1]] = module.tokens.numpy().astype(np.int64)

    def _name(self, path: str) -> str:
        """A linear's name in the checkpoint."""
        return self.run.weights.find(path).name

    def _hook(self, linear: ScaledLinear) -> Any:
        name = self._name(linear.name)
        seen = self.stats.inputs.setdefault(name, Range.empty(linear.in_features, self.pieces))

        def look(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            x = arguments[0]
            if self._last is None or self._last[0] is not x:
                self._last = x, self._batch(x, f"the input of {name}", x.ndim - 1)
            seen.add(self.piece, self._last[1])

        return linear.register_forward_pre_hook(look)

    def _attention(self, module: nn.Module, query: torch.Tensor) -> None:
        path = f"{self.run.path}.{self.index}.{self._paths[id(module)]}"
        first = next((child for child in module.modules() if isinstance(child, ScaledLinear)), None)
        if first is not None:
            path = self._name(first.name).rpartition(".")[0]
        given, self.cache.given = self.cache.given, None
        states = {"q": query} if given is None else {"k": given[0], "v": given[1], "q": query}
        self.stats.layer_of[path] = self.index
        ranges = self.stats.caches.setdefault(path, {})
        for which, x in states.items():
            seen = ranges.setdefault(which, Range.empty(x.shape[1], self.pieces))
            seen.add(self.piece, self._batch(x, f"{which} of {path}", 1, x.shape[-2]))

    def _batch(self, x: torch.Tensor, what: str, axis: int, tokens: int | None = None) -> Batch:
        found = batch(x.float().numpy(), axis, tokens)
        if not np.isfinite(found.channels).all():
            bad = int((~torch.isfinite(x)).sum())
            raise NonFiniteError(
                f"{bad} NaN or infinite values in {what}", where=f"piece {self.piece} of the text",
                wanted="finite activations", remedy="run it in another dtype (--dtype float32)",
            )  # fmt: skip
        return found
