"""vLLM 0.32: which containers' layers it takes, by which family of kernels, and its refusals in its own words.

A checkpoint's scheme picks a class, the class a family of kernels, and the GPU the first of the family that runs:

    compressed-tensors FP8      W8A8 from compute capability 8.9, below that the weight-only class
    compressed-tensors MXFP4/8  one class, which quantizes inputs where a kernel can, whatever the checkpoint says
    NVFP4, native FP8           one family, whose Marlin kernel is the weight-only fallback
    GPTQ, AWQ                   checked against what Marlin takes before any kernel is chosen

Nothing here was run on a GPU: it is read from the 0.32.0 wheel (model_executor/layers/quantization), and for compiled
gates from the source of its extensions. The CPU's rows agree with what the CPU build did with files of every kind.
"""

from __future__ import annotations

from dataclasses import replace

from narrowcast.hardware.engines import vllm_experts as moe
from narrowcast.hardware.engines import vllm_kernels as k
from narrowcast.hardware.engines.row import (
    AMD,
    ANY,
    CDNA3,
    CPU,
    CUDA,
    ON_CPU,
    ROCM,
    Engine,
    Reach,
    Row,
    row,
    sm,
)

_CT, _MO, _QUARK, _GPTQ, _AWQ, _AR, _FP8 = (
    "compressed-tensors", "modelopt", "quark", "gptq", "awq", "auto-round", "fp8",
)  # fmt: skip
_SOURCE = "vLLM 0.32.0, model_executor/layers/quantization"
_TENSOR, _CHANNEL, _BLOCK = "fp8_tensor", "fp8_channel", "fp8_block128"
_TOKEN = ("fp8_token", "fp8_tensor", "fp8_static")
_NO_CT = "NotImplementedError: No compressed-tensors compatible scheme was found"
_NO_QUARK = "NotImplementedError: No quark compatible scheme was found"
_NO_MODELOPT = (
    "ModelOpt currently only supports: ['FP8', 'FP8_PER_CHANNEL_PER_TOKEN', 'FP8_PB_WO', 'NVFP4', 'W4A16_NVFP4', "
    "'MXFP8', 'MIXED_PRECISION'] quantizations in vLLM"
)
_INT8_REFUSED = (
    "Int8 not supported on SM100 and later: the CUTLASS kernel is chosen and raises at the first forward pass "
    '("Use FP8 quantization instead, or run on older arch (SM < 100)")'
)
_INT8_REMEDY = (
    "an FP8 preset, or VLLM_DISABLED_KERNELS=CutlassInt8ScaledMMLinearKernel, which leaves the Triton kernel"
)
_CPU_TENSOR = (
    "the CPU build has no static_scaled_fp8_quant, with which scales per tensor of fused layers are made one"
)
_BLOCKS_ONLY = "Marlin is chosen before Triton, and its FP8 kernels take whole rows or groups of 128 only"
_GROUPS = "Marlin does not support this group_size. Only group_sizes = [-1, 32, 64, 128] are supported"


def _experts() -> tuple[Row, ...]:
    """Routed experts, in the containers that hold them one by one."""
    held = (_CT, _MO, _QUARK, _FP8, _AR)
    fp8, wide = (_TENSOR, _CHANNEL, _BLOCK, "fp8_block"), ("wide",)
    integers = ("int4", "uint4", "int8_group", "int8_channel", "uint8", "int_odd", "uint_odd")
    rows = [
        row(held, fp8, (*_TOKEN, "fp8_group"), family=moe.FP8),
        row(held, "nvfp4", "nvfp4", family=moe.NVFP4),
        row((_CT, _MO), "nvfp4", wide, family=moe.NVFP4_WEIGHT_ONLY),
        row(_CT, "mxfp4", ("mxfp4", "wide"), family=moe.CT_MXFP4),
        row((_QUARK, _AR), "mxfp4", ("mxfp4", "wide"), family=moe.MXFP4),
        row((_CT, _MO, _AR), "mxfp8", ("mxfp8", "wide"), family=moe.MXFP8),
        row((_CT, _QUARK), ("int8_channel", "int8_tensor"), ("int8_token", "int8_tensor"), family=moe.INT8),
        row((_CT, _GPTQ, _AWQ), integers, wide, family=moe.MIXED),
        row(_CT, "int4", "fp8_token", family=moe.W4A8_FP8),
    ]
    return tuple(replace(row, experts=True) for row in rows)


_CUT = (
    row(
        (_CT, _QUARK, _GPTQ, _AWQ, _AR), ("int4", "uint4", "int8_group", "uint8", "int_odd", "uint_odd"), (),
        cut=True, refusal="in_features per partition is not divisible by group_size",
        remedy="a group size that divides K, or scales per channel",
    ),
)  # fmt: skip

