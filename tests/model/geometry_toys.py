"""Small configs with no number twice where it can be helped, so that a width taken for another shows."""

from __future__ import annotations

from typing import Any

PLAIN: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 130,
    "max_position_embeddings": 72,
    "pad_token_id": 0,
}
HEADS = {**PLAIN, "head_dim": 24}
ALL_HEADS = {name: value for name, value in PLAIN.items() if name != "num_key_value_heads"}
BIASED = {"attention_bias": True, "mlp_bias": True}
MOE = {"moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
MLA = {
    "q_lora_rank": 36,
    "kv_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "n_group": 1,
}
INDEX = {"index_n_heads": 3, "index_head_dim": 16, "index_topk": 32}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "shared_expert_intermediate_size": 48,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
}
GRANITE = {**PLAIN, **MAMBA2, "shared_intermediate_size": 44, "layer_types": ["mamba", "attention", "mamba"]}
STATES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 130, "state_size": 6}
NEMOTRON = {
    **{name: value for name, value in HEADS.items() if name != "num_hidden_layers"},
    "hybrid_override_pattern": "M*-EM",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "n_routed_experts": 5,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
}
GEMMA3N = {
    **HEADS,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 20,
    "vocab_size_per_layer_input": 100,
    "laurel_rank": 12,
    "altup_num_inputs": 3,
    "intermediate_size": [96] * 3 + [80] * 3,
    "activation_sparsity_pattern": [0.0] * 6,
}
GEMMA4 = {
    **HEADS,
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "global_head_dim": 28,
    "hidden_size_per_layer_input": 20,
    "vocab_size_per_layer_input": 100,
}
CROSSED = {**PLAIN, "num_hidden_layers": 5, "cross_attention_layers": [1, 3]}
ERNIE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 2}
KIMI = {
    **ALL_HEADS,
    **{name: value for name, value in MLA.items() if name != "q_lora_rank"},
    "linear_head_dim": 10,
    "linear_num_heads": 3,
    "num_experts": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
ZAMBA = {
    **ALL_HEADS,
    "num_hidden_layers": 5,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
    "mamba_d_state": 12,
    "mamba_d_conv": 3,
    "mamba_headdim": 16,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "num_mem_blocks": 2,
    "adapter_rank": 7,
}
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 72, "vocab_size": 130}
OPT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "vocab_size": 130,
    "max_position_embeddings": 72,
}
FALCON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 130}
FALCON_40B = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
SHORT = {**PLAIN, "layer_types": ["conv", "full_attention", "conv"]}

