"""config.json and the metadata of a GGUF file, in both directions.

    config[name]  =  metadata[architecture + "." + key]            for every pair of one table

What is no pair is decided by what llama.cpp does with the architecture, since a GGUF file only stores what differs
between its models: activations, the order of sliding and full layers, whether experts are renormalized. Writing checks
that the config says the same, and refuses a model that llama.cpp would compute otherwise; what it ignores without
changing short contexts (a sliding window) is a note. Reading spells it out, so that transformers computes what
llama.cpp would.

The config that is read has the spelling of the models' own files, which transformers 4 and 5, vLLM and SGLang load.

Source: llama.cpp src/llama-model.cpp load_hparams, convert_hf_to_gguf; transformers 5.24 configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowcast.errors import CheckpointError, UsageError
from narrowcast.model.gguf_names import Family, Shape
from narrowcast.model.gguf_rope import F32, Rope, real, rope_fields, rope_of_config, rope_of_gguf

_INTEGERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_EPSILON = "attention.layer_norm_rms_epsilon"
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
# general.file_type: the type of most tensors.
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32, "MXFP4": 38, "NVFP4": 39}
# What transformers takes when a config.json is silent, where llama.cpp needs a number.
_HEAD_DIM = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128}
_THETA = {"gemma3_text": 1e6}
_EPS = {"phi3": 1e-5}
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}
# The number of layers by which llama.cpp knows the largest Gemma of a generation, whose queries it scales otherwise.
_LARGEST = {"gemma2": 46, "gemma3_text": 62}


@dataclass
class GGUFHead:
    """What a GGUF file says beside its weights: metadata, rope tensors, and notes on what the file cannot say."""

    fields: dict[str, Any]
    tensors: dict[str, F32] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def config_of_gguf(
    family: Family, fields: Mapping[str, Any], shapes: Mapping[str, Shape], ropes: Mapping[str, F32]
) -> dict[str, Any]:
    """A config.json that transformers loads. ``shapes``: the file's tensors; ``ropes``: the values of its rope tensors.

    Raises CheckpointError for metadata that are missing or have another kind.
    """
    at = family.architecture + "."
    config: dict[str, Any] = {"architectures": [family.class_name], "model_type": family.model_type}
    for key, name in (_INTEGERS | (_EXPERTS if family.model_type == "qwen3_moe" else {})).items():
        default = config.get("num_attention_heads") if key == "attention.head_count_kv" else None
        config[name] = _integer(fields, at + key, default)
    embedding = shapes.get("token_embd.weight", (0,))
    whole = config["hidden_size"] // config["num_attention_heads"]
    rotated = whole if family.model_type == "phi3" else _integer(fields, at + "rope.dimension_count", whole)
    head_dim = _integer(fields, at + "attention.key_length", rotated)
    if family.model_type != "phi3" and (family.model_type != "qwen2" or head_dim != whole):
        config["head_dim"] = head_dim
    config["rms_norm_eps"] = real(fields.get(at + _EPSILON), at + _EPSILON)
    config |= {"vocab_size": embedding[0], "tie_word_embeddings": "output.weight" not in shapes}
    config |= {name: fields.get(f"tokenizer.ggml.{role}_token_id") for name, role in _TOKENS.items()}
    rope = rope_of_gguf(fields, at, ropes, head_dim, _THETA.get(family.model_type, 1e4))
    config |= {
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "use_cache": True,
        "attention_dropout": 0.0,
    }
    return dict(sorted((config | _particulars(family, fields, at, config, rope, shapes)).items()))


def _particulars(
    family: Family,
    fields: Mapping[str, Any],
    at: str,
    config: dict[str, Any],
    rope: Rope,
    shapes: Mapping[str, Shape],
) -> dict[str, Any]:
    """What a family's config has beyond the pairs, as llama.cpp computes it."""
    window = fields.get(at + "attention.sliding_window") or None
    biased = "blk.0.attn_q.bias" in shapes
    if family.model_type.startswith("gemma"):
        more: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
        if family.model_type == "gemma":
            return more | {"hidden_act": "gelu_pytorch_tanh"}
        more |= {"sliding_window": window, "query_pre_attn_scalar": _query_scalar(family, config)}
        more |= {name: fields.get(at + name) for name in _SOFTCAPS}
        if family.model_type == "gemma3_text":
            more |= {
                "rope_local_base_freq": rope.local_theta or 1e4,
                "sliding_window_pattern": 6 if window else 1,
            }
        return more
    if family.model_type == "phi3":
        whole = config["hidden_size"] // config["num_attention_heads"]
        partial = _integer(fields, at + "rope.dimension_count", whole) / whole
        original = _integer(
            fields, at + "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
        more = {"hidden_act": "silu", "sliding_window": window, "original_max_position_embeddings": original}
        return more if partial == 1 else more | {"partial_rotary_factor": partial}
    if family.model_type == "qwen3_moe":
        routing = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return {"hidden_act": "silu", "attention_bias": biased, "use_sliding_window": False, **routing}
    if family.model_type == "qwen3":
        return {"hidden_act": "silu", "attention_bias": biased, "use_sliding_window": False}
    if family.model_type == "qwen2":
        return {"hidden_act": "silu", "use_sliding_window": False}
    return {"hidden_act": "silu", "attention_bias": biased, "mlp_bias": "blk.0.ffn_gate.bias" in shapes}


def _query_scalar(family: Family, config: Mapping[str, Any]) -> int:
    """What the square root of queries is scaled by: the largest model of each Gemma has hidden_size / heads."""
    if config["num_hidden_layers"] == _LARGEST[family.model_type]:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config["head_dim"])


