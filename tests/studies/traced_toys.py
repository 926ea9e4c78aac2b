"""Tiny models with a tokenizer whose token ``i`` is the word ``wi``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from studies.words import save_with_words

WORDS = 64


def llama(folder: Path, **more: Any) -> tuple[Path, Any]:
    """A random float32 Llama of three layers, saved, and transformers' own model of it in eager attention."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, attn_implementation="eager", initializer_range=0.2, **more,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    return folder, model


def save(folder: Path, model: Any) -> Path:
    return save_with_words(folder, model, WORDS)


def text(folder: Path, words: int = 24) -> str:
    """A text file of so many words; word i is w(7 i mod 64)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "text.txt"
    path.write_text(" ".join(f"w{7 * i % WORDS}" for i in range(words)))
    return str(path)
