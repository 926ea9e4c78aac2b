"""Cases of the rule about scales that nobody computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from audit.asking import Ask, Case
from audit.editing import edit, quantized

UP = "model.layers.0.mlp.up_proj"


def filled(folder: Path) -> Ask:
    """What a loader fills in for scales that it did not find."""
    model = edit(quantized(folder, "int8"), {f"{UP}.weight_scale": np.ones_like})
    return Ask(model, expect={
        "tensor": f"{UP}.weight_scale", "severity": "error", "count": 352, "facts": {"scale": 1.0, "reach": 1.0},
    })  # fmt: skip


def one_for_all(folder: Path) -> Ask:
    """One scale for the tensor, written once for every row: rows stay below the top."""
    codes = np.round(np.random.default_rng(0).normal(0, 30, (352, 128))).clip(-127, 127).astype(np.int8)
    changes = {f"{UP}.weight_scale": np.ones_like, f"{UP}.weight": ("I8", codes)}
    return Ask(edit(quantized(folder, "int8"), changes))


CASES = {"NC124": Case(filled, one_for_all)}
