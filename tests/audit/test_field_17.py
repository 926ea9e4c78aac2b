"""Bad values in a matrix of 64 x 128, plain and quantized: what is told of them, with count and place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import narrowcast
from audit.editing import Array, edit, edit_config, parent, quantized
from narrowcast.audit.findings import Finding
from narrowcast.audit.run import audit

NAME = "model.layers.0.mlp.up_proj.weight"
SIZES = {"inner": 64, "hidden": 128}


def bf16(value: float) -> int:
    return int(np.array(value, ml_dtypes.bfloat16).view(np.uint16))


def with_value(value: float) -> Callable[[Array], Array]:
    def change(old: Array) -> Array:
        new = old.copy()
        new[5, 17] = bf16(value)
        return new

    return change


def plain(folder: Path, change: Callable[[Array], Array]) -> list[Finding]:
    model = edit(parent(folder, **SIZES), {NAME: change})
    return [one for one in audit(model, select=["NC3"]).findings if one.tensor == NAME]


@pytest.mark.parametrize(
    ("value", "rule", "said"),
    [
        (np.nan, "NC302", "1 NaN and 0 infinities in 8192 elements"),
        (-np.inf, "NC302", "0 NaN and 1 infinities in 8192 elements"),
        (3e38, "NC303", "the largest magnitude is 3e+38"),
    ],
)
def test_one_bad_element_of_a_plain_matrix(tmp_path: Path, value: float, rule: str, said: str) -> None:
    (found,) = plain(tmp_path, with_value(value))
    assert (found.rule, found.said, found.at, found.count) == (rule, said, (5, 17), 1)


def test_zeros_of_a_plain_matrix(tmp_path: Path) -> None:
    def row(old: Array) -> Array:
        new = old.copy()
        new[3] = 0
        return new

    assert plain(tmp_path, row) == []
    (found,) = plain(tmp_path, np.zeros_like)
    assert (found.rule, found.said, found.severity) == ("NC322", "all 8192 elements are zero", "warning")


def test_tiny_numbers_are_healthy(tmp_path: Path) -> None:
    def tiny(old: Array) -> Array:
        return (
            ((old.astype(np.uint32) << 16).view(np.float32) * np.float32(1e-37))
            .astype(ml_dtypes.bfloat16)
            .view("u2")
        )

    assert plain(tmp_path, tiny) == []


def outlier(folder: Path, preset: str) -> list[Finding]:
    """One element of 3e38 in the parent, quantized as the tool does it, whatever it said then."""
    edit(parent(folder, **SIZES), {NAME: with_value(3e38)})
    narrowcast.quantize(folder / "parent", folder / "child", preset)
    found = audit(folder / "child", select=["NC3"]).findings
    return [
        one for one in found if one.tensor is not None and one.tensor.startswith(NAME.removesuffix(".weight"))
    ]


def test_outlier_of_a_tensor_wide_scale_leaves_one_of_8192(tmp_path: Path) -> None:
    (found,) = outlier(tmp_path, "fp8_per_tensor")
    assert (found.rule, found.count) == ("NC324", 8191)
    assert found.said == "8191 of 8192 codes are zero (99.99%)"


def test_outlier_under_finer_scales_harms_its_tile_alone(tmp_path: Path) -> None:
    """127 elements of a row of 8192 are 1.6 %: nothing that stands out in the codes of the matrix."""
    assert outlier(tmp_path, "fp8_dynamic") == []


def test_quantized_zeros(tmp_path: Path) -> None:
    edit(parent(tmp_path, **SIZES), {NAME: np.zeros_like})
    for preset in ("fp8_block", "nvfp4a16", "mxfp4"):
        narrowcast.quantize(tmp_path / "parent", tmp_path / preset, preset)
        (found,) = [
            one for one in audit(tmp_path / preset, select=["NC3"]).findings if one.rule[:4] == "NC32"
        ]
        assert (found.rule, found.count) == ("NC320", 8192)


def test_nan_codes_are_counted_and_placed(tmp_path: Path) -> None:
    model = quantized(tmp_path, "fp8_block", **SIZES)

    def spoil(old: Array) -> Array:
        new = old.copy()
        new[7, 100], new[9, 2] = 0x7F, 0xFF
        return new

    edit(model, {NAME: spoil})
    (found,) = audit(model, select=["NC301"]).findings
    assert (found.tensor, found.at, found.count, found.got) == (NAME, (7, 100), 2, "0x7F")


def test_bytes_that_are_no_codes_are_a_finding_and_not_the_end(tmp_path: Path) -> None:
    """Eight-bit integers under a config that says four: each layer is refused by name, the rest is still looked at."""
    model = quantized(tmp_path, "int8")

    def four(config: dict[str, Any]) -> None:
        for group in config["quantization_config"]["config_groups"].values():
            group["weights"]["num_bits"] = 4

    edit_config(model, four)
    found = audit(model, select=["NC001", "NC302"])
    assert {one.rule for one in found.findings} == {"NC001"}
    assert "model.layers.0.mlp.up_proj" in {one.tensor for one in found.findings}
    assert found.subject.floats  # the pass after it
