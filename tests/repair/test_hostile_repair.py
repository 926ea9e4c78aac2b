"""Repairs that made something worse, or could have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audit.editing import edit, quantized
from narrowcast.repair.run import repair

GATE, UP, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))


@pytest.mark.parametrize("container", ["modelopt", "compressed-tensors"])
def test_a_wrong_outer_scale_is_not_given_to_healthy_siblings(tmp_path: Path, container: str) -> None:
    """The reciprocal in up would leave nothing of gate; neither is touched, and it is said."""
    model = quantized(tmp_path, "nvfp4a16", container)
    outer = "weight_global_scale" if container == "compressed-tensors" else "weight_scale_2"
    edit(model, {f"{UP}.{outer}": lambda old: (1 / old).astype(np.float32)})
    done = repair(model, tmp_path / "out")
    assert done.mended == ()
    assert any("again" in said for said in done.unmended)
    assert not (tmp_path / "out").exists()


def test_a_broken_value_changes_no_container(tmp_path: Path) -> None:
    """One outer scale is NaN: the config is right, and no other container's is written instead."""
    model = quantized(tmp_path, "nvfp4a16")
    edit(model, {f"{DOWN}.weight_global_scale": lambda old: old * np.float32("nan")})
    done = repair(model, tmp_path / "out")
    assert done.mended == ()
    assert not (tmp_path / "out").exists()
