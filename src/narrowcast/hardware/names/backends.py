"""Words for kernels on both engines' command lines: what each of them prefers, where it is the automatic choice or not.

A backend is a wish. vLLM takes its kernels for the layer types that have one and chooses the rest by itself, with a
warning; SGLang stops where the GPU or a package is missing. vLLM's ``--linear-backend`` replaced environment variables,
and ``linear_backend_per_quant`` narrows it to one kind of layer.

Source: vLLM 0.32 and 0.33, config/kernel.py and model_executor/kernels/linear/__init__.py; SGLang 0.5.23,
arg_groups/choices.py, fields/exec_.py and layers/quantization/fp8_utils.py.
"""

from __future__ import annotations

from typing import Any

from narrowcast.hardware.names import AUTO, EXPERTS, FP4_GEMM, FP8_GEMM, LINEAR, OUT, PREFERS, Name


def _linear(name: str, means: str, kernels: str = "", **more: Any) -> Name:
    does = more.pop("does", PREFERS)
    return Name(name, "vllm", LINEAR, does, means, backends=tuple(kernels.split()), **more)


def _experts(name: str, means: str, **more: Any) -> Name:
    return Name(name, "vllm", EXPERTS, more.pop("does", PREFERS), means, **more)


_VLLM_LINEAR = (
    _linear("auto", "the first kernel of each family that runs", does=AUTO),
    _linear(
        "cutlass", "vLLM's own CUTLASS kernels", "CutlassFP8 CutlassFp8Block CutlassInt8 CutlassNvFp4 "
        "CutlassW4A8",
    ),
    _linear(
        "flashinfer_cutlass", "FlashInfer on CUTLASS", "FlashInferCutlassMxfp8 FlashInferCutlassNvFp4 "
        "FlashInferFP8 FlashInferFp8DeepGEMMDynamicBlockScaled FlashInferMxFp4",
    ),
    _linear(
        "flashinfer_cutedsl", "FlashInfer in CuTe DSL", "FlashInferCuteDslNvFp4 FlashInferCuteDslNvFp4W4A16 "
        "FlashInferCutedslMxfp8",
    ),
    _linear(
        "flashinfer_trtllm", "FlashInfer on TensorRT-LLM's kernels",
        "FlashInferTrtllmMxfp8 FlashInferTrtllmNvFp4",
    ),
    _linear("flashinfer_cudnn", "FlashInfer on cuDNN", "FlashInferCudnnNvFp4"),
    _linear("flashinfer_b12x", "FlashInfer's for compute capability 12.x", "FlashInferB12xNvFp4", low=120),
    _linear(
        "b12x", "the b12x package, for compute capability 12.x", "B12xFp8Block B12xMxFp4 B12xMxfp8 B12xNvFp4 "
        "B12xNvFp4W4A16 B12xTensorFP8", low=120,
    ),
    _linear(
        "marlin", "weight-only kernels: inputs stay in 16 bits",
        "Marlin MarlinFP8 MarlinMxFp4 MarlinMxfp8 MarlinNvFp4", low=75,
    ),
    _linear(
        "humming", "the humming package", "Humming HummingFP8 HummingInt8 HummingMxFp4 HummingMxFp6 "
        "HummingMxfp8 HummingNvFp4", low=75,
    ),
    _linear("triton", "Triton", "TritonFp8Block TritonInt8 TritonW4A16"),
    _linear("deep_gemm", "the DeepGEMM package", "DeepGemmFp8Block DeepGemmMxfp8Bmm", low=90),
    _linear(
        "torch", "torch.scaled_mm; from 0.33 on MXFP8 too, and MXFP4 on Intel GPUs", "BlockWiseTorchFP8 "
        "ChannelWiseTorchFP8 PerTensorTorchFP8 RowWiseTorchFP8 TorchNvFp4",
    ),
    _linear(
        "aiter", "AMD's aiter", "AiterFp8Block AiterInt8 AiterMxfp4 AiterPerTokenFp8 AiterPreshuffledPerTokenFp8",
        only="AMD",
    ),
    _linear("machete", "INT4 and INT8 weights on compute capability 9.0", "Machete", low=90),
    _linear("fbgemm", "FBGEMM's NVFP4", "FbgemmNvFp4"),
    _linear("conch", "the conch package", "Conch", low=80),
    _linear("exllama", "GPTQ's older kernel, float16", "Exllama"),
    _linear(
        "emulation", "decodes weights and inputs, multiplies in 16 bits: slow, for tests", "EmulationMxfp4 "
        "EmulationMxfp6 EmulationMxfp8 EmulationNvFp4",
    ),
    _linear("xpu", "Intel GPUs", "XPUFp8Block XPUW8A8FP8", does=OUT, only="Intel GPUs"),
    _linear("xpu_woq", "Intel GPUs, weight-only", "XPUW8A16FP8", does=OUT, only="Intel GPUs"),
)  # fmt: skip

