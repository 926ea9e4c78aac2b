"""What lines of a log say together: contradictions, and what follows from two settings at once."""

from __future__ import annotations

from narrowcast.doctor.rows import VLLM, Conjunction
from narrowcast.doctor.vllm_numbers import CALIBRATED

_FP8_KV = r"^fp8(?:_e4m3)?$"

CONJUNCTIONS = (
    Conjunction(
        "kv-fp8-without-scales",
        "warning",
        VLLM,
        "The FP8 KV cache runs on the scale 1.0 and the checkpoint has no scale of queries: its KV scales are missing, "
        "or placeholders of 1.0.",
        "Keys and values beyond 448 are clipped and small ones lose bits. Often harmless for values; keys of models "
        "without QK norm can reach hundreds, and then long prompts degrade or answers turn into noise.",
        f"`narrowcast audit MODEL --for vllm` tells missing from 1.0. {CALIBRATED}",
        facts=(("KV cache dtype", _FP8_KV),),
        complaints=("kv-scale-one", "q-scale-from-k"),
    ),
    Conjunction(
        "kv-fp8-unquantized",
        "warning",
        VLLM,
        "The KV cache is FP8 and the model is unquantized: the cache runs on scale 1.0, and the engine does "
        "not say so.",
        "Without quantization_config no KV scales are loaded. Keys and values beyond 448 are clipped and "
        "small ones "
        "lose bits; long prompts suffer first.",
        "--kv-cache-dtype bfloat16, or fp8_per_token_head where the backend has it, or a file with calibrated "
        "scales.",
        facts=(("KV cache dtype", _FP8_KV), ("quantization", r"^none$")),
    ),
    Conjunction(
        # CompressedTensorsKVCacheMethod of 0.32 starts its scales at 1.0 and never looks at them; so does a real log.
        "kv-scales-untold",
        "info",
        VLLM,
        "The KV cache is FP8, and for compressed-tensors files this version does not say whether it found scales.",
        "Without scales in the file it runs on 1.0 in silence.",
        "`narrowcast audit MODEL --for vllm` tells whether they are there.",
        facts=(("KV cache dtype", _FP8_KV), ("quantization", r"^compressed-tensors$")),
        absent=("kv-scale-one",),
    ),
    Conjunction(
        "scales-rounded-at-load",
        "warning",
        VLLM,
        "DeepGEMM computes with power-of-two scales and the checkpoint does not say that its scales are "
        "such.",
        "FP8 block weights with other scales are decoded and quantized again when they are loaded: a second "
        "rounding "
        "that the file does not show.",
        "VLLM_USE_DEEP_GEMM_E8M0=0 or VLLM_USE_DEEP_GEMM=0 keeps the file's scales; or make it with "
        "`--preset "
        "fp8_block_ue8m0`. `narrowcast audit MODEL` tells whether the scales are powers of two.",
        facts=(("DeepGEMM scales", r"^E8M0 enabled$"), ("linear kernel", r"DeepG(?:EMM|emm)\w*Block")),
        absent=("scale format",),
    ),
    Conjunction(
        "named-quantized",
        "warning",
        VLLM,
        "The name of the model speaks of quantization and the engine runs it as unquantized.",
        "Either the name is all there is, or quantization_config is missing and codes are read as numbers: "
        "noise.",
        "`narrowcast inspect MODEL` shows what the tensors are.",
        facts=(
            (
                "model",
                r"(?i)(?:^|[-_/.])(?:fp8|nvfp4|mxfp[48]|fp4|awq|gptq|w[48]a(?:16|8)|int[48])(?:$|[-_/.])",
            ),
            ("quantization", r"^none$"),
        ),
        absent=("online quantization",),
    ),
)
