"""The same thing in both engines' words: vLLM names the tile of a scale and the kind of layer, SGLang the use.

vLLM      method of a checkpoint × what is quantized while loading × KV cache × backends of linear layers and experts
SGLang    one word for reading and for quantizing while loading × KV cache × a backend for each format of a product
"""

from __future__ import annotations

from narrowcast.hardware.names import Factoring

FACTORINGS: tuple[Factoring, ...] = (
    Factoring(
        "FP8 while loading, a scale per tensor", "--quantization fp8_per_tensor", "--quantization fp8",
        "SGLang: experts, and linear layers where it has no FP8 kernel",
    ),
    Factoring(
        "FP8 while loading, per channel and token", "--quantization fp8_per_channel",
        "--quantization fp8 (or w8a8_fp8)",
    ),
    Factoring("FP8 while loading, blocks of 128x128", "--quantization fp8_per_block", ""),
    Factoring("MXFP8 while loading", "--quantization mxfp8", "--quantization mxfp8"),
    Factoring(
        "MXFP4 while loading", "--quantization mxfp4", "--quantization mxfp4 or quark_mxfp4",
        "SGLang: experts; gfx950",
    ),
    Factoring(
        "NVFP4 experts while loading", "--quantization nvfp4_per_token", "--quantization nvfp4_online",
        "compute capability 10.x",
    ),
    Factoring("INT8 experts while loading", "--quantization int8_per_channel_weight_only", ""),
    Factoring(
        "only these layers, or each its own", "--quantization-config (linear, moe, targets, ignore)",
        "SGLANG_FP8_IGNORED_LAYERS",
    ),
    Factoring(
        "an FP8 checkpoint per channel and token", "compressed-tensors", "compressed-tensors (or w8a8_fp8)",
    ),
    Factoring("an FP8 checkpoint in blocks", "fp8", "fp8"),
    Factoring(
        "a ModelOpt checkpoint", "modelopt, modelopt_fp4, modelopt_mxfp8, modelopt_mixed",
        "modelopt_fp8, modelopt_fp4, mxfp8, modelopt_mixed",
    ),
    Factoring("a GPTQ checkpoint", "auto_gptq", "gptq_marlin"),
    Factoring("an AWQ checkpoint", "auto_awq", "awq_marlin"),
    Factoring("an AutoRound checkpoint", "inc", "auto-round"),
    Factoring("a GGUF file, bitsandbytes", "", "gguf, bitsandbytes"),
    Factoring("KV cache in FP8", "--kv-cache-dtype fp8", "--kv-cache-dtype fp8_e4m3"),
    Factoring("KV cache in NVFP4", "--kv-cache-dtype nvfp4", "--kv-cache-dtype nvfp4"),
    Factoring(
        "KV cache without scales from the checkpoint",
        "--kv-cache-dtype fp8_per_token_head, int8_per_token_head, int4_per_token_head",
        "--kv-cache-dtype mxfp8, fp4_mx_block16",
    ),
    Factoring("kernels of linear layers", "--linear-backend", "--fp8-gemm-backend, --fp4-gemm-backend"),
    Factoring("kernels of experts", "--moe-backend", "--moe-runner-backend"),
)  # fmt: skip
