"""Counts from configs against published ones, what layers keep, and what a config that is not understood is told."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from model.geometry_toys import (
    ALL_HEADS,
    DELTA,
    ERNIE,
    FALCON_40B,
    GEMMA3N,
    GEMMA4,
    GPT,
    HEADS,
    INDEX,
    KIMI,
    LOCAL,
    MAMBA2,
    MLA,
    MOE,
    NEMOTRON,
    OPT,
    PLAIN,
    STATES,
    ZAMBA,
)
from model.public_models import Public, public_models
from narrowcast.errors import CheckpointError
from narrowcast.model.families import FAMILIES, geometry
from narrowcast.model.roles import classify

PUBLIC = {public.name: public for public in public_models()}


@pytest.mark.parametrize("public", PUBLIC.values(), ids=PUBLIC)
def test_parameters_agree_with_the_published_count(public: Public) -> None:
    """Each to the last one: what is published beside the text model's parameters is told in the file."""
    assert geometry(public.config).parameters == public.parameters - public.beside - public.buffers
    assert public.buffers <= public.parameters / 1000


@pytest.mark.parametrize("public", PUBLIC.values(), ids=PUBLIC)
def test_bytes_per_token_agree(public: Public) -> None:
    assert 2 * geometry(public.config).kept_elements() == public.kv


@pytest.mark.parametrize("public", [p for p in PUBLIC.values() if p.active], ids=lambda p: p.name)
def test_active_parameters_agree_with_the_card(public: Public) -> None:
    ours = geometry(public.config)
    counted = ours.active + (ours.vocabulary * ours.hidden if public.embedding else 0)
    assert public.active is not None
    assert abs(counted / 1e9 - public.active) <= public.rounding


def test_seeds_on_llama_3_8b() -> None:
    """The rows on geometry of the collected claims: 8.03e9 parameters, 7.50e9 streamed, within 0.1 %; 131072 and
    65536 bytes per token, exactly."""
    ours = geometry(PUBLIC["llama-3-8b"].config)
    assert ours.parameters == pytest.approx(8.03e9, rel=1e-3)
    assert ours.active == pytest.approx(7.50e9, rel=1e-3)
    assert ours.parameters - ours.active == 128256 * 4096
    assert (ours.kept_elements() * 2, ours.kept_elements()) == (131072, 65536)


def kept(family: str, fields: dict[str, Any]) -> list[tuple[str, int, int | None]]:
    return [(a.kind, a.layers, a.window) for a in geometry({**fields, "model_type": family}).attention]


WORDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = [
    ("llama", PLAIN, [("full", 3, None)]),
    ("mistral", {**PLAIN, "sliding_window": 16}, [("sliding", 3, 16)]),
    ("mistral", {**PLAIN, "sliding_window": None}, [("full", 3, None)]),
    ("ministral", {**PLAIN, "sliding_window": 16, "layer_types": WORDS}, [("sliding", 2, 16), ("full", 1, None)]),
    ("qwen2", {**PLAIN, "sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1},
     [("full", 3, None)]),
    ("qwen2", {**PLAIN, "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
     [("full", 1, None), ("sliding", 2, 16)]),
    ("gemma2", {**HEADS, "sliding_window": 16}, [("sliding", 2, 16), ("full", 1, None)]),
    ("gemma3_text", {**HEADS, "num_hidden_layers": 7, "sliding_window": 16}, [("sliding", 6, 16), ("full", 1, None)]),
    ("gemma3_text", {**HEADS, "sliding_window": 16, "sliding_window_pattern": 2},
     [("sliding", 2, 16), ("full", 1, None)]),
    ("cohere2", {**PLAIN, "num_hidden_layers": 4, "sliding_window": 16}, [("sliding", 3, 17), ("full", 1, None)]),
    ("exaone4", {**PLAIN, "num_hidden_layers": 5, "sliding_window": 16, "sliding_window_pattern": "LLG"},
     [("sliding", 3, 16), ("full", 2, None)]),
    ("qwen3_next", {**HEADS, **MOE, **DELTA, "num_hidden_layers": 5, "layer_types": None, "linear_conv_kernel_dim": 4},
     [("full", 1, None), ("state", 4, None)]),
    ("jamba", {**PLAIN, **MAMBA2, **MOE, "num_hidden_layers": 8, "attn_layer_period": 3, "attn_layer_offset": 2,
               "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": "auto"},
     [("state", 6, None), ("full", 2, None)]),
    ("bamba", {**PLAIN, **MAMBA2, "attn_layer_indices": [0, 2]}, [("state", 1, None), ("full", 2, None)]),
    ("gpt_oss", {**HEADS, **LOCAL, "sliding_window": 16}, [("sliding", 2, 16), ("full", 1, None)]),
    ("llama4_text", {**HEADS, **LOCAL, "num_hidden_layers": 4, "interleave_moe_layer_step": 1,
                     "attention_chunk_size": 32, "no_rope_layers": []}, [("chunked", 3, 32), ("full", 1, None)]),
    ("llama4_text", {**HEADS, **LOCAL, "interleave_moe_layer_step": 1, "attention_chunk_size": 32,
                     "no_rope_layers": [0, 1, 1]}, [("full", 1, None), ("chunked", 2, 32)]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "fields", "wanted"), WINDOWS)
def test_windows_in_every_spelling(family: str, fields: dict[str, Any], wanted: list[Any]) -> None:
    assert kept(family, fields) == wanted


def test_windows_bound_what_is_kept() -> None:
    sliding, full = geometry(PUBLIC["gemma-2-9b"].config).attention
    assert (sliding.tokens(8192), full.tokens(8192), sliding.tokens(100)) == (4096, 8192, 100)


def test_latents_and_indexers() -> None:
    (plain,) = geometry({**ALL_HEADS, **MLA, "model_type": "deepseek_v3"}).attention
    assert (plain.kind, plain.kv_heads, plain.k_dim, plain.v_dim, plain.index) == ("latent", 1, 28 + 8, 0, 0)
    said = {
        **ALL_HEADS,
        **MLA,
        **INDEX,
        "model_type": "glm_moe_dsa",
        "indexer_types": ["full", "shared", "full"],
    }
    own, shared = geometry(said).attention
    assert (own.layers, own.index, own.chosen) == (2, 16, 32)
    assert (shared.layers, shared.index, shared.chosen) == (1, 0, 32)
    said = {
        **said,
        "indexer_types": None,
        "num_hidden_layers": 8,
        "index_topk_freq": 3,
        "index_skip_topk_offset": 3,
    }
    assert [a.layers for a in geometry(said).attention] == [4, 4]  # layers 0, 1, 2 and 5


def test_states_of_every_mixer() -> None:
    """As vLLM's state shapes have them; a fused width of the convolution taken apart by hand."""
    mamba = geometry(
        {**STATES, "model_type": "mamba", "expand": 2, "conv_kernel": 4, "time_step_rank": "auto"}
    )
    assert [(a.layers, a.state, a.recurrent) for a in mamba.attention] == [(2, 128 * 3 + 128 * 6, 128 * 6)]
    second = geometry({**PLAIN, **MAMBA2, "model_type": "bamba", "attn_layer_indices": [1]}).attention[0]
    assert (second.state, second.recurrent) == ((128 + 2 * 2 * 12) * 2 + 8 * 16 * 12, 8 * 16 * 12)
    delta = {
        **HEADS,
        **DELTA,
        "model_type": "qwen3_5_text",
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    }
    row = geometry(delta).attention[1]
    assert (row.state, row.recurrent, row.recurrent_dtype) == (
        (2 * 30 + 84) * 3 + 6 * 10 * 14,
        6 * 10 * 14,
        "fp32",
    )
    short = {**PLAIN, "model_type": "lfm2", "layer_types": ["conv"] * 3, "conv_L_cache": 3}
    row = geometry({**short, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0}).attention[0]
    assert (row.kind, row.layers, row.state, row.recurrent) == ("state", 3, 64 * 2, 0)
    nemotron = {
        **NEMOTRON,
        "model_type": "nemotron_h",
        "num_hidden_layers": 5,
        "conv_kernel": 4,
        "num_experts_per_tok": 2,
    }
    assert geometry(nemotron).attention[0].recurrent_dtype == "fp32"
    assert geometry({**nemotron, "mamba_ssm_cache_dtype": "bfloat16"}).attention[0].recurrent_dtype == "bf16"


def test_borrowed_keys_are_kept_once() -> None:
    ours = geometry({**GEMMA3N, "model_type": "gemma3n_text", "sliding_window": 16})
    assert [(a.kind, a.layers, a.keeping) for a in ours.attention] == [("sliding", 3, 2), ("full", 3, 2)]
    table = next(m for m in ours.matrices if m.leaf == "embed_tokens_per_layer")
    assert not ours.streams(table)
    assert ours.streams(ours.matrices[0])
    assert ours.parameters - ours.active == table.parameters


def test_how_engines_split_and_fuse() -> None:
    ours = {m.leaf: m for m in geometry({**HEADS, "model_type": "llama"}).matrices}
    assert ours["q_proj"].fused == ours["k_proj"].fused == ("q_proj", "k_proj", "v_proj")
    assert ours["gate_proj"].fused == ("gate_proj", "up_proj")
    assert (ours["q_proj"].split, ours["q_proj"].heads, ours["k_proj"].heads) == ("column", 4, 2)
    assert (ours["o_proj"].split, ours["down_proj"].split, ours["o_proj"].fused) == ("row", "row", ())
    latent = {m.leaf: m for m in geometry({**ALL_HEADS, **MLA, "model_type": "deepseek_v3"}).matrices}
    whole = ("q_a_proj", "kv_a_proj_with_mqa", "gate")
    assert {latent[leaf].split for leaf in whole} == {"whole"}
    assert latent["q_a_proj"].fused == ("q_a_proj", "kv_a_proj_with_mqa")
    assert (latent["q_b_proj"].split, latent["kv_b_proj"].split, latent["kv_b_proj"].heads) == (
        "column",
        "column",
        4,
    )
    fused = {m.leaf: m for m in geometry({**PLAIN, "model_type": "phi3"}).matrices}
    assert fused["qkv_proj"].pieces == (64, 32, 32)
    assert fused["gate_up_proj"].pieces == (96, 96)


@pytest.mark.parametrize("public", PUBLIC.values(), ids=PUBLIC)
def test_roles_are_those_that_names_have(public: Public) -> None:
    """The table of roles reads the same from the names; a shared network of a model without experts is its own."""
    for matrix in geometry(public.config).matrices:
        name = matrix.name.replace("*", "0") + ("" if matrix.leaf == "gate_up_proj" else ".weight")
        assert classify(name, matrix.shape, public.config) is matrix.role, matrix.name


def test_notes_say_what_is_not_counted() -> None:
    assert "1 layer for further tokens (MTP)" in geometry(PUBLIC["deepseek-v3"].config).notes[0]
    assert "towers" in geometry(PUBLIC["gemma-3-4b"].config).notes[0]
    assert geometry(PUBLIC["llama-3-8b"].config).notes == ()
    assert "no dtype" in geometry(PUBLIC["gpt-oss-20b"].config).notes[0]


def test_text_parts_under_every_name() -> None:
    part = {**HEADS, "model_type": "qwen3"}
    wanted = geometry(part).parameters
    for key in ("text_config", "llm_config", "language_config"):
        assert geometry({"model_type": "a_model_of_tomorrow", key: part}).parameters == wanted
    old = {**PLAIN, "model_type": "qwen2_vl", "vision_config": {"depth": 1}}
    assert "towers" in geometry(old).notes[-1]
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    assert {m.name.partition(".layers")[0] for m in geometry(llava).matrices} == {
        "language_model.model", "language_model.model.embed_tokens", "language_model.lm_head",
    }  # fmt: skip
    assert geometry(llava).parameters == 6738415616 + 2 * 64 * 4096  # Llama 2 7B with 64 further rows
    tied = {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "text_config": {**HEADS, "model_type": "qwen3_vl_text"},
    }
    assert geometry(tied).tied


LLAMA = {**PLAIN, "model_type": "llama"}
DEEPSEEK = {**ALL_HEADS, **MLA, "model_type": "deepseek_v3"}
NEXT = {**HEADS, **MOE, **DELTA, "model_type": "qwen3_next", "linear_conv_kernel_dim": 4}
BAMBA = {**PLAIN, **MAMBA2, "model_type": "bamba"}
WRONG: list[tuple[dict[str, Any], str]] = [
    *(
        ({**LLAMA, "hidden_size": value}, "hidden_size")
        for value in ("4096", -64, 0, True, float("nan"), 64.0, [64], {"a": 1}, 1 << 60, None)
    ),
    *(({name: value for name, value in LLAMA.items() if name != field}, field)
      for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")),
    ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads"),
    ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads"),
    ({**LLAMA, "num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads"),
    ({**LLAMA, "head_dim": "auto"}, "head_dim"),
    ({**LLAMA, "attention_bias": 1}, "attention_bias"),
    ({**LLAMA, "mlp_bias": "false"}, "mlp_bias"),
    ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({**LLAMA, "torch_dtype": "float7"}, "torch_dtype"),
    ({**LLAMA, "dtype": 16}, "dtype"),
    ({**LLAMA, "max_position_embeddings": -1}, "max_position_embeddings"),
    ({**LLAMA, "layer_types": "full_attention"}, "layer_types"),
    ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types"),
    ({**LLAMA, "layer_types": ["full_attention", "full_attention", None]}, "layer_types"),
    ({**LLAMA, "layer_types": ["full_attention", "full_attention", "hyena"]}, "layer_types"),
    ({**LLAMA, "model_type": "mistral", "sliding_window": -1}, "sliding_window"),
    ({**HEADS, "model_type": "gemma2"}, "sliding_window"),
    ({**HEADS, "model_type": "gemma3_text", "sliding_window": 4, "sliding_window_pattern": "LLX"},
     "sliding_window_pattern"),
    ({**PLAIN, "model_type": "qwen3"}, "head_dim"),
    ({**PLAIN, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}, "max_window_layers"),
    ({**PLAIN, **LOCAL, "model_type": "mixtral", "num_local_experts": None}, "num_local_experts"),
    ({**PLAIN, **LOCAL, "model_type": "mixtral", "num_experts_per_tok": 6}, "num_experts_per_tok"),
    ({**PLAIN, **MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 8, "mlp_only_layers": ["0"]},
     "mlp_only_layers"),
    ({**PLAIN, **MOE, "model_type": "qwen2_moe"}, "shared_expert_intermediate_size"),
    ({**DEEPSEEK, "kv_lora_rank": None}, "kv_lora_rank"),
    ({**DEEPSEEK, "first_k_dense_replace": -1}, "first_k_dense_replace"),
    ({**DEEPSEEK, "mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
    ({**DEEPSEEK, **INDEX, "model_type": "deepseek_v32", "index_topk": None}, "index_topk"),
    ({**DEEPSEEK, **INDEX, "model_type": "glm_moe_dsa", "indexer_types": ["full", "full", 1]}, "indexer_types"),
    ({**HEADS, **LOCAL, "model_type": "llama4_text", "interleave_moe_layer_step": 1, "no_rope_layers": [1]},
     "no_rope_layers"),
    ({**NEXT, "linear_num_key_heads": 4}, "linear_num_key_heads"),
    ({**NEXT, "mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype"),
    ({**NEXT, "layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
    ({**BAMBA, "attn_layer_indices": "1"}, "attn_layer_indices"),
    ({**BAMBA, "mamba_d_head": "large"}, "mamba_d_head"),
    ({**BAMBA, "mamba_d_head": "auto", "mamba_n_heads": 7}, "mamba_n_heads"),
    ({**PLAIN, "model_type": "lfm2", "conv_L_cache": 3, "full_attn_idxs": [0], "block_multiple_of": 8,
      "block_ffn_dim_multiplier": float("nan")}, "block_ffn_dim_multiplier"),
    ({**PLAIN, "model_type": "lfm2"}, "layer_types"),
    ({**NEMOTRON, "model_type": "nemotron_h", "num_hidden_layers": 4}, "hybrid_override_pattern"),
    ({**PLAIN, "model_type": "mllama_text_model"}, "cross_attention_layers"),
    ({**PLAIN, "model_type": "mllama_text_model", "cross_attention_layers": [3]}, "cross_attention_layers"),
    ({**GEMMA3N, "model_type": "gemma3n_text", "sliding_window": 4, "intermediate_size": [96, 80]},
     "intermediate_size"),
    ({**GEMMA3N, "model_type": "gemma3n_text", "num_kv_shared_layers": 6}, "num_kv_shared_layers"),
    ({**GEMMA4, "model_type": "gemma4_text", "global_head_dim": None}, "global_head_dim"),
    ({**GEMMA4, "model_type": "gemma4_text", "per_layer_config": {"2": 28}}, "per_layer_config"),
    ({**PLAIN, "model_type": "smollm3", "num_hidden_layers": 10**9}, "num_hidden_layers"),
    *(
        ({**GPT, "model_type": "gpt2", field: value}, field)
        for field, value in (("n_embd", "wide"), ("n_head", 5), ("n_inner", -1), ("n_positions", True))
    ),
    ({**OPT, "model_type": "opt", "ffn_dim": None}, "ffn_dim"),
    ({**FALCON_40B, "model_type": "falcon", "num_kv_heads": "8"}, "num_kv_heads"),
    ({**GPT, "model_type": "mpt", "no_bias": False}, "no_bias"),
    ({**GPT, "model_type": "mpt", "attn_config": {"alibi": False}}, "attn_config"),
    ({**HEADS, "model_type": "hunyuan_v1_moe", "num_experts": 6, "moe_topk": [2, 2, 1]}, "moe_topk"),
    ({**KIMI, "model_type": "kimi_linear", "mla_use_output_gate": True}, "mla_use_output_gate"),
    ({**KIMI, "model_type": "kimi_linear", "linear_attn_config": {"num_heads": 3}}, "linear_attn_config"),
    ({**KIMI, "model_type": "kimi_linear", "layer_types": None}, "layer_types"),
    ({**ZAMBA, "model_type": "zamba2", "layers_block_type": None}, "layers_block_type"),
    ({**PLAIN}, "model_type"),
    ({**PLAIN, "model_type": "perceiver"}, "model_type"),
    ({**PLAIN, "model_type": ["llama"]}, "model_type"),
    ({"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": "wide"}}, "hidden_size"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "field"), WRONG, ids=[f"{i}-{field}" for i, (_, field) in enumerate(WRONG)]
)
def test_a_config_that_is_not_understood_says_which_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        geometry(config)
    assert caught.value.where == f"config.json {field}"
    assert caught.value.wanted is not None


@pytest.mark.parametrize("config", [None, [], "llama", 3])
def test_a_config_that_is_no_object_is_refused(config: Any) -> None:
    with pytest.raises(CheckpointError, match="no object"):
        geometry(config)


class Asked(dict[str, Any]):
    """A config that remembers which of its fields were asked for."""

    asked: set[str]

    def get(self, name: str, default: Any = None) -> Any:
        self.__dict__.setdefault("asked", set()).add(name)
        return super().get(name, default)


# Whatever any family needs, so that each finds all of its fields here.
WHOLE = {
    **HEADS, **MOE, **LOCAL, **MLA, **INDEX, **DELTA, **MAMBA2, **NEMOTRON, **GEMMA3N, **STATES, "num_hidden_layers": 5,
    "sliding_window": 16, "full_attn_idxs": [1], "cross_attention_layers": [1],
    "intermediate_size": 96, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 1, "conv_L_cache": 3,
    "shared_intermediate_size": 44, "num_dense_layers": 1, "conv_kernel": 4, "linear_conv_kernel_dim": 4,
    "expand": 2, "time_step_rank": "auto", "mamba_dt_rank": 4, "num_heads": 8, "block_multiple_of": 8,
    **ERNIE, "moe_layer_start_index": 1, "linear_num_heads": 3, "linear_head_dim": 10,
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "block_ffn_dim_multiplier": 1.0, "attn_layer_indices": [1], "max_window_layers": 1, "global_head_dim": 28,
}  # fmt: skip
HOSTILE = ["x", -1, 0, True, float("inf"), [], ["a"], {}, 2.5, 1 << 70]


@pytest.mark.parametrize("family", sorted({id(row): name for name, row in FAMILIES.items()}.values()))
def test_no_field_of_any_family_ends_in_a_traceback(family: str) -> None:
    """Every field that a family reads, spoiled in turn: a geometry or a refusal that names a field, nothing else."""
    words = ["mamba"] * 4 + ["attention"] if family in ("granitemoehybrid", "kimi_linear") else None
    own = ZAMBA if family == "zamba2" else {}  # the others read the same fields in another way
    whole = Asked(
        {**WHOLE, **own}, model_type=family, layer_types=words
    )  # these two have no rule without words
    assert geometry(whole).parameters > 0
    refused = set()
    for field in whole.asked:
        for value in HOSTILE:
            try:
                geometry({**whole, field: value})
            except CheckpointError as error:
                refused.add(str(error.where).removeprefix("config.json "))
    assert {"hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings", "model_type"} <= refused
    assert refused <= whole.asked | {"num_attention_heads"}


def test_families_load_no_framework() -> None:
    code = (
        "import sys, narrowcast.model.families; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
