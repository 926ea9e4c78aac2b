"""Tiny random models with a tokenizer of whole words, for calibration: a Llama, and a mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from studies.words import save_with_words

WORDS = 48
Seen = dict[str, list[torch.Tensor]]


def llama(folder: Path, seed: int = 0) -> Path:
    """Two layers, four heads on two of keys and values, float32."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    return save_with_words(folder, transformers.LlamaForCausalLM(config), WORDS)


def mixture(folder: Path) -> Path:
    """Qwen3-MoE of one layer with eight experts, of which a token takes two, float32."""
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        initializer_range=0.3, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    return save_with_words(folder, transformers.Qwen3MoeForCausalLM(config), WORDS)


def texts(folder: Path, *lengths: int, seed: int = 0) -> list[str]:
    """One file for each length, of so many random words."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for i, words in enumerate(lengths):
        path = folder / f"text-{seed}-{i}.txt"
        path.write_text(" ".join(f"w{n}" for n in random.integers(0, WORDS, words)))
        made.append(str(path))
    return made


def bf16(source: Path, folder: Path) -> Path:
    """The same model in bf16."""
    import json
    import shutil

    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    narrow = {name: value.bfloat16() for name, value in weights.items()}
    save_file(narrow, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))
    return folder


def watched(folder: Path, files: list[str]) -> tuple[Seen, list[Any]]:
    """Inputs of every module that has weights, file by file, from transformers' own model, and its caches."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    seen: Seen = {}

    def hook(name: str) -> Any:
        return lambda module, inputs: seen.setdefault(name, []).append(inputs)

    for name, module in model.named_modules():
        module.register_forward_pre_hook(hook(name))
    caches = []
    for file in files:
        ids = tokenizer(Path(file).read_text(), return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model(input_ids=ids, use_cache=True)
        caches.append(getattr(out, "cache", None) or out.past_key_values)
    return seen, caches
