"""Cases of the rules that hold the quantization config against the tensors, and of fused layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import narrowcast
import toys
from audit.asking import Ask, Case
from audit.editing import Change, edit, edit_config, parent, quantized

BLOCK = "quantization_config"
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def block(model: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the quantization block in place."""
    return edit_config(model, lambda config: change(config[BLOCK]))


def ignoring(model: Path, *entries: str) -> Path:
    return block(model, lambda said: said["ignore"].extend(entries))


def plain(name: str, shape: tuple[int, int]) -> dict[str, Change]:
    """What makes an FP8 layer a plain one: BF16 weights, no scale."""
    return {f"{name}.weight": ("BF16", np.full(shape, 0x3C00, np.uint16)), f"{name}.weight_scale": None}


def healthy(folder: Path) -> Ask:
    return Ask(quantized(folder, "fp8_dynamic"))


def no_block(folder: Path) -> Ask:
    return Ask(
        edit_config(quantized(folder, "fp8_dynamic"), lambda c: c.pop(BLOCK)), expect={"repair": "config"}
    )


def plain_query(folder: Path) -> Path:
    return edit(quantized(folder, "fp8_dynamic"), plain(Q, (128, 128)))


def plain_and_said(folder: Path) -> Ask:
    return Ask(plain_query(folder), expect={"tensor": Q, "repair": "ignore"})


def plain_and_kept(folder: Path) -> Ask:
    return Ask(ignoring(plain_query(folder), Q))


def leftover(folder: Path) -> Ask:
    said = json.loads((quantized(folder, "fp8_dynamic") / "config.json").read_text())[BLOCK]
    model = edit_config(parent(folder), lambda config: config.update({BLOCK: said}))
    return Ask(model, expect={"severity": "error", "repair": "config"})


def kept(folder: Path) -> Ask:
    model = ignoring(quantized(folder, "fp8_dynamic"), "re:.*o_proj")
    said = "quantized, and ignore keeps it: 're:.*o_proj' matches it"
    return Ask(model, expect={"tensor": "model.layers.0.self_attn.o_proj", "said": said})


def nearly_kept(folder: Path) -> Ask:
    return Ask(ignoring(quantized(folder, "fp8_dynamic"), "re:o_proj"))


def targeting(folder: Path, *targets: str) -> Path:
    model = quantized(folder, "fp8_dynamic")
    return block(model, lambda said: said["config_groups"]["group_0"].update(targets=list(targets)))


def untargeted(folder: Path) -> Ask:
    model = targeting(folder, "re:.*self_attn.*", "re:mlp.*")
    return Ask(model, expect={"tensor": "model.layers.0.mlp.down_proj"})


def targeted(folder: Path) -> Ask:
    return Ask(targeting(folder, "re:.*self_attn.*", "re:.*mlp.*"))


def formatted(folder: Path, word: str) -> Path:
    def change(said: dict[str, Any]) -> None:
        said["format"] = said["config_groups"]["group_0"]["format"] = word

    return block(quantized(folder, "fp8_dynamic"), change)


def other_format(folder: Path) -> Ask:
    wanted = "pack-quantized, as the config says"
    return Ask(formatted(folder, "pack-quantized"), expect={"wanted": wanted, "repair": "config"})


def same_format(folder: Path) -> Ask:
    return Ask(formatted(folder, "naive-quantized"))  # what older versions call the same layout


def other_scheme(folder: Path) -> Ask:
    model = quantized(folder, "fp8_dynamic")
    block(model, lambda said: said["config_groups"]["group_0"]["weights"].update(strategy="tensor"))
    return Ask(model, expect={"wanted": "strategy tensor as in the config"})


def activations(folder: Path, scheme: str) -> Path:
    return block(
        quantized(folder, "fp8_per_tensor", "fp8"), lambda said: said.update(activation_scheme=scheme)
    )


def static_without_scales(folder: Path) -> Ask:
    return Ask(activations(folder, "static"), expect={"got": "no input scale"})


def dynamic(folder: Path) -> Ask:
    return Ask(activations(folder, "dynamic"))


def mixed_attention(folder: Path) -> Ask:
    """q and v in FP8, k plain: the config is true, and engines refuse it."""
    model = ignoring(edit(quantized(folder, "fp8_dynamic"), plain(K, (64, 128))), K)
    fp8 = "fp8_channel with fp8_token inputs"
    said = f"fused group differs: q_proj {fp8}, k_proj bf16, v_proj {fp8}"
    return Ask(model, expect={"tensor": K, "said": said})


def mixed_output(folder: Path) -> Ask:
    """o_proj is fused with nothing."""
    name = "model.layers.0.self_attn.o_proj"
    return Ask(ignoring(edit(quantized(folder, "fp8_dynamic"), plain(name, (128, 128))), name))


def experts(folder: Path, name: str) -> Path:
    toys.moe(folder / "moe", "qwen3_moe")
    narrowcast.quantize(folder / "moe", folder / "child", "fp8_dynamic")
    return ignoring(edit(folder / "child", plain(name, (32, 32))), name)


def mixed_experts(folder: Path) -> Ask:
    name = "model.layers.0.mlp.experts.3.down_proj"
    return Ask(experts(folder, name), expect={"tensor": name, "got": "bf16", "count": 1})


def mixed_beside_experts(folder: Path) -> Ask:
    return Ask(experts(folder, "model.layers.0.self_attn.o_proj"))


CASES = {
    "NC500": Case(no_block, healthy),
    "NC501": Case(plain_and_said, plain_and_kept),
    "NC502": Case(leftover, healthy),
    "NC503": Case(kept, nearly_kept),
    "NC504": Case(untargeted, targeted),
    "NC505": Case(other_format, same_format),
    "NC506": Case(other_scheme, healthy),
    "NC507": Case(static_without_scales, dynamic),
    "NC520": Case(mixed_attention, mixed_output),
    "NC521": Case(mixed_experts, mixed_beside_experts),
}