_COMPRESSED_TENSORS = (
    row(_CT, _TENSOR, _TOKEN, reach=ON_CPU, refusal=_CPU_TENSOR, remedy="fp8_dynamic, whose scales are per channel"),
    row(_CT, (_TENSOR, _CHANNEL), _TOKEN, family=k.FP8, reach=Reach(89, archs=ROCM + CPU)),
    row(
        _CT, (_TENSOR, _CHANNEL, _BLOCK), (*_TOKEN, "fp8_group"), family=k.FP8_WEIGHT_ONLY, reach=sm(75, 88),
        notes=("the W8A8 class asks for compute capability 8.9; the weight-only class is taken instead",),
    ),
    row(_CT, (_TENSOR, _CHANNEL, _BLOCK), "wide", family=k.FP8_WEIGHT_ONLY, reach=sm(75)),
    row(_CT, _BLOCK, "fp8_group", family=k.FP8_BLOCK, reach=Reach(89, archs=ROCM + CPU)),
    row(_CT, "fp8_block", "fp8_group", family=k.FP8_BLOCK, reach=AMD),
    row(
        _CT, "fp8_block", (), refusal=_BLOCKS_ONLY, remedy="blocks of 128x128",
    ),
    row(_CT, "int8_channel", ("int8_token", "int8_static"), family=k.INT8, reach=Reach(75, 99, ROCM + CPU)),
    row(_CT, "int8_tensor", ("int8_token", "int8_static"), family=k.INT8, reach=Reach(75, 99, ROCM + CPU)),
    row(
        _CT, ("int8_channel", "int8_tensor"), ("int8_token", "int8_static"), reach=sm(100), refusal=_INT8_REFUSED,
        remedy=_INT8_REMEDY,
    ),
    row(_CT, "int4", "fp8_token", family=k.W4A8_FP8, reach=sm(90, 90)),
    row(
        _CT, "int4", "fp8_token", refusal=f"{_NO_CT}: INT4 weights with FP8 inputs run on compute capability 9.0 only",
        remedy="Hopper, or w4a16, whose inputs stay wide",
    ),
    row(
        _CT, ("int4", "uint4", "int8_group", "int_odd", "uint_odd", "uint8"), "int8_token", family=k.W4A8_INT,
        reach=Reach(75, archs=ROCM + CPU),
    ),
    row(
        _CT, ("int4", "uint4", "int8_group", "int8_channel", "uint8", "int_odd", "uint_odd"), "wide", family=k.MIXED,
        reach=Reach(75, archs=ROCM + CPU), remedy="4 or 8 bits in groups of 32, 64 or 128, or per channel",
    ),
    row(_CT, "nvfp4", "nvfp4", family=k.NVFP4, reach=Reach(75, archs=ROCM)),
    row(
        _CT, "nvfp4", "wide", family=k.NVFP4_WEIGHT_ONLY, reach=Reach(75, archs=ROCM + CPU),
        failure="Forced NVFP4 kernel MarlinNvFp4LinearKernel is not supported: Marlin FP4 not available",
        remedy="NVIDIA, or the preset nvfp4, which ROCm emulates",
    ),
    row(
        _CT, "nvfp4", (), refusal="For NVFP4 weights, input quantization must also be NVFP4 format, None for NVFP4A16",
        remedy="nvfp4 or nvfp4a16", reach=CUDA,
    ),
    row(
        _CT, "mxfp4", ("fp8_token", "fp8_group"), family=k.MXFP4_FP8, reach=Reach(80, archs=ROCM),
        notes=("without humming no kernel takes FP8 inputs, and MXFP4 inputs are asked for instead, with a warning",),
    ),
    row(_CT, "mxfp4", ("mxfp4", "wide"), family=k.MXFP4_ALWAYS, reach=Reach(80, archs=ROCM)),
    row(_CT, "mxfp8", ("mxfp8", "wide"), family=k.MXFP8, reach=Reach(75, archs=ROCM)),
    row(
        _CT, ("mxfp6_e2m3", "mxfp6_e3m2"), (), refusal=f"{_NO_CT}: MXFP6 is read from Quark only",
        remedy="mxfp8 or mxfp4, or --to quark",
    ),
    row(_CT, (), (), refusal=_NO_CT, remedy="another preset; `narrowcast schemes` says who loads what"),
)  # fmt: skip

