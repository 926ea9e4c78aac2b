"""Native FP8: what transformers and DeepSeek write decodes to their values, and what we write decodes there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import toys
from narrowcast.containers.native_fp8 import NAME, spelling
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.hardware.engines import readers
from narrowcast.jobs.coded import open_coded
from narrowcast.jobs.convert import convert
from narrowcast.jobs.quantize import plan, run
from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.formats import E4M3FN, E8M0, FP32
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.presets import LinearScheme, presets
from narrowcast.tensors.schemes import schemes
from narrowcast.tensors.storage import stored_scheme
from upstream_fixtures import FOLDER, assert_same, contents, decoded, stored, upstream

FIXTURES = sorted(path.name for path in FOLDER.glob("native_fp8_*"))
# Fp8Quantize in blocks of 2x32 of the matrix w[i, j] = ((64 i + j) · 37 mod 101 - 50) / 32 whose last row is zero.
GOLDEN_FLOAT = (
    "feef75fbdd7af8687cf372fdeb77fa007af76b7df273fce878fa5d7bf56f7ef075fbe179f9657cf471fdec77fbd17af86a7df273fde978fa"
    "597bf66d7ef074fce379f9637cf470feed76fbd97af8697df372fdea78fa517bf76c7df174fce579f9617bf570feef75fbdd7af8687cf372"
    "fdeb77fa007af76b7df273fce878fa5d7bf56f7ef075fbe179f9657cf471fdec77fbd17af86a7df273fde978fa597bf66e7ef175fce379f9"
    "637cf571feee76fbd97af8697df372fdea78fa517bf76d7e" + "00" * 64
)  # fmt: skip
GOLDEN_UE8M0 = (
    "fced74fadc78f7667bf270fcea76f90079f66a7cf072fbe677f85c7af46d7cee74fae078f8647bf270fceb75fad079f6697cf172fbe876f9"
    "587af46c7cef73fae278f8627af36ffcec74fad879f6687bf271fce976f9507af56b7cf072fbe478f8607af46efced74fadc78f7667bf270"
    "fcea76f90079f66a7cf072fbe677f85c7af46d7cee74fae078f8647bf270fceb75fad079f6697cf172fbe876f9587af46c7cef73fae278f8"
    "627af36ffcec74fad879f6687bf271fce976f9507af56b7c" + "00" * 64
)  # fmt: skip


def golden_matrix() -> Any:
    i, j = np.arange(4)[:, None], np.arange(64)
    w = ((((i * 64 + j) * 37) % 101) - 50) / 32
    w[3] = 0
    return w.astype(np.float32)


def f8(codes: Any) -> Any:
    return codes.view(ml_dtypes.float8_e4m3fn)


def checkpoint(folder: Path, tensors: dict[str, Any], told: dict[str, Any], **more: Any) -> Path:
    """A checkpoint of one layer; ``told`` is its quantization_config beside the method."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **more}
    return toys.write(folder, tensors, config | {"quantization_config": {"quant_method": NAME} | told})


def block(
    n: int = 64, k: int = 64, grid: tuple[int, int] = (2, 2), at: str = "model.layers.0.mlp.up_proj"
) -> dict[str, Any]:
    rng = np.random.default_rng(n + k)
    return {
        f"{at}.weight": f8(rng.integers(0, 126, (n, k), np.uint8)),
        f"{at}.weight_scale_inv": rng.random(grid, np.float32) + np.float32(0.5),
    }


DYNAMIC = {"activation_scheme": "dynamic", "weight_block_size": [32, 32]}


@pytest.mark.parametrize("name", FIXTURES)
def test_upstream_checkpoints_decode_to_upstream_values(name: str) -> None:
    """Code times scale in fp32, bit for bit."""
    theirs, dtype = upstream(FOLDER / name)
    assert_same(decoded(FOLDER / name, dtype), theirs)


def test_a_hybrid_is_told_apart_by_its_tensors() -> None:
    found = {m.module: m.how.scheme for m in contents(FOLDER / "native_fp8_deepseek_v4").matrices}
    assert found["layers.0.ffn.experts.1.w2"] is schemes["mxfp4"]
    assert found["layers.0.attn.wkv"].inner.tile == (32, 32)
    assert found["layers.0.attn.wkv"].inner.format is E8M0


