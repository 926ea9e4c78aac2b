"""Weights from a checkpoint in any container into parts of a skeleton, linears as ``ScaledLinear``.

    fill(part, path)     every parameter below ``path``: linears and experts through ``Linears``, the rest as tensors

Names are those of the unquantized model; a text model inside a multimodal checkpoint is found under
``language_model``. A parameter that the checkpoint does not hold is refused by name, never left as it was made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from narrowcast.errors import CheckpointError
from narrowcast.jobs.coded import Coded, Opened
from narrowcast.jobs.matching import Held, held
from narrowcast.kernels import Rows
from narrowcast.numbers.formats import BF16, FP16, FP32
from narrowcast.runtime.inputs import Inputs, operand_of
from narrowcast.runtime.linear import ScaledLinear
from narrowcast.runtime.online import Online
from narrowcast.runtime.product import Operand
from narrowcast.tensors.packing import unpack
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.qtensor import QTensor

FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


@dataclass
class Weights:
    """The tensors of one checkpoint as torch wants them. ``online`` quantizes linears that are stored plain."""

    opened: Opened
    dtype: torch.dtype
    online: Online | None = None
    _names: dict[str, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = held(self.opened)
        for name, one in (tensors.tied | tensors.found).items():
            self._names[name] = one
            self._names.setdefault(_plain_name(name), one)

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

    def tensor(self, name: str, shape: torch.Size | None = None) -> torch.Tensor:
        """A tensor in the run's dtype, decoded if it is stored quantized."""
        one = self.find(name)
        values = torch.from_numpy(np.ascontiguousarray(one.values(0, one.source.shape[0])))
        wanted = one.shape if shape is None else shape
        if values.numel() != int(np.prod(wanted)):
            raise CheckpointError(
                f"{name} does not fit the model", where=self.opened.checkpoint.root, got=list(one.shape),
                wanted=list(wanted),
            )  # fmt: skip
        return values.reshape(tuple(wanted)).to(self.dtype)

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
            weight, inputs = self.online.quantize(path, one)
            return ScaledLinear(path, weight, inputs, offset)
        if coded is None or coded.stored.linear.input is None:
            return ScaledLinear(path, self._wide(one), None, offset, plain=True)
        linear = coded.stored.linear
        return ScaledLinear(path, self._operand(one, coded), self._inputs(coded, linear), offset)

    def _wide(self, one: Held) -> Operand:
        """A weight whose input stays wide: decoded, rounded once to the run's dtype."""
        matrix = torch.from_numpy(np.ascontiguousarray(one.values(0, one.source.shape[0])))
        narrow = matrix.to(self.dtype)
        return Operand(narrow.float(), None, self.dtype == torch.bfloat16)

    def _operand(self, one: Held, coded: Coded) -> Operand:
        """A quantized weight whose input is quantized too."""
        order, factors = one.columns()
        scheme = coded.how.scheme
        if order is not None or factors is not None or coded.how.part("offset") is not None:
            return Operand(torch.from_numpy(np.ascontiguousarray(one.values(0, coded.shape[0]))))
        source = one.checkpoint
        rows: Rows = coded.rows(source, 0, coded.shape[0])
        outer = coded.outer(source)
        codes = unpack(rows.packed, coded.how.packing, coded.shape[1])
        scales: tuple[Any, ...] = (rows.scales,)
        if len(scheme.scales) == 2:
            scales = (rows.scales, np.full((1, 1), outer, np.float32))
            if scheme.scales[1].divides:
                return Operand(torch.from_numpy(one.values(0, coded.shape[0])))
        return operand_of(QTensor(scheme, codes, scales, rows.zero))

    def _inputs(self, coded: Coded, linear: LinearScheme) -> Inputs:
        assert linear.input is not None
        static = None
        if not linear.dynamic:
            source = self.opened.checkpoint
            static = float(coded.how.static(source, coded.place, coded.shape, "input").reshape(-1)[0])
        return Inputs(linear.input, static)


def _plain_name(name: str) -> str:
    """A name of a text model inside a multimodal one as the text model alone has it."""
    return name.replace("language_model.model.", "model.").replace("model.language_model.", "model.").replace(
        "language_model.lm_head", "lm_head"
    )  # fmt: skip


def fill(part: nn.Module, path: str, weights: Weights) -> nn.Module:
    """Put weights into every parameter of ``part``, which the skeleton calls ``path``; returns the part, which may be
    another module when it is itself a linear."""
    from narrowcast.runtime.experts import Experts, is_experts

    if isinstance(part, nn.Linear):
        return weights.linear(path, part.bias is not None, (part.out_features, part.in_features))
    if is_experts(part):
        return Experts(part, path, weights)
    for name, child in part.named_children():
        setattr(part, name, fill(child, f"{path}.{name}" if path else name, weights))
    for name, parameter in list(part.named_parameters(recurse=False)):
        full = f"{path}.{name}" if path else name
        value = weights.tensor(full, parameter.shape)
        part._parameters[name] = nn.Parameter(value, requires_grad=False)
    return part
