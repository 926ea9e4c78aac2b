"""Where work runs: bounded memory in every orientation, threads that end before their files close, no leaks."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import toys
from narrowcast.errors import HeaderError, NarrowcastError, StorageError, UsageError
from narrowcast.jobs import stream
from narrowcast.jobs.quantize import plan, quantize
from narrowcast.jobs.stream import Slice, Workers, transpose
from narrowcast.model.modules import Part
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.places import partial_path


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- reading


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("orientation", ["out_in", "in_out"])
@pytest.mark.parametrize("part", [Part("all", 0, 150, 1), Part("half", 75, 150, 1), Part("odd", 1, 150, 2)])
def test_rows_of_every_orientation_and_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, orientation: Any, part: Part
) -> None:
    """Against plain slicing of the whole tensor, with strips and blocks that do not divide it."""
    monkeypatch.setattr(stream, "BLOCK", 16)
    monkeypatch.setattr(stream, "STRIP", 40)
    shape = (3, 150, 90) if orientation == "out_in" else (3, 90, 150)
    model = toys.write(tmp_path / "m", toys.weights({"x": shape}, dtype), {})
    with Checkpoint.open(model) as source:
        whole: NDArray[Any] = np.array(source.array("x"))
        for expert in range(3):
            matrix = whole[expert] if orientation == "out_in" else whole[expert].T
            wanted = matrix[part.start : part.stop : part.step]
            piece = Slice("x", wanted.shape, orientation, expert, part)  # type: ignore[arg-type]
            for start, stop in ((0, len(wanted)), (7, 61), (len(wanted) - 1, len(wanted))):
                read = piece.read(source, whole.dtype, start, stop)
                assert read.flags.c_contiguous
                assert np.array_equal(read, wanted[start:stop])


def test_transpose_of_any_shape() -> None:
    for shape in ((1, 1), (64, 64), (65, 127), (200, 3)):
        matrix = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
        out = np.empty(shape[::-1], np.uint16)
        transpose(matrix, out)
        assert np.array_equal(out, matrix.T)


def test_pieces_stay_inside_their_tensor(tmp_path: Path) -> None:
    model = toys.write(tmp_path / "m", toys.weights({"x": (4, 8)}, "fp32"), {})
    with Checkpoint.open(model) as source:
        for start, stride in ((-4, 32), (0, 40), (20, 32), (4, 64)):
            with pytest.raises(UsageError, match="beyond tensor 'x'"):
                source.read_pieces("x", np.empty((4, 4), np.float32), start, stride)
        source.read_pieces("x", np.empty((0, 4), np.float32), 0, 32)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_source_that_shrinks_is_an_error_and_not_a_signal(tmp_path: Path, family: str) -> None:
    """Touching a mapped page behind the end of a file kills the process; reading there does not."""
    model = toys.moe(tmp_path / "m", family, hidden=64, inner=64)
    with Checkpoint.open(model) as source:
        os.truncate(
            model / "model.safetensors", source.entries["model.layers.0.mlp.experts.down_proj"].offset + 5000
        )
        orientation: Any = "out_in" if family == "qwen3_moe" else "in_out"
        piece = Slice("model.layers.0.mlp.experts.down_proj", (64, 64), orientation, 3)
        with pytest.raises(HeaderError, match="shrank"):
            piece.read(source, np.dtype("<u2"), 0, 64)


# The high-water mark of the process itself: getrusage would report that of the process that started it.
HUGE = """
import sys
from narrowcast.jobs.quantize import plan, quantize, run

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

small, model, out = sys.argv[1:]
quantize(small, out + "-small", "nvfp4a16", workers=2)  # what the interpreter and the compiler take
before = peak()
settled = plan(model, out, "nvfp4a16", workers=2)
run(settled)
print(peak() - before, peak(), settled.peak_memory)
"""


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])
def test_memory_does_not_grow_with_one_tensor(tmp_path: Path, family: str) -> None:
    """One expert of 256 MB in either orientation, as a file of holes; the plan's own forecast holds."""
    shape = [1, 32768, 4096] if family == "qwen3_moe" else [1, 4096, 32768]
    size = 2 * 32768 * 4096
    name = "model.layers.0.mlp.experts.gate_up_proj"
    small = toys.llama(tmp_path / "small")
    header = json.dumps({name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    model = tmp_path / "m"
    model.mkdir()
    with open(model / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    (model / "config.json").write_text(json.dumps({"model_type": family, "hidden_size": 4096}))
    done = subprocess.run(
        [sys.executable, "-c", HUGE, str(small), str(model), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    growth, peak, forecast = map(int, done.stdout.split())
    assert growth < size / 4
    assert peak < forecast


# --- threads


def test_leaving_a_map_waits_for_what_runs() -> None:
    """A worker that writes after its file was closed could write into the next file of that number."""
    started, ended = threading.Event(), threading.Event()

    def work(item: int) -> int:
        if item == 0:
            started.wait(5)
            raise ValueError("first")
        started.set()
        time.sleep(0.2)
        ended.set()
        return item

    with Workers(2) as pool:
        with pytest.raises(ValueError, match="first"), pool.map(work, range(2)) as results:
            list(results)
        assert ended.is_set()


def test_a_map_keeps_order_and_holds_few_results() -> None:
    drawn = 0

    def items() -> Any:
        nonlocal drawn
        for item in range(1000):
            drawn += 1
            yield item

    with Workers(2) as pool, pool.map(lambda item: item * 2, items()) as results:
        assert next(results) == 0
        assert drawn <= 2 * stream.AHEAD + 1
        assert list(results) == [2 * item for item in range(1, 1000)]


def test_errors_leave_no_threads_and_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toys.llama(tmp_path / "m", shards=3)
    quantize(model, tmp_path / "warm", "int8")
    before, threads = descriptors(), threading.active_count()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in range(3):
        with pytest.raises(RuntimeError):
            quantize(model, tmp_path / f"a{step}", "int8", progress=fails_at(5 + 7 * step))
    monkeypatch.setattr(os, "fsync", full)
    for step in range(3):
        with pytest.raises(StorageError, match="full"):
            quantize(model, tmp_path / f"b{step}", "int8")
    assert (descriptors(), threading.active_count()) == (before, threads)


def fails_at(step: int) -> type:
    class Failing:
        steps = 0

        def __init__(self, total: int, label: str) -> None:
            pass

        def advance(self, n: int) -> None:
            Failing.steps += 1
            if Failing.steps >= step:
                raise RuntimeError("stop")

        def done(self) -> None:
            pass

    return Failing


def test_a_sync_that_fails_leaves_no_shard_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toys.llama(tmp_path / "m", shards=2)

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError, match="Input/output error"):
        quantize(model, tmp_path / "out", "int8")
    monkeypatch.undo()
    left = [path.name for path in partial_path(tmp_path / "out").rglob("*") if path.is_file()]
    assert left == ["job.json"]
    quantize(model, tmp_path / "out", "int8", resume=True)
    quantize(model, tmp_path / "fresh", "int8")
    for path in (tmp_path / "fresh").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_few_descriptors_are_enough_or_the_refusal_says_so(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "m", shards=6)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 3, hard))
    try:
        with pytest.raises(NarrowcastError, match="Too many open files"):
            plan(model, tmp_path / "out", "int8")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
