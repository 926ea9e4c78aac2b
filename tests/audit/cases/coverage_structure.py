"""Cases of the rules about structure: is the model that the config describes there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import toys
from audit.asking import Ask, Case
from audit.cases.coverage import moe
from audit.editing import Array, edit, edit_config, parent, quantized

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tied(folder: Path) -> Path:
    """A tied model whose file has a head too, the embedding once more."""
    model = parent(folder, head=True)
    return edit_config(model, lambda config: config.update(tie_word_embeddings=True))


def other_head(folder: Path) -> Ask:
    return Ask(tied(folder), expect={"tensor": "lm_head"})


def same_head(folder: Path) -> Ask:
    model = tied(folder)
    from narrowcast.store.safetensors import Reader

    with Reader(model / "model.safetensors") as reader:
        table = np.array(reader.array(TABLE))
    return Ask(edit(model, {HEAD: table}))


def untied(folder: Path) -> Ask:
    model = parent(folder)
    edit_config(model, lambda config: config.update(tie_word_embeddings=False))
    return Ask(model, expect={"tensor": HEAD, "severity": "error"})


def healthy(folder: Path) -> Ask:
    return Ask(parent(folder))


def quantized_table(folder: Path) -> Ask:
    """The embedding in FP8 beside its scales, as a tool writes it that takes every module."""
    model = quantized(folder, "fp8_dynamic")

    def change(old: Array) -> Any:
        return (np.arange(old.size, dtype=np.uint8) % 120).reshape(old.shape)

    scale = np.full((64, 1), 0.001, ml_dtypes.bfloat16).view(np.uint16)
    edit(model, {TABLE: ("F8_E4M3", change(np.zeros((64, 128)))), TABLE + "_scale": ("BF16", scale)})

    def said(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]

    edit_config(model, said)
    return Ask(model, expect={"tensor": "model.embed_tokens", "severity": "error"})


def plain_table(folder: Path) -> Ask:
    return Ask(quantized(folder, "fp8_dynamic"))


def more_tokens(folder: Path) -> Ask:
    model = edit_config(parent(folder), lambda config: config.update(vocab_size=96))
    return Ask(model, expect={"tensor": "model.embed_tokens", "got": "64 rows", "wanted": "96 rows"})


def wider(folder: Path) -> Ask:
    model = edit_config(parent(folder), lambda config: config.update(head_dim=16))
    expect = {"tensor": "model.layers.0.self_attn.k_proj", "got": "[64, 128]", "wanted": "[32, 128]"}
    return Ask(model, expect=expect)


def alone(folder: Path) -> Ask:
    """Values without keys, in a family that is not known otherwise."""
    lost = tuple(f"model.layers.{i}.self_attn.k_proj.weight" for i in range(12))
    return Ask(deep(folder, lost), expect={"tensor": "model.layers.0.self_attn.k_proj"})


def more_layers(folder: Path) -> Ask:
    model = edit_config(parent(folder), lambda config: config.update(num_hidden_layers=3))
    return Ask(model, expect={"tensor": "model.layers.2", "severity": "error", "count": 1})


def deep(folder: Path, lack: tuple[str, ...] = (), layers: int = 12) -> Path:
    """A family that no list of parts knows, with norms after attention in every layer."""
    shapes = {k: v for k, v in toys.llama_shapes(32, 64, layers).items() if k not in lack}
    config = toys.llama_config(32, 64, layers) | {"architectures": ["NewForCausalLM"]}
    return toys.write(folder / "deep", toys.weights(shapes), config)


def odd(folder: Path) -> Ask:
    lost = "model.layers.7.self_attn.v_proj.weight"
    return Ask(deep(folder, (lost,)), expect={"tensor": lost.removesuffix(".weight"), "severity": "error"})


def alternating(folder: Path) -> Ask:
    """Every third layer shares its keys and values, which is a design and no loss."""
    lack = tuple(f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(2, 12, 3) for name in "kv")
    return Ask(deep(folder, lack))


def part(folder: Path) -> Ask:
    """Gone from every layer, so no layer is odd."""
    lost = {f"model.layers.{i}.post_attention_layernorm.weight": None for i in range(2)}
    return Ask(edit(parent(folder), lost), expect={"tensor": "model.layers.0.post_attention_layernorm"})


def more_experts(folder: Path) -> Ask:
    model = edit_config(moe(folder), lambda config: config.update(num_experts=5))
    return Ask(model, expect={"got": "4 experts", "wanted": "num_experts 5"})


def all_experts(folder: Path) -> Ask:
    return Ask(moe(folder))


def single_experts(folder: Path, lack: str = "") -> Path:
    """Experts one by one, as most files have them."""
    shapes = {k: v for k, v in toys.moe_shapes("qwen3_moe").items() if "experts" not in k}
    for i in range(4):
        for name in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"model.layers.0.mlp.experts.{i}.{name}.weight"] = (32, 32)
    shapes.pop(lack, None)
    return toys.write(folder / "single", toys.weights(shapes), toys.moe_config("qwen3_moe"))


def odd_expert(folder: Path) -> Ask:
    lost = "model.layers.0.mlp.experts.3.up_proj"
    return Ask(single_experts(folder, f"{lost}.weight"), expect={"tensor": lost})


def even_experts(folder: Path) -> Ask:
    return Ask(single_experts(folder))


def predicts(folder: Path, layer: bool) -> Path:
    """DeepSeek's way: the prediction layer is appended to the others."""
    model = edit_config(parent(folder), lambda config: config.update(num_nextn_predict_layers=1))
    if layer:
        edit(model, {"model.layers.2.eh_proj.weight": ("BF16", np.zeros((128, 256), np.uint16))})
    return model


def no_prediction(folder: Path) -> Ask:
    return Ask(predicts(folder, False), expect={"severity": "warning"})


def prediction(folder: Path) -> Ask:
    return Ask(predicts(folder, True))


def sees(folder: Path, tower: bool) -> Path:
    model = edit_config(parent(folder), lambda config: config.update(vision_config={"depth": 1}))
    if tower:
        edit(model, {"model.visual.blocks.0.attn.qkv.weight": ("BF16", np.zeros((96, 32), np.uint16))})
    return model


def blind(folder: Path) -> Ask:
    return Ask(sees(folder, False), expect={"severity": "warning"})


def seeing(folder: Path) -> Ask:
    return Ask(sees(folder, True))


CASES = {
    "NC410": Case(other_head, same_head),
    "NC411": Case(untied, healthy),
    "NC412": Case(quantized_table, plain_table),
    "NC413": Case(more_tokens, healthy),
    "NC414": Case(wider, healthy),
    "NC420": Case(more_layers, healthy),
    "NC421": Case(odd, alternating),
    "NC422": Case(part, healthy),
    "NC423": Case(more_experts, all_experts),
    "NC424": Case(odd_expert, even_experts),
    "NC425": Case(alone, alternating),
    "NC430": Case(no_prediction, prediction),
    "NC431": Case(blind, seeing),
}
