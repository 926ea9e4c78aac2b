"""compressed-tensors as llm-compressor and older libraries wrote it: decoded to their values, or refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import toys
from narrowcast.containers.compressed_tensors.groups import Groups
from narrowcast.containers.contents import Source
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.jobs.coded import open_coded
from narrowcast.jobs.convert import convert, plan
from narrowcast.store.checkpoint import Checkpoint
from upstream_fixtures import FOLDER, assert_same, contents, decoded, stored, upstream

CT = "compressed-tensors"
FIXTURES = sorted(path.name for path in FOLDER.glob("compressed_tensors_*"))
UP = "model.layers.0.mlp.up_proj"


def fixture(name: str) -> Path:
    return FOLDER / f"compressed_tensors_{name}"


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def changed(tmp_path: Path, name: str, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A fixture with its config.json, given whole and as its quantization block, changed."""
    folder = tmp_path / "changed"
    shutil.copytree(fixture(name), folder)
    told = config(folder)
    change(told, told["quantization_config"])
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def layer(tmp_path: Path, tensors: dict[str, Any], weights: dict[str, Any], **told: Any) -> Path:
    """One matrix under one group."""
    group = {"targets": ["Linear"], "weights": weights, **told.pop("group", {})}
    block = {"quant_method": CT, "config_groups": {"group_0": group}, "ignore": ["lm_head"], **told}
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "quantization_config": block}
    return toys.write(tmp_path / "layer", {f"{UP}.{key}": value for key, value in tensors.items()}, model)


@pytest.mark.parametrize("name", FIXTURES)
def test_fixtures_decode_to_the_library_s_values(name: str) -> None:
    """The library answers in bf16, which is our exact product rounded once: it multiplies bf16 scales and codes in one
    operation, and divides s by d in fp32 for NVFP4."""
    theirs, dtype = upstream(FOLDER / name)
    assert_same(decoded(FOLDER / name, dtype), theirs)


@pytest.mark.parametrize("name", FIXTURES)
def test_to_itself_is_a_copy(tmp_path: Path, name: str) -> None:
    convert(FOLDER / name, tmp_path / "out", CT)
    assert stored(tmp_path / "out") == stored(FOLDER / name)
    assert (tmp_path / "out/config.json").read_bytes() == (FOLDER / name / "config.json").read_bytes()


def test_nvfp4_divides_by_its_global_scale() -> None:
    """fp32(s / d) · e with the divisor as it is; times its reciprocal, values would differ in the last place."""
    folder = fixture("nvfp4_kv")
    raw, ours = stored(folder), decoded(folder)
    lut = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    lut, elsewhere = np.concatenate([lut, -lut]), 0
    for name, value in ours.items():
        _, shape, data = raw[f"{name}.weight_packed"]
        packed = np.frombuffer(data, np.uint8).reshape(shape)
        e = lut[np.stack([packed & 15, packed >> 4], -1).reshape(shape[0], -1)]
        s = np.frombuffer(raw[f"{name}.weight_scale"][2], ml_dtypes.float8_e4m3fn).astype(np.float32)
        d = np.frombuffer(raw[f"{name}.weight_global_scale"][2], np.float32)
        s = s.reshape(shape[0], -1).repeat(16, 1)
        assert np.array_equal(value, s / d * e)
        elsewhere += int((s * (np.float32(1) / d) * e != value).sum())
    assert elsewhere


def test_nvfp4_leaves_and_comes_back(tmp_path: Path) -> None:
    """As a multiplier elsewhere: codes and block scales untouched, values within the rounding of the reciprocal."""
    folder = fixture("mixed")
    convert(folder, tmp_path / "there", "modelopt")
    convert(tmp_path / "there", tmp_path / "back", CT)
    before, after = stored(folder), stored(tmp_path / "back")
    for name, value in before.items():
        if "mlp" in name and not name.endswith("global_scale"):
            assert after[name] == value
    ours = decoded(folder)
    for name, value in decoded(tmp_path / "there").items():
        # 1/d, s · (1/d) and the product with e each round once, s / d and its product too: 5 half ulps.
        assert np.all(np.abs(value - ours[name]) <= 5 * 2.0**-24 * np.abs(ours[name])), name


