"""Reader and writer against the safetensors package, in both directions and byte for byte."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from narrowcast.errors import HeaderError, StorageError, UsageError
from narrowcast.store.dtypes import DTYPES, nbytes
from narrowcast.store.safetensors import Reader, Spec, Writer, layout, read_header
from store.raw_files import package_spec, put, raw, tensor

SUB_BYTE = {name for name, dtype in DTYPES.items() if dtype.packed}


def write(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]], metadata=None) -> Path:
    path.unlink(missing_ok=True)
    specs = [Spec(name, DTYPES[dtype], shape) for name, (dtype, shape, _) in tensors.items()]
    with Writer(path, specs, metadata) as writer:
        for name, (_, _, data) in tensors.items():
            writer.write(name, data)
        writer.finish()
    return path


def pattern(dtype: str, shape: tuple[int, ...], seed: int = 0) -> bytes:
    size = nbytes(DTYPES[dtype], shape)
    low, high = (0, 2) if dtype == "BOOL" else (0, 256)
    return np.random.default_rng(seed).integers(low, high, size, dtype=np.uint8).tobytes()


@st.composite
def tensor_sets(draw):
    """Named tensors of random dtypes and shapes with random bytes; names are any text that JSON can carry."""
    names = draw(
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), unique=True, max_size=6)
    )
    tensors = {}
    for name in names:
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        if dtype in SUB_BYTE:
            shape = (*shape, 8)
        tensors[name] = (dtype, shape, pattern(dtype, shape, draw(st.integers(0, 99))))
    return tensors


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    tensors=tensor_sets(),
    metadata=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.text(st.characters(exclude_categories=["Cs"])),
        max_size=3,
    ),
)
def test_the_package_reads_what_we_write_and_we_read_it_back(tmp_path, tensors, metadata) -> None:
    path = write(tmp_path / "x.safetensors", tensors, metadata)
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    assert {n: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for n, t in theirs.items()} == tensors
    with safetensors.safe_open(path, "np") as file:
        assert (file.metadata() or {}) == metadata
    with Reader(path) as reader:
        assert reader.metadata == metadata
        assert set(reader.entries) == set(tensors)
        for name, (dtype, shape, data) in tensors.items():
            entry, array = reader.entries[name], reader.array(name)
            assert (entry.dtype.name, entry.shape, entry.nbytes) == (dtype, shape, len(data))
            assert array.tobytes() == data
            assert array.flags.aligned
            assert not array.flags.writeable
            if dtype not in SUB_BYTE:
                assert array.shape == shape
            buffer = bytearray(len(data))
            reader.read_into(name, buffer)
            assert buffer == data


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_one_file_per_dtype_is_the_package_s_file(tmp_path, dtype) -> None:
    shape, data = (3, 16), pattern(dtype, (3, 16))
    path = write(tmp_path / "x.safetensors", {"a.weight": (dtype, shape, data)}, {"format": "pt"})
    if DTYPES[dtype].torch is None:  # no name in the package's Python interface: it can read it only
        assert safetensors.deserialize(path.read_bytes())[0][1]["dtype"] == dtype
        return
    spec = package_spec(DTYPES[dtype], shape, np.frombuffer(data, np.uint8))
    assert path.read_bytes() == bytes(safetensors.serialize({"a.weight": spec}, {"format": "pt"}))


def test_mixed_dtypes_in_any_order_are_the_package_s_file(tmp_path) -> None:
    arrays = {
        "z": np.arange(3, dtype=np.float32),
        "a": np.arange(7, dtype=np.uint8),
        "scalar": np.array(1.5),
        'odd "näme"/\x01\x7f': np.ones(3, bool),
        "empty": np.empty((0, 4), np.float16),
        "c": np.arange(4, dtype=np.complex64),
        "b": np.arange(6, dtype=np.int16).reshape(2, 3),
        "u": np.arange(6, dtype=np.uint64),
    }
    names = {"float32": "F32", "uint8": "U8", "float64": "F64", "bool": "BOOL", "float16": "F16"}
    names |= {"complex64": "C64", "int16": "I16", "uint64": "U64"}
    tensors = {name: (names[x.dtype.name], x.shape, x.tobytes()) for name, x in arrays.items()}
    expected = safetensors.numpy.save(arrays)
    assert write(tmp_path / "x.safetensors", tensors).read_bytes() == expected
    backwards = dict(reversed(tensors.items()))
    assert write(tmp_path / "x.safetensors", backwards).read_bytes() == expected


def test_we_read_torch_files(tmp_path) -> None:
    bits = torch.randint(0, 256, (6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tensors = {"float4_e2m1fn_x2": bits.clone().view(torch.float4_e2m1fn_x2)}
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "bfloat16",
    ):
        tensors[name] = bits.clone().view(getattr(torch, name))
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    with Reader(tmp_path / "x.safetensors") as reader:
        assert reader.metadata == {"format": "pt"}
        for name, value in tensors.items():
            assert reader.entries[name].dtype.torch == name
            assert reader.array(name).tobytes() == value.view(torch.uint8).numpy().tobytes()
        assert reader.entries["float4_e2m1fn_x2"].shape == (6, 16)


def test_torch_reads_ours(tmp_path) -> None:
    shape = (4, 8)
    tensors = {n: (n, shape, pattern(n, shape)) for n, d in DTYPES.items() if d.torch}
    theirs = safetensors.torch.load_file(write(tmp_path / "x.safetensors", tensors))
    for name, (dtype, _, data) in tensors.items():
        assert theirs[name].dtype == getattr(torch, DTYPES[dtype].torch)
        assert theirs[name].view(torch.uint8).numpy().tobytes() == data


def test_rows_are_slices_of_the_flattened_matrix(tmp_path) -> None:
    shape, data = (3, 4, 6), pattern("BF16", (3, 4, 6))
    expected = np.frombuffer(data, "<u2").reshape(12, 6)
    tensors = {
        "w": ("BF16", shape, data),
        "v": ("F32", (5,), pattern("F32", (5,))),
        "s": ("F64", (), bytes(8)),
    }
    tensors["p"] = ("F4", (3, 6), pattern("F4", (3, 6)))
    tensors["q"] = ("F4", (2, 3), pattern("F4", (2, 3)))
    with Reader(write(tmp_path / "x.safetensors", tensors)) as reader:
        for first in range(13):
            for last in range(first, 13):
                got = reader.rows("w", first, last)
                assert np.array_equal(got, expected[first:last])
                assert got.flags.writeable
                assert got.flags.owndata
        assert reader.rows("v", 0, 1).shape == (1, 5)
        assert reader.rows("s", 0, 1).shape == (1, 1)
        assert reader.rows("p", 1, 3).tobytes() == tensors["p"][2][3:]
        with pytest.raises(UsageError, match=r"'q'.*whole bytes"):
            reader.rows("q", 0, 1)
        with pytest.raises(UsageError, match=r"'w'(.|\n)*got: 5:13(.|\n)*within 0:12"):
            reader.rows("w", 5, 13)
        with pytest.raises(UsageError, match="no tensor 'x'"):
            reader.rows("x", 0, 1)


def test_read_into_refuses_what_it_cannot_fill(tmp_path) -> None:
    with Reader(write(tmp_path / "x.safetensors", {"w": ("U8", (10,), bytes(range(10)))})) as reader:
        part = np.zeros(4, np.uint8)
        reader.read_into("w", part, 3)
        assert part.tolist() == [3, 4, 5, 6]
        reader.read_into("w", np.empty(0, np.uint8), 10)
        for start in (-1, 7):
            with pytest.raises(UsageError, match=f"bytes {start} to {start + 4}(.|\n)*within 0 to 10"):
                reader.read_into("w", part, start)
        for unfit in (bytes(4), np.zeros((4, 4), np.uint8)[:, :2], np.zeros(4, np.uint8)[::2]):
            with pytest.raises(UsageError, match="contiguous"):
                reader.read_into("w", unfit)


def test_views_outlive_the_reader_and_survive_release(tmp_path) -> None:
    data = pattern("F32", (64, 64))
    reader = Reader(write(tmp_path / "x.safetensors", {"w": ("F32", (64, 64), data)}))
    view = reader.array("w")
    assert not view.flags.owndata
    reader.release()
    assert view.tobytes() == data
    reader.close()
    assert view.tobytes() == data
    reader.close()


def test_release_gives_the_pages_back(tmp_path) -> None:
    size = 32 * 2**20
    reader = Reader(write(tmp_path / "x.safetensors", {"w": ("U8", (size,), bytes(size))}))

    def resident_file_pages() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssFile:")[1].split()[0]) * 1024

    view = reader.array("w")
    before = resident_file_pages()
    assert int(view.sum()) == 0
    touched = resident_file_pages()
    assert (
        touched - before >= size // 2
    )  # the kernel may map less than all at a time, but not next to nothing
    reader.release()
    assert resident_file_pages() <= touched - size // 2
    reader.close()


def test_a_file_that_shrinks_is_reported(tmp_path) -> None:
    path = write(tmp_path / "x.safetensors", {"w": ("U8", (100,), bytes(100))})
    with Reader(path) as reader:
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 10)
        with pytest.raises(HeaderError, match="ends inside tensor 'w'"):
            reader.read_into("w", bytearray(100))


def test_unaligned_files_are_read(tmp_path) -> None:
    text = '{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    text += " " * ((3 - len(text)) % 8)  # data then starts at 8·n + 3
    path = put(tmp_path, raw(text, np.array([1.5, -2.0], "<f4").tobytes()))
    with Reader(path) as reader:
        assert reader.array("w").tolist() == [1.5, -2.0]
        assert not reader.array("w").flags.aligned
        assert reader.rows("w", 0, 1).flags.aligned


def test_many_threads_read_the_same_file(tmp_path) -> None:
    data = pattern("U16", (512, 64))
    expected = np.frombuffer(data, "<u2").reshape(512, 64)
    wrong: list[int] = []
    with Reader(write(tmp_path / "x.safetensors", {"w": ("U16", (512, 64), data)})) as reader:

        def read(seed: int) -> None:
            generator = np.random.default_rng(seed)
            for _ in range(200):
                first = int(generator.integers(0, 500))
                if not np.array_equal(reader.rows("w", first, first + 12), expected[first : first + 12]):
                    wrong.append(first)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert wrong == []


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cuts=st.sets(st.integers(1, 199), max_size=20), order=st.randoms(use_true_random=False))
def test_chunks_in_any_order_give_the_same_file(tmp_path, cuts, order) -> None:
    data = pattern("U8", (200,))
    bounds = [0, *sorted(cuts), 200]
    chunks = list(pairwise(bounds))
    order.shuffle(chunks)
    path = tmp_path / "x.safetensors"
    path.unlink(missing_ok=True)
    with Writer(path, [Spec("w", DTYPES["U8"], (200,))]) as writer:
        for begin, end in chunks[:-1]:
            writer.write("w", data[begin:end], begin)
        with pytest.raises(UsageError, match=r"'w' is not completely written"):
            writer.finish()
        begin, end = chunks[-1]
        writer.write("w", data[begin:end], begin)
        assert writer._written["w"] == [(0, 200)]
        for first, last in ((0, 1), (begin, end), (199, 200), (0, 200)):
            with pytest.raises(UsageError, match="written twice"):
                writer.write("w", data[first:last], first)
        writer.finish()
    assert read_header(path).entries["w"].nbytes == 200
    assert path.read_bytes().endswith(data)


def test_many_threads_write_one_file(tmp_path) -> None:
    data = np.arange(256 * 1024, dtype=np.uint16).reshape(256, 1024)
    path = tmp_path / "x.safetensors"
    with Writer(path, [Spec("w", DTYPES["BF16"], data.shape)]) as writer:

        def work(first: int) -> None:
            for row in range(first, 256, 4):
                writer.write("w", data[row], row * 2048)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        writer.finish()
    with Reader(path) as reader:
        assert np.array_equal(reader.array("w"), data)


def test_arrays_must_hold_elements_of_the_tensor(tmp_path) -> None:
    with Writer(tmp_path / "x.safetensors", [Spec("w", DTYPES["BF16"], (4,))]) as writer:
        for wrong in (np.zeros(2, np.float32), np.zeros(4, ">u2")):
            with pytest.raises(UsageError, match="does not hold elements of tensor 'w'"):
                writer.write("w", wrong)
        writer.write("w", np.arange(4, dtype=np.float16)[::-1])  # not contiguous: copied in C order
        writer.finish()
    with Reader(tmp_path / "x.safetensors") as reader:
        assert reader.array("w").view(np.float16).tolist() == [3, 2, 1, 0]


def test_writer_misuse(tmp_path) -> None:
    path = tmp_path / "x.safetensors"
    specs = [Spec("w", DTYPES["U8"], (8,))]
    with Writer(path, specs) as writer:
        with pytest.raises(UsageError, match="'v' was announced"):
            writer.write("v", b"")
        for start, data in ((-1, b"12"), (7, b"12"), (0, bytes(9))):
            with pytest.raises(UsageError, match="beyond tensor 'w'"):
                writer.write("w", data, start)
        with pytest.raises(StorageError, match="temporary file of this name exists"):
            Writer(path, specs)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"x")
    with pytest.raises(UsageError, match="exists"):
        Writer(path, specs)
    assert path.read_bytes() == b"x"
    with pytest.raises(StorageError, match="directory does not exist"):
        Writer(tmp_path / "no" / "x.safetensors", specs)


def test_layout_refuses_impossible_tensors() -> None:
    good = Spec("w", DTYPES["U8"], (8,))
    for specs, message in (
        ([good, good], "'w' is taken"),
        ([Spec("__metadata__", DTYPES["U8"], (8,))], "is taken"),
        ([Spec("w", DTYPES["U8"], (-8,))], "negative"),
        ([Spec("w", DTYPES["F4"], (3,))], "whole bytes"),
        ([Spec("\ud800", DTYPES["U8"], (8,))], "not Unicode"),
    ):
        with pytest.raises(UsageError, match=message):
            layout(specs)


def test_everything_is_aligned_and_gapless() -> None:
    specs = [Spec(f"{name}.{odd}", DTYPES[name], (odd, 8)) for name in DTYPES for odd in (1, 3, 5)]
    placed = layout(specs, {"b": "1", "a": "2"})
    cursor = len(placed.header)
    assert cursor % 8 == 0
    for name, (offset, size) in placed.offsets.items():
        assert offset == cursor
        assert offset % DTYPES[name.split(".")[0]].carrier.itemsize == 0
        cursor += size
    assert cursor == placed.size


def test_no_tensors_at_all(tmp_path) -> None:
    path = write(tmp_path / "x.safetensors", {})
    assert path.read_bytes() == bytes(safetensors.serialize({}))
    assert read_header(path).entries == {}


def test_unknown_keys_in_an_entry_are_ignored_as_the_package_does(tmp_path) -> None:
    content = raw({"w": tensor() | {"comment": "x"}}, bytes(16))
    assert safetensors.deserialize(content)[0][0] == "w"
    assert read_header(put(tmp_path, content)).entries["w"].shape == (2, 4)


def test_work_grows_with_the_tensors(tmp_path) -> None:
    """Linear work: ten times the tensors take about ten times the calls, not a hundred."""
    import sys

    calls = {}
    for count in (400, 4_000):
        placed = layout([Spec(f"model.layers.{i}.experts.w", DTYPES["BF16"], (1, 1)) for i in range(count)])
        path = put(tmp_path, placed.header + bytes(2 * count))
        seen = [0]

        def tally(frame: object, event: str, argument: object, seen: list[int] = seen) -> None:
            seen[0] += event in ("call", "c_call")

        sys.setprofile(tally)
        try:
            entries = read_header(path).entries
        finally:
            sys.setprofile(None)
        assert len(entries) == count
        calls[count] = seen[0]
    assert calls[4_000] < 11 * calls[400]


def test_an_empty_tensor_may_be_listed_after_its_neighbour(tmp_path) -> None:
    content = raw({"b": tensor("U8", [3], 0, 3), "a": tensor("F32", [0, 7], 0, 0)}, b"xyz")
    assert len(safetensors.deserialize(content)) == 2
    with Reader(put(tmp_path, content)) as reader:
        assert list(reader.entries) == ["a", "b"]
        assert reader.array("a").shape == (0, 7)
        assert reader.array("b").tobytes() == b"xyz"
