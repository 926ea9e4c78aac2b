"""auto-round: what it wrote and decoded, its config, and every scheme there and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import toys
from narrowcast.containers.auto_round import CONTAINER
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.jobs.coded import open_coded
from narrowcast.jobs.convert import convert
from narrowcast.jobs.quantize import plan, run
from narrowcast.numbers.codec import decode
from narrowcast.numbers.formats import BF16, E2M1, E4M3FN
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.presets import presets
from upstream_fixtures import FOLDER, assert_same, contents, decoded, upstream

CT = "compressed-tensors"
FIXTURES = sorted(path.name for path in FOLDER.glob("auto_round_*"))


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def test_there_are_fixtures() -> None:
    kinds = ("w4a16_gptq", "w4a16_gptq_asym", "w4a16_awq", "mxfp4", "nvfp4", "fp8_block")
    assert {f"auto_round_{kind}" for kind in kinds} <= set(FIXTURES)


@pytest.mark.parametrize("name", [name for name in FIXTURES if "nvfp4" not in name])
def test_auto_round_decodes_to_our_values(tmp_path: Path, name: str) -> None:
    """To the bit, but for the sign of zero: its scales may be negative, and its integers were decoded by a product
    with the identity, whose sums have no minus zero. Moved into compressed-tensors they are the same."""
    theirs, dtype = upstream(FOLDER / name)
    ours = decoded(FOLDER / name, dtype)
    plus = np.float32(0 if "w4a16" in name else -0.0)
    assert_same({key: value + plus for key, value in ours.items()}, theirs)
    convert(FOLDER / name, tmp_path / "ct", CT)
    assert_same(decoded(tmp_path / "ct", dtype), ours)


def test_auto_round_decodes_nvfp4_with_a_rounded_reciprocal() -> None:
    """Its own arithmetic on the stored bytes gives its values to the bit; ours divides, and so is within an ulp."""
    folder = FOLDER / "auto_round_nvfp4"
    theirs, _ = upstream(folder)
    ours = decoded(folder)
    assert ours.keys() == theirs.keys()
    with Checkpoint.open(folder) as checkpoint:
        for name, value in theirs.items():
            packed = checkpoint.array(f"{name}.weight_packed")
            codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
            scale = np.repeat(decode(checkpoint.array(f"{name}.weight_scale"), E4M3FN), 16, axis=1)
            divisor = checkpoint.array(f"{name}.weight_global_scale")
            assert np.array_equal(decode(codes, E2M1) * (np.float32(1) / divisor) * scale, value)
            assert np.abs(ours[name].view(np.int32) - value.view(np.int32)).max() <= 1


HELD = ("w4a16", "w4a16_asym", "w8a16", "fp8_dynamic", "fp8_per_tensor", "fp8_block", "nvfp4a16", "mxfp4", "mxfp4a16",
        "mxfp8", "mxfp8a16")  # fmt: skip
SAID: Mapping[str, tuple[str, dict[str, Any]]] = {
    "w4a16": ("auto_round:auto_gptq", {"bits": 4, "group_size": 128, "sym": True, "data_type": "int"}),
    "w4a16_asym": ("auto_round:auto_awq", {"bits": 4, "group_size": 128, "sym": False, "data_type": "int"}),
    "w8a16": ("auto_round:auto_gptq", {"bits": 8, "group_size": 128, "sym": True, "data_type": "int"}),
    "fp8_dynamic": ("auto_round:fp8", {"bits": 8, "group_size": -1, "data_type": "fp", "act_bits": 8,
                                       "act_group_size": -1, "activation_scheme": "dynamic", "fmt": "e4m3"}),
    "fp8_per_tensor": ("auto_round:fp8", {"group_size": 0, "act_group_size": -1, "act_dynamic": True}),
    "fp8_block": ("auto_round:fp8", {"bits": 8, "group_size": [128, 128], "sym": True, "act_bits": 8,
                                     "act_group_size": 128, "act_data_type": "fp", "act_sym": True,
                                     "act_dynamic": True, "activation_scheme": "dynamic", "fmt": "e4m3"}),
    "nvfp4a16": ("auto_round:llm_compressor", {"bits": 4, "group_size": 16, "data_type": "nv_fp"}),
    "mxfp4": ("auto_round:llm_compressor", {"bits": 4, "group_size": 32, "data_type": "mx_fp", "act_bits": 4,
                                            "act_data_type": "mx_fp", "act_group_size": 32}),
    "mxfp4a16": ("auto_round:llm_compressor", {"bits": 4, "group_size": 32, "sym": True, "data_type": "mx_fp"}),
    "mxfp8": ("auto_round:llm_compressor", {"bits": 8, "group_size": 32, "data_type": "mx_fp", "act_bits": 8,
                                            "act_data_type": "mx_fp", "act_group_size": 32, "act_sym": True,
                                            "act_dynamic": True}),
    "mxfp8a16": ("auto_round:llm_compressor", {"bits": 8, "group_size": 32, "data_type": "mx_fp"}),
}  # fmt: skip


@pytest.mark.parametrize("preset", HELD)
def test_compressed_tensors_there_and_back_to_the_byte(tmp_path: Path, preset: str) -> None:
    """From fp16, so that integer scales are fp16 in both; the config says what vLLM asks for."""
    model = toys.llama(tmp_path / "model", dtype="fp16", inner=256)
    run(plan(model, tmp_path / "ct", preset))
    convert(tmp_path / "ct", tmp_path / "there", "auto-round")
    assert_same(decoded(tmp_path / "there"), decoded(tmp_path / "ct"))
    packing, said = SAID[preset]
    config = config_of(tmp_path / "there")
    assert config["packing_format"] == packing
    assert {key: config[key] for key in said} == said
    assert config["block_name_to_quantize"] == "model.layers"
    assert config == json.loads((tmp_path / "there" / "quantization_config.json").read_text())
    convert(tmp_path / "there", tmp_path / "back", CT)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        tmp_path / "ct" / "model.safetensors"
    ).read_bytes()
    assert config_of(tmp_path / "back") == config_of(tmp_path / "ct")
    assert not (tmp_path / "back" / "quantization_config.json").exists()


@pytest.mark.parametrize(
    ("preset", "dtype"), [("fp8_dynamic", "BF16"), ("fp8_block", "BF16"), ("w4a16", "F16")]
)
def test_scales_are_in_the_models_dtype(tmp_path: Path, preset: str, dtype: str) -> None:
    model = toys.llama(tmp_path / "model", inner=256, layers=1)
    run(plan(model, tmp_path / "out", preset, container="auto-round"))
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        scales = {n: e.dtype.name for n, e in checkpoint.entries.items() if "scale" in n}
    assert set(scales.values()) == {dtype}
    convert(tmp_path / "out", tmp_path / "ct", CT)
    assert_same(decoded(tmp_path / "out"), decoded(tmp_path / "ct"))


def test_what_differs_is_said_in_extra_config(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model", inner=352, head=True)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'default = "w4a16"\n'
        '[[rule]]\nmatch = ["re:.*gate_proj", "re:.*up_proj", "lm_head"]\npreset = "w8a16"\n'
        '[[rule]]\nmatch = ["re:.*o_proj", "re:model.layers.1.*down_proj"]\nkeep = true\n'
    )
    run(plan(model, tmp_path / "out", recipe=recipe, container="auto-round"))
    config = config_of(tmp_path / "out")
    extra = config["extra_config"]
    layers = r"^model\.layers\.\d+\."
    assert extra[layers + r"self_attn\.o_proj$"] == extra["model.layers.1.mlp.down_proj"] == {"bits": 16}
    assert extra[layers + r"mlp\.gate_proj$"] == {"bits": 8}
    assert extra["model.layers.0.mlp.down_proj"] == {"group_size": 32}
    assert extra["lm_head"] == {"bits": 8, "data_type": "int", "group_size": 128, "sym": True}
    run(plan(model, tmp_path / "gptq", recipe=recipe, container="gptq"))
    assert_same(decoded(tmp_path / "out"), decoded(tmp_path / "gptq"))


def test_one_packing_for_a_model(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model", inner=256)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('default = "w4a16"\n[[rule]]\nmatch = "re:.*down_proj"\npreset = "mxfp4a16"\n')
    with pytest.raises(UsageError, match="one packing_format"):
        plan(model, tmp_path / "out", recipe=recipe, container="auto-round")


def test_what_it_cannot_hold() -> None:
    assert CONTAINER.spelling is not None
    for name in sorted(set(toys.PRESETS) - set(HELD)):
        with pytest.raises(UsageError, match="no spelling"):
            CONTAINER.spelling(presets[name].linear, BF16)


# Contradictions, each made of a file that auto-round wrote.


def changed(tmp_path: Path, name: str, **settings: Any) -> Path:
    """A fixture with another config, and nothing beside it."""
    folder = tmp_path / "m"
    folder.mkdir()
    config = json.loads((FOLDER / name / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((FOLDER / name / "model.safetensors").read_bytes())
    return folder


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("w4a16_gptq", {"packing_format": "auto_round"}, "look like v1"),
    ("w4a16_gptq", {"packing_format": "auto_round:fp8"}, "words of integers"),
    ("w4a16_gptq", {"group_size": 32}, "shapes that the config gives"),
    ("w4a16_gptq", {"group_size": None}, "does not say its groups"),
    ("w4a16_gptq", {"extra_config": {"model.layers.0.mlp.down_proj": {"bits": 16}}}, "says that it is not"),
    ("w4a16_gptq", {"extra_config": {"down_proj": {"bits": 8}}}, "shapes that the config gives"),
    ("w4a16_gptq", {"extra_config": {r".*down_pro[j]$": {"bits": 16}}}, "says that it is not"),
    ("w4a16_gptq_asym", {"sym": True}, "says symmetric"),
    ("w4a16_awq", {"sym": True}, "says symmetric"),
    ("mxfp4", {"group_size": 16}, "something else than its tensors"),
    ("mxfp4", {"bits": 8}, "something else than its tensors"),
    ("mxfp4", {"act_data_type": "int"}, "not known"),
    ("nvfp4", {"data_type": "mx_fp"}, "something else than its tensors"),
    ("fp8_block", {"group_size": [64, 64]}, "do not have the shape"),
    ("fp8_block", {"group_size": -1}, "not what group_size says"),
    ("fp8_block", {"data_type": "int"}, "something else than its tensors"),
]


@pytest.mark.parametrize(("name", "settings", "words"), CASES)
def test_what_contradicts_is_refused(tmp_path: Path, name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        contents(changed(tmp_path, f"auto_round_{name}", **settings))


def test_two_configs_must_say_the_same(tmp_path: Path) -> None:
    folder = changed(tmp_path, "auto_round_mxfp4")
    beside = folder / "quantization_config.json"
    beside.write_text(json.dumps(config_of(folder)))
    assert contents(folder).container == "auto-round"
    beside.write_text(json.dumps(config_of(folder) | {"bits": 8}))
    with pytest.raises(CheckpointError, match="disagree"):
        contents(folder)


def test_static_inputs_of_fp8(tmp_path: Path) -> None:
    """A per-channel weight with a static input scale in the model's dtype travels to compressed-tensors."""
    rng = np.random.default_rng(0)
    at = "model.layers.0.mlp.down_proj"
    arrays = {
        f"{at}.weight": rng.integers(0, 0x7E, (32, 64), np.uint8).view(ml_dtypes.float8_e4m3fn),
        f"{at}.weight_scale": rng.integers(0x3C00, 0x3D00, 32, np.uint16).view(ml_dtypes.bfloat16),
        f"{at}.input_scale": np.array([2.0**-5], ml_dtypes.bfloat16),
    }
    config = {
        **toys.llama_config(layers=1),
        "quantization_config": {
            "quant_method": "auto-round", "packing_format": "auto_round:fp8", "bits": 8, "group_size": -1, "sym": True,
            "data_type": "fp", "act_bits": 8, "act_data_type": "fp", "act_group_size": 0, "act_dynamic": False,
        },
    }  # fmt: skip
    folder = toys.write(tmp_path / "m", arrays, config)
    with Checkpoint.open(folder) as checkpoint:
        stored = open_coded(checkpoint).contents.matrices[0]
        assert stored.linear.calibrated
        assert stored.how.static(checkpoint, stored.place, stored.shape, "input").tolist() == [2.0**-5]
    convert(folder, tmp_path / "ct", CT)
    convert(tmp_path / "ct", tmp_path / "back", "auto-round")
    assert_same(decoded(tmp_path / "ct"), decoded(folder))
    assert_same(decoded(tmp_path / "back"), decoded(folder))
    assert config_of(tmp_path / "back")["activation_scheme"] == "static"
