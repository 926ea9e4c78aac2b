"""The rescaling keeps the function and leaves the grid."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from demo import forward, rescale, source

LAYERS = 4  # each layer has the same tensors; all thirty are compared by the demo itself
TOKENS = [1, 4093, 198, 7206, 314, 260, 3575, 282, 4649, 47, 2, 198]


@pytest.fixture(scope="module")
def config(reader) -> dict:
    return source.config(reader) | {"num_hidden_layers": LAYERS}


@pytest.fixture(scope="module")
def weights(reader) -> dict[str, np.ndarray]:
    layers = {f"layers.{i}." for i in range(LAYERS)}
    return {
        name: values
        for name, values in source.tensors(reader)
        if "layers." not in name or any(layer in name for layer in layers)
    }


@pytest.fixture(scope="module")
def reference(weights, config) -> np.ndarray:
    return forward.logits(weights.__getitem__, config, TOKENS)


def rounding_bound(reference: np.ndarray, config: dict) -> float:
    """First-order bound of float64 rounding in two forward passes of one function.

    Each of the two sums of a layer, and the last product, has at most ``intermediate_size`` terms, each with
    the relative error 2^-53, on values whose size the norms hold near that of the logits.
    """
    sums = 2 * config["num_hidden_layers"] + 1
    return 2 * sums * config["intermediate_size"] * 2.0**-53 * float(np.abs(reference).max())


def test_forward_is_the_llama_of_transformers(weights, config, reference, monkeypatch):
    """In float64 too: only its norm and rotary angles, which cast to fp32, are restated in float64 here."""

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        size = config["head_dim"]
        frequency = config["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = position_ids[..., None].double() * frequency
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config | {"torch_dtype": "float64"})).eval()
    state = {name: torch.from_numpy(values.astype(np.float64)) for name, values in weights.items()}
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    with torch.inference_mode():
        theirs = model(torch.tensor([TOKENS])).logits[0].numpy()
    assert theirs.dtype == np.float64
    assert np.abs(theirs - reference).max() < rounding_bound(reference, config)


def test_logits_are_unchanged_in_float64(weights, config, reference):
    layers = rescale.factors(config, seed=7)
    moved = forward.logits(
        lambda name: rescale.rescaled(name, weights[name].astype(np.float64), layers), config, TOKENS
    )
    assert np.abs(moved - reference).max() < rounding_bound(reference, config)


def test_wrong_head_order_would_show(weights, config, reference):
    """The same comparison with the value factors tiled over the heads, not repeated within a group."""
    layers = rescale.factors(config, seed=7)
    for layer in layers:
        layer["value_per_query_head"] = np.tile(layer["value"], 3)
    moved = forward.logits(
        lambda name: rescale.rescaled(name, weights[name].astype(np.float64), layers), config, TOKENS
    )
    assert np.abs(moved - reference).max() > 1e6 * rounding_bound(reference, config)


def test_every_linear_weight_leaves_the_grid(weights, config):
    """On a 4-bit grid the error of Q4_1 is zero; off it, the error in steps is uniform on [-1/2, 1/2].

    Of a group of 32 the minimum and the maximum are met exactly, so the mean square is 30/32 of 1/12. The
    square of such a uniform variable has the variance 1/180, and the mean of n of them that over n.
    """
    layers = rescale.factors(config, source.SEED)
    for name in (name for name in weights if name.endswith("_proj.weight")):
        weight = weights[name]
        assert q4_1_error(weight) == 0.0
        moved = rescale.rescaled(name, weight, layers)
        groups = moved.reshape(-1, 32)
        step = (groups.max(axis=1, keepdims=True) - groups.min(axis=1, keepdims=True)) / 15
        place = (groups - groups.min(axis=1, keepdims=True)) / step
        square = float(np.mean((place - np.rint(place)) ** 2))
        standard_error = math.sqrt(30 / 32 / 180 / weight.size)
        assert abs(square - 30 / 32 / 12) < 5 * standard_error, name
        assert q4_1_error(moved) > 0.0


def q4_1_error(weight: np.ndarray) -> float:
    """Squared error of gguf's own Q4_1 over the squared weights."""
    decoded = dequantize(quantize(weight, GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1)
    return float(np.sum((weight - decoded) ** 2) / np.sum(weight**2))


def test_factors_are_seeded_and_spread(config):
    first, again, other = (rescale.factors(config, seed) for seed in (1, 1, 2))
    for name, values in first[0].items():
        np.testing.assert_array_equal(values, again[0][name])
        assert not np.array_equal(values, other[0][name])
        assert values.min() >= 1 / rescale.SPREAD
        assert values.max() <= rescale.SPREAD
        assert not np.any(np.frexp(values)[0] == 0.5)  # a power of two would keep its column on the grid
    assert not np.array_equal(first[0]["up"], first[1]["up"])


def test_dtype_is_kept(weights, config):
    layers = rescale.factors(config, seed=1)
    for dtype in (np.float32, np.float64):
        for name, values in weights.items():
            assert rescale.rescaled(name, values.astype(dtype), layers).dtype == dtype
