"""Rules about scales and caches beyond their two cases: other depths, other granularities, the edges of thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowcast
import toys
from audit.cases.cache import ATTENTION, both, cached, scale
from audit.cases.scales import SCALE, UP
from audit.cases.scales_pieces import UPSTREAM, upstream
from audit.editing import edit, edit_config, quantized
from narrowcast.audit.findings import Finding
from narrowcast.audit.opening import open_anyway
from narrowcast.audit.passes import look
from narrowcast.audit.run import audit
from narrowcast.audit.subject import Subject


def found(model: Path, code: str, **options: Any) -> list[Finding]:
    """What one rule says, at full depth unless ``quick``."""
    return [one for one in audit(model, **options).findings if one.rule == code]


@pytest.mark.parametrize("name", ["compressed_tensors_nvfp4_kv", "auto_round_nvfp4", "modelopt_nvfp4"])
def test_tile_maxima_are_the_librarys(name: str) -> None:
    """The amax that rules see is that of what the library decodes, whichever way its outer scale goes: to half a unit
    of bf16, in which compressed-tensors answers."""
    with np.load(UPSTREAM / name / "decoded.npz") as decoded:
        subject = Subject(name, open_anyway(UPSTREAM / name), "codes")
        for held in subject.quantized.values():
            matrix = look(held, True)
            theirs = np.abs(decoded[held.name]).reshape(matrix.shape[0], -1, 16).max(axis=2)
            assert matrix.tile_amax == pytest.approx(theirs, rel=2.0**-7)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(("share", "fires"), [(8, True), (12, False)])
def test_exponents_that_are_none(tmp_path: Path, quick: bool, share: int, fires: bool) -> None:
    """One byte in 8 or in 12 is an exponent without its bias; a tenth is the limit."""

    def change(old: np.ndarray) -> np.ndarray:
        new = old.copy()
        new.reshape(-1)[::share] -= np.uint8(127)
        return new

    model = edit(quantized(tmp_path, "mxfp8a16"), {SCALE: change})
    assert bool(found(model, "NC114", quick=quick)) is fires


def test_bytes_over_zeros_are_free(tmp_path: Path) -> None:
    """With the codes read, any byte may stand over zeros."""

    def zeros(old: np.ndarray) -> np.ndarray:
        new = old.copy()
        new[::2] = 9
        return new

    def codes(old: np.ndarray) -> np.ndarray:
        new = old.copy()
        new[::2] = 0
        return new

    model = edit(quantized(tmp_path, "mxfp4a16"), {SCALE: zeros, f"{UP}.weight_packed": codes})
    assert found(model, "NC114") == []


@pytest.mark.parametrize(("rows", "severity"), [(40, "warning"), (30, None)])
def test_zero_scales_with_zero_points(tmp_path: Path, rows: int, severity: str | None) -> None:
    """Of 352 rows: whether a tile is in use is not known here, so a tenth may be zero."""

    def change(old: np.ndarray) -> np.ndarray:
        new = old.copy()
        new[:rows] = 0
        return new

    model = edit(quantized(tmp_path, "w4a16_asym"), {SCALE: change})
    assert [one.severity for one in found(model, "NC111")] == ([severity] if severity else [])


def test_negative_scales_with_zero_points(tmp_path: Path) -> None:
    model = edit(quantized(tmp_path, "w4a16_asym"), {SCALE: lambda old: old ^ 0x8000})
    (one,) = found(model, "NC112")
    assert one.count == 352


def test_weights_of_nothing(tmp_path: Path) -> None:
    model = edit(quantized(tmp_path, "fp8_dynamic"), {SCALE: lambda old: old * np.float32(1e-7)})
    (one,) = found(model, "NC120")
    assert (one.severity, one.tensor) == ("warning", SCALE)


@pytest.mark.parametrize(("dtype", "fires"), [("U8", True), ("BF16", False)])
def test_block_scales_as_bytes(tmp_path: Path, dtype: str, fires: bool) -> None:
    """vLLM copies the byte 0x38 into E4M3 as 56. A float scale beside a second one is another scheme."""
    model = quantized(tmp_path, "nvfp4a16", "modelopt")
    width = {"U8": np.uint8, "BF16": np.uint16}[dtype]
    edit(model, {SCALE: (dtype, np.full((352, 8), 0x38, width))})
    assert [one.got for one in found(model, "NC102")] == ([dtype] if fires else [])


def test_rounded_outer_scale(tmp_path: Path) -> None:
    model = quantized(tmp_path, "nvfp4a16", "modelopt")
    edit(model, {f"{UP}.weight_scale_2": ("F16", np.array(2e-4, np.float16))})
    assert [one.severity for one in found(model, "NC102")] == ["info"]


@pytest.mark.parametrize(
    ("containers", "preset"), [("modelopt", "nvfp4a16"), ("compressed-tensors", "mxfp8a16")]
)
def test_grids_of_groups(tmp_path: Path, containers: str, preset: str) -> None:
    model = edit(quantized(tmp_path, preset, containers), {SCALE: lambda old: np.ascontiguousarray(old.T)})
    (one,) = found(model, "NC103")
    assert one.said == "the grid of scales is transposed"


def test_grid_of_other_sizes(tmp_path: Path) -> None:
    name = f"{UP}.weight_scale_inv"
    model = quantized(tmp_path, "fp8_block", "fp8", hidden=256)
    edit(model, {name: lambda old: np.ascontiguousarray(old[:2])})
    (one,) = found(model, "NC103")
    assert (one.said, one.got) == ("the grid of scales is of other sizes than the codes", "[2, 2]")


def test_one_missing_scale_is_one_finding(tmp_path: Path) -> None:
    """The container's refusal gives way to the rule that explains it, and the rest is looked at."""
    model = edit(quantized(tmp_path, "fp8_dynamic"), {SCALE: None})
    done = audit(model, select=["NC0", "NC1"])
    assert [(one.rule, one.tensor) for one in done.findings if one.severity == "error"] == [
        ("NC100", f"{UP}.weight")
    ]
    assert len(done.subject.matrices) == 13


