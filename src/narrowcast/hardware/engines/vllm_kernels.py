"""vLLM 0.32's kernels for linear layers, family by family, in the order in which it tries them.

Names are the classes' without their endings: CutlassFP8ScaledMMLinearKernel is CutlassFP8. NVIDIA's come first in a
family, then AMD's and the CPU's, which never compete. Humming stands before Marlin on compute capability 9.0 and where
the list has it elsewhere. Kernels of Intel GPUs and of single AMD consumer cards are left
out. Source: model_executor/kernels/linear of the 0.32.0 wheel; compiled gates from the source of its extensions.
"""

from __future__ import annotations

from dataclasses import replace

from narrowcast.hardware.engines.row import (
    CDNA3,
    CDNA4,
    CPU,
    EMULATED,
    ROCM,
    UNKNOWN,
    WEIGHT_ONLY,
    Kernel,
    Reach,
    sm,
)
from narrowcast.hardware.kinds import input_kind, weight_kind
from narrowcast.tensors.presets import LinearScheme

MARLIN_GROUPS, MACHETE_GROUPS, TRITON_GROUPS = (0, 32, 64, 128), (0, 64, 128), (0, 32, 64, 128, 256)
HUMMING, B12X, AITER, QUARK, CONCH = "humming", "b12x", "aiter", "amd-quark", "conch-triton-kernels"
SM10X, SM12X = sm(100, 109), sm(120, 129)


def _everything(linear: LinearScheme) -> bool:
    return True


def _rocm(*archs: str) -> Reach:
    return Reach(archs=archs)


def _per_tensor(linear: LinearScheme) -> bool:
    return weight_kind(linear.weight) == "fp8_tensor" and input_kind(linear) in ("fp8_tensor", "fp8_static")


def _static_tensor(linear: LinearScheme) -> bool:
    return _per_tensor(linear) and linear.calibrated


def _not_per_tensor(linear: LinearScheme) -> bool:
    return not _per_tensor(linear)


def _channel_token(linear: LinearScheme) -> bool:
    return weight_kind(linear.weight) == "fp8_channel" and input_kind(linear) == "fp8_token"


def _four_bits(linear: LinearScheme) -> bool:
    return linear.weight.element.bits == 4


def _marlin_types(linear: LinearScheme) -> bool:
    return linear.weight.element.bits == 4 or (linear.weight.element.bits == 8 and linear.weight.zero is None)


def _whole_words(linear: LinearScheme) -> bool:
    return linear.weight.element.bits in (4, 8)


def _symmetric(linear: LinearScheme) -> bool:
    return _whole_words(linear) and linear.weight.zero is None


def _exact_mx(linear: LinearScheme) -> bool:
    return input_kind(linear) in ("wide", "mxfp4", "mxfp6")


def _mxfp4_input(linear: LinearScheme) -> bool:
    return input_kind(linear) == "mxfp4"


def _mxfp4_or_wide(linear: LinearScheme) -> bool:
    return input_kind(linear) in ("wide", "mxfp4")


FP8 = (
    Kernel("FlashInferFP8", "fp8", sm(100), fits=_per_tensor),
    Kernel("CutlassFP8", "fp8", sm(89)),
    Kernel("B12xTensorFP8", "fp8", SM12X, (1, 32), fits=_static_tensor, package=B12X),
    Kernel("PerTensorTorchFP8", "fp8", sm(89), fits=_per_tensor),
    Kernel("ChannelWiseTorchFP8", "fp8", sm(89), fits=_not_per_tensor),
    Kernel("HummingFP8", UNKNOWN, sm(90, 90), package=HUMMING),
    Kernel("MarlinFP8", WEIGHT_ONLY, sm(75)),
    Kernel("HummingFP8", UNKNOWN, sm(75), package=HUMMING),
    Kernel("AiterHipbMMPerTokenFp8", "fp8", _rocm(*CDNA3), (16, 16), 16, fits=_channel_token, package=AITER),
    Kernel("AiterPreshuffledPerTokenFp8", "fp8", _rocm(*CDNA3), (16, 16), fits=_channel_token, package=AITER),
    Kernel("AiterPerTokenFp8", "fp8", _rocm(*CDNA3), fits=_channel_token, package=AITER),
    Kernel("ROCmFP8", "fp8", _rocm(*CDNA3), fits=_per_tensor),
    Kernel("PerTensorTorchFP8", "fp8", _rocm(*CDNA3), fits=_per_tensor),
    Kernel("RowWiseTorchFP8", "fp8", _rocm(*CDNA3), fits=_channel_token),
    Kernel("ChannelWiseTorchFP8", "fp8", _rocm(*CDNA3), fits=_not_per_tensor),
    Kernel(
        "ChannelWiseTorchFP8", EMULATED, _rocm(*CPU), fits=_not_per_tensor,
        note="slow on a CPU without AMX for FP8, which would take CPUFP8W8A8",
    ),
)  # fmt: skip

