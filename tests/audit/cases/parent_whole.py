"""Cases of the rules about channels, plain tensors and whole models beside the parent."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

import toys
from audit.asking import Ask, Case
from audit.cases.parent import UP, against, changed, healthy, values
from audit.editing import Array, edit, parent, quantized
from narrowcast.numbers.codec import to_bf16, widen
from narrowcast.numbers.formats import BF16

NORM = "model.layers.1.post_attention_layernorm.weight"
GATE = "model.layers.1.mlp.gate_proj"


def skipped(folder: Path) -> Ask:
    """The weights of the parent under the config of a quantized model."""
    model = quantized(folder, "fp8_dynamic")
    toys.llama(folder / "copy")
    shutil.copy(model / "config.json", folder / "copy" / "config.json")
    return against(folder / "copy", folder, count=14, severity="error")


def bad_row(folder: Path) -> Ask:
    """The scale of one row is twice what it should be."""

    def larger(old: Array) -> Array:
        new = old.copy()
        new[40] = to_bf16(widen(old, BF16)[40] * np.float32(2)) if old.dtype == np.uint16 else old[40] * 2
        return new

    model = edit(quantized(folder, "fp8_dynamic"), {f"{UP}.weight_scale": larger})
    return against(model, folder, tensor=UP, at=(40, 0), severity="warning")


def with_columns(folder: Path, factors: dict[str, dict[int, float]], preset: str) -> Ask:
    """The parent, some columns of some layers multiplied, quantized."""

    def grown(columns: dict[int, float]):
        def change(old: Array) -> Array:
            new = old.copy()
            for column, factor in columns.items():
                new[:, column] *= factor
            return new

        return values(change)

    edit(parent(folder, layers=4), {f"{name}.weight": grown(c) for name, c in factors.items()})
    return against(quantized(folder, preset), folder)


def dear_column(folder: Path) -> Ask:
    ask = with_columns(folder, {UP: {77: 30}}, "int8")
    return Ask(ask.model, ask.options, {"tensor": UP, "at": (0, 77), "severity": "info"})


def cheap_column(folder: Path) -> Ask:
    """A float format does not mind."""
    return with_columns(folder, {UP: {77: 30}}, "fp8_dynamic")


def stream(folder: Path) -> Ask:
    names = {f"model.layers.{i}.self_attn.q_proj": {5: 40.0} for i in range(3)}
    ask = with_columns(folder, names, "fp8_dynamic")
    return Ask(ask.model, ask.options, {"count": 1, "severity": "info"})


def two_layers(folder: Path) -> Ask:
    names = {f"model.layers.{i}.self_attn.q_proj": {5: 40.0} for i in range(2)}
    return with_columns(folder, names, "fp8_dynamic")


def renamed(folder: Path) -> Ask:
    model = quantized(folder, "fp8_dynamic")
    tensors = toys.weights(toys.llama_shapes())
    del tensors[f"{UP}.weight"]
    toys.write(folder / "other", tensors, toys.llama_config())
    return Ask(model, {"against": folder / "other"}, {"tensor": UP, "count": 1, "severity": "warning"})


def other_seed(folder: Path) -> Ask:
    """A parent of the same shapes and other numbers; norms and embeddings say so."""
    model = quantized(folder, "fp8_dynamic")
    toys.llama(folder / "other", seed=3)
    return Ask(model, {"against": folder / "other"}, {"severity": "error", "count": 6})


def smooth(folder: Path, norm: bool, more: float = 1.0) -> Path:
    """Gate and up of a layer times factors of columns, and the norm before them divided, or not."""
    factors = np.exp2(np.random.default_rng(4).uniform(-2, 2, 128)).astype(np.float32)
    up = values(lambda old: old * factors * more)
    changes = {f"{UP}.weight": up, f"{GATE}.weight": values(lambda old: old * factors)}
    if norm:
        changes[NORM] = values(lambda old: old / factors)
    return changed(folder, changes, "w4a16")


def smoothed(folder: Path) -> Ask:
    return against(
        smooth(folder, True), folder, count=2, severity="info", facts={"checked": 2, "layers": [GATE, UP]}
    )


def half_smoothed(folder: Path) -> Ask:
    return against(smooth(folder, False), folder, tensor=GATE, severity="error")


def wholly_smoothed(folder: Path) -> Ask:
    return against(smooth(folder, True), folder)


def plain(folder: Path) -> Ask:
    return Ask(parent(folder), {"against": parent(folder)})


def noise(folder: Path) -> Ask:
    return against(quantized(folder, "w4a16"), folder, count=14, severity="info")


def dear_group(folder: Path) -> Ask:
    """An outlier column in every layer: whole rows of INT8 lose what groups keep."""
    names = {
        f"model.layers.{i}.mlp.{n}": {9: 60.0}
        for i in range(4)
        for n in ("gate_proj", "up_proj", "down_proj")
    }
    ask = with_columns(folder, names, "int8")
    return Ask(ask.model, ask.options, {"severity": "info", "count": 12})


CASES = {
    "NC701": Case(renamed, healthy("fp8_dynamic")),
    "NC702": Case(other_seed, wholly_smoothed),
    "NC703": Case(smoothed, half_smoothed),
    "NC704": Case(half_smoothed, wholly_smoothed),
    "NC705": Case(skipped, healthy("fp8_dynamic")),
    "NC730": Case(bad_row, healthy("fp8_dynamic")),
    "NC731": Case(dear_column, cheap_column),
    "NC732": Case(stream, two_layers),
    "NC740": Case(dear_group, healthy("int8")),
    "NC741": Case(noise, plain),
}
