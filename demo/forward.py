"""A Llama forward pass in float64 numpy, for comparing two sets of weights without the noise of fp32.

    h += attention(n(h) Wqkv^T) Wo^T;   h += (silu(n(h) Wg^T) * n(h) Wu^T) Wd^T;   logits = n(h) E^T
    n(x) = x / sqrt(mean(x^2) + eps) * g;   rotary angle of pair (i, i + D/2) at position t: t * theta^(-2i/D)

Weights are asked for by name, one at a time, so that nothing is held twice. Left out: a cache, batches
and biases. transformers cannot serve here: it computes norms and rotary angles in fp32 whatever the
model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def logits(
    weight: Callable[[str], npt.NDArray[np.floating[Any]]], config: Mapping[str, Any], tokens: list[int]
) -> Array:
    """Logits ``(len(tokens), vocabulary)`` of one sequence; ``weight`` returns a tensor by its file name."""

    def tensor(name: str) -> Array:
        return weight(f"model.{name}.weight").astype(np.float64)

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * tensor(name)

    embedding = tensor("embed_tokens")
    hidden = embedding[tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        x = norm(hidden, f"{layer}.input_layernorm")
        q, k, v = (x @ tensor(f"{layer}.self_attn.{part}_proj").T for part in "qkv")
        hidden = hidden + attention(q, k, v, config) @ tensor(f"{layer}.self_attn.o_proj").T
        x = norm(hidden, f"{layer}.post_attention_layernorm")
        gate, up = (x @ tensor(f"{layer}.mlp.{part}_proj").T for part in ("gate", "up"))
        hidden = hidden + (gate / (1.0 + np.exp(-gate)) * up) @ tensor(f"{layer}.mlp.down_proj").T
    return norm(hidden, "norm") @ embedding.T


def attention(q: Array, k: Array, v: Array, config: Mapping[str, Any]) -> Array:
    """Causal grouped-query attention, ``(positions, heads * head_dim)``, with rotary positions from zero."""
    positions, size = len(q), config["head_dim"]
    queries_per_kv = config["num_attention_heads"] // config["num_key_value_heads"]
    split = (x.reshape(positions, -1, size).swapaxes(0, 1) for x in (q, k, v))
    query, key, value = split
    query, key = (rotate(x, config["rope_theta"]) for x in (query, key))
    key, value = (np.repeat(x, queries_per_kv, axis=0) for x in (key, value))
    scores = query @ key.swapaxes(1, 2) / np.sqrt(size)
    scores[:, ~np.tri(positions, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = weights / weights.sum(axis=-1, keepdims=True) @ value
    return mixed.swapaxes(0, 1).reshape(positions, -1)


def rotate(x: Array, theta: float) -> Array:
    """``x`` ``(heads, positions, head_dim)`` with each pair (i, i + head_dim/2) turned by its angle."""
    positions, half = x.shape[1], x.shape[2] // 2
    angle = np.outer(np.arange(positions), theta ** (-np.arange(half) / half))
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
