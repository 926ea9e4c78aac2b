"""A quantized linear layer as a checkpoint stores it: its weight as an operand, and how its input is quantized.

    weight_of(one, linear)   codes and scales as an engine has them (``engine``), in the stored order of columns
    inputs_of(one, linear)   the input's scheme, its static scale and zero point, and what comes before it: the order of
                             columns, and a factor for each (AWQ's: x · factor is what the quantizer sees)

``together`` are the matrices that an engine loads as one with this, ``alike`` those that share its input's scale.

Left out: a scale that an engine's own eight-bit copy of a decoded weight has (``recast``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowcast.jobs.coded import Coded
from narrowcast.jobs.matching import Held
from narrowcast.kernels import Rows
from narrowcast.runtime.engine import as_engine, loaded, static_input
from narrowcast.runtime.inputs import Inputs, operand_of
from narrowcast.runtime.product import Operand
from narrowcast.runtime.quantizing import decoded
from narrowcast.tensors.packing import unpack
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import spread
from narrowcast.tensors.schemes import integer


def weight_of(one: Held, coded: Coded, linear: LinearScheme, together: Sequence[Held] = ()) -> Operand:
    """The weight [N, K] whose input is quantized too."""
    source, how, scheme = one.checkpoint, coded.how, coded.how.scheme
    q = codes_of(one, coded, together)
    offsets = how.offsets(source, coded.place, coded.shape, 0, coded.shape[0])
    if offsets is not None:  # zero points that are no codes
        added = np.ascontiguousarray(spread(offsets, scheme.inner.tile, coded.shape))
        return Operand(decoded(q) + torch.from_numpy(added))
    return operand_of(q, linear.input is not None and integer(linear.input))


def codes_of(one: Held, coded: Coded, together: Sequence[Held] = ()) -> QTensor:
    """The weight [N, K] as codes and scales, as an engine has loaded it."""
    rows, outer, _ = loaded(one, coded, together)
    return _assembled(coded, rows, outer)


def rescaled(one: Held, coded: Coded, together: Sequence[Held]) -> torch.Tensor | None:
    """The weight [N, K] in float32 where an engine keeps another outer scale than the file's, else None."""
    rows, outer, other = loaded(one, coded, together)
    return decoded(_assembled(coded, rows, outer)) if other else None


def _assembled(coded: Coded, rows: Rows, outer: float | None) -> QTensor:
    scheme, codes = coded.how.scheme, unpack(rows.packed, coded.how.packing, coded.shape[1])
    scales: tuple[NDArray[Any], ...] = (rows.scales,)
    if len(scheme.scales) == 2:
        scales = (rows.scales, np.full((1, 1), outer, np.float32))
    return QTensor(scheme, codes, scales, rows.zero)


def inputs_of(one: Held, coded: Coded, linear: LinearScheme, alike: Sequence[Held] = ()) -> Inputs:
    """How the input of this weight is quantized. Raises UsageError where a static scale is missing."""
    assert linear.input is not None
    order, factors = one.columns()
    inputs = Inputs(
        as_engine(linear.input),
        order=None if order is None else torch.from_numpy(order),
        factors=None if factors is None else torch.from_numpy(factors.astype(np.float32).reshape(-1)),
    )
    if linear.dynamic:
        return inputs
    source, how = one.checkpoint, coded.how
    scale, zero = static_input(one, coded, alike), 0
    if how.part("input_zero") is not None:
        zero = int(how.static(source, coded.place, coded.shape, "input_zero").reshape(-1)[0])
    return replace(inputs, static=scale, zero=zero)
