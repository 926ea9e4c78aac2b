"""TensorRT-LLM's names: the algorithms of hf_quant_config.json and of KV caches.

It has no flag for a method: a checkpoint says its algorithm, and the PyTorch backend reads some of them from Hugging
Face's own configs. Algorithms that only the older engine-building flow had are out of scope. Nothing was run.

Source: NVIDIA/TensorRT-LLM, tensorrt_llm/quantization/mode.py (QuantAlgo, KV_CACHE_QUANT_ALGO_LIST) and
_torch/model_config.py at several commits of 2025 and 2026: no wheel of it is parsed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from narrowcast.hardware.names import ALIAS, METHOD, OUT, READS, Name, cache

_BUILT = "engines built ahead of time"


def _algorithm(name: str, does: str, means: str, **more: Any) -> Name:
    return Name(name, "tensorrt-llm", METHOD, does, means, **more)


def _read(name: str, means: str, weights: str, inputs: str, *containers: str) -> Name:
    return _algorithm(
        name, READS, means, weights=weights, inputs=inputs, containers=containers or ("modelopt",)
    )


_ALGORITHMS = (
    _read("FP8", "static FP8 per tensor; without input scales dynamic", "fp8_tensor", "fp8_tensor"),
    _read(
        "FP8_PER_CHANNEL_PER_TOKEN", "FP8 per channel and token", "fp8_channel", "fp8_token", "modelopt",
        "compressed-tensors",
    ),
    _read(
        "FP8_BLOCK_SCALES", "FP8 in blocks of 128x128; on 10.0 and 12.0 quantized once more under scales that "
        "are powers of two", "fp8_block128", "fp8_group128", "modelopt", "compressed-tensors", "fp8",
    ),
    _algorithm(
        "FP8_PB_WO", ALIAS, "ModelOpt's word for blocks", instead="FP8_BLOCK_SCALES", containers=("modelopt",),
    ),
    _read(
        "NVFP4", "scales of fused siblings must be equal; without input scales dynamic", "nvfp4", "nvfp4",
        "modelopt", "compressed-tensors",
    ),
    _read("NVFP4_AWQ", "NVFP4 behind AWQ's scales of inputs (pre_quant_scale)", "nvfp4", "nvfp4"),
    _algorithm("NVFP4_ARC", OUT, "NVFP4 with residual columns beside it", weights="nvfp4", inputs="nvfp4"),
    _read("W4A16_NVFP4", "NVFP4 weights, inputs left in 16 bits", "nvfp4", "wide"),
    _read("W4A8_NVFP4_FP8", "NVFP4 weights, FP8 inputs", "nvfp4", "fp8_tensor"),
    _read("W4A8_MXFP4_FP8", "MXFP4 weights, FP8 inputs", "mxfp4", "fp8_tensor", "modelopt", "mxfp4"),
    _read(
        "W4A8_MXFP4_MXFP8", "MXFP4 weights, MXFP8 inputs: gpt-oss from 10.0 on", "mxfp4", "mxfp8_e4m3", "mxfp4",
    ),
    _read(
        "W4A16_MXFP4", "MXFP4 weights, inputs left in 16 bits: gpt-oss below 10.0", "mxfp4", "wide", "mxfp4",
        "compressed-tensors",
    ),
    _read("MXFP8", "blocks of 1x32", "mxfp8_e4m3", "mxfp8_e4m3"),
    _read("W4A16_AWQ", "INT4 in groups behind AWQ's scales of inputs, which must be there", "int4_g128", "wide"),
    _read("W4A8_AWQ", "the same with FP8 inputs", "int4_g128", "fp8_tensor"),
    _read("W8A16", "INT8 per channel, inputs left in 16 bits", "int8_channel", "wide"),
    _read("MIXED_PRECISION", "an algorithm for each layer, from quantized_layers or quant_cfg.json", "", ""),
    _algorithm("NO_QUANT", READS, "nothing is quantized"),
    _algorithm(
        "W4A16", OUT, "INT4 per channel made while building", only=_BUILT, weights="int4_channel", inputs="wide",
    ),
    _algorithm("W8A16_GPTQ", OUT, "GPTQ in 8 bits", only=_BUILT),
    _algorithm("W4A16_GPTQ", OUT, "GPTQ in 4 bits", only=_BUILT),
    _algorithm("W8A8_SQ_PER_CHANNEL", OUT, "SmoothQuant: weights per channel, inputs per tensor", only=_BUILT),
    _algorithm("W8A8_SQ_PER_TENSOR_PLUGIN", OUT, "SmoothQuant: one scale each", only=_BUILT),
    _algorithm("W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", OUT, "SmoothQuant per channel and token", only=_BUILT),
    _algorithm("W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN", OUT, "SmoothQuant per channel and tensor", only=_BUILT),
    _algorithm("W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN", OUT, "SmoothQuant per tensor and token", only=_BUILT),
    _algorithm("W4A8_QSERVE_PER_GROUP", OUT, "QServe: INT4 in groups under INT8", only=_BUILT),
    _algorithm("W4A8_QSERVE_PER_CHANNEL", OUT, "QServe: INT4 per channel", only=_BUILT),
    _algorithm("INT8", OUT, "an algorithm of caches, not of weights", only=_BUILT),
)  # fmt: skip

_cache = partial(cache, "tensorrt-llm")
_CHECKPOINT = "one for K and one for V, from the checkpoint, as they are"

_CACHES = (
    _cache("FP8", "the largest of a fused projection's scales", "fp8_e4m3", "E4M3", _CHECKPOINT),
    _cache(
        "NVFP4", "an older version multiplied the scales by 6 and did not load them by itself", "nvfp4", "E2M1",
        _CHECKPOINT,
    ),
    _cache("INT8", "the PyTorch backend does not store it", "int8", "INT8", _CHECKPOINT, does=OUT, only=_BUILT),
)  # fmt: skip

ROWS = (*_ALGORITHMS, *_CACHES)
