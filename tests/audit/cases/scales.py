"""Cases of the rules about scales."""

from __future__ import annotations

from pathlib import Path

from audit.asking import Ask, Case
from audit.editing import at, edit, quantized

SCALE = "model.layers.1.mlp.up_proj.weight_scale"


def nan_scale(folder: Path) -> Ask:
    """The audit variant of a published tool's zero block: one byte 0x7F at row 3, column 1."""
    model = edit(quantized(folder, "nvfp4a16"), {SCALE: at((3, 1), 0x7F)})
    return Ask(model, expect={"tensor": SCALE, "at": (3, 1), "count": 1, "got": "0x7F", "severity": "error"})


def largest_scale(folder: Path) -> Ask:
    return Ask(edit(quantized(folder, "nvfp4a16"), {SCALE: at((3, 1), 0x7E)}))


CASES = {"NC110": Case(nan_scale, largest_scale)}
