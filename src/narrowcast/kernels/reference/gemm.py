"""The definition of a linear layer on quantized operands, in numpy: y = x · wᵀ.

    fp32    acc ← fl(acc + fl(x̂[m, k] · ŵ[n, k]))                      for k = 0, 1, ..., from acc = +0
    int32   acc ← fl(acc + fl(fl(Σ_k cx[m, k] · cw[n, k]) · fl(sx · sw)))  stretch by stretch of k

x̂ and ŵ are decoded operands: element times scale, rounded once (QTensor.dequantize). fl rounds to fp32, nearest
even; products and sums round apart, never fused. With an int32 accumulator (LinearScheme.accumulate) integer
codes are summed exactly, and the scales come in once per stretch of k on which both are constant: once for
per-channel and per-token scales, once per group for grouped ones.

No GPU adds in this order. What any order may give is told by ``bound``: with n roundings on the way of every
term, |y - Σ x̂·ŵ| ≤ γ_n · Σ |x̂|·|ŵ|, γ_n = n·u / (1 - n·u), u = 2^-24 (Higham, Accuracy and Stability of
Numerical Algorithms, section 3.1). The sum of the k-th products in any order, fused or not, has n ≤ K.

Left out: accumulators narrower than fp32, and the partial sums of tensor cores, which no vendor specifies.
"""

from __future__ import annotations

from itertools import pairwise
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import NonFiniteError, RangeError, UsageError
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import element_divisor, spread
from narrowcast.tensors.schemes import Scheme, integer

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
ACCUMULATORS = ("fp32", "int32")
UNIT = 2.0**-24  # of fp32
LARGEST_INT32 = 2**31 - 1


def gemm(x: F32 | QTensor, w: F32 | QTensor, accumulate: str = "fp32") -> F32:
    """Product of x [M, K] and w [N, K] as float32 [M, N], each wide (float32) or quantized.

    Raises UsageError where the shapes do not fit or codes that are no integers meet an int32 accumulator, and
    RangeError where an int32 sum overflows.
    """
    if len(x.shape) != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[1]:
        raise UsageError("these do not multiply", got=f"{x.shape} and {w.shape}", wanted="[M, K] and [N, K]")
    if accumulate == "int32":
        return _int32(_integers(x), _integers(w))
    if accumulate != "fp32":
        raise UsageError("unknown accumulator", got=accumulate, wanted=", ".join(ACCUMULATORS))
    wide_x, wide_w = decoded(x), decoded(w)
    acc = np.zeros((x.shape[0], w.shape[0]), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities behave as in IEEE 754
        for k in range(x.shape[1]):
            acc += wide_x[:, k, None] * wide_w[None, :, k]
    return acc


def decoded(operand: F32 | QTensor) -> F32:
    """The operand as float32 values."""
    return operand.dequantize() if isinstance(operand, QTensor) else operand


def sums_integers(scheme: Scheme) -> bool:
    """Whether the codes of a scheme are integers that an int32 accumulator sums."""
    return integer(scheme) and scheme.element.bias == 0 and scheme.zero is None


def _integers(operand: F32 | QTensor) -> QTensor:
    if isinstance(operand, QTensor) and sums_integers(operand.scheme):
        return operand
    got = operand.scheme.name if isinstance(operand, QTensor) else "a wide operand"
    raise UsageError("an int32 accumulator sums integer codes", got=got, wanted="int8 or int4, symmetric")


def _int32(x: QTensor, w: QTensor) -> F32:
    codes_x, codes_w = x.elements().astype(np.int64), w.elements().astype(np.int64)
    scale_x, scale_w = _scale_everywhere(x), _scale_everywhere(w)
    acc = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for first, end in pairwise(stretches(x, w)):
        partial = codes_x[:, first:end] @ codes_w[:, first:end].T
        if (abs(partial) > LARGEST_INT32).any():
            worst = int(abs(partial).max())
            raise RangeError(
                "a sum of products overflows int32", got=worst, wanted=f"{LARGEST_INT32} at most"
            )
        acc += partial.astype(np.float32) * (scale_x[:, first, None] * scale_w[None, :, first])
    return acc


def stretches(x: QTensor, w: QTensor) -> list[int]:
    """Where along k a scale of either operand changes: 0, every first column of a tile, K."""
    k = x.shape[1]
    return sorted({*range(0, k, x.scheme.group or k), *range(0, k, w.scheme.group or k), k})


def _scale_everywhere(q: QTensor) -> F32:
    outer = q.scale_values(1) if len(q.scales) == 2 else None
    scale = spread(element_divisor(q.scales[0], q.scheme, outer), q.scheme.inner.tile, q.shape)
    whole: F32 = np.broadcast_to(scale, q.shape)
    return whole


def oracle(x: F32, w: F32) -> F64:
    """Σ_k x[m, k] · w[n, k] of float32 operands, exact, rounded once to float64: no order, no machine is in it.

    A product of two float32 is exact in float64, and ``math.fsum`` rounds the exact sum. NonFiniteError where an
    operand is not finite.
    """
    for name, operand in (("x", x), ("w", w)):
        if not np.isfinite(operand).all():
            raise NonFiniteError("a sum without order needs finite operands", where=name)
    wide: NDArray[Any] = w.astype(np.float64)
    return np.array([[fsum(products) for products in (row * wide).tolist()] for row in x.astype(np.float64)])


def roundings(x: F32 | QTensor, w: F32 | QTensor, accumulate: str = "fp32") -> int:
    """n of ``bound``: how often a term is rounded between the oracle's value and this definition's.

    fp32: its product and K - 1 sums (the first adds to zero). int32: the sum's conversion, the product of the
    scales, their product with the sum, S - 1 sums of S stretches, and the decoding of both operands.
    """
    if accumulate == "int32" and isinstance(x, QTensor) and isinstance(w, QTensor):
        return len(stretches(x, w)) - 1 + 4
    return int(x.shape[1])


def bound(x: F32, w: F32, n: int) -> F64:
    """γ_n · Σ |x|·|w| + K · 2^-149 as float64 [M, N]: how far n roundings may lead from ``oracle(x, w)``.

    The last term is underflow: a product below 2^-126 errs by 2^-150 at most, and later sums less than double
    it; under an int32 accumulator the products of scales must themselves be at least 2^-126. The one rounding of
    the oracle hides in γ_n: a rounding errs by u / (1 + u), not by u.
    """
    if n * UNIT >= 0.5:
        raise UsageError("too many roundings for the bound", got=n, wanted=f"less than {0.5 / UNIT:.0f}")
    gamma = n * UNIT / (1 - n * UNIT)
    allowed: F64 = gamma * oracle(np.abs(x), np.abs(w)) + x.shape[1] * 2.0**-149
    return allowed
