"""auto-round: one config, and the tensors of whichever layout its ``packing_format`` names.

    auto_round:auto_gptq        GPTQ's words, zero points less one                  symmetric 2, 3, 4, 8 bits
    auto_round                  GPTQ's words, zero points as they are               asymmetric 2, 3, 8 bits
    auto_round:auto_awq         AWQ's words                                         asymmetric 4 bits
    auto_round:fp8              weight F8_E4M3 + weight_scale, or weight_scale_inv for blocks
    auto_round:llm_compressor   MXFP4, MXFP8 and NVFP4 as compressed-tensors lays them

The right column is what is written for integers: vLLM loads asymmetric weights from AWQ's words only, and zero points
less one have no zero. FP8 scales are in the model's dtype, which its readers give them anyway; a scale that was fp32
stays fp32. What differs from the main settings is in ``extra_config``, by name or pattern, where 16 bits mean plain.

Source: auto-round 0.16.1 (export/export_to_autoround), vLLM 0.32 (quantization/inc). Left out: 5 to 7 bits, MXINT4,
NVFP4 under E5M3 scales; a static scale of W4A8's inputs, which is named and stays behind.
"""

from __future__ import annotations

from collections.abc import Mapping

from narrowcast.containers.auto_round.config import NAME
from narrowcast.containers.spelling import Part, Spelling, code_part, scale_part, value_part
from narrowcast.containers.words import awq_parts, gptq_parts, words_packing
from narrowcast.errors import UsageError
from narrowcast.numbers.formats import BF16, E2M1, E4M3FN, E8M0, FP16, FP32, Format
from narrowcast.tensors.packing import BYTES, packing
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, integer
from narrowcast.tensors.words import BITS

GPTQ, PLAIN_GPTQ, AWQ = "auto_round:auto_gptq", "auto_round", "auto_round:auto_awq"
FP8, CT = "auto_round:fp8", "auto_round:llm_compressor"
FLOATS: Mapping[Format, str] = {FP32: "F32", BF16: "BF16", FP16: "F16"}


def spelling(linear: LinearScheme, source: Format) -> Spelling:
    """The way this container writes ``linear`` for a weight of the source dtype; UsageError when it has none."""
    weight, bits, tile = linear.weight, linear.weight.element.bits, linear.weight.inner.tile
    if integer(weight) and bits in BITS and tile[0] == 1 and linear.input is None:
        stored = weight.with_scale_format(FP16)
        if weight.zero is None:
            return integers(GPTQ, stored, 1)
        return integers(AWQ if bits == 4 else PLAIN_GPTQ, stored, 2)
    inputs = linear.input
    if weight.element is E4M3FN and len(weight.scales) == 1 and weight.inner.format in FLOATS:
        block = tile[0] > 1 and tile[1] > 0
        if (block or tile in ((0, 0), (1, 0))) and (inputs is None or inputs.element is E4M3FN):
            kept = source if source in FLOATS else BF16
            return fp8(weight.with_scale_format(kept), linear)
    if (
        weight.inner.format in (E8M0, E4M3FN)
        and _block_floats(weight)
        and (inputs is None or _block_floats(inputs))
    ):
        return blocks(weight, linear)
    raise UsageError(
        f"{NAME} has no spelling for {weight.name}" + (f" with {inputs.name} inputs" if inputs is not None else ""),
        wanted="weight-only integers, fp8 per tensor, channel or block, mxfp4, mxfp8 or nvfp4",
        remedy="choose another preset, such as w4a16, or another container",
    )  # fmt: skip


def _block_floats(scheme: Scheme) -> bool:
    mx = scheme.inner.format is E8M0 and scheme.inner.tile == (1, 32) and scheme.element in (E2M1, E4M3FN)
    return mx or (scheme.element is E2M1 and scheme.inner.tile == (1, 16) and len(scheme.scales) == 2)


def integers(format: str, scheme: Scheme, version: int) -> Spelling:
    if format == AWQ:
        return Spelling(
            NAME, AWQ, scheme, packing(4, flip=scheme.element.signed), awq_parts(scheme),
            (8, scheme.group or 2),
        )  # fmt: skip
    return Spelling(
        NAME, format, scheme, words_packing(scheme), gptq_parts(scheme, version, g_idx=False), (32, 32),
    )  # fmt: skip


def fp8(scheme: Scheme, linear: LinearScheme, shape: tuple[int, ...] | None = None) -> Spelling:
    """E4M3 under float scales; ``shape`` is that of a stored weight_scale."""
    dtype = FLOATS[scheme.inner.format]
    rows, cols = scheme.inner.tile
    if rows > 1:
        scale = scale_part(".weight_scale_inv", dtype, scheme)
    elif (rows, cols) == (0, 0):
        scale = value_part(".weight_scale", "outer", (1,) if shape is None else shape, dtype=dtype)
    else:
        column = shape is not None and len(shape) == 2
        scale = Part(".weight_scale", "scales", dtype, lambda n, k: (n, 1) if column else (n,))
    parts = [code_part(".weight", "F8_E4M3", BYTES), scale]
    if linear.calibrated:
        parts.append(value_part(".input_scale", "input", dtype=dtype))
    return Spelling(NAME, FP8, scheme, BYTES, tuple(parts))


def blocks(scheme: Scheme, linear: LinearScheme) -> Spelling:
    """MX formats and NVFP4, as compressed-tensors lays them."""
    bits = scheme.element.bits
    how = BYTES if bits == 8 else packing(bits)
    parts = [code_part(".weight", "F8_E4M3", how) if bits == 8 else code_part(".weight_packed", "U8", how)]
    parts.append(scale_part(".weight_scale", "F8_E4M3" if len(scheme.scales) == 2 else "U8", scheme))
    if len(scheme.scales) == 2:
        parts.append(value_part(".weight_global_scale", "outer", divides=not scheme.scales[1].divides))
    if linear.calibrated:
        parts.append(value_part(".input_global_scale", "input", divides=True))
    return Spelling(NAME, CT, scheme, how, tuple(parts), (1, scheme.group))
