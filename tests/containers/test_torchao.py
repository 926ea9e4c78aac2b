"""torchao: what the library's classes decode to, we decode; what it says and what it holds must agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from narrowcast.errors import CheckpointError, UsageError
from narrowcast.jobs.coded import open_coded
from narrowcast.jobs.convert import convert
from narrowcast.store.checkpoint import Checkpoint
from upstream_fixtures import FOLDER, assert_same, contents, decoded, stored, upstream

CLASSES = FOLDER / "torchao_classes"
SAVED = sorted(folder.name for folder in FOLDER.glob("torchao_*") if folder != CLASSES)
AT = "model.layers.0.mlp"
PRE_SCALE = f"{AT}.int8_static._weight_act_pre_scale"
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, str], dict[str, Any]], object]


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


def copy_of(tmp_path: Path, folder: Path, change: Change) -> Path:
    """The upstream files with something changed: tensors, metadata, quantization_config."""
    out = tmp_path / "changed"
    out.mkdir()
    tensors, metadata = load_file(folder / "model.safetensors"), metadata_of(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, metadata, config)
    save_file(tensors, out / "model.safetensors", metadata)
    (out / "config.json").write_text(json.dumps(config))
    return out


def pre_scale() -> NDArray[np.float32]:
    found: NDArray[np.float32] = load_file(CLASSES / "model.safetensors")[PRE_SCALE].float().numpy()
    return found


def test_the_fixtures_are_there() -> None:
    assert SAVED == [
        "torchao_float8_rowwise", "torchao_int4_weight_only", "torchao_int8_dynamic", "torchao_mxfp4", "torchao_mxfp8",
        "torchao_nvfp4_weight_only",
    ]  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_saved_models_decode_to_the_librarys_values(name: str) -> None:
    theirs, dtype = upstream(FOLDER / name)
    assert_same(decoded(FOLDER / name, dtype), theirs)


def test_every_class_decodes_to_its_own_values() -> None:
    """Also where scales are swizzled over a partial band of rows and padded columns. An act_pre_scale multiplies the
    input, which the class's dequantize leaves out and the weight of a plain model needs."""
    theirs, _ = upstream(CLASSES)
    theirs[f"{AT}.int8_static"] = theirs[f"{AT}.int8_static"] * pre_scale()
    assert_same(decoded(CLASSES), theirs)


def test_rows_from_the_middle_of_a_swizzled_band() -> None:
    theirs, _ = upstream(CLASSES)
    with Checkpoint.open(CLASSES) as checkpoint:
        opened = open_coded(checkpoint)
        for module in opened.modules:
            if "swizzled" not in module.name:
                continue
            ((_, coded),) = opened.coded(module)
            for start, stop in ((0, 5), (100, 130), (127, 129), (130, 136)):
                part = coded.read(checkpoint, np.dtype("<f4"), start, stop)
                np.testing.assert_array_equal(part, theirs[module.name][start:stop])


def test_what_was_found() -> None:
    """The scheme, and the input's scheme and whether it is static, of each class."""
    found = {}
    for matrix in contents(CLASSES).matrices:
        given = matrix.linear.input
        act = f"{given.name}{'' if matrix.linear.dynamic else ' static'}" if given else "wide"
        found[matrix.module.removeprefix(f"{AT}.")] = matrix.how.scheme.name, act
    assert found == {
        "int4_symmetric": ("int4_g32", "wide"),
        "int4_asymmetric": ("uint4_g32", "uint8_channel"),
        "int3_rows": ("uint3_channel", "wide"),
        "int8_asymmetric": ("uint8_channel", "wide"),
        "int8_tensor": ("int8_tensor", "wide"),
        "int8_static": ("int8_channel", "int8_tensor static"),
        "float8_tensor": ("fp8_tensor", "wide"),
        "mxfp4_swizzled": ("mxfp4", "mxfp4"),
        "mxfp8_linear": ("mxfp8_e4m3", "wide"),
        "nvfp4_swizzled": ("nvfp4", "nvfp4 static"),
        "nvfp4_one_level": ("e2m1_g16", "wide"),
    }
    inputs = {
        matrix.linear.input.name for matrix in contents(FOLDER / SAVED[0]).matrices if matrix.linear.input
    }
    assert inputs == {"fp8_channel"}
    int4 = contents(FOLDER / "torchao_int4_weight_only").matrices
    assert {matrix.how.scheme.name for matrix in int4} == {"int4_g32_offset"}


