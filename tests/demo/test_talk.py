"""Directories load in transformers and talk; the whole demo runs."""

from __future__ import annotations

import time

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from demo import run, talk
from narrowcast.errors import InputError


def test_the_source_talks_sense(smollm2_dir):
    answer = talk.reply(smollm2_dir, talk.QUESTION, length=8)
    assert "Paris" in answer.text
    assert len(answer.tokens) == 8
    assert answer.tokens_per_second > 0


def test_a_missing_tensor_is_not_made_up(tmp_path):
    """transformers would fill it with random numbers and say so in a log."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 32}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_hidden_layers=2)).save_pretrained(
        tmp_path
    )
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"missing_keys.*layers\.1\.mlp\.up_proj"):
        talk.load(tmp_path)


def test_usage(capsys, tmp_path):
    assert talk.main([]) == 2
    assert talk.main([str(tmp_path)]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_demo(smollm2_dir, tmp_path, capsys):
    (tmp_path / "smollm2-bf16").symlink_to(smollm2_dir)
    assert run.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    for preset in run.PRESETS:
        assert f"    --preset {preset}" in shown
        assert sum(line.startswith(preset) for line in shown) == 2, "a continuation and a row of the table"
    start = time.perf_counter()
    answer = run.quantize(tmp_path / "smollm2-bf16", "w4a16")
    assert time.perf_counter() - start < answer["wall_seconds"], "the result of an earlier run is used again"
