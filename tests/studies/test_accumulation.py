"""Sampled sums of a running model: the same codes as its linears multiply, errors within their bounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from narrowcast.errors import UsageError
from narrowcast.runtime.linear import ScaledLinear
from narrowcast.runtime.walk import Running
from narrowcast.studies.accumulation import _weight, sampled

IDS = list(range(3, 27))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    root = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(root)
    return root


@pytest.mark.parametrize(
    "online", ["fp8_per_channel", "fp8_per_tensor", "fp8_per_block", "mxfp8", "mxfp4", "fp8_dynamic"]
)
def test_the_weight_is_the_layers_own(model: Path, online: str) -> None:
    with Running.open(model, "float32", online) as run:
        layer = next(
            m for m in run.layer(0).modules() if isinstance(m, ScaledLinear) and m.name.endswith("down_proj")
        )
        operand = (
            layer.weight.matrix if layer.weight.scale is None else layer.weight.matrix * layer.weight.scale
        )
        found = _weight(layer, run).dequantize()
        np.testing.assert_array_equal(found, operand[: len(found)].numpy())


@pytest.mark.parametrize(
    ("online", "name"),
    [
        ("fp8_per_channel", "hopper"), ("fp8_per_channel", "hopper_promoted"), ("fp8_per_channel", "fp32_pairwise"),
        ("fp8_per_block", "ada"), ("mxfp8", "blackwell"), ("mxfp4", "blackwell"), (None, "hopper"),
    ],
)  # fmt: skip
def test_errors_within_their_bounds(model: Path, online: str | None, name: str) -> None:
    with Running.open(model, online=online) as run:
        rows = sampled(run, IDS, name)
    assert len(rows) == 14  # seven linears of two layers
    for row in rows:
        assert row.said == ""
        assert row.error is not None
        assert row.worst is not None
        assert row.error <= row.worst


def test_hopper_loses_bits_that_promotion_and_blackwell_keep(model: Path) -> None:
    with Running.open(model, online="fp8_per_channel") as run:
        worst = {
            name: max(row.error or 0.0 for row in sampled(run, IDS, name, 1))
            for name in ("hopper", "hopper_promoted", "blackwell", "exact")
        }
    assert worst["hopper"] > worst["hopper_promoted"] > worst["blackwell"] > worst["exact"] == 0


def test_what_no_tensor_core_multiplies_is_said(model: Path) -> None:
    with Running.open(model, online="mxfp8") as run:
        assert {row.said for row in sampled(run, IDS, "hopper", 1)} == {
            "hopper has no tensor core for it; engines decode it first"
        }
    with Running.open(model, online="int8") as run:
        assert {row.said for row in sampled(run, IDS, "hopper", 1)} == {"integer sums are exact"}


def test_an_unknown_name_is_refused(model: Path) -> None:
    with Running.open(model) as run, pytest.raises(UsageError):
        sampled(run, IDS, "volta")