def test_static_input_scales_are_read() -> None:
    folder = FOLDER / "native_fp8_per_tensor_static"
    with Checkpoint.open(folder) as source:
        for m in open_coded(source).contents.matrices:
            assert m.linear == presets["fp8"].linear
            assert m.how.static(source, m.place, m.shape, "input") == source.array(f"{m.module}.input_scale")


@pytest.mark.parametrize(
    ("codes", "scales", "dtype", "told"),
    [
        (GOLDEN_FLOAT, "4992643b4992643b4992643b0100603b", "<f4", {}),
        (GOLDEN_UE8M0, "77777777", ml_dtypes.float8_e8m0fnu, {"scale_fmt": "ue8m0"}),
    ],
)
def test_golden_bytes_of_transformers(tmp_path: Path, codes: str, scales: str, dtype: Any, told: Any) -> None:
    at = "model.layers.0.mlp.up_proj"
    weight = f8(np.frombuffer(bytes.fromhex(codes), np.uint8).reshape(4, 64))
    scale = np.frombuffer(bytes.fromhex(scales), np.uint8).view(dtype).reshape(2, 2)
    checkpoint(
        tmp_path / "m", {f"{at}.weight": weight, f"{at}.weight_scale_inv": scale},
        DYNAMIC | {"weight_block_size": [2, 32]} | told,
    )  # fmt: skip
    spread = scale.astype(np.float32).repeat(2, 0).repeat(32, 1)
    ours = decoded(tmp_path / "m")[at]
    assert np.array_equal(ours, weight.astype(np.float32) * spread)
    # Half a step of E4M3 below its top binade is 16 scales.
    assert np.all(np.abs(ours - golden_matrix()) <= 16 * spread)


def test_golden_codes_by_our_quantizer() -> None:
    """Powers of two leave nothing to arithmetic: all bytes equal. Under floats, transformers stores the reciprocal of a
    reciprocal, which here is one ulp off amax / 448 in one block, and multiplies: the codes come out alike."""
    powers = quantize(golden_matrix(), stored_scheme(E4M3FN, (2, 32), E8M0))
    assert powers.codes.tobytes().hex() == GOLDEN_UE8M0
    assert powers.scales[0].tobytes().hex() == "77777777"
    floats = quantize(golden_matrix(), stored_scheme(E4M3FN, (2, 32), FP32))
    assert floats.codes.tobytes().hex() == GOLDEN_FLOAT
    assert floats.scales[0].tobytes().hex() == "4992643b4992643b4992643b0000603b"


def test_stacks_of_experts_decode_as_transformers_does(tmp_path: Path) -> None:
    """[E, 2I, H] under scales [E, ., .], where a block larger than a projection leaves it a scale of its own."""
    import torch
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    rng = np.random.default_rng(1)
    at = "model.layers.0.mlp.experts"
    shapes = {f"{at}.gate_up_proj": ((4, 32, 64), (4, 2, 2)), f"{at}.down_proj": ((4, 64, 16), (4, 2, 1))}
    tensors: dict[str, Any] = {}
    for name, (shape, grid) in shapes.items():
        tensors[name] = f8(rng.integers(0, 126, shape, np.uint8))
        tensors[f"{name}_scale_inv"] = rng.random(grid, np.float32)
    folder = checkpoint(tmp_path / "m", tensors, DYNAMIC, **toys.moe_config("qwen3_moe", hidden=64, inner=16))
    step = Fp8Dequantize(FineGrainedFP8HfQuantizer(FineGrainedFP8Config()))
    theirs = {}
    for name in shapes:
        codes = torch.from_numpy(tensors[name].view(np.uint8)).view(torch.float8_e4m3fn)
        theirs[name] = step._dequantize_one(
            codes, torch.from_numpy(tensors[f"{name}_scale_inv"]), torch.float32
        ).numpy()
    assert_same(decoded(folder), theirs)
    tiles = {m.module.rsplit(".", 1)[1]: m.how.scheme.inner.tile for m in contents(folder).matrices}
    assert tiles == {"gate_up_proj": (16, 32), "down_proj": (32, 32)}
    convert(folder, tmp_path / "ct", "compressed-tensors")
    single = decoded(tmp_path / "ct")
    for e in range(4):
        both = np.concatenate([single[f"{at}.{e}.{part}"] for part in ("gate_proj", "up_proj")])
        assert np.array_equal(both, theirs[f"{at}.gate_up_proj"][e])


