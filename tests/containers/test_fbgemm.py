"""FBGEMM FP8: codes and scales as transformers lays them out, decoded by the formula and moved on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import toys
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.jobs.convert import convert
from upstream_fixtures import assert_same, contents, decoded, stored

UP, STACK = "model.layers.0.mlp.up_proj", "model.layers.0.feed_forward.experts"


def row_codes(x: Any) -> tuple[Any, Any]:
    """transformers' quantize_fp8_per_row, of which only the layout matters here: codes and amax / 448 of rows."""
    scale = np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(448)
    return (x / scale).astype(ml_dtypes.float8_e4m3fn), scale


def values(codes: Any, scale: Any) -> Any:
    return codes.astype(np.float32) * scale


def write(folder: Path, tensors: dict[str, Any], **told: Any) -> Path:
    config = {
        "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "hidden_size": 24,
        "quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, **told},
    }  # fmt: skip
    return toys.write(folder, tensors, config)


def linear() -> tuple[dict[str, Any], Any]:
    codes, scale = row_codes(np.random.default_rng(0).standard_normal((40, 24), np.float32))
    return {f"{UP}.weight": codes, f"{UP}.weight_scale": scale}, values(codes, scale)


def stacks() -> tuple[dict[str, Any], dict[str, Any]]:
    """As FbgemmFp8Quantize makes them: experts [E, K, N] turned, quantized by rows, turned back."""
    rng, tensors, wanted = np.random.default_rng(1), {}, {}
    for name, (k, n) in {"gate_up_proj": (24, 32), "down_proj": (16, 24)}.items():
        weight = rng.standard_normal((3, k, n)).astype(np.float32)
        codes, scale = row_codes(weight.transpose(0, 2, 1))
        at = f"{STACK}.{name}"
        tensors[at] = np.ascontiguousarray(codes.transpose(0, 2, 1))
        tensors[f"{at}_scale"] = scale.reshape(3, 1, n) if name == "gate_up_proj" else scale
        wanted[at] = values(codes, scale)
    return tensors, wanted


def test_linears_decode_by_channel(tmp_path: Path) -> None:
    tensors, wanted = linear()
    assert_same(decoded(write(tmp_path / "m", tensors)), {UP: wanted})


def test_experts_decode_by_output_channel(tmp_path: Path) -> None:
    """One matrix of the stack as torch's linear has it, [N, K]."""
    tensors, wanted = stacks()
    assert_same(decoded(write(tmp_path / "m", tensors)), wanted)


def test_plain_experts_lie_as_llama_4_multiplies_them(tmp_path: Path) -> None:
    tensors, wanted = stacks()
    convert(write(tmp_path / "m", tensors), tmp_path / "out", "plain", dtype="fp32")
    for name, value in wanted.items():
        assert stored(tmp_path / "out")[name] == (
            "F32", tensors[name].shape, value.transpose(0, 2, 1).tobytes()
        )  # fmt: skip


def test_to_compressed_tensors_without_a_change_of_codes(tmp_path: Path) -> None:
    experts, wanted = stacks()
    tensors, value = linear()
    convert(write(tmp_path / "m", tensors | experts), tmp_path / "ct", "compressed-tensors")
    ours = decoded(tmp_path / "ct")
    assert np.array_equal(ours[UP], value)
    assert stored(tmp_path / "ct")[f"{UP}.weight"][2] == tensors[f"{UP}.weight"].tobytes()
    for e in range(3):
        both = np.concatenate([ours[f"{STACK}.{e}.{part}"] for part in ("gate_proj", "up_proj")])
        assert np.array_equal(both, wanted[f"{STACK}.gate_up_proj"][e])
        assert np.array_equal(ours[f"{STACK}.{e}.down_proj"], wanted[f"{STACK}.down_proj"][e])
    group = json.loads((tmp_path / "ct/config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    assert group["weights"]["strategy"] == "channel"
    assert group["input_activations"]["strategy"] == "token"


def test_the_bound_of_inputs_is_mentioned(tmp_path: Path) -> None:
    assert "1200" in contents(write(tmp_path / "m", linear()[0])).notes[0]


def test_it_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="read and not written"):
        convert(write(tmp_path / "m", linear()[0]), tmp_path / "out", "fbgemm-fp8")


@pytest.mark.parametrize(
    ("change", "told", "sides"),
    [
        ({f"{UP}.weight_scale": np.ones((1, 1), np.float32)}, {}, ("[1, 1]", "[40, 1]")),
        ({f"{UP}.weight": np.ones((40, 24), np.float32)}, {}, ("F32 [40, 24]", "F8_E4M3")),
        ({f"{UP}.weight_scale": np.ones((40, 1), np.uint8)}, {}, ("U8", "F32")),
        ({f"{STACK}.gate_up_proj_scale": np.ones((3, 32, 1), np.float32)}, {}, ("[3, 32, 1]", "[3, 1, 32]")),
        ({}, {"modules_to_not_convert": ["mlp.up_proj"]}, (f"{UP}.weight_scale", "mlp.up_proj")),
    ],
)
def test_contradictions_name_both_sides(tmp_path: Path, change: Any, told: Any, sides: Any) -> None:
    tensors = linear()[0] | stacks()[0] | change
    with pytest.raises(CheckpointError) as caught:
        contents(write(tmp_path / "m", tensors, **told))
    assert sides[0] in str(caught.value.got)
    assert sides[1] in str(caught.value.wanted)


def test_codes_without_scales_are_refused(tmp_path: Path) -> None:
    tensors = linear()[0]
    del tensors[f"{UP}.weight_scale"]
    with pytest.raises(CheckpointError, match="no scale"):
        contents(write(tmp_path / "m", tensors))
