"""Experts in 3-D tensors that a tool skipped: coverage is a number, and too low a one is told."""

from __future__ import annotations

from pathlib import Path

import narrowcast
import toys
from audit.editing import edit_config
from narrowcast.audit.run import audit


def model(folder: Path) -> Path:
    """gate_up [4, 64, 32], down [4, 32, 32], q, k, v, o 32x32, embedding 64x32."""
    shapes = {name: shape for name, shape in toys.moe_shapes("qwen3_moe").items() if "mlp.gate" not in name}
    return toys.write(folder / "parent", toys.weights(shapes), toys.moe_config("qwen3_moe"))


def test_skipped_experts(tmp_path: Path) -> None:
    narrowcast.quantize(model(tmp_path), tmp_path / "child", "fp8_dynamic", ignore=["re:.*experts.*"])
    edit_config(tmp_path / "child", lambda config: config["quantization_config"].update(ignore=["lm_head"]))
    found = {one.rule: one for one in audit(tmp_path / "child").findings}
    share = found["NC400"].facts
    assert (share["parameters"], share["total_parameters"]) == (4096, 18432)
    assert found["NC400"].said.startswith("22.2% of the parameters")
    assert found["NC401"].severity == "warning"
    assert found["NC401"].facts["share"] == 4096 / 16384
    assert found["NC402"].severity == "warning"
    assert found["NC402"].count == 2


def test_experts_quantized(tmp_path: Path) -> None:
    narrowcast.quantize(model(tmp_path), tmp_path / "child", "fp8_dynamic")
    done = audit(tmp_path / "child", against=tmp_path / "parent", select=["NC4"])
    found = {one.rule: one for one in done.findings}
    assert found["NC400"].facts["parameters"] == 4096 + 12288
    # True of the case's own model: it has experts and no router.
    assert {one.rule for one in done.findings if one.severity != "info"} == {"NC425"}