def test_static_scales_of_inputs() -> None:
    raw = stored(fixture("int8_asym_input"))
    with Checkpoint.open(fixture("int8_asym_input")) as source:
        for m in open_coded(source).contents.matrices:
            assert m.linear.calibrated
            assert m.linear.input is not None
            assert m.linear.input.zero is not None
            zero = m.how.static(source, m.place, m.shape, "input_zero")
            assert zero.tobytes() == raw[f"{m.module}.input_zero_point"][2]
            scale = m.how.static(source, m.place, m.shape, "input")
            assert scale.astype(ml_dtypes.bfloat16).tobytes() == raw[f"{m.module}.input_scale"][2]


def test_scales_of_inputs_and_cache_travel(tmp_path: Path) -> None:
    """Through native FP8, which holds them in fp32, and back."""
    folder = fixture("fp8_kv")
    convert(folder, tmp_path / "fp8", "fp8")
    convert(tmp_path / "fp8", tmp_path / "back", CT)
    before, after = stored(folder), stored(tmp_path / "back")
    travelled = [name for name in before if name.endswith(("input_scale", "k_scale", "v_scale"))]
    assert len(travelled) == 9
    for name in travelled:
        value = np.frombuffer(before[name][2], ml_dtypes.bfloat16).astype(np.float32)
        assert after[name] == ("F32", (1,), value.tobytes())
    told = config(tmp_path / "back")["quantization_config"]
    assert told["kv_cache_scheme"]["strategy"] == "tensor"
    assert told["config_groups"]["group_0"]["input_activations"]["dynamic"] is False
    assert_same(decoded(tmp_path / "back"), decoded(folder))


def test_scales_of_heads(tmp_path: Path) -> None:
    folder = fixture("fp8_dynamic_kv_heads")
    found = contents(folder)
    assert found.kv == "fp8_head"
    assert {scale.tensor.rsplit(".", 1)[1] for scale in found.cache_scales} == {"k_scale", "v_scale"}
    convert(folder, tmp_path / "out", CT, preset="int8", requantize=True)
    name = "model.layers.0.self_attn.k_scale"
    before, after = stored(folder)[name], stored(tmp_path / "out")[name]
    assert after[:2] == ("F32", (2, 1, 1))
    assert np.array_equal(np.frombuffer(before[2], ml_dtypes.bfloat16), np.frombuffer(after[2], np.float32))
    assert config(tmp_path / "out")["quantization_config"]["kv_cache_scheme"]["strategy"] == "attn_head"


def test_rotations_are_copied_or_refused(tmp_path: Path) -> None:
    folder = fixture("spinquant_w4a16")
    for to, options in (("plain", {}), (CT, {"preset": "mxfp4a16", "requantize": True}), ("gptq", {})):
        with pytest.raises(UsageError, match="rotates") as caught:
            plan(folder, tmp_path / "out", to, **options)
        assert "R4 (hadamard) on the input of re:.*down_proj$" in str(caught.value.got)
        assert "R1" not in str(caught.value.got)


def test_fused_rotations_are_harmless(tmp_path: Path) -> None:
    def without_r4(told: dict[str, Any], block: dict[str, Any]) -> None:
        del block["transform_config"]["config_groups"]["R4"]

    folder = changed(tmp_path, "spinquant_w4a16", without_r4)
    with pytest.raises(CheckpointError, match="does not mention") as caught:
        contents(folder)
    assert "down_proj.R4_input.weight" in str(caught.value.got)
    rewrite(folder, drop=".R4_input.weight")
    assert contents(folder).notes[0].startswith("transforms R1, R2 are in the weights")
    convert(folder, tmp_path / "out", "plain")


