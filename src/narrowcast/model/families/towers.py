"""Text parts of multimodal configs: which family they are, and how files name their modules.

    multimodal model_type → family of the text part where it names none, prefix of its modules, the head's name

The names are those of files on the hub, which transformers 4 wrote: LLaVA's text model is a whole language model of
its own, Qwen3-VL's is a part. ``DEFAULTS`` are what the classes take for fields that a nested part leaves out, as
transformers states them; only configs on the hub that do leave some out have a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.model.geometry import Geometry


@dataclass(frozen=True)
class Tower:
    """``family`` of a text part that does not say its own; ``prefix`` instead of ``model``."""

    family: str | None = None
    prefix: str = "model"
    head: str = "lm_head"


_WHOLE: dict[str, str] = {"prefix": "language_model.model", "head": "language_model.lm_head"}
_PART = "model.language_model"

TOWERS: Mapping[str, Tower] = {
    "llava": Tower("llama", **_WHOLE),
    "llava_next": Tower("llama", **_WHOLE),
    "llava_onevision": Tower("qwen2", **_WHOLE),
    "mistral3": Tower("mistral", **_WHOLE),
    "paligemma": Tower("gemma", **_WHOLE),
    "gemma3": Tower("gemma3_text", **_WHOLE),
    "internvl": Tower("qwen2", **_WHOLE),
    "internvl_chat": Tower(None, **_WHOLE),
    "llama4": Tower("llama4_text", **_WHOLE),
    "mllama": Tower("mllama", **_WHOLE),
    "kimi_k25": Tower("kimi_k2", **_WHOLE),
    "qwen3_omni_moe": Tower("qwen3_omni_moe_text", "thinker.model", "thinker.lm_head"),
    "qwen2_5_omni": Tower("qwen2_5_omni_text", "thinker.model", "thinker.lm_head"),
    "idefics3": Tower("llama", "model.text_model"),
    "smolvlm": Tower("llama", "model.text_model"),
    "qwen2_vl": Tower("qwen2_vl_text"),
    "qwen2_5_vl": Tower("qwen2_5_vl_text"),
    "gemma3n": Tower("gemma3n_text", _PART),
    "glm4v": Tower("glm4v_text", _PART),
    "glm4v_moe": Tower("glm4v_moe_text", _PART),
    "gemma4": Tower("gemma4_text", _PART),
    "qwen3_vl": Tower("qwen3_vl_text", _PART),
    "qwen3_vl_moe": Tower("qwen3_vl_moe_text", _PART),
    "qwen3_5": Tower("qwen3_5_text", _PART),
    "qwen3_5_moe": Tower("qwen3_5_moe_text", _PART),
}

_LLAMA: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "gemma": {
        "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
    },
    "gemma2": {
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    },
}  # fmt: skip


def in_tower(geometry: Geometry, tower: Tower) -> Geometry:
    """The text part under the names that files of the whole model give it, with the note of what is not counted."""
    matrices = tuple(
        replace(m, name=tower.head if m.name == "lm_head" else tower.prefix + m.name.removeprefix("model"))
        for m in geometry.matrices
    )
    note = "towers of other modalities and their projectors are not counted: the text model alone"
    return replace(geometry, matrices=matrices, notes=(*geometry.notes, note))
