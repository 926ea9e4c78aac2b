"""What each of the child's layers makes of the parent's own hidden states, beside what its format explains.

    local      |child_i(h) - parent_i(h)|           h the parent's input of layer i: no error of earlier layers
    expected   |rounded_i(h) - parent_i(h)|         rounded_i: the parent's layer, its matrices rounded to the nearest
                                                    code of the child's schemes, its inputs quantized the same way

Both as a share of |parent_i(h) - h|, what the layer adds, of the median token: a token whose hidden state is a thousand
times the others' has more rounding in it than the layer adds. A quantizer that does nothing clever makes ``expected``;
a calibrated one makes less. What makes twice as much of the same input does not come from the format: codes in the
wrong order, a scale that is off, a lost bias, other positions. The reference is made here, from the parent's weights,
so that no table has to say how much a format may cost a layer.

The same is asked of every linear and norm alone, on the input that the parent gives it; which of them parts most names
the part. Methods that scale neighbouring matrices against each other (AWQ, SmoothQuant) change these and not the layer,
so a layer is judged as a whole first.

Left out: layers that share weights, and experts that no token of the sample chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import torch
from torch import nn

from narrowcast.errors import UsageError
from narrowcast.runtime.engine import as_engine
from narrowcast.runtime.inputs import Inputs, operand_of
from narrowcast.runtime.linear import ScaledLinear
from narrowcast.runtime.product import Operand
from narrowcast.runtime.quantizing import decoded, quantized
from narrowcast.runtime.walk import Running, State
from narrowcast.studies.evaluation import Part
from narrowcast.texts.documents import Piece

SAMPLE = 128  # tokens that are looked at
Tensors = list[torch.Tensor]


@dataclass
class Call:
    """What one part of a layer was given and gave, in one call."""

    given: torch.Tensor
    gave: torch.Tensor


@dataclass(frozen=True)
class LayerCheck:
    """One layer on the parent's input: shares of what it adds, of the median token, and its parts."""

    local: float
    expected: float
    parts: tuple[Part, ...]


@dataclass
class Local:
    """Walks beside the lanes; hang ``prepare`` into ``lanes.together``, the parent's lane before the child's."""

    parent: Running
    child: Running
    pieces: Sequence[Piece]
    checks: dict[int, LayerCheck] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = [torch.tensor(piece.ids) for piece in sample(self.pieces)]
        self.states = [self.parent.begin(row) for row in ids]
        self.begun = [self.child.begin(row) for row in ids]
        self.embedded = [state.hidden for state in self.states]
        self._given: Tensors = []
        self._gave: Tensors = []
        self._rounded: Tensors = []
        self._calls: dict[str, list[Call]] = {}
        self._rounded_parts: dict[str, float] = {}

    def prepare(self, i: int, run: Running, layer: nn.Module) -> None:
        if run is self.parent:
            self._parent(i, layer)
        elif run is self.child:
            self._child(i, layer)

    @torch.inference_mode()
    def _parent(self, i: int, layer: nn.Module) -> None:
        """The parent's layer as it is, then rounded as the child's is."""
        self._given = [state.hidden for state in self.states]
        with captured(layer) as calls:
            self._gave = [self.parent.step(layer, i, state) for state in self.states]
        self._calls = {name: found for name, found in calls.items() if found}
        with rounded(layer, self._calls, self.child) as swapped:
            self._rounded = [
                self.parent.step(layer, i, State(state.ids, given, state.calls))
                for state, given in zip(self.states, self._given, strict=True)
            ]
            self._rounded_parts = {name: self._error(layer, name, self._calls[name]) for name in swapped}

    @torch.inference_mode()
    def _child(self, i: int, layer: nn.Module) -> None:
        gave = [
            self.child.step(layer, i, State(state.ids, given, state.calls))
            for state, given in zip(self.begun, self._given, strict=True)
        ]
        unit = torch.finfo(self.parent.dtype).eps / 2
        tokens = [
            _shares(given[0], wanted[0], got[0], nearest[0], unit)
            for given, wanted, got, nearest in zip(self._given, self._gave, gave, self._rounded, strict=True)
        ]
        local, expected = (torch.cat([token[side] for token in tokens]) for side in (0, 1))
        parts = []
        for name, calls in self._calls.items():
            found = self._error(layer, name, calls)
            if found is not None:
                floor = 2 * unit
                parts.append(Part(name, found, sqrt(self._rounded_parts.get(name, 0.0) ** 2 + floor**2)))
        self.checks[i] = LayerCheck(_median(local), _median(expected), tuple(parts))

    def _error(self, layer: nn.Module, name: str, calls: Sequence[Call]) -> float | None:
        """rms |got - wanted| / rms |wanted| of one part on what the parent gave it."""
        try:
            part = layer.get_submodule(name)
        except AttributeError:
            return None
        noise = signal = 0.0
        for call in calls:
            try:
                got = part(call.given)
            except RuntimeError:  # a part of another width, in a child that was pruned
                return None
            if got.shape != call.gave.shape:
                return None
            noise += float((got.double() - call.gave.double()).square().sum())
            signal += float(call.gave.double().square().sum())
        return sqrt(noise / signal) if signal else 0.0


