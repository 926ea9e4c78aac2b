"""The variants of ``narrowcast legal``: one operation in one narrower dtype, everything else in float32.

    Variant(operation, dtype)   a visitor of operations; what it narrows it counts, and notes the first that broke
    layer(weights)              where linear layers themselves change (weights, accumulators): enter and leave

Weights keep embeddings and the head as they are, as presets do. Inputs are those of the linear layers between. A cache
mode of ``runtime.caches`` is passed to the layers as transformers passes a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from narrowcast.errors import UsageError
from narrowcast.runtime import operations as op
from narrowcast.runtime.caches import CacheFactory
from narrowcast.runtime.linear import ScaledLinear
from narrowcast.runtime.narrow import CASTS, Narrowing, serial
from narrowcast.runtime.operations import Operation
from narrowcast.runtime.product import Operand
from narrowcast.runtime.quantizing import decoded, quantized
from narrowcast.tensors.schemes import schemes

WEIGHTS, INPUTS, ACCUMULATORS, KV = "linear weights", "linear inputs", "linear accumulators", "KV cache"
OUTPUTS: tuple[tuple[str, frozenset[str], tuple[str, ...]], ...] = tuple(
    (name, frozenset(kinds), tuple(CASTS) if name != "norm inside" else ("bf16", "fp16"))
    for name, kinds in (
        ("embedding", {op.EMBEDDING}),
        ("norm inside", {op.STATISTICS}),
        ("norm output", {op.NORM}),
        ("linear outputs", {op.LINEAR}),
        ("rotary", {op.ROTARY}),
        ("scores", {op.SCORES}),
        ("softmax", {op.SOFTMAX}),
        ("PV", {op.PV}),
        ("act*up", {op.ACTIVATION, op.PRODUCT}),
        ("residual", {op.RESIDUAL}),
        ("router", {op.ROUTER}),
        ("experts' sum", {op.EXPERTS}),
        ("logits", {op.LOGITS}),
    )
)
WEIGHT_SCHEMES = ("fp8_channel", "int8_channel", "mxfp8_e4m3", "int4_g32", "mxfp4", "nvfp4")
INPUT_SCHEMES = ("fp8_token", "int8_token", "mxfp8_e4m3", "nvfp4")
CACHE_MODES = ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "mxfp8", "nvfp4")


@dataclass
class Variant:
    """One operation in one dtype. ``touched`` counts elements that were narrowed; ``broke`` is the first operation
    whose narrowed output was not finite although what it was made from was."""

    operation: str
    dtype: str
    kinds: frozenset[str] = frozenset()
    narrow: Narrowing | None = None
    inputs: Narrowing | None = None
    weights: Narrowing | None = None
    accumulator: Narrowing | None = None
    cache: Callable[[], Any] | None = None
    touched: int = 0
    broke: Operation | None = None
    _kept: dict[int, Operand] = field(default_factory=dict, repr=False)

    def output(
        self, operation: Operation, inputs: tuple[torch.Tensor, ...], value: torch.Tensor
    ) -> torch.Tensor:
        if self.accumulator is not None and operation.kind == op.LINEAR:
            self._note(operation, inputs[0], value)
        if self.narrow is None or operation.kind not in self.kinds:
            return value
        return self._narrowed(operation, self.narrow, value)

    def input(self, operation: Operation, value: torch.Tensor) -> torch.Tensor:
        if self.inputs is None or operation.kind != op.LINEAR or not operation.layered:
            return value
        return self._narrowed(operation, self.inputs, value)

    def _narrowed(self, operation: Operation, narrow: Narrowing, value: torch.Tensor) -> torch.Tensor:
        if value.ndim < 2:
            return value
        self.touched += value.numel()
        found = narrow(value)
        self._note(operation, value, found)
        return found

    def _note(self, operation: Operation, before: torch.Tensor, after: torch.Tensor) -> None:
        if (
            self.broke is None
            and not bool(torch.isfinite(after).all())
            and bool(torch.isfinite(before).all())
        ):
            self.broke = operation

    def prepare(self, layer: nn.Module) -> None:
        """Narrow the weights of a layer once; they wait until the lane's turn."""
        self._kept.clear()
        if self.weights is None:
            return
        for module in layer.modules():
            if isinstance(module, ScaledLinear):
                whole = module.weight.decoded()
                self._kept[id(module)] = Operand(self.weights(whole), None, False)
                self.touched += whole.numel()

    @contextmanager
    def active(self, layer: nn.Module) -> Iterator[None]:
        """A layer with this variant's linear layers in it."""
        linears = [module for module in layer.modules() if isinstance(module, ScaledLinear)]
        before = [module.weight for module in linears]
        for module in linears:
            if id(module) in self._kept:
                module.weight = self._kept[id(module)]
            if self.accumulator is not None:
                self.touched += 1
                module.forward = partial(_accumulated, module, self.accumulator)
        try:
            yield
        finally:
            for module, weight in zip(linears, before, strict=True):
                module.weight = weight
                vars(module).pop("forward", None)


def _accumulated(module: ScaledLinear, narrow: Narrowing, x: torch.Tensor) -> torch.Tensor:
    y = serial(module.operand(x).decoded(), module.weight.decoded(), narrow)
    if module.bias is not None:
        y = y + module.bias
    return y.reshape(*x.shape[:-1], module.out_features)


def variants(config: Any, routed: bool) -> list[Variant]:
    """Every variant, in the order of computation. ``routed``: the model has routers and experts."""
    made = [Variant(WEIGHTS, name, weights=CASTS[name]) for name in ("bf16", "fp16", "e4m3")]
    made += [Variant(WEIGHTS, name, weights=_as(name)) for name in WEIGHT_SCHEMES]
    made += [Variant(INPUTS, name, inputs=CASTS[name]) for name in ("bf16", "fp16", "e4m3")]
    made += [Variant(INPUTS, name, inputs=_as(name)) for name in INPUT_SCHEMES]
    made += [Variant(ACCUMULATORS, name, accumulator=CASTS[name]) for name in ("bf16", "fp16")]
    kv = frozenset({op.KEY, op.VALUE})
    made += [Variant(KV, name, kv, CASTS[name]) for name in ("bf16", "fp16", "e4m3")]
    factories = {name: CacheFactory(config, name) for name in CACHE_MODES}
    made += [Variant(KV, name, cache=one) for name, one in factories.items() if _takes(one, config)]
    for name, kinds, dtypes in OUTPUTS:
        if routed or not kinds & {op.ROUTER, op.EXPERTS}:
            made += [Variant(name, dtype, kinds, CASTS[dtype]) for dtype in dtypes]
    return made


def _takes(factory: CacheFactory, config: Any) -> bool:
    """Whether a cache mode takes heads of this size."""
    config = config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = torch.zeros(1, 1, 1, size)
    try:
        factory().update(row, row, 0)
    except UsageError:
        return False
    return True


def fp8_linears() -> Variant:
    """The yardstick: weights and inputs of the linear layers as the preset fp8_dynamic has them."""
    return Variant("linears", "fp8_dynamic", weights=_as("fp8_channel"), inputs=_as("fp8_token"))


def _as(name: str) -> Narrowing:
    """Values as a scheme keeps them; rows that are not finite stay as they are."""
    scheme = schemes[name]

    def narrowed(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        finite = torch.isfinite(rows).all(dim=1, keepdim=True)
        found = decoded(quantized(torch.where(finite, rows, 0.0), scheme))
        return torch.where(finite, found, rows).reshape(x.shape)

    return narrowed
