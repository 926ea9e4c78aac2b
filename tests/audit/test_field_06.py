"""Field case 6: an NVFP4 zero block beside a normal one, and a file with one NaN byte in its block scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import narrowcast
import toys
from audit.editing import at, edit
from narrowcast.audit.run import audit
from narrowcast.numbers.codec import to_bf16
from narrowcast.store.checkpoint import Checkpoint

SCALE = "model.layers.0.mlp.up_proj.weight_scale"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One row whose first sixteen values go up to 3.0 and whose next sixteen are zero."""
    toys.llama(tmp_path / "parent", layers=1)
    weight = np.full((352, 128), 0.5, np.float32)
    weight[0, :16] = np.linspace(-3, 3, 16)
    weight[0, 16:32] = 0
    edit(tmp_path / "parent", {"model.layers.0.mlp.up_proj.weight": to_bf16(weight)})
    narrowcast.quantize(tmp_path / "parent", tmp_path / "child", "nvfp4a16", container="modelopt")
    return tmp_path / "child"


def test_zero_block_is_healthy(model: Path) -> None:
    with Checkpoint.open(model) as checkpoint:
        assert not np.isin(checkpoint.array(SCALE), (0x7F, 0xFF)).any()
    assert [one for one in audit(model).findings if one.rule.startswith("NC1")] == []


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("quick", [False, True])
def test_nan_byte(model: Path, byte: int, quick: bool) -> None:
    done = audit(edit(model, {SCALE: at((3, 1), byte)}), quick=quick)
    (found,) = [one for one in done.findings if one.rule.startswith("NC1")]
    assert (found.rule, found.severity, found.tensor, found.at) == ("NC110", "error", SCALE, (3, 1))
    assert (found.count, found.got) == (1, f"0x{byte:02X}")
    assert not done.passed
