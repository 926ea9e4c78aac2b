"""The job: what it refuses, what it carries, what it writes, and that the same job gives the same bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

import toys
from narrowcast.errors import InputError, NonFiniteError, StorageError, UsageError
from narrowcast.jobs.quantize import plan, quantize, run
from narrowcast.store.places import partial_path


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a directory."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def raw(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        state |= load_torch(shard)
    return state


# --- what is written


@pytest.mark.parametrize("preset", ["fp8_dynamic", "nvfp4a16", "w4a16", "mxfp6a16"])
def test_forecast_is_the_size_to_the_byte(tmp_path: Path, preset: str) -> None:
    model = toys.llama(tmp_path / "model", shards=3)
    settled = plan(model, tmp_path / "out", preset)
    run(settled)
    written = sum(
        p.stat().st_size
        for p in (tmp_path / "out").iterdir()
        if p.name not in ("README.md", "narrowcast.json")
    )
    assert settled.forecast_bytes == written


def test_everything_not_quantized_is_carried_byte_for_byte(tmp_path: Path) -> None:
    """Case 16: a tied embedding stays as it is, and so do norms, side files and the rest of config.json."""
    model = toys.llama(tmp_path / "model")
    quantize(model, tmp_path / "out", preset="fp8_dynamic", ignore=["lm_head"])
    before, after = raw(model), raw(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"):
        assert before[name].dtype == after[name].dtype
        assert before[name].view(torch_bytes()).equal(after[name].view(torch_bytes()))
    assert not any(name.startswith("model.embed_tokens.weight_") for name in after)
    for side in ("tokenizer.json", "generation_config.json"):
        assert (model / side).read_bytes() == (tmp_path / "out" / side).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    block = config.pop("quantization_config")
    assert config == json.loads((model / "config.json").read_text())
    assert block["ignore"] == ["lm_head"]


def torch_bytes() -> Any:
    import torch

    return torch.uint8


def test_bytes_do_not_depend_on_workers_or_sharding_of_work(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model", hidden=256, inner=704, shards=2)
    for workers in (1, 2, 5):
        run(plan(model, tmp_path / f"out{workers}", "nvfp4a16", workers=workers))
    assert digest(tmp_path / "out1") == digest(tmp_path / "out2") == digest(tmp_path / "out5")


def test_fused_siblings_share_the_outer_scale_across_shards(tmp_path: Path) -> None:
    """Case 7: gate amax 1.0 and up amax 0.25 in different shards get one global scale; up still decodes to 0.25."""
    tensors = toys.weights(toys.llama_shapes(hidden=32, inner=32))
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    for name, amax in ((gate, 1.0), (up, 0.25)):
        values = np.clip(tensors[name].astype(np.float32), -amax / 2, amax / 2)
        values[0, 0] = amax
        tensors[name] = values.astype(ml_dtypes.bfloat16)
    model = toys.write(tmp_path / "model", tensors, toys.llama_config(hidden=32, inner=32), shards=2)
    for preset, scale in (("nvfp4a16", "weight_global_scale"), ("fp8_per_tensor", "weight_scale")):
        out = tmp_path / preset
        quantize(model, out, preset=preset)
        state = raw(out)
        at = "model.layers.0.mlp"
        assert state[f"{at}.gate_proj.{scale}"] == state[f"{at}.up_proj.{scale}"]
        q, k, v = (state[f"model.layers.1.self_attn.{p}_proj.{scale}"] for p in "qkv")
        assert q == k == v
    up_scale = float(raw(tmp_path / "nvfp4a16")[f"{at}.up_proj.weight_scale"].float().max())
    outer = float(raw(tmp_path / "nvfp4a16")[f"{at}.up_proj.weight_global_scale"])
    assert up_scale * 6 / outer == pytest.approx(0.25, rel=0.0625)  # half an E4M3 step relative to the scale


@pytest.mark.parametrize(("family", "leaf"), [("qwen3_moe", "gate_proj"), ("gpt_oss", "up_proj")])
def test_stacked_experts_become_modules_of_their_own(tmp_path: Path, family: str, leaf: str) -> None:
    """Case 13: experts are quantized one by one, in the family's orientation even where matrices are square."""
    model = toys.moe(tmp_path / "model", family)
    settled = plan(model, tmp_path / "out", "int8", ignore=["re:.*router"] if family == "gpt_oss" else [])
    result = run(settled)
    assert settled.coverage_params > 0.85
    assert all(errors.sqnr > 35 for errors in result.tensors.values())
    state, source = raw(tmp_path / "out"), load_file(model / "model.safetensors")
    stacked = source["model.layers.0.mlp.experts.gate_up_proj"].astype(np.float32)
    wanted = {
        "gate_proj": stacked[2, :32], "up_proj": stacked[2].T[1::2],
    }[leaf]  # fmt: skip
    at = f"model.layers.0.mlp.experts.2.{leaf}"
    decoded = state[f"{at}.weight"].float() * state[f"{at}.weight_scale"]
    assert np.abs(decoded.numpy() - wanted).max() <= float(state[f"{at}.weight_scale"].max()) / 2 * 1.0001
    if family == "gpt_oss":
        bias = source["model.layers.0.mlp.experts.gate_up_proj_bias"].astype(np.float32)
        assert np.array_equal(state[f"{at}.bias"].float().numpy(), bias[2, 1::2])