def rewrite(folder: Path, drop: str) -> None:
    """The same file without the tensors of one suffix."""
    kinds = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    kept = {}
    with Checkpoint.open(folder) as source:
        for name, entry in source.entries.items():
            if not name.endswith(drop):
                value = source.array(name)
                kept[name] = value.view(kinds[entry.dtype.name]) if entry.dtype.name in kinds else value
    save_file(kept, folder / "model.safetensors")


def test_every_preset_of_the_library_as_a_group_of_targets() -> None:
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    for name in PRESET_SCHEMES:
        theirs = json.loads(preset_name_to_scheme(name, ["Linear"]).model_dump_json())
        short, long = (
            Groups.of(Source(None, {"config_groups": {key: group}}))  # type: ignore[arg-type]
            for key, group in ((name, ["Linear"]), ("group_0", theirs))
        )
        for ours, wanted in (
            (short.groups[0].weights, long.groups[0].weights),
            (short.groups[0].inputs, long.groups[0].inputs),
        ):
            keys = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic")
            assert (ours is None) == (wanted is None), name
            assert (
                ours is None or wanted is None or {k: ours[k] for k in keys} == {k: wanted[k] for k in keys}
            ), name


def _old_block(told: dict[str, Any], block: dict[str, Any]) -> None:
    weights = block["config_groups"]["group_0"]["weights"]
    weights["block_structure"] = "32x32"
    del weights["strategy"]


def _compression_config(told: dict[str, Any], block: dict[str, Any]) -> None:
    told["compression_config"] = told.pop("quantization_config")


def _in_text_config(told: dict[str, Any], block: dict[str, Any]) -> None:
    inner = {key: told.pop(key) for key in list(told) if key not in ("architectures", "model_type")}
    told["text_config"] = inner


def _defaults(told: dict[str, Any], block: dict[str, Any]) -> None:
    for args in block["config_groups"]["group_0"].values():
        if isinstance(args, dict):
            for key in [key for key, value in args.items() if value is None]:
                del args[key]


def _no_formats(told: dict[str, Any], block: dict[str, Any]) -> None:
    del block["format"]
    del block["config_groups"]["group_0"]["format"]


def _exact_names_below_another_root(told: dict[str, Any], block: dict[str, Any]) -> None:
    names = [name.replace("model.", "model.language_model.", 1) for name in decoded(fixture("fp8_block"))]
    block["config_groups"]["group_0"]["targets"] = names


@pytest.mark.parametrize(
    "change",
    [
        _old_block,
        _compression_config,
        _in_text_config,
        _defaults,
        _no_formats,
        _exact_names_below_another_root,
    ],
)
def test_old_spellings_mean_the_same(tmp_path: Path, change: Any) -> None:
    folder = changed(tmp_path, "fp8_block", change)
    assert_same(decoded(folder), decoded(fixture("fp8_block")))
    convert(folder, tmp_path / "plain", "plain")
    told = config(tmp_path / "plain")
    assert not {"quantization_config", "compression_config"} & (
        told.keys() | told.get("text_config", {}).keys()
    )


