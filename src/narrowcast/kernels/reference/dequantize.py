"""The definition of dequantizing, in numpy.

Exact decode: the fp32 product of all scales, times the element in fp32, one rounding to the output dtype.
Readers round in other places; ``as="compressed-tensors"`` decodes as that library does, for cross-checks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.numbers.codec import round_values, to_bf16
from narrowcast.numbers.formats import BF16, E8M0, FP16, FP32, Format
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import load_scale, spread

F32 = NDArray[np.float32]
READERS = ("exact", "compressed-tensors")


def dequantize(q: QTensor, out: Format = FP32, as_: str = "exact") -> NDArray[Any]:
    """Decode to ``out``: float32 values, float16, or bf16 as uint16 bit patterns; the shape of the codes."""
    if as_ not in READERS:
        raise UsageError("unknown reader's arithmetic", got=as_, wanted=", ".join(READERS))
    values = q.dequantize() if as_ == "exact" else _compressed_tensors(q)
    return narrow(values, out)


def narrow(values: F32, out: Format) -> NDArray[Any]:
    """One rounding from float32 to the output dtype."""
    if out is FP32:
        return values
    if out is BF16:
        return to_bf16(values)
    if out is FP16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    raise UsageError("cannot dequantize to this dtype", got=out.name, wanted="fp32, bf16 or fp16")


def _compressed_tensors(q: QTensor) -> F32:
    """compressed-tensors 0.20: elements and inner scales in the scale's stored float dtype, bf16 for MX and NVFP4.

    NVFP4: bf16(scale) / global in fp32, times the element in bf16 promoted to fp32. A 16-bit scale makes the
    product round to 16 bits; an fp32 scale keeps it in fp32.
    """
    level = q.scheme.inner
    inner = load_scale(q.scales[0], level.format)
    if len(q.scales) == 2:
        outer = q.scale_values(1)
        divisor = outer if q.scheme.scales[1].divides else np.float32(1) / outer
        inner = inner / divisor
    product: F32 = q.elements() * spread(inner, level.tile, q.shape)
    if len(q.scales) == 1 and level.format in (BF16, FP16, E8M0):
        product = round_values(product, BF16 if level.format is E8M0 else level.format).astype(np.float32)
    return product
