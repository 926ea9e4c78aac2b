"""SGLang 0.5.23: which containers' layers it takes, by which kernels, and its refusals in its own words.

It reads the same containers as vLLM with fewer schemes: dense compressed-tensors layers have no W4A8, MX formats come
as ModelOpt's MXFP8, Quark's MXFP4 and gpt-oss, and GPTQ keeps its order of columns. FP8 below compute capability 8.9
and NVFP4 below 10.0 run on Marlin with inputs left wide. INT8 has one kernel, for 8.0 to 9.0.

Read from the 0.5.23 wheel (srt/layers/quantization); the order of FP8 block kernels is fp8_utils.py's. Compiled code
was not read but for the gate of int8_scaled_mm, and of routed experts only who is taken by default; nothing was run
on a GPU.
"""

from __future__ import annotations

from narrowcast.hardware.engines.row import (
    CDNA3,
    CDNA4,
    CUDA,
    UNKNOWN,
    WEIGHT_ONLY,
    Engine,
    Kernel,
    Reach,
    row,
    sm,
)
from narrowcast.hardware.kinds import weight_kind
from narrowcast.tensors.presets import LinearScheme

_CT, _MO, _QUARK, _GPTQ, _AWQ, _AR, _FP8 = (
    "compressed-tensors", "modelopt", "quark", "gptq", "awq", "auto-round", "fp8",
)  # fmt: skip
_SOURCE = "SGLang 0.5.23, srt/layers/quantization"
_TENSOR, _CHANNEL, _BLOCK = "fp8_tensor", "fp8_channel", "fp8_block128"
_TOKEN = ("fp8_token", "fp8_tensor", "fp8_static")
_GROUPS = (0, 32, 64, 128)
_NO_CT = "NotImplementedError: No compressed-tensors compatible scheme was found"
_NO_QUARK = "NotImplementedError: No quark compatible scheme was found"
_NO_MODELOPT = "only the algorithms FP8, NVFP4, NVFP4_AWQ, W4A16_NVFP4, MXFP8 and MIXED_PRECISION are read"


def _marlin_types(linear: LinearScheme) -> bool:
    return weight_kind(linear.weight) in ("int4", "uint4", "int8_group", "int8_channel")


_SCALED = (
    Kernel("fp8_scaled_mm", "fp8", sm(89)),
    Kernel("fp8_marlin", WEIGHT_ONLY, sm(80, 88)),
    Kernel("aiter", "fp8", Reach(archs=CDNA3), package="aiter"),
    Kernel("torch_scaled_mm", "fp8", Reach(archs=CDNA3)),
)
_BLOCKS = (
    Kernel("deep_gemm", "fp8", sm(90, 109), (64, 128)),
    Kernel("flashinfer_trtllm", "fp8", sm(100, 109)),
    Kernel("cutlass", "fp8", sm(120, 129)),
    Kernel("fp8_marlin", WEIGHT_ONLY, sm(80, 88)),
    Kernel("aiter", "fp8", Reach(archs=CDNA3), package="aiter"),
    Kernel("triton", "fp8", Reach(89, archs=CDNA3)),
)
_TRITON_BLOCKS = (
    Kernel("deep_gemm", "fp8", sm(90, 90), fits=lambda linear: linear.weight.inner.tile == (32, 32)),
    Kernel("triton", "fp8", Reach(89, archs=CDNA3)),
)
_WEIGHT_ONLY_FP8 = (Kernel("fp8_marlin", WEIGHT_ONLY, sm(80)),)
_INT8 = (Kernel("int8_scaled_mm", "int8", sm(80, 90)),)
_MARLIN = (Kernel("gptq_marlin", WEIGHT_ONLY, sm(80), groups=_GROUPS, fits=_marlin_types),)
_NVFP4 = (
    Kernel("flashinfer_cutedsl", "nvfp4", sm(100, 109)),
    Kernel("flashinfer_cutlass", "nvfp4", sm(110)),
    Kernel("fp4_marlin", WEIGHT_ONLY, sm(80, 99)),
)
_NVFP4_WEIGHT_ONLY = (Kernel("fp4_marlin", WEIGHT_ONLY, sm(80)),)
_MXFP8 = (
    Kernel("mxfp8 (flashinfer, deep_gemm)", "mxfp8", sm(100)),
    Kernel("mxfp8 (aiter, triton)", "mxfp8", Reach(archs=CDNA4)),
)
_QUARK_MXFP4 = (Kernel("aiter_gemm_a4w4", "mxfp4", Reach(archs=CDNA4), package="aiter"),)
_GPT_OSS = (
    Kernel("flashinfer_mxfp4", "mxfp8", sm(100, 109)),
    Kernel("flashinfer_mxfp4", "mxfp8", sm(120)),
    Kernel("triton_kernel", WEIGHT_ONLY, sm(80, 99)),
    Kernel("marlin", WEIGHT_ONLY, sm(80)),
    Kernel("aiter", UNKNOWN, Reach(archs=CDNA4), package="aiter"),
)
_EXPERTS_FP8 = (Kernel("triton", "fp8", Reach(89, archs=CDNA3)), Kernel("marlin", WEIGHT_ONLY, sm(80, 88)))
_EXPERTS_W4 = (Kernel("cutlass_w4a8", "fp8", sm(90, 90)),)
_EXPERTS_INT = (Kernel("marlin", WEIGHT_ONLY, sm(80), groups=_GROUPS, fits=_marlin_types),)
_EXPERTS_NVFP4 = (
    Kernel("flashinfer_trtllm", "nvfp4", sm(100, 109)),
    Kernel("flashinfer_cutlass", "nvfp4", sm(110)),
    Kernel("marlin", WEIGHT_ONLY, sm(80, 99)),
)
_GGUF = (Kernel("ggml", WEIGHT_ONLY, sm(60)),)
_BNB = (Kernel("bitsandbytes", WEIGHT_ONLY, sm(70)),)

