"""Quantized checkpoints that lie, lack pieces or hold numbers that are none: refused by name, and never lost."""

from __future__ import annotations

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
from narrowcast.errors import CheckpointError, NarrowcastError, NonFiniteError, UsageError
from narrowcast.jobs.compare import compare
from narrowcast.jobs.convert import convert, plan
from narrowcast.jobs.inspect import inspect
from narrowcast.jobs.quantize import quantize
from narrowcast.store.safetensors import Reader
from upstream_fixtures import FOLDER

DOWN = "model.layers.0.mlp.down_proj"
Tensors = dict[str, Any]
NARROW = {
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip


def load_file(path: Path) -> Tensors:
    """Every tensor in its own dtype; the safetensors package reads no FP8 into numpy."""
    with Reader(path) as reader:
        found = {name: np.array(reader.array(name)) for name in reader.entries}
        return {
            name: x.view(NARROW.get(reader.entries[name].dtype.name, x.dtype)) for name, x in found.items()
        }


def copy(name: str, folder: Path) -> Path:
    """A checkpoint that an upstream library wrote, to be damaged."""
    shutil.copytree(FOLDER / name, folder)
    return folder


def damaged(name: str, folder: Path, change: Callable[[Tensors], object]) -> Path:
    """The same with other tensors."""
    copy(name, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_config(name: str, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The same with another quantization_config."""
    path = copy(name, folder) / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))
    return folder


def refused(model: Path, to: str = "plain") -> str:
    """What is said of a checkpoint that cannot be converted; neither can it be inspected into a traceback."""
    with pytest.raises(CheckpointError) as refusal:
        plan(model, model.parent / "out", to)
    inspect(model)
    return str(refusal.value)


# --- nothing is lost


@pytest.mark.parametrize("name", ["gptq_v1_4bit_sym", "awq_gemm_asym"])
def test_a_plain_weight_beside_its_codes_is_refused(tmp_path: Path, name: str) -> None:
    """Both would be called ``.weight`` in the unquantized model, and one of them would silently vanish."""
    q = "model.layers.0.self_attn.q_proj"
    model = damaged(name, tmp_path / "m", lambda t: t.update({f"{q}.weight": np.ones((4, 4), np.float16)}))
    text = refused(model)
    assert f"{q}.weight" in text
    assert f"{q}.qweight" in text or "plain" in text


def test_codes_without_a_scale_are_not_carried_as_numbers(tmp_path: Path) -> None:
    """Of an AWQ matrix without its scale, the bytes of codes would be all that is left."""
    model = damaged("modelopt_w4a16_awq", tmp_path / "m", lambda t: t.pop(f"{DOWN}.weight_scale"))
    assert DOWN in refused(model)


def test_bytes_called_a_weight_are_codes(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "m", layers=1)
    tensors = load_file(model / "model.safetensors")
    tensors[f"{DOWN}.weight"] = np.ones((128, 352), np.int8)
    save_file(tensors, model / "model.safetensors")
    assert f"{DOWN}.weight" in refused(model)


@pytest.mark.parametrize(
    "weight", [None, np.ones((64, 64), ml_dtypes.bfloat16), np.ones((64, 64), ml_dtypes.float8_e8m0fnu)]
)
def test_a_block_scale_without_codes_is_no_norm(tmp_path: Path, weight: Any) -> None:
    """DeepSeek V4 calls both ``.scale``; only dtypes tell them apart."""

    def change(tensors: Tensors) -> None:
        del tensors["layers.0.attn.wkv.weight"]
        if weight is not None:
            tensors["layers.0.attn.wkv.weight"] = weight

    assert "layers.0.attn.wkv" in refused(damaged("native_fp8_deepseek_v4", tmp_path / "m", change))


@pytest.mark.parametrize("shape", [(2, 32), (128,), (1, 2, 64), (4, 64), (2, 0)])
def test_a_stack_of_biases_of_another_size_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """What is missing of a bias would come out as zeros."""
    name = "model.layers.0.mlp.experts.down_proj_bias"
    bias = np.ones(shape, ml_dtypes.bfloat16)
    model = damaged("gpt_oss_mxfp4", tmp_path / "m", lambda t: t.update({name: bias}))
    assert name in refused(model, "compressed-tensors")
    with pytest.raises(CheckpointError, match="bias"):
        compare(model, FOLDER / "gpt_oss_mxfp4")


# --- parts that do not fit their matrix would be read past their end, or as other numbers


def _replaced(suffix: str, change: Callable[[Any], Any]) -> Callable[[Tensors], object]:
    def work(tensors: Tensors) -> None:
        name = next(n for n in tensors if n.endswith(suffix))
        tensors[name] = change(tensors[name])

    return work


MISFITS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "scales of integers": ("compressed_tensors_fp8_kv", ".weight_scale", lambda x: x.view(np.int16)),
    "scales of codes": ("compressed_tensors_fp8_kv", ".weight_scale", lambda x: x.view(np.uint8)[..., :1]),
    "no scale at all": ("compressed_tensors_fp8_kv", ".weight_scale", lambda x: x[:0]),
    "scales in fp64": ("compressed_tensors_w4a16", ".weight_scale", lambda x: x.astype(np.float64)),
    "codes of half the rows": ("compressed_tensors_mxfp4a16", ".weight_packed", lambda x: x[: len(x) // 2]),
    "turned codes": ("compressed_tensors_nvfp4_kv", ".weight_packed", lambda x: x.T.copy().reshape(16, 64)),
    "one scale for all": ("compressed_tensors_mxfp4a16", ".weight_scale", lambda x: x.reshape(-1)[:1].reshape(())),
    "a shape of one axis": ("compressed_tensors_w4a16", ".weight_shape", lambda x: x[:1]),
    "a shape of three axes": ("compressed_tensors_w4a16", ".weight_shape", lambda x: np.resize(x, 3)),
    "a negative shape": ("compressed_tensors_w4a16", ".weight_shape", lambda x: -x),
    "an outer scale of integers": (
        "compressed_tensors_nvfp4_kv", ".weight_global_scale", lambda x: x.view(np.int32),
    ),
    "an empty outer scale": ("modelopt_nvfp4", ".weight_scale_2", lambda x: x.reshape(-1)[:0]),
    "an empty input scale": ("native_fp8_per_tensor_static", ".input_scale", lambda x: x.reshape(-1)[:0]),
    "too many column scales": ("modelopt_w4a16_awq", ".pre_quant_scale", lambda x: np.concatenate([x, x])),
    "column scales of bytes": ("modelopt_w4a16_awq", ".pre_quant_scale", lambda x: np.full(x.size, 2, np.uint8)),
    "a scale of fp8 codes": ("quark_mxfp4", ".weight_scale", lambda x: x.view(ml_dtypes.float8_e5m2)),
    "flat words": ("gptq_v1_4bit_sym", ".qweight", lambda x: x.reshape(-1)),
    "flat words of AWQ": ("awq_gemm_asym", ".qweight", lambda x: x.reshape(-1)),
    "a scalar order": ("gptq_v1_4bit_sym", ".g_idx", lambda x: x[:1].reshape(())),
    "an empty weight_format": ("bitsandbytes_int8", ".weight_format", lambda x: np.zeros(0, np.uint8)),
}  # fmt: skip


@pytest.mark.parametrize("case", list(MISFITS))
def test_parts_that_do_not_fit_their_matrix_are_refused_by_name(tmp_path: Path, case: str) -> None:
    name, suffix, change = MISFITS[case]
    model = damaged(name, tmp_path / "m", _replaced(suffix, change))
    assert "model.layers.0." in refused(model)


# --- configs of other kinds

KINDS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "config_groups": ("compressed_tensors_fp8_kv", lambda q: q.update(config_groups=5)),
    "config_groups.group_0.targets": (
        "compressed_tensors_fp8_kv", lambda q: q["config_groups"]["group_0"].update(targets=5),
    ),
    "config_groups.group_0.weights.num_bits": (
        "compressed_tensors_w4a16", lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits="x"),
    ),
    "ignore": ("compressed_tensors_fp8_kv", lambda q: q.update(ignore=5)),
    "sparsity_config": ("compressed_tensors_fp8_kv", lambda q: q.update(sparsity_config="x")),
    "transform_config": ("compressed_tensors_spinquant_w4a16", lambda q: q.update(transform_config="x")),
    "transform_config.config_groups.R1.apply": (
        "compressed_tensors_spinquant_w4a16",
        lambda q: q["transform_config"]["config_groups"]["R1"].update(apply=["x"]),
    ),
    "modules_to_not_convert": ("gpt_oss_mxfp4", lambda q: q.update(modules_to_not_convert=5)),
    "llm_int8_skip_modules": ("bitsandbytes_int8", lambda q: q.update(llm_int8_skip_modules=5)),
    "ignored_layers": ("native_fp8_per_tensor_static", lambda q: q.update(ignored_layers=[1])),
    "meta": ("gptq_v1_4bit_sym", lambda q: q.update(meta=5)),
    "dynamic": ("gptq_v1_4bit_sym", lambda q: q.update(dynamic=["-:x"])),
}  # fmt: skip


@pytest.mark.parametrize("key", list(KINDS))
def test_values_of_other_kinds_are_refused_by_key(tmp_path: Path, key: str) -> None:
    name, change = KINDS[key]
    text = refused(with_config(name, tmp_path / "m", change))
    assert f"{key} is no " in text
    assert "config.json" in text


def test_a_string_is_no_list_of_its_letters(tmp_path: Path) -> None:
    model = with_config(
        "native_fp8_block128", tmp_path / "m", lambda q: q.update(modules_to_not_convert="lm_head")
    )
    assert "'lm_head'" in refused(model)


# --- config.json

ODD = (
    '{\r\n\t"eps":1e-5, "architectures" : ["X"],\r\n "vision_config":{"a":1E-05},\n'
    '"text_config":{ "model_type":"llama", "eps":1e-06,   "x":NaN,"KEY":BLOCK, "z":1.0E5},\n"tail":-0.0 }\n\n'
)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_block_within_another_is_cut_out_and_nothing_else_changes(tmp_path: Path, key: str) -> None:
    quantize(toys.llama(tmp_path / "parent", layers=1), tmp_path / "m", "fp8_dynamic")
    path = tmp_path / "m/config.json"
    block = json.dumps(json.loads(path.read_text())["quantization_config"])
    path.write_bytes(ODD.replace("KEY", key).replace("BLOCK", block).encode())
    convert(tmp_path / "m", tmp_path / "out", "plain")
    assert (tmp_path / "out/config.json").read_bytes() == ODD.replace('"KEY":BLOCK, ', "").encode()


# --- numbers that are none


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0, 0.0, 1e-42])
def test_any_scale_moves_bit_for_bit(tmp_path: Path, value: float, recwarn: pytest.WarningsRecorder) -> None:
    """The result has the source's numbers, whatever they are; only a second rounding needs finite ones."""
    parent = toys.llama(tmp_path / "parent", layers=1)
    quantize(parent, tmp_path / "m", "fp8_per_tensor", container="fp8")
    tensors = load_file(tmp_path / "m/model.safetensors")
    tensors[f"{DOWN}.weight_scale"] = np.full_like(tensors[f"{DOWN}.weight_scale"], value)
    save_file(tensors, tmp_path / "m/model.safetensors", {"format": "pt"})
    convert(tmp_path / "m", tmp_path / "there", "compressed-tensors")
    convert(tmp_path / "there", tmp_path / "back", "fp8")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (
        tmp_path / "m/model.safetensors"
    ).read_bytes()
    convert(tmp_path / "m", tmp_path / "plain", "plain", dtype="fp32")
    plain = load_file(tmp_path / "plain/model.safetensors")[f"{DOWN}.weight"]
    with np.errstate(all="ignore"):
        wanted = tensors[f"{DOWN}.weight"].astype(np.float32) * np.float32(tensors[f"{DOWN}.weight_scale"])
    assert np.array_equal(plain, wanted, equal_nan=True)
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_a_second_rounding_of_nan_advises_what_convert_takes(tmp_path: Path) -> None:
    quantize(toys.llama(tmp_path / "parent", layers=1), tmp_path / "m", "fp8_per_tensor", container="fp8")
    tensors = load_file(tmp_path / "m/model.safetensors")
    tensors[f"{DOWN}.weight_scale"][...] = np.nan
    save_file(tensors, tmp_path / "m/model.safetensors", {"format": "pt"})
    with pytest.raises(NonFiniteError) as refusal:
        convert(tmp_path / "m", tmp_path / "out", "compressed-tensors", preset="nvfp4a16", requantize=True)
    assert "--nonfinite" not in str(refusal.value)
    assert DOWN in str(refusal.value)


# --- what is written is read


def test_a_matrix_of_one_row_has_a_scale_for_its_channel(tmp_path: Path) -> None:
    parent = toys.write(
        tmp_path / "p", toys.weights({f"{DOWN}.weight": (1, 128)}), toys.llama_config(layers=1)
    )
    quantize(parent, tmp_path / "m", "fp8_dynamic")
    convert(tmp_path / "m", tmp_path / "there", "modelopt")
    convert(tmp_path / "there", tmp_path / "back", "compressed-tensors")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (
        tmp_path / "m/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("container", ["compressed-tensors", "gptq", "awq", "modelopt"])
@pytest.mark.parametrize("targets", ["model.embed_tokens", "re:.*(embed_tokens|proj)"])
def test_a_quantized_embedding_goes_everywhere(tmp_path: Path, container: str, targets: str) -> None:
    parent = toys.llama(tmp_path / "p", layers=1, inner=256, head=True)
    quantize(parent, tmp_path / "m", "w4a16", container=container, targets=targets)
    convert(tmp_path / "m", tmp_path / "there", "compressed-tensors")
    convert(tmp_path / "there", tmp_path / "plain", "plain")
    assert compare(tmp_path / "m", tmp_path / "there").passed
    assert (
        load_file(tmp_path / "plain/model.safetensors").keys()
        == load_file(parent / "model.safetensors").keys()
    )


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_scalar_stays_one_in_another_dtype(tmp_path: Path, dtype: str) -> None:
    tensors = toys.weights(toys.llama_shapes(layers=1)) | {
        "logit_scale": np.full((), 2.5, ml_dtypes.bfloat16)
    }
    model = toys.write(tmp_path / "m", tensors, toys.llama_config(layers=1))
    convert(model, tmp_path / "out", "plain", dtype=dtype)
    assert load_file(tmp_path / "out/model.safetensors")["logit_scale"].shape == ()
    assert compare(tmp_path / "out", tmp_path / "out").passed


# --- advice that works


def stacked(folder: Path, family: str, shape: tuple[int, int, int]) -> Path:
    """An FP8 stack of experts in a model of some family."""
    name = "model.layers.0.mlp.experts.down_proj"
    grid = (shape[0], -(-shape[1] // 128), -(-shape[2] // 128))
    tensors = toys.weights(toys.llama_shapes(layers=1)) | {
        name: np.ones(shape, ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": np.ones(grid, np.float32),
    }  # fmt: skip
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return toys.write(
        folder, tensors, toys.llama_config(layers=1) | {"model_type": family, "quantization_config": block}
    )


@pytest.mark.parametrize("shape", [(2, 128, 256), (2, 0, 128)])
def test_what_cannot_be_taken_apart_is_said_with_a_way_out(
    tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    model = stacked(tmp_path / "m", "unheard_of", shape)
    with pytest.raises(UsageError, match=r"experts\.down_proj is quantized") as refusal:
        plan(model, tmp_path / "out", "compressed-tensors")
    assert "--to fp8" in str(refusal.value.remedy)
    convert(model, tmp_path / "out", "fp8")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_stack_of_an_unknown_family_decodes_as_it_lies_and_says_so(tmp_path: Path) -> None:
    model = stacked(tmp_path / "m", "unheard_of", (2, 128, 256))
    settled = plan(model, tmp_path / "out", "plain")
    assert any("unheard_of" in text and "[2, 128, 256]" in text for text in settled.fallbacks)


def test_matrices_that_keep_their_scheme_are_not_advised_to_be_ignored(tmp_path: Path) -> None:
    """``--ignore`` goes with a preset, and there is none."""
    quantize(
        toys.llama(tmp_path / "p", layers=1, hidden=64, inner=96),
        tmp_path / "m",
        "fp8_block",
        container="fp8",
    )
    with pytest.raises(UsageError, match="cannot divide") as refusal:
        plan(tmp_path / "m", tmp_path / "out", "modelopt")
    assert "--ignore" not in str(refusal.value.remedy)
    plan(tmp_path / "m", tmp_path / "out", "compressed-tensors")


# --- what is asked


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_are_counted_before_the_work(tmp_path: Path, workers: int) -> None:
    with pytest.raises(UsageError, match="workers"):
        plan(FOLDER / "gptq_v1_4bit_sym", tmp_path / "out", "plain", workers=workers)
    with pytest.raises(UsageError, match="workers"):
        compare(FOLDER / "gptq_v1_4bit_sym", FOLDER / "gptq_v1_4bit_sym", workers=workers)


@pytest.mark.parametrize("parent", ["missing", "m"])
def test_a_parent_that_is_none_is_refused_before_the_work(tmp_path: Path, parent: str) -> None:
    quantize(toys.llama(tmp_path / "p", layers=1), tmp_path / "m", "fp8_dynamic")
    with pytest.raises(NarrowcastError):
        plan(
            tmp_path / "m", tmp_path / "out", "modelopt", preset="nvfp4a16", requantize=True,
            parent=tmp_path / parent,
        )  # fmt: skip
