"""AWQ: golden bytes, what GPTQModel wrote and AutoAWQ decoded, both orders by their definition, and its config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import toys
from narrowcast.containers.awq import part_of_name, spelling
from narrowcast.containers.spelling import Place
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.jobs.convert import convert
from narrowcast.jobs.quantize import plan, run
from narrowcast.kernels import Rows
from narrowcast.model.recipe import Recipe
from narrowcast.numbers.formats import BF16, FP16
from narrowcast.tensors.packing import pack
from narrowcast.tensors.presets import LinearScheme, presets
from narrowcast.tensors.schemes import schemes
from upstream_fixtures import FOLDER, assert_same, contents, decoded, upstream

MODULE = "model.layers.0.mlp.down_proj"
CT = "compressed-tensors"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BLOCK = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def nibbles(word: int) -> list[int]:
    return [(word & 0xFFFFFFFF) >> (4 * i) & 15 for i in range(8)]


def channels(row: Any) -> list[int]:
    """The channels of a row of interleaved words, one by one."""
    found: list[int] = []
    for word in row:
        eight = nibbles(int(word))
        found += [eight[ORDER.index(channel)] for channel in range(8)]
    return found


def by_definition(tensors: Mapping[str, Any], group: int) -> np.ndarray:
    """w[n, k] = (q - z) · s in fp32, scalar by scalar."""
    scales = tensors[f"{MODULE}.scales"].astype(np.float32)
    zeros = [channels(row) for row in tensors[f"{MODULE}.qzeros"]]
    codes = [channels(row) for row in tensors[f"{MODULE}.qweight"]]
    n, k = scales.shape[1], len(codes)
    size = group if group > 0 else k
    out = [
        [np.float32(codes[j][i] - zeros[j // size][i]) * scales[j // size, i] for j in range(k)]
        for i in range(n)
    ]
    return np.array(out, np.float32)


def made(n: int, k: int, group: int, sym: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """One matrix of random words; every word is a valid one."""
    rng = np.random.default_rng(seed)
    tiles = k // group if group > 0 else 1
    zeros = (
        np.full((tiles, n // 8), 0x88888888, np.uint32)
        if sym
        else rng.integers(0, 2**32, (tiles, n // 8), np.uint32)
    )
    return {
        f"{MODULE}.qweight": rng.integers(0, 2**32, (k, n // 8), np.uint32).view(np.int32),
        f"{MODULE}.qzeros": zeros.view(np.int32),
        f"{MODULE}.scales": np.ldexp(
            rng.uniform(0.5, 2, (tiles, n)), rng.integers(-12, 3, (tiles, n))
        ).astype("<f2"),
    }


def write(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any] | None, **beside: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    outer = {**toys.llama_config(layers=1), "torch_dtype": "float16"}
    if config is not None:
        outer["quantization_config"] = dict(config)
    (folder / "config.json").write_text(json.dumps(outer))
    for name, value in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    plain = {"model.norm.weight": np.ones(8, np.float16)}
    save_file({**plain, **tensors}, folder / "model.safetensors", {"format": "pt"})
    return folder


def ours(folder: Path) -> np.ndarray:
    return decoded(folder)[MODULE]


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), [(8, 64, 32), (40, 96, 16), (32, 64, 64), (24, 48, -1)])
def test_every_shape_decodes_by_definition_and_comes_back(
    tmp_path: Path, n: int, k: int, group: int, sym: bool
) -> None:
    """Read against the definition; through compressed-tensors and back to the same bytes."""
    tensors = made(n, k, group, sym)
    folder = write(tmp_path / "a", tensors, BLOCK | {"group_size": group})
    assert np.array_equal(ours(folder), by_definition(tensors, group))
    assert (contents(folder).matrices[0].how.scheme.zero is None) == sym
    convert(folder, tmp_path / "ct", CT)
    assert np.array_equal(ours(tmp_path / "ct"), ours(folder))
    convert(tmp_path / "ct", tmp_path / "b", "awq")
    back = load_file(tmp_path / "b" / "model.safetensors")
    assert {key for key in back if key.startswith(MODULE)} == set(tensors)
    for name, value in tensors.items():
        assert back[name].tobytes() == value.tobytes(), name
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert {key: config[key] for key in BLOCK} == BLOCK | {"group_size": group}


@pytest.mark.parametrize("preset", ["w4a16", "w4a16_asym"])
def test_compressed_tensors_there_and_back_to_the_byte(tmp_path: Path, preset: str) -> None:
    """With fp16 scales, which both hold."""
    model = toys.llama(tmp_path / "model", dtype="fp16", inner=256)
    run(plan(model, tmp_path / "ct", preset))
    convert(tmp_path / "ct", tmp_path / "there", "awq")
    assert_same(decoded(tmp_path / "there"), decoded(tmp_path / "ct"))
    convert(tmp_path / "there", tmp_path / "back", CT)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "ct" / name).read_bytes()


@pytest.mark.parametrize("preset", ["w4a16", "w4a16_asym"])
def test_to_gptq_and_back(tmp_path: Path, preset: str) -> None:
    model = toys.llama(tmp_path / "model", inner=256, layers=1)
    run(plan(model, tmp_path / "a", preset, container="awq"))
    convert(tmp_path / "a", tmp_path / "gptq", "gptq")
    convert(tmp_path / "gptq", tmp_path / "b", "awq")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    assert_same(decoded(tmp_path / "gptq"), decoded(tmp_path / "a"))


FIXTURES = sorted(path.name for path in FOLDER.glob("awq_*"))


def test_there_are_fixtures() -> None:
    assert "awq_gemm_asym" in FIXTURES


@pytest.mark.parametrize("name", FIXTURES)
def test_autoawq_decodes_to_our_values(name: str) -> None:
    theirs, dtype = upstream(FOLDER / name)
    assert_same(decoded(FOLDER / name, dtype), theirs)


GOLDEN = (
    "d0bb07136846e1ac01de79358a5802de36120d79ceab46025735cf9be0bd5834",
    "7887087777888877778878777778788777780887877877878778778887777788",
    "ab32773289320b008932893289328932",
)


def test_golden_bytes_of_autoawq() -> None:
    """AutoAWQ's arithmetic on the toy matrix [32, 64], laid out by us, is AutoAWQ's words."""
    index = np.arange(32)[:, None] * 64 + np.arange(64)
    w = (((index * 37) % 101 - 50) / 32).astype(np.float16)
    w[3] = 0
    groups = w.reshape(32, 2, 32)
    high, low = groups.max(-1), groups.min(-1)
    scale = (np.maximum(high - low, np.float16(1e-5)) / np.float16(15)).astype(np.float16)
    zero = np.clip(-np.round((low / scale).astype(np.float16)), 0, 15).astype(np.float16)
    s, z = np.repeat(scale, 32, 1), np.repeat(zero, 32, 1)
    codes = np.clip(np.round(w / s) + z, 0, 15).astype(np.uint8)  # in fp16 throughout
    how = spelling(LinearScheme(schemes["uint4_g32"]), FP16)
    rows = Rows(pack(codes, how.packing), scale.view(np.uint16), zero.astype(np.uint8))
    found = {name: data for name, data, _, _ in how.pieces(Place("m", 32), 64, 0, rows)}
    assert found["m.qweight"].view("<i4")[:2].tobytes().hex() == GOLDEN[0]
    assert found["m.qzeros"].tobytes().hex() == GOLDEN[1]
    assert found["m.scales"].view("<u2")[0, :8].tobytes().hex() == GOLDEN[2]


@pytest.mark.parametrize(("k", "group", "width"), [(256, 128, 1), (256, 64, 2), (128, 32, 4), (128, -1, 1)])
def test_the_gemv_order_is_read(tmp_path: Path, k: int, group: int, width: int) -> None:
    """Straight nibbles along K, groups padded to whole words; decoded by definition and moved into gemm order."""
    rng = np.random.default_rng(k)
    n, size = 16, group if group > 0 else k
    tensors = {
        f"{MODULE}.qweight": rng.integers(0, 2**32, (n, k // 8), np.uint32).view(np.int32),
        f"{MODULE}.qzeros": rng.integers(0, 2**32, (n, width), np.uint32).view(np.int32),
        f"{MODULE}.scales": rng.uniform(0.001, 0.1, (n, 8 * width)).astype(np.float16),
    }
    folder = write(tmp_path / "m", tensors, BLOCK | {"version": "GEMV", "group_size": group})
    wanted = np.empty((n, k), np.float32)
    for i in range(n):
        codes = [q for word in tensors[f"{MODULE}.qweight"][i] for q in nibbles(int(word))]
        zeros = [q for word in tensors[f"{MODULE}.qzeros"][i] for q in nibbles(int(word))]
        for j in range(k):
            wanted[i, j] = np.float32(codes[j] - zeros[j // size]) * np.float32(
                tensors[f"{MODULE}.scales"][i, j // size]
            )
    assert np.array_equal(ours(folder), wanted)
    convert(folder, tmp_path / "ct", CT)
    convert(tmp_path / "ct", tmp_path / "gemm", "awq")
    assert np.array_equal(ours(tmp_path / "gemm"), wanted)


def test_legacy_configs(tmp_path: Path) -> None:
    """AutoAWQ's own keys, beside the weights or in config.json; two places must say the same."""
    good = made(8, 64, 32)
    old = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    for i, (inside, beside) in enumerate(
        [(None, old), (BLOCK, old), ({"quant_method": "awq", **old}, BLOCK)]
    ):
        found = contents(write(tmp_path / str(i), good, inside, quant_config=beside))
        assert (found.container, len(found.matrices)) == ("awq", 1)
    with pytest.raises(CheckpointError, match="disagree") as refused:
        contents(write(tmp_path / "x", good, BLOCK, quant_config=old | {"q_group_size": 64}))
    assert "group_size 32" in str(refused.value)
    assert "group_size 64 as in quant_config.json" in str(refused.value)


