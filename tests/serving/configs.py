"""Configs of public models: the fields that geometry needs, as their repositories on the hub have them."""

from __future__ import annotations

from typing import Any

LLAMA3_8B: dict[str, Any] = {  # meta-llama/Meta-Llama-3-8B
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA2_7B: dict[str, Any] = LLAMA3_8B | {  # meta-llama/Llama-2-7b-hf
    "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}  # fmt: skip
LLAMA2_70B: dict[str, Any] = LLAMA2_7B | {  # meta-llama/Llama-2-70b-hf
    "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
LLAMA3_70B: dict[str, Any] = LLAMA2_70B | {  # meta-llama/Llama-3.3-70B-Instruct
    "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA3_405B: dict[str, Any] = LLAMA3_70B | {  # meta-llama/Llama-3.1-405B
    "hidden_size": 16384, "num_hidden_layers": 126, "intermediate_size": 53248, "num_attention_heads": 128,
}  # fmt: skip
QWEN15_72B: dict[str, Any] = {  # Qwen/Qwen1.5-72B-Chat
    "model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 24576,
    "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 152064, "tie_word_embeddings": False,
    "use_sliding_window": False, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_8B: dict[str, Any] = {  # Qwen/Qwen3-8B
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False, "use_sliding_window": False, "attention_bias": False,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_120B: dict[str, Any] = {  # openai/gpt-oss-120b
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
    "tie_word_embeddings": False, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = GPT_OSS_120B | {  # openai/gpt-oss-20b
    "num_hidden_layers": 24, "num_local_experts": 32, "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {  # deepseek-ai/DeepSeek-V3
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280,
    "tie_word_embeddings": False, "attention_bias": False, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V32: dict[str, Any] = DEEPSEEK_V3 | {  # deepseek-ai/DeepSeek-V3.2
    "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
}  # fmt: skip
