"""The same model in older or other words, and what single families read in a way of their own."""

from __future__ import annotations

from model.geometry_toys import FALCON_40B, GPT, HEADS, KIMI, ZAMBA
from narrowcast.model.families import geometry


def test_fields_in_every_spelling() -> None:
    plain = {**HEADS, "num_experts": 6, "moe_topk": 2, "model_type": "hunyuan_v1_moe"}
    listed = {**plain, "num_experts": [6] * 3, "moe_topk": [2] * 3}
    assert geometry(listed) == geometry(plain)
    biased = {**HEADS, "model_type": "internlm3", "qkv_bias": True, "bias": True}
    assert geometry(biased) == geometry(
        {**HEADS, "model_type": "internlm3", "attention_bias": True, "mlp_bias": True}
    )
    words = {**KIMI, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "linear_conv_kernel_dim": 4,
             "model_type": "kimi_linear"}  # fmt: skip
    files = {name: value for name, value in words.items() if "linear" not in name and name != "layer_types"}
    inner = {"num_heads": 3, "head_dim": 10, "short_conv_kernel_size": 4, "full_attn_layers": [2]}
    assert geometry({**files, "linear_attn_config": inner, "model_type": "kimi_linear"}) == geometry(words)


def test_a_learned_position_is_gathered() -> None:
    ours = geometry({**GPT, "model_type": "gpt2"})
    (table,) = (matrix for matrix in ours.matrices if matrix.leaf == "wpe")
    assert not ours.streams(table)
    assert ours.parameters - ours.active == table.parameters == 72 * 64


def test_key_heads_of_falcon() -> None:
    heads = [
        geometry({**fields, "model_type": "falcon"}).attention[0].kv_heads
        for fields in (FALCON_40B, {**FALCON_40B, "new_decoder_architecture": False})
    ]
    assert heads == [2, 1]


def test_blocks_that_layers_share_are_counted_once_and_keep_keys_each() -> None:
    ours = geometry({**ZAMBA, "model_type": "zamba2"})
    (network,) = (matrix for matrix in ours.matrices if matrix.name.endswith("feed_forward.down_proj"))
    assert network.layers == 2
    assert [(a.kind, a.layers) for a in ours.attention] == [("state", 5), ("full", 3)]
    assert "share the weights of 2" in ours.notes[0]
