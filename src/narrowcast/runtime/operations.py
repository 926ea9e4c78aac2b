"""The operations of a model while it runs: every product, sum and table lookup by its place, to be seen or changed.

A torch function mode sees each call that a model's own code makes, hooks on its modules say whose code it is, and the
order of calls inside a module says what it is: in an attention module the first product of two four-dimensional
tensors makes scores, the softmax follows, the next product is PV; an addition in the code of a decoder layer itself is
the residual stream. So one description serves every family, and nothing of a model is rewritten.

    watch = Watch(visitor)
    watch.attach(layer, i)                   hooks on a layer's modules
    with watch: run.step(layer, i, state)    visitor.output(operation, inputs, value) may answer with another value

Attention has to run in transformers' eager form (``Running.open(..., attention=EAGER)``), whose products are separate
calls.

Left out: what happens inside a fused call (``layer_norm``, ``scaled_dot_product_attention``, kernels of state-space
models): its output is seen, its parts are not. The addition of the mask is passed over: what it adds is no number that
anybody measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from narrowcast.runtime.linear import ScaledLinear

EAGER = "eager"

EMBEDDING, NORM, STATISTICS, LINEAR = "embedding", "norm", "norm statistics", "linear"
ROTARY, QUERY, KEY, VALUE = "rotary", "q after rotary", "k after rotary", "v"
SCORES, SOFTMAX, PV = "scores", "softmax", "PV"
ACTIVATION, PRODUCT, RESIDUAL = "activation", "act*up", "residual"
ROUTER, EXPERTS, LOGITS, OTHER = "router", "experts", "logits", "other"

_SAME = {
    "iadd": "add", "radd": "add", "isub": "sub", "rsub": "sub", "imul": "mul", "rmul": "mul", "multiply": "mul",
    "truediv": "div", "itruediv": "div", "rtruediv": "div", "true_divide": "div", "divide": "div", "bmm": "matmul",
    "rmatmul": "matmul",
}  # fmt: skip
_ARITHMETIC = frozenset({
    "add", "sub", "mul", "div", "matmul", "linear", "einsum", "softmax", "tanh", "sigmoid", "silu", "gelu",
    "relu", "softplus", "exp", "log", "pow", "square", "mean", "sum", "rsqrt", "sqrt", "clamp", "cumsum",
    "index_add", "conv1d", "layer_norm", "rms_norm",
})  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One operation: the layer (-1 before the first, the depth behind the last), the module whose code it is, what it
    is, and its name there. ``rows`` are the tokens that its rows belong to, where it saw some of them only."""

    layer: int
    path: str
    kind: str
    name: str
    module: nn.Module = field(repr=False, compare=False)
    rows: torch.Tensor | None = field(default=None, repr=False, compare=False)
    layered: bool = True  # inside a decoder layer

    @property
    def inside(self) -> str:
        """Its name within its layer: mlp.down_proj, self_attn scores."""
        own = self.path.rpartition(".")[2] == self.name
        return self.path if own else f"{self.path} {self.name}".strip()


class Visitor(Protocol):
    """Who looks: is told each operation's tensors, and answers with the value to go on with."""

    def output(
        self, operation: Operation, inputs: tuple[torch.Tensor, ...], value: torch.Tensor
    ) -> torch.Tensor: ...

    def input(self, operation: Operation, value: torch.Tensor) -> torch.Tensor:
        """What enters a linear layer."""
        ...


@dataclass
class _Frame:
    """A module whose forward runs."""

    path: str
    module: nn.Module
    role: str
    phase: int = 0  # of attention: before, between and behind its two products
    last: str = ""  # the child that ended last, norms aside
    rows: torch.Tensor | None = None


def role_of(module: nn.Module) -> str:
    """What a module's code does: by its class, and by its class's name where that is the family's own."""
    name = type(module).__name__.lower()
    if isinstance(module, ScaledLinear | nn.Linear):
        return LINEAR
    if isinstance(module, nn.Embedding):
        return EMBEDDING
    if isinstance(module, nn.Dropout | nn.Identity):
        return "nothing"
    for word, role in (("norm", NORM), ("router", ROUTER), ("attention", "attention"), ("rotary", "tables")):
        if word in name:
            return role
    if any(True for _ in module.children()):
        return "experts" if name == "experts" else "block"
    return ACTIVATION if not any(True for _ in module.parameters()) else "block"


