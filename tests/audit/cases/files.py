"""Cases of the rules about files."""

from __future__ import annotations

from pathlib import Path

from audit.asking import Ask, Case
from audit.editing import edit_config, quantized


def other_block(folder: Path) -> Ask:
    model = quantized(folder, "fp8_block", "fp8")
    edit_config(model, lambda config: config["quantization_config"].update(weight_block_size=[64, 64]))
    return Ask(model, expect={"severity": "error"})


def whole(folder: Path) -> Ask:
    return Ask(quantized(folder, "fp8_block", "fp8"))


def cut_off(folder: Path) -> Ask:
    model = quantized(folder, "fp8_dynamic")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return Ask(model, expect={"severity": "error"})


CASES = {"NC001": Case(other_block, whole), "NC002": Case(cut_off, whole)}