@pytest.mark.parametrize("preset", ["fp8_block", "fp8_block_ue8m0"])
@pytest.mark.parametrize("shards", [1, 2])
def test_transformers_loads_what_we_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, shards: int
) -> None:
    """from_pretrained on a CPU dequantizes to our values, rounded once to bf16."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    # It asks for accelerate even where, as here, nothing of it is called.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)

    model = toys.llama(tmp_path / "model", hidden=128, inner=256, shards=shards)
    settled = plan(model, tmp_path / "out", preset, container=NAME)
    run(settled)
    assert "transformers" in settled.engines
    told = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert FineGrainedFP8Config(**told).scale_fmt == ("ue8m0" if "ue8m0" in preset else "float")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours = decoded(tmp_path / "out", "bf16")
    assert len(ours) == 14
    assert_same(ours, {name: loaded.get_submodule(name).weight.float().detach().numpy() for name in ours})


def test_whole_blocks_are_what_transformers_takes(tmp_path: Path) -> None:
    """160 rows under two scales would be read as two blocks of 80; who fuses gate and up has the cut block inside."""
    model = toys.llama(tmp_path / "model", hidden=128, inner=160)
    settled = plan(model, tmp_path / "out", "fp8_block", container=NAME)
    assert settled.engines == ()
    linear = next(unit.linear for unit in settled.units if unit.module.endswith("up_proj"))
    assert readers(NAME, linear, shape=(160, 128)) == ("vllm", "sglang", "tensorrt-llm")


def test_the_config_has_the_keys_that_engines_read(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model", head=True)
    kept = {"modules_to_not_convert": ["lm_head"], "quant_method": "fp8"}
    for preset, more in {
        "fp8_per_tensor": {"activation_scheme": "dynamic"},
        "fp8_block": {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "fp8_block_ue8m0": {
            "activation_scheme": "dynamic", "weight_block_size": [128, 128], "scale_fmt": "ue8m0",
        },
    }.items():  # fmt: skip
        told = json.loads(plan(model, tmp_path / "out", preset, container=NAME).config)
        assert told["quantization_config"] == kept | more


def test_a_kept_stack_is_named_by_its_path(tmp_path: Path) -> None:
    model = toys.moe(tmp_path / "model", "qwen3_moe")
    told = json.loads(
        plan(model, tmp_path / "out", "fp8_block", ignore="re:.*experts.*", container=NAME).config
    )
    assert "model.layers.0.mlp.experts" in told["quantization_config"]["modules_to_not_convert"]


@pytest.mark.parametrize("name", ["per_tensor_static", "block32", "deepseek_v3", "partial_blocks"])
def test_to_compressed_tensors_and_back_changes_no_byte(tmp_path: Path, name: str) -> None:
    fixture = FOLDER / f"native_fp8_{name}"
    convert(fixture, tmp_path / "ct", "compressed-tensors")
    assert_same(decoded(tmp_path / "ct"), decoded(fixture))
    convert(tmp_path / "ct", tmp_path / "back", NAME)
    assert stored(fixture) == stored(tmp_path / "back")
    before, after = (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (fixture, tmp_path / "back")
    )
    for key in ("activation_scheme", "weight_block_size", "scale_fmt"):
        assert after.get(key) == (before.get(key) if before.get(key) != "float" else None)


@pytest.mark.parametrize("preset", ["fp8_per_tensor", "fp8_block"])
def test_from_compressed_tensors_and_back_changes_no_byte(tmp_path: Path, preset: str) -> None:
    run(plan(toys.llama(tmp_path / "model"), tmp_path / "ct", preset))
    convert(tmp_path / "ct", tmp_path / "fp8", NAME)
    convert(tmp_path / "fp8", tmp_path / "back", "compressed-tensors")
    assert stored(tmp_path / "ct") == stored(tmp_path / "back")
    assert (tmp_path / "ct/config.json").read_bytes() == (tmp_path / "back/config.json").read_bytes()


def test_powers_of_two_become_e8m0_and_floats_again(tmp_path: Path) -> None:
    """What V3.1 holds in fp32 goes into E8M0 and back without a change of value."""
    tensors = block(256, 256)
    scale = tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    scale[:] = np.exp2(np.arange(4).reshape(2, 2) - 9)
    told = DYNAMIC | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    folder = checkpoint(tmp_path / "m", tensors, told)
    convert(folder, tmp_path / "powers", NAME, preset="fp8_block_ue8m0")
    assert stored(tmp_path / "powers")["model.layers.0.mlp.up_proj.weight_scale_inv"][0] == "F8_E8M0"
    assert_same(decoded(tmp_path / "powers"), decoded(folder))
    convert(tmp_path / "powers", tmp_path / "ct", "compressed-tensors")
    assert_same(decoded(tmp_path / "ct"), decoded(folder))


def test_cache_scales_under_any_name(tmp_path: Path) -> None:
    at = "model.layers.{}.self_attn"
    one = np.ones(1, np.float32)
    tensors = block() | {
        f"{at.format(0)}.k_proj.output_scale": 3 * one, f"{at.format(0)}.v_proj.output_scale": 5 * one,
        f"{at.format(1)}.kv_scale": 7 * one, f"{at.format(2)}.k_scale": one, f"{at.format(2)}.v_proj.v_scale": one,
        f"{at.format(3)}.attn.q_scale": one, f"{at.format(3)}.k_cache.scale": one,
    }  # fmt: skip
    folder = checkpoint(tmp_path / "m", tensors, DYNAMIC)
    found = contents(folder)
    assert found.kv == "fp8"
    assert {(scale.attention[13:14], scale.which) for scale in found.cache_scales} == {
        ("0", "k"), ("0", "v"), ("1", "k"), ("1", "v"), ("2", "k"), ("2", "v"), ("3", "q"), ("3", "k"),
    }  # fmt: skip
    convert(folder, tmp_path / "ct", "compressed-tensors")
    made = stored(tmp_path / "ct")
    for layer, which, value in ((0, "k", 3), (0, "v", 5), (1, "k", 7), (1, "v", 7)):
        assert made[f"{at.format(layer)}.{which}_scale"] == ("F32", (1,), np.float32(value).tobytes())
    told = json.loads((tmp_path / "ct/config.json").read_text())["quantization_config"]
    assert told["kv_cache_scheme"]["strategy"] == "tensor"


def test_scales_of_transformers_without_blocks(tmp_path: Path) -> None:
    """weight_scale_inv is a scalar, and the input's scale is called activation_scale."""
    at = "model.layers.0.mlp.up_proj"
    tensors = {
        f"{at}.weight": block()[f"{at}.weight"], f"{at}.weight_scale_inv": np.full((), 0.75, np.float32),
        f"{at}.activation_scale": np.ones((), np.float32),
    }  # fmt: skip
    folder = checkpoint(tmp_path / "m", tensors, {"activation_scheme": "static", "weight_block_size": None})
    assert np.array_equal(decoded(folder)[at], tensors[f"{at}.weight"].astype(np.float32) * np.float32(0.75))
    assert contents(folder).matrices[0].linear.calibrated