def test_what_contradicts_is_refused(tmp_path: Path) -> None:
    good = made(8, 64, 32)
    bare = {name: value for name, value in good.items() if not name.endswith("scales")}
    cases: list[tuple[Mapping[str, Any], Mapping[str, Any], str]] = [
        (good, BLOCK | {"group_size": 64}, "shapes that the config gives"),
        (good, BLOCK | {"bits": 8}, "packs 4 bits"),
        (good, BLOCK | {"bits": None}, "does not say bits"),
        (good, BLOCK | {"version": "gemv_fast"}, "layout is not read"),
        (good, BLOCK | {"version": "gemv"}, "shapes of the gemv order"),
        (good, BLOCK | {"zero_point": False}, "no zero points"),
        (good, BLOCK | {"w_bit": 8}, "two of bits"),
        (good, BLOCK | {"modules_to_not_convert": ["mlp.down"]}, "says that it is not"),
        (bare, BLOCK, "not complete"),
    ]
    for i, (tensors, config, words) in enumerate(cases):
        with pytest.raises(CheckpointError, match=words):
            contents(write(tmp_path / str(i), tensors, config))


def test_kept_modules_are_parts_of_no_other_name(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "model", inner=256, head=True)
    settled = plan(model, tmp_path / "out", "w4a16", container="awq", ignore="re:.*o_proj")
    said = json.loads(settled.config)["quantization_config"]["modules_to_not_convert"]
    assert said == ["lm_head", "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]
    assert part_of_name(r"re:^model\.layers\.0\.mlp\.experts\..*") == "model.layers.0.mlp.experts."
    shapes = toys.llama_shapes(inner=256, layers=1) | {"model.layers.0.mlp.gate.weight": (8, 128)}
    config = toys.llama_config(inner=256, layers=1)
    odd = toys.write(tmp_path / "odd", toys.weights(shapes), config)
    with pytest.raises(UsageError, match="matches parts of names"):
        plan(odd, tmp_path / "no", "w4a16", container="awq")


def test_what_it_cannot_hold(tmp_path: Path) -> None:
    for name in ("fp8_dynamic", "nvfp4a16", "w8a16", "w4a8", "mxfp4"):
        with pytest.raises(UsageError, match="no spelling"):
            spelling(presets[name].linear, BF16)
    model = toys.llama(tmp_path / "model", hidden=192, inner=544, layers=1)
    assert {
        unit.how.scheme.group for unit in plan(model, tmp_path / "out", "w4a16", container="awq").units
    } == {32}
    recipe = Recipe.from_toml(
        "default = 'w4a16'\n[[rule]]\nmatch = 're:.*o_proj'\nscheme = 'int4_g64'\n", "recipe.toml"
    )
    with pytest.raises(UsageError, match="one group size of AWQ"):
        plan(model, tmp_path / "out", recipe=recipe, container="awq")
