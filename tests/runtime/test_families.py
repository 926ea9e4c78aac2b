"""The walk gives what transformers gives, family by family: the same bits.

In float32 on random weights. In bfloat16 the linears alone may differ, which here sum in fp32 in an order of their own
and round once, as transformers' do in theirs: with weights of a quarter times -1, 0 or 1 every such sum of bf16 numbers
is exact in fp32 but for rare wide ones, whatever its order, so that nothing is left to differ.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from narrowcast.runtime.walk import Running
from runtime.families import FAMILIES, STACKED, logits, made, reference, saved, tokens, walked

# One token; within windows of 8 and within 16 original positions; beyond both.
LENGTHS = (40, 9, 1, 24)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_bit_for_bit(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    with Running.open(tmp_path, "float32") as run:
        assert run.unused == ()
        model = reference(tmp_path)
        for length in LENGTHS:
            ids = tokens(length)
            # A copy each time: some rotary tables grow with the longest text seen.
            assert torch.equal(walked(run, ids), logits(copy.deepcopy(model), ids)), length


@pytest.mark.parametrize("name", STACKED)
def test_stacked_on_disk(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path, stacked=True)
    with Running.open(tmp_path, "float32") as run:
        assert run.unused == ()
        assert torch.equal(walked(run, tokens(24)), logits(reference(tmp_path), tokens(24)))


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_where_sums_are_exact(name: str, tmp_path: Path) -> None:
    model = made(name, exact=True).to(torch.bfloat16)
    with torch.no_grad():
        for key, bias in model.named_parameters():
            # transformers rounds such a product before it adds the bias, engines and this walk behind it
            if key.endswith("proj_bias"):
                bias.zero_()
    model.save_pretrained(tmp_path)
    ids = tokens(24)
    with Running.open(tmp_path) as run:
        assert run.dtype == torch.bfloat16
        assert torch.equal(walked(run, ids), logits(reference(tmp_path, torch.bfloat16), ids))


def test_biases_of_experts_are_added_before_the_cast(tmp_path: Path) -> None:
    """The one known difference in bf16: with biases gpt-oss differs from transformers, which rounds twice."""
    saved("gpt-oss", tmp_path, torch.bfloat16, exact=True)
    ids = tokens(24)
    with Running.open(tmp_path) as run:
        assert not torch.equal(walked(run, ids), logits(reference(tmp_path, torch.bfloat16), ids))


@pytest.mark.parametrize("name", FAMILIES)
def test_resident_generates_the_same_tokens(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    ids = tokens(12)[None]
    how = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with Running.open(tmp_path, "float32") as run:
        got = run.resident().generate(ids, attention_mask=torch.ones_like(ids), **how)
        want = reference(tmp_path).generate(ids, attention_mask=torch.ones_like(ids), **how)
        assert torch.equal(got, want)
        assert got.shape[1] == 22


def test_dynamic_rope_does_not_remember(tmp_path: Path) -> None:
    """A text gives the same logits whatever ran before it; a model that is used twice does not."""
    saved("llama-rope-dynamic", tmp_path)
    with Running.open(tmp_path, "float32") as run:
        alone = walked(run, tokens(20))
        walked(run, tokens(60))
        assert torch.equal(walked(run, tokens(20)), alone)
    model = reference(tmp_path)
    logits(model, tokens(60))
    assert not torch.equal(logits(model, tokens(20)), alone)