def _shares(
    given: torch.Tensor, wanted: torch.Tensor, got: torch.Tensor, nearest: torch.Tensor, unit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token: |got - wanted|² and |nearest - wanted|² with a rounding of the stream, over |wanted - given|²."""
    wide = wanted.double()
    added = (wide - given.double()).square().sum(dim=1).clamp_min(1e-300)
    rounding = unit**2 * wide.square().sum(dim=1)
    local = (got.double() - wide).square().sum(dim=1)
    return local / added, ((nearest.double() - wide).square().sum(dim=1) + rounding) / added


def _median(squares: torch.Tensor) -> float:
    return sqrt(float(squares.median()))


def sample(pieces: Sequence[Piece]) -> list[Piece]:
    """The first pieces, together about ``SAMPLE`` tokens, the last one cut."""
    found, left = [], SAMPLE
    for piece in pieces:
        if left < 2:
            break
        found.append(replace(piece, ids=piece.ids[: min(left, SAMPLE // 2)]))
        left -= len(found[-1].ids)
    return found


@contextmanager
def captured(layer: nn.Module) -> Iterator[dict[str, list[Call]]]:
    """What every innermost part that takes and gives one tensor was given and gave, by name."""
    calls: dict[str, list[Call]] = {}
    hooks = []

    def listen(name: str, part: nn.Module) -> None:
        def note(_: nn.Module, given: tuple[Any, ...], gave: Any) -> None:
            if len(given) == 1 and isinstance(given[0], torch.Tensor) and isinstance(gave, torch.Tensor):
                calls.setdefault(name, []).append(Call(given[0], gave))

        hooks.append(part.register_forward_hook(note))

    for name, part in layer.named_modules():
        if name and not any(True for _ in part.children()):
            listen(name, part)
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def rounded(layer: nn.Module, calls: Mapping[str, Any], child: Running) -> Iterator[list[str]]:
    """The parent's layer with those linears that were called rounded to the child's schemes; gives their names."""
    swapped: dict[str, tuple[ScaledLinear, Operand, Inputs | None, bool]] = {}
    for name in calls:
        part = layer.get_submodule(name)
        if isinstance(part, ScaledLinear):
            made = reference(part, child)
            if made is not None:
                swapped[name] = part, part.weight, part.inputs, part.plain
                part.weight, part.inputs = made
                part.plain = part.inputs is None
    try:
        yield list(swapped)
    finally:
        for part, weight, inputs, plain in swapped.values():
            part.weight, part.inputs, part.plain = weight, inputs, plain


def reference(part: ScaledLinear, child: Running) -> tuple[Operand, Inputs | None] | None:
    """The parent's matrix rounded to the child's scheme, its input quantized by what it holds; an online scheme as it
    is; None where the child's matrix is not quantized, or lies in a form that this toolkit only reads."""
    if not child.weights.has(part.name):
        return None
    held, online = child.weights.find(part.name), child.weights.online
    if held.coded is None and online is not None and online.takes(held):
        made = child.weights.linear(part.name)
        return made.weight, made.inputs
    if held.coded is None:
        return None
    linear, scheme = held.coded.stored.linear, held.coded.how.scheme
    weight = part.weight
    values = weight.matrix if weight.scale is None else weight.matrix * weight.scale
    try:
        q = quantized(values.to(child.dtype), scheme)  # exact: the parent runs in this dtype
    except UsageError:
        return None
    if linear.input is not None:
        return operand_of(q), Inputs(as_engine(linear.input), None)
    narrow = decoded(q).to(child.dtype)
    return Operand(narrow.float(), None, child.dtype == torch.bfloat16), None
