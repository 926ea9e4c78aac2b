"""AMD Quark: what it wrote, what its importer makes of what we write, its config key for key, and contradictions."""

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
from narrowcast.containers.quark.config import config_of, excluded
from narrowcast.containers.quark.spellings import REORDERED, STRAIGHT, from_words, to_words
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.jobs.convert import convert
from narrowcast.jobs.quantize import plan, run
from narrowcast.model.recipe import Recipe
from upstream_fixtures import FOLDER, assert_same, contents, decoded, stored, upstream

CT, NAME = "compressed-tensors", "quark"
FIXTURES = sorted(path.name for path in FOLDER.glob("quark_*"))
HELD = [preset for preset in toys.PRESETS if preset not in ("int8", "w8a16", "w4a8")]
DOWN = "model.layers.0.mlp.down_proj"
TWO = Recipe.from_toml(
    """
    [[rule]]
    match = "re:.*mlp.*"
    preset = "mxfp4"
    [[rule]]
    match = "re:.*self_attn.*"
    preset = "fp8_dynamic"
    """,
    "two presets",
)


def quantized(
    folder: Path, preset: str | None, to: str = NAME, source: Path | None = None, **more: Any
) -> Path:
    source = source or toys.llama(folder / "model", hidden=256, inner=256, layers=1, head=True)
    run(plan(source, folder / f"{to} {preset}", preset, container=to, **more))
    return folder / f"{to} {preset}"


def block_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def changed(folder: Path, out: Path, block: dict[str, Any] | None = None, tensors: Any = None) -> Path:
    """A copy of a checkpoint with another config or other tensors."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = block or config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    held = dict(load_file(folder / "model.safetensors"))
    save_file(tensors(held) if tensors else held, out / "model.safetensors")
    return out


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        contents(folder)
    return str(caught.value)


def test_there_are_fixtures() -> None:
    assert len(FIXTURES) >= 5


@pytest.mark.parametrize("name", FIXTURES)
def test_upstream_fixtures_decode_to_their_values(name: str) -> None:
    """Bit for bit, signs of zeros apart, which integers lose on their way through two's complement."""
    ours, (theirs, dtype) = decoded(FOLDER / name), upstream(FOLDER / name)
    assert dtype == "fp32"
    assert_same({k: v + 0.0 for k, v in ours.items()}, {k: v + 0.0 for k, v in theirs.items()})


@pytest.mark.parametrize("name", FIXTURES)
def test_our_config_is_theirs_key_for_key(tmp_path: Path, name: str) -> None:
    """Through compressed-tensors and back: the block that Quark wrote, and the same codes and scales."""
    convert(FOLDER / name, tmp_path / "there", CT)
    convert(tmp_path / "there", tmp_path / "back", NAME)
    assert block_of(tmp_path / "back") == block_of(FOLDER / name)
    ours, theirs = stored(tmp_path / "back"), stored(FOLDER / name)
    assert ours.keys() == theirs.keys()
    for tensor, (dtype, shape, data) in theirs.items():
        if tensor.endswith(("input_scale", "output_scale")):  # in BF16 there, and in fp32 here
            assert ours[tensor][0] == "F32"
            assert np.frombuffer(ours[tensor][2], np.uint32) >> 16 == np.frombuffer(data, np.uint16)
        else:
            assert ours[tensor] == (dtype, shape, data), tensor


@pytest.mark.parametrize("name", FIXTURES)
def test_a_copy_is_a_copy(tmp_path: Path, name: str) -> None:
    convert(FOLDER / name, tmp_path / "out", NAME)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (FOLDER / name / file).read_bytes()


@pytest.mark.parametrize("preset", HELD)
def test_there_and_back_to_the_byte(tmp_path: Path, preset: str) -> None:
    first = quantized(tmp_path, preset, CT)
    there = convert(first, tmp_path / "there", NAME)
    back = convert(tmp_path / "there", tmp_path / "back", CT)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (first / name).read_bytes()
    assert not there.plan.fallbacks + back.plan.fallbacks
    assert_same(decoded(tmp_path / "there"), decoded(first))


def test_both_elements_of_fp6_and_blocks_of_powers_of_two(tmp_path: Path) -> None:
    """Schemes that no preset names: what the config says of them decides how the same bytes are read."""
    for scheme, dtype in (
        ("mxfp6_e3m2", "fp6_e3m2"),
        ("mxfp6_e2m3", "fp6_e2m3"),
        ("fp8_block128_ue8m0", "fp8_e4m3"),
    ):
        recipe = Recipe.from_toml(f'[[rule]]\nmatch = "re:.*mlp.*"\nscheme = "{scheme}"\n', scheme)
        (tmp_path / scheme).mkdir()
        folder = quantized(tmp_path / scheme, None, recipe=recipe)
        spec = block_of(folder)["global_quant_config"]["weight"]
        assert spec["dtype"] == dtype
        assert {matrix.linear.weight.name for matrix in contents(folder).matrices} == {scheme}
        assert not any(matrix.linear.input for matrix in contents(folder).matrices)
    scale = stored(tmp_path / "fp8_block128_ue8m0" / f"{NAME} None")[f"{DOWN}.weight_scale"]
    assert scale[:2] == ("F8_E8M0", (2, 2))


