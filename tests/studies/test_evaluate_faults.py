"""Probable bugs: planted in checkpoints and named; healthy ones stay silent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from narrowcast.jobs.quantize import quantize
from narrowcast.studies.evaluate import Options, evaluate
from narrowcast.studies.evaluation import Divergence
from studies import calibrated_toys as toys
from studies.words import save_with_words

QUICK = Options(tokens=None, context=64, greedy=0)
MLP = "model.layers.1.mlp"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 in bf16: attention has biases."""
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=toys.WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).bfloat16()
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value, std=1.0)
    return save_with_words(tmp_path_factory.mktemp("faults") / "parent", model, toys.WORDS)


@pytest.fixture(scope="module")
def files(parent: Path) -> list[str]:
    return toys.texts(parent.parent / "texts", 64, 50, 40)


def made(parent: Path, preset: str) -> Path:
    out = parent.parent / preset
    if not out.exists():
        quantize(parent, out, preset)
    return out


def broken(source: Path, name: str, change: Callable[[Tensors], None], **config: Any) -> Path:
    """A copy with other tensors, or other fields in its config.json."""
    out = source.parent / f"{source.name}-{name}"
    shutil.copytree(source, out)
    weights = load_file(out / "model.safetensors")
    change(weights)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    said = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(said | config))
    return out


def judged(child: Path, parent: Path, files: list[str]) -> tuple[Divergence, int]:
    found = evaluate(child, parent, text=files, options=QUICK)
    assert found.divergence is not None
    assert (found.verdict.says == "probable bug") == bool(found.divergence.faults)
    return found.divergence, found.code


@pytest.mark.parametrize(
    "preset", ["fp8_dynamic", "fp8_block", "int8", "w4a16", "nvfp4a16", "mxfp4", "mxfp8"]
)
def test_healthy_ones_stay_silent(parent: Path, files: list[str], preset: str) -> None:
    found, code = judged(made(parent, preset), parent, files)
    assert (found.faults, found.notes, code) == ((), (), 0)
    for row in found.layers:
        assert row.local is not None
        assert row.expected is not None
        assert 0 < row.local <= 1.01 * row.expected  # the very codes that the reference makes, and a rounding


def swap_gate_and_up(weights: Tensors) -> None:
    for leaf in [
        name.removeprefix(f"{MLP}.gate_proj.") for name in weights if name.startswith(f"{MLP}.gate_proj.")
    ]:
        gate, up = f"{MLP}.gate_proj.{leaf}", f"{MLP}.up_proj.{leaf}"
        weights[gate], weights[up] = weights[up].clone(), weights[gate].clone()


@pytest.mark.parametrize("preset", ["fp8_dynamic", "w4a16", "nvfp4a16"])
def test_swapped_gate_and_up(parent: Path, files: list[str], preset: str) -> None:
    found, code = judged(broken(made(parent, preset), "swapped", swap_gate_and_up), parent, files)
    assert code == 1
    fault = found.jump
    assert fault is not None
    assert fault.where in ("layer 1, mlp.gate_proj", "layer 1, mlp.up_proj")
    assert "gate and up in each other's place" in fault.said
    assert len(found.faults) == 1  # the layers behind it are given the parent's own input


def test_a_scale_that_is_off_by_two(parent: Path, files: list[str]) -> None:
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    child = broken(made(parent, "fp8_dynamic"), "doubled", lambda weights: weights[name].mul_(2))
    fault = judged(child, parent, files)[0].jump
    assert fault is not None
    assert fault.where == "layer 0, self_attn.o_proj"
    assert "differ by a factor of 2" in fault.said or "one factor" in fault.said
    assert fault.part is not None
    assert fault.part.error == pytest.approx(1.0, abs=0.1)  # twice the output: off by the output itself


def test_a_lost_bias(parent: Path, files: list[str]) -> None:
    name = "model.layers.2.self_attn.v_proj.bias"
    child = broken(made(parent, "fp8_dynamic"), "unbiased", lambda weights: weights[name].zero_())
    fault = judged(child, parent, files)[0].jump
    assert fault is not None
    assert fault.where == "layer 2, self_attn.v_proj"
    assert "bias" in fault.said


def test_a_damaged_norm(parent: Path, files: list[str]) -> None:
    name = "model.layers.1.post_attention_layernorm.weight"
    child = broken(made(parent, "fp8_dynamic"), "norm", lambda weights: weights[name].mul_(1.5))
    fault = judged(child, parent, files)[0].jump
    assert fault is not None
    assert fault.where == "layer 1, post_attention_layernorm"


def test_another_rope_theta(parent: Path, files: list[str]) -> None:
    said = json.loads((parent / "config.json").read_text())["rope_parameters"]
    child = broken(
        made(parent, "fp8_dynamic"),
        "theta",
        lambda weights: None,
        rope_parameters=said | {"rope_theta": 100.0},
    )
    found, code = judged(child, parent, files)
    assert code == 1
    assert found.faults[0].where == "the rotary positions"
    assert "rope_theta': 100.0" in found.faults[0].said


def test_a_damaged_embedding(parent: Path, files: list[str]) -> None:
    child = broken(
        made(parent, "fp8_dynamic"),
        "embedding",
        lambda weights: weights["model.embed_tokens.weight"].mul_(-1),
    )
    assert judged(child, parent, files)[0].faults[0].where == "the embedding"


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_damaged_head(parent: Path, files: list[str], name: str) -> None:
    child = broken(made(parent, "fp8_dynamic"), name, lambda weights: weights[name].mul_(2))
    found, code = judged(child, parent, files)
    assert code == 1
    assert [fault.where for fault in found.faults] == ["the head"]
    assert found.faults[0].error == pytest.approx(
        1.0, abs=0.05
    )  # twice the logits: off by the logits themselves


def test_a_child_that_lost_neurons(parent: Path, files: list[str]) -> None:
    """A pruned layer runs, and is judged by what it does as a whole."""

    def prune(weights: Tensors) -> None:
        for i in range(3):
            for part in ("gate_proj", "up_proj"):
                name = f"model.layers.{i}.mlp.{part}.weight"
                weights[name] = weights[name][:96].clone()
            name = f"model.layers.{i}.mlp.down_proj.weight"
            weights[name] = weights[name][:, :96].clone()

    child = broken(parent, "pruned", prune, intermediate_size=96)
    found, code = judged(child, parent, files)
    assert code == 1
    assert [fault.where for fault in found.faults] == ["layer 0", "layer 1", "layer 2"]