_DENSE_W4A8 = (
    f"{_NO_CT}: packed INT4 weights with 8-bit inputs are read for routed experts, not for dense layers"
)
_INT8_REFUSED = "No implemented int8_scaled_mm for current compute capability"
_INT_WEIGHTS = ("int4", "uint4", "int8_group", "int8_channel", "uint8", "int_odd", "uint_odd")

_CUT = (
    row(
        (_CT, _GPTQ, _AWQ, _AR), _INT_WEIGHTS, "wide", cut=True,
        refusal="a group that the edge of the matrix cuts is not loaded: Marlin asks for group sizes that divide K",
        remedy="a group size that divides K, or scales per channel",
    ),
)  # fmt: skip

_COMPRESSED_TENSORS = (
    row(_CT, (_TENSOR, _CHANNEL, _BLOCK), (*_TOKEN, "fp8_group"), family=_EXPERTS_FP8, experts=True),
    row(_CT, "nvfp4", ("nvfp4", "wide"), family=_EXPERTS_NVFP4, experts=True),
    row(_CT, "int4", ("fp8_token", "int8_token"), family=_EXPERTS_W4, experts=True),
    row(_CT, _INT_WEIGHTS, "wide", family=_EXPERTS_INT, experts=True),
    row(_CT, "mxfp4", ("mxfp4", "wide"), family=_GPT_OSS, experts=True),
    row(_CT, (_TENSOR, _CHANNEL), _TOKEN, family=_SCALED, reach=Reach(80, archs=CDNA3)),
    row(_CT, _BLOCK, "fp8_group", family=_BLOCKS, reach=Reach(89, archs=CDNA3)),
    row(_CT, "fp8_block", "fp8_group", family=_TRITON_BLOCKS, reach=Reach(89, archs=CDNA3)),
    row(
        _CT, (_BLOCK, "fp8_block"), (), refusal="the weight-only FP8 class, which older GPUs get, has no blocks",
        remedy="fp8_dynamic, or the fp8 container",
    ),
    row(_CT, (_TENSOR, _CHANNEL), "wide", family=_WEIGHT_ONLY_FP8, reach=sm(80)),
    row(_CT, ("int8_channel", "int8_tensor"), ("int8_token", "int8_static"), family=_INT8, reach=sm(80, 90)),
    row(
        _CT, ("int8_channel", "int8_tensor"), ("int8_token", "int8_static"), refusal=_INT8_REFUSED, reach=CUDA,
        remedy="an FP8 preset, or compute capability 8.0 to 9.0",
    ),
    row(
        _CT, _INT_WEIGHTS, "wide", family=_MARLIN, reach=sm(80),
        remedy="4 or 8 bits in groups of 32, 64 or 128, or per channel",
    ),
    row(
        _CT, ("int4", "uint4", "int8_group"), ("int8_token", "fp8_token"), refusal=_DENSE_W4A8,
        remedy="w4a16, or vLLM",
    ),
    row(_CT, "nvfp4", "nvfp4", family=_NVFP4, reach=sm(80)),
    row(_CT, "nvfp4", "wide", family=_NVFP4_WEIGHT_ONLY, reach=sm(80)),
    row(
        _CT, "mxfp4", "mxfp4", refusal="NotImplementedError: Activation-quantized float4 is only supported in the "
        "NVFP4 layout (tensor_group, group_size 16)", remedy="nvfp4, or --to quark on AMD gfx950",
    ),
    row(_CT, (), (), refusal=_NO_CT, remedy="fp8_dynamic, int8, w4a16 or nvfp4; or vLLM"),
)  # fmt: skip