def test_a_recipe_mixes_presets(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model", hidden=128, inner=256)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'default = "fp8_dynamic"\n[[rule]]\nmatch = "re:.*mlp.*"\npreset = "nvfp4a16"\n'
        '[[rule]]\nmatch = "re:.*layers.1.self_attn.*"\nkeep = true\n'
    )
    quantize(model, tmp_path / "out", recipe=recipe)
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert block["format"] == "mixed-precision"
    assert {g["format"] for g in block["config_groups"].values()} == {
        "float-quantized",
        "nvfp4-pack-quantized",
    }
    assert "model.layers.1.self_attn.q_proj" in block["ignore"]
    state = raw(tmp_path / "out")
    assert "model.layers.0.mlp.up_proj.weight_packed" in state
    assert str(state["model.layers.0.self_attn.q_proj.weight"].dtype) == "torch.float8_e4m3fn"
    assert str(state["model.layers.1.self_attn.q_proj.weight"].dtype) == "torch.bfloat16"


def test_groups_fall_back_and_say_so(tmp_path: Path) -> None:
    """Case 18: 352 columns take groups of 32; strict refuses; a width that nothing divides is refused by name."""
    model = toys.llama(tmp_path / "model", inner=352)
    settled = plan(model, tmp_path / "out", "w4a16")
    assert settled.fallbacks == tuple(
        f"model.layers.{i}.mlp.down_proj: groups of 32, because 128 does not divide 352 columns"
        for i in range(2)
    )
    with pytest.raises(UsageError, match="groups of 128 do not divide"):
        plan(model, tmp_path / "out", "w4a16", strict=True)
    ragged = toys.llama(tmp_path / "ragged", hidden=72, inner=144)
    for preset in ("w4a16", "nvfp4a16", "mxfp4"):
        with pytest.raises(UsageError, match=r"layers have a width that .* cannot divide") as refusal:
            plan(ragged, tmp_path / "out", preset)
        assert "72" in str(refusal.value)
        assert r"--ignore 're:^model\.layers\.\d+\.self_attn\." in str(refusal.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "ragged"]


def test_experts_of_a_layer_take_one_group(tmp_path: Path) -> None:
    """Engines run the experts of a layer under one scheme: where 128 does not divide the narrow side of down_proj, gate
    and up take its groups too, and layers beside the experts keep theirs."""
    model = toys.moe(tmp_path / "model", "qwen3_moe", hidden=128, inner=64)
    settled = plan(model, tmp_path / "out", "w4a16")
    groups = {(unit.role, unit.how.scheme.group) for unit in settled.units}
    assert groups == {("expert", 64), ("attention", 128)}
    assert {text.partition(": ")[2] for text in settled.fallbacks} == {
        "groups of 64, because 128 does not divide 64 columns"
    }


def test_a_block_cut_inside_a_fused_layer_is_loaded_by_no_engine(tmp_path: Path) -> None:
    """k has 64 rows before v: vLLM stops at them in compressed-tensors and mixes up scales in its own fp8."""
    narrow = toys.llama(tmp_path / "narrow", inner=256)
    whole = toys.llama(tmp_path / "whole", hidden=512, inner=512)
    for container in ("compressed-tensors", "fp8"):
        cut, fits = (plan(m, tmp_path / "out", "fp8_block", container=container) for m in (narrow, whole))
        assert not {"vllm", "sglang"} & set(cut.engines)
        assert {"vllm", "sglang"} <= set(fits.engines)


