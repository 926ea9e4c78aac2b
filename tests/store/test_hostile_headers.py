"""Headers that lie, one by one and at random: always a HeaderError that names file, tensor and numbers."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path

import pytest
import safetensors

from narrowcast.errors import HeaderError, InputError, UsageError
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Reader, Spec, layout, read_header
from store.raw_files import put, raw, tensor

GOOD = tensor()  # BF16 [2, 4], bytes 0 to 16
ENTRY = '{"dtype":"BF16","shape":[2,4],"data_offsets":[0,16]}'
BIG = 2**63

# (what is wrong, the file, what the message must say beside the file's name)
CASES = [
    ("empty", b"", ["empty", "0 bytes"]),
    ("one byte", b"\x01", ["too short", "1 bytes"]),
    ("seven bytes", bytes(7), ["too short", "7 bytes"]),
    ("length alone", struct.pack("<Q", 50), ["ends inside its header", "8 bytes", "58 bytes"]),
    (
        "length 2^64-1",
        raw({"w": GOOD}, bytes(16), 2**64 - 1),
        ["impossible length", str(2**64 - 1), "100000000"],
    ),
    ("length over the cap", raw({}, b"", 100_000_001), ["impossible length", "100000001"]),
    ("length at the cap", raw({}, b"", 100_000_000), ["ends inside its header", "100000008"]),
    ("length one more", raw({}, b"", 3), ["ends inside its header", "10 bytes", "11 bytes"]),
    ("length 0", raw("", bytes(20), 0), ["not a JSON object", "''"]),
    ("zeros", bytes(4096), ["not a JSON object"]),
    ("not UTF-8", raw(b'{"w\xff":{}}'), ["not UTF-8 at byte 11", "0xff"]),
    ("UTF-16", raw('{"w":1}'.encode("utf-16"), b""), ["not UTF-8"]),
    ("surrogate bytes", raw(b'{"\xed\xa0\x80":{}}'), ["not UTF-8 at byte 10"]),
    ("byte order mark", raw(b"\xef\xbb\xbf{}"), ["not a JSON object"]),
    ("not JSON", raw('{"w":'), ["not JSON"]),
    ("two objects", raw("{}{}"), ["not JSON", "Extra data"]),
    ("single quotes", raw("{'w':1}"), ["not JSON"]),
    ("a control character", raw('{"w\n":1}'), ["not JSON", "control character"]),
    ("a list", raw("[1]"), ["not a JSON object", "[1]"]),
    ("a number", raw("12"), ["not a JSON object", "12"]),
    ("a leading space", raw(' {"w":' + ENTRY + "}", bytes(16)), ["not a JSON object", "' {"]),
    ("deep nesting", raw('{"w":' + "[" * 200_000), ["nests too deeply"]),
    ("a giant integer", raw('{"w":' + "9" * 5000 + "}"), ["not JSON", "5000 digits"]),
    ("NaN", raw('{"w":NaN}'), ["not JSON", "NaN"]),
    ("a name twice", raw(f'{{"w":{ENTRY},"w":{ENTRY}}}', bytes(16)), ["'w' more than once", "2 entries"]),
    (
        "a key twice",
        raw('{"w":{"dtype":"U8","dtype":"I8","shape":[],"data_offsets":[0,1]}}'),
        ["'dtype' more than"],
    ),
    ("metadata twice", raw('{"__metadata__":{},"__metadata__":{}}'), ["'__metadata__' more than once"]),
    ("metadata a list", raw({"__metadata__": []}), ["__metadata__", "list"]),
    ("metadata a number", raw({"__metadata__": {"a": "1", "b": 2}}), ["__metadata__", "'b': int"]),
    ("metadata nested", raw({"__metadata__": {"b": {}}}), ["__metadata__", "'b': dict"]),
    ("entry a list", raw({"w": [1]}), ["'w'", "no entry object", "list"]),
    ("entry null", raw({"w": None}), ["'w'", "no entry object"]),
    ("no dtype", raw({"w": {"shape": [1], "data_offsets": [0, 1]}}), ["'w' has no dtype"]),
    ("no shape", raw({"w": {"dtype": "U8", "data_offsets": [0, 1]}}), ["'w' has no shape"]),
    ("no offsets", raw({"w": {"dtype": "U8", "shape": [1]}}), ["'w' has no data_offsets"]),
    ("unknown dtype", raw({"w": tensor("F12")}, bytes(16)), ["'w' has an unknown dtype", "F12", "F8_E4M3"]),
    ("lower case dtype", raw({"w": tensor("bf16")}, bytes(16)), ["'w' has an unknown dtype", "bf16"]),
    ("dtype a number", raw({"w": tensor(16)}, bytes(16)), ["'w' has an unknown dtype", "16"]),
    ("dtype a list", raw({"w": tensor(["BF16"])}, bytes(16)), ["'w' has an unknown dtype"]),
    ("negative size", raw({"w": tensor(shape=[-2, -4])}, bytes(16)), ["'w'", "impossible size", "-2"]),
    ("size true", raw({"w": tensor(shape=[True, 8])}, bytes(16)), ["'w'", "impossible size", "True"]),
    ("size 2.0", raw({"w": tensor(shape=[2.0, 4])}, bytes(16)), ["'w'", "impossible size", "2.0"]),
    ("size 1e400", raw('{"w":' + ENTRY.replace("2,4", "1e400") + "}"), ["'w'", "impossible size", "inf"]),
    ("size a string", raw({"w": tensor(shape=["2", 4])}, bytes(16)), ["'w'", "impossible size", "'2'"]),
    ("size 2^63", raw({"w": tensor(shape=[BIG, 0], end=0)}), ["'w'", "impossible size", str(BIG)]),
    ("overflow", raw({"w": tensor(shape=[2**32, 2**32], end=0)}), ["'w'", "beyond any memory", str(2**32)]),
    ("overflow times 0", raw({"w": tensor(shape=[2**40, 2**40, 0], end=0)}), ["'w'", "beyond any memory"]),
    ("65 axes", raw({"w": tensor("U8", [1] * 65, 0, 1)}, b"1"), ["'w' has too many axes", "65", "64"]),
    ("shape a number", raw({"w": tensor(shape=8)}, bytes(16)), ["'w'", "no list", "8"]),
    ("shape null", raw({"w": tensor(shape=None)}, bytes(16)), ["'w'", "no list", "None"]),
    ("one offset", raw({"w": GOOD | {"data_offsets": [0]}}, bytes(16)), ["'w'", "no pair", "[0]"]),
    ("three offsets", raw({"w": GOOD | {"data_offsets": [0, 8, 16]}}, bytes(16)), ["'w'", "no pair"]),
    ("offsets an object", raw({"w": GOOD | {"data_offsets": {"0": 16}}}, bytes(16)), ["'w'", "no pair"]),
    ("offset a float", raw({"w": tensor(end=16.0)}, bytes(16)), ["'w'", "no pair", "16.0"]),
    ("offset false", raw({"w": tensor(begin=False)}, bytes(16)), ["'w'", "no pair", "False"]),
    ("offsets reversed", raw({"w": tensor(begin=16, end=0)}, bytes(16)), ["'w'", "reversed", "[16, 0]"]),
    ("offset negative", raw({"w": tensor(begin=-16, end=0)}, bytes(16)), ["'w'", "negative", "[-16, 0]"]),
    ("too few bytes", raw({"w": tensor(end=15)}, bytes(15)), ["'w'", "15 bytes", "16 bytes", "BF16 [2, 4]"]),
    ("too many bytes", raw({"w": tensor(end=17)}, bytes(17)), ["'w'", "17 bytes", "16 bytes"]),
    ("half a byte", raw({"w": tensor("F4", [3], 0, 2)}, bytes(2)), ["'w'", "whole bytes", "12 bits"]),
    (
        "half an F6 byte",
        raw({"w": tensor("F6_E2M3", [3], 0, 2)}, bytes(2)),
        ["'w'", "whole bytes", "18 bits"],
    ),
    (
        "overlap",
        raw({"a": tensor("U8", [8], 0, 8), "b": tensor("U8", [8], 7, 15)}, bytes(15)),
        ["'b' overlaps 'a'", "data byte 7", "data byte 8"],
    ),
    (
        "same bytes",
        raw({"a": tensor("U8", [8], 0, 8), "b": tensor("U8", [8], 0, 8)}, bytes(8)),
        ["'b' overlaps 'a'", "data byte 0", "data byte 8"],
    ),
    (
        "nothing inside something",
        raw({"a": tensor("U8", [8], 0, 8), "b": tensor("U8", [0], 4, 4)}, bytes(8)),
        ["'b' overlaps 'a'", "data byte 4"],
    ),
    (
        "hole",
        raw({"a": tensor("U8", [8], 0, 8), "b": tensor("U8", [8], 9, 17)}, bytes(17)),
        ["'b' leaves a hole after 'a'", "data byte 9", "data byte 8"],
    ),
    (
        "hole at the start",
        raw({"a": tensor("U8", [8], 1, 9)}, bytes(9)),
        ["'a' leaves a hole after the start"],
    ),
    ("trailing bytes", raw({"w": GOOD}, bytes(19)), ["3 bytes that belong to no tensor", "after|ends"]),
    ("data without tensors", raw({}, bytes(5)), ["5 bytes that belong to no tensor"]),
    ("cut short", raw({"w": GOOD}, bytes(9)), ["cut short", "'w'", "7 are missing"]),
    ("no data", raw({"w": GOOD}), ["cut short", "'w'", "16 are missing"]),
    (
        "terabytes claimed",
        raw({"w": tensor("U8", [2**45], 0, 2**45)}, bytes(16)),
        ["cut short", str(2**45 - 16)],
    ),
    ("zip", b"PK\x03\x04" + bytes(600), ["zip archive", "pickle", "save_pretrained"]),
    ("pickle 2", b"\x80\x02}q\x00" + bytes(600), ["pickle"]),
    ("legacy torch", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(600), ["pickle"]),
    ("GGUF", b"GGUF\x03\x00\x00\x00" + bytes(600), ["GGUF"]),
    (
        "git-LFS pointer",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 4976698672\n",
        ["git-LFS pointer", "4976698672 bytes", "git lfs pull"],
    ),
    ("HTML", b"\n<!DOCTYPE html>\n<html><body>401</body></html>", ["HTML"]),
    ("XML", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', ["XML"]),
    ("an index", b'{\n "metadata": {"total_size": 3}, "weight_map": {}}', ["JSON text"]),
    ("HDF5", b"\x89HDF\r\n\x1a\n" + bytes(600), ["HDF5"]),
    ("npy", b"\x93NUMPY\x01\x00" + bytes(600), ["npy"]),
    ("gzip", b"\x1f\x8b\x08\x00" + bytes(600), ["gzip"]),
]


@pytest.mark.parametrize(("content", "says"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_lies_are_named(tmp_path, content, says) -> None:
    path = put(tmp_path, content, "shard-7.safetensors")
    with pytest.raises(HeaderError) as caught:
        read_header(path)
    message = str(caught.value)
    assert "shard-7.safetensors" in message
    for words in says:
        assert re.search(words if "|" in words else re.escape(words), message), message
    with pytest.raises(HeaderError, match=re.escape(caught.value.problem)):
        Reader(path)


def test_the_package_refuses_them_too_except_where_we_are_stricter() -> None:
    """Whatever the package accepts and we refuse is one of these, on purpose."""
    stricter = set()
    for what, content, _ in CASES:
        try:
            safetensors.deserialize(content)
        except Exception:
            continue
        stricter.add(what)
    assert stricter == {"a leading space", "a name twice", "65 axes", "size 2^63"}


def test_deep_nesting_and_giants_stay_cheap(tmp_path) -> None:
    """A claim of terabytes allocates nothing: the address space may not even grow by 64 MB."""
    import resource

    path = put(tmp_path, raw({"w": tensor("U8", [2**45], 0, 2**45)}, bytes(16)))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, hard))
    try:
        with pytest.raises(HeaderError, match="cut short"):
            read_header(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_files_that_cannot_be_opened(tmp_path) -> None:
    import os

    with pytest.raises(UsageError, match="no such file"):
        read_header(tmp_path / "x.safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match="symlink to nothing"):
        read_header(tmp_path / "link")
    with pytest.raises(UsageError, match="not a regular file"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        read_header(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match="cannot be read"):
        read_header(tmp_path / "loop")


def small_file() -> bytes:
    specs = [
        Spec("model.a.weight", DTYPES["BF16"], (2, 4)),
        Spec("model.b.weight_packed", DTYPES["F4"], (3, 2)),
        Spec("c", DTYPES["F8_E4M3"], (5,)),
        Spec("d", DTYPES["I64"], ()),
    ]
    placed = layout(specs, {"format": "pt"})
    return placed.header + bytes(range(placed.size - len(placed.header)))


def test_truncation_at_every_byte(tmp_path) -> None:
    content = small_file()
    for size in range(len(content)):
        path = put(tmp_path, content[:size])
        with pytest.raises(HeaderError) as caught:
            read_header(path)
        expected = f"{size} bytes"
        assert expected in str(caught.value)
        if size >= 8:
            assert "wanted" in str(caught.value)


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_is_refused_or_read_as_the_package_reads_it(tmp_path, seed) -> None:
    """Nothing but HeaderError comes out; what we accept, the package reads as the same tensors."""
    generator = random.Random(seed)
    original = small_file()
    header_end = 8 + int.from_bytes(original[:8], "little")
    accepted = refused = 0
    for _ in range(700):
        content = bytearray(original)
        for _ in range(generator.choice((1, 1, 1, 2, 4))):
            at = generator.randrange(header_end)
            action = generator.randrange(3)
            if action == 0:
                content[at] = generator.randrange(256)
            elif action == 1:
                content[at] = generator.choice(b'0123456789,:[]{}" -.eE')
            else:
                content[at] ^= 1 << generator.randrange(8)
        path = put(tmp_path, bytes(content))
        try:
            entries = read_header(path).entries
        except HeaderError as error:
            refused += 1
            ours = error.problem
            entries = None
        try:
            theirs = {
                name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
                for name, t in safetensors.deserialize(bytes(content))
            }
        except Exception:
            assert entries is None
            continue
        if entries is None:  # a mutated key of an entry can collide with nothing else here
            assert re.search(r"more than once|not a JSON object", ours), ours
            continue
        accepted += 1
        assert {
            name: (e.dtype.name, e.shape, bytes(content[e.offset : e.offset + e.nbytes]))
            for name, e in entries.items()
        } == theirs
    assert accepted > 20
    assert refused > 300
