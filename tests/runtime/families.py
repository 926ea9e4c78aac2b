"""Tiny random models of many families, saved by transformers itself, and what transformers computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as t

t.logging.set_verbosity_error()
t.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "topk_group": 1,
}  # fmt: skip


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-rope-llama3": (
        "Llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama-rope-yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-rope-linear": ("Llama", rope("linear", factor=2.0)),
    "llama-rope-dynamic": ("Llama", {"max_position_embeddings": 16, **rope("dynamic", factor=2.0)}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-in-some-layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 2}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "mistral-window-longer-than-texts": ("Mistral", {"sliding_window": 512}),
    "mixtral": ("Mixtral", {**MOE, "sliding_window": None}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "phi-partial-rotary": ("Phi", {"partial_rotary_factor": 0.5}),
    "phi-qk-norms": ("Phi", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "phi3-fused-window": ("Phi3", {"sliding_window": 8, "partial_rotary_factor": 0.5}),
    "phi3-rope-long": (
        "Phi3",
        {
            "original_max_position_embeddings": 16,
            **rope(
                "longrope",
                original_max_position_embeddings=16,
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[1.0, 2.0, 3.0, 4.0],
            ),
        },
    ),
    "phimoe": ("Phimoe", MOE),
    "smollm3-some-without-rotary": (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 2},
    ),
    "granite-multipliers": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    "granite-moe": ("GraniteMoe", MOE),
    "gpt-oss": ("GptOss", {**MOE, "head_dim": 16, "sliding_window": 8}),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", MOE),
    "cohere2": ("Cohere2", {"sliding_window": 8}),
    "stablelm": ("StableLm", {}),
    "deepseek-v2": ("DeepseekV2", {**MLA, "n_group": 1, "topk_method": "greedy"}),
    "deepseek-v3": ("DeepseekV3", {**MLA, "n_group": 2, "num_local_experts": 4}),
    "gpt2-learned-positions": (
        "GPT2",
        {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "n_inner": 64},
    ),
    "gpt-neox": ("GPTNeoX", {}),
    "falcon-layers-return-tuples": ("Falcon", {"ffn_hidden_size": 64, "new_decoder_architecture": False}),
}
STACKED = tuple(
    name
    for name, (kind, _) in FAMILIES.items()
    if kind.endswith(("Moe", "moe", "OssConfig")) or kind in ("Mixtral", "GptOss", "DeepseekV2", "DeepseekV3")
)


def made(name: str, exact: bool = False) -> Any:
    """A model of a family with random weights, or (``exact``) with few-bit weights whose sums are exact in fp32."""
    kind, more = FAMILIES[name]
    config = getattr(t, f"{kind}Config")(**{**SIZES, **more})
    model = t.AutoModelForCausalLM.from_config(config)
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)]:
            if exact:
                low, high = (-1, 2) if tensor.ndim > 1 else (2, 9)
                values = torch.randint(low, high, tensor.shape, generator=dice) * 0.25
            else:
                values = torch.randn(tensor.shape, generator=dice) * (0.3 if tensor.ndim > 1 else 0.2)
                values = values + float(tensor.ndim == 1)
            tensor.copy_(values)
    return model.eval()


def saved(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, stacked: bool = False, exact: bool = False
) -> Path:
    """A model of a family on disk, under the names it was published with, or ``stacked`` as transformers holds it."""
    made(name, exact).to(dtype).save_pretrained(folder, save_original_format=not stacked)
    return folder


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """What transformers makes of a folder, experts summed one after the other."""
    model = t.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    return model.eval()


def tokens(count: int, vocabulary: int = 97) -> torch.Tensor:
    """Token ids that repeat late."""
    return torch.arange(count) * 7 % vocabulary


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """transformers' own logits, float32 [T, V]."""
    with torch.inference_mode():
        return model(ids[None]).logits[0].float()


def walked(run: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits of a walk."""
    state = run.begin(ids)
    for i in range(run.depth):
        run.step(run.layer(i), i, state)
    return run.logits(state)
