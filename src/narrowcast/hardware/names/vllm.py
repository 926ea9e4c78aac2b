"""vLLM's names, 0.32.0 and 0.33.0: methods, formats of a layer, KV caches and dtypes.

A checkpoint names its method itself, and ``--quantization`` with another one stops the start. The names that quantize
while loading say the scale's tile: vLLM factors method × tile × kind of layer, where SGLang has one word for each use.

``--quantization fp8`` on a checkpoint without quantization metadata is a warning, not an error: the loader makes it
fp8_per_tensor before the class that would refuse it ("The `fp8` quantization method no longer supports online
quantization. Please use `--quantization fp8_per_tensor` instead.") is asked. That was tried with the CPU build.

Source: the wheels' model_executor/layers/quantization/__init__.py (the registry and its classes), config/quantization
and online/ (what is quantized while loading), config/cache.py with the attention backends' lists (KV caches).
"""

from __future__ import annotations

from typing import Any

from narrowcast.hardware.names import (
    ALIAS,
    AUTO,
    COMPUTES,
    DEPRECATED,
    DTYPE,
    EITHER,
    KEY,
    METHOD,
    ONLINE,
    OUT,
    READS,
    Name,
    cache,
)

_GONE = (
    "The quantization method {0} is deprecated and will be removed in future versions of vLLM. To bypass, set "
    "`--allow-deprecated-quantization`."
)


def _method(name: str, does: str, means: str, low: int | None = None, **more: Any) -> Name:
    return Name(name, "vllm", METHOD, does, means, low=low, **more)


_READ = (
    _method(
        "compressed-tensors", READS, "each layer's scheme as config_groups say", 70,
        containers=("compressed-tensors",),
    ),
    _method(
        "fp8", EITHER, "FP8 checkpoints with scales per tensor or in blocks of 128x128; a checkpoint without "
        "quantization metadata becomes fp8_per_tensor, with a warning", 75, containers=("fp8",),
        weights="fp8_tensor", inputs="fp8_token or fp8_tensor",
        instead="fp8_per_tensor, to quantize while loading", says="--quantization fp8 is deprecated for online "
        "quantization; use --quantization fp8_per_tensor instead.",
    ),
    _method(
        "modelopt", READS, "ModelOpt's FP8: static per tensor, per channel and token "
        "(FP8_PER_CHANNEL_PER_TOKEN), blocks (FP8_PB_WO)", 80, containers=("modelopt",),
    ),
    _method("modelopt_fp4", READS, "ModelOpt's NVFP4 and W4A16_NVFP4", 75, containers=("modelopt",)),
    _method("modelopt_mxfp8", READS, "ModelOpt's MXFP8", 80, containers=("modelopt",)),
    _method(
        "modelopt_mixed", READS, "ModelOpt's MIXED_PRECISION: an algorithm for each layer, from quantized_layers",
        75, containers=("modelopt",),
    ),
    _method("quark", READS, "AMD Quark's FP8, INT8, INT4, MX formats and NVFP4", 70, containers=("quark",)),
    _method(
        "auto_gptq", READS, "GPTQ's packed integers; what a checkpoint's gptq becomes", 60, containers=("gptq",),
    ),
    _method(
        "auto_awq", READS, "AWQ's packed integers; what a checkpoint's awq becomes on a GPU", 75,
        containers=("awq",),
    ),
    _method(
        "inc", READS, "Intel Neural Compressor's: what a checkpoint's auto-round becomes", 60,
        containers=("auto-round",),
    ),
    _method("torchao", READS, "torchao's configs", 75, containers=("torchao",)),
    _method(
        "gpt_oss_mxfp4", READS, "what mxfp4 becomes for gpt-oss: its experts' blocks", 80, only="routed experts",
        containers=("mxfp4",),
    ),
    _method(
        "moe_wna16", READS, "the experts of a GPTQ or AWQ checkpoint on the Triton WNA16 kernels, on request or "
        "where Marlin does not take the layer's shape", 70, only="routed experts", containers=("gptq", "awq"),
    ),
    _method(
        "deepseek_v4_fp8", READS, "what fp8 becomes for DeepSeek V4: FP8 blocks and FP4 experts", 75,
        containers=("fp8",),
    ),
    _method(
        "humming", EITHER, "a checkpoint of another method on Humming's kernels, as far as the humming package "
        "reads it; without quantization metadata what VLLM_HUMMING_ONLINE_QUANT_CONFIG asks for, else nothing "
        "is quantized", 75, containers=("compressed-tensors", "modelopt"),
    ),
    _method(
        "mxfp4", EITHER, "MXFP4 experts of a checkpoint, gpt-oss's as gpt_oss_mxfp4; without quantization "
        "metadata weights and inputs become MXFP4", 80, containers=("mxfp4",), weights="mxfp4", inputs="mxfp4",
    ),
    _method(
        "mxfp8", EITHER, "MXFP8 as MiniMax and ModelOpt store it; without quantization metadata weights and "
        "inputs become MXFP8", 80, containers=("modelopt",), weights="mxfp8_e4m3", inputs="mxfp8_e4m3",
    ),
)  # fmt: skip

