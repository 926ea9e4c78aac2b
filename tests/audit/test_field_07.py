"""Field case 7: gate and up under outer scales of their own, of which an engine keeps one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import narrowcast
import toys
from audit.editing import edit
from narrowcast.audit.run import Audit, audit
from narrowcast.numbers.codec import to_bf16

GATE, UP = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up"))


def model(folder: Path, container: str) -> Path:
    """gate with an amax of 1.0 and up with one of 0.25, 32x32 each."""
    toys.llama(folder / "parent", layers=1, hidden=32, inner=32)
    rng = np.random.default_rng(0)
    weights = {}
    for name, amax in ((GATE, 1.0), (UP, 0.25)):
        weight = rng.uniform(-amax, amax, (32, 32)).astype(np.float32) / 2
        weight[0, 0] = amax
        weights[f"{name}.weight"] = to_bf16(weight)
    edit(folder / "parent", weights)
    narrowcast.quantize(folder / "parent", folder / "child", "nvfp4a16", container=container)
    return folder / "child"


def fused(done: Audit) -> list[tuple[str, str | None, str]]:
    return [(one.rule, one.severity, one.said) for one in done.findings if one.rule.startswith("NC15")]


def test_shared_scale_is_healthy(tmp_path: Path) -> None:
    assert fused(audit(model(tmp_path, "modelopt"))) == []


@pytest.mark.parametrize("engine", [None, "vllm", "sglang", "tensorrt-llm"])
def test_multipliers_differ(tmp_path: Path, engine: str | None) -> None:
    """1 / 2688 and 0.25 / 2688."""
    child = model(tmp_path, "modelopt")
    given = {f"{GATE}.weight_scale_2": 1 / 2688, f"{UP}.weight_scale_2": 0.25 / 2688}
    edit(child, {name: ("F32", np.array(value, np.float32)) for name, value in given.items()})
    done = audit(child, engine=engine)
    assert fused(done) == [("NC150", "error", "fused siblings differ, ratio 4")]
    (found,) = [one for one in done.findings if one.rule == "NC150"]
    assert (found.tensor, found.repair) == (f"{UP}.weight_scale_2", "fused_outer")
    assert found.got == f"gate_proj {1 / 2688:.6g}, up_proj {0.25 / 2688:.6g}"
    assert found.facts["siblings"] == [GATE, UP]


def test_divisors_differ(tmp_path: Path) -> None:
    child = model(tmp_path, "compressed-tensors")
    given = {f"{GATE}.weight_global_scale": 2688, f"{UP}.weight_global_scale": 4 * 2688}
    edit(child, {name: ("F32", np.array([value], np.float32)) for name, value in given.items()})
    assert fused(audit(child)) == [("NC150", "error", "fused siblings differ, ratio 4")]


def test_layer_by_layer_engine(tmp_path: Path) -> None:
    """transformers runs gate and up by themselves."""
    child = model(tmp_path, "compressed-tensors")
    edit(child, {f"{UP}.weight_global_scale": lambda old: 4 * old})
    assert fused(audit(child, engine="transformers")) == []


@pytest.mark.parametrize(("engine", "severity"), [(None, "warning"), ("tensorrt-llm", "error")])
def test_nearly_equal(tmp_path: Path, engine: str | None, severity: str) -> None:
    """A neighbour in fp32 makes no wrong layer, but TensorRT-LLM asserts equality."""
    child = model(tmp_path, "modelopt")
    edit(child, {f"{UP}.weight_scale_2": lambda old: np.nextafter(old, np.float32(1)).astype(np.float32)})
    assert fused(audit(child, engine=engine)) == [("NC150", severity, "fused siblings differ, ratio 1")]