def test_a_scale_rule_changes_the_bytes_and_is_recorded(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model")
    quantize(model, tmp_path / "a", preset="mxfp4a16")
    quantize(model, tmp_path / "b", preset="mxfp4a16", rule="floor")
    a, b = digest(tmp_path / "a"), digest(tmp_path / "b")
    assert a["model.safetensors"] != b["model.safetensors"]
    record = json.loads((tmp_path / "b" / "narrowcast.json").read_text())
    assert record["schemes"]["mxfp4"]["scales"][0]["rule"] == "floor"


# --- what is refused


def poisoned(tmp_path: Path, value: float, count: int = 1) -> Path:
    tensors = toys.weights(toys.llama_shapes())
    name = "model.layers.1.mlp.up_proj.weight"
    values = tensors[name].astype(np.float32)
    for i in range(count):
        values[200 + i, 7] = value
    tensors[name] = values.astype(ml_dtypes.bfloat16)
    return toys.write(tmp_path / "model", tensors, toys.llama_config())


@pytest.mark.parametrize("preset", toys.PRESETS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_refused_by_name_count_and_place(
    tmp_path: Path, preset: str, value: float
) -> None:
    """Case 17, for every preset: the refusal names the tensor, and nothing is left behind."""
    model = poisoned(tmp_path, value, 3)
    with pytest.raises(NonFiniteError) as refusal:
        quantize(model, tmp_path / "out", preset=preset)
    words = "3 NaN and 0 infinite" if np.isnan(value) else "0 NaN and 3 infinite"
    assert f"model.layers.1.mlp.up_proj has {words}" in str(refusal.value)
    assert "row 200, column 7" in str(refusal.value)
    assert not (tmp_path / "out").exists()
    assert not partial_path(tmp_path / "out").exists()


def test_non_finite_tensors_can_be_copied_with_their_siblings(tmp_path: Path) -> None:
    model = poisoned(tmp_path, np.nan)
    quantize(model, tmp_path / "out", preset="nvfp4a16", nonfinite="copy")
    before, after = raw(model), raw(tmp_path / "out")
    for leaf in ("up_proj", "gate_proj"):  # fused: an engine gives both one scheme
        name = f"model.layers.1.mlp.{leaf}.weight"
        assert before[name].view(torch_bytes()).equal(after[name].view(torch_bytes()))
    assert "model.layers.0.mlp.up_proj.weight_packed" in after
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {"model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_proj"} <= set(block["ignore"])


@pytest.mark.parametrize("preset", ["fp8", "nvfp4", "fp8_dynamic+kv8", "w4a16+kvnv4"])
def test_presets_that_need_calibration_refuse_with_the_nearest(tmp_path: Path, preset: str) -> None:
    model = toys.llama(tmp_path / "model")
    with pytest.raises(UsageError, match="needs calibration") as refusal:
        plan(model, tmp_path / "out", preset)
    nearest = {"fp8": "fp8_per_tensor", "nvfp4": "nvfp4a16"}.get(preset, preset.split("+")[0])
    assert f"use {nearest}" in str(refusal.value)


def test_names_that_do_not_exist(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model")
    with pytest.raises(UsageError, match="did you mean fp8_dynamic"):
        plan(model, tmp_path / "out", "fp8_dynamc")
    with pytest.raises(UsageError, match="matches no module"):
        plan(model, tmp_path / "out", "fp8_dynamic", ignore=["re:visual.*"])
    with pytest.raises(UsageError, match="neither a preset nor a recipe"):
        plan(model, tmp_path / "out")
    with pytest.raises(UsageError, match="unknown rule"):
        plan(model, tmp_path / "out", "mxfp4a16", rule="ceiling")
    with pytest.raises(UsageError, match="no scale that takes this rule"):
        plan(model, tmp_path / "out", "fp8_dynamic", rule="floor")
    with pytest.raises(UsageError, match="nothing to quantize"):
        plan(model, tmp_path / "out", "fp8_dynamic", ignore=["Linear"])


def test_a_quantized_source_is_refused(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model")
    quantize(model, tmp_path / "fp8", preset="fp8_dynamic")
    with pytest.raises(InputError, match="quantized already"):
        plan(tmp_path / "fp8", tmp_path / "out", "nvfp4a16")


def test_outputs_that_would_destroy_something(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model")
    for out in (model, model / "inside"):
        with pytest.raises(UsageError, match="source"):
            quantize(model, out, preset="fp8_dynamic")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "precious").write_text("x")
    with pytest.raises(UsageError, match="exists already"):
        quantize(model, taken, preset="fp8_dynamic")
    assert (taken / "precious").read_text() == "x"


def test_outlier_that_flushes_the_rest_is_counted(tmp_path: Path) -> None:
    """Case 17: one 3e38 in a tensor makes the other elements underflow, and the count says so."""
    tensors = toys.weights(toys.llama_shapes())
    name = "model.layers.0.mlp.down_proj.weight"
    values = tensors[name].astype(np.float32)
    values[3, 3] = 3e38
    tensors[name] = values.astype(ml_dtypes.bfloat16)
    model = toys.write(tmp_path / "model", tensors, toys.llama_config())
    result = quantize(model, tmp_path / "out", preset="fp8_per_tensor")
    lost = result.tensors["model.layers.0.mlp.down_proj"]
    assert lost.underflowed == values.size - 1
    assert result.worst[0][0] != ""
    assert (
        json.loads((tmp_path / "out" / "narrowcast.json").read_text())["matrices"][
            "model.layers.0.mlp.down_proj"
        ]["underflowed"]
        == values.size - 1
    )


def test_zero_rows_and_zero_tensors_decode_to_zero(tmp_path: Path) -> None:
    """Case 5 through the whole job, for every preset; scales stay finite and above zero."""
    tensors = toys.weights(toys.llama_shapes())
    tensors["model.layers.0.self_attn.o_proj.weight"][2] = 0
    tensors["model.layers.1.mlp.down_proj.weight"][:] = 0
    model = toys.write(tmp_path / "model", tensors, toys.llama_config())
    for preset in toys.PRESETS:
        result = quantize(model, tmp_path / preset, preset=preset)
        zero = result.tensors["model.layers.1.mlp.down_proj"]
        assert zero.noise == 0 == zero.signal
        for name, value in raw(tmp_path / preset).items():
            if name.endswith("weight_scale"):
                floats = value.float()
                assert bool((floats == floats).all()), name
                assert float(floats.min()) > 0 or value.dtype == torch_bytes(), name


# --- resuming


class Killed(RuntimeError):
    pass


@pytest.mark.parametrize("after", [1, 5, 9, 14, 20, 30])
def test_a_job_that_dies_anywhere_resumes_to_the_same_bytes(tmp_path: Path, after: int) -> None:
    model = toys.llama(tmp_path / "model", shards=3)
    settled = plan(model, tmp_path / "whole", "nvfp4a16", workers=1)
    run(settled)

    class Dying:
        steps = 0

        def __init__(self, total: int, label: str) -> None:
            pass

        def advance(self, n: int) -> None:
            Dying.steps += 1
            if Dying.steps == after:
                raise Killed

        def done(self) -> None:
            pass

    again = plan(model, tmp_path / "out", "nvfp4a16", workers=1)
    with pytest.raises(Killed):
        run(again, progress=Dying)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="--resume"):
        run(again)
    with pytest.raises(StorageError, match="another job"):
        run(plan(model, tmp_path / "out", "fp8_dynamic"), resume=True)
    run(again, resume=True)
    assert digest(tmp_path / "whole") == digest(tmp_path / "out")


# --- the self-check


def test_the_self_check_sees_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that changes between writing and reading back fails the job, and the output is removed."""
    from narrowcast.store.writer import Writer

    model = toys.llama(tmp_path / "model")
    honest = Writer.write

    def damaged(self: Writer, name: str, data: Any, start: int = 0) -> None:
        if name.endswith("layers.1.mlp.up_proj.weight") and start == 0:
            data = np.array(data)
            data[0, 0] ^= 0x40
        honest(self, name, data, start)

    monkeypatch.setattr(Writer, "write", damaged)
    with pytest.raises(StorageError, match=r"model\.layers\.1\.mlp\.up_proj"):
        quantize(model, tmp_path / "out", preset="fp8_dynamic")
    assert not (tmp_path / "out").exists()


def test_conv1d_is_refused_by_name(tmp_path: Path) -> None:
    """GPT-2 stores [in, out]; this container cannot say so, and a silent transpose would be wrong twice."""
    tensors = toys.weights({"transformer.wte.weight": (64, 32), "transformer.h.0.mlp.c_fc.weight": (32, 128)})
    model = tmp_path / "gpt2"
    model.mkdir()
    save_file(tensors, model / "model.safetensors")
    (model / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    )
    with pytest.raises(UsageError, match="Conv1D"):
        plan(model, tmp_path / "out", "fp8_dynamic")