_MODELOPT = (
    row(
        _MO, (), (), formats=("NVFP4_AWQ", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "W4A8_AWQ"), refusal=_NO_MODELOPT,
        remedy="--to modelopt --preset nvfp4, or TensorRT-LLM",
    ),
    row(_MO, _TENSOR, "fp8_static", reach=ON_CPU, refusal=_CPU_TENSOR, remedy="fp8_dynamic"),
    row(_MO, (_TENSOR, _CHANNEL), ("fp8_static", "fp8_token"), family=k.FP8, reach=Reach(80, archs=ROCM + CPU)),
    row(_MO, _BLOCK, "fp8_group", family=k.FP8_BLOCK, reach=Reach(80, archs=ROCM + CPU)),
    row(_MO, "nvfp4", "nvfp4", family=k.NVFP4, reach=Reach(75, archs=ROCM)),
    row(
        _MO, "nvfp4", "wide", family=k.NVFP4_WEIGHT_ONLY, reach=Reach(75, archs=ROCM + CPU),
        failure="Forced NVFP4 kernel MarlinNvFp4LinearKernel is not supported: Marlin FP4 not available",
        remedy="NVIDIA, or the preset nvfp4, which ROCm emulates",
    ),
    row(_MO, "mxfp8", "mxfp8", family=k.MXFP8, reach=Reach(80, archs=ROCM)),
    row(
        _MO, ("int4", "int8_channel", "mxfp4", "nvfp4"), (), refusal=_NO_MODELOPT,
        remedy="compressed-tensors, where the preset is one of its own, or TensorRT-LLM", reach=ANY,
    ),
)  # fmt: skip

_QUARK_ROWS = (
    row(_QUARK, _TENSOR, _TOKEN, reach=ON_CPU, refusal=_CPU_TENSOR, remedy="fp8_dynamic"),
    row(_QUARK, (_TENSOR, _CHANNEL), _TOKEN, family=k.FP8, reach=Reach(89, archs=ROCM + CPU)),
    row(_QUARK, _BLOCK, "fp8_group", family=k.FP8_BLOCK, reach=Reach(89, archs=ROCM + CPU)),
    row(
        _QUARK, (_TENSOR, _CHANNEL, _BLOCK), (*_TOKEN, "fp8_group"), reach=CUDA, remedy="the same preset in "
        "compressed-tensors, which falls back to weight-only",
        refusal="Quantization scheme is not supported for the current GPU. Min capability: 89",
    ),
    row(
        _QUARK, ("int8_channel", "int8_tensor"), ("int8_token", "int8_static", "int8_tensor"), family=k.INT8,
        reach=Reach(75, 99, ROCM + CPU),
    ),
    row(
        _QUARK, ("int8_channel", "int8_tensor"), ("int8_token", "int8_static", "int8_tensor"), reach=sm(100),
        refusal=_INT8_REFUSED, remedy=_INT8_REMEDY,
    ),
    row(_QUARK, ("int4", "uint4"), "wide", family=k.MIXED, reach=Reach(75, archs=ROCM + CPU)),
    row(_QUARK, "nvfp4", "nvfp4", family=k.NVFP4, reach=Reach(75, archs=ROCM)),
    row(
        _QUARK, "nvfp4", (), refusal="NotImplementedError: Multi-entry weight or activation quantization configs are "
        "only supported for NVFP4", remedy="the preset nvfp4, or compressed-tensors",
    ),
    row(_QUARK, "mxfp4", "fp8_static", family=k.MXFP4_STATIC_FP8, reach=Reach(75, archs=ROCM)),
    row(_QUARK, "mxfp4", ("mxfp4", "mxfp6", "wide"), family=k.MXFP4, reach=Reach(75, archs=ROCM)),
    row(
        _QUARK, "mxfp4", (), refusal="ValueError: Unsupported activation quant key: QuantKey(f8e4m3fn, dynamic, "
        "per_tensor)", remedy="mxfp4 or mxfp4a16",
    ),
    row(
        _QUARK, ("mxfp6_e2m3", "mxfp6_e3m2"), ("wide", "mxfp4", "mxfp6", "mxfp8"), family=k.MXFP6,
        reach=Reach(75, archs=ROCM),
    ),
    row(_QUARK, "mxfp8", ("mxfp8", "wide"), family=k.MXFP8, reach=Reach(75, archs=ROCM)),
    row(
        _QUARK, ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "nvfp4"), (), reach=ON_CPU,
        refusal="ValueError: Failed to find a kernel that can implement the layer", remedy="a GPU",
    ),
    row(_QUARK, (), (), refusal=_NO_QUARK, remedy="compressed-tensors, where the preset is one of its own"),
)  # fmt: skip

