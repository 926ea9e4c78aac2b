"""The definition of dequantizing, in numpy.

Exact decode: the fp32 product of all scales, times the element in fp32, one rounding to the output dtype.
Readers round in other places; ``as="compressed-tensors"`` decodes as that library does, for cross-checks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.numbers.codec import decode, round_values, to_bf16
from narrowcast.numbers.formats import BF16, E8M0, FP16, FP32, Format
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import element_divisor, load_scale, spread

F32 = NDArray[np.float32]
READERS = ("exact", "compressed-tensors")


def dequantize(q: QTensor, out: Format = FP32, as_: str = "exact") -> NDArray[Any]:
    """Decode to ``out``: float32 values, float16, or bf16 as uint16 bit patterns; the shape of the codes."""
    if as_ not in READERS:
        raise UsageError("unknown reader's arithmetic", got=as_, wanted=", ".join(READERS))
    values = _exact(q) if as_ == "exact" else _compressed_tensors(q)
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


def _elements(q: QTensor) -> F32:
    """Decoded elements with the zero point taken off (exact: small integers)."""
    elements = decode(q.codes, q.scheme.element)
    if q.zero is None:
        return elements
    assert q.scheme.zero is not None
    zero = decode(q.zero, q.scheme.zero)
    return elements - spread(zero, q.scheme.inner.tile, q.shape)


def _exact(q: QTensor) -> F32:
    outer = q.scale_values(1) if len(q.scales) == 2 else None
    scale = element_divisor(q.scales[0], q.scheme, outer)
    return _elements(q) * spread(scale, q.scheme.inner.tile, q.shape)


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
        return _elements(q) * spread(inner / divisor, level.tile, q.shape)
    product = _elements(q) * spread(inner, level.tile, q.shape)
    if level.format in (BF16, FP16, E8M0):
        product = round_values(product, BF16 if level.format is E8M0 else level.format).astype(np.float32)
    return product