FP8_BLOCK = (
    Kernel("FlashInferFp8DeepGEMMDynamicBlockScaled", "fp8", sm(90, 90), (64, 128)),
    Kernel("DeepGemmFp8Block", "fp8", sm(90, 90), (64, 128)),
    Kernel("DeepGemmFp8Block", "fp8", SM10X, (64, 128)),
    Kernel("DeepGemmFp8Block", "fp8", SM12X, (64, 128)),
    Kernel("CutlassFp8Block", "fp8", sm(90)),
    Kernel("B12xFp8Block", "fp8", SM12X, (128, 128), package=B12X),
    Kernel("HummingFP8", UNKNOWN, sm(90, 90), package=HUMMING),
    Kernel("MarlinFP8", WEIGHT_ONLY, sm(75)),
    Kernel("HummingFP8", UNKNOWN, sm(75), package=HUMMING),
    Kernel("TritonFp8Block", "fp8", sm(89)),
    Kernel("BlockWiseTorchFP8", "fp8", sm(90, 90)),
    Kernel("AiterFp8Block", "fp8", _rocm(*CDNA3), package=AITER),
    Kernel("TritonFp8Block", "fp8", _rocm(*CDNA3)),
    Kernel(
        "CPUFp8Block", WEIGHT_ONLY, _rocm(*CPU),
        note="needs AMX tiles; with AMX for FP8 (Diamond Rapids) CPUFp8W8A8Block computes in FP8",
    ),
)  # fmt: skip

FP8_WEIGHT_ONLY = (
    Kernel("HummingFP8", WEIGHT_ONLY, sm(75), package=HUMMING),
    Kernel("MarlinFP8", WEIGHT_ONLY, sm(75)),
)

INT8 = (
    Kernel("CutlassInt8", "int8", sm(75, 99)),
    Kernel("TritonInt8", "int8", sm(75, 99)),
    Kernel("HummingInt8", "int8", sm(75, 99), package=HUMMING),
    Kernel("AiterInt8", "int8", _rocm(*CDNA3), package=AITER),
    Kernel("TritonInt8", "int8", _rocm(*ROCM)),
    Kernel("CPUInt8", "int8", _rocm(*CPU)),
)

_AFTER_MARLIN = (
    Kernel("Conch", WEIGHT_ONLY, sm(80), groups=(0, 128), fits=_symmetric, package=CONCH),
    Kernel(
        "Exllama", WEIGHT_ONLY, sm(75), (8, 1), groups=(32, 64, 128), fits=_symmetric, note="float16 only"
    ),
    Kernel("TritonW4A16", WEIGHT_ONLY, sm(75), (8, 1), groups=TRITON_GROUPS, fits=_four_bits),
    Kernel("TritonW4A16", WEIGHT_ONLY, _rocm(*ROCM), (8, 1), groups=TRITON_GROUPS, fits=_four_bits),
    Kernel(
        "Exllama",
        WEIGHT_ONLY,
        _rocm(*ROCM),
        (8, 1),
        groups=(32, 64, 128),
        fits=_symmetric,
        note="float16 only",
    ),
    Kernel("CPUWNA16", WEIGHT_ONLY, _rocm(*CPU), (32, 32), fits=_four_bits),
)
_MARLIN = Kernel("Marlin", WEIGHT_ONLY, sm(75), groups=MARLIN_GROUPS, fits=_marlin_types)
_MACHETE = Kernel("Machete", WEIGHT_ONLY, sm(90, 90), (128, 64), groups=MACHETE_GROUPS, fits=_whole_words)
MIXED = (
    _MACHETE,
    Kernel("Humming", WEIGHT_ONLY, sm(90, 90), package=HUMMING),
    _MARLIN,
    *_AFTER_MARLIN,
    Kernel("Humming", WEIGHT_ONLY, sm(75), package=HUMMING),
)
# INT4 weights with INT8 inputs: only Humming quantizes the inputs, the others are the weight-only kernels.
W4A8_INT = (_MACHETE, Kernel("Humming", "int8", sm(90, 90), package=HUMMING), _MARLIN, *_AFTER_MARLIN)
W4A8_FP8 = (
    Kernel("CutlassW4A8", "fp8", sm(90, 90), (128, 128), groups=(128,), note="bfloat16 models only"),
    Kernel("Humming", "fp8", sm(90, 90), package=HUMMING),
)

