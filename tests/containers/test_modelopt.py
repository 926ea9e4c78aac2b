"""ModelOpt: what it wrote, what its own classes make of what we write, both configs, and every way they disagree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import peers
import toys
from narrowcast.containers.modelopt.config import excluded, flat, patterns
from narrowcast.containers.modelopt.spellings import pack_rows, unpack_rows
from narrowcast.containers.spelling import divisor_of
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.jobs.convert import convert
from narrowcast.jobs.convert import plan as plan_convert
from narrowcast.jobs.quantize import plan, run
from narrowcast.model.recipe import Recipe
from upstream_fixtures import FOLDER, assert_same, contents, decoded, stored, upstream

CT, NAME = "compressed-tensors", "modelopt"
FIXTURES = sorted(path.name for path in FOLDER.glob("modelopt_*"))
# Presets that ModelOpt has an algorithm for, with its name.
HELD = {
    "fp8_dynamic": "FP8_PER_CHANNEL_PER_TOKEN", "fp8_block": "fp8_pb_wo", "w4a16": "W4A16_AWQ",
    "nvfp4a16": "W4A16_NVFP4", "mxfp4": "mxfp4", "mxfp8": "MXFP8",
}  # fmt: skip
DOWN = "model.layers.0.mlp.down_proj"
TWO = Recipe.from_toml(
    """
    [[rule]]
    match = "re:.*mlp.*"
    preset = "nvfp4a16"
    [[rule]]
    match = "re:.*self_attn.*"
    preset = "fp8_dynamic"
    """,
    "two presets",
)


def quantized(
    folder: Path, preset: str | None, to: str = NAME, source: Path | None = None, **more: Any
) -> Path:
    source = source or toys.llama(folder / "model", hidden=128, inner=256, layers=1, head=True)
    run(plan(source, folder / f"{to} {preset}", preset, container=to, **more))
    return folder / f"{to} {preset}"


def configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    beside = json.loads((folder / "hf_quant_config.json").read_text())
    return beside, json.loads((folder / "config.json").read_text())["quantization_config"]


def changed(folder: Path, out: Path, *, beside: Any = ..., block: Any = ..., tensors: Any = None) -> Path:
    """A copy of a checkpoint with other configs (None: without) or tensors."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    if block is not ...:
        config["quantization_config"] = block
    if block is None:
        del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    told = configs(folder)[0] if beside is ... else beside
    if told is not None:
        (out / "hf_quant_config.json").write_text(json.dumps(told))
    held = dict(load_file(folder / "model.safetensors"))
    save_file(tensors(held) if tensors else held, out / "model.safetensors")
    return out


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        contents(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", FIXTURES)
def test_upstream_fixtures_decode_to_their_values(name: str) -> None:
    """Bit for bit; where an AWQ layer scales its input, theirs times that scale in fp32, as their engines compute."""
    ours, (theirs, _) = decoded(FOLDER / name), upstream(FOLDER / name)
    tensors = load_file(FOLDER / name / "model.safetensors")
    for module in theirs:
        columns = tensors.get(f"{module}.pre_quant_scale")
        if columns is not None:
            theirs[module] = theirs[module] * columns.float().numpy()
    # Theirs has one zero for NVFP4, where a code of its own says -0; no other bit may differ.
    assert_same({k: v + 0.0 for k, v in ours.items()}, {k: v + 0.0 for k, v in theirs.items()})
    assert ("awq" in name) == any(key.endswith("pre_quant_scale") for key in tensors)


def test_there_are_fixtures() -> None:
    assert len(FIXTURES) >= 13


def test_what_the_fixtures_are() -> None:
    """Inputs, static or not, the cache, and its scales come from the file."""
    fp8, nvfp4, awq = (
        contents(FOLDER / f"modelopt_{name}") for name in ("fp8_kv", "nvfp4_kv_nvfp4", "w4a8_awq")
    )
    assert (fp8.kv, nvfp4.kv, awq.kv) == ("fp8", "nvfp4", None)
    assert {(scale.attention, scale.which) for scale in fp8.cache_scales} == {
        ("model.layers.0.self_attn", "k"), ("model.layers.0.self_attn", "v"),
    }  # fmt: skip
    for found in (fp8, nvfp4, awq):
        assert all(not matrix.linear.dynamic and matrix.how.part("input") for matrix in found.matrices)
    assert {m.module: bool(m.how.part("pre_scale")) for m in awq.matrices}[DOWN]
    assert all(matrix.how.part("recast") for matrix in awq.matrices)


def test_plain_gives_the_weight_that_acts_on_the_model_s_input(tmp_path: Path) -> None:
    """bf16 of code · scale · pre_quant_scale: against the exact product in fp64, at most the two roundings of the fp32
    product away (2^-24 each) and then half a unit of bf16."""
    source = FOLDER / "modelopt_w4a16_awq"
    convert(source, tmp_path / "out", "plain")
    held, plain = load_file(source / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    packed = held[f"{DOWN}.weight"].numpy()
    codes = np.stack([packed & 15, packed >> 4], 1).reshape(-1, packed.shape[1]).astype(np.int64)
    codes = np.where(codes > 7, codes - 16, codes)
    group = codes.shape[1] // held[f"{DOWN}.weight_scale"].shape[1]
    scale = held[f"{DOWN}.weight_scale"].double().numpy().repeat(group, 1)
    exact = codes * scale * held[f"{DOWN}.pre_quant_scale"].double().numpy()
    got = plain[f"{DOWN}.weight"].double().numpy()
    assert (np.abs(got - exact) <= np.abs(exact) * (2.0**-8 + 2 * 2.0**-24) / (1 - 2.0**-8)).all()
    assert not any("quant" in name or "scale" in name for name in plain)


@pytest.mark.parametrize("preset", HELD)
@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_there_and_back_to_the_byte(tmp_path: Path, preset: str, kind: str) -> None:
    """compressed-tensors → ModelOpt → compressed-tensors, and what ModelOpt's file is called."""
    source = toys.moe(tmp_path / "moe", "qwen3_moe", hidden=128, inner=128) if kind == "experts" else None
    first = quantized(tmp_path, preset, CT, source)
    there = convert(first, tmp_path / "there", NAME)
    back = convert(tmp_path / "there", tmp_path / "back", CT)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (first / name).read_bytes()
    assert not there.plan.fallbacks + back.plan.fallbacks
    assert not [reason for reason in there.reasons + back.reasons if "inverse" in reason]
    beside, block = configs(tmp_path / "there")
    assert beside["quantization"]["quant_algo"] == block["quant_algo"] == HELD[preset]
    assert_same(decoded(tmp_path / "there"), decoded(first))


@pytest.mark.parametrize("name", FIXTURES)
def test_a_copy_is_a_copy(tmp_path: Path, name: str) -> None:
    convert(FOLDER / name, tmp_path / "out", NAME)
    for file in ("model.safetensors", "config.json", "hf_quant_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (FOLDER / name / file).read_bytes()


def one_nvfp4(folder: Path, multiplier: float) -> Path:
    """One NVFP4 layer, 4 x 32, whose block scales are all 448."""
    made = torch.Generator().manual_seed(3)
    tensors = {
        f"{DOWN}.weight": torch.randint(0, 256, (4, 16), dtype=torch.uint8, generator=made),
        f"{DOWN}.weight_scale": torch.full((4, 2), 448.0).to(torch.float8_e4m3fn),
        f"{DOWN}.weight_scale_2": torch.tensor(multiplier, dtype=torch.float32),
    }
    beside = {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": [],
        },
    }  # fmt: skip
    config = toys.llama_config(hidden=32, inner=32, layers=1) | {"quantization_config": flat(beside)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    return folder


def test_case_8_both_directions(tmp_path: Path) -> None:
    """amax 0.75 is the multiplier 2.790179e-4 here and the divisor 3584 there, and comes back identical."""
    first = one_nvfp4(tmp_path / "a", float(np.float32(0.75) / np.float32(2688)))
    assert load_file(first / "model.safetensors")[f"{DOWN}.weight_scale_2"].item() == pytest.approx(
        2.790179e-4, rel=1e-6
    )
    convert(first, tmp_path / "b", CT)
    held = load_file(tmp_path / "b/model.safetensors")[f"{DOWN}.weight_global_scale"]
    assert held.shape == (1,)
    assert held.dtype == torch.float32
    assert float(held[0]) == 3584.0
    convert(tmp_path / "b", tmp_path / "back", NAME)
    assert stored(tmp_path / "back") == stored(first)
    convert(tmp_path / "b", tmp_path / "again", CT)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        tmp_path / "b/model.safetensors"
    ).read_bytes()


def test_case_8_the_wrong_direction_is_refused(tmp_path: Path) -> None:
    text = refused(one_nvfp4(tmp_path / "a", 3584.0))
    assert "decoded amax 9.6e+06, implausible" in text
    assert f"{DOWN}.weight_scale_2" in text
    for i, bad in enumerate((0.0, -1e-3, np.nan, np.inf)):
        assert "implausible" in refused(one_nvfp4(tmp_path / str(i), bad))


def test_scales_without_an_exact_inverse_are_counted(tmp_path: Path) -> None:
    """No fp32 number has this one as its reciprocal: fl(1 / d) steps over it, which is shown for all d around 1 / m."""
    multiplier = np.float32(0.00187674502376467)
    around = np.float32(1) / multiplier + np.spacing(np.float32(1) / multiplier) * np.arange(
        -64, 65, dtype=np.float32
    )
    assert multiplier not in np.float32(1) / around
    first = one_nvfp4(tmp_path / "a", float(multiplier))
    result = convert(first, tmp_path / "b", CT)
    assert any("1 matrices have an outer or input scale without" in reason for reason in result.reasons)
    assert any("at most 1 of its last place" in reason for reason in result.reasons)
    ours, theirs = stored(first), stored(tmp_path / "b")
    assert ours[f"{DOWN}.weight"][2] == theirs[f"{DOWN}.weight_packed"][2]
    assert ours[f"{DOWN}.weight_scale"][2] == theirs[f"{DOWN}.weight_scale"][2]


def test_divisors_that_a_library_rounded_come_back() -> None:
    """Every bf16 divisor, as compressed-tensors writes them, is found again from its reciprocal."""
    bf16 = (np.arange(128, 256)[:, None] * np.exp2(np.arange(-30, 30))).astype(np.float32)
    assert np.array_equal(divisor_of(np.float32(1) / bf16), bf16)


@pytest.mark.parametrize("name", ["fp8_kv", "nvfp4", "mixed", "nvfp4_moe"])
def test_static_scales_and_the_cache_travel(tmp_path: Path, name: str) -> None:
    """Input scales multiply here and divide NVFP4's inputs there; to fp32 they are each other's inverse."""
    source = FOLDER / f"modelopt_{name}"
    convert(source, tmp_path / "there", CT)
    convert(tmp_path / "there", tmp_path / "back", NAME)
    ours, there, back = (
        load_file(folder / "model.safetensors") for folder in (source, tmp_path / "there", tmp_path / "back")
    )
    scales = [key for key in ours if key.endswith(("input_scale", "k_scale", "v_scale", "weight_scale_2"))]
    assert scales
    assert ours.keys() == back.keys()
    for key in scales:
        # Two correctly rounded reciprocals: (1 + e)^-1 (1 + e') with |e| ≤ 2^-24 each.
        assert abs(back[key].item() / ours[key].item() - 1) <= 2.01 * 2.0**-24, key
    for key in ours.keys() - set(scales):
        assert torch.equal(back[key].flatten().view(torch.uint8), ours[key].flatten().view(torch.uint8)), key
    if "kv" in name:
        attention = "model.layers.0.self_attn"
        assert there[f"{attention}.k_scale"].item() == ours[f"{attention}.k_proj.k_scale"].item()
    assert contents(tmp_path / "back").kv == contents(source).kv


def test_mixed_precision_names_every_layer(tmp_path: Path) -> None:
    folder = quantized(tmp_path, None, recipe=TWO)
    beside, block = configs(folder)
    layers = beside["quantization"]["quantized_layers"]
    assert beside["quantization"]["quant_algo"] == "MIXED_PRECISION"
    assert block["quantized_layers"] == layers
    assert layers[DOWN] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert layers["model.layers.0.self_attn.q_proj"] == {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    assert set(layers) == {matrix.module for matrix in contents(folder).matrices}
    cut = {name: kind for name, kind in layers.items() if name != DOWN}
    text = refused(changed(folder, tmp_path / "cut", beside=beside | {"quantization": beside["quantization"] | {
        "quantized_layers": cut}}, block=None))  # fmt: skip
    assert DOWN in text
    assert "hf_quant_config.json says that it is not" in text
    more = layers | {"lm_head": {"quant_algo": "FP8"}}
    text = refused(changed(folder, tmp_path / "more", beside=None, block=block | {"quantized_layers": more}))
    assert "lm_head" in text
    assert "config.json" in text


def test_two_rows_in_a_byte() -> None:
    """Row 2i in the low nibble, as the packer of ModelOpt has it; derived element by element."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (6, 8), np.uint8)
    along = codes[:, 0::2] | codes[:, 1::2] << 4
    down = pack_rows(along)
    assert [[int(down[i, k]) for k in range(8)] for i in range(3)] == [
        [int(codes[2 * i, k]) + 16 * int(codes[2 * i + 1, k]) for k in range(8)] for i in range(3)
    ]
    assert np.array_equal(unpack_rows(down), along)


def test_awq_readers_find_a_pre_quant_scale_of_ones(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "w4a16")
    held = load_file(folder / "model.safetensors")
    assert (held[f"{DOWN}.pre_quant_scale"] == 1).all()
    assert held[f"{DOWN}.pre_quant_scale"].shape == (256,)
    assert configs(folder)[0]["quantization"]["group_size"] == 128
    text = refused(
        changed(
            folder,
            tmp_path / "bad",
            tensors=lambda t: t | {f"{DOWN}.pre_quant_scale": torch.zeros(256)},
        )
    )
    assert "pre_quant_scale" in text


def test_awq_columns_cannot_be_said_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a scale for each column"):
        plan_convert(FOLDER / "modelopt_w4a16_awq", tmp_path / "out", CT)
    convert(FOLDER / "modelopt_w4a16_awq", tmp_path / "out", CT, preset="w4a16", requantize=True)
    # Signs are those of the effective weight, wherever neither rounding made it zero.
    ours, theirs = decoded(tmp_path / "out")[DOWN], decoded(FOLDER / "modelopt_w4a16_awq")[DOWN]
    both = (ours != 0) & (theirs != 0)
    assert both.any()
    assert (np.sign(ours) == np.sign(theirs))[both].all()


def test_a_block_of_32_is_no_block_of_128(tmp_path: Path) -> None:
    """Read by its 4-D grid, and not written: engines know one size."""
    convert(FOLDER / "modelopt_fp8_pb_wo", tmp_path / "ct", CT)
    with pytest.raises(UsageError, match="no algorithm"):
        plan_convert(tmp_path / "ct", tmp_path / "out", NAME)


def test_refusals_name_both_sides(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "nvfp4a16")
    beside, block = configs(folder)
    told = beside["quantization"]

    def with_label(i: int, **more: Any) -> Path:
        return changed(folder, tmp_path / str(i), beside=beside | {"quantization": told | more}, block=None)

    text = refused(with_label(0, quant_algo="FP8"))
    assert "nvfp4 in the tensors" in text
    assert "FP8 in groups of 16 as in hf_quant_config.json" in text
    text = refused(with_label(1, exclude_modules=["*mlp*"]))
    assert "mlp" in text
    assert "says that it is not" in text
    assert "groups of 32" in refused(with_label(2, group_size=32))
    assert "NVFP9" in refused(with_label(3, quant_algo="NVFP9"))
    assert "is no list" in refused(with_label(4, exclude_modules="lm_head"))
    text = refused(changed(folder, tmp_path / "5", block=block | {"quant_algo": "MXFP8"}))
    assert "disagree about the algorithm" in text
    assert "W4A16_NVFP4" in text
    assert "MXFP8" in text
    text = refused(changed(folder, tmp_path / "6", block=block | {"ignore": []}))
    assert "disagree about what is left out" in text
    assert "lm_head" in text
    text = refused(changed(folder, tmp_path / "7", block=block | {"kv_cache_scheme": "NVFP4"}))
    assert "disagree about the KV cache" in text
    text = refused(changed(folder, tmp_path / "8", block=block | {"quant_method": "gptq"}))
    assert "disagree" in text or "two quantization methods" in text
    text = refused(changed(folder, tmp_path / "9", beside=None, block=None))
    assert "have no scale" in text or "does not mention" in text


def test_missing_pieces_are_refused(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "nvfp4a16")

    def without(name: str) -> Any:
        return lambda held: {key: value for key, value in held.items() if key != f"{DOWN}.{name}"}

    assert "weight_scale_2" in refused(changed(folder, tmp_path / "a", tensors=without("weight_scale_2")))
    assert f"{DOWN}" in refused(changed(folder, tmp_path / "b", tensors=without("weight_scale")))
    thin = {f"{DOWN}.svdquant_lora_a": torch.zeros(4, 256)}
    assert "thin matrices" in refused(changed(folder, tmp_path / "c", tensors=lambda held: held | thin))
    three = {f"{DOWN}.weight": torch.zeros(2, 4, 8, dtype=torch.uint8)}
    assert "is no matrix" in refused(changed(folder, tmp_path / "d", tensors=lambda held: held | three))


def test_either_config_alone_is_enough(tmp_path: Path) -> None:
    """The older form lies in hf_quant_config.json only, or in config.json as it is there."""
    folder = quantized(tmp_path, "nvfp4a16")
    beside, block = configs(folder)
    both = [(m.module, m.shape, m.linear, m.how.format) for m in contents(folder).matrices]
    for i, more in enumerate(
        ({"block": None}, {"beside": None}, {"beside": None, "block": beside | {"quant_method": "modelopt"}})
    ):
        found = contents(changed(folder, tmp_path / str(i), **more))
        assert [(m.module, m.shape, m.linear, m.how.format) for m in found.matrices] == both
    # NVFP4 whose groups quantize no input is what W4A16_NVFP4 says.
    weights_only = block | {"quant_algo": "NVFP4"}
    assert all(
        m.linear.input is None
        for m in contents(changed(folder, tmp_path / "w", beside=None, block=weights_only)).matrices
    )


def test_what_is_kept_is_listed_and_nothing_else(tmp_path: Path) -> None:
    folder = quantized(
        tmp_path, "mxfp8", source=toys.moe(tmp_path / "moe", "qwen3_moe"), ignore=["re:.*experts.*"]
    )
    beside, _ = configs(folder)
    listed = beside["quantization"]["exclude_modules"]
    assert "model.layers.0.mlp.experts*" in listed
    assert "model.layers.0.mlp.gate" in listed
    assert excluded("model.layers.0.mlp.experts.3.up_proj", listed)
    assert not any(excluded(matrix.module, listed) for matrix in contents(folder).matrices)


def test_names_within_names() -> None:
    """Case 12 as these readers see it: a router called mlp.gate takes mlp.gate_proj along."""
    assert excluded("m.mlp.gate_proj", ["m.mlp.gate"])
    assert not excluded("m.mlp.up_proj", ["m.mlp.gate"])
    assert excluded("a.b.c", ["a.*"])
    assert not excluded("a.b.c", ["b.*"])
    with pytest.raises(UsageError, match="names within names"):
        patterns(["m.mlp.gate"], ["m.mlp.gate_proj"])
    assert patterns([r"re:^m\.experts\..*"], ["m.other"]) == ["m.experts*"]
    with pytest.raises(UsageError, match="names within names"):
        patterns([r"re:^m\.experts\..*"], ["m.experts_x"])


def test_every_preset_is_held_or_refused_with_a_way(tmp_path: Path) -> None:
    source = toys.llama(tmp_path / "model", hidden=128, inner=256, layers=1)
    for preset in toys.PRESETS:
        if preset in HELD:
            assert plan(source, tmp_path / "out", preset, container=NAME).formats.keys() == {HELD[preset]}
            continue
        with pytest.raises(UsageError, match="modelopt has no algorithm that computes"):
            plan(source, tmp_path / "out", preset, container=NAME)


@pytest.mark.slow
def test_modelopt_decodes_what_we_write(tmp_path: Path) -> None:
    """Its QTensor classes give our values bit for bit, and its own conversion of the one config is the other."""
    moe = toys.moe(tmp_path / "experts" / "moe", "qwen3_moe", hidden=128, inner=128)
    folders = [quantized(tmp_path, preset) for preset in HELD]
    folders.append(quantized(tmp_path / "experts", "nvfp4a16", source=moe))
    for name in (
        "fp8_kv",
        "nvfp4",
        "mixed",
        "nvfp4_kv_nvfp4",
    ):  # static inputs and caches, by way of the other container
        convert(FOLDER / f"modelopt_{name}", tmp_path / f"{name}_ct", CT)
        convert(tmp_path / f"{name}_ct", tmp_path / name, NAME)
        folders.append(tmp_path / name)
    answers = peers.run(".venv-peers", "modelopt_peer.py", folders)
    assert [answer["equal"] for answer in answers] == [True] * len(folders)
    for folder in folders:
        with np.load(folder / "theirs.npz") as theirs:
            ours = {name: values + 0.0 for name, values in decoded(folder).items()}  # see above: one zero
            assert_same(ours, {name: theirs[name] + 0.0 for name in theirs.files})


@pytest.mark.slow
def test_vllm_reads_our_configs(tmp_path: Path) -> None:
    """Both forms, through the overrides that pick a class, and exactly the kept modules left alone."""
    held = [preset for preset in HELD if preset not in ("w4a16", "mxfp4")]
    folders = {preset: quantized(tmp_path, preset, ignore=["re:.*o_proj"]) for preset in held}
    folders["mixed"] = quantized(tmp_path, None, recipe=TWO)
    convert(FOLDER / "modelopt_fp8_kv", tmp_path / "kv_ct", CT)
    convert(tmp_path / "kv_ct", tmp_path / "kv", NAME)
    folders["kv"] = tmp_path / "kv"
    classes = {
        "fp8_dynamic": "ModelOptFp8Config", "fp8_block": "ModelOptFp8Config", "nvfp4a16": "ModelOptNvFp4Config",
        "mxfp8": "ModelOptMxFp8Config", "mixed": "ModelOptMixedPrecisionConfig", "kv": "ModelOptFp8Config",
    }  # fmt: skip
    cases, wanted = [], []
    for name, folder in folders.items():
        modules = [matrix.module for matrix in contents(folder).matrices]
        kept = (
            ["lm_head"]
            if name == "kv"
            else ["lm_head"] + ["model.layers.0.self_attn.o_proj"] * (name != "mixed")
        )
        beside, block = configs(folder)
        for config in (block, beside | {"quant_method": "modelopt"}):
            cases.append({"config": config, "kept": kept, "quantized": modules})
            wanted.append(
                {"class": classes[name], "alone": dict.fromkeys(kept, True) | dict.fromkeys(modules, False)}
            )
    assert peers.run(".venv-engine", "engine_configs.py", given=json.dumps(cases)) == wanted
