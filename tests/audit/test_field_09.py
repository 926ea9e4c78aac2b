"""Field case 9: two FP4 codes of a byte, the high one first, seen with the parent at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audit.editing import edit, parent, quantized
from narrowcast.audit.run import Audit, audit
from narrowcast.store.safetensors import Reader
from narrowcast.tensors.packing import pack, packing

UP = "model.layers.0.mlp.up_proj"


def swap(old: np.ndarray) -> np.ndarray:
    return (old >> 4) | (old << 4)


def swapped(folder: Path, preset: str) -> Audit:
    model = edit(quantized(folder, preset), {f"{UP}.weight_packed": swap})
    return audit(model, against=parent(folder), select=["NC7"])


def test_first_byte() -> None:
    """[0.5, -6.0] are the codes 1 and 15: the byte 0xF1, low nibble first."""
    assert pack(np.array([[1, 15]], np.uint8), packing(4)).tolist() == [[0xF1]]


@pytest.mark.parametrize("preset", ["nvfp4a16", "mxfp4"])
def test_swapped_against_the_parent(tmp_path: Path, preset: str) -> None:
    found = swapped(tmp_path, preset)
    errors = [one for one in found.findings if one.severity == "error"]
    assert [(one.rule, one.tensor) for one in errors] == [("NC710", UP)]
    assert "swapped neighbours" in errors[0].said
    assert "neighbouring columns are swapped" in str(errors[0].remedy)
    assert "low nibble first" in str(errors[0].remedy)
    pair = found.subject.pairs[UP]
    # Independent values of equal energy: Σ(x - y)² = 2 Σx², 3.01 dB below the signal, and the rounding's own noise.
    assert pair.sqnr == pytest.approx(-3.0, abs=0.3)
    diagnosis = errors[0].facts["diagnosis"]
    assert diagnosis["before"] == pytest.approx(-3.0, abs=0.3)
    assert diagnosis["after"] > 15


def test_right_order_is_silent(tmp_path: Path) -> None:
    model = quantized(tmp_path, "nvfp4a16")
    with Reader(model / "model.safetensors") as reader:
        assert f"{UP}.weight_packed" in reader.entries
    found = audit(model, against=parent(tmp_path), select=["NC7"])
    assert not [one for one in found.findings if one.severity != "info"]
