"""The KV cache that a config asks for, engine by engine and GPU by GPU: NC612 says what the rows of attention say."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from narrowcast.audit.findings import Finding
from narrowcast.audit.run import audit
from narrowcast.hardware.attention import attention_path
from narrowcast.hardware.gpus import gpus

UPSTREAM = Path(__file__).parents[1] / "containers" / "upstream"
BOARDS = ("t4", "a100", "l4", "h100", "b200", "rtx 5090", "mi300x")


def told(model: Path, engine: str, gpu: str | None = None) -> Finding | None:
    done = audit(model, engine=engine, gpu=gpu, select=["NC612"], workers=1)
    return next((one for one in done.findings if one.rule == "NC612"), None)


def asking_for(folder: Path, algorithm: str, head_dim: int, **config: Any) -> Path:
    """ModelOpt's own checkpoint, whose configs name another cache and other heads; its weights stay as they are."""
    model = copytree(UPSTREAM / "modelopt_fp8_kv", folder / "model")
    for name in ("config.json", "hf_quant_config.json"):
        file = model / name
        said = json.loads(file.read_text())
        block = said.get("quantization") or said["quantization_config"]
        block["kv_cache_quant_algo"] = algorithm
        if name == "config.json":
            block["kv_cache_scheme"] = algorithm
            said |= {"head_dim": head_dim, **config}
        file.write_text(json.dumps(said))
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    return {
        (word, dim): asking_for(tmp_path_factory.mktemp(f"{word}{dim}"), word, dim)
        for word, dim in (("NVFP4", 64), ("NVFP4", 128), ("FP8", 80))
    }


# vLLM has NVFP4 caches from FlashInfer: from compute capability 8.0 on in 16-bit arithmetic, without heads of 64 there.
@pytest.mark.parametrize(
    ("word", "dim", "refusing"),
    [
        ("NVFP4", 128, {"t4", "mi300x"}),
        ("NVFP4", 64, {"t4", "a100", "l4", "h100", "rtx 5090", "mi300x"}),
        ("FP8", 80, {"t4", "a100"}),  # heads of 80 are Triton's, which has no FP8 before 8.9
    ],
)
def test_vllm(models: dict[tuple[str, int], Path], word: str, dim: int, refusing: set[str]) -> None:
    found = {gpu: told(models[word, dim], "vllm", gpu) for gpu in BOARDS}
    assert {gpu for gpu, one in found.items() if one is not None} == refusing
    mode = {"NVFP4": "nvfp4", "FP8": "fp8_e4m3"}[word]
    for gpu, one in found.items():
        path = attention_path("vllm", gpus[gpu], mode, "full", dim)
        assert (one is None) == (path.refusal is None), gpu
        assert one is None or one.got == path.refusal
        assert one is None or "auto" not in str(one.remedy)  # which would follow the config again
    assert told(models[word, dim], "vllm") is None  # on some GPU it has it


def test_a_config_that_the_engine_does_not_follow(models: dict[tuple[str, int], Path]) -> None:
    """SGLang's auto follows ModelOpt's FP8 alone (srt/mem_cache/kv_cache_dtype.py)."""
    one = told(UPSTREAM / "compressed_tensors_fp8_kv", "sglang", "h100")
    assert one is not None
    assert "does not take" in one.said
    assert one.remedy == "pass --kv-cache-dtype fp8_e4m3"
    assert told(UPSTREAM / "modelopt_fp8_kv", "sglang", "h100") is None
    blackwell, hopper = (told(models["NVFP4", 128], "sglang", gpu) for gpu in ("b200", "h100"))
    assert blackwell is not None
    assert blackwell.remedy == "pass --kv-cache-dtype nvfp4"
    assert hopper is not None
    assert "--kv-cache-dtype" not in str(hopper.remedy)  # it would stop there


def test_tensorrt_llm(models: dict[tuple[str, int], Path]) -> None:
    found = {gpu for gpu in BOARDS[:-1] if told(models["NVFP4", 128], "tensorrt-llm", gpu) is not None}
    assert found == {"t4", "a100", "l4", "h100"}


def test_heads_that_are_not_known(tmp_path: Path) -> None:
    """A family without a row is asked about with heads of 128."""
    model = asking_for(tmp_path, "NVFP4", 64, model_type="of_no_family")
    assert told(model, "vllm", "h100") is None
    assert told(model, "vllm", "t4") is not None