def _integer(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = fields.get(key, default)
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"the metadata have no usable {key}", got=repr(value)[:60], wanted="a positive integer"
        )
    return value


def gguf_of_config(family: Family, config: Mapping[str, Any], name: str, file_type: str) -> GGUFHead:
    """Metadata and rope tensors of a model called ``name``, most of whose tensors have type ``file_type``.

    Raises CheckpointError for a config that lacks a number, UsageError for a model that llama.cpp computes otherwise.
    """
    at = family.architecture + "."
    head = GGUFHead(
        {"general.architecture": family.architecture, "general.type": "model", "general.name": name}
    )
    _check_computed_alike(family, config, head.notes)
    silent = {
        "num_key_value_heads": config.get("num_attention_heads"),
        "num_experts": config.get("num_local_experts"),
    }
    for key, there in (_INTEGERS | (_EXPERTS if family.model_type == "qwen3_moe" else {})).items():
        head.fields[at + key] = _integer(config, there, silent.get(there))
    head_dim = _head_dim(family, config)
    context = head.fields[at + "context_length"]
    rope = rope_of_config(config, _THETA.get(family.model_type, 1e4))
    if family.rotary_order is False and (rope.scaling or {}).get("rope_type") == "llama3":
        raise UsageError(f"llama.cpp has no llama3 rotary scaling for {family.architecture}")
    pairs, head.tensors = rope_fields(rope, head_dim, context)
    epsilon = config.get("rms_norm_eps", _EPS.get(family.model_type, 1e-6))
    pairs[_EPSILON] = real(epsilon, "rms_norm_eps")
    if family.model_type == "phi3":
        pairs |= _phi3_pairs(config, rope, head_dim, context)
    elif family.model_type != "qwen2" or config.get("head_dim"):
        pairs |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if family.architecture == "llama":
        pairs |= {"vocab_size": _integer(config, "vocab_size"), "rope.dimension_count": head_dim}
    if family.model_type in ("gemma2", "gemma3_text"):
        pairs |= {key: real(config[key], key) for key in _SOFTCAPS if config.get(key)}
        if config.get("sliding_window"):
            pairs["attention.sliding_window"] = _integer(config, "sliding_window")
    head.fields |= {at + key: value for key, value in pairs.items()}
    head.fields |= {"general.file_type": FILE_TYPES[file_type], "general.quantization_version": 2}
    return head


def _head_dim(family: Family, config: Mapping[str, Any]) -> int:
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    return _integer(config, "head_dim", _HEAD_DIM.get(family.model_type, hidden // heads))


def _phi3_pairs(config: Mapping[str, Any], rope: Rope, head_dim: int, context: int) -> dict[str, Any]:
    """Phi-3 says where its long context begins, and with window 0 that it is a Phi-4."""
    new = config.get("rope_parameters") or {}
    partial = real(
        new.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)), "partial_rotary_factor"
    )
    original = _integer(config, "original_max_position_embeddings", context)
    pairs: dict[str, Any] = {
        "rope.dimension_count": int(partial * head_dim),
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": _integer(config, "sliding_window") if config.get("sliding_window") else 0,
    }
    if rope.scaling is not None:
        stretch = context / original
        factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        pairs["rope.scaling.attn_factor"] = factor
    return pairs


def _check_computed_alike(family: Family, config: Mapping[str, Any], notes: list[str]) -> None:
    """llama.cpp fixes these for each architecture; a model that differs would run, and be wrong."""
    gemma = family.model_type.startswith("gemma")
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("gelu_pytorch_tanh", "gelu") if gemma else ("silu",),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "norm_topk_prob": (True,),
    }
    if family.model_type == "qwen3_moe" and config.get("norm_topk_prob") is None:
        config = {**config, "norm_topk_prob": False}  # the default of its class
    if family.model_type in _LARGEST:
        described = {**config, "head_dim": _head_dim(family, config)}
        wanted["query_pre_attn_scalar"] = (_query_scalar(family, described),)
        wanted["use_bidirectional_attention"] = (False,)
    if family.model_type == "gemma3_text" and config.get("sliding_window"):
        wanted |= {"sliding_window_pattern": (6,), "_sliding_window_pattern": (6,)}
    for key, values in wanted.items():
        said = config.get(key)
        if said is not None and said not in values:
            raise UsageError(
                f"llama.cpp computes {family.architecture} with another {key}",
                got=said,
                wanted=" or ".join(map(str, values)),
            )
    layers = config.get("layer_types")
    if (
        family.model_type in _FULL_EVERY
        and isinstance(layers, list)
        and layers != _layer_types(family, len(layers))
    ):
        wanted_layers = f"every {_FULL_EVERY[family.model_type]}th layer full, the others sliding"
        raise UsageError(
            f"llama.cpp computes {family.architecture} with other layer types", wanted=wanted_layers
        )
    window = config.get("sliding_window")
    if window and (family.model_type == "mistral" or config.get("use_sliding_window")):
        notes.append(f"llama.cpp ignores the sliding window of {window} tokens: longer contexts differ")


def _layer_types(family: Family, layers: int) -> list[str]:
    every = _FULL_EVERY[family.model_type]
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
