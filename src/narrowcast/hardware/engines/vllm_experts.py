"""vLLM 0.32's kernels for routed experts, family by family, in the order in which it tries them.

Names are the backends' as the start-up log prints them. Batched variants, which other ways of spreading experts over
GPUs ask for, are left out, and so is what shapes, activations and parallelism rule out at start-up. Source:
model_executor/layers/fused_moe/oracle and experts of the 0.32.0 wheel.
"""

from __future__ import annotations

from narrowcast.hardware.engines.row import CDNA3, CDNA4, CPU, EMULATED, ROCM, WEIGHT_ONLY, Kernel, Reach, sm
from narrowcast.hardware.engines.vllm_kernels import AITER, HUMMING, MARLIN_GROUPS, SM10X, SM12X
from narrowcast.hardware.kinds import weight_kind
from narrowcast.tensors.presets import LinearScheme


def _block(linear: LinearScheme) -> bool:
    return weight_kind(linear.weight) == "fp8_block128"


def _no_block(linear: LinearScheme) -> bool:
    return not _block(linear)


def _static_or_block(linear: LinearScheme) -> bool:
    return _block(linear) or linear.calibrated


def _int4_words(linear: LinearScheme) -> bool:
    return linear.weight.element.bits in (4, 8)


def _symmetric_group32(linear: LinearScheme) -> bool:
    return linear.weight.element.bits == 4 and linear.weight.zero is None and linear.weight.group == 32


FP8 = (
    Kernel("AITER", "fp8", Reach(archs=CDNA3), package=AITER),
    Kernel("TRITON", "fp8", sm(90, 90), fits=_block),  # Hopper with tensor parallelism
    Kernel("FLASHINFER_TRTLLM", "fp8", SM10X, fits=_static_or_block),
    Kernel("FLASHINFER_CUTLASS", "fp8", sm(90, 90), fits=_static_or_block),
    Kernel("FLASHINFER_CUTLASS", "fp8", SM10X, fits=_static_or_block),
    Kernel("FLASHINFER_CUTLASS", "fp8", SM12X, fits=_static_or_block),
    Kernel("DEEPGEMM", "fp8", sm(90, 109), fits=_block),
    Kernel("DEEPGEMM", "fp8", SM12X, fits=_block),
    Kernel("VLLM_CUTLASS", "fp8", sm(90), fits=_no_block),
    Kernel("TRITON", "fp8", Reach(89, archs=CDNA3)),
    Kernel("HUMMING", WEIGHT_ONLY, sm(90, 90), package=HUMMING),
    Kernel("MARLIN", WEIGHT_ONLY, sm(75)),
    Kernel("CPU", WEIGHT_ONLY, Reach(archs=CPU), fits=_block),
)

NVFP4 = (
    Kernel("FLASHINFER_TRTLLM", "nvfp4", SM10X),
    Kernel("FLASHINFER_CUTEDSL", "nvfp4", SM10X),
    Kernel("FLASHINFER_CUTLASS", "nvfp4", sm(100, 109)),
    Kernel("FLASHINFER_CUTLASS", "nvfp4", SM12X),
    Kernel("VLLM_CUTLASS", "nvfp4", sm(100, 129)),
    Kernel("HUMMING", WEIGHT_ONLY, sm(90, 90), package=HUMMING),
    Kernel("MARLIN", WEIGHT_ONLY, sm(75)),
    Kernel("EMULATION", EMULATED, Reach(archs=ROCM), note="slow: every product decodes the weights"),
)
NVFP4_WEIGHT_ONLY = tuple(kernel for kernel in NVFP4 if kernel.arithmetic == WEIGHT_ONLY)

GPT_OSS = (
    Kernel("FLASHINFER_TRTLLM_MXFP4_BF16", WEIGHT_ONLY, SM10X),
    Kernel("AITER_MXFP4_BF16", WEIGHT_ONLY, Reach(archs=CDNA3), package=AITER),
    Kernel("TRITON", WEIGHT_ONLY, sm(90, 119)),
    Kernel("TRITON", WEIGHT_ONLY, Reach(archs=ROCM)),
    Kernel("FLASHINFER_CUTLASS_MXFP4_BF16", WEIGHT_ONLY, sm(90, 90)),
    Kernel("HUMMING", WEIGHT_ONLY, sm(90, 90), package=HUMMING),
    Kernel("MARLIN", WEIGHT_ONLY, sm(75)),
    Kernel("TRITON", WEIGHT_ONLY, SM12X),
    Kernel("CPU", WEIGHT_ONLY, Reach(archs=CPU)),
)

MXFP4 = (
    Kernel("FLASHINFER_TRTLLM_MXFP4_MXFP8", "mxfp8", SM10X),
    Kernel("DEEPGEMM_MXFP4", "mxfp8", SM10X),
    Kernel("DEEPGEMM_MXFP4", "mxfp8", SM12X),
    Kernel("HUMMING", WEIGHT_ONLY, sm(90, 90), package=HUMMING),
    Kernel("MARLIN", WEIGHT_ONLY, sm(75)),
    Kernel("AITER_MXFP4_BF16", WEIGHT_ONLY, Reach(archs=CDNA3), package=AITER),
    Kernel("EMULATION", EMULATED, Reach(archs=ROCM)),
)

# compressed-tensors asks no list: CUTLASS where it is built for the GPU, with inputs in MXFP4 whatever the checkpoint
# says of them, and Marlin elsewhere ("Using CutlassExpertsMxfp4 for MXFP4 MoE", "Using MarlinExperts for MXFP4 MoE").
CT_MXFP4 = (
    Kernel("CUTLASS_MXFP4_MXFP4", "mxfp4", sm(100, 119)),
    Kernel("MARLIN", WEIGHT_ONLY, sm(75)),
)

MXFP8 = (
    Kernel("FLASHINFER_TRTLLM", "mxfp8", SM10X),
    Kernel("DEEPGEMM", "mxfp8", SM10X),
    Kernel("HUMMING", WEIGHT_ONLY, sm(90, 90), package=HUMMING),
    Kernel("MARLIN", WEIGHT_ONLY, sm(75)),
    Kernel("AITER_MXFP8", "mxfp8", Reach(archs=CDNA4), package=AITER),
    Kernel("TRITON_MXFP8", "mxfp8", Reach(archs=CDNA4)),
    Kernel("EMULATION", EMULATED, Reach(archs=ROCM)),
)

INT8 = (
    Kernel("TRITON", "int8", Reach(75, archs=ROCM)),
    Kernel("HUMMING", "int8", sm(75), package=HUMMING),
    Kernel("CPU", "int8", Reach(archs=CPU)),
)

MIXED = (
    Kernel("FLASHINFER_TRTLLM", WEIGHT_ONLY, SM10X, fits=_symmetric_group32),
    Kernel("HUMMING", WEIGHT_ONLY, sm(90, 90), package=HUMMING),
    Kernel("MARLIN", WEIGHT_ONLY, sm(75), groups=MARLIN_GROUPS, fits=_int4_words),
    Kernel("TRITON", WEIGHT_ONLY, Reach(75, archs=ROCM), fits=_int4_words),
    Kernel("HUMMING", WEIGHT_ONLY, sm(75), package=HUMMING),
    Kernel("CPU", WEIGHT_ONLY, Reach(archs=CPU), fits=_int4_words),
)

W4A8_FP8 = (
    Kernel("CUTLASS", "fp8", sm(90, 90), groups=(128,)),
    Kernel("HUMMING", "fp8", sm(90, 90), package=HUMMING),
)