class Watch(TorchFunctionMode):
    """Names operations and hands them to a visitor, which may be changed between steps."""

    def __init__(self, visitor: Visitor) -> None:
        super().__init__()
        self.visitor = visitor
        self.layer = -1
        self.piece = -1  # which piece of text runs through the layer, in order
        self._frames: list[_Frame] = []
        self._calls: Counter[int] = Counter()
        self._busy = False

    def attach(self, part: nn.Module, layer: int, without: str | None = None) -> None:
        """Hooks on a decoder layer, or on the whole model (``layer`` = depth) ``without`` its layers."""
        for path, module in part.named_modules():
            if without is not None and (path == without or path.startswith(f"{without}.")):
                continue
            role = role_of(module) if path else "layer" if without is None else "model"
            module.register_forward_pre_hook(self._enter(path, role, layer), with_kwargs=True)
            module.register_forward_hook(self._leave(path, role), always_call=True)

    def _enter(self, path: str, role: str, layer: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not path:
                self.layer, self.piece = layer, self._calls[layer]
                self._calls[layer] += 1
            changed = None
            if role == LINEAR:
                operation = self._operation(path, LINEAR, path.rpartition(".")[2], module)
                changed = (self._told(lambda: self.visitor.input(operation, args[0])), *args[1:])
            elif role == "layer" and layer == 0:
                operation = Operation(-1, "embed_tokens", EMBEDDING, "embedding", module)
                changed = (self._told(lambda: self.visitor.output(operation, (), args[0])), *args[1:])
            self._frames.append(_Frame(path, module, role))
            return None if changed is None else (changed, kwargs)

        return hook

    def _leave(self, path: str, role: str) -> Callable[..., Any]:
        leaf = path.rpartition(".")[2]

        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            self._frames.pop()
            if self._frames and role not in (NORM, ACTIVATION):
                self._frames[-1].last = leaf
            if role not in (LINEAR, NORM, ACTIVATION) or not isinstance(out, torch.Tensor):
                return None
            kind = LOGITS if role == LINEAR and self._frames and self._frames[-1].role == "model" else role
            operation = self._operation(path, kind, leaf if kind != LOGITS else "logits", module)
            return self._told(lambda: self.visitor.output(operation, args, out))

        return hook

    def _operation(self, path: str, kind: str, name: str, module: nn.Module) -> Operation:
        rows = next((frame.rows for frame in reversed(self._frames) if frame.rows is not None), None)
        layered = not self._frames or self._frames[0].role == "layer"
        return Operation(self.layer, path, kind, name, module, rows, layered)

    def _told(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What a visitor computes is no operation of the model."""
        self._busy = True
        try:
            return call()
        finally:
            self._busy = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        frame = self._frames[-1] if self._frames and not self._busy else None
        if frame is None or frame.role in (LINEAR, EMBEDDING, ACTIVATION, "tables", "nothing"):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "").strip("_")
        name = _SAME.get(name, name)
        if name == "getitem" and frame.role == "experts" and isinstance(args[1], torch.Tensor):
            frame.rows = args[1]
        if name not in _ARITHMETIC:
            return func(*args, **kwargs)
        if frame.role == "attention" and name == "matmul":
            args = self._product(frame, args)
        out = func(*args, **kwargs)
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return out
        tensors = tuple(part for part in args if isinstance(part, torch.Tensor))
        known = _ROLES.get(frame.role, _block)(frame, name, tensors)
        if known is None:
            return out
        return self.visitor.output(self._operation(frame.path, *known, frame.module), tensors, out)

    def _product(self, frame: _Frame, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Queries and keys as they enter the scores, values as they enter PV."""
        if any(not isinstance(part, torch.Tensor) or part.ndim != 4 for part in args[:2]):
            return args
        frame.phase += 1
        first, second = args[:2]
        if frame.phase == 1:
            first = self.visitor.output(self._operation(frame.path, QUERY, QUERY, frame.module), (), first)
            operation = self._operation(frame.path, KEY, KEY, frame.module)
            second = self.visitor.output(operation, (), second.transpose(-1, -2)).transpose(-1, -2)
        elif frame.phase == 3:
            second = self.visitor.output(self._operation(frame.path, VALUE, VALUE, frame.module), (), second)
        return (first, second, *args[2:])


Known = tuple[str, str] | None


def _attention(frame: _Frame, name: str, tensors: tuple[torch.Tensor, ...]) -> Known:
    """Phases: 0 before the scores, 1 scores, 2 behind the softmax, 3 behind PV."""
    if frame.phase == 0:
        return (ROTARY, ROTARY) if len(tensors) > 1 else (OTHER, name)
    if frame.phase == 1:
        if name == "softmax":
            frame.phase = 2
            return SOFTMAX, SOFTMAX
        return None if name in ("add", "sub") and len(tensors) > 1 else (SCORES, _scores(name))
    if name == "matmul" and frame.phase == 3:
        return PV, PV
    return OTHER, name


def _scores(name: str) -> str:
    return {"matmul": "q·k", "mul": "scores", "div": "scores"}.get(name, f"scores {name}")


def _layer(frame: _Frame, name: str, tensors: tuple[torch.Tensor, ...]) -> Known:
    if name == "add" and len(tensors) == 2:
        return RESIDUAL, f"residual after {frame.last}"
    return OTHER, name


def _block(frame: _Frame, name: str, tensors: tuple[torch.Tensor, ...]) -> Known:
    if frame.role == "experts" and (name == "index_add" or any(part.shape[-1:] == (1,) for part in tensors)):
        return EXPERTS, "sum of experts" if name == "index_add" else "weighted expert"
    if name == "mul" and len(tensors) == 2 and tensors[0].shape == tensors[1].shape:
        return PRODUCT, PRODUCT
    if name in ("silu", "gelu", "relu", "sigmoid"):
        return ACTIVATION, ACTIVATION
    return OTHER, name


_ROLES: dict[str, Callable[[_Frame, str, tuple[torch.Tensor, ...]], Known]] = {
    "attention": _attention,
    "layer": _layer,
    NORM: lambda frame, name, tensors: (STATISTICS, {"pow": "square"}.get(name, name)),
    ROUTER: lambda frame, name, tensors: (ROUTER, f"router {name}"),
}