# model_type and fields; a model_type comes more than once where switches change what is there.
TOYS: list[tuple[str, dict[str, Any]]] = [
    *(
        (family, HEADS)
        for family in ("llama", "mistral", "ministral", "ministral3", "qwen3", "gemma", "gemma2")
    ),
    *((family, HEADS) for family in ("gemma3_text", "seed_oss", "glm", "glm4", "arcee")),
    *(
        (family, PLAIN)
        for family in ("qwen2", "granite", "smollm3", "olmo", "olmo2", "olmo3", "cohere", "cohere2")
    ),
    *((family, PLAIN) for family in ("exaone4", "phi3", "starcoder2", "nemotron")),
    *((family, {**HEADS, **BIASED}) for family in ("llama", "arcee", "glm4")),
    *((family, {**PLAIN, **BIASED}) for family in ("granite", "smollm3", "nemotron", "olmo2")),
    ("seed_oss", {**HEADS, **BIASED, "attention_out_bias": True}),
    ("qwen3", {**HEADS, "tie_word_embeddings": True}),
    ("gemma3_text", {**HEADS, "num_hidden_layers": 7}),
    ("qwen2", {**PLAIN, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}),
    ("cohere", {**PLAIN, "use_qk_norm": True}),
    ("starcoder2", {**PLAIN, "use_bias": False, "tie_word_embeddings": False}),
    ("mixtral", {**HEADS, **LOCAL}),
    ("minimax_m2", {**HEADS, **LOCAL}),
    ("ernie4_5", HEADS),
    ("ernie4_5", {**HEADS, "use_bias": True}),
    ("hunyuan_v1_dense", HEADS),
    ("phimoe", {**HEADS, **LOCAL}),
    ("phimoe", {**HEADS, **LOCAL, "attention_bias": True, "lm_head_bias": True}),
    ("flex_olmo", {**PLAIN, "num_experts": 6, "num_experts_per_tok": 2}),
    ("olmoe", {**PLAIN, "num_experts": 6, "num_experts_per_tok": 2}),
    ("qwen2_moe", {**PLAIN, **MOE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}),
    ("qwen3_moe", {**HEADS, **MOE, "decoder_sparse_step": 2, "num_hidden_layers": 5}),
    ("glm4_moe", {**HEADS, **MLA, "attention_bias": True, "use_qk_norm": True}),
    ("dots1", {**HEADS, **MLA}),
    ("granitemoe", {**PLAIN, **LOCAL}),
    ("granitemoeshared", {**PLAIN, **LOCAL, "shared_intermediate_size": 44}),
    ("gpt_oss", {**HEADS, **LOCAL}),
    (
        "llama4_text",
        {
            **HEADS,
            **LOCAL,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 8,
        },
    ),
    ("deepseek_v2", {**ALL_HEADS, **MLA, "attention_bias": True}),
    ("deepseek_v2", {**ALL_HEADS, **MLA, "q_lora_rank": None}),
    *((family, {**ALL_HEADS, **MLA}) for family in ("deepseek_v3", "glm4_moe_lite", "mistral4")),
    *((family, {**ALL_HEADS, **MLA, **INDEX}) for family in ("deepseek_v32", "glm_moe_dsa")),
    ("glm_moe_dsa", {**ALL_HEADS, **MLA, **INDEX, "indexer_types": ["full", "shared", "full"]}),
    ("qwen3_next", {**HEADS, **MOE, **DELTA, "mlp_only_layers": [1]}),
    ("qwen3_5_text", {**HEADS, **DELTA}),
    ("granitemoehybrid", {**GRANITE, **LOCAL}),
    ("granitemoehybrid", {**GRANITE, "num_local_experts": 0, "mamba_proj_bias": True}),
    ("bamba", {**PLAIN, **MAMBA2, "attn_layer_indices": [1]}),
    ("falcon_h1", {**HEADS, **MAMBA2, "mamba_d_ssm": 128, "mamba_rms_norm": True}),
    (
        "falcon_h1",
        {
            **HEADS,
            **MAMBA2,
            "mamba_d_ssm": 96,
            "mamba_d_head": 12,
            "projectors_bias": True,
            "mamba_conv_bias": False,
        },
    ),
    ("jamba", {**PLAIN, **MAMBA2, "num_hidden_layers": 9, "num_experts": 4, "num_experts_per_tok": 2}),
    ("mamba", STATES),
    ("falcon_mamba", {**STATES, "tie_word_embeddings": False}),
    ("mamba2", {**STATES, "num_heads": 8, "head_dim": 16, "n_groups": 2}),
    ("lfm2", SHORT),
    ("lfm2_moe", {**SHORT, **MOE, "num_dense_layers": 1}),
    ("nemotron_h", NEMOTRON),
    ("nemotron_h", {**NEMOTRON, "moe_latent_size": 24, "mlp_bias": True}),
    *((family, GPT) for family in ("gpt2", "gpt_bigcode", "gptj")),
    ("gpt2", {**GPT, "n_inner": 96, "tie_word_embeddings": False}),
    ("gpt_bigcode", {**GPT, "multi_query": False}),
    ("gpt_neox", ALL_HEADS),
    ("gpt_neox", {**ALL_HEADS, "attention_bias": False, "tie_word_embeddings": True}),
    ("bloom", {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 130}),
    ("opt", OPT),
    ("opt", {**OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("opt", {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("falcon", FALCON),
    ("falcon", {**FALCON, "multi_query": False, "parallel_attn": False, "alibi": True}),
    ("falcon", {**FALCON_40B, "bias": True}),
    ("falcon", {**FALCON_40B, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 96}),
    ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 130, "max_seq_len": 72}),
    ("phi", PLAIN),
    ("phi", {**PLAIN, "qk_layernorm": True}),
    ("stablelm", {**PLAIN, "qk_layernorm": True, "use_qkv_bias": True}),
    ("stablelm", {**PLAIN, "use_parallel_residual": True}),
    *(("apertus", {**PLAIN, **switches}) for switches in ({}, BIASED)),
    *(("internlm3", {**HEADS, **switches}) for switches in ({}, BIASED)),
    ("ernie4_5_moe", {**PLAIN, **ERNIE, "moe_layer_start_index": 1}),
    (
        "ernie4_5_moe",
        {
            **PLAIN,
            **ERNIE,
            "num_hidden_layers": 7,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 4,
            "moe_layer_interval": 2,
            "use_bias": True,
        },
    ),
    ("hunyuan_v1_moe", {**HEADS, "num_experts": 6, "moe_topk": 2}),
    ("exaone_moe", {**HEADS, **MOE, "num_shared_experts": 2}),
    ("kimi_linear", {**KIMI, "mlp_layer_types": ["sparse"] * 3}),
    ("zamba2", ZAMBA),
    ("zamba2", {**ZAMBA, "use_shared_attention_adapter": True, "add_bias_linear": True}),
    ("mllama_text_model", CROSSED),
    ("gemma3n_text", GEMMA3N),
    ("gemma4_text", GEMMA4),
    ("gemma4_text", {**GEMMA4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}),
    ("gemma4_text", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    (
        "gemma4_text",
        {**GEMMA4, **MOE, "top_k_experts": 2, "enable_moe_block": True, "hidden_size_per_layer_input": 0},
    ),
]
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
VIT = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
CLIP = {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32}
PIXTRAL = {**TOWER, "model_type": "pixtral", "head_dim": 16}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "projection_dim": 64}
INTERN = {**TOWER, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]}
WIDE = {
    **TOWER,
    "attention_heads": 2,
    "num_global_layers": 1,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
}
# The same for models with towers, whose text part stands inside.
TOWERS: list[tuple[str, dict[str, Any]]] = [
    ("llava", {"text_config": {**HEADS, "model_type": "llama"}, "vision_config": CLIP}),
    ("mistral3", {"text_config": {**HEADS, "model_type": "mistral"}, "vision_config": PIXTRAL}),
    ("gemma3", {"text_config": HEADS, "vision_config": TOWER, "mm_tokens_per_image": 4}),
    ("idefics3", {"text_config": {**HEADS, "model_type": "llama"}, "vision_config": TOWER}),
    ("smolvlm", {"text_config": {**HEADS, "model_type": "llama"}, "vision_config": TOWER}),
    ("qwen2_5_vl", {"text_config": PLAIN, "vision_config": VIT}),
    ("qwen3_vl", {"text_config": HEADS, "vision_config": VIT}),
    ("qwen3_vl_moe", {"text_config": {**HEADS, **MOE}, "vision_config": VIT}),
    ("qwen3_5", {"text_config": {**HEADS, **DELTA}, "vision_config": VIT}),
    ("qwen2_vl", {"text_config": PLAIN, "vision_config": {**VIT, "embed_dim": 32, "hidden_size": 64}}),
    ("glm4v", {"text_config": PLAIN, "vision_config": VIT}),
    ("glm4v_moe", {"text_config": {**HEADS, **MLA}, "vision_config": VIT}),
    ("llava_next", {"text_config": {**HEADS, "model_type": "mistral"}, "vision_config": CLIP}),
    ("llava_onevision", {"text_config": {**PLAIN, "model_type": "qwen2"}, "vision_config": CLIP}),
    ("paligemma", {"text_config": {**HEADS, "model_type": "gemma"}, "vision_config": SIGLIP}),
    ("internvl", {"text_config": {**PLAIN, "model_type": "qwen2"}, "vision_config": INTERN}),
    ("llama4", {"text_config": {**HEADS, **LOCAL, "interleave_moe_layer_step": 2}, "vision_config": WIDE}),
    ("mllama", {"text_config": CROSSED, "vision_config": {**WIDE, "intermediate_layers_indices": [0]}}),
]
