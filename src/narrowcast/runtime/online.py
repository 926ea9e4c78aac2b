"""Weights that an engine quantizes while it loads them: its own names, scales and arithmetic.

    Online(name).quantize(path, weight) → the weight as an operand, how its input is quantized

Source: vLLM 0.32, model_executor/layers/quantization/online.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from narrowcast.jobs.matching import Held
from narrowcast.runtime.inputs import Inputs, operand_of
from narrowcast.runtime.product import Operand
from narrowcast.runtime.tensors import quantize
from narrowcast.tensors.presets import EXCLUDED_ROLES, LinearScheme, presets


@dataclass(frozen=True)
class Online:
    """One online scheme."""

    name: str

    @property
    def linear(self) -> LinearScheme:
        return presets[self.name].linear

    def takes(self, one: Held) -> bool:
        """Whether the engine quantizes this matrix: a linear of attention, MLP or experts."""
        return one.kind == "Linear" and one.role not in EXCLUDED_ROLES

    def quantize(self, path: str, one: Held) -> tuple[Operand, Inputs | None]:
        linear = self.linear
        values = np.ascontiguousarray(one.values(0, one.source.shape[0]))
        weight = operand_of(quantize(values, linear.weight))
        return weight, Inputs(linear.input) if linear.input is not None else None
