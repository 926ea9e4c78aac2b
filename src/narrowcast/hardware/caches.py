"""Which names of KV cache scales each engine reads: what an engine does not read, it replaces by 1.0.

    vLLM          every spelling below an attention module, by a mapper of the quantization method
    SGLang        <attention>.k_scale, ModelOpt's k_proj.k_scale, AutoFP8's and Quark's k_proj.output_scale
    TensorRT-LLM  those beside the projections, ModelOpt's
    transformers  compressed-tensors' own, on the attention module

Source: vLLM 0.32 (quantization/base_config.py, fp8.py, quark/quark.py), SGLang 0.5.23 (model_loader/weight_utils.py),
TensorRT-LLM (_torch/modules/linear.py), compressed-tensors 0.20. What an engine does with a value of ModelOpt's NVFP4
cache differs (as it is, or times 6) and is no matter of names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from narrowcast.errors import UsageError
from narrowcast.hardware.engines import engines


@dataclass(frozen=True)
class Names:
    """Names that one engine reads, in these containers (none: all)."""

    engine: str
    pattern: re.Pattern[str]
    containers: tuple[str, ...] = ()


def _names(engine: str, pattern: str, *containers: str) -> Names:
    return Names(engine, re.compile(pattern), containers)


ROWS: tuple[Names, ...] = (
    _names("vllm", r"\.(kv|[qkv])_scale$"),
    _names("vllm", r"\.self_attn\.(q|[kv]_cache)\.scale$"),
    _names("vllm", r"\.[qkv]_proj\.output_scale$|\.self_attn\.prob_output_scale$", "fp8", "quark"),
    _names("sglang", r"\.(self_attn|mixer)\.(k_proj\.k|v_proj\.v)_scale$"),
    _names("sglang", r"\.[qkv]_proj\.output_scale$|self_attn\.prob_output_scale$"),
    _names("sglang", r"\.kv_scale$|(?<!_proj)(?<!\.attn)\.[kv]_scale$"),
    _names("tensorrt-llm", r"\.(k_proj\.k|v_proj\.v|qkv_proj\.[kv])_scale$"),
    _names("transformers", r"(?<!_proj)\.[qkv]_scale$", "compressed-tensors"),
)


def reads_cache_scale(engine: str, tensor_name: str, container: str) -> bool:
    """Whether ``engine`` reads this tensor as a KV cache scale in a checkpoint of this container."""
    if engine not in engines:
        raise UsageError("unknown engine", got=engine, wanted=", ".join(engines))
    return any(
        row.pattern.search(tensor_name) is not None
        for row in ROWS
        if row.engine == engine and (not row.containers or container in row.containers)
    )
