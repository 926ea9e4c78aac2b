"""Weights from a checkpoint in any container into parts of a skeleton, linears as ``ScaledLinear``.

    fill(part, path)     every parameter below ``path``: linears and experts through ``linear``, the rest as tensors

Names are those of transformers' modules (``names``). A parameter that the checkpoint does not hold is refused by name,
never left as it was made, and so is one with NaN or infinity in it: every number behind it would be one too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from narrowcast.errors import CheckpointError
from narrowcast.jobs.coded import Opened
from narrowcast.jobs.matching import CACHE_SCALE, INPUT_SCALE, Held, held
from narrowcast.model.roles import Role
from narrowcast.numbers.formats import BF16, FP16, FP32
from narrowcast.runtime.engine import differing, experts
from narrowcast.runtime.experts import Experts, is_experts
from narrowcast.runtime.linear import ScaledLinear
from narrowcast.runtime.names import Names
from narrowcast.runtime.online import Online, siblings
from narrowcast.runtime.product import Operand
from narrowcast.runtime.skeleton import is_linear, linear_shape, stored
from narrowcast.runtime.stored import inputs_of, rescaled, weight_of

BLOCK = 1 << 24  # elements that are widened at once
# Stored dtypes that torch has itself: the carrier's view, and the dtype.
VIEWS: dict[str, tuple[str, torch.dtype]] = {
    BF16.name: ("<i2", torch.bfloat16),
    FP16.name: ("<f2", torch.float16),
    FP32.name: ("<f4", torch.float32),
}


@dataclass
class Weights:
    """The tensors of one checkpoint as torch wants them. ``online`` quantizes linears that are stored plain."""

    opened: Opened
    dtype: torch.dtype
    online: Online | None = None
    names: Names | None = None
    unused: tuple[str, ...] = ()
    borrowed: tuple[str, ...] = ()  # heads that are not stored although the config does not tie them
    merged: bool = False  # whether a matrix was read of which an engine keeps another scale than the file's
    _names: dict[str, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = held(self.opened)
        own = {name: one for name, one in tensors.found.items() if one.role not in (INPUT_SCALE, CACHE_SCALE)}
        take = self.names.take if self.names is not None else str
        for name, one in own.items():
            other = self._names.setdefault(take(name), one)
            if other is not one:
                raise CheckpointError(
                    f"two tensors are {take(name)} of the model", where=self.opened.checkpoint.root,
                    got=f"{other.name} and {name}", wanted="one of them",
                )  # fmt: skip
        tied = {head for head, _ in self.names.tied} if self.names is not None else set()
        for name, one in tensors.tied.items():
            if (
                self._names.setdefault(take(name), one) is one
                and self.names is not None
                and take(name) not in tied
            ):
                self.borrowed += (take(name),)
        if self.names is not None:
            for head, source in self.names.tied:
                if source in self._names:
                    self._names.setdefault(head, self._names[source])
            self.names.refuse_missing(self._names)
            self.unused = self.names.unused(list(own))
        for name, one in own.items():
            self._names.setdefault(name, one)

    def find(self, name: str) -> Held:
        """What the checkpoint holds under a name of the skeleton."""
        one = self._names.get(name) or self._names.get(name.removesuffix(".weight"))
        if one is None:
            raise CheckpointError(
                f"{name} is not in this checkpoint", where=self.opened.checkpoint.root,
                remedy="`narrowcast audit` lists what is missing",
            )  # fmt: skip
        return one

    def has(self, name: str) -> bool:
        return name in self._names or name.removesuffix(".weight") in self._names

    def tensor(
        self, name: str, shape: torch.Size | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A tensor in ``dtype``, None for the run's, decoded if it is stored quantized."""
        one = self.find(name)
        wanted = tuple(one.shape if shape is None else shape)
        if tuple(one.shape) != wanted:
            raise CheckpointError(
                f"{name} does not fit the model", where=self.opened.checkpoint.root, got=list(one.shape),
                wanted=list(wanted),
            )  # fmt: skip
        return self._finite(name, one, self.narrow(one, dtype)).reshape(wanted)

    def narrow(self, one: Held, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A matrix [rows, K] as it is read, rounded once to ``dtype``, None for the run's, some rows at a time: beside
        the result there is never more than a block of it."""
        dtype = self.dtype if dtype is None else dtype
        rows, columns = one.source.shape
        step = max(1, BLOCK // max(columns, 1) // one.row_multiple) * one.row_multiple
        if rows <= step:
            return _block(one, 0, rows).to(dtype)
        out = torch.empty(rows, columns, dtype=dtype)
        for start in range(0, rows, step):
            out[start : start + step] = _block(one, start, min(start + step, rows))
        return out

    def _finite(self, name: str, one: Held, values: torch.Tensor) -> torch.Tensor:
        """The values, when every one is a finite number; a sum tells, and is looked into when it is none itself."""
        if not math.isfinite(float(values.sum(dtype=torch.float32))) and not values.isfinite().all():
            raise self._refusal(name, one, values)
        return values

    def _refusal(self, name: str, one: Held, values: torch.Tensor) -> CheckpointError:
        """What is stored is no number, or is one that the run's dtype cannot hold."""
        amax = float(_block(one, 0, one.source.shape[0]).abs().amax())
        got = f"{int((~values.isfinite()).sum())} of {values.numel()} elements"
        root = self.opened.checkpoint.root
        if not math.isfinite(amax):
            return CheckpointError(
                f"{name} holds NaN or infinity", where=root, got=got, remedy="`narrowcast audit` shows where"
            )
        dtype = str(values.dtype).removeprefix("torch.")
        return CheckpointError(
            f"{name} overflows {dtype}", where=root, got=f"{got} beyond it, amax {amax:.6g}",
            wanted=f"at most {torch.finfo(values.dtype).max:g}", remedy="run it in float32 or bfloat16",
        )  # fmt: skip

    def linear(self, path: str, bias: bool = False, shape: tuple[int, int] | None = None) -> ScaledLinear:
        """The linear layer called ``path``, with the computation that the checkpoint or ``online`` says."""
        one = self.find(path)
        if shape is not None and tuple(one.shape) != shape:
            raise CheckpointError(
                f"{path} does not fit the model", where=self.opened.checkpoint.root, got=list(one.shape),
                wanted=list(shape),
            )  # fmt: skip
        offset = self.tensor(f"{path}.bias").float().reshape(-1) if bias else None
        coded = one.coded
        if coded is None and self.online is not None and self.online.takes(one):
            fused = [name for name in siblings(path) if self.has(name)]
            weight, inputs = self.online.quantize(path, fused, self._whole)
            return ScaledLinear(path, weight, inputs, offset)
        if coded is None or self.wide(path):
            return ScaledLinear(path, self._wide(path, one), None, offset, plain=True)
        linear, (together, alike) = coded.stored.linear, self.sharing(path)
        weight = weight_of(one, coded, linear, together)
        return ScaledLinear(path, weight, inputs_of(one, coded, linear, alike), offset)

    def sharing(self, path: str) -> tuple[list[Held], list[Held]]:
        """The matrices that an engine loads as one with the linear called ``path``, itself included, and those that
        share the scale of its input: of an expert those of all experts."""
        own = [name for name in siblings(path) if self.has(name)]
        every = own
        if self.find(path).role == Role.EXPERT:
            own = [name for name in own if name in self._names]
            every = [name for one in own for name in experts(one, self._names)]
        together = [self.find(name) for name in own]
        self.merged |= bool(differing(together))
        return together, [self.find(name) for name in every]

    def wide(self, path: str) -> bool:
        """Whether the input of the linear called ``path`` is not quantized."""
        one = self.find(path)
        if one.coded is not None:
            return one.coded.stored.linear.input is None
        return self.online is None or not self.online.takes(one)

    def _whole(self, name: str) -> torch.Tensor:
        """All rows of a matrix in the dtype that it is stored in, every one a finite number."""
        one = self.find(name)
        return self._finite(name, one, _block(one, 0, one.source.shape[0]))

    def _wide(self, path: str, one: Held) -> Operand:
        """A weight whose input stays wide: decoded, rounded once to the run's dtype."""
        values = None
        if one.coded is not None and len(one.coded.how.scheme.scales) == 2:
            values = rescaled(one, one.coded, self.sharing(path)[0])
        narrow = self._finite(one.name, one, self.narrow(one) if values is None else values.to(self.dtype))
        return Operand(narrow.float(), None, self.dtype == torch.bfloat16)


def _block(one: Held, start: int, stop: int) -> torch.Tensor:
    """Rows start:stop as they are stored where torch has the dtype, else their exact values."""
    name = one.dtype.format if one.dtype is not None else None
    if name in VIEWS:
        rows = np.ascontiguousarray(one.stored(start, stop))
        return torch.from_numpy(rows.view(VIEWS[name][0])).view(VIEWS[name][1])
    return torch.from_numpy(np.ascontiguousarray(one.values(start, stop)))


def fill(part: nn.Module, path: str, weights: Weights) -> nn.Module:
    """Put weights into every parameter and saved buffer of ``part``, which the skeleton calls ``path``; returns the
    part, which may be another module when it is itself a linear."""
    if is_linear(part) and part.weight.dtype == weights.dtype:
        made = weights.linear(path, getattr(part, "bias", None) is not None, linear_shape(part))
        return made if isinstance(part, nn.Linear) else in_columns(made)
    if is_experts(part):
        return Experts(part, path, weights)
    for name, child in part._modules.items():
        if child is not None:
            part._modules[name] = fill(child, f"{path}.{name}" if path else name, weights)
    fill_own(part, path, weights)
    return part


def in_columns(linear: nn.Module) -> nn.Module:
    """A linear whose weight lies in memory as [K, N]: what families multiply by that store it so. The numbers are the
    same; the order in which BLAS sums them is that of the family too. One of ``runtime.decode`` stays as it is."""
    if isinstance(linear, ScaledLinear) and linear.plain and linear.weight.matrix.dtype == torch.float32:
        linear.weight = replace(linear.weight, matrix=linear.weight.matrix.T.contiguous().T)
    return linear


def fill_own(part: nn.Module, path: str, weights: Weights) -> None:
    """The tensors of a module that are not its children's, each in the dtype that the skeleton has it in."""
    for name, value in stored(part):
        found = weights.tensor(f"{path}.{name}" if path else name, value.shape, value.dtype)
        if name in part._parameters:
            part._parameters[name] = nn.Parameter(found, requires_grad=False)
        else:
            part._buffers[name] = found
