"""Cases of the rules about entries and patterns."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import narrowcast
from audit.asking import Ask, Case
from audit.cases.config import block, ignoring, targeting
from audit.editing import edit, edit_config, parent, quantized

TOWER = "model.visual.blocks.0.attn.qkv.weight"


def with_tower(folder: Path, entry: str) -> Path:
    model = edit(quantized(folder, "fp8_dynamic"), {TOWER: ("BF16", np.full((96, 32), 0x3C00, np.uint16))})
    return ignoring(model, entry)


def no_match(folder: Path) -> Ask:
    said = (
        "'re:visual.*' in ignore matches no layer; 're:.*visual.*' would take model.visual.blocks.0.attn.qkv"
    )
    model = with_tower(folder, "re:visual.*")
    return Ask(model, expect={"severity": "error", "said": said, "wanted": "re:.*visual.*"})


def match(folder: Path) -> Ask:
    return Ask(with_tower(folder, "re:.*visual.*"))


def no_end(folder: Path) -> Ask:
    model = ignoring(quantized(folder, "fp8_dynamic"), "re:.*gate")
    return Ask(model, expect={"severity": "warning", "wanted": "re:.*gate$", "count": 2})


def end(folder: Path) -> Ask:
    return Ask(ignoring(quantized(folder, "fp8_dynamic"), "re:.*gate$"))


def layers(folder: Path, entry: str) -> Path:
    return ignoring(quantized(folder, "fp8_dynamic", hidden=32, inner=64, layers=11), entry)


def other_layers(folder: Path) -> Ask:
    return Ask(layers(folder, "re:model.layers.1.*"), expect={"count": 7})


def one_layer(folder: Path) -> Ask:
    model = layers(folder, r"re:model\.layers\.1\..*")
    return Ask(ignoring(model, "re:model.layers.1[0-9].*"))  # not one layer


def excluding(folder: Path, entry: str) -> Path:
    model = quantized(folder, "nvfp4a16", "modelopt")
    block(model, lambda said: said["ignore"].append(entry))
    edit_config(model, lambda c: c["quantization"]["exclude_modules"].append(entry), "hf_quant_config.json")
    return model


def part_of_name(folder: Path) -> Ask:
    return Ask(excluding(folder, "mlp.gate"), expect={"got": "mlp.gate", "count": 2})


def whole_name(folder: Path) -> Ask:
    return Ask(excluding(folder, "mlp.gate_proj"))


def parent_entry(folder: Path) -> Ask:
    model = ignoring(quantized(folder, "fp8_dynamic"), "model.layers.0")
    return Ask(model, expect={"severity": "warning", "wanted": r"re:model\.layers\.0\..*", "count": 7})


def below_parent(folder: Path) -> Ask:
    return Ask(ignoring(quantized(folder, "fp8_dynamic"), r"re:model\.layers\.0\..*"))


def broken(folder: Path) -> Ask:
    return Ask(ignoring(quantized(folder, "fp8_dynamic"), "re:.*(gate"), expect={"severity": "error"})


def sound(folder: Path) -> Ask:
    return Ask(ignoring(quantized(folder, "fp8_dynamic"), "re:.*(gate)$"))


def no_target(folder: Path) -> Ask:
    return Ask(targeting(folder, "Linear", "re:mlp.*"), expect={"got": "re:mlp.*", "wanted": "re:.*mlp.*"})


def target(folder: Path) -> Ask:
    return Ask(targeting(folder, "Linear", "re:.*mlp.*"))


def keeping(folder: Path, entry: str) -> Path:
    narrowcast.quantize(parent(folder), folder / "child", "fp8_dynamic", ignore=["re:.*self_attn.*"])

    def change(said: dict[str, list[str]]) -> None:
        said["ignore"] = ["lm_head", entry]

    return block(folder / "child", change)


def whole_attention(folder: Path) -> Ask:
    return Ask(keeping(folder, "re:.*self_attn.*"), expect={"severity": "info", "count": 8})


def half_attention(folder: Path) -> Ask:
    return Ask(keeping(folder, r"re:model\.layers\.0\.self_attn.*"))


def two_groups(folder: Path, first: str) -> Path:
    model = quantized(folder, "fp8_dynamic")

    def change(said: dict[str, dict[str, dict[str, object]]]) -> None:
        groups = said["config_groups"]
        groups["group_1"] = {**groups["group_0"], "targets": ["re:.*mlp.*"]}
        groups["group_0"]["targets"] = [first]

    return block(model, change)


def class_target(folder: Path) -> Ask:
    return Ask(two_groups(folder, "Linear"), {"engine": "tensorrt-llm"}, {"severity": "error"})


def named_target(folder: Path) -> Ask:
    return Ask(two_groups(folder, "re:.*self_attn.*"), {"engine": "tensorrt-llm"})


CASES = {
    "NC510": Case(no_match, match),
    "NC511": Case(no_end, end),
    "NC512": Case(other_layers, one_layer),
    "NC513": Case(part_of_name, whole_name),
    "NC514": Case(parent_entry, below_parent),
    "NC515": Case(broken, sound),
    "NC516": Case(no_target, target),
    "NC517": Case(whole_attention, half_attention),
    "NC518": Case(class_target, named_target),
}