def test_a_group_under_a_preset_s_name(tmp_path: Path) -> None:
    def short(told: dict[str, Any], block: dict[str, Any]) -> None:
        block["config_groups"] = {"FP8_DYNAMIC": ["Linear"]}

    folder = changed(tmp_path, "fp8_dynamic_kv_heads", short)
    assert_same(decoded(folder), decoded(fixture("fp8_dynamic_kv_heads")))


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, False)])
def test_integers_that_each_fill_a_byte(tmp_path: Path, bits: int, symmetric: bool) -> None:
    """int-quantized, against the library's own decompressor; and repacked without a change of value."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    rng, low = np.random.default_rng(bits), -(1 << (bits - 1))
    tensors: dict[str, Any] = {
        "weight": rng.integers(low, -low, (32, 64), np.int8),
        "weight_scale": (rng.integers(1, 256, (32, 2)) / 256).astype(ml_dtypes.bfloat16),  # exact in fp16 too
    }
    if not symmetric:
        tensors["weight_zero_point"] = rng.integers(low, -low, (32, 2), np.int8)
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 32}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True} if bits == 8 else None
    folder = layer(tmp_path, tensors, weights, format="int-quantized", group={"input_activations": inputs})
    state = {
        key: torch.from_numpy(value.astype(np.float32)).bfloat16()
        if key == "weight_scale"
        else torch.from_numpy(value)
        for key, value in tensors.items()
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    theirs = BaseCompressor.get_value_from_registry("int-quantized").decompress(state, scheme)["weight"]
    assert_same(decoded(folder, "bf16"), {UP: theirs.float().numpy()})
    if bits == 4:
        convert(folder, tmp_path / "packed", "gptq")
        assert_same(decoded(tmp_path / "packed"), decoded(folder))


def test_a_byte_beyond_its_width_is_refused(tmp_path: Path) -> None:
    tensors = {"weight": np.full((8, 32), 9, np.int8), "weight_scale": np.ones((8, 1), np.float32)}
    folder = layer(
        tmp_path, tensors, {"num_bits": 4, "strategy": "group", "group_size": 32}, format="int-quantized"
    )
    with pytest.raises(CheckpointError, match="does not fit"):
        decoded(folder)


def shuffled_layer(tmp_path: Path, g_idx: Any, asymmetric: bool = False) -> tuple[Path, Any]:
    """Columns in the model's order, each under the scale of its own group, packed by the library."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    rng = np.random.default_rng(5)
    q = rng.integers(-8, 8, (16, 64), np.int8)
    scale = rng.random((16, 2), np.float32)
    zero = rng.integers(-8, 8, (16, 2), np.int8) if asymmetric else np.zeros((16, 2), np.int8)
    tensors: dict[str, Any] = {
        "weight_packed": pack_to_int32(torch.from_numpy(q), 4).numpy(), "weight_scale": scale,
        "weight_shape": np.array(q.shape, np.int64), "weight_g_idx": g_idx,
    }  # fmt: skip
    if asymmetric:
        tensors["weight_zero_point"] = pack_to_int32(torch.from_numpy(zero), 4, packed_dim=0).numpy()
    group = g_idx if g_idx.min() >= 0 else np.arange(64) // 32
    value = (q.astype(np.float32) - zero[:, group]) * scale[:, group]
    weights = {
        "num_bits": 4,
        "strategy": "group",
        "group_size": 32,
        "symmetric": not asymmetric,
        "actorder": "group",
    }
    return layer(tmp_path, tensors, weights, format="pack-quantized"), value


