"""Copies that share: a module tree of its own over the same tensors, and one tensor for what is equal.

    twin(module)         submodules, parameters and buffers can be replaced in it, hooks be hung on it
    Shared().of(value)   a tensor that equals the corner of one seen before becomes a view of it

The second keeps causal masks [1, 1, T, T] and rotary tables once for all layers, documents and models: the mask of a
short text is the corner of a longer one's, and that they are equal is looked at, not assumed.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn


def twin(module: nn.Module) -> nn.Module:
    """A copy of a module tree that shares every tensor with it; much cheaper than a deep copy."""
    made = object.__new__(type(module))
    for key, value in vars(module).items():
        vars(made)[key] = value.copy() if key.startswith("_") and isinstance(value, dict) else value
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else twin(child)
    return made


class Shared:
    """Tensors that others hold; nothing stays alive because of this."""

    def __init__(self) -> None:
        self._seen: dict[tuple[torch.dtype, int], list[weakref.ref[torch.Tensor]]] = {}

    def of(self, value: Any, memo: dict[int, Any]) -> Any:
        """The value with its tensors, also those in tuples, lists and dicts, shared. ``memo`` knows by identity what
        was looked at already."""
        if isinstance(value, torch.Tensor):
            if id(value) not in memo:
                memo[id(value)] = (value, self._tensor(value))
            return memo[id(value)][1]
        if type(value) in (tuple, list):
            return type(value)(self.of(one, memo) for one in value)
        if type(value) is dict:
            return {key: self.of(one, memo) for key, one in value.items()}
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        key = (value.dtype, value.ndim)
        alive = [ref for ref in self._seen.get(key, []) if ref() is not None]
        self._seen[key] = alive
        for ref in alive:
            known = ref()
            if known is None or any(a > b for a, b in zip(value.shape, known.shape, strict=True)):
                continue
            corner = known[tuple(slice(0, size) for size in value.shape)]
            if torch.equal(corner, value):
                return known if known.shape == value.shape else corner
        alive.append(weakref.ref(value))
        return value
