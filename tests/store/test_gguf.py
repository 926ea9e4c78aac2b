"""GGUF files: read against the gguf package, written byte for byte as it writes, and refused when they lie."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from demo.source import smollm2_gguf

from narrowcast.errors import HeaderError, NarrowcastError, UsageError
from narrowcast.store.gguf import GGML_TYPES, GGUFFile, is_gguf
from narrowcast.store.gguf_writer import GGUFSpec, gguf_writer

FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "a.count": 7,
    "a.negative": -7,
    "a.large": 2**40,
    "a.eps": 1e-05,
    "a.flag": True,
    "a.text": "grüße ▁",
    "a.words": ["x", "", "▁y"],
    "a.scores": [0.5, -1000.0],
    "a.types": [1, 3, -1],
    "a.flags": [True, False],
    "a.double": np.float64(0.1),
    "a.bytes": np.arange(3, dtype=np.uint8),
}
SPECS = [
    GGUFSpec("b.norm", GGML_TYPES["F32"], (5,)),
    GGUFSpec("a.weight", GGML_TYPES["Q8_0"], (3, 64)),
    GGUFSpec("c.half", GGML_TYPES["F16"], (2, 3)),
    GGUFSpec("d.experts", GGML_TYPES["MXFP4"], (2, 3, 32)),
]


def data(spec: GGUFSpec) -> np.ndarray[Any, Any]:
    """Bytes of a tensor, [..., bytes of a row]; floats are kept finite, which the package's reader does not ask."""
    rng = np.random.default_rng(len(spec.name))
    return rng.integers(0, 100, (*spec.shape[:-1], spec.type.row_bytes(spec.shape[-1])), np.uint8)


def write(path: Path, fields: dict[str, Any] = FIELDS, specs: list[GGUFSpec] = SPECS) -> Path:
    with gguf_writer(path, specs, fields) as writer:
        for spec in reversed(specs):  # any order
            writer.write(spec.name, data(spec))
        writer.finish()
    return path


