"""The product of two matrices as engines form it: exact products, sums in fp32, one narrowing cast at the end.

    y[m, n] = narrow( (Σ_k x[m, k] · w[n, k]) · s_x[m] · s_w[n] + b[n] )

An ``Operand`` is a matrix of float32 values and what is left to multiply. Where one scale is shared by a whole row (a
token, an output channel, a tensor), the matrix holds decoded codes and the scale folds out of the sum: that is what a
scaled GEMM does. Where scales change along k, the matrix holds codes times scales, rounded to fp32, as
``QTensor.dequantize`` gives them.

The sum runs in BLAS, whose order is its own: it lies within ``kernels.reference.gemm.bound`` of the exact sum. Where
both matrices hold numbers of eight significant bits or fewer (bf16, FP8, FP6, FP4, INT8 codes, MX and NVFP4 products),
bf16 loses none of them, and a machine with bf16 matrix units computes the same products with them, summed in fp32
(oneDNN's ``fp32_precision = "bf16"``; units that flush subnormals add 2^-126 a term to the bound). Elsewhere this
changes nothing.

Left out: the partial sums of tensor cores; ``kernels.reference.accumulate`` has them, too slow for whole models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Operand:
    """``matrix`` float32 [rows, K]; ``scale`` float32 [rows, 1] or [1, 1], what every element of a row is still to be
    multiplied by (None: nothing); ``narrow`` says that bf16 holds every element."""

    matrix: torch.Tensor
    scale: torch.Tensor | None = None
    narrow: bool = False


def product(x: Operand, w: Operand) -> torch.Tensor:
    """x · wᵀ as float32 [M, N], scales folded in; nothing is narrowed yet."""
    if x.narrow and w.narrow:
        backend = torch.backends.mkldnn.matmul
        before = backend.fp32_precision
        backend.fp32_precision = "bf16"
        try:
            sums = x.matrix @ w.matrix.T
        finally:
            backend.fp32_precision = before
    else:
        sums = x.matrix @ w.matrix.T
    if x.scale is not None:
        sums = sums * x.scale
    return sums if w.scale is None else sums * w.scale.T