_LOADING = (
    _method(
        "fp8_per_tensor", ONLINE, "one scale for each fused weight, amax / 448 without a floor", 75,
        weights="fp8_tensor", inputs="fp8_token or fp8_tensor",
    ),
    _method(
        "fp8_per_channel", ONLINE, "one scale for each row of a weight, and one for each token; Marlin is "
        "refused, so NVIDIA GPUs from compute capability 8.9 and MI300 run it", 75, weights="fp8_channel",
        inputs="fp8_token", says="FP8 PTPC online quant requires a kernel that honors per-token activation "
        "quantization; MarlinFP8 is W8A16 weight-only.",
    ),
    _method(
        "fp8_per_block", ONLINE, "one scale for each 128x128 of a weight and each 128 of an input", 75,
        weights="fp8_block128", inputs="fp8_group128",
    ),
    _method(
        "int8_per_channel_weight_only", ONLINE, "experts in INT8 and inputs quantized per token in spite of the "
        "name; other layers stay as they are", 75, weights="int8_channel", inputs="int8_token",
        only="routed experts",
    ),
    _method(
        "nvfp4_per_token", ONLINE, "experts in NVFP4, a scale of inputs for each token; other layers stay as "
        "they are. Needs FlashInfer", 75, weights="nvfp4", inputs="nvfp4", only="routed experts",
        says="nvfp4_per_token online quantization requires a Blackwell (SM100) GPU.",
    ),
    _method(
        "online", ONLINE, "what --quantization-config says for linear layers, experts, or targets by name", 75,
    ),
)  # fmt: skip

_OLD = (
    _method("awq", ALIAS, "AWQ; a checkpoint's own word", 75, instead="auto_awq", containers=("awq",)),
    _method(
        "awq_marlin", ALIAS, "AWQ; the kernel is chosen by itself now", 75, instead="auto_awq",
        containers=("awq",),
    ),
    _method("gptq", ALIAS, "GPTQ; a checkpoint's own word", 60, instead="auto_gptq", containers=("gptq",)),
    _method(
        "gptq_marlin", ALIAS, "GPTQ; the kernel is chosen by itself now", 60, instead="auto_gptq",
        containers=("gptq",),
    ),
    _method(
        "experts_int8", ALIAS, "experts in INT8 while loading, kept for old command lines", 80,
        instead="int8_per_channel_weight_only", weights="int8_channel", inputs="int8_token",
        only="routed experts",
    ),
    _method(
        "fbgemm_fp8", DEPRECATED, "FBGEMM's FP8 per channel", 80, containers=("fbgemm-fp8",),
        instead="--to compressed-tensors, the same codes and scales", says=_GONE.format("fbgemm_fp8"),
    ),
    _method(
        "fp_quant", DEPRECATED, "FPQuant's MXFP4 and NVFP4 behind Hadamard rotations; no container of ours", 100,
        instead="mxfp4, or an NVFP4 checkpoint", says=_GONE.format("fp_quant"),
    ),
)  # fmt: skip


def _key(name: str, means: str, scheme: str = "", **more: Any) -> Name:
    return Name(name, "vllm", KEY, more.pop("does", COMPUTES), means, weights=scheme, **more)


