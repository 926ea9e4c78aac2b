"""SGLang's names, 0.5.23: methods, KV caches and dtypes.

One word names the use: the same ``fp8`` reads a checkpoint or quantizes while loading, per channel where its FP8 kernel
is and per tensor elsewhere. Which names exist depends on the platform that it was started on; ``only`` says which.
``--quantization`` takes a list that is not the registry: names that a checkpoint alone can ask for are said so.

Source: the wheel's srt/layers/quantization/__init__.py (registry) and its classes, arg_groups/choices.py and
fields/model.py (what the flags take), fp4_kv_cache_quant_method.py, configs/model_config.py (compatible pairs).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from narrowcast.hardware.names import (
    ALIAS,
    AUTO,
    COMPUTES,
    DTYPE,
    EITHER,
    METHOD,
    ONLINE,
    OUT,
    READS,
    REFUSED,
    Name,
    cache,
)

_EXPERTS, _NPU, _APPLE, _INTEL = (
    "routed experts",
    "Ascend NPUs",
    "Apple's MLX",
    "CPUs, Ascend NPUs and Intel GPUs",
)
_EXPORT = "--modelopt-quant with --modelopt-export-path"
_CHECKPOINT_ONLY = "a checkpoint asks for it; --quantization does not take it"


def _method(name: str, does: str, means: str, low: int | None = None, **more: Any) -> Name:
    return Name(name, "sglang", METHOD, does, means, low=low, **more)


_METHODS = (
    _method(
        "fp8", EITHER, "FP8 checkpoints per tensor or in blocks; a 16-bit checkpoint is quantized while "
        "loading: linear layers per channel and token where an FP8 kernel or Marlin is, else per tensor; "
        "experts per tensor", 80, containers=("fp8",), weights="fp8_channel or fp8_tensor",
        inputs="fp8_token or fp8_tensor",
    ),
    _method(
        "mxfp8", EITHER, "MXFP8 checkpoints (blocks of 1x32); a 16-bit checkpoint is quantized while loading. "
        "Where no MX kernel is, it becomes FP8 in blocks of 128x128", 100, containers=("modelopt",),
        weights="mxfp8_e4m3", inputs="mxfp8_e4m3",
    ),
    _method(
        "w8a8_fp8", EITHER, "compressed-tensors FP8 per channel on this class's own kernels; a 16-bit "
        "checkpoint is quantized while loading, per tensor without CUTLASS", 89,
        containers=("compressed-tensors",), weights="fp8_channel or fp8_tensor", inputs="fp8_token or fp8_tensor",
    ),
    _method(
        "w8a8_int8", READS, "compressed-tensors INT8 per channel, inputs per token, on this class's own kernels",
        75, containers=("compressed-tensors",),
    ),
    _method(
        "blockwise_int8", READS,
        f"INT8 in blocks, an experimental format; {_CHECKPOINT_ONLY}; no container of ours", 80,
    ),
    _method(
        "compressed-tensors", READS, "each layer's scheme as config_groups say", 70,
        containers=("compressed-tensors",),
    ),
    _method(
        "modelopt_fp8", READS, "ModelOpt's static FP8 per tensor", 89, containers=("modelopt",), writes=_EXPORT,
    ),
    _method(
        "modelopt_fp4", EITHER, "ModelOpt's NVFP4 and W4A16_NVFP4; experts of an FP8 checkpoint are made NVFP4 "
        "while loading, with a scale of inputs per tensor", 80, containers=("modelopt",), weights="nvfp4",
        inputs="nvfp4", only=f"while loading: {_EXPERTS}", writes=_EXPORT,
    ),
    _method(
        "modelopt_mixed", READS, "ModelOpt's MIXED_PRECISION: an algorithm for each layer", 80,
        containers=("modelopt",),
    ),
    _method(
        "modelopt", ALIAS, "ModelOpt's FP8, where the checkpoint does not say another of its algorithms", 89,
        instead="modelopt_fp8", containers=("modelopt",), writes=_EXPORT,
    ),
    _method(
        "nvfp4_online", ONLINE, "experts of a 16-bit or FP8 checkpoint in NVFP4, a scale of inputs for each "
        "token; other layers stay as they are", 100, weights="nvfp4", inputs="nvfp4", only=_EXPERTS,
    ),
    _method(
        "mxfp4", EITHER, "MXFP4 experts of a checkpoint; without quantization metadata experts are made MXFP4. "
        "On NPUs another class, for dense models", 80, containers=("mxfp4",), weights="mxfp4", inputs="mxfp4",
        only=_EXPERTS,
    ),
    _method("quark", READS, "AMD Quark's FP8 and MXFP4", 70, containers=("quark",)),
    _method(
        "quark_mxfp4", ONLINE, "linear layers and experts in MXFP4 while loading, from 16 bits, or once more "
        "from NVFP4", 70, weights="mxfp4", inputs="mxfp4", only="gfx950",
    ),
    _method(
        "quark_int4fp8_moe", ONLINE, "experts in INT4 per channel, multiplied in FP8", 70, weights="int4_channel",
        inputs="fp8_token", only=f"{_EXPERTS}, AMD",
    ),
    _method(
        "gptq_marlin", READS, "GPTQ's packed integers on Marlin; what a checkpoint's gptq becomes", 80,
        containers=("gptq",),
    ),
    _method(
        "gptq", READS, "GPTQ where Marlin is not; on CUDA and ROCm the registry has no such name", None,
        instead="gptq_marlin", containers=("gptq",), only=_INTEL,
    ),
    _method(
        "awq_marlin", READS, "AWQ's packed integers on Marlin; what a checkpoint's awq becomes", 80,
        containers=("awq",),
    ),
    _method(
        "awq", READS, "AWQ on its Triton kernels; on CUDA a checkpoint gets Marlin where it can", 75,
        containers=("awq",),
    ),
    _method("auto-round", READS, "AutoRound's packed integers", 60, containers=("auto-round",)),
    _method(
        "auto-round-int8", READS, "INT8 per channel that AutoRound wrote as compressed-tensors", 75,
        containers=("compressed-tensors",),
    ),
    _method(
        "moe_wna16", READS, "the experts of a GPTQ or AWQ checkpoint on Triton", 70, containers=("gptq", "awq"),
        only=_EXPERTS,
    ),
    _method("gguf", READS, "GGUF files, decoded by ggml's kernels", 60, containers=("gguf",)),
    _method(
        "bitsandbytes", EITHER, "bitsandbytes checkpoints; a 16-bit checkpoint becomes NF4 while loading", 70,
        containers=("bitsandbytes",), weights="nf4_b64", inputs="wide",
    ),
    _method("w4afp8", READS, "experts in INT4 with FP8 inputs, the rest FP8 in blocks; no container of ours", 90),
    _method(
        "minimax_m3_nvfp4", READS, f"MiniMax M3.1: MXFP8 layers and NVFP4 experts; {_CHECKPOINT_ONLY}", 90,
        containers=("modelopt",),
    ),
    _method(
        "humming", READS, "a checkpoint of another method on Humming's kernels. Needs the humming package", 75,
    ),
    _method(
        "petit_nvfp4", READS, "ModelOpt's NVFP4, decoded to 16 bits, on AMD GPUs without FP4", None,
        containers=("modelopt",), only="gfx90a and gfx942",
    ),
    _method("modelslim", OUT, "MindStudio's ModelSlim for NPUs", None, only=_NPU),
    _method(
        "mxfp_w4a8", OUT, "weights in MXFP4 and inputs in MXFP8, while loading", None, only=_NPU, weights="mxfp4",
        inputs="mxfp8_e4m3",
    ),
    _method("mlx_q4", OUT, "MLX's 4 bits in groups of 64, while loading", None, only=_APPLE),
    _method("mlx_q8", OUT, "MLX's 8 bits in groups of 64, while loading", None, only=_APPLE),
    _method("unquant", AUTO, "no method, and none looked for in the checkpoint", None),
)  # fmt: skip

_cache = partial(cache, "sglang")
_FILE = "one for K and one for V, from the checkpoint or --quantization-param-path, else 1.0"

_CACHES = (
    _cache(
        "auto", "fp8_e4m3 where ModelOpt's checkpoint says FP8, else the model's dtype", "bf16",
        "the model's dtype, or as resolved", "as resolved", does=AUTO,
    ),
    _cache("bf16", "16 bits, whatever the checkpoint says", "bf16", "bf16", "none"),
    _cache(
        "bfloat16", "16 bits, whatever the checkpoint says", "bf16", "bf16", "none", does=ALIAS, instead="bf16",
    ),
    _cache("fp8_e4m3", "E4M3FNUZ on gfx942", "fp8_e4m3", "E4M3", _FILE),
    _cache(
        "fp8_e5m2", "on AMD GPUs it becomes their E4M3", "fp8_e5m2", "E5M2", _FILE,
        says="--kv-cache-dtype fp8_e5m2 is not supported on CPU.",
    ),
    _cache(
        "mxfp8", "FlashAttention 4's", "mxfp8", "E4M3", "made from each token, E8M0 for each 32", low=100,
        says="--kv-cache-dtype mxfp8 requires an SM100+ (Blackwell) GPU",
    ),
    _cache(
        "nvfp4", "TensorRT-LLM's kernels on 10.x multiply the checkpoint's scales by 6; not with latents on "
        "every backend", "nvfp4", "E2M1", "E4M3 for each 16 in the row, under one for K and one for V from the "
        "checkpoint", low=100, says="--kv-cache-dtype=nvfp4 requires Blackwell SM100 or SM120.",
    ),
    _cache(
        "fp4_mx_block16", "MX's rule with groups of 16, any NVIDIA GPU", "fp4_mx_block16", "E2M1",
        "made from each token, E8M0 for each 16",
    ),
    _cache(
        "mxfp4", "a word kept for groups of 32", "", "", "", does=REFUSED, instead="fp4_mx_block16",
        says="--kv-cache-dtype=mxfp4 is reserved for true MXFP4 block-size-32 semantics.",
    ),
    _cache(
        "cpu_fp8_e4m3", "what fp8_e4m3 becomes on a CPU; the flag does not take it", "fp8_e4m3", "E4M3", _FILE,
        does=ALIAS, instead="fp8_e4m3", only="CPUs",
    ),
)  # fmt: skip

_DTYPES = (
    Name("auto", "sglang", DTYPE, AUTO, "bf16 for BF16 checkpoints, fp16 for FP16 and FP32 ones"),
    Name("bfloat16", "sglang", DTYPE, COMPUTES, "bf16"),
    Name("float16", "sglang", DTYPE, COMPUTES, "fp16"),
    Name("half", "sglang", DTYPE, ALIAS, "fp16", instead="float16"),
    Name("float32", "sglang", DTYPE, COMPUTES, "fp32"),
    Name("float", "sglang", DTYPE, ALIAS, "fp32", instead="float32"),
)

ROWS = (*_METHODS, *_CACHES, *_DTYPES)
