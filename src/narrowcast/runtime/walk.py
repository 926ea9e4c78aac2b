"""Run a causal language model layer by layer: a layer's weights are in memory while all documents pass through it.

    h₀ = embed(ids);   h_{i+1} = layer_i(h_i);   logits = head(h_L)

Each layer is read once and let go, so the peak is one layer, whatever the model, and two models can walk side by side.
How a layer is called (masks, rotary tables, windows) is asked of the model itself: its forward is run once with layers
that only write down their arguments, and once more at the end with layers that hand over the last hidden states, so
that final norms, heads and soft caps are the model's own too.

    run = Running.open(path);  states = [run.begin(ids) for ids in documents]
    for i in range(run.depth):
        layer = run.layer(i)
        for state in states: run.step(layer, i, state)
    logits = run.logits(state)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from narrowcast.errors import UsageError
from narrowcast.jobs.coded import Opened, open_coded
from narrowcast.jobs.opening import open_model
from narrowcast.runtime.online import Online
from narrowcast.runtime.skeleton import decoder_layers, skeleton
from narrowcast.runtime.weights import Weights, fill
from narrowcast.store.checkpoint import text_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class State:
    """One document on its way: token ids [1, T], hidden states [1, T, H], and how each layer is called."""

    ids: torch.Tensor
    hidden: torch.Tensor
    calls: list[dict[str, Any]]


@dataclass
class Running:
    """A checkpoint that runs: the skeleton, its weights, and the dtype of the residual stream."""

    root: Path
    opened: Opened
    model: Any
    weights: Weights
    dtype: torch.dtype
    path: str
    layers: nn.ModuleList
    _outer: bool = field(default=False, repr=False)

    @classmethod
    def open(cls, model: str | Path, dtype: str | None = None, online: str | None = None) -> Self:
        """Open a model to run. ``dtype`` None is the config's own, bfloat16 where it says nothing.

        Raises UsageError and InputError as ``open_model`` does, and UsageError for what transformers does not know.
        """
        checkpoint = open_model(model)
        opened = open_coded(checkpoint)
        chosen = dtype or said_dtype(checkpoint.config or {})
        if chosen not in DTYPES:
            raise UsageError("unknown dtype", got=chosen, wanted=", ".join(DTYPES))
        made = skeleton(checkpoint.config, DTYPES[chosen], checkpoint.root)
        path, layers = decoder_layers(made, checkpoint.root)
        weights = Weights(opened, DTYPES[chosen], Online(online) if online else None)
        return cls(checkpoint.root, opened, made, weights, DTYPES[chosen], path, layers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.checkpoint.close()

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def config(self) -> Any:
        return self.model.config

    def _fill_outer(self) -> None:
        """Everything but the decoder layers: embeddings, final norm, head."""
        if self._outer:
            return
        names = {id(module) for module in self.layers.modules()}
        for name, module in list(self.model.named_modules()):
            if id(module) in names or name == self.path or any(True for _ in module.children()):
                continue
            parent, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(parent), leaf, fill(module, name, self.weights))
        self._outer = True

    @torch.inference_mode()
    def begin(self, ids: torch.Tensor) -> State:
        """Token ids [T] or [1, T] as the state before the first layer."""
        self._fill_outer()
        ids = ids.reshape(1, -1)
        calls: list[dict[str, Any]] = []
        first: list[torch.Tensor] = []

        def write_down(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            assert not args, "decoder layers are called with names"
            first.append(hidden)
            calls.append(kwargs)
            return hidden

        with self._instead(write_down):
            self.model(input_ids=ids, use_cache=False, logits_to_keep=1)
        return State(ids, first[0], calls)

    def layer(self, i: int) -> nn.Module:
        """Decoder layer ``i`` with its weights: a copy, which the caller lets go."""
        return fill(copy.deepcopy(self.layers[i]), f"{self.path}.{i}", self.weights)

    @torch.inference_mode()
    def step(self, layer: nn.Module, i: int, state: State, cache: Any = None) -> torch.Tensor:
        """Take a state through layer ``i`` (in place) and return its hidden states; ``cache`` is a transformers
        Cache that keeps the keys and values of this document."""
        kwargs = state.calls[i]
        if cache is not None:
            kwargs = kwargs | {"cache": cache}
        out = layer(state.hidden, **kwargs)
        state.hidden = out[0] if isinstance(out, tuple) else out
        return state.hidden

    @torch.inference_mode()
    def logits(self, state: State, last: int = 0) -> torch.Tensor:
        """Logits float32 [T, V] of a state that went through every layer; ``last`` > 0: of so many last tokens."""
        self._fill_outer()
        with self._instead(lambda hidden, **kwargs: state.hidden):
            out = self.model(input_ids=state.ids, use_cache=False, logits_to_keep=last)
        found: torch.Tensor = out.logits[0].float()
        return found

    @contextmanager
    def _instead(self, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Decoder layers that do something else for a while."""
        for layer in self.layers:
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    def resident(self) -> Any:
        """The whole model with all its weights in memory, for generation: transformers' own class."""
        self._fill_outer()
        whole = copy.deepcopy(self.model)
        layers = whole.get_submodule(self.path)
        for i in range(self.depth):
            layers[i] = self.layer(i)
        return whole.eval()


def said_dtype(config: dict[str, Any]) -> str:
    """The dtype that a config.json names, bfloat16 where it names none that a model runs in."""
    inner = text_config(config)
    for said in (
        config.get("dtype"),
        config.get("torch_dtype"),
        inner.get("dtype"),
        inner.get("torch_dtype"),
    ):
        if said in DTYPES:
            return str(said)
    return "bfloat16"