_KEYS = (
    _key("fp8_per_tensor_static", "FP8, one scale that is stored", "fp8_tensor"),
    _key("fp8_per_tensor_dynamic", "FP8, one scale made from each batch", "fp8_tensor"),
    _key("fp8_per_token", "FP8, a scale for each token", "fp8_token"),
    _key("fp8_per_channel_static", "FP8, a scale for each row of a weight", "fp8_channel"),
    _key("fp8_per_block_static", "FP8, a scale for each 128x128 of a weight", "fp8_block128"),
    _key("fp8_per_block_dynamic", "FP8, a scale for each 128 of an input", "fp8_group128"),
    _key("mxfp8", "E4M3 with E8M0 scales for each 32", "mxfp8_e4m3"),
    _key("mxfp4", "E2M1 with E8M0 scales for each 32", "mxfp4"),
    _key("nvfp4_per_token", "NVFP4 under a scale for each token", "nvfp4"),
    _key("int8_per_channel_static", "INT8, a scale for each row of a weight", "int8_channel"),
    _key(
        "int4_per_group_32", "MXFP4 experts of Kimi K3 made INT4 in groups of 32 while loading, on gfx942",
        "int4_g32",
    ),
    _key(
        "int8_per_group_32", "inputs in INT8, a scale for each 32, beside MXFP4 weights on RDNA3", does=OUT,
        since="0.33.0",
    ),
)  # fmt: skip


def _cache(
    name: str, means: str, mode: str, storage: str, scales: str, backends: str = "", **more: Any
) -> Name:
    return cache("vllm", name, means, mode, storage, scales, backends=tuple(backends.split()), **more)


_WIDE = (
    "AiterFlashAttention AiterMLA CutlassMLA FlashAttention FlashAttnMLA FlashAttnMLASparse FlashInfer FlashInferMLA "
    "FlashInferMLASparseTRTLLM FlashMLA FlexAttention ROCMAiterMLASparse RocmAiterUnifiedAttention RocmAttention "
    "RocmSegmentedAttention TritonAttention TritonMLA XPUMLASparse"
)
_BF16 = (
    f"{_WIDE} B12xPagedAttention FlashInferMLASparseSM90 FlashMLASparse HpcAttention TritonAttentionDiffKV"
)
_E5M2 = "AiterFlashAttention AiterMLA CPUAttention FlashInfer RocmAiterUnifiedAttention RocmAttention TritonAttention"
_FP8 = (
    f"{_E5M2} CutlassMLA FlashAttention FlashInferMLA FlashInferMLASparseSM120 FlashInferMLASparseSM90 "
    "FlashInferMLASparseTRTLLM FlashMLA ROCMAiterMLASparse RocmSegmentedAttention TokenspeedMLA TritonAttentionDiffKV "
    "TritonMLA"
)
_CHECKPOINT = "one for K and one for V, from the checkpoint, else 1.0"
_ITS_OWN = "made from each token and head, fp32, stored behind its codes"
_NV = "E4M3 for each 16 in the row, under one for K and one for V from the checkpoint"
_ROTATED = "fp16, in the row"
_TURBO = "the first and last two layers stay wide; FlashAttention is held to version 2"
_OCTAVE = "a codebook of 3 or 4 bits after a Hadamard rotation; no mode of ours"

