"""Random BF16 checkpoints in the shape of real ones, written faster than a random generator could fill them.

``llama`` has the shape of TinyLlama-1.1B (hidden 2048, MLP 5632, 32 heads, 4 KV heads, vocabulary 32000): 2.2
GB at 22 layers. ``experts`` adds one fused 3-D expert tensor of 2^31 elements, 4.3 GB, to a small model.

Weights are slices of one pool of 2^24 normals, each row scaled by its own factor, taken at an offset that
depends on the tensor's name: as incompressible for a quantizer as fresh ones, and the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]
HIDDEN, MLP, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 32, 4, 32000
EXPERTS_SHAPE = (64, 2048, 16384)
POOL = 1 << 24


def pool() -> npt.NDArray[np.uint16]:
    """2^24 normals of deviation 0.02 as BF16, nearest-even; a factor per 2048 of them spreads the amax."""
    generator = np.random.default_rng(20)
    values = generator.standard_normal(POOL, dtype=np.float32).reshape(-1, HIDDEN)
    values *= 0.02 * np.exp2(generator.uniform(-1, 1, (len(values), 1))).astype(np.float32)
    bits = values.reshape(-1).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def layer(number: int) -> Iterator[tuple[str, Shape]]:
    """The nine tensors of one Llama layer."""
    head = HIDDEN // HEADS
    sizes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    for name, shape in sizes.items():
        yield f"model.layers.{number}.{name}.weight", shape


def tensors(layers: int, experts: bool) -> list[tuple[str, Shape]]:
    """Names and shapes of the whole model, in file order."""
    found: list[tuple[str, Shape]] = [("model.embed_tokens.weight", (VOCABULARY, HIDDEN))]
    for number in range(layers):
        found += layer(number)
    if experts:
        found.append(("model.layers.0.feed_forward.experts.gate_up_proj", EXPERTS_SHAPE))
    return [*found, ("model.norm.weight", (HIDDEN,)), ("lm_head.weight", (VOCABULARY, HIDDEN))]


def config(layers: int, experts: bool) -> dict[str, object]:
    """config.json of the Llama shape above; the layout of stacked experts is that of Llama 4, [E, in, 2 *
    out]."""
    return {
        "architectures": ["Llama4ForCausalLM" if experts else "LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "max_position_embeddings": 2048,
        "model_type": "llama4_text" if experts else "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
    }


def split(found: list[tuple[str, Shape]], shards: int) -> list[list[tuple[str, Shape]]]:
    """Consecutive runs of about equal bytes, one per shard."""
    total = sum(prod(shape) for _, shape in found)
    parts: list[list[tuple[str, Shape]]] = [[] for _ in range(shards)]
    seen = 0
    for name, shape in found:
        parts[min(shards - 1, seen * shards // total)].append((name, shape))
        seen += prod(shape)
    return [part for part in parts if part]


def write_shard(path: Path, part: list[tuple[str, Shape]], values: npt.NDArray[np.uint16]) -> None:
    """One safetensors file of BF16 tensors, each filled from the pool at the offset of its name."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in part:
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in part:
            left = prod(shape)
            offset = zlib.crc32(name.encode()) % POOL
            while left:
                piece = values[offset : offset + left]
                file.write(piece)
                left, offset = left - len(piece), 0


def build(out: Path, layers: int = 22, shards: int = 3, experts: bool = False) -> Path:
    """Write the checkpoint to ``out`` and return it; a finished one is kept."""
    if (out / "config.json").is_file():
        return out
    out.mkdir(parents=True, exist_ok=True)
    values = pool()
    parts = split(tensors(layers, experts), shards)
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_shard(out / file, part, values)
        weight_map |= {name: file for name, _ in part}
    size = 2 * sum(prod(shape) for part in parts for _, shape in part)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (out / "config.json").write_text(json.dumps(config(layers, experts), indent=2) + "\n")
    return out


def main() -> None:
    """Command line: OUT [--layers N] [--shards N] [--experts]."""
    parser = argparse.ArgumentParser(description="write a random Llama-shaped BF16 checkpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=22, help="22 make 2.2 GB, 72 three times that")
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--experts", action="store_true", help="add one fused expert tensor of 4.3 GB")
    options = parser.parse_args()
    build(options.out, options.layers, options.shards, options.experts)


if __name__ == "__main__":
    main()