@pytest.mark.parametrize("order", [REORDERED, STRAIGHT])
def test_words_by_definition(order: tuple[int, ...]) -> None:
    """Nibble i of word [x, j] is the code of row 8 j + order[i] in column x, element by element."""
    codes = np.random.default_rng(1).integers(0, 16, (16, 5), np.uint8)
    words = to_words(codes, order)
    for x in range(5):
        for j in range(2):
            expected = sum(int(codes[8 * j + row, x]) << (4 * i) for i, row in enumerate(order))
            assert int(words[x, j]) & 0xFFFFFFFF == expected
    assert np.array_equal(from_words(words, order), codes)


@pytest.mark.parametrize("preset", ["w4a16", "w4a16_asym"])
def test_straight_order_is_read(tmp_path: Path, preset: str) -> None:
    """The same checkpoint with every word in straight order, under pack_method order."""
    folder = quantized(tmp_path, preset)

    def straight(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: torch.from_numpy(to_words(from_words(value.numpy(), REORDERED), STRAIGHT))
            if value.dtype == torch.int32
            else value
            for name, value in held.items()
        }

    block = block_of(folder)
    other = changed(
        folder, tmp_path / "o", block | {"export": block["export"] | {"pack_method": "order"}}, straight
    )
    assert_same(decoded(other), decoded(folder))
    assert stored(other)[f"{DOWN}.weight"] != stored(folder)[f"{DOWN}.weight"]


def test_static_inputs_and_the_cache(tmp_path: Path) -> None:
    found = contents(FOLDER / "quark_fp8_kv")
    assert found.kv == "fp8"
    assert len(found.cache_scales) == 2
    assert all(matrix.how.part("input") and not matrix.linear.dynamic for matrix in found.matrices)
    convert(FOLDER / "modelopt_mixed", tmp_path / "q", NAME)
    block = block_of(tmp_path / "q")
    assert block["export"]["kv_cache_group"] == ["*k_proj", "*v_proj"]
    assert block["layer_quant_config"]["*k_proj"]["output_tensors"]["dtype"] == "fp8_e4m3"
    held, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "q", FOLDER / "modelopt_mixed"))
    assert held[f"{DOWN}.input_scale_2"] == theirs[f"{DOWN}.input_scale"]
    assert held[f"{DOWN}.weight_scale_2"] == theirs[f"{DOWN}.weight_scale_2"]
    for which in "kv":
        attention = "model.layers.0.self_attn"
        assert (
            held[f"{attention}.{which}_proj.output_scale"]
            == theirs[f"{attention}.{which}_proj.{which}_scale"]
        )
    assert_same(decoded(tmp_path / "q"), decoded(FOLDER / "modelopt_mixed"))
    # ModelOpt and Quark both multiply, so nothing is rounded on the way, and nothing is said about it.
    again = convert(tmp_path / "q", tmp_path / "back", "modelopt")
    assert stored(tmp_path / "back") == stored(FOLDER / "modelopt_mixed")
    assert not [reason for reason in again.reasons if "inverse" in reason]


def test_two_groups(tmp_path: Path) -> None:
    """The larger group is global, the other by exact names."""
    folder = quantized(tmp_path, None, recipe=TWO)
    block = block_of(folder)
    assert block["global_quant_config"]["weight"]["dtype"] == "fp8_e4m3"
    assert set(block["layer_quant_config"]) == {
        f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")
    }
    assert {m.linear.weight.name for m in contents(folder).matrices} == {"mxfp4", "fp8_channel"}


def test_stacked_experts_are_kept_by_a_glob(tmp_path: Path) -> None:
    folder = quantized(
        tmp_path, "mxfp8", source=toys.moe(tmp_path / "moe", "qwen3_moe"), ignore=["re:.*experts.*"]
    )
    listed = block_of(folder)["exclude"]
    assert "model.layers.0.mlp.experts.*" in listed
    assert "model.layers.0.mlp.gate" in listed
    assert excluded("model.layers.0.mlp.experts.3.up_proj", listed)
    assert not any(excluded(matrix.module, listed) for matrix in contents(folder).matrices)
    assert config_of("lm_head", {"exclude": ["re:.*head"], "global_quant_config": {"weight": {}}}) == {}


