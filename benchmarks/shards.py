"""A checkpoint of a hundred shards and sixty thousand small tensors: what a large mixture of experts looks like to
whoever reads headers and scales only.

The shape is DeepSeek-V3's, forty layers of 256 routed experts, with matrices of one block of 128 x 128 FP8 codes: 0.5
GB instead of 680. Codes are one pool of normals under their amax; each matrix has its own scale.
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from narrowcast.numbers.codec import encode
from narrowcast.numbers.formats import E4M3FN

SIDE, EXPERTS, LAYERS, SHARDS = 128, 256, 40, 100
POOL = 1 << 20
WIDTHS = {"BF16": 2, "F32": 4, "F8_E4M3": 1}  # bytes
Tensor = tuple[str, str, tuple[int, ...]]


def config(layers: int = LAYERS) -> dict[str, object]:
    """config.json in the names of DeepSeek-V3."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": SIDE,
        "intermediate_size": SIDE, "moe_intermediate_size": SIDE, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 0, "num_hidden_layers": layers, "num_attention_heads": 2,
        "num_key_value_heads": 2, "q_lora_rank": SIDE, "kv_lora_rank": SIDE, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64, "v_head_dim": 64, "vocab_size": 256, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [SIDE, SIDE],
        },
    }  # fmt: skip


def quantized(name: str, rows: int = SIDE) -> Iterator[Tensor]:
    """A matrix of FP8 and its scale."""
    yield f"{name}.weight", "F8_E4M3", (rows, SIDE)
    yield f"{name}.weight_scale_inv", "F32", (-(-rows // SIDE), 1)


def layer(number: int) -> Iterator[Tensor]:
    """The tensors of one layer: latent attention, router, shared and routed experts."""
    at = f"model.layers.{number}"
    for norm in (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_a_layernorm",
        "self_attn.kv_a_layernorm",
    ):
        yield f"{at}.{norm}.weight", "BF16", (SIDE,)
    rows = {"q_a": SIDE, "q_b": 2 * SIDE, "kv_a": SIDE + 64, "kv_b": 2 * SIDE, "o": SIDE}
    for name, count in rows.items():
        yield from quantized(f"{at}.self_attn.{name}_proj{'_with_mqa' if name == 'kv_a' else ''}", count)
    yield f"{at}.mlp.gate.weight", "BF16", (EXPERTS, SIDE)
    yield f"{at}.mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
    for expert in ("shared_experts", *(f"experts.{i}" for i in range(EXPERTS))):
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield from quantized(f"{at}.mlp.{expert}.{name}")


def tensors(layers: int = LAYERS) -> list[Tensor]:
    """Every tensor, in file order."""
    found: list[Tensor] = [("model.embed_tokens.weight", "BF16", (256, SIDE))]
    for number in range(layers):
        found += layer(number)
    return [*found, ("model.norm.weight", "BF16", (SIDE,)), ("lm_head.weight", "BF16", (256, SIDE))]


def content(name: str, dtype: str, shape: tuple[int, ...], pools: dict[str, np.ndarray]) -> bytes:
    """The bytes of a tensor: a piece of the pool of its dtype, at an offset of its name."""
    count, at = int(np.prod(shape)), zlib.crc32(name.encode())
    if dtype == "F32" and name.endswith("_inv"):
        return np.full(count, 2e-4 * (1 + at % 97 / 97), np.float32).tobytes()
    pool = pools[dtype]
    start = at % (POOL - count)
    piece = pool[start : start + count].copy()
    if dtype == "F8_E4M3":
        piece[:: SIDE * SIDE] = E4M3FN.max_code  # each block reaches its top
    return piece.tobytes()


def pools() -> dict[str, np.ndarray]:
    """Normals as BF16, as float32 and as FP8 codes of numbers up to 448."""
    values = np.random.default_rng(30).standard_normal(POOL).astype(np.float32)
    bits = values.view(np.uint32)
    codes = encode(np.clip(values * 90, -448, 448), E4M3FN).codes
    return {"BF16": ((bits + 0x8000) >> 16).astype(np.uint16), "F32": values, "F8_E4M3": codes}


def write(path: Path, part: list[Tensor], made: dict[str, np.ndarray] | None) -> None:
    """One safetensors file; without pools its data are a hole."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in part:
        size = WIDTHS[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if made is None:
            file.truncate(file.tell() + at)
        else:
            file.writelines(content(*one, made) for one in part)


def build(out: Path, layers: int = LAYERS, hollow: bool = False) -> Path:
    """Write the checkpoint to ``out`` and return it; a finished one is kept. A ``hollow`` one has headers only."""
    if (out / "config.json").is_file():
        return out
    out.mkdir(parents=True, exist_ok=True)
    made, every = None if hollow else pools(), tensors(layers)
    size = -(-len(every) // SHARDS)
    weight_map = {}
    for number in range(SHARDS):
        part, file = (
            every[number * size : (number + 1) * size],
            f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors",
        )
        write(out / file, part, made)
        weight_map |= {name: file for name, _, _ in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")
    (out / "config.json").write_text(json.dumps(config(layers), indent=2) + "\n")
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="write a checkpoint of a hundred shards")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--hollow", action="store_true", help="headers only")
    options = parser.parse_args()
    build(options.out, options.layers, options.hollow)