def test_mla_pair(tmp_path: Path) -> None:
    """DeepSeek's q_a and kv_a projections are loaded as one."""
    shapes = {"model.embed_tokens.weight": (64, 64), "model.norm.weight": (64,)} | {
        f"model.layers.0.self_attn.{name}.weight": (32, 64) for name in ("q_a_proj", "kv_a_proj_with_mqa")
    }
    config = toys.llama_config(hidden=64, layers=1) | {"model_type": "deepseek_v3"}
    toys.write(tmp_path / "parent", toys.weights(shapes), config)
    narrowcast.quantize(tmp_path / "parent", tmp_path / "child", "nvfp4a16", container="modelopt")
    assert found(tmp_path / "child", "NC150") == []
    outer = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_2"
    edit(tmp_path / "child", {outer: lambda old: old / np.float32(2)})
    assert [one.said for one in found(tmp_path / "child", "NC150")] == ["fused siblings differ, ratio 2"]


@pytest.mark.parametrize(("ratio", "severity"), [(2.0, "info"), (5000.0, "warning")])
def test_fp8_siblings(tmp_path: Path, ratio: float, severity: str) -> None:
    model = upstream(tmp_path, "modelopt_fp8_kv")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    edit(model, {name: lambda old: (old / np.float32(ratio)).astype(np.float32)})
    assert [one.severity for one in found(model, "NC151")] == [severity]