_VLLM_EXPERTS = (
    _experts("auto", "the first backend of each family that runs", does=AUTO),
    _experts("triton", "Triton's fused experts"),
    _experts("batched_triton", "Triton on batches per expert, for expert parallelism"),
    _experts("triton_unfused", "Triton, each step for itself, for LoRA on gpt-oss"),
    _experts("deep_gemm", "the DeepGEMM package, FP8 in blocks", low=90),
    _experts("deep_gemm_mega_moe", "DeepGEMM's dispatch, product and combination in one kernel", low=100),
    _experts("cutlass", "vLLM's own CUTLASS kernels", low=90),
    _experts("flashinfer_trtllm", "FlashInfer on TensorRT-LLM's kernels", low=100),
    _experts("flashinfer_cutlass", "FlashInfer on CUTLASS", low=90),
    _experts("flashinfer_cutedsl", "FlashInfer in CuTe DSL, FP4", low=100),
    _experts(
        "flashinfer_moe_ep_cutedsl", "NVFP4 with dispatch in the kernel; MXFP4 checkpoints are quantized once "
        "more; needs expert parallelism and NVSHMEM", low=100,
    ),
    _experts(
        "flashinfer_moe_ep_mega_deep_gemm", "MXFP4 as it is, with dispatch in the kernel; DeepSeek V4 with "
        "expert parallelism", low=100,
    ),
    _experts("flashinfer_b12x", "FlashInfer's for compute capability 12.x", low=120),
    _experts("b12x", "the b12x package's FP4, for compute capability 12.x", low=120),
    _experts("marlin", "weight-only kernels: inputs stay in 16 bits", low=75),
    _experts("humming", "the humming package", low=75),
    _experts("aiter", "AMD's aiter", only="AMD"),
    _experts("aiter_mega_moe", "aiter's with dispatch in the kernel, DeepSeek V4", only="gfx950"),
    _experts("aiter_triton_mxfp4_bf16", "aiter's Triton, MXFP4 weights and 16-bit inputs", only="AMD"),
    _experts(
        "aiter_triton_mxfp4_mxfp4", "aiter's Triton, MXFP4 weights and inputs", only="gfx1250", since="0.33.0",
    ),
    _experts("flydsl", "AMD's FlyDSL", only="AMD"),
    _experts("hpc", "the HPC package, FP8", low=90),
    _experts("emulation", "decodes weights and inputs, multiplies in 16 bits: slow"),
    _experts("rdna3", "one kernel for consumer cards", does=OUT, only="gfx1100"),
)  # fmt: skip


def _sglang(kind: str, name: str, means: str, **more: Any) -> Name:
    return Name(name, "sglang", kind, more.pop("does", PREFERS), means, **more)