NVFP4 = (
    Kernel("FlashInferCuteDslNvFp4", "nvfp4", SM10X),
    Kernel("FlashInferCutlassNvFp4", "nvfp4", sm(100, 129)),
    Kernel("FlashInferB12xNvFp4", "nvfp4", sm(120)),
    Kernel("CutlassNvFp4", "nvfp4", sm(100, 129)),
    Kernel("FlashInferCuteDslNvFp4W4A16", WEIGHT_ONLY, SM10X),
    Kernel("FlashInferCuteDslNvFp4W4A16", WEIGHT_ONLY, SM12X),
    Kernel("HummingNvFp4", UNKNOWN, sm(90, 90), package=HUMMING),
    Kernel("MarlinNvFp4", WEIGHT_ONLY, sm(75)),
    Kernel("EmulationNvFp4", EMULATED, Reach(75, archs=ROCM), note="slow: every product decodes the weights"),
)
NVFP4_WEIGHT_ONLY = (
    Kernel("FlashInferCuteDslNvFp4W4A16", WEIGHT_ONLY, sm(100, 103)),
    Kernel("HummingNvFp4", WEIGHT_ONLY, sm(90, 90), package=HUMMING),
    Kernel("MarlinNvFp4", WEIGHT_ONLY, sm(75)),
)

MXFP4 = (
    Kernel("FlashInferMxFp4", "mxfp4", sm(100), fits=_mxfp4_input),
    Kernel("HummingMxFp4", UNKNOWN, sm(90, 90), package=HUMMING),
    Kernel("MarlinMxFp4", WEIGHT_ONLY, sm(75), fits=_mxfp4_or_wide),
    Kernel("HummingMxFp4", UNKNOWN, sm(75), package=HUMMING),
    Kernel("B12xMxFp4", "mxfp4", SM12X, fits=_mxfp4_input, package=B12X),
    Kernel("EmulationMxfp4", EMULATED, sm(75), fits=_exact_mx, package=QUARK),
    Kernel("AiterMxfp4", "mxfp4", _rocm(*CDNA4), fits=_mxfp4_input, package=AITER),
    Kernel("EmulationMxfp4", EMULATED, _rocm(*ROCM), fits=_exact_mx, package=QUARK),
)
# Where the engine passes MXFP4 inputs to the choice whatever the checkpoint says, every kernel fits.
MXFP4_ALWAYS = tuple(replace(kernel, fits=_everything) for kernel in MXFP4)
# FP8 inputs are tried first, which only Humming takes; then the class asks once more, with MXFP4 inputs.
MXFP4_FP8 = (
    Kernel("HummingMxFp4", UNKNOWN, sm(75), package=HUMMING),
    *(kernel for kernel in MXFP4_ALWAYS if kernel.name != "HummingMxFp4"),
)

MXFP4_STATIC_FP8 = (
    Kernel("EmulationQuarkW4A8Mxfp4Fp8", EMULATED, sm(75)),
    Kernel("AiterQuarkW4A8Mxfp4Fp8", "fp8", _rocm(*CDNA4), package=AITER),
    Kernel("EmulationQuarkW4A8Mxfp4Fp8", EMULATED, _rocm(*ROCM)),
)

MXFP6 = (
    Kernel("HummingMxFp6", UNKNOWN, sm(75), package=HUMMING),
    Kernel("EmulationMxfp6", EMULATED, Reach(75, archs=ROCM), fits=_exact_mx),
)

MXFP8 = (
    Kernel("FlashInferCutedslMxfp8", "mxfp8", SM10X, least=128),
    Kernel("FlashInferCutlassMxfp8", "mxfp8", sm(100, 119), least=128),
    Kernel("FlashInferCutlassMxfp8", "mxfp8", sm(120), (32, 1), 128),
    Kernel("HummingMxfp8", UNKNOWN, sm(90, 90), package=HUMMING),
    Kernel("MarlinMxfp8", WEIGHT_ONLY, sm(75), (1, 32)),
    Kernel("B12xMxfp8", "mxfp8", SM12X, package=B12X),
    Kernel("EmulationMxfp8", EMULATED, sm(75)),
    Kernel("RocmDotScaledMxfp8", "mxfp8", _rocm(*CDNA4)),
    Kernel("EmulationMxfp8", EMULATED, _rocm(*ROCM)),
)

TORCHAO = (Kernel("torchao", UNKNOWN, Reach(75, archs=CDNA3)),)