def test_one_input_scale_everywhere(tmp_path: Path) -> None:
    """A placeholder in every layer; one that differs is enough to be silent."""
    toys.llama(tmp_path / "parent", layers=3)
    narrowcast.quantize(tmp_path / "parent", tmp_path / "child", "fp8_per_tensor", container="fp8")
    edit_config(
        tmp_path / "child", lambda config: config["quantization_config"].update(activation_scheme="static")
    )
    names = [
        f"model.layers.{layer}.{path}.input_scale" for layer in range(3)
        for path in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                     "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]  # fmt: skip
    edit(tmp_path / "child", dict.fromkeys(names, ("F32", np.array(0.02, np.float32))))
    (one,) = found(tmp_path / "child", "NC161")
    assert (one.said, one.count) == ("all 21 static input scales are 0.02", 21)
    edit(tmp_path / "child", {names[-1]: ("F32", np.array(0.03, np.float32))})
    assert found(tmp_path / "child", "NC161") == []


@pytest.mark.parametrize("value", [0.0, -0.01, np.nan, np.inf])
def test_broken_input_scale(tmp_path: Path, value: float) -> None:
    name = "model.layers.0.mlp.down_proj.input_scale"
    model = edit(upstream(tmp_path, "modelopt_fp8_kv"), {name: ("F32", np.array(value, np.float32))})
    assert [(one.severity, one.tensor) for one in found(model, "NC162")] == [("error", name)]


@pytest.mark.parametrize(("container", "severity"), [("fp8", "error"), ("compressed-tensors", "warning")])
def test_values_alone(tmp_path: Path, container: str, severity: str) -> None:
    """vLLM asserts that there is a scale of the keys, where it does not begin with 1.0."""
    preset = "fp8_block" if container == "fp8" else "fp8_dynamic"
    model = edit(quantized(tmp_path, preset, container), both(names="v"))
    if container == "compressed-tensors":
        model = cached(tmp_path / "other", both(names="v"))
    assert {one.severity for one in found(model, "NC202")} == {severity}


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_broken_cache_scale(tmp_path: Path, value: float) -> None:
    tensor = f"{ATTENTION.format(1)}.k_scale"
    (one,) = found(cached(tmp_path, both() | {tensor: scale(value)}), "NC207")
    assert (one.tensor, one.severity) == (tensor, "error")


def test_scales_of_nobody(tmp_path: Path) -> None:
    """Scales on the layer above the attention are read by no attention."""
    astray = {f"model.layers.{layer}.{which}_scale": scale(0.1) for layer in range(2) for which in "kv"}
    (one,) = found(cached(tmp_path, both() | astray), "NC204")
    assert one.said == "KV cache scales of 2 modules that are no attention layers"


def test_dynamic_cache_needs_no_scales(tmp_path: Path) -> None:
    assert found(cached(tmp_path, {}, dynamic=True), "NC200") == []


@pytest.mark.parametrize(
    ("engine", "read"), [("vllm", True), ("sglang", True), ("tensorrt-llm", False), ("transformers", True)]
)
def test_names_by_engine(tmp_path: Path, engine: str, read: bool) -> None:
    """compressed-tensors' own names, on the attention."""
    assert (found(cached(tmp_path, both()), "NC203", engine=engine) == []) is read


def test_no_engine_chosen(tmp_path: Path) -> None:
    """The container's own names are no news, whoever does not read them; another's are."""
    assert found(cached(tmp_path / "own", both()), "NC203") == []
    modelopt = {f"{ATTENTION.format(i)}.{w}_proj.{w}_scale": scale(0.1) for i in (0, 1) for w in "kv"}
    said = found(cached(tmp_path / "other", modelopt), "NC203")
    assert {(one.severity, one.repair) for one in said} == {("info", "kv_names")}


def test_own_names_are_not_repaired(tmp_path: Path) -> None:
    (one,) = found(cached(tmp_path, both()), "NC203", engine="tensorrt-llm")
    assert (one.severity, one.repair) == ("warning", None)


def test_mtp_layers_are_not_counted(tmp_path: Path) -> None:
    """A layer past num_hidden_layers predicts tokens ahead, and engines may leave it out."""
    model = cached(tmp_path, both(layers=(0,)))
    edit_config(model, lambda config: config.update(num_hidden_layers=1))
    assert found(model, "NC204") == []


def codes(findings: Sequence[Finding]) -> set[str]:
    return {one.rule for one in findings if one.severity != "info"}


@pytest.mark.parametrize("preset", ["fp8_block", "nvfp4a16", "mxfp8", "w4a16_asym", "int8"])
@pytest.mark.parametrize("quick", [False, True])
def test_own_checkpoints_are_healthy(tmp_path: Path, preset: str, quick: bool) -> None:
    model = quantized(tmp_path, preset)
    assert codes(audit(model, select=["NC1", "NC2"], quick=quick).findings) == set()