_FP8 = (
    _sglang(
        FP8_GEMM, "auto", "blocks: DeepGEMM from 9.0 to 10.x, else FlashInfer on 10.x, CUTLASS on 12.x, aiter "
        "on AMD GPUs, else Triton", does=AUTO,
    ),
    _sglang(FP8_GEMM, "deep_gemm", "the DeepGEMM package", low=90),
    _sglang(FP8_GEMM, "flashinfer_trtllm", "FlashInfer on TensorRT-LLM's kernels", low=100),
    _sglang(FP8_GEMM, "flashinfer_cutlass", "FlashInfer on CUTLASS, groups", low=100),
    _sglang(FP8_GEMM, "flashinfer_deepgemm", "FlashInfer's DeepGEMM, good for small batches; 9.0 only", low=90),
    _sglang(FP8_GEMM, "flashinfer_cutedsl", "MXFP8 in CuTe DSL", low=100),
    _sglang(
        FP8_GEMM, "cutlass", "SGLang's own CUTLASS, on 12.x only", low=120, says="--fp8-gemm-backend=cutlass is "
        "deprecated on this hardware.",
    ),
    _sglang(FP8_GEMM, "triton", "Triton"),
    _sglang(FP8_GEMM, "aiter", "AMD's aiter, with SGLANG_USE_AITER=1", only="AMD"),
)  # fmt: skip

_FP4 = (
    _sglang(
        FP4_GEMM, "auto", "NVFP4: CuTe DSL on 10.x, Marlin from 8.0 to 9.x, else FlashInfer on CUTLASS",
        does=AUTO,
    ),
    _sglang(FP4_GEMM, "flashinfer_cudnn", "FlashInfer on cuDNN", low=100),
    _sglang(FP4_GEMM, "flashinfer_cutedsl", "FlashInfer in CuTe DSL", low=100),
    _sglang(FP4_GEMM, "flashinfer_cutlass", "FlashInfer on CUTLASS", low=100),
    _sglang(FP4_GEMM, "flashinfer_trtllm", "FlashInfer on TensorRT-LLM's kernels, weights shuffled", low=100),
    _sglang(FP4_GEMM, "marlin", "weight-only kernels: inputs stay in 16 bits", low=80),
)  # fmt: skip

_MOE = (
    _sglang(EXPERTS, "auto", "by model, method and GPU", does=AUTO),
    _sglang(EXPERTS, "deep_gemm", "the DeepGEMM package", low=90),
    _sglang(EXPERTS, "triton", "Triton's fused experts"),
    _sglang(EXPERTS, "triton_kernel", "the triton_kernels package, gpt-oss's"),
    _sglang(EXPERTS, "flashinfer_trtllm", "FlashInfer on TensorRT-LLM's kernels", low=100),
    _sglang(EXPERTS, "experimental_sgl_trtllm", "a rewrite of the same, experimental", low=100),
    _sglang(EXPERTS, "flashinfer_trtllm_routed", "the same, routed outside the kernel", low=100),
    _sglang(EXPERTS, "flashinfer_cutlass", "FlashInfer on CUTLASS"),
    _sglang(EXPERTS, "flashinfer_mxfp4", "FlashInfer's MXFP4, gpt-oss's"),
    _sglang(EXPERTS, "flashinfer_cutedsl", "FlashInfer in CuTe DSL, FP4", low=100),
    _sglang(EXPERTS, "flashinfer_megamoe", "FlashInfer with dispatch in the kernel", low=100),
    _sglang(EXPERTS, "megamoe", "dispatch, product and combination in one kernel", low=100),
    _sglang(EXPERTS, "cutlass", "SGLang's own CUTLASS"),
    _sglang(EXPERTS, "aiter", "AMD's aiter", only="AMD"),
    _sglang(EXPERTS, "marlin", "weight-only kernels: inputs stay in 16 bits", low=80),
    _sglang(EXPERTS, "experimental_sgl_marlin", "a rewrite of the same, experimental", low=80),
    _sglang(EXPERTS, "humming", "the humming package", low=75),
    _sglang(EXPERTS, "lora_cutedsl", "with LoRA adapters, CuTe DSL"),
    _sglang(EXPERTS, "lora_triton", "with LoRA adapters, Triton"),
    _sglang(EXPERTS, "lora_marlin", "with LoRA adapters, Marlin"),
    _sglang(EXPERTS, "hpc_ops", "Tencent's HPC-Ops, FP8 on 9.0", low=90),
    _sglang(EXPERTS, "intel_xpu", "Intel GPUs", does=OUT, only="Intel GPUs"),
)  # fmt: skip

ROWS = (*_VLLM_LINEAR, *_VLLM_EXPERTS, *_FP8, *_FP4, *_MOE)
