"""bitsandbytes: its own saved models, its own golden bytes, and blocks that run across rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

import toys
from narrowcast.containers.bitsandbytes import spell
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.jobs.coded import open_coded
from narrowcast.jobs.convert import convert
from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import NF4, formats
from narrowcast.store.checkpoint import Checkpoint
from upstream_fixtures import FOLDER, assert_same, contents, decoded, upstream

Tensors = dict[str, NDArray[Any]]
Change = Callable[[Tensors, dict[str, Any]], object]
TABLES = {"nf4": "nf4", "fp4": "bnb_fp4"}
LAYER = "model.layers.0.mlp.gate_proj"

# bitsandbytes 0.50.2 executed on a CPU, codes and absmax of its quantize_4bit with blocks of 64, and the SHA-256 of
# the fp32 values of its generic dequantization. Input: ((i · 37 mod 101) - 50) / 40 · (1 + i // 50) at flat index i.
CROSSING: dict[tuple[str, int, int], tuple[str, str, str]] = {
    ("nf4", 3, 35): (
        "26a37b48c5926a37b48c5a36b37c49d5a37b48c5926a37b48c3b05d18e2af4c06c38d4915b27c38d4a16b27d39d5a26c38d4a04c17",
        "cdcc1c4000007040", "51e15120320ab844cde35395d2859935b6728f920c906294e6bdd5784955a5a1",
    ),
    ("nf4", 4, 48): (
        "26a37b48c5926a37b48c5a36b37c49d5a37b48c5926a37b48c3b05d18e2af4c06c38d4915b27c38d4a16b27d39d5a26c38d4a04c16e29f"
        "3b05d17e29f3c05d18d39e5b16d28e4a15c27d39f3b05d18e2af4c06e18e3b04d17e29f3b05d17e2af",
        "cdcc1c4000007040cdcc9c40", "1ab7fddc2beaa332f03b9a9093e857a769d87342f1c25939a03f5b0d855e032a",
    ),
    ("fp4", 3, 35): (
        "de7c94c15e6de7c04f65e6d94c14f65e7d94c15f6de7c94f65c4be2a12d73c5b95d15c6ae4d95c62f7ae4d15c62f7d94d15c7bf5a0",
        "cdcc1c4000007040", "e2d37f4d45ad9dd8f9574aea0eb1057bbc7f72107208fe996d71664f238d2982",
    ),
    ("fp4", 4, 48): (
        "de7c94c15e6de7c04f65e6d94c14f65e7d94c15f6de7c94f65c4be2a12d73c5b95d15c6ae4d95c62f7ae4d15c62f7d94d15c7bf5a92a63"
        "c4be5a02d63c4be2a12c62f4a95d62c7ae4d95d63c4be2a12d73c5be2a63d4bf5a92a63c4be5a12d73",
        "cdcc1c4000007040cdcc9c40", "cfd748ba8a7d0f22bcffaa2e74968cdeeb524316630d2aa71f989cb1860a74b3",
    ),
}  # fmt: skip

# bitsandbytes 0.50.2 on a CPU: the codes of ((i · 37 mod 101) - 50) / 32, the last of four rows zero; absmax 1.5625.
GOLDEN = {
    "nf4":
        "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af4c06d18e2a04c16e2"
        "9f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af" + "7" * 64,
    "fp4":
        "bf5a92a63c4be5a02d63c4be2a12d73f5a92a63d4bf5a92d63c4be5a12d73c5be2a63d4bf5a92d63c4be5a12d73c5be2a12d7bf5a92a"
        "63c4be5a02d63c4be2a12d73f5a92a63d4bf5a92d63c4be5a12d73c5be2a63d4bf5a92d63c4be5a12d73" + "0" * 64,
    "int8":
        "81df3d9af856b41270cd2b89e745a2005ebb1977d53390ee4caa0866c3217fdc3a98f654b10f6dcb2986e4429ffd5bb91775d2308eec"
        "4aa70563c01e7cda3895f351af0d6bc82684e2409dfb59b61472d02e8be947a50361be1c7ad73593f14fac0a68c62481df3d9af856b4"
        "1270cd2b89e745a2005ebb1977d53390ee4caa0866c3217fdc3a98f654b10f6dcb2986e4429ffd5bb91775d2308eec4aa70563c01e7c"
        "da3895f351af0d6bc82684e2409dfb59b61472d02e8be947a50361be1c7a" + "00" * 64,
}  # fmt: skip


def flat(codes: bytes, absmax: NDArray[np.float32], kind: str, shape: tuple[int, int]) -> NDArray[np.float32]:
    """The format's own words: high half first, blocks of 64 over the flattened matrix."""
    raw = np.frombuffer(codes, np.uint8)
    nibbles = np.stack([raw >> 4, raw & 15], -1).reshape(-1)[: shape[0] * shape[1]]
    table = decode_table(formats[TABLES[kind]]).astype(np.float32)
    return (table[nibbles] * np.repeat(absmax, 64)[: nibbles.size]).reshape(shape)


