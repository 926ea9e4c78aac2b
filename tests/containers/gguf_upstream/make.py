"""Toy models of every family, and the GGUF files that llama.cpp's own converter makes of them.

Run with .venv-peers/bin/python, whose auto-round carries the converter. Each family is a directory as transformers
saves it, in bf16 with random weights, and beside it one .gguf of matrices in bf16 (of Llama also one in Q8_0). The
vocabulary is left out: the converter knows tokenizers by the hash of what they answer.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [1.5, 2.0, 3.0, 4.25],
    "short_factor": [1.0, 1.0, 1.25, 1.5], "original_max_position_embeddings": 1024,
}  # fmt: skip
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "head_dim": 16, "tie_word_embeddings": False, "rms_norm_eps": 1e-5},
    "mistral": {"head_dim": 8, "sliding_window": None, "tie_word_embeddings": True},
    "qwen2": {"rope_parameters": YARN, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": False},
    "qwen3_moe": {
        "head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32},
    "gemma3_text": {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32, "num_hidden_layers": 6,
        "rope_parameters": LINEAR,
    },
    "phi3": {"rope_parameters": LONG, "original_max_position_embeddings": 1024, "sliding_window": 512},
}  # fmt: skip


def build(family: str, more: dict[str, Any]) -> Path:
    """The toy as transformers saves it."""
    where = HERE / family
    shutil.rmtree(where, ignore_errors=True)
    torch.manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **more})).to(
        torch.bfloat16
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(where)
    (where / "generation_config.json").unlink(missing_ok=True)
    return where


def convert(where: Path, kind: str) -> None:
    """The converter's answer, without a vocabulary."""
    root = Path(str(find_spec("auto_round").submodule_search_locations[0])) / "export/export_to_gguf"  # type: ignore[union-attr,index]
    sys.path.insert(0, str(root))
    import conversion
    from conversion.base import ModelBase, gguf

    hparams = ModelBase.load_hparams(where, False)
    name = conversion.get_model_architecture(hparams, conversion.ModelType.TEXT)
    made = None
    while made is None:
        try:
            made = conversion.get_model_class(name)
        except AttributeError as error:  # an architecture that the gguf package does not know yet
            setattr(gguf.MODEL_ARCH, str(error), None)
    made.set_vocab = lambda self: None
    out = where / f"{kind.lower()}.gguf"
    vocabulary = where / "tokenizer.json"  # which the converter of Gemma 3 counts
    vocabulary.write_text(
        json.dumps({"model": {"vocab": dict.fromkeys(map(str, range(64)))}, "added_tokens": []})
    )
    with torch.inference_mode():
        made(where, gguf.LlamaFileType[f"MOSTLY_{kind}"], out, eager=True, model_name="toy").write()
    vocabulary.unlink()


if __name__ == "__main__":
    for family, more in FAMILIES.items():
        where = build(family, more)
        for kind in ("BF16", "Q8_0") if family == "llama" else ("BF16",):
            convert(where, kind)