UP = "model.layers.0.mlp.up_proj"
W, S = f"{UP}.weight", f"{UP}.weight_scale_inv"


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: value})


CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], None], dict[str, Any], tuple[str, str]]] = {
    "codes without a scale": (_without(S), {}, (W, "a scale beside each")),
    "a scale without codes": (_without(W), {}, (S, "a matrix of codes")),
    "a scale of another grid": (_with(S, np.ones((1, 2), np.float32)), {}, ("[1, 2]", "[2, 2] for 64x64")),
    "blocks and no block size": (lambda t: None, {"weight_block_size": None}, ("[2, 2]", "one scale")),
    "one scale and a block size": (_with(S, np.ones((), np.float32)), {}, ("[]", "[2, 2]")),
    "no powers of two": (lambda t: None, {"scale_fmt": "ue8m0"}, ("4 others, such as", "scale_fmt ue8m0")),
    "powers of two said to be floats": (
        _with(S, np.ones((2, 2), ml_dtypes.float8_e8m0fnu)), {"scale_fmt": "float"}, ("F8_E8M0", "scale_fmt float"),
    ),
    "bytes as scales": (_with(S, np.ones((2, 2), np.uint8)), {}, ("U8", "F8_E8M0")),
    "static without an input scale": (
        lambda t: None, {"activation_scheme": "static"}, ("no input scale", "activation_scheme static"),
    ),
    "dynamic with an input scale": (
        _with(f"{UP}.input_scale", np.ones((), np.float32)), {}, ("an input scale", "activation_scheme dynamic"),
    ),
    "E5M2 codes": (_with(W, np.ones((64, 64), ml_dtypes.float8_e5m2)), {}, ("F8_E5M2", "F8_E4M3")),
    "floats under a scale": (_with(W, np.ones((64, 64), np.float32)), {}, ("F32", "F8_E4M3")),
    "packed outside the experts": (_with(W, np.ones((64, 64), np.int8)), {"expert_dtype": "fp4"}, ("I8", "F8_E4M3")),
    "a code that nobody reads": (lambda t: None, {"fmt": "e5m2"}, ("e5m2", "e4m3")),
    "a block that is none": (lambda t: None, {"weight_block_size": [0, 32]}, ("[0, 32]", "two positive numbers")),
    "kept by its name": (lambda t: None, {"modules_to_not_convert": [UP]}, (S, "no quantized layer")),
    "kept by the end of its name": (lambda t: None, {"ignored_layers": ["up_proj"]}, (S, "'up_proj'")),
    "kept with its layer": (lambda t: None, {"modules_to_not_convert": ["model.layers.0"]}, (S, "'model.layers.0'")),
    "two scales": (_with(f"{UP}.weight_scale", np.ones((), np.float32)), {}, (S, "one scale")),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_name_both_sides(tmp_path: Path, case: str) -> None:
    change, told, sides = CONTRADICTIONS[case]
    tensors = block()
    change(tensors)
    folder = checkpoint(tmp_path / "m", tensors, DYNAMIC | told)
    with pytest.raises(CheckpointError) as caught:
        contents(folder)
    assert sides[0] in str(caught.value.got)
    assert sides[1] in str(caught.value.wanted)


def test_experts_are_packed_exactly_where_the_config_says_so(tmp_path: Path) -> None:
    """transformers reads any int8 as packed; a config that says otherwise makes it allocate FP8."""
    at = "model.layers.0.mlp.experts.0.up_proj"
    packed = {
        f"{at}.weight": np.ones((32, 32), np.int8),
        f"{at}.weight_scale_inv": np.ones((32, 2), np.float32),
    }
    assert contents(checkpoint(tmp_path / "a", packed, DYNAMIC | {"expert_dtype": "fp4"})).matrices
    with pytest.raises(CheckpointError, match="does not say"):
        contents(checkpoint(tmp_path / "b", packed, DYNAMIC))
    with pytest.raises(CheckpointError, match="is not packed"):
        contents(checkpoint(tmp_path / "c", block(at=at), DYNAMIC, expert_dtype="fp4"))
    wide = packed | {f"{at}.weight_scale_inv": np.ones((32, 1), np.float32)}
    with pytest.raises(CheckpointError, match="blocks"):
        contents(checkpoint(tmp_path / "d", wide, DYNAMIC | {"expert_dtype": "fp4"}))


@pytest.mark.parametrize("name", ["fp8_dynamic", "int8", "nvfp4a16", "mxfp8a16"])
def test_other_schemes_are_refused_with_what_fits(name: str) -> None:
    with pytest.raises(UsageError, match="cannot say") as caught:
        spelling(presets[name].linear, FP32)
    assert "fp8_block" in str(caught.value.remedy)


def test_wide_inputs_are_refused() -> None:
    """Engines quantize the inputs of native FP8 whatever the checkpoint meant."""
    with pytest.raises(UsageError, match="wide inputs"):
        spelling(LinearScheme(schemes["fp8_block128"]), FP32)


def test_mixtures_are_refused(tmp_path: Path) -> None:
    mixed = block() | block(at="model.layers.0.mlp.down_proj")
    folder = checkpoint(tmp_path / "m", mixed, DYNAMIC)
    with pytest.raises(UsageError, match="one block size"):
        convert(
            folder, tmp_path / "out", NAME, preset="fp8_block", targets="re:.*down_proj$", requantize=True
        )


def test_a_short_kept_name_that_catches_a_quantized_layer_is_refused(tmp_path: Path) -> None:
    """transformers keeps every module whose name ends in an entry."""
    shapes = toys.llama_shapes(layers=1) | {"up_proj.weight": (128, 128)}
    model = toys.write(tmp_path / "model", toys.weights(shapes), toys.llama_config(layers=1))
    with pytest.raises(UsageError, match="would keep"):
        plan(model, tmp_path / "out", "fp8_block", ignore="up_proj", container=NAME)
