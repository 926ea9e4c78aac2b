"""How compressed-tensors spells a quantized linear layer; vLLM, SGLang and transformers read it.

A module ``m`` becomes tensors ``m.<suffix>``, by the format of its config group:

    format                  codes                          scale (dtype)          more
    float-quantized         weight F8_E4M3 [N, K]          F32 per tile
    naive-quantized         the same, weight-only
    int-quantized           weight I8 [N, K]               F32 per tile
    pack-quantized          weight_packed I32 [N, ⌈Kb/32⌉]  source dtype [N, K/g]  weight_shape, weight_zero_point
    nvfp4-pack-quantized    weight_packed U8 [N, K/2]      F8_E4M3 [N, K/16]      weight_global_scale F32 [1]
    mxfp4-pack-quantized    weight_packed U8 [N, K/2]      U8 [N, K/32]
    mxfp6-pack-quantized    weight_packed U8 [N, 3K/4]     U8 [N, K/32]
    mxfp8-quantized         weight F8_E4M3 [N, K]          U8 [N, K/32]

The global scale is a divisor: 1 / (our outer scale), exact because ours is a power of two. One that is not is read as
it is, in a scheme whose outer scale divides, so that decoding is s / d · e as in the library. INT4 weights with
8-bit inputs are written as pack-quantized explicitly, since the engines that run W4A8 load packed words while
the library's own inference would pick int-quantized, which holds a code of any width in an int8. A static input
scale is ``input_scale`` [1], with ``input_zero_point`` I8 [1] for asymmetric inputs; for NVFP4 ``input_global_scale``
[1], a divisor like the weight's. Files of old versions may hold ``weight_g_idx`` [K], the group of each column.

Source: compressed-tensors 0.20 (quantization/quant_args.py, compressors/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.compressed_tensors.config import NAME
from narrowcast.containers.spelling import Array, Part, Spelling, code_part, scale_part, value_part
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.numbers.formats import BF16, E2M1, E2M3, E4M3FN, E8M0, FP16, FP32, INT8, Format
from narrowcast.tensors.packing import BYTES, Packing, pack, packing, unpack
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, integer

SCALE_DTYPES: Mapping[str, str] = {
    "fp32": "F32",
    "bf16": "BF16",
    "fp16": "F16",
    "e8m0": "U8",
    "e4m3fn": "F8_E4M3",
}
FLOATS = (BF16, FP16, FP32)


def spelling(linear: LinearScheme, source: Format) -> Spelling:
    """The way this container writes ``linear`` for a weight of the source dtype; UsageError when it has none."""
    weight = linear.weight
    element, scale = weight.element, weight.inner.format
    if scale is E8M0 and weight.group == 32 and weight.inner.tile[0] == 1:
        if element is E2M1:
            return spell("mxfp4-pack-quantized", weight, linear)
        if element is E2M3:
            return spell("mxfp6-pack-quantized", weight, linear)
        if element is E4M3FN:
            return spell("mxfp8-quantized", weight, linear)
    if element is E2M1 and scale is E4M3FN and weight.inner.tile == (1, 16) and len(weight.scales) == 2:
        return spell("nvfp4-pack-quantized", weight, linear)
    if element is E4M3FN and scale is E8M0 is source and weight.inner.tile[0] != 1:
        # Blocks that are powers of two already: the same values in float scales, which is what engines load here.
        weight, scale = weight.with_scale_format(FP32), FP32
    if element is E4M3FN and scale in FLOATS and len(weight.scales) == 1:
        return spell("float-quantized" if linear.input else "naive-quantized", weight, linear)
    if element is INT8 and linear.input is not None and scale in FLOATS and weight.zero is None:
        return spell("int-quantized", weight, linear)
    if integer(weight) and scale in FLOATS and element.bias == 0 and weight.inner.tile[0] == 1:
        kept = scale in FLOATS and source is scale
        stored = weight if kept else weight.with_scale_format(source if source in FLOATS else BF16)
        return spell("pack-quantized", stored, linear)
    raise UsageError(
        f"{NAME} has no spelling for {weight.name}",
        wanted="fp8, int8, int4, nvfp4, mxfp4, mxfp6_e2m3 or mxfp8_e4m3 weights",
        remedy="choose another preset; `narrowcast schemes` says who loads what",
    )


def spell(
    format: str, scheme: Scheme, linear: LinearScheme, *, input_dtype: str = "F32", order: Array | None = None
) -> Spelling:
    """The parts of one format; ``order`` [K] is that of shuffled columns, the model's column of each that is read.

    Shuffled columns, and integers that each fill an int8 without being INT8, are read and never written.
    """
    if order is None:
        return _in_order(format, scheme, linear, input_dtype)
    return _spell(format, scheme, linear, input_dtype, order)


@cache  # thousands of experts are spelled alike
def _in_order(format: str, scheme: Scheme, linear: LinearScheme, input_dtype: str) -> Spelling:
    return _spell(format, scheme, linear, input_dtype, None)


def _spell(
    format: str, scheme: Scheme, linear: LinearScheme, input_dtype: str, order: Array | None
) -> Spelling:
    bits = scheme.element.bits
    if format == "pack-quantized":
        how = packing(bits, flip=scheme.element.signed, word=32)
    else:
        how = BYTES if bits == 8 or format == "int-quantized" else packing(bits)
    parts = [_codes(format, how, scheme, order), *_scales(scheme)]
    if format == "pack-quantized":
        parts.append(Part(".weight_shape", "shape", "I64", lambda n, k: (2,), per=0))
    if order is not None:
        parts.append(_order_part())
    if scheme.zero is not None:
        parts.append(_zero_bytes(scheme) if format == "int-quantized" else zero_part(scheme))
    if linear.calibrated:
        two = linear.input is not None and len(linear.input.scales) == 2
        suffix = ".input_global_scale" if two else ".input_scale"
        parts.append(value_part(suffix, "input", dtype=input_dtype, divides=two))
        if linear.input is not None and linear.input.zero is not None:
            parts.append(Part(".input_zero_point", "input_zero", "I8", lambda n, k: (1,), per=0))
    group = scheme.group if scheme.inner.tile[0] == 1 else 0
    width = group or (1 if format == "pack-quantized" else 8 // int(np.gcd(8, how.bits)))
    return Spelling(NAME, format, scheme, how, tuple(parts), (1, width))


def _codes(format: str, how: Packing, scheme: Scheme, order: Array | None) -> Part:
    if format == "pack-quantized":
        words = code_part(".weight_packed", "I32", how)
        if order is None:
            return words
        return replace(
            words, decode=lambda stored, count: _shuffled(stored[:count].view(np.uint8), how, order)
        )
    if format == "int-quantized" and scheme.element is not INT8:
        bits, middle = scheme.element.bits, 0 if scheme.element.signed else 1 << (scheme.element.bits - 1)
        return replace(
            code_part(".weight", "I8", how),
            decode=lambda stored, count: _as_codes(stored[:count], bits, middle),
        )
    if format == "int-quantized":
        return code_part(".weight", "I8", how)
    if how is BYTES:
        return code_part(".weight", "F8_E4M3", how)
    return code_part(".weight_packed", "U8", how)


def _shuffled(rows: Array, how: Packing, order: Array) -> Array:
    return pack(unpack(rows, how, len(order))[:, order], how)


def _as_codes(stored: Array, bits: int, middle: int) -> NDArray[np.uint8]:
    """Integers that each fill an int8 as codes of their own width, unsigned where zero points go with them."""
    low = -(1 << (bits - 1))
    if stored.size and not (low <= int(stored.min()) and int(stored.max()) < -low):
        raise CheckpointError(
            "a weight does not fit its width", got=f"values from {stored.min()} to {stored.max()}",
            wanted=f"{low} to {-low - 1} for {bits} bits",
        )  # fmt: skip
    return (stored.astype(np.int16) + middle).astype(np.uint8) & np.uint8((1 << bits) - 1)


def _order_part() -> Part:
    """g_idx, the group of each column, as the columns group by group."""
    return Part(
        ".weight_g_idx", "order", "I32", lambda n, k: (k,), per=0,
        decode=lambda g_idx, count: np.argsort(g_idx, kind="stable"),
    )  # fmt: skip


def _scales(scheme: Scheme) -> list[Part]:
    dtype = SCALE_DTYPES[scheme.inner.format.name]
    if scheme.inner.tile == (0, 0):
        return [value_part(".weight_scale", "outer", dtype=dtype)]
    parts = [scale_part(".weight_scale", dtype, scheme)]
    if len(scheme.scales) == 2:
        parts.append(value_part(".weight_global_scale", "outer", divides=not scheme.scales[1].divides))
    return parts


def _zero_bytes(scheme: Scheme) -> Part:
    """Zero points [N, groups] that each fill an int8."""
    bits = scheme.element.bits
    middle = 1 << (bits - 1)
    return replace(
        scale_part(".weight_zero_point", "I8", scheme), piece="zero",
        decode=lambda stored, count: _as_codes(stored[:count], bits, middle),
    )  # fmt: skip


def zero_part(scheme: Scheme) -> Part:
    """Zero points [N, groups] packed along N, missing tail rows as zero bits: int32 [⌈N·b/32⌉, groups]."""
    assert scheme.zero is not None
    bits = scheme.zero.bits
    rows, words = (32 // bits, 1) if 32 % bits == 0 else (32, bits)
    return Part(
        ".weight_zero_point", "zero", "I32",
        lambda n, k: (-(-n * bits // 32), -(-k // scheme.group) if scheme.group else 1),
        per=rows, makes=words,
        encode=lambda zero: pack_zero(zero, bits), decode=lambda stored, n: unpack_zero(stored, bits, n),
    )  # fmt: skip


def pack_zero(zero: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Zero points [n, groups] packed along n, missing tail rows as zero bits: int32 [⌈n·bits/32⌉, groups]."""
    words = pack(np.ascontiguousarray(zero.T), packing(bits, word=32)).view("<i4")
    return np.ascontiguousarray(words.T)


def unpack_zero(words: NDArray[np.int32], bits: int, n: int) -> NDArray[np.uint8]:
    """The inverse: int32 [words, groups] to zero-point codes [n, groups]."""
    packed = np.ascontiguousarray(words.T).view(np.uint8)
    return np.ascontiguousarray(unpack(packed, packing(bits, word=32), n).T)
