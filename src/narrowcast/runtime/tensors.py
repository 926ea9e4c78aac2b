"""One tensor in memory, quantized by the fastest backend that computes what the definition does.

Small tensors go through the numpy definition, which needs no compiler: below some 10^6 elements it is done
before compiled kernels are loaded. Every backend gives the same bits, so the choice is one of time alone; where
a large tensor has to go through the definition, a warning says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.kernels import choose
from narrowcast.kernels.reference import quantize as reference
from narrowcast.numbers.formats import FP32, Format
from narrowcast.tensors.packing import BYTES
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import check_finite, outer_scale
from narrowcast.tensors.schemes import Scheme

F32 = NDArray[np.float32]
LARGE = 1 << 20  # elements


def quantize(x: F32, scheme: Scheme, source: Format = FP32) -> QTensor:
    """Float32 x [..., N, K] under ``scheme``; ``source`` is the dtype that x was widened from.

    Raises NonFiniteError for NaN and infinity, UsageError for what is no matrix.
    """
    if x.size < LARGE or x.ndim < 2:
        return reference.quantize(x, scheme, source=source)
    choice = choose(scheme, FP32, BYTES)
    if choice.reason:
        warnings.warn(
            f"{scheme.name} runs on the numpy definition: {choice.reason}", RuntimeWarning, stacklevel=4
        )
        return reference.quantize(x, scheme, source=source)
    check_finite(x)
    *lead, n, k = x.shape
    parts, outers = [], []
    for matrix in np.ascontiguousarray(x).reshape(-1, n, k):
        outer = None
        if len(scheme.scales) == 2:
            amax = np.full((1, 1), choice.backend.scan(matrix, FP32).amax, np.float32)
            outers.append(outer_scale(amax, scheme, source))
            outer = float(outers[-1][0, 0])
        parts.append(choice.backend.quantize(matrix, FP32, scheme, BYTES, outer))
    scales = [_stacked([part.scales for part in parts], lead)]
    if outers:
        scales.append(_stacked(outers, lead))
    zero = [part.zero for part in parts if part.zero is not None]
    codes = _stacked([part.packed for part in parts], lead)
    return QTensor(scheme, codes, tuple(scales), _stacked(zero, lead) if zero else None)


def _stacked(parts: Sequence[NDArray[Any]], lead: Sequence[int]) -> NDArray[Any]:
    """Matrices under their leading axes again."""
    stacked = np.stack(parts) if len(parts) > 1 else parts[0][None]
    return stacked.reshape(*lead, *stacked.shape[1:])