@pytest.mark.parametrize("asymmetric", [False, True])
def test_shuffled_columns(tmp_path: Path, asymmetric: bool) -> None:
    g_idx = np.random.default_rng(3).permutation(np.arange(64) // 32).astype(np.int32)
    folder, value = shuffled_layer(tmp_path, g_idx, asymmetric)
    assert_same(decoded(folder), {UP: value})
    with pytest.raises(UsageError, match="shuffled"):
        plan(folder, tmp_path / "out", CT, preset="w4a16")
    with pytest.raises(UsageError, match="shuffled"):
        plan(folder, tmp_path / "out", "awq")


@pytest.mark.parametrize("g_idx", [np.arange(64) // 32, np.full(64, -1)])
def test_an_order_that_says_nothing_is_left_out(tmp_path: Path, g_idx: Any) -> None:
    folder, value = shuffled_layer(tmp_path, g_idx.astype(np.int32))
    assert_same(decoded(folder), {UP: value})
    assert contents(folder).taken == (f"{UP}.weight_g_idx",)


def test_columns_that_fill_no_groups_are_refused(tmp_path: Path) -> None:
    folder, _ = shuffled_layer(tmp_path, np.minimum(np.arange(64) // 31, 1).astype(np.int32))
    with pytest.raises(CheckpointError, match="no grouping"):
        contents(folder)


def _group(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(told: dict[str, Any], block: dict[str, Any]) -> None:
        at = block["config_groups"]["group_0"]
        *path, last = key.split(".")
        for name in path:
            at = at[name]
        at[last] = value

    return change


def _block(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda told, block: block.update({key: value})


def _second_block(told: dict[str, Any], block: dict[str, Any]) -> None:
    told["compression_config"] = copy.deepcopy(block) | {"format": "dense"}


CONTRADICTIONS: dict[str, tuple[str, Any, tuple[str, str]]] = {
    "another width": ("w4a16", _group("weights.num_bits", 3), ("[64, 4]", "for 3 bits")),
    "another type": ("mxfp4a16", _group("weights.type", "int"), ("type float", "type int")),
    "symmetric with zeros": ("w4a16_asym", _group("weights.symmetric", True), ("symmetric False", "symmetric True")),
    "another group": ("w4a16", _group("weights.group_size", 64), ("group_size 32", "group_size 64")),
    "another block": ("fp8_block", _group("weights.block_structure", [16, 16]), ("strategy", "block_structure [16")),
    "another strategy": ("fp8_dynamic_kv_heads", _group("weights.strategy", "tensor"), ("channel", "tensor")),
    "another format": ("w4a16", _group("format", "int-quantized"), ("pack-quantized", "int-quantized")),
    "nvfp4 called mxfp4": ("nvfp4_kv", _group("format", "mxfp4-pack-quantized"), ("nvfp4-pack-quantized", "mxfp4")),
    "no group": ("w4a16", _group("targets", ["re:.*nothing"]), ("weight_packed", "a config group")),
    "no arguments": ("w4a16", _group("weights", None), ("weight_packed", "a config group")),
    "no preset": ("w4a16", _block("config_groups", {"W9A9": ["Linear"]}), ("W9A9", "FP8_DYNAMIC")),
    "ignored by name": ("w4a16", _block("ignore", [UP]), (f"tensors of {UP}", UP)),
    "ignored by pattern": ("w4a16", _block("ignore", ["re:.*mlp.*"]), ("tensors of", "re:.*mlp.*")),
    "ignored by class": ("w4a16", _block("ignore", ["Linear"]), ("tensors of", "'Linear'")),
    "static said to be dynamic": ("fp8_kv", _group("input_activations.dynamic", True), ("input_scale", "none")),
    "dynamic said to be static": (
        "fp8_dynamic_kv_heads", _group("input_activations.dynamic", False), ("no input scale", "input_scale"),
    ),
    "an input scale and no inputs": ("fp8_kv", _group("input_activations", None), ("input_scale", "none")),
    "symmetric inputs with zero points": (
        "int8_asym_input", _group("input_activations.symmetric", True), ("other than 0", "symmetric false"),
    ),
    "zero points that are missing": (
        "fp8_kv", _group("input_activations.symmetric", False), ("no input_zero_point", "symmetric false"),
    ),
    "a cache that nobody asked for": ("fp8_kv", _block("kv_cache_scheme", None), ("k_scale", "a kv_cache_scheme")),
    "heads said to be a tensor": (
        "fp8_dynamic_kv_heads", lambda told, block: block["kv_cache_scheme"].update(strategy="tensor"),
        ("2 numbers", "1, as strategy tensor"),
    ),
    "a tensor said to be heads": (
        "fp8_kv", lambda told, block: block["kv_cache_scheme"].update(strategy="attn_head"), ("1 numbers", "2, as"),
    ),
    "two configs": ("w4a16", _second_block, ("format of quantization_config", "compression_config")),
    "sparse weights": ("w4a16", _block("sparsity_config", {"format": "sparse-bitmask"}), ("sparse-bitmask", "dense")),
    "marlin": ("w4a16", _block("format", "marlin-24"), ("marlin-24", "dense")),
    "a transform somewhere else": (
        "spinquant_w4a16",
        lambda told, block: block["transform_config"]["config_groups"]["R4"]["apply"][0].update(location="bias"),
        ("bias", "weight_input"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_name_both_sides(tmp_path: Path, case: str) -> None:
    name, change, sides = CONTRADICTIONS[case]
    with pytest.raises(CheckpointError) as caught:
        contents(changed(tmp_path, name, change))
    assert sides[0] in str(caught.value.got)
    assert sides[1] in str(caught.value.wanted)


@pytest.mark.parametrize("name", ["w4a16", "nvfp4_kv", "fp8_kv"])
def test_codes_without_scales_are_refused(tmp_path: Path, name: str) -> None:
    folder = changed(tmp_path, name, lambda told, block: None)
    rewrite(folder, drop=f"{UP}.weight_scale")
    with pytest.raises(CheckpointError, match=r"not complete|have no scale"):
        contents(folder)


def test_plain_layers_that_the_config_calls_quantized_are_refused(tmp_path: Path) -> None:
    """An engine would look for their scales."""
    folder = changed(tmp_path, "w4a16", lambda told, block: None)
    extra = {"model.layers.1.mlp.up_proj.weight": np.ones((32, 64), ml_dtypes.bfloat16)}
    save_file(extra, folder / "more.safetensors")
    shards = dict.fromkeys(stored(fixture("w4a16")), "model.safetensors") | dict.fromkeys(
        extra, "more.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(CheckpointError, match="1 layers are plain floats") as caught:
        contents(folder)
    assert "layers.1.mlp.up_proj" in str(caught.value.got)
    for entry in (
        "model.layers.1.mlp.up_proj",
        r"re:.*layers\.1\..*gate_up_proj",
        "model.language_model.layers.1.mlp.up_proj",
    ):
        told = config(folder)
        told["quantization_config"]["ignore"] = ["lm_head", entry]
        (folder / "config.json").write_text(json.dumps(told))
        assert len(contents(folder).matrices) == 7


def test_zero_points_of_the_cache(tmp_path: Path) -> None:
    """Zeros say nothing; others are ignored by engines, and so refused."""
    at = "model.layers.0.self_attn"
    one = np.ones(1, np.float32)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    tensors = {
        "weight": np.ones((8, 8), ml_dtypes.float8_e4m3fn),
        "weight_scale": np.ones((8, 1), np.float32),
    }
    folder = layer(tmp_path, tensors, weights, kv_cache_scheme={"num_bits": 8, "type": "float"})
    kept = {f"{UP}.{key}": value for key, value in tensors.items()} | {
        f"{at}.k_scale": one,
        f"{at}.v_scale": one,
    }
    save_file(kept | {f"{at}.k_zero_point": 0 * one}, folder / "model.safetensors")
    assert contents(folder).taken == (f"{at}.k_zero_point",)
    save_file(kept | {f"{at}.k_zero_point": one}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="zero points"):
        contents(folder)


def test_a_cache_scheme_without_scales_is_mentioned(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    tensors = {
        "weight": np.ones((8, 8), ml_dtypes.float8_e4m3fn),
        "weight_scale": np.ones((8, 1), np.float32),
    }
    folder = layer(tmp_path, tensors, weights, kv_cache_scheme={"num_bits": 8, "type": "float"})
    assert "engines take 1.0" in contents(folder).notes[0]


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan, -1.0])
def test_a_divisor_that_cannot_divide_is_refused(tmp_path: Path, value: float) -> None:
    tensors = {
        "weight_packed": np.ones((8, 16), np.uint8), "weight_scale": np.ones((8, 2), ml_dtypes.float8_e4m3fn),
        "weight_global_scale": np.full(1, value, np.float32),
    }  # fmt: skip
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    with pytest.raises(CheckpointError, match="global scale"):
        contents(layer(tmp_path, tensors, weights))
