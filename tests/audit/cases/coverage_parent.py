"""Cases of the rules that hold a checkpoint's tensors against its parent's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from audit.asking import Ask, Case
from audit.cases.coverage_structure import predicts
from audit.editing import edit, parent, quantized

NORM = "model.layers.1.post_attention_layernorm.weight"


def child(folder: Path) -> Ask:
    return Ask(quantized(folder, "fp8_dynamic"), {"against": folder / "parent"})


def lost_norm(folder: Path) -> Ask:
    ask = child(folder)
    return Ask(edit(ask.model, {NORM: None}), ask.options, {"tensor": NORM, "severity": "error"})


def lost_prediction(folder: Path) -> Ask:
    predicts(folder, True)
    ask = child(folder)
    edit(ask.model, {"model.layers.2.eh_proj.weight": None})
    expect = {"tensor": "model.layers.2.eh_proj", "severity": "warning", "count": 1}
    return Ask(ask.model, ask.options, expect)


def kept_prediction(folder: Path) -> Ask:
    predicts(folder, True)
    return child(folder)


def added(folder: Path) -> Ask:
    ask = child(folder)
    name = "model.layers.0.self_attn.gate.weight"
    edit(ask.model, {name: ("BF16", np.zeros((4, 128), np.uint16))})
    return Ask(ask.model, ask.options, {"tensor": name.removesuffix(".weight"), "severity": "warning"})


def resized(folder: Path) -> Ask:
    ask = child(folder)
    edit(ask.model, {"model.embed_tokens.weight": lambda old: old[:-8]})
    return Ask(
        ask.model, ask.options, {"tensor": "model.embed_tokens", "got": "[56, 128]", "wanted": "[64, 128]"}
    )


def narrowed(folder: Path) -> Ask:
    """A norm that the parent keeps in fp32."""
    edit(parent(folder), {NORM: ("F32", np.ones(128, np.float32))})
    ask = child(folder)
    edit(ask.model, {NORM: ("BF16", np.full(128, 0x3F80, np.uint16))})
    return Ask(ask.model, ask.options, {"tensor": NORM, "got": "bf16", "wanted": "fp32", "count": 1})


def kept_wide(folder: Path) -> Ask:
    edit(parent(folder), {NORM: ("F32", np.ones(128, np.float32))})
    return child(folder)


CASES = {
    "NC450": Case(lost_norm, child), "NC451": Case(lost_prediction, kept_prediction), "NC452": Case(added, child),
    "NC453": Case(resized, child), "NC454": Case(narrowed, kept_wide),
}  # fmt: skip