def test_refusals_name_both_sides(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "mxfp4")
    block = block_of(folder)

    def with_weight(i: int, **more: Any) -> Path:
        everywhere = block["global_quant_config"]
        changes = {"global_quant_config": everywhere | {"weight": everywhere["weight"] | more}}
        return changed(folder, tmp_path / str(i), block | changes)

    text = refused(with_weight(0, dtype="fp8_e4m3"))
    assert "U8 [256, 128]" in text
    assert "fp8_e4m3 per_group as in the config" in text
    text = refused(with_weight(1, group_size=64))
    assert "fp4 per_group 32 in the tensors" in text
    assert "fp4 per_group 64 as in the config" in text
    assert "int7" in refused(with_weight(2, dtype="int7"))
    assert "says that it is not" in refused(
        changed(folder, tmp_path / "3", block | {"exclude": ["*down_proj"]})
    )
    text = refused(changed(folder, tmp_path / "4", {k: v for k, v in block.items() if k != "export"}))
    assert "export" in text
    inputs = block["global_quant_config"] | {"input_tensors": {"dtype": "int8", "qscheme": "per_tensor"}}
    text = refused(changed(folder, tmp_path / "5", block | {"global_quant_config": inputs}))
    assert "inputs that are quantized in a way that is not read" in text

    def extra(**more: torch.Tensor) -> Any:
        return lambda held: held | {name.replace("__", "."): value for name, value in more.items()}

    one = torch.tensor(1.0)
    scale = {"model__layers__0__self_attn__k_proj__output_scale": one}
    assert "does not mention" in refused(changed(folder, tmp_path / "6", tensors=extra(**scale)))
    scale = {"model__layers__0__mlp__down_proj__output_scale": one}
    assert "outputs of layers" in refused(changed(folder, tmp_path / "7", tensors=extra(**scale)))


def test_zero_points_and_second_scales_are_checked(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "w4a16")
    assert not load_file(folder / "model.safetensors")[f"{DOWN}.weight_zero_point"].any()
    bad = {f"{DOWN}.weight_zero_point": torch.full((2, 32), 0x11111111, dtype=torch.int32)}
    assert "symmetric and has zero points" in refused(
        changed(folder, tmp_path / "z", tensors=lambda held: held | bad)
    )
    nvfp4 = quantized(tmp_path, "nvfp4a16")
    wrong = {f"{DOWN}.weight_scale_2": torch.tensor(3584.0)}
    text = refused(changed(nvfp4, tmp_path / "w", tensors=lambda held: held | wrong))
    assert "decoded amax 9.6e+06, implausible" in text


def test_every_preset_is_held_or_refused(tmp_path: Path) -> None:
    source = toys.llama(tmp_path / "model", hidden=256, inner=256, layers=1)
    for preset in toys.PRESETS:
        if preset not in HELD:
            with pytest.raises(UsageError, match="quark has no"):
                plan(source, tmp_path / "out", preset, container=NAME)
            continue
        settled = plan(source, tmp_path / "out", preset, container=NAME)
        assert settled.config


@pytest.mark.slow
def test_quark_decodes_what_we_write(tmp_path: Path) -> None:
    """Its importer builds the model from our config, keeps what is excluded, and gives our values bit for bit."""
    readable = ("fp8_dynamic", "fp8_per_tensor", "w4a16", "w4a16_asym", "nvfp4a16", "mxfp4", "mxfp6a16")
    folders = [quantized(tmp_path, preset) for preset in readable]
    folders.append(quantized(tmp_path, None, recipe=TWO))
    answers = peers.run(".venv-upstream", "quark_peer.py", folders)
    assert [answer["kept"] for answer in answers] == [["lm_head"]] * len(folders)
    for folder in folders:
        with np.load(folder / "theirs.npz") as theirs:
            ours = {name: values + 0.0 for name, values in decoded(folder).items()}
            assert_same(ours, {name: theirs[name] + 0.0 for name in theirs.files})


@pytest.mark.slow
def test_vllm_reads_our_configs(tmp_path: Path) -> None:
    """Every preset that we say vLLM loads finds its scheme there, with what is kept left alone."""
    source = toys.llama(tmp_path / "model", hidden=256, inner=256, layers=1, head=True)
    folders = {preset: quantized(tmp_path, preset, source=source, ignore=["re:.*o_proj"]) for preset in HELD}
    loads = {
        preset: "vllm" in plan(source, tmp_path / "x", preset, container=NAME).engines for preset in HELD
    }
    # It takes the config of this one for inputs per tensor, not in groups, and then has no kernel for them.
    assert not loads["mxfp4xfp8"]
    loads["mxfp4xfp8"] = True
    folders["two"], loads["two"] = quantized(tmp_path, None, source=source, recipe=TWO), True
    convert(FOLDER / "modelopt_fp8_kv", tmp_path / "kv", NAME)
    convert(FOLDER / "modelopt_nvfp4", tmp_path / "nvfp4", NAME)
    folders |= {"kv": tmp_path / "kv", "nvfp4": tmp_path / "nvfp4"}
    loads |= {"kv": True, "nvfp4": True}
    cases, wanted = [], []
    for name, folder in folders.items():
        modules = [matrix.module for matrix in contents(folder).matrices]
        kept = ["lm_head"] + ["model.layers.0.self_attn.o_proj"] * (name in HELD)
        cases.append({"config": block_of(folder), "kept": kept, "quantized": modules})
        wanted.append(
            {
                "class": "QuarkConfig",
                "alone": dict.fromkeys(kept, True) | dict.fromkeys(modules, False),
                "runs": dict.fromkeys(modules, loads[name]),
            }
        )
    assert peers.run(".venv-engine", "engine_configs.py", given=json.dumps(cases)) == wanted