def four_bit(kind: str, shape: tuple[int, int], codes: bytes, absmax: NDArray[np.float32]) -> Tensors:
    """The tensors of one layer as the library saves them."""
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    return {
        f"{LAYER}.weight": np.frombuffer(codes, np.uint8).reshape(-1, 1),
        f"{LAYER}.weight.absmax": absmax,
        f"{LAYER}.weight.quant_map": decode_table(formats[TABLES[kind]]).astype(np.float32),
        f"{LAYER}.weight.quant_state.bitsandbytes__{kind}": np.frombuffer(
            json.dumps(state).encode(), np.uint8
        ),
    }


def config(**settings: Any) -> dict[str, Any]:
    return {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", **settings}}


@pytest.mark.parametrize("name", ["nf4", "fp4", "nf4_double"])
def test_four_bits_decode_to_the_librarys_values(name: str) -> None:
    """Bit for bit, also the down projection, of which two rows share a block."""
    folder = FOLDER / f"bitsandbytes_{name}"
    theirs, dtype = upstream(folder)
    assert {values.shape[1] % 64 for values in theirs.values()} == {0, 32}
    assert_same(decoded(folder, dtype), theirs)


def test_double_quantization_is_two_fp32_operations() -> None:
    """absmax = map[code] · nested[block // 256] + offset, for every block in its place."""
    folder = FOLDER / "bitsandbytes_nf4_double"
    state = load_file(folder / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        opened = open_coded(checkpoint)
        for stored in opened.contents.matrices:
            n, k = stored.shape
            at = f"{stored.module}.weight"
            facts = json.loads(state[f"{at}.quant_state.bitsandbytes__nf4"].tobytes())
            absmax = state[f"{at}.nested_quant_map"][state[f"{at}.absmax"]] * np.repeat(
                state[f"{at}.nested_absmax"], 256
            )[: state[f"{at}.absmax"].size] + np.float32(facts["nested_offset"])
            rows = stored.how.read(checkpoint, stored.place, (n, k), 0, n)
            at_columns = np.arange(n * k).reshape(n, k)[
                :, :: rows.packed.shape[1] * 2 // rows.scales.shape[1]
            ]
            np.testing.assert_array_equal(rows.scales, absmax[at_columns // 64])


def test_many_nested_blocks_in_chunks(tmp_path: Path) -> None:
    """More than 256 blocks, read from their middle on: rows find their block's scale of scales."""
    n, k, rng = 260, 96, np.random.default_rng(0)
    tensors = four_bit("nf4", (n, k), rng.bytes(n * k // 2), np.zeros(n * k // 64, np.float32))
    blocks = n * k // 64
    nested = {
        "weight.absmax": rng.integers(0, 256, blocks, np.uint8),
        "weight.nested_absmax": np.float32([0.5, 3.0]),
        "weight.nested_quant_map": np.linspace(-1, 1, 256).astype(np.float32),
    }
    tensors |= {f"{LAYER}.{name}": value for name, value in nested.items()}
    facts = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k], "nested_blocksize": 256,
        "nested_dtype": "float32", "nested_offset": 1.75,
    }  # fmt: skip
    name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
    tensors[name] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    model = toys.write(tmp_path / "model", tensors, config(load_in_4bit=True, bnb_4bit_use_double_quant=True))
    scales = nested["weight.nested_quant_map"][nested["weight.absmax"]]
    scales = scales * np.repeat(nested["weight.nested_absmax"], 256)[:blocks] + np.float32(1.75)
    wanted = flat(tensors[f"{LAYER}.weight"].tobytes(), scales, "nf4", (n, k))
    with Checkpoint.open(model) as checkpoint:
        opened = open_coded(checkpoint)
        ((_, coded),) = opened.coded(opened.modules[0])
        np.testing.assert_array_equal(coded.read(checkpoint, np.dtype("<f4"), 0, n), wanted)
        np.testing.assert_array_equal(coded.read(checkpoint, np.dtype("<f4"), 201, 255), wanted[201:255])


@pytest.mark.parametrize(("kind", "n", "k"), CROSSING)
def test_blocks_across_rows(tmp_path: Path, kind: str, n: int, k: int) -> None:
    """The library's own codes for widths that no block divides, odd ones too, to its own values."""
    codes, absmax, digest = CROSSING[kind, n, k]
    tensors = four_bit(kind, (n, k), bytes.fromhex(codes), np.frombuffer(bytes.fromhex(absmax), "<f4"))
    model = toys.write(tmp_path / "model", tensors, config(load_in_4bit=True))
    values = decoded(model)[LAYER]
    np.testing.assert_array_equal(
        values, flat(bytes.fromhex(codes), np.frombuffer(bytes.fromhex(absmax), "<f4"), kind, (n, k))
    )
    assert hashlib.sha256((values + 0.0).tobytes()).hexdigest() == digest
    i = np.arange(n * k)
    source = (((i * 37) % 101 - 50) / 40 * (1 + i // 50)).reshape(n, k)
    # Half of the widest gap of the table: from 2/3 to 1 in FP4, from -1 to -0.696 in NF4.
    bound = np.repeat(np.frombuffer(bytes.fromhex(absmax), "<f4"), 64)[: n * k].reshape(n, k) / 6
    assert (np.abs(values - source) <= bound * (1 + 1e-6)).all()
    with Checkpoint.open(model) as checkpoint:
        opened = open_coded(checkpoint)
        ((_, coded),) = opened.coded(opened.modules[0])
        for start in range(n):
            part = coded.read(checkpoint, np.dtype("<f4"), start, n)
            np.testing.assert_array_equal(part, values[start:])


def tiny() -> NDArray[np.float64]:
    """The input of the golden bytes below."""
    i = np.arange(4 * 64)
    return np.where(i < 3 * 64, ((i * 37) % 101 - 50) / 32, 0).reshape(4, 64)


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_bytes(tmp_path: Path, kind: str) -> None:
    """What the library wrote decodes to its input, within half of the widest gap of each table."""
    absmax = np.float32([1.5625, 1.5625, 1.5625, 0])
    if kind == "int8":
        codes = np.frombuffer(bytes.fromhex(GOLDEN[kind]), np.int8).reshape(4, 64)
        tensors: Tensors = {f"{LAYER}.weight": codes, f"{LAYER}.SCB": absmax}
        model = toys.write(tmp_path / "model", tensors, config(load_in_8bit=True))
        steps = 1 / 254
    else:
        tensors = four_bit(kind, (4, 64), bytes.fromhex(GOLDEN[kind]), absmax)
        # bnb_4bit_quant_storage may be a float dtype, which says nothing about the bytes.
        tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].reshape(-1).view("<f4")[:, None]
        model = toys.write(tmp_path / "model", tensors, config(load_in_4bit=True))
        steps = 1 / 6 if kind == "fp4" else (1 - 0.6961928009986877) / 2
    values = decoded(model)[LAYER]
    assert (np.abs(values - tiny()) <= 1.5625 * steps * (1 + 1e-6)).all()
    assert not values[3].any()


def test_int8_differs_by_the_order_of_two_products() -> None:
    """(q · SCB) · c there, q · (SCB · c) here: each within (1 ± u)² of the product, so 4u apart at most, u = 2^-24."""
    folder = FOLDER / "bitsandbytes_int8"
    theirs, dtype = upstream(folder)
    assert dtype == "fp32"
    ours, state = decoded(folder), load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    constant = np.float32(1) / np.float32(127)
    for name, values in ours.items():
        assert (np.abs(values - theirs[name]) <= 2.0**-22 * (1 + 2.0**-22) * np.abs(theirs[name])).all()
        scale = (state[f"{name}.SCB"] * constant)[:, None]
        np.testing.assert_array_equal(values, state[f"{name}.weight"] * scale)


def test_what_was_found() -> None:
    names = {stored.how.scheme.name for stored in contents(FOLDER / "bitsandbytes_nf4").matrices}
    assert names == {"nf4_b64", "nf4_g32"}
    found = contents(FOLDER / "bitsandbytes_int8")
    assert {stored.how.scheme.name for stored in found.matrices} == {"int8_channel"}
    assert {name.rsplit(".", 1)[-1] for name in found.taken} == {"weight_format"}


def test_to_plain_and_to_other_schemes(tmp_path: Path) -> None:
    """Plain is the decoded values rounded once; INT8 codes move as they are; NF4 moves when rounding is allowed."""
    folder = FOLDER / "bitsandbytes_nf4"
    convert(folder, tmp_path / "plain", "plain")
    plain, ours = load_file(tmp_path / "plain" / "model.safetensors"), decoded(folder, "bf16")
    source = load_file(folder / "model.safetensors")
    for name, values in ours.items():
        np.testing.assert_array_equal(plain[f"{name}.weight"].astype(np.float32), values)
    kept = {name for name in source if not any(name.startswith(f"{module}.weight") for module in ours)}
    assert set(plain) == kept | {f"{module}.weight" for module in ours}
    with pytest.raises(UsageError, match="no spelling for nf4"):
        convert(folder, tmp_path / "moved", "compressed-tensors")
    with pytest.raises(UsageError, match="without a second rounding"):
        convert(folder, tmp_path / "moved", "compressed-tensors", preset="mxfp4a16")
    convert(folder, tmp_path / "again", "compressed-tensors", preset="mxfp4a16", requantize=True)
    convert(FOLDER / "bitsandbytes_int8", tmp_path / "int8", "compressed-tensors")
    assert_same(decoded(tmp_path / "int8"), decoded(FOLDER / "bitsandbytes_int8"))
    with pytest.raises(UsageError, match="read and not written"):
        convert(folder, tmp_path / "never", "bitsandbytes")


def _state(**change: Any) -> Change:
    def apply(tensors: Tensors, settings: dict[str, Any]) -> None:
        name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
        facts = json.loads(tensors[name].tobytes()) | change
        tensors[name] = np.frombuffer(json.dumps(facts).encode(), np.uint8)

    return apply


def _drop(suffix: str) -> Change:
    return lambda tensors, settings: tensors.pop(f"{LAYER}.weight{suffix}")


def _put(suffix: str, value: NDArray[Any]) -> Change:
    return lambda tensors, settings: tensors.update({f"{LAYER}{suffix}": value})


def _set(**change: Any) -> Change:
    return lambda tensors, settings: settings["quantization_config"].update(change)


def _plain(tensors: Tensors, settings: dict[str, Any]) -> None:
    tensors.clear()
    tensors[f"{LAYER}.weight"] = np.zeros((4, 64), np.float16)


def _int8(scales: int) -> Change:
    def apply(tensors: Tensors, settings: dict[str, Any]) -> None:
        tensors.clear()
        tensors[f"{LAYER}.weight"] = np.zeros((4, 8), np.int8)
        tensors[f"{LAYER}.SCB"] = np.ones(scales, np.float32)

    return apply


def _unknown(tensors: Tensors, settings: dict[str, Any]) -> None:
    old = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
    tensors[old.replace("nf4", "af4")] = tensors.pop(old)


HOSTILE: dict[str, tuple[Change, tuple[str, ...]]] = {
    "no absmax": (_drop(".absmax"), (f"{LAYER}.weight.absmax", ".quant_map")),
    "no state": (_drop(".quant_state.bitsandbytes__nf4"), ("quant_state", "absmax")),
    "no codes": (_drop(""), (f"wanted: {LAYER}.weight\n", "absmax")),
    "an unknown type": (_unknown, ("quant_state", "nf4 or fp4")),
    "another shape": (_state(shape=[5, 64]), ("128 bytes of codes", "160 bytes")),
    "three axes": (_state(shape=[2, 2, 64]), ("two axes", "[2, 2, 64]")),
    "another blocksize": (_state(blocksize=32), ("absmax F32 [4]", "F32 [8]")),
    "a state of another type": (_state(quant_type="fp4"), ('"fp4"', "quant_type nf4")),
    "a state that is no JSON": (
        _put(".weight.quant_state.bitsandbytes__nf4", np.frombuffer(b"{]", np.uint8)), ("quant_state", "blocksize")
    ),
    "another table": (_put(".weight.quant_map", np.linspace(-1, 1, 16).astype("<f4")), ("-0.86", "-0.69")),
    "absmax in bytes": (_put(".weight.absmax", np.zeros(4, np.uint8)), ("U8", "F32")),
    "half of double quantization": (
        _put(".weight.nested_absmax", np.zeros(1, "<f4")), ("nested_absmax", "nested_offset")
    ),
    "a config of 8 bits": (_set(load_in_4bit=False, load_in_8bit=True), ("nf4", "load_in_8bit")),
    "a config of fp4": (_set(bnb_4bit_quant_type="fp4"), ("nf4", "bnb_4bit_quant_type fp4")),
    "a config of double quantization": (_set(bnb_4bit_use_double_quant=True), ("fp32", "use_double_quant True")),
    "a config that keeps the layer": (_set(llm_int8_skip_modules=["gate_proj"]), (LAYER, "'gate_proj'")),
    "nothing quantized": (_plain, ("bitsandbytes", "absmax")),
    "no config": (lambda tensors, settings: settings.pop("quantization_config"), ("absmax", "quantization_config")),
    "int8 under a config of 4 bits": (
        _int8(4),
        ("SCB", "load_in_4bit"),
    ),
    "int8 with too few scales": (
        _int8(3),
        ("SCB F32 [3]", "SCB [N]"),
    ),
    "a kernel's own column order": (
        lambda t, s: (_int8(4)(t, s), _set(load_in_4bit=False)(t, s), _put(".weight_format", np.uint8([2]))(t, s)),
        ("weight_format 2", "row by row"),
    ),
    "pieces of a stack": (_put(".absmax", np.zeros(4, "<f4")), (f"{LAYER}.absmax", "...weight")),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_contradictions_name_both_sides(tmp_path: Path, case: str) -> None:
    change, words = HOSTILE[case]
    tensors = four_bit("nf4", (4, 64), bytes(128), np.ones(4, np.float32))
    settings = config(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False)
    change(tensors, settings)
    model = toys.write(tmp_path / "model", tensors, settings)
    with Checkpoint.open(model) as checkpoint, pytest.raises(CheckpointError) as refused:
        open_coded(checkpoint)
    for word in words:
        assert word in str(refused.value), str(refused.value)


def test_a_config_without_a_method_is_the_librarys(tmp_path: Path) -> None:
    settings = config(load_in_4bit=True)
    del settings["quantization_config"]["quant_method"]
    tensors = four_bit("nf4", (4, 64), bytes(128), np.ones(4, np.float32))
    found = contents(toys.write(tmp_path / "model", tensors, settings))
    assert found.container == "bitsandbytes"


def test_groups_divide_blocks_and_rows() -> None:
    for k, group in ((64, 64), (128, 64), (96, 32), (100, 4), (35, 1), (32, 32)):
        assert spell(NF4, k, 64).scheme.group == group