# torchao 0.18.0 on a CPU, of w = (((i · 64 + j) · 37 mod 101) - 50) / 32 with a last row of zeros, in bf16.
W = np.arange(3 * 64) * 37 % 101
W = np.concatenate([(W - 50) / 32, np.zeros(64)]).reshape(4, 64)
FP4 = (
    "bfe5692ec7f45a0ed6724cafe6613db7f5692ed7f45b8ee6724cafe5603dc7f5691ed7f45b8ed6724cafe6603dc7f56a1ed6f35b9ee6724c"
    "bfe5603dc7f56a1ed6735b9ee6714dbfe5682ec7f46a1ed7735c9fe6714dbfe5692ec7f46a0ed673" + "0" * 64
)
MXFP4 = (
    "adc3481ca5d2390cb4512a9dc4402ba5d3481cb5d2398cc4512a9dc4402ba5d3491cb5d23a8cc4512a9dc4401ba5d3490cb5d23a8cc4512a"
    "9dc3401ba5d2490cb4523a8dc4512b9dc3481ca5d2490cb4523a9dc4512badc3481ca5d2490cb451" + "0" * 64
)


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["NVFP4Tensor", "MXTensor"])
def test_golden_bytes(tmp_path: Path, kind: str) -> None:
    """Codes and scales that the library printed decode to its input, within half of E2M1's widest gap, from 4 to 6;
    within a 6 there may be another half where the scale was rounded down."""
    nvfp4 = kind == "NVFP4Tensor"
    scale = _bytes("7e7e7d7e7e7d7e7d7e7d7e7d08080808" if nvfp4 else "7e7e7e7e7e7e0000")
    dtype = torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu
    tensors: Tensors = {
        f"{AT}.up_proj._weight_qdata": _bytes(FP4 if nvfp4 else MXFP4).reshape(4, 32),
        f"{AT}.up_proj._weight_scale": scale.view(dtype).reshape(4, -1),
    }
    data: dict[str, Any] = {
        "block_size": 16 if nvfp4 else 32,
        "is_swizzled_scales": False,
        "act_quant_kwargs": None,
    }
    names = ["qdata", "scale"]
    if nvfp4:
        tensors[f"{AT}.up_proj._weight_per_tensor_scale"] = _bytes("8661183a").view(torch.float32).reshape(())
        names = ["per_tensor_scale", *names]
    else:
        data["elem_dtype"] = {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}
    told = json.dumps({"_type": kind, "_data": data, "_tensor_data_names": names})
    save_file(tensors, tmp_path / "model.safetensors", {f"{AT}.up_proj.weight": told})
    config = {"model_type": "llama", "quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = decoded(tmp_path)[f"{AT}.up_proj"]
    step = 1.5625 / 6 if nvfp4 else 0.5
    assert (np.abs(values - W) <= step * (1 + 2.0**-4)).all()
    assert not values[3].any()


def test_plain_and_other_containers(tmp_path: Path) -> None:
    """Plain: the values, and no metadata that would call the file torchao's. MXFP4 and NVFP4 move bit for bit, their
    scales out of the swizzle; integers with their zero points."""
    folder = FOLDER / "torchao_int8_dynamic"
    convert(folder, tmp_path / "plain", "plain", dtype="fp32")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for name, values in decoded(folder).items():
        np.testing.assert_array_equal(plain[f"{name}.weight"].numpy(), values)
    assert metadata_of(tmp_path / "plain" / "model.safetensors") == {"format": "pt"}
    for name in ("mxfp4", "mxfp8", "nvfp4_weight_only", "float8_rowwise", "int8_dynamic"):
        source, out = FOLDER / f"torchao_{name}", tmp_path / name
        convert(source, out, "compressed-tensors")
        ours, theirs = decoded(out), decoded(source)
        if name == "nvfp4_weight_only":
            # The global scale is a divisor there: twice one over it, which is no power of two, and two products.
            assert all((np.abs(ours[m] - theirs[m]) <= 2.0**-22 * np.abs(theirs[m])).all() for m in theirs)
        else:
            assert_same(ours, theirs)
        moved, before = stored(out), stored(source)
        for key, (_, shape, data) in before.items():
            if key.endswith("_qdata"):
                module = key.removesuffix("._weight_qdata")
                packed = moved.get(f"{module}.weight_packed") or moved[f"{module}.weight"]
                assert (packed[1], packed[2]) == (shape, data)


def test_offsets_do_not_move(tmp_path: Path) -> None:
    """x = code · scale + zero has no integer zero point: decoded exactly, moved only where rounding is allowed."""
    folder = FOLDER / "torchao_int4_weight_only"
    with pytest.raises(UsageError, match="its zero points are floats"):
        convert(folder, tmp_path / "out", "compressed-tensors")
    convert(folder, tmp_path / "out", "compressed-tensors", preset="w8a16", requantize=True)
    ours, source = decoded(tmp_path / "out"), decoded(folder)
    for name, values in ours.items():
        assert np.abs(values - source[name]).max() <= np.abs(source[name]).max() / 254 * 1.01
    convert(folder, tmp_path / "plain", "plain")
    plain, wanted = load_file(tmp_path / "plain" / "model.safetensors"), decoded(folder, "bf16")
    for name, values in wanted.items():
        np.testing.assert_array_equal(plain[f"{name}.weight"].float().numpy(), values)


def test_two_shards_have_two_descriptions(tmp_path: Path) -> None:
    """Codes in one file, scales and the description in another."""
    folder = FOLDER / "torchao_float8_rowwise"
    tensors, metadata = load_file(folder / "model.safetensors"), metadata_of(folder / "model.safetensors")
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    parts: tuple[Tensors, Tensors] = ({}, {})
    for i, (name, value) in enumerate(sorted(tensors.items())):
        parts[i % 2][name] = value
    save_file(parts[0], tmp_path / names[0], {"format": "pt"})
    save_file(parts[1], tmp_path / names[1], metadata)
    weight_map = {name: file for part, file in zip(parts, names, strict=True) for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert_same(decoded(tmp_path), decoded(folder))


K = f"{AT}.up_proj"


def _told(**change: Any) -> Change:
    """Other attributes in the metadata of one tensor."""

    def apply(tensors: Tensors, metadata: dict[str, str], config: dict[str, Any]) -> None:
        tree = json.loads(metadata[f"{K}.weight"])
        for key, value in change.items():
            (tree if key.startswith("_") else tree["_data"])[key] = value
        metadata[f"{K}.weight"] = json.dumps(tree)

    return apply


def _put(suffix: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, metadata, config: tensors.update(
        {f"{K}.{suffix}": make(tensors[f"{K}.{suffix}"]).contiguous()}
    )


def _recipe(kind: str) -> Change:
    return lambda t, m, config: config["quantization_config"]["quant_type"]["default"].update(
        _type=kind, _data={}
    )


def _drop(suffix: str) -> Change:
    return lambda tensors, metadata, config: tensors.pop(f"{K}.{suffix}")


def _rename(tensors: Tensors, metadata: dict[str, str], config: dict[str, Any]) -> None:
    stack = f"{AT}.experts.gate_up_proj"
    metadata[stack] = metadata.pop(f"{K}.weight")
    for part in ("qdata", "scale"):
        tensors[f"{AT}.experts._gate_up_proj_{part}"] = tensors.pop(f"{K}._weight_{part}")


HOSTILE: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "no scale": ("float8_rowwise", _drop("_weight_scale"), ("_weight_scale missing", "_weight_qdata")),
    "no codes": ("float8_rowwise", _drop("_weight_qdata"), ("_weight_qdata missing", "_weight_scale")),
    "too few scales": ("float8_rowwise", _put("_weight_scale", lambda x: x[:16]), ("[16, 1]", "[64, 1]")),
    "codes of another dtype": (
        "float8_rowwise", _put("_weight_qdata", lambda x: x.view(torch.int8)), ("I8", "F8_E4M3")
    ),
    "an unknown class": (
        "float8_rowwise", _told(_type="Int4TilePackedTo4dTensor"), ("Int4TilePackedTo4dTensor", "Float8Tensor")
    ),
    "a class from the future": (
        "float8_rowwise",
        lambda t, m, c: (_told(_type="Fp2Tensor")(t, m, c), c["quantization_config"].pop("quant_type")),
        ("Fp2Tensor", "MXTensor"),
    ),
    "a config of another class": ("float8_rowwise", _recipe("Int4WeightOnlyConfig"), ("Float8Tensor", "Int4Tensor")),
    "a config of another group": (
        "int4_weight_only",
        lambda t, m, c: c["quantization_config"]["quant_type"]["default"]["_data"].update(group_size=64),
        ("32 in the metadata", "64 in the config"),
    ),
    "a config of another element": (
        "mxfp4", _told(elem_dtype={"_type": "torch.dtype", "_data": "float8_e4m3fn"}),
        ("float8_e4m3fn in the metadata", "float4_e2m1fn_x2 in the config"),
    ),
    "a config that keeps the layer": (
        "mxfp4", lambda t, m, c: c["quantization_config"].update(modules_to_not_convert=["up_proj"]),
        (K, "'up_proj'"),
    ),
    "no metadata": ("mxfp4", lambda t, m, c: (m.clear(), m.update(format="pt")), ("_weight_qdata", "metadata")),
    "metadata that is no description": (
        "mxfp4", lambda t, m, c: m.update({f"{K}.weight": "{"}), (f"{K}.weight", "_type")
    ),
    "metadata of one tensor less": ("mxfp4", lambda t, m, c: m.pop(f"{K}.weight"), (f"{K}._weight_qdata", "metadata")),
    "blocks of another size": (
        "int4_weight_only", _told(block_size=[1, 16]), ("16 in the metadata", "32 in the config")
    ),
    "no blocks": ("float8_rowwise", _told(block_size=None), ("block_size None", "[rows, columns]")),
    "linear scales called swizzled": (
        "mxfp8", _put("_weight_scale", lambda x: x[:, :2]), ("[32, 2]", "[32, 16]")
    ),
    "a part too many": (
        "mxfp8", lambda t, m, c: t.update({f"{K}._weight_zero_point": torch.zeros(3, dtype=torch.int8)}),
        ("_weight_zero_point", "_weight_qdata"),
    ),
    "blocks that are no number": ("mxfp8", _told(block_size="many"), ("block_size many", "wanted: 32")),
    "an unknown element": (
        "mxfp8",
        lambda t, m, c: (_told(elem_dtype="fp6_e3m2")(t, m, c), c["quantization_config"].pop("quant_type")),
        ("fp6_e3m2", "float8_e4m3fn"),
    ),
    "three axes": ("mxfp8", _put("_weight_qdata", lambda x: x[None]), ("[1, 64, 32]", "two axes")),
    "a stack of experts": ("float8_rowwise", _rename, ("experts.gate_up_proj", "...weight")),
    "an input that is not known": (
        "float8_rowwise",
        _told(act_quant_kwargs={"_type": "X", "_data": {"float8_dtype": "float8_e4m3fn", "granularity": "PerMoon"}}),
        ("granularity PerMoon", "PerRow"),
    ),
    "no config": ("mxfp8", lambda t, m, c: c.pop("quantization_config"), ("quantization_config",)),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_contradictions_name_both_sides(tmp_path: Path, case: str) -> None:
    name, change, words = HOSTILE[case]
    model = copy_of(tmp_path, FOLDER / f"torchao_{name}", change)
    with Checkpoint.open(model) as checkpoint, pytest.raises(CheckpointError) as refused:
        open_coded(checkpoint)
    for word in words:
        assert word in str(refused.value), str(refused.value)


def test_codes_beyond_their_dtype_are_refused(tmp_path: Path) -> None:
    """An int4 tensor in bytes that holds a 9 would decode to another number without a word."""

    def change(tensors: Tensors, metadata: dict[str, str], config: dict[str, Any]) -> None:
        codes = tensors[f"{AT}.int4_symmetric._weight_qdata"].clone()
        codes[3, 5] = 9
        tensors[f"{AT}.int4_symmetric._weight_qdata"] = codes

    model = copy_of(tmp_path, CLASSES, change)
    with pytest.raises(CheckpointError, match="beyond int4"):
        decoded(model)


@pytest.mark.parametrize("value", [[], 5, "x", None, [1]])
def test_a_config_class_without_a_table_of_attributes_is_named(tmp_path: Path, value: object) -> None:
    def change(tensors: Tensors, metadata: dict[str, str], config: dict[str, Any]) -> None:
        config["quantization_config"]["quant_type"]["default"]["_data"] = value

    with pytest.raises(CheckpointError, match="has no table of attributes"):
        contents(copy_of(tmp_path, FOLDER / "torchao_mxfp8", change))
