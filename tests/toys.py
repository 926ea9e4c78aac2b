"""Small checkpoints with real names and shapes of every awkward kind, written with the safetensors package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Shapes = Mapping[str, tuple[int, ...]]
DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}
PRESETS = (
    "fp8_dynamic", "fp8_per_tensor", "fp8_block", "int8", "w8a16", "w4a16", "w4a16_asym", "w4a8", "w4afp8",
    "nvfp4a16", "mxfp4", "mxfp4a16", "mxfp4xfp8", "mxfp6a16", "mxfp6a8", "mxfp8", "mxfp8a16",
)  # fmt: skip


def llama_shapes(
    hidden: int = 128, inner: int = 352, layers: int = 2, vocab: int = 64, head: bool = False
) -> dict[str, tuple[int, ...]]:
    """A Llama: grouped-query attention with a narrow k and v, tied unless ``head``."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name in ("q_proj", "o_proj"):
            shapes[f"{at}.self_attn.{name}.weight"] = (hidden, hidden)
        for name in ("k_proj", "v_proj"):
            shapes[f"{at}.self_attn.{name}.weight"] = (hidden // 2, hidden)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{at}.mlp.{name}.weight"] = (inner, hidden)
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{name}.weight"] = (hidden,)
    if head:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def llama_config(
    hidden: int = 128, inner: int = 352, layers: int = 2, vocab: int = 64, head: bool = False, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab,
        "tie_word_embeddings": not head, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-05, **more,
    }  # fmt: skip


def moe_shapes(
    family: str, experts: int = 4, hidden: int = 32, inner: int = 32
) -> dict[str, tuple[int, ...]]:
    """Attention 32x32, an embedding 64x32 and stacked experts in the orientation of the family."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, hidden)}
    at = "model.layers.0"
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        shapes[f"{at}.self_attn.{name}.weight"] = (hidden, hidden)
    if family == "gpt_oss":
        shapes[f"{at}.mlp.experts.gate_up_proj"] = (experts, hidden, 2 * inner)
        shapes[f"{at}.mlp.experts.gate_up_proj_bias"] = (experts, 2 * inner)
        shapes[f"{at}.mlp.experts.down_proj"] = (experts, inner, hidden)
        shapes[f"{at}.mlp.experts.down_proj_bias"] = (experts, hidden)
        shapes[f"{at}.mlp.router.weight"] = (experts, hidden)
    else:
        shapes[f"{at}.mlp.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
        shapes[f"{at}.mlp.experts.down_proj"] = (experts, hidden, inner)
        shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
    return shapes


def moe_config(family: str, experts: int = 4, hidden: int = 32, inner: int = 32) -> dict[str, Any]:
    return {
        "architectures": ["X"], "model_type": family, "hidden_size": hidden, "intermediate_size": inner,
        "moe_intermediate_size": inner, "num_experts": experts, "num_hidden_layers": 1, "tie_word_embeddings": True,
    }  # fmt: skip


def weights(shapes: Shapes, dtype: str = "bf16", seed: int = 0, scale: float = 0.02) -> dict[str, Any]:
    """Normal weights of every shape."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * scale).astype(DTYPES[dtype]) for name, shape in shapes.items()
    }


def write(
    folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any] | None, shards: int = 1
) -> Path:
    """A checkpoint directory; tensors are dealt out to the shards in turn, so that fused siblings are split."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "generation_config.json").write_text("{}")
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
        return folder
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: names[i % shards] for i, name in enumerate(tensors)}
    for file in names:
        part = {name: value for name, value in tensors.items() if weight_map[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def llama(folder: Path, *, dtype: str = "bf16", shards: int = 1, seed: int = 0, **sizes: Any) -> Path:
    """A random Llama checkpoint."""
    return write(folder, weights(llama_shapes(**sizes), dtype, seed), llama_config(**sizes), shards)


def moe(folder: Path, family: str, *, shards: int = 1, **sizes: Any) -> Path:
    """A random mixture of experts with stacked tensors."""
    return write(folder, weights(moe_shapes(family, **sizes)), moe_config(family, **sizes), shards)
