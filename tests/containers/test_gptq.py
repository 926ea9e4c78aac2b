"""GPTQ: golden bytes, what GPTQModel wrote and decoded, every width and version by a decoder written from the
definition, the label held against the data, and shuffled columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import toys
from narrowcast.containers.contents import Contents
from narrowcast.containers.gptq import spell, spelling
from narrowcast.containers.spelling import Place
from narrowcast.errors import CheckpointError, NarrowcastError, UsageError
from narrowcast.jobs.convert import convert
from narrowcast.jobs.quantize import plan, run
from narrowcast.kernels import Rows
from narrowcast.kernels.reference.rows import qtensor
from narrowcast.numbers.formats import BF16, FP16, formats
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.packing import pack
from narrowcast.tensors.presets import LinearScheme, presets
from narrowcast.tensors.schemes import schemes
from narrowcast.tensors.storage import stored_scheme
from upstream_fixtures import FOLDER, assert_same, contents, decoded, upstream

MODULE = "model.layers.0.mlp.down_proj"
CT = "compressed-tensors"


def get(words: list[int], bits: int, i: int) -> int:
    """Field i of a stream of 32-bit words, bit by bit."""
    return sum(
        ((words[at // 32] & 0xFFFFFFFF) >> (at % 32) & 1) << b for b in range(bits) for at in [i * bits + b]
    )


def put(values: list[int], bits: int) -> list[int]:
    """Fields as a stream of 32-bit words, as numbers of Python."""
    total = sum(value << (i * bits) for i, value in enumerate(values))
    return [(total >> at) & 0xFFFFFFFF for at in range(0, len(values) * bits, 32)]


def words(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, np.uint32).view(np.int32)


def by_definition(tensors: Mapping[str, Any], bits: int, version: int, k: int) -> np.ndarray:
    """w[n, k] = (q - z) · s in fp32, scalar by scalar, straight from the words."""
    qweight, qzeros = tensors[f"{MODULE}.qweight"], tensors[f"{MODULE}.qzeros"]
    scales, g_idx = tensors[f"{MODULE}.scales"].astype(np.float32), tensors[f"{MODULE}.g_idx"]
    n = qweight.shape[1]
    out = np.empty((n, k), np.float32)
    zeros = [[get([int(w) for w in row], bits, i) + (version == 1) for i in range(n)] for row in qzeros]
    for i in range(n):
        column = [int(w) for w in qweight[:, i]]
        for j in range(k):
            g = int(g_idx[j])
            out[i, j] = np.float32(get(column, bits, j) - zeros[g][i]) * scales[g, i]
    return out


def made(
    bits: int, sym: bool, version: int, n: int, k: int, group: int, seed: int = 0, shuffle: bool = False
) -> dict[str, np.ndarray]:
    """One matrix as its definition lays it, by Python's integers."""
    rng = np.random.default_rng(seed)
    size = group if group > 0 else k
    tiles = -(-k // size)
    codes = rng.integers(0, 1 << bits, (n, k))
    zero = np.full((n, tiles), 1 << (bits - 1)) if sym else rng.integers(1, 1 << bits, (n, tiles))
    g_idx = np.arange(k) // size
    if shuffle:
        rng.shuffle(g_idx)
    qweight = np.array([put(codes[i].tolist(), bits) for i in range(n)], np.uint32).T
    stored = zero - (version == 1)
    return {
        f"{MODULE}.qweight": np.ascontiguousarray(qweight).view(np.int32),
        f"{MODULE}.qzeros": words([put(stored[:, g].tolist(), bits) for g in range(tiles)]),
        f"{MODULE}.scales": np.ldexp(rng.uniform(0.5, 2, (tiles, n)), rng.integers(-12, 3, (tiles, n))).astype("<f2"),
        f"{MODULE}.g_idx": g_idx.astype(np.int32),
    }  # fmt: skip


def block(bits: int, sym: bool, version: int, group: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": False, "lm_head": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2", **more,
    }  # fmt: skip


def write(folder: Path, tensors: Mapping[str, Any], config: dict[str, Any] | None, **beside: Any) -> Path:
    """A checkpoint of one quantized matrix; ``beside`` are other files by name without ``.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    outer = {**toys.llama_config(layers=1), "torch_dtype": "float16"}
    if config is not None:
        outer["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(outer))
    for name, value in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    plain = {"model.norm.weight": np.ones(8, np.float16)}
    save_file({**plain, **tensors}, folder / "model.safetensors", {"format": "pt"})
    return folder


def ours(folder: Path) -> np.ndarray:
    return decoded(folder)[MODULE]


SHAPES = {
    "grouped": (32, 96, 32),
    "partial group": (64, 96, 64),
    "per channel": (32, 64, -1),
    "wide": (96, 32, 16),
}
EVERY = list(product((2, 3, 4, 8), (True, False), (1, 2), SHAPES))


@pytest.mark.parametrize(("bits", "sym", "version", "shape"), EVERY)
def test_every_width_and_version_decodes_by_definition(
    tmp_path: Path, bits: int, sym: bool, version: int, shape: str
) -> None:
    n, k, group = SHAPES[shape]
    tensors = made(bits, sym, version, n, k, group)
    folder = write(tmp_path / "m", tensors, block(bits, sym, version, group))
    wanted = by_definition(tensors, bits, version, k)
    assert np.array_equal(ours(folder).view(np.uint32), (wanted + np.float32(0)).view(np.uint32))


@pytest.mark.parametrize(("bits", "sym", "version", "shape"), EVERY)
def test_every_width_and_version_is_written_by_definition(
    bits: int, sym: bool, version: int, shape: str
) -> None:
    """The chunks of a spelling, put together, are the tensors that Python's integers give."""
    n, k, group = SHAPES[shape]
    tensors = made(bits, sym, version, n, k, group)
    element = formats[f"{'int' if sym else 'uint'}{bits}"]
    scheme = stored_scheme(element, (1, max(group, 0)), FP16, zero=None if sym else element)
    how = spell(scheme, version)
    columns = [[int(w) for w in tensors[f"{MODULE}.qweight"][:, i]] for i in range(n)]
    codes = np.array([[get(column, bits, j) for j in range(k)] for column in columns], np.uint8)
    codes ^= np.uint8(how.packing.flip)
    rows = [[int(w) for w in row] for row in tensors[f"{MODULE}.qzeros"]]
    zero = np.array([[get(row, bits, i) + (version == 1) for row in rows] for i in range(n)], np.uint8)
    scales = np.ascontiguousarray(tensors[f"{MODULE}.scales"].T).view(np.uint16)
    files = {
        spec.name: bytearray(spec.dtype.bits // 8 * int(np.prod(spec.shape)))
        for spec in how.specs(Place(MODULE, n), k)
    }
    for start in range(0, n, 32):
        part = slice(start, start + 32)
        chunk = Rows(pack(codes[part], how.packing), scales[part], None if sym else zero[part])
        for name, data, at, stride in how.pieces(Place(MODULE, n), k, start, chunk):
            for row, piece in enumerate(data):
                files[name][at + row * stride : at + row * stride + len(piece)] = piece.tobytes()
    for name, data, at, _ in how.constants(Place(MODULE, n), (n, k), {}):
        files[name][at : at + data.size] = data.tobytes()
    assert files.keys() == tensors.keys()
    for name, data in files.items():
        assert bytes(data) == tensors[name].tobytes(), name


@pytest.mark.parametrize(("bits", "sym"), list(product((2, 3, 4, 8), (True, False))))
def test_through_compressed_tensors_and_back(tmp_path: Path, bits: int, sym: bool) -> None:
    """Symmetric v1 and asymmetric v2 are what is written, so they come back to the byte."""
    version = 1 if sym else 2
    tensors = made(bits, sym, version, 64, 96, 32)
    folder = write(tmp_path / "a", tensors, block(bits, sym, version, 32))
    convert(folder, tmp_path / "ct", CT)
    convert(tmp_path / "ct", tmp_path / "b", "gptq")
    back = load_file(tmp_path / "b" / "model.safetensors")
    assert {name: value.tobytes() for name, value in back.items() if name.startswith(MODULE)} == {
        name: value.tobytes() for name, value in tensors.items()
    }
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert config["checkpoint_format"] == ("gptq" if sym else "gptq_v2")
    assert config == json.loads((tmp_path / "b" / "quantize_config.json").read_text())
    assert {key: config[key] for key in ("bits", "group_size", "sym", "desc_act", "lm_head")} == {
        "bits": bits, "group_size": 32, "sym": sym, "desc_act": False, "lm_head": False,
    }  # fmt: skip


@pytest.mark.parametrize("preset", ["w4a16", "w4a16_asym", "w8a16"])
def test_compressed_tensors_there_and_back_to_the_byte(tmp_path: Path, preset: str) -> None:
    """With fp16 scales, which both hold."""
    model = toys.llama(tmp_path / "model", dtype="fp16", inner=256)
    run(plan(model, tmp_path / "ct", preset))
    convert(tmp_path / "ct", tmp_path / "there", "gptq")
    convert(tmp_path / "there", tmp_path / "back", CT)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "ct" / name).read_bytes()
    assert not (tmp_path / "back" / "quantize_config.json").exists()


@pytest.mark.parametrize("preset", ["w4a16", "w8a16"])
def test_bf16_scales_that_fp16_holds_move(tmp_path: Path, preset: str) -> None:
    """Values are equal; a scale that fp16 cannot hold is refused unless rounding was asked for."""
    model = toys.llama(tmp_path / "model", inner=256, layers=1)
    run(plan(model, tmp_path / "ct", preset))
    convert(tmp_path / "ct", tmp_path / "gptq", "gptq")
    assert_same(decoded(tmp_path / "gptq"), decoded(tmp_path / "ct"))
    tensors = toys.weights(toys.llama_shapes(inner=256, layers=1), scale=2.0**-30)
    tiny = toys.write(tmp_path / "tiny", tensors, toys.llama_config(inner=256, layers=1))
    run(plan(tiny, tmp_path / "ct_tiny", preset))
    with pytest.raises(NarrowcastError, match="fp16"):
        convert(tmp_path / "ct_tiny", tmp_path / "no", "gptq")
    convert(tmp_path / "ct_tiny", tmp_path / "yes", "gptq", requantize=True)


FIXTURES = sorted(path.name for path in FOLDER.glob("gptq_*"))


def test_there_are_fixtures() -> None:
    assert {"gptq_v1_4bit_asym_desc_act", "gptq_v1_2bit_asym", "gptq_v1_3bit_asym"} <= set(FIXTURES)


@pytest.mark.parametrize("name", FIXTURES)
def test_gptqmodel_decodes_to_our_values(name: str) -> None:
    theirs, dtype = upstream(FOLDER / name)
    assert_same(decoded(FOLDER / name, dtype), theirs)


def golden() -> tuple[np.ndarray, dict[bool, tuple[np.ndarray, np.ndarray]]]:
    """The toy matrix [32, 64] of the golden bytes, and scales and zero points of each kind, by GPTQ's formulas."""
    index = np.arange(32)[:, None] * 64 + np.arange(64)
    w = (((index * 37) % 101 - 50) / 32).astype(np.float32)
    w[3] = 0
    groups = w.reshape(32, 2, 32)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    found = {}
    for sym in (True, False):
        top = np.maximum(np.abs(low), high) if sym else high
        bottom = np.where(low < 0, -top, low) if sym else low
        empty = (bottom == 0) & (top == 0)
        bottom, top = np.where(empty, -1, bottom), np.where(empty, 1, top)
        scale = ((top - bottom) / np.float32(15)).astype(np.float32)
        found[sym] = scale, np.full_like(scale, 8) if sym else np.round(-bottom / scale)
    return w, found


GOLDEN = {
    True: (
        "602cd894d7935e0a4efab672888888885f1bc682c6824df93de9a561888888884efab571b5712ce82cd8945f888888883ce8a46fa46f1bd7"
        "1bc7834e888888882cd7935f935e0ac6fab6723d888888881ac6824e824df9b5e9a5602c88888888f9b5713c612ce8a4d8945f1b88888888"
        "e8a46f2b5f1bc783c7824efa88888888",
        "77777777777777777777777777777777" * 2, "ab328932ab3244308932ab3289324430",
    ),
    False: (
        "602cd894d7935e0a3df9b561777777775f1bc682c6824df92ce89450777777774efab571b5712ce81bd7834e777777773ce8a46fa46f1bd7"
        "0ab6723d777777771bc6824e934e0ac6fab6723d7777777709b5713d823df9b5e9a5602c77777777e8a4602b612ce8a4d8945f1b77777777"
        "d7935f1a5f1bd783c7824efa77777777",
        "8877788887877888877878888778788787788887777888877878888778888787", "ab327732893244307732773289324430",
    ),
}  # fmt: skip


@pytest.mark.parametrize("sym", [True, False])
def test_golden_bytes_of_gptqmodel(sym: bool) -> None:
    """Codes of the peer's formulas, laid out by us, are the peer's words; our zero points are those it saves."""
    w, kinds = golden()
    scale, zero = kinds[sym]
    s, z = np.repeat(scale, 32, 1), np.repeat(zero, 32, 1)
    codes = np.clip(np.round((w + z * s) / s), 0, 15).astype(np.uint8)
    how = spelling(LinearScheme(schemes["int4_g32" if sym else "uint4_g32"]), FP16)
    stored = scale.astype(np.float16).view(np.uint16)
    rows = Rows(
        pack(codes ^ np.uint8(how.packing.flip), how.packing), stored, None if sym else zero.astype(np.uint8)
    )
    found = {name: data for name, data, _, _ in how.pieces(Place("m", 32), 64, 0, rows)}
    found |= {name: data for name, data, _, _ in how.constants(Place("m", 32), (32, 64), {})}
    qweight, qzeros, scales = GOLDEN[sym]
    assert np.ascontiguousarray(found["m.qweight"].view("<i4")[:, :4]).tobytes().hex() == qweight
    assert found["m.qzeros"].tobytes().hex() == qzeros
    assert np.ascontiguousarray(found["m.scales"].view("<u2")[:, :4]).tobytes().hex() == scales
    assert found["m.g_idx"].view("<i4").reshape(-1).tolist() == [k // 32 for k in range(64)]
    back = qtensor(rows, how.scheme, how.packing, 64).dequantize()
    assert (
        np.abs(back - w).max() <= scale.max() / 2 + scale.max() * 15 * 2.0**-11
    )  # half a step, and fp16's rounding of it


# Case 14: zero points of symmetric 4-bit weights.


def sevens_or_eights(folder: Path, word: int, label: str) -> Path:
    tensors = made(4, True, 1, 32, 32, 32)
    tensors[f"{MODULE}.qzeros"] = np.full((1, 4), word, np.uint32).view(np.int32)
    tensors[f"{MODULE}.qweight"] = np.full((4, 32), 0x88888888, np.uint32).view(np.int32)
    tensors[f"{MODULE}.scales"] = np.full((1, 32), 0.1, np.float16)
    return write(folder, tensors, block(4, True, 1, 32) | {"checkpoint_format": label})


def test_the_middle_code_is_zero_in_both_versions(tmp_path: Path) -> None:
    for label, word in (("gptq", 0x77777777), ("gptq_v2", 0x88888888)):
        assert not ours(sevens_or_eights(tmp_path / label, word, label)).any()


@pytest.mark.parametrize(
    ("label", "word", "looks"), [("gptq", 0x88888888, "v2"), ("gptq_v2", 0x77777777, "v1")]
)
def test_a_wrong_label_is_refused(tmp_path: Path, label: str, word: int, looks: str) -> None:
    with pytest.raises(CheckpointError, match=f"look like {looks}") as refused:
        contents(sevens_or_eights(tmp_path / "m", word, label))
    assert label in str(refused.value)


@pytest.mark.parametrize("version", [1, 2])
def test_asymmetric_zero_points_survive_an_export(tmp_path: Path, version: int) -> None:
    """A zero point of 3 and codes 0 to 15 are -3 to 12, before and after compressed-tensors and v2."""
    tensors = made(4, False, version, 32, 32, 32)
    tensors[f"{MODULE}.qzeros"] = words([put([3 - (version == 1)] * 32, 4)])
    tensors[f"{MODULE}.qweight"] = words([put([k % 16 for k in range(32)], 4)] * 32).T.copy()
    tensors[f"{MODULE}.scales"] = np.ones((1, 32), np.float16)
    folder = write(tmp_path / "m", tensors, block(4, False, version, 32))
    wanted = np.tile(np.arange(-3, 13, dtype=np.float32), (32, 2))
    assert np.array_equal(ours(folder), wanted)
    convert(folder, tmp_path / "ct", CT)
    convert(tmp_path / "ct", tmp_path / "out", "gptq")
    assert np.array_equal(ours(tmp_path / "out"), wanted)


def full_zero(folder: Path, **more: Any) -> Path:
    """An asymmetric v1 file whose first zero point is stored as 15."""
    tensors = made(4, False, 2, 32, 32, 32)
    tensors[f"{MODULE}.qzeros"] = words([put([15, 6] * 16, 4)])
    return write(folder, tensors, block(4, False, 1, 32, **more))


def test_v1_has_no_zero_point_of_sixteen(tmp_path: Path) -> None:
    """Refused, except from the writer whose borrow over words is known."""
    with pytest.raises(CheckpointError, match="look like v2"):
        contents(full_zero(tmp_path / "a"))
    folder = full_zero(tmp_path / "b", meta={"quantizer": ["gptqmodel:5.0.0"]})
    with Checkpoint.open(folder) as checkpoint:
        stored = contents(folder).matrices[0]
        zero = stored.how.read(checkpoint, stored.place, stored.shape, 0, 32).zero
    assert zero is not None
    assert zero[:, 0].tolist() == [0, 8] * 16


def test_no_label_means_v1(tmp_path: Path) -> None:
    config = block(4, True, 1, 32)
    del config["checkpoint_format"]
    assert (
        contents(write(tmp_path / "m", made(4, True, 1, 32, 64, 32), config)).matrices[0].how.format == "gptq"
    )


@pytest.mark.parametrize(("version", "doubts"), [(1, False), (2, True)])
def test_asymmetric_codes_that_lie_a_step_off_are_doubted(tmp_path: Path, version: int, doubts: bool) -> None:
    """Normal weights as v1 stores them: under the other label all codes lie one step above their zero points."""
    rng = np.random.default_rng(0)
    tensors = made(4, False, 1, 64, 256, 32)
    x = np.clip(np.round(rng.standard_normal((64, 256)) * 2 + 7), 0, 15).astype(int)
    tensors[f"{MODULE}.qweight"] = words([put(row.tolist(), 4) for row in x]).T.copy()
    tensors[f"{MODULE}.qzeros"] = words([put([6 if i % 2 else 5 for i in range(64)], 4)] * 8)
    tensors[f"{MODULE}.qzeros"][4:] = words([put([6 if i % 2 else 7 for i in range(64)], 4)] * 4)
    notes = contents(write(tmp_path / "m", tensors, block(4, False, version, 32))).notes
    assert [("gptq" in note and "steps above" in note) for note in notes] == ([True] if doubts else [])


# Shuffled columns.


@pytest.mark.parametrize(("bits", "sym"), list(product((2, 3, 4, 8), (True, False))))
def test_shuffled_columns_decode_by_definition(tmp_path: Path, bits: int, sym: bool) -> None:
    tensors = made(bits, sym, 1, 32, 96, 32, shuffle=True)
    folder = write(tmp_path / "m", tensors, block(bits, sym, 1, 32, desc_act=True))
    wanted = by_definition(tensors, bits, 1, 96)
    assert np.array_equal(ours(folder), wanted)
    convert(folder, tmp_path / "plain", "plain", dtype="fp32")
    assert np.array_equal(load_file(tmp_path / "plain" / "model.safetensors")[f"{MODULE}.weight"], wanted)


def test_shuffled_columns_move_only_where_they_can_be_said(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "m", made(4, True, 1, 32, 256, 128, shuffle=True), block(4, True, 1, 128, desc_act=True)
    )
    with pytest.raises(UsageError, match="shuffled over the groups"):
        convert(folder, tmp_path / "awq", "awq")
    convert(folder, tmp_path / "again", "awq", requantize=True)
    convert(folder, tmp_path / "wide", "gptq", preset="w8a16")
    assert np.array_equal(ours(tmp_path / "wide"), ours(folder))
    g_idx = load_file(tmp_path / "wide" / "model.safetensors")[f"{MODULE}.g_idx"]
    assert np.array_equal(g_idx, load_file(folder / "model.safetensors")[f"{MODULE}.g_idx"])
    config = json.loads((tmp_path / "wide" / "config.json").read_text())["quantization_config"]
    assert (config["bits"], config["desc_act"]) == (8, True)


def test_a_trivial_order_is_no_order(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", made(4, True, 1, 32, 64, 32), block(4, True, 1, 32, desc_act=True))
    found = contents(folder)
    assert found.matrices[0].how.part("order") is None
    assert f"{MODULE}.g_idx" in found.consumed
    convert(folder, tmp_path / "ct", CT)
    assert np.array_equal(ours(tmp_path / "ct"), ours(folder))


# Configs.


def refused(folder: Path, tensors: Mapping[str, Any], config: dict[str, Any] | None, **beside: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        contents(write(folder, tensors, config, **beside))
    return str(error.value)


def test_what_contradicts_is_refused(tmp_path: Path) -> None:
    good, said = made(4, True, 1, 32, 64, 32), block(4, True, 1, 32)
    shuffled = made(4, True, 1, 32, 64, 32, shuffle=True)
    odd = good | {f"{MODULE}.g_idx": np.repeat(np.int32([0, 1]), [40, 24])}
    bare = {name: value for name, value in good.items() if not name.endswith("qzeros")}
    head = {name.replace(MODULE, "lm_head"): value for name, value in made(4, True, 1, 32, 64, 32).items()}
    asymmetric = made(4, False, 1, 32, 64, 32)
    cases: list[tuple[Mapping[str, Any], dict[str, Any], str]] = [
        (good, said | {"bits": 8}, "shapes that the config gives"),
        (good, said | {"group_size": 64}, "shapes that the config gives"),
        (good, said | {"bits": 5}, "packing is not known"),
        (good, said | {"bits": None}, "does not say bits"),
        (good, said | {"checkpoint_format": "marlin"}, "layout is not read"),
        (good, said | {"format": "gptq_v2"}, "names two formats"),
        (good, said | {"dynamic": {"-:.*down_proj": {}}}, "says that it is not"),
        (good, said | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "shapes that the config gives"),
        (good, said | {"dynamic": {"+:(": {"bits": 8}}}, "no regular expression"),
        (good, said | {"lm_head": True}, "lm_head is not quantized"),
        (good | head, said, "lm_head is quantized"),
        (asymmetric, said, "says symmetric"),
        (shuffled, said, "columns are shuffled"),
        (odd, said | {"desc_act": True}, "no grouping"),
        (bare, said, "not complete"),
        (good | {f"{MODULE}.scales": good[f"{MODULE}.scales"].astype(np.int32)}, said, "other dtypes"),
    ]
    for i, (tensors, config, words_) in enumerate(cases):
        assert words_ in refused(tmp_path / str(i), tensors, config)


def test_two_configs_must_say_the_same(tmp_path: Path) -> None:
    good, said = made(4, True, 1, 32, 64, 32), block(4, True, 1, 32)
    old = {key: said[key] for key in ("bits", "group_size", "sym", "desc_act")}
    for i, (inside, beside) in enumerate([(said, old), (None, old), (None, said), (said, said)]):
        found: Contents = contents(write(tmp_path / str(i), good, inside, quantize_config=beside))
        assert found.container == "gptq"
        assert len(found.matrices) == 1
    text = refused(tmp_path / "x", good, said, quantize_config=old | {"sym": False, "group_size": 64})
    assert "disagree" in text
    assert "group_size 32" in text
    assert "group_size 64" in text
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    assert "disagree" in refused(tmp_path / "y", good, awq, quantize_config=said)


def test_what_differs_is_said_in_dynamic(tmp_path: Path) -> None:
    """Two widths in one checkpoint, a layer kept and the head quantized: written, read and decoded again."""
    model = toys.llama(tmp_path / "model", dtype="fp16", inner=256, head=True)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'default = "w4a16"\n'
        '[[rule]]\nmatch = ["re:.*down_proj", "lm_head"]\npreset = "w8a16"\n'
        '[[rule]]\nmatch = "re:.*o_proj"\nkeep = true\n'
    )
    run(plan(model, tmp_path / "out", recipe=recipe, container="gptq"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["bits"] == 4
    assert config["lm_head"] is True
    assert config["dynamic"] == {
        r"+:^model\.layers\.\d+\.mlp\.down_proj$": {"bits": 8},
        "+:^lm_head$": {"bits": 8},
        r"-:^model\.layers\.\d+\.self_attn\.o_proj$": {},
    }
    run(plan(model, tmp_path / "ct", recipe=recipe))
    assert {m.how.scheme.element.bits for m in contents(tmp_path / "out").matrices} == {4, 8}
    assert_same(decoded(tmp_path / "out"), decoded(tmp_path / "ct"))


def test_what_it_cannot_hold(tmp_path: Path) -> None:
    for name in ("fp8_dynamic", "nvfp4a16", "mxfp4", "w4a8"):
        with pytest.raises(UsageError):
            spelling(presets[name].linear, BF16)
    model = toys.llama(tmp_path / "model", hidden=48, inner=96, layers=1)
    with pytest.raises(UsageError, match="cannot divide"):
        plan(model, tmp_path / "out", "w4a16", container="gptq")
    model = toys.llama(tmp_path / "wide", layers=1)
    assert plan(model, tmp_path / "out", "w4a16", container="gptq").engines == (
        "sglang",
        "transformers",
        "vllm",
    )
    assert plan(model, tmp_path / "out", "w4a16_asym", container="gptq").engines == ("transformers",)
