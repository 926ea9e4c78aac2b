"""Faults that were planted one at a time into healthy checkpoints, and were missed or called something else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import toys
from audit.editing import at, edit, edit_config, parent, quantized
from narrowcast.audit.findings import Finding
from narrowcast.audit.run import audit

MLP = "model.layers.0.mlp"
UP, DOWN = f"{MLP}.up_proj", f"{MLP}.down_proj"


def by_rule(model: Path, against: Path | None = None) -> dict[str, list[Finding]]:
    """Errors and warnings of a checkpoint by rule."""
    found: dict[str, list[Finding]] = {}
    for one in audit(model, against=against).open_findings:
        if one.severity != "info":
            found.setdefault(one.rule, []).append(one)
    return found


def test_scales_of_rows_in_another_order_are_no_smoothing(tmp_path: Path) -> None:
    """Factors of rows, which no matrix after takes back: an error, as wrong as -6 dB, and no smoothing."""
    model = quantized(tmp_path, "fp8_dynamic")
    factors = np.exp2(np.random.default_rng(1).uniform(-2, 2, (352, 1))).astype(np.float32)
    edit(model, {f"{UP}.weight_scale": lambda old: old * factors})
    [found] = by_rule(model, parent(tmp_path))["NC710"]
    assert found.tensor == UP
    assert "rows scaled" in found.said
    assert not {"NC703", "NC704"} & {one.rule for one in audit(model, against=parent(tmp_path)).findings}


def test_one_changed_value_is_no_mistake_of_all_columns(tmp_path: Path) -> None:
    model = quantized(tmp_path, "fp8_dynamic")
    edit(model, {"model.embed_tokens.weight": at((3, 3), 0x7F00)})
    [found] = by_rule(model, parent(tmp_path))["NC702"]
    assert found.said.startswith("1 of 8,192 values")
    assert "columns" not in found.said
    assert found.remedy == "copy the tensor from the parent"


def test_without_a_config_its_layers_are_one_finding(tmp_path: Path) -> None:
    """Scales are there; that no config says so is no lack of scales, and no finding of each layer."""
    model = quantized(tmp_path, "fp8_dynamic")
    (model / "config.json").unlink()
    found = by_rule(model)
    assert "NC009" in found
    [one] = found["NC001"]
    assert one.count == 14
    assert "scale" not in f"{one.said} {one.remedy}"


def test_zero_points_that_are_a_fill(tmp_path: Path) -> None:
    model = quantized(tmp_path, "w4a16_asym")
    edit(model, {f"{UP}.weight_zero_point": np.zeros_like})
    [found] = by_rule(model)["NC351"]
    assert found.tensor == f"{UP}.weight_zero_point"
    assert found.remedy == "quantize the layer again from the parent"


@pytest.mark.parametrize(
    ("preset", "container", "piece", "one"),
    [
        ("w4a16_asym", "gptq", "scales", 1.0),
        ("w4a16_asym", "awq", "scales", 1.0),
        ("fp8_block_ue8m0", "fp8", "weight_scale_inv", 127),
        ("fp8_block", "fp8", "weight_scale_inv", 1.0),
        ("nvfp4a16", "modelopt", "weight_scale", 0x38),
        ("mxfp4a16", "compressed-tensors", "weight_scale", 127),
    ],
)
def test_a_fill_of_ones(tmp_path: Path, preset: str, container: str, piece: str, one: float) -> None:
    """What a loader that misses scales fills in, in each container; 352 x 128 are 1408 blocks of 32."""
    model = quantized(tmp_path, preset, container)
    assert "NC124" not in by_rule(model)
    edit(model, {f"{UP}.{piece}": lambda old: np.full_like(old, one)})
    [found] = by_rule(model)["NC124"]
    assert found.tensor == f"{UP}.{piece}"


def test_rows_of_zeros_are_no_factors(tmp_path: Path) -> None:
    model = quantized(tmp_path, "fp8_dynamic")
    edit(model, {f"{UP}.weight": lambda old: np.where(np.arange(352)[:, None] < 100, np.uint8(0), old)})
    found = by_rule(model, parent(tmp_path))
    assert "rows scaled" not in found["NC710"][0].said
    assert found["NC722"][0].count == 100


def test_one_flipped_bit(tmp_path: Path) -> None:
    """One element 256 times too large or small, in 45056: too little for the SQNR, and no rounding."""
    model = quantized(tmp_path, "fp8_dynamic")
    edit(model, {f"{UP}.weight": lambda old: at((5, 7), old[5, 7] ^ 0x40)(old)})
    [found] = by_rule(model, parent(tmp_path))["NC723"]
    assert (found.tensor, found.count) == (UP, 1)


@pytest.mark.parametrize(("value", "severity"), [(0, "info"), (0x3F80, "warning")])
def test_a_bias_that_the_parent_has_not(tmp_path: Path, value: int, severity: str) -> None:
    model = quantized(tmp_path, "fp8_dynamic")
    edit(model, {f"{UP}.bias": ("BF16", np.full(352, value, np.uint16))})
    found = audit(model, against=parent(tmp_path)).findings
    assert [one.severity for one in found if one.rule == "NC452"] == [severity]


def test_layers_under_another_path(tmp_path: Path) -> None:
    """Every tensor is there, and the engine finds none of them."""
    model = toys.llama(tmp_path / "plain")
    tensors = load_file(model / "model.safetensors")
    save_file({f"language_model.{name}": x for name, x in tensors.items()}, model / "model.safetensors")
    [found] = by_rule(model)["NC422"]
    assert found.got == "language_model.model.layers"


@pytest.mark.parametrize(
    ("preset", "piece"), [("w4a16_asym", "weight_zero_point"), ("nvfp4a16", "weight_global_scale")]
)
def test_a_config_that_fits_the_others_is_not_to_be_rebuilt(tmp_path: Path, preset: str, piece: str) -> None:
    """One layer lacks a tensor: its config is right, and no repair is promised."""
    model = edit(quantized(tmp_path, preset), {f"{DOWN}.{piece}": None})
    found = [one for one in audit(model).findings if one.severity == "error"]
    assert found
    assert all(one.repair is None and "narrowcast repair" not in str(one.remedy) for one in found)


def test_a_reciprocal_says_what_its_readers_do(tmp_path: Path) -> None:
    model = quantized(tmp_path, "fp8_block", "fp8")
    edit(model, {f"{UP}.weight_scale_inv": lambda old: (1 / old).astype(np.float32)})
    [found] = by_rule(model)["NC120"]
    assert "weight_global_scale" not in str(found.remedy)


def test_one_sibling_without_input_scale(tmp_path: Path) -> None:
    model = quantized(tmp_path, "nvfp4a16", "modelopt")
    scale = {f"{MLP}.gate_proj.input_scale": ("F32", np.array(0.004, np.float32))}
    found = by_rule(edit(model, scale))["NC152"]
    assert [(one.tensor, one.severity) for one in found] == [(f"{UP}.input_scale", "error")]
    edit(model, {f"{UP}.input_scale": ("F32", np.array(0.004, np.float32))})
    assert "NC152" not in by_rule(model)


@pytest.mark.parametrize(
    ("preset", "container"),
    [("fp8_dynamic", "compressed-tensors"), ("w4a16", "gptq"), ("nvfp4a16", "modelopt")],
)
def test_scales_do_not_say_what_dtype_a_model_has(tmp_path: Path, preset: str, container: str) -> None:
    """A norm in fp16 among bf16 ones is told beside fp32 and fp16 scales too, and the embedding is not."""
    norm = "model.layers.0.input_layernorm.weight"
    model = edit(quantized(tmp_path, preset, container), {norm: ("F16", np.ones(128, np.float16))})
    found = audit(model, select=["NC403", "NC408"]).findings
    assert [(one.rule, one.tensor) for one in found] == [("NC408", norm)]


def test_a_contradiction_of_configs_is_said_once(tmp_path: Path) -> None:
    """The container's refusal names no layer; the rule that says the same stands for it."""
    model = quantized(tmp_path, "nvfp4a16", "modelopt")
    edit_config(model, lambda config: config["quantization_config"]["ignore"].append("lm_haed"))
    assert [one.rule for one in audit(model).findings if one.severity == "error"] == ["NC530"]