def by_the_package(path: Path) -> Path:
    """The same file by the package's own writer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_int32("a.negative", -7)
    writer.add_uint64("a.large", 2**40)
    writer.add_float32("a.eps", 1e-05)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "grüße ▁")
    writer.add_array("a.words", ["x", "", "▁y"])
    writer.add_array("a.scores", [0.5, -1000.0])
    writer.add_array("a.types", [1, 3, -1])
    writer.add_array("a.flags", [True, False])
    writer.add_float64("a.double", 0.1)
    writer.add_key_value("a.bytes", [0, 1, 2], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8)
    for spec in SPECS:
        raw = data(spec)
        values = raw.view(f"<f{spec.type.nbytes}") if spec.type.dtype else raw
        writer.add_tensor(spec.name, values, raw_dtype=gguf.GGMLQuantizationType(spec.type.number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_types_are_those_of_the_package() -> None:
    for name, row in GGML_TYPES.items():
        number = gguf.GGMLQuantizationType[name]
        assert row.number == number
        assert (row.block, row.nbytes) == gguf.GGML_QUANT_SIZES[number]
    assert set(GGML_TYPES) >= set(gguf.GGMLQuantizationType.__members__)


def test_written_byte_for_byte_as_the_package_writes(tmp_path: Path) -> None:
    ours, theirs = write(tmp_path / "ours.gguf"), by_the_package(tmp_path / "theirs.gguf")
    assert ours.read_bytes() == theirs.read_bytes()
    assert is_gguf(ours)
    assert not is_gguf(tmp_path)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path / "a.gguf")) as file:
        assert list(file.tensors) == [spec.name for spec in SPECS]
        for spec in SPECS:
            tensor = file.tensors[spec.name]
            assert (tensor.type, tensor.shape) == (spec.type, spec.shape)
            assert np.array_equal(file.array(spec.name).view(np.uint8).ravel(), data(spec).ravel())
        rows = file.rows("d.experts", 1, 5)  # of both experts
        assert np.array_equal(rows, data(SPECS[3]).reshape(6, 17)[1:5])
        read = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in file.fields.items()}
    wanted = FIELDS | {"a.double": 0.1, "a.bytes": [0, 1, 2]}
    assert read == wanted
    assert list(read) == list(wanted)


def test_a_real_file_reads_as_by_the_package() -> None:
    reader = gguf.GGUFReader(smollm2_gguf())
    with GGUFFile(smollm2_gguf()) as file:
        assert [*file.tensors] == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            ours = file.tensors[tensor.name]
            assert ours.shape == tuple(tensor.shape[::-1].tolist())
            assert (ours.offset, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)
        last = reader.tensors[-1]
        assert np.array_equal(file.array(last.name), last.data)
        for key, field in reader.fields.items():
            if key.startswith("GGUF."):
                continue
            ours, theirs = file.fields[key], field.contents()
            if isinstance(theirs, float):
                theirs, ours = np.float32(theirs), np.float32(ours)
            assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs, key
        assert file.fields["llama.attention.layer_norm_rms_epsilon"] == 1e-05


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content.encode())) + content.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, sizes: list[int], number: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, offset)


def raw(
    pairs: list[bytes] = (),
    infos: list[bytes] = (),
    content: bytes = b"",
    *,
    version: int = 3,
    counts: Any = None,
) -> bytes:
    tensors, keys = counts or (len(infos), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32) + content


U32, TEXTS = 4, struct.pack("<I", 8)
GOOD = info("w", [8])  # F32 [8], bytes 0 to 32
CASES = [
    ("empty", b"", ["not a GGUF file", "empty"]),
    ("two bytes", b"GG", ["not a GGUF file"]),
    ("safetensors", struct.pack("<Q", 2) + b"{}", ["not a GGUF file", "begins with 'GGUF'"]),
    ("a zip", b"PK\x03\x04" + bytes(40), ["not a GGUF file", "zip"]),
    ("magic alone", b"GGUF", ["cannot be read", "version 2 or 3"]),
    ("version 1", raw(version=1), ["cannot be read", "version 2 or 3"]),
    ("version 4", raw(version=4), ["cannot be read"]),
    ("big endian", raw(version=3 << 24), ["big-endian"]),
    ("no counts", b"GGUF" + struct.pack("<I", 3), ["ends inside the number of tensors"]),
    ("2^60 tensors", raw(counts=(2**60, 0)), ["claims more", str(2**60)]),
    ("2^60 pairs", raw(counts=(0, 2**60)), ["claims more", str(2**60)]),
    ("a long key", raw([struct.pack("<QI", 2**63, 4)]), ["claims more", "metadata key"]),
    ("a key not UTF-8", raw([struct.pack("<Q", 1) + b"\xff" + struct.pack("<II", 4, 1)]), ["not UTF-8"]),
    ("a key twice", raw([pair("k", U32, bytes(4))] * 2), ["'k' twice"]),
    ("a value of type 13", raw([pair("k", 13, bytes(8))]), ["'k'", "unknown type", "13"]),
    ("2^61 items", raw([pair("k", 9, struct.pack("<IQ", 0, 2**61))]), ["claims more", "'k'"]),
    ("2^61 texts", raw([pair("k", 9, TEXTS + struct.pack("<Q", 2**61))]), ["claims more", "'k'"]),
    ("nested", raw([pair("k", 9, struct.pack("<IQ", 9, 1) + bytes(20))]), ["'k'", "array of arrays"]),
    ("alignment 0", raw([pair("general.alignment", U32, bytes(4))]), ["alignment is impossible", "0"]),
    ("alignment 3", raw([pair("general.alignment", U32, struct.pack("<I", 3))]), ["power of two"]),
    ("alignment text", raw([pair("general.alignment", 8, text("x"))]), ["alignment is impossible"]),
    ("no axes", raw([], [info("w", [])]), ["'w'", "number of axes", "0"]),
    ("five axes", raw([], [info("w", [1] * 5)], bytes(4)), ["'w'", "number of axes", "5"]),
    ("2^32-1 axes", raw([], [text("w") + b"\xff\xff\xff\xff" + bytes(20)]), ["'w'", "number of axes"]),
    ("size 0", raw([], [info("w", [0, 8])]), ["'w'", "impossible shape"]),
    ("overflow", raw([], [info("w", [2**40, 2**40])]), ["'w'", "impossible shape"]),
    ("type 4", raw([], [info("w", [8], 4)], bytes(32)), ["'w' has an unknown type", "4", "Q8_0"]),
    ("ragged", raw([], [info("w", [33], 8)], bytes(64)), ["'w' does not fill whole blocks of Q8_0", "33"]),
    ("unaligned", raw([], [info("w", [8], 0, 4)], bytes(64)), ["'w' is not aligned", "4"]),
    ("far away", raw([], [info("w", [8], 0, 2**62)], bytes(32)), ["cut short", "'w'"]),
    ("cut", raw([], [GOOD], bytes(31)), ["cut short", "'w'"]),
    ("overlap", raw([], [info("w", [16]), info("v", [8], 0, 32)], bytes(96)), ["'v' overlaps 'w'"]),
    ("a name twice", raw([], [GOOD, info("w", [8], 0, 32)], bytes(64)), ["'w' is in the file twice"]),
]


@pytest.mark.parametrize(("content", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_lie_is_named(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(HeaderError) as error:
        GGUFFile(path)
    for word in [*words, str(path)]:
        assert word in str(error.value)


def test_the_smallest_good_files(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw([], [GOOD], bytes(32)))
    with GGUFFile(path) as file:
        assert file.array("w").shape == (8,)
    path.write_bytes(raw(version=2))
    GGUFFile(path).close()


def test_damage_at_random_is_refused_or_read(tmp_path: Path) -> None:
    """Any byte changed, any cut: a NarrowcastError or a file whose tensors can be read, and nothing else."""
    whole = write(tmp_path / "whole.gguf").read_bytes()
    header = len(whole) - sum(spec.nbytes + -spec.nbytes % 32 for spec in SPECS)
    rng, path = random.Random(0), tmp_path / "damaged.gguf"
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(header)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged[: rng.choice((len(whole), rng.randrange(len(whole))))])
        try:
            with GGUFFile(path) as file:
                for name in file.tensors:
                    file.array(name)
        except NarrowcastError:
            pass


def test_parts_of_a_split_model_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", FIELDS | {"split.no": 1, "split.count": 3})
    with pytest.raises(UsageError, match="part 2 of 3"):
        GGUFFile(path)


def test_no_file_and_no_value_of_a_kind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a \.gguf file"):
        GGUFFile(tmp_path / "none.gguf")
    for value in ([], None, {"a": 1}, [1, "x"], np.zeros((2, 2)), np.complex64(1), "\ud800"):
        with pytest.raises(UsageError):
            gguf_writer(tmp_path / "b.gguf", SPECS, {"k": value})
    with pytest.raises(UsageError, match="whole blocks"):
        gguf_writer(tmp_path / "b.gguf", [GGUFSpec("w", GGML_TYPES["Q4_0"], (2, 33))], {})
    with pytest.raises(UsageError, match="taken"):
        gguf_writer(tmp_path / "b.gguf", [SPECS[0], SPECS[0]], {})
    assert not list(tmp_path.iterdir())