_WORDS = (
    row(
        _GPTQ, (), (), formats=("gptq desc_act", "gptq_v2 desc_act"), groups=(16, 32, 64, 128, 256, 512, 1024),
        refusal="GPTQ group activation ordering (desc_act=True) is no longer supported",
        remedy="--to compressed-tensors, which writes the columns in their own order",
    ),
    row(
        _GPTQ, ("int4", "int8_group", "int8_channel"), "wide", family=k.MIXED, groups=k.MARLIN_GROUPS,
        reach=Reach(75, archs=ROCM + CPU),
    ),
    row(
        _GPTQ, ("int4", "int8_group", "int8_channel"), "wide", reach=Reach(75, archs=ROCM + CPU), refusal=_GROUPS,
        remedy="groups of 32, 64 or 128",
    ),
    row(
        _GPTQ, (), (), refusal="Unsupported quantization config: only 4 and 8 bits, symmetric, are loaded",
        remedy="w4a16 or w8a16; asymmetric weights load from awq and compressed-tensors",
    ),
    row(_AWQ, (), (), formats=("gemv",), refusal="the gemv order is not loaded", remedy="--to awq writes gemm"),
    row(_AWQ, ("int4", "uint4"), "wide", family=k.MIXED, groups=k.MARLIN_GROUPS, reach=Reach(75, archs=ROCM + CPU)),
    row(
        _AWQ, ("int4", "uint4"), "wide", reach=Reach(75, archs=ROCM + CPU), refusal=_GROUPS,
        remedy="groups of 32, 64 or 128",
    ),
    row(
        _AR, (), (), formats=("auto_round",), refusal="Unsupported packing_format: auto_round, currently only support "
        "auto_round:auto_gptq, auto_round:auto_awq, auto_round:fp8, auto_round:llm_compressor",
        remedy="4 or 8 bits, symmetric, or 4 bits with zero points",
    ),
    row(
        _AR, ("int4", "int8_group", "int8_channel", "uint4"), "wide", family=k.MIXED, groups=k.MARLIN_GROUPS,
        reach=Reach(75, archs=ROCM + CPU),
    ),
    row(
        _AR, ("int4", "int8_group", "int8_channel", "uint4"), "wide", reach=Reach(75, archs=ROCM + CPU),
        refusal=_GROUPS, remedy="groups of 32, 64 or 128",
    ),
    row(
        _AR, (_TENSOR, _CHANNEL), (), refusal="INC block-wise FP8 requires a 2-D group_size",
        remedy="fp8_block, or --to compressed-tensors",
    ),
    row(_AR, _BLOCK, "fp8_group", family=k.FP8_BLOCK, reach=Reach(75, archs=ROCM + CPU)),
    row(
        _AR, "nvfp4", (), refusal="Unsupported data_type: nv_fp, currently only support {'int', 'fp', 'mx_fp'}",
        remedy="--to compressed-tensors changes no code and no scale",
    ),
    row(_AR, "mxfp4", (), family=k.MXFP4_ALWAYS, reach=Reach(80, archs=ROCM)),
    row(_AR, "mxfp8", (), family=k.MXFP8, reach=Reach(75, archs=ROCM)),
)  # fmt: skip

_OTHERS = (
    row(
        _FP8, "mxfp8", (), refusal="groups of 32 under quant_method fp8: the inputs would be scaled per element and "
        "Marlin, which is chosen, has no FP8 kernel for the group", remedy="--to modelopt or compressed-tensors",
    ),
    row(_FP8, _TENSOR, _TOKEN, reach=ON_CPU, refusal=_CPU_TENSOR, remedy="fp8_block"),
    row(_FP8, _TENSOR, _TOKEN, family=k.FP8, reach=Reach(75, archs=ROCM)),
    row(_FP8, _BLOCK, "fp8_group", family=k.FP8_BLOCK, reach=Reach(75, archs=ROCM + CPU)),
    row(_FP8, "fp8_block", "fp8_group", family=k.FP8_BLOCK, reach=AMD),
    row(
        _FP8, "fp8_block", (), refusal=_BLOCKS_ONLY, remedy="blocks of 128x128",
    ),
    row(_FP8, "mxfp4", (), family=moe.MXFP4, experts=True),
    row("mxfp4", "mxfp4", "wide", family=moe.GPT_OSS, reach=Reach(80, archs=ROCM + CPU)),
    row(
        "fbgemm-fp8", (), (), refusal="fbgemm_fp8 is a deprecated quantization method",
        remedy="--allow-deprecated-quantization, or --to compressed-tensors",
    ),
    row("torchao", (), ("fp8_token", "fp8_tensor", "fp8_static"), family=k.TORCHAO, reach=Reach(89, archs=CDNA3)),
    row(
        "torchao", (), ("fp8_token", "fp8_tensor", "fp8_static"), refusal="torchao FP8 activation quantization "
        "requires GPU compute capability >= 8.9 (or AMD MI300+)", remedy="a weight-only config, or compressed-tensors",
    ),
    row("torchao", (), (), family=k.TORCHAO, reach=Reach(75, archs=CDNA3)),
)  # fmt: skip

ENGINE = Engine(
    "vllm", "0.32.0",
    (*_CUT, *_experts(), *_COMPRESSED_TENSORS, *_MODELOPT, *_QUARK_ROWS, *_WORDS, *_OTHERS),
    "{container} is not among the quantization methods of vLLM 0.32", "--to compressed-tensors", ANY, _SOURCE,
)  # fmt: skip
