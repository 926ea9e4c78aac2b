"""A quantized linear layer as a checkpoint stores it: its weight as an operand, and how its input is quantized.

    weight_of(one, linear)   codes and scales as they are stored, in the stored order of columns
    inputs_of(one, linear)   the input's scheme, its static scale and zero point, and what comes before it: the order of
                             columns, and a factor for each (AWQ's: x · factor is what the quantizer sees)

Left out: a scale that an engine's own eight-bit copy of a decoded weight has (``recast``), and what engines do to the
static scales of fused layers that differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowcast.jobs.coded import Coded
from narrowcast.jobs.matching import Held
from narrowcast.runtime.inputs import Inputs, operand_of
from narrowcast.runtime.product import Operand
from narrowcast.runtime.quantizing import decoded
from narrowcast.tensors.packing import unpack
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import spread
from narrowcast.tensors.schemes import integer


def weight_of(one: Held, coded: Coded, linear: LinearScheme) -> Operand:
    """The weight [N, K] whose input is quantized too."""
    source, how, scheme = one.checkpoint, coded.how, coded.how.scheme
    rows = coded.rows(source, 0, coded.shape[0])
    codes = unpack(rows.packed, how.packing, coded.shape[1])
    scales: tuple[NDArray[Any], ...] = (rows.scales,)
    if len(scheme.scales) == 2:
        scales = (rows.scales, np.full((1, 1), coded.outer(source), np.float32))
    q = QTensor(scheme, codes, scales, rows.zero)
    offsets = how.offsets(source, coded.place, coded.shape, 0, coded.shape[0])
    if offsets is not None:  # zero points that are no codes
        added = np.ascontiguousarray(spread(offsets, scheme.inner.tile, coded.shape))
        return Operand(decoded(q) + torch.from_numpy(added))
    return operand_of(q, linear.input is not None and integer(linear.input))


def inputs_of(one: Held, coded: Coded, linear: LinearScheme) -> Inputs:
    """How the input of this weight is quantized. Raises UsageError where a static scale is missing."""
    assert linear.input is not None
    order, factors = one.columns()
    inputs = Inputs(
        linear.input,
        order=None if order is None else torch.from_numpy(order),
        factors=None if factors is None else torch.from_numpy(factors.astype(np.float32).reshape(-1)),
    )
    if linear.dynamic:
        return inputs
    source, how = one.checkpoint, coded.how
    scale = float(how.static(source, coded.place, coded.shape, "input").reshape(-1)[0])
    zero = 0
    if how.part("input_zero") is not None:
        zero = int(how.static(source, coded.place, coded.shape, "input_zero").reshape(-1)[0])
    return replace(inputs, static=scale, zero=zero)