_MODELOPT = (
    row(_MO, "nvfp4", ("nvfp4", "wide"), family=_EXPERTS_NVFP4, experts=True),
    row(_MO, _TENSOR, "fp8_static", family=_SCALED, reach=Reach(89, archs=CDNA3)),
    row(_MO, "nvfp4", "nvfp4", family=_NVFP4, reach=sm(80)),
    row(_MO, "nvfp4", "wide", family=_NVFP4_WEIGHT_ONLY, reach=sm(80)),
    row(
        _MO, "mxfp8", "mxfp8", family=_MXFP8, reach=Reach(100, archs=CDNA4), notes=("read as quant_method mxfp8",),
    ),
    row(
        _MO, _TENSOR, "fp8_static", refusal="modelopt_fp8 asks for compute capability 8.9",
        remedy="an Ada GPU or later",
    ),
    row(_MO, (), (), refusal=_NO_MODELOPT, remedy="--to compressed-tensors, where the preset is one of its own"),
)  # fmt: skip

_QUARK_ROWS = (
    row(_QUARK, (_TENSOR, _CHANNEL), _TOKEN, family=_SCALED, reach=Reach(89, archs=CDNA3)),
    row(_QUARK, _BLOCK, "fp8_group", family=_BLOCKS, reach=Reach(80, archs=CDNA3)),
    row(_QUARK, "mxfp4", "mxfp4", family=_QUARK_MXFP4, reach=Reach(archs=CDNA4)),
    row(_QUARK, "mxfp4", "mxfp4", refusal="its MXFP4 products run on AMD gfx950 only", remedy="an MI355X, or vLLM"),
    row(_QUARK, (), (), refusal=_NO_QUARK, remedy="fp8_dynamic, fp8_block or mxfp4; or --to compressed-tensors"),
)  # fmt: skip

_OTHERS = (
    row(
        _FP8, "mxfp8", (), refusal="groups of 32 under quant_method fp8 go to a Triton kernel whose tile would be one "
        "row wide; MXFP8 is read under quant_method mxfp8", remedy="--to modelopt, whose MXFP8 is read so",
    ),
    row(
        _FP8, (_TENSOR, _BLOCK), (*_TOKEN, "fp8_group"), family=_EXPERTS_FP8, experts=True,
        reach=Reach(80, archs=CDNA3),
    ),
    row(_FP8, _TENSOR, _TOKEN, family=_SCALED, reach=Reach(80, archs=CDNA3)),
    row(_FP8, _BLOCK, "fp8_group", family=_BLOCKS, reach=Reach(80, archs=CDNA3)),
    row(_FP8, "fp8_block", "fp8_group", family=_TRITON_BLOCKS, reach=Reach(89, archs=CDNA3)),
    row(_GPTQ, ("int4", "int8_group", "int8_channel"), "wide", family=_MARLIN, reach=sm(80)),
    row(
        _GPTQ, (), (), refusal="Unsupported quantization config: only 4 and 8 bits, symmetric, are loaded",
        remedy="w4a16 or w8a16; asymmetric weights load from awq",
    ),
    row(_AWQ, (), (), formats=("gemv",), refusal="the gemv order is not loaded", remedy="--to awq writes gemm"),
    row(_AWQ, ("int4", "uint4"), "wide", family=_MARLIN, reach=sm(80)),
    row(
        _AR, (), (), formats=("auto_round",), refusal="Unsupported packing_format: auto_round",
        remedy="4 or 8 bits, symmetric, or 4 bits with zero points",
    ),
    row(_AR, ("int4", "uint4", "int8_group", "int8_channel"), "wide", family=_MARLIN, reach=sm(80)),
    row(_AR, (), (), refusal="Unsupported data_type: currently only support int", remedy="--to compressed-tensors"),
    row("mxfp4", "mxfp4", "wide", family=_GPT_OSS, reach=Reach(80, archs=CDNA4)),
    row("bitsandbytes", (), (), family=_BNB, reach=sm(70)),
    row("gguf", (), (), family=_GGUF, reach=sm(60)),
)  # fmt: skip

ENGINE = Engine(
    "sglang", "0.5.23", (*_CUT, *_COMPRESSED_TENSORS, *_MODELOPT, *_QUARK_ROWS, *_OTHERS),
    "{container} is not among the quantization methods of SGLang 0.5.23", "--to compressed-tensors",
    Reach(0, archs=CDNA3), _SOURCE,
)  # fmt: skip
