"""Tiny models with a tokenizer whose token ``i`` is the word ``wi``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

WORDS = 64


def tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(folder)


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
    model.save_pretrained(folder)
    tokenizer(folder)
    return folder


def text(folder: Path, words: int = 24) -> str:
    """A text file of so many words; word i is w(7 i mod 64)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "text.txt"
    path.write_text(" ".join(f"w{7 * i % WORDS}" for i in range(words)))
    return str(path)