_CACHES = (
    _cache(
        "auto", "what the checkpoint asks for (ModelOpt's FP8: fp8_e4m3, its NVFP4: nvfp4; a compressed-tensors "
        "or Quark cache scheme: fp8), else the model's dtype", "bf16", "the model's dtype, or as resolved",
        "as resolved", f"{_BF16} CPUAttention CPUMLA FlashInferMLASparseSM120", does=AUTO,
    ),
    _cache("float16", "16 bits, whatever the checkpoint says", "bf16", "fp16", "none", _WIDE),
    _cache("bfloat16", "16 bits, whatever the checkpoint says", "bf16", "bf16", "none", _BF16),
    _cache(
        "fp8", "fp8_e4m3; in FlashMLA's sparse attention fp8_ds_mla", "fp8_e4m3", "E4M3", _CHECKPOINT,
        f"{_FP8} FlashMLASparse", does=ALIAS, instead="fp8_e4m3",
    ),
    _cache(
        "fp8_e4m3", "FlashAttention takes it with version 3 on 9.0 or version 4 on 10.x; Triton from 8.9",
        "fp8_e4m3", "E4M3 (E4M3FNUZ on gfx942)", _CHECKPOINT, f"{_FP8} HpcAttention",
    ),
    _cache(
        "fp8_e5m2", "128 times the range of E4M3 with one bit less; a checkpoint that brings scales is refused",
        "fp8_e5m2", "E5M2", "1.0", _E5M2, says="fp8_e5m2 kv-cache is not supported with fp8 checkpoints.",
    ),
    _cache(
        "fp8_inc", "Gaudi's word; no backend of this wheel takes it", "fp8_inc", "E4M3", _CHECKPOINT, does=OUT,
        instead="fp8_e4m3",
    ),
    _cache(
        "fp8_ds_mla", "DeepSeek's packed latents for sparse attention, 656 bytes a token", "fp8_ds_mla",
        "512 E4M3, 4 fp32 scales, 64 bf16", "made from each token, fp32 for each 128",
        "FlashInferMLASparseSM120 FlashMLASparse",
    ),
    _cache(
        "nvfp4_ds_mla", "the same in NVFP4, 352 bytes a token", "nvfp4_ds_mla",
        "512 E2M1, 32 E4M3 scales, 64 E4M3", "made from each token, E4M3 for each 16", "FlashMLASparse",
    ),
    _cache(
        "turboquant_k8v4", f"keys in FP8, values in 4 bits; {_TURBO}", "turboquant_k8v4", "E4M3 and uint4",
        _ROTATED, "TurboQuantAttention",
    ),
    _cache(
        "turboquant_4bit_nc", f"keys by a codebook of 16, values in 4 bits; {_TURBO}", "turboquant_4bit_nc",
        "4-bit codes and uint4", _ROTATED, "TurboQuantAttention",
    ),
    _cache(
        "turboquant_k3v4_nc", f"keys by a codebook of 8, values in 4 bits; {_TURBO}", "turboquant_k3v4_nc",
        "3-bit codes and uint4", _ROTATED, "TurboQuantAttention",
    ),
    _cache(
        "turboquant_3bit_nc", f"keys by a codebook of 8, values in 3 bits; {_TURBO}", "turboquant_3bit_nc",
        "3-bit codes and uint3", _ROTATED, "TurboQuantAttention",
    ),
    _cache(
        "ultraquant_4bit", "rotated keys and values in E2M1; the first and last two layers stay wide",
        "ultraquant_4bit", "E2M1", "made from each token, E8M0 for each 32", "UltraQuantAttention",
    ),
    _cache(
        "int4_per_token_head", "rotated, asymmetric; the zero point hides in the scale's low bits",
        "int4_per_token_head", "uint4", _ITS_OWN, "TritonAttention",
    ),
    _cache("int8_per_token_head", "no calibration", "int8_per_token_head", "INT8", _ITS_OWN, "TritonAttention"),
    _cache("fp8_per_token_head", "no calibration", "fp8_per_token_head", "E4M3", _ITS_OWN, "TritonAttention"),
    _cache(
        "nvfp4", "on 10.x by TensorRT-LLM's kernels, on 8.x, 9.x and 12.x by FlashAttention 2's; not for latents",
        "nvfp4", "E2M1", _NV, "FlashInfer", says="nvfp4 KV cache is not supported with MLA (Multi-head Latent "
        "Attention) backends.",
    ),
    _cache(
        "nvfp4_4over6", "nvfp4, each block over 6 or over 4, whichever errs less; 10.x only", "nvfp4_4over6",
        "E2M1", _NV, "FlashInfer",
    ),
    _cache(
        "octave_k3v4", f"{_OCTAVE}. RDNA3 and gfx942", "", "3-bit keys (4-bit rotary), 4-bit values", _ROTATED,
        "RocmOctaveAttention", does=OUT, since="0.33.0",
    ),
    _cache(
        "octave_k3v3", f"{_OCTAVE}. RDNA3 and gfx942", "", "3-bit keys (4-bit rotary), 3-bit values", _ROTATED,
        "RocmOctaveAttention", does=OUT, since="0.33.0",
    ),
    _cache(
        "octave_k3v3_compact", f"{_OCTAVE}. RDNA3 and gfx942", "", "3-bit keys and values", _ROTATED,
        "RocmOctaveAttention", does=OUT, since="0.33.0",
    ),
)  # fmt: skip

_DTYPES = (
    Name("auto", "vllm", DTYPE, AUTO, "bf16 for BF16 checkpoints, fp16 for FP16 and FP32 ones"),
    Name("bfloat16", "vllm", DTYPE, COMPUTES, "bf16"),
    Name("float16", "vllm", DTYPE, COMPUTES, "fp16; refused for Gemma 2 and 3 and GLM 4, which overflow"),
    Name("half", "vllm", DTYPE, ALIAS, "fp16", instead="float16"),
    Name("float32", "vllm", DTYPE, COMPUTES, "fp32; quantized layers refuse it"),
    Name("float", "vllm", DTYPE, ALIAS, "fp32", instead="float32"),
)

ROWS = (*_READ, *_LOADING, *_OLD, *_KEYS, *_CACHES, *_DTYPES)
