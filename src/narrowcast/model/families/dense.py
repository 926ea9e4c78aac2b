"""Dense decoders: one attention and one gated network per layer, all layers alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.model.geometry import Attention, Geometry, Matrix
from narrowcast.model.roles import Role


def llama(config: Mapping[str, Any]) -> Geometry:
    """Llama and its kin."""
    hidden, layers, inner = (config[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or hidden // heads
    tied = bool(config.get("tie_word_embeddings", False))
    qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    attention, mlp = "model.layers.*.self_attn.", "model.layers.*.mlp."
    matrices = [
        Matrix("model.embed_tokens", Role.EMBEDDING, (vocabulary, hidden), split="column"),
        Matrix(attention + "q_proj", Role.ATTENTION, (heads * dim, hidden), layers, split="column", heads=heads,
               fused=qkv),
        Matrix(attention + "k_proj", Role.ATTENTION, (kv_heads * dim, hidden), layers, split="column",
               heads=kv_heads, fused=qkv),
        Matrix(attention + "v_proj", Role.ATTENTION, (kv_heads * dim, hidden), layers, split="column",
               heads=kv_heads, fused=qkv),
        Matrix(attention + "o_proj", Role.ATTENTION, (hidden, heads * dim), layers, split="row", heads=heads),
        Matrix(mlp + "gate_proj", Role.MLP, (inner, hidden), layers, split="column", fused=gate_up),
        Matrix(mlp + "up_proj", Role.MLP, (inner, hidden), layers, split="column", fused=gate_up),
        Matrix(mlp + "down_proj", Role.MLP, (hidden, inner), layers, split="row"),
    ]  # fmt: skip
    if not tied:
        matrices.append(Matrix("lm_head", Role.LM_HEAD, (vocabulary, hidden), split="column"))
    return Geometry(
        "llama", layers, hidden, vocabulary, tied, tuple(matrices),
        (Attention("full", layers, heads, kv_heads, dim, dim),), (2 * layers + 1) * hidden,
        config.get("max_position_embeddings"),
    )  # fmt: skip


FAMILIES = dict.fromkeys(("llama", "mistral", "qwen3"), llama)
