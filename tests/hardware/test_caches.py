"""Names of KV cache scales, and families that overflow fp16."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from narrowcast.containers import containers
from narrowcast.errors import UsageError
from narrowcast.hardware.caches import reads_cache_scale
from narrowcast.hardware.engines import engines
from narrowcast.hardware.overflow import fp16_families

AT = "model.layers.0.self_attn"
# name, container → the engines that read it
READ = [
    (f"{AT}.k_scale", "compressed-tensors", {"vllm", "sglang", "transformers"}),
    (f"{AT}.v_scale", "compressed-tensors", {"vllm", "sglang", "transformers"}),
    (f"{AT}.q_scale", "compressed-tensors", {"vllm", "transformers"}),
    (f"{AT}.attn.k_scale", "compressed-tensors", {"vllm", "transformers"}),
    (f"{AT}.k_scale", "fp8", {"vllm", "sglang"}),
    (f"{AT}.k_proj.k_scale", "modelopt", {"vllm", "sglang", "tensorrt-llm"}),
    (f"{AT}.v_proj.v_scale", "modelopt", {"vllm", "sglang", "tensorrt-llm"}),
    ("backbone.layers.3.mixer.k_proj.k_scale", "modelopt", {"vllm", "sglang", "tensorrt-llm"}),
    (f"{AT}.qkv_proj.k_scale", "modelopt", {"vllm", "tensorrt-llm"}),
    (f"{AT}.qkqkv_proj.k_scale", "modelopt", {"vllm"}),
    (f"{AT}.k_proj.output_scale", "quark", {"vllm", "sglang"}),
    (f"{AT}.k_proj.output_scale", "fp8", {"vllm", "sglang"}),
    (f"{AT}.k_proj.output_scale", "compressed-tensors", {"sglang"}),
    (f"{AT}.prob_output_scale", "quark", {"vllm", "sglang"}),
    (f"{AT}.k_cache.scale", "fp8", {"vllm"}),
    (f"{AT}.q.scale", "fp8", {"vllm"}),
    (f"{AT}.kv_scale", "fp8", {"vllm", "sglang"}),
    (f"{AT}.k_proj.weight_scale", "fp8", set()),
    (f"{AT}.k_proj.input_scale", "fp8", set()),
    (f"{AT}.k_zero_point", "compressed-tensors", set()),
]


@pytest.mark.parametrize(("name", "container", "readers"), READ)
def test_who_reads_a_name(name: str, container: str, readers: set[str]) -> None:
    assert {engine for engine in engines if reads_cache_scale(engine, name, container)} == readers


def test_what_is_written_is_read() -> None:
    """Each container's own spelling is read by vLLM in that container, k and v both."""
    written = 0
    for container in containers.values():
        if container.cache is not None:
            for which in "kv":
                assert reads_cache_scale("vllm", AT + container.cache.suffixes[which], container.name)
                written += 1
    assert written >= 8


def test_unknown_engine() -> None:
    with pytest.raises(UsageError, match="unknown engine"):
        reads_cache_scale("vlm", f"{AT}.k_scale", "fp8")


def test_families_have_a_reason_and_a_source() -> None:
    assert {"t5", "mt5", "gemma2", "gemma3", "gemma3_text", "glm4", "qwen2"} <= set(fp16_families)
    assert not {"llama", "mistral", "qwen3"} & set(fp16_families)
    assert all(row.reason and row.source for row in fp16_families.values())


def test_vllms_list_is_ours() -> None:
    """The families that vLLM refuses in fp16, from its source."""
    root = Path(__file__).parents[2]
    found = sorted(root.glob(".venv-engine/lib/python3*/site-packages/vllm/config/model.py"))
    if not found:
        pytest.skip("vLLM's source is not here: engines/setup.sh installs its CPU build")
    refused = next(
        set(ast.literal_eval(node.value))
        for node in ast.parse(found[0].read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_FLOAT16_NOT_SUPPORTED_MODELS"
    )
    assert refused == {name for name, row in fp16_families.items() if "vllm" in row.refused_by}
