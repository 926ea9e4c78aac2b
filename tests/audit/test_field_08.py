"""Field case 8: the outer scale of NVFP4 divides in one container and multiplies in another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import narrowcast
import toys
from audit.editing import edit
from narrowcast.audit.findings import Finding
from narrowcast.audit.run import audit
from narrowcast.numbers.codec import to_bf16
from narrowcast.store.checkpoint import Checkpoint

UP = "model.layers.0.mlp.up_proj"
OUTER = {"modelopt": f"{UP}.weight_scale_2", "compressed-tensors": f"{UP}.weight_global_scale"}


def model(folder: Path, container: str) -> Path:
    """An up projection with an amax of 0.75, and block scales up to 448 under an outer scale of 0.75 / 2688."""
    toys.llama(folder / "parent", layers=1)
    weight = np.full((352, 128), 0.03125, np.float32)
    weight[0, 0] = 0.75
    edit(folder / "parent", {f"{UP}.weight": to_bf16(weight)})
    narrowcast.quantize(folder / "parent", folder / "child", "nvfp4a16", container=container)
    return edit(
        folder / "child", {f"{UP}.weight_scale": lambda old: (old + (0x7E - old.max())).astype(np.uint8)}
    )


def give(child: Path, container: str, value: float) -> Path:
    shape = () if container == "modelopt" else (1,)
    return edit(child, {OUTER[container]: ("F32", np.full(shape, value, np.float32))})


def found(child: Path, **options: bool) -> list[Finding]:
    """What an audit says of the up projection's scales."""
    done = audit(child, **options)
    return [one for one in done.findings if one.tensor is not None and one.tensor.startswith(UP)]


RIGHT = {"modelopt": 0.75 / 2688, "compressed-tensors": 3584.0}
WRONG = {"modelopt": 3584.0, "compressed-tensors": 1 / 3584}


@pytest.mark.parametrize("container", OUTER)
@pytest.mark.parametrize("quick", [False, True])
def test_direction(tmp_path: Path, container: str, quick: bool) -> None:
    child = give(model(tmp_path, container), container, WRONG[container])
    (one,) = [one for one in found(child, quick=quick) if one.severity == "error" and one.rule != "NC150"]
    assert (one.rule, one.tensor) == ("NC120", OUTER[container])
    assert one.said == "decoded amax 9.6e6, implausible; of the reciprocal it is 0.75"
    assert float(one.wanted or 0) == pytest.approx(RIGHT[container], rel=1e-6)


@pytest.mark.parametrize("container", OUTER)
def test_right_direction(tmp_path: Path, container: str) -> None:
    child = give(model(tmp_path, container), container, RIGHT[container])
    assert [one for one in found(child) if one.rule == "NC120"] == []
    with Checkpoint.open(child) as checkpoint:
        stored = checkpoint.array(OUTER[container])
    wanted = np.array(2.790179e-4 if container == "modelopt" else [3584.0], np.float32)
    assert stored.shape == wanted.shape
    assert stored == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("preset", "factor"), [("fp8_dynamic", 448), ("int8", 127.5), ("w4a16", 7.5)])
def test_other_granularities(tmp_path: Path, preset: str, factor: float) -> None:
    """Reciprocals of FP8, INT8 and INT4 scales; of INT4 only small weights come out implausible."""
    toys.llama(tmp_path / "parent", layers=1)
    narrowcast.quantize(tmp_path / "parent", tmp_path / "child", preset)

    def over(old: np.ndarray) -> np.ndarray:
        if old.dtype == np.uint16:
            values = (old.astype(np.uint32) << 16).view(np.float32)
            return to_bf16(1 / values)
        return (1 / old).astype(old.dtype)

    child = edit(tmp_path / "child", {f"{UP}.weight_scale": over})
    (one,) = [one for one in found(child) if one.rule == "NC120"]
    with Checkpoint.open(tmp_path / "parent") as checkpoint:
        bits = checkpoint.array(f"{UP}.weight").astype(np.uint32) << 16
    weight = np.abs(bits.view(np.float32))
    smallest = weight.max(axis=1).min()  # the reciprocal of the smallest scale is the largest
    assert one.facts["amax"] == pytest.approx(factor**2 / smallest, rel=0.1)
    assert one.severity == ("error" if factor > 100 else "warning")
