"""What users' logs say of kernels, beside the rows: questions from issues, for versions whose choice still holds."""

from __future__ import annotations

from typing import Any

import pytest

from narrowcast.hardware.engines import paths
from narrowcast.hardware.gpus import gpus
from narrowcast.serving.loading import from_config
from narrowcast.serving.splits import splits
from narrowcast.tensors.presets import presets
from serving.configs import DEEPSEEK_V3, QWEN15_72B

CT = "compressed-tensors"
VLLM = "https://github.com/vllm-project/vllm/"

# container, preset, GPU, routed experts, the first kernel or a piece of the refusal, low precision or not, where
ASKED = [
    ("modelopt", "nvfp4a16", "rtx 5090", False, "MarlinNvFp4", False, VLLM + "issues/47749"),
    ("modelopt", "nvfp4a16", "rtx 5090", True, "MARLIN", False, VLLM + "pull/48199"),
    (CT, "nvfp4a16", "rtx pro 6000", False, "MarlinNvFp4", False, VLLM + "issues/27471"),
    (CT, "nvfp4", "rtx pro 6000", False, "FlashInferCutlassNvFp4", True, VLLM + "pull/56603"),
    (CT, "nvfp4", "h100", True, "MARLIN", False, VLLM + "pull/19990"),
    ("mxfp4", "mxfp4a16", "rtx pro 6000", True, "MARLIN", False, VLLM + "issues/31085"),
    ("mxfp4", "mxfp4a16", "rtx 5090", True, "MARLIN", False, VLLM + "pull/37751"),
    ("mxfp4", "mxfp4a16", "h100", True, "TRITON", False, VLLM + "issues/33155"),
    (CT, "mxfp4a16", "b300", True, "CUTLASS_MXFP4_MXFP4", True, VLLM + "pull/55232"),
    (CT, "w4afp8", "b200", False, "No compressed-tensors compatible scheme", None, VLLM + "issues/35439"),
    ("gptq", "w4a16", "h100", False, "Machete", False, VLLM + "pull/23066"),
    (
        "fp8",
        "fp8_block",
        "rtx 3090",
        False,
        "MarlinFP8",
        False,
        "https://github.com/mitchross/talos-argocd-proxmox/pull/1995",
    ),
]


@pytest.mark.parametrize(
    ("container", "preset", "gpu", "experts", "found", "low", "where"),
    ASKED,
    ids=lambda value: str(value)[-24:],
)
def test_vllm(
    container: str, preset: str, gpu: str, experts: bool, found: str, low: bool | None, where: str
) -> None:
    path = paths("vllm", container, presets[preset].linear, gpus[gpu], experts=experts)
    if low is None:
        assert found in (path.refusal or ""), where
        return
    assert (path.refusal, path.kernels[0], path.low_precision) == (None, found, low), where


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("config", "size", "piece"),
    [
        # vllm#13640, Qwen3-VL#831: input_size_per_partition = 14784 is not divisible by 128
        (
            QWEN15_72B | {"intermediate_size": 29568, "num_key_value_heads": 8, "quantization_config": AWQ},
            2,
            "14784",
        ),
        # vllm#12256: DeepSeek V3 on 32 GPUs, 18432 / 32
        (DEEPSEEK_V3 | {"quantization_config": BLOCKS}, 32, "576"),
    ],
    ids=("qwen2.5-72b-awq", "deepseek-v3"),
)
def test_sizes_that_users_could_not_load(config: dict[str, Any], size: int, piece: str) -> None:
    found = splits(from_config("model", config), "vllm", gpus["h200"], sizes=(1, 8, size))
    assert piece in found.first[size]
    assert 1 in found.whole
