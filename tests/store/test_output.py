"""An output is absent or complete: killed at every step, on a full or read-only disk, beside another job."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from narrowcast.errors import InputError, NarrowcastError, StorageError, UsageError
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.output import MARGIN, Output
from narrowcast.store.safetensors import Spec, Writer, layout

JOB = {"preset": "fp8_dynamic", "source": {"sha256": "ab"}, "ü": 1}
SHARDS = {f"model-0000{n}-of-00002.safetensors": n for n in (1, 2)}
SOURCE = Path("/nonexistent/source")


def specs(number: int) -> list[Spec]:
    return [
        Spec(f"layers.{number}.w", DTYPES["F8_E4M3"], (8, 16)),
        Spec(f"layers.{number}.s", DTYPES["F32"], (8, 1)),
    ]


def content(spec: Spec) -> np.ndarray:
    seed = sum(map(ord, spec.name))
    return np.random.default_rng(seed).integers(0, 256, spec.shape).astype(spec.dtype.carrier)


def make(out: Path, resume: bool, side: Path) -> Path:
    """A small whole job: two shards in chunks, two side files, commit."""
    with Output.begin(out, JOB, forecast=2000, resume=resume, source=SOURCE) as output:
        for shard, number in SHARDS.items():
            if output.done(shard, specs(number), {"format": "pt"}):
                continue
            with output.writer(shard, specs(number), {"format": "pt"}) as writer:
                for spec in specs(number):
                    for part, values in enumerate(np.split(content(spec), 2)):
                        writer.write(spec.name, values, part * values.nbytes)
                writer.finish()
        output.copy(side, "tokenizer.json")
        output.put("sub/record.json", b"{}")
        return output.commit(b'{"a": 1}')


def tree(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture
def side(tmp_path) -> Path:
    path = tmp_path / "side.json"
    path.write_bytes(b'{"vocab": 1}' * 1000)
    return path


@pytest.fixture
def expected(tmp_path, side) -> dict[str, bytes]:
    """The files of an undisturbed run."""
    return tree(make(tmp_path / "undisturbed", False, side))


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process; its wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_a_finished_output_loads(tmp_path, side, expected) -> None:
    out = tmp_path / "undisturbed"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["side.json", "undisturbed"]
    assert sorted(expected) == sorted(
        [*SHARDS, "config.json", "model.safetensors.index.json", "sub/record.json", "tokenizer.json"]
    )
    index = json.loads(expected["model.safetensors.index.json"])
    assert index["metadata"] == {"total_size": 2 * (128 + 32)}
    with Checkpoint.open(out) as checkpoint:
        assert set(checkpoint.entries) == set(index["weight_map"])
        for number in SHARDS.values():
            for spec in specs(number):
                assert np.array_equal(checkpoint.array(spec.name), content(spec))
    for shard in SHARDS:
        with safe_open(out / shard, "np") as file:
            assert set(file.keys()) == {name for name, where in index["weight_map"].items() if where == shard}
    assert expected["tokenizer.json"] == side.read_bytes()


def test_one_shard_needs_no_index(tmp_path) -> None:
    for name, wants_index in (("model.safetensors", False), ("model-00001-of-00001.safetensors", True)):
        with Output.begin(tmp_path / name[:7], JOB, forecast=0, resume=False, source=SOURCE) as output:
            with output.writer(name, specs(1)) as writer:
                for spec in specs(1):
                    writer.write(spec.name, content(spec))
                writer.finish()
            out = output.commit()
        assert (out / "model.safetensors.index.json").exists() == wants_index
        assert not (out / "config.json").exists()
        shutil.rmtree(out)


WATCHED = (
    "open",
    "pwrite",
    "write",
    "posix_fallocate",
    "fsync",
    "rename",
    "mkdir",
    "unlink",
    "rmdir",
    "close",
)


def killed_before(step: int) -> Callable[[], None]:
    """Install counters on the system calls of a job; before the step-th of them the process kills itself."""
    count = 0

    def wrap(call: Callable) -> Callable:
        def counted(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keywords)

        return counted

    def install() -> None:
        for name in WATCHED:
            setattr(os, name, wrap(getattr(os, name)))

    return install


def test_killed_at_every_step_and_resumed(tmp_path, side, expected) -> None:
    out = tmp_path / "out"
    absent = complete = 0
    for step in range(1, 10_000):
        install = killed_before(step)
        status = in_child(lambda install=install: (install(), make(out, False, side)))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert tree(out) == expected
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        if out.exists():
            complete += 1
            with pytest.raises(UsageError, match="exists already"):  # whatever is left of the partial one
                make(out, False, side)
        else:
            absent += 1
            assert make(out, True, side) == out
        assert tree(out) == expected, f"killed before step {step}"
        shutil.rmtree(out)
        shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)
    assert absent > 50
    assert complete > 0
    assert step == absent + complete + 1


def test_killed_twice_and_resumed(tmp_path, side, expected) -> None:
    out = tmp_path / "out"
    for first in range(10, 60, 9):
        for second in (3, 9, 30):
            for resume, step in ((False, first), (True, second)):
                install = killed_before(step)
                in_child(lambda install=install, resume=resume: (install(), make(out, resume, side)))
            if not out.exists():
                make(out, True, side)
            assert tree(out) == expected
            shutil.rmtree(out)
            shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)


SLOW_JOB = """
import time
from pathlib import Path
import numpy as np
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.output import Output
from narrowcast.store.safetensors import Spec

with Output.begin({out!r}, {{}}, forecast=0, resume={resume}, source=Path("/nonexistent/source")) as output:
    for shard in range(2):
        name = f"model-{{shard + 1:05}}-of-00002.safetensors"
        specs = [Spec(f"w{{shard}}", DTYPES["BF16"], (400, 512))]

        if output.done(name, specs):
            print("kept", name, flush=True)
            continue

        with output.writer(name, specs) as writer:
            for row in range(400):
                writer.write(f"w{{shard}}", np.full(512, row + shard, np.uint16), row * 1024)
                time.sleep({pause})
            writer.finish()

    output.commit(b"{{}}")
"""


def test_kill_9_from_outside(tmp_path) -> None:
    def start(out: Path, resume: bool, pause: float) -> subprocess.Popen:
        script = SLOW_JOB.format(out=str(out), resume=resume, pause=pause)
        return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)

    assert start(tmp_path / "expected", False, 0).wait(60) == 0
    out, staging = tmp_path / "out", tmp_path / "out.partial" / "model"
    running = start(out, False, 0.002)
    until = time.monotonic() + 60
    while not (staging / "model-00002-of-00002.safetensors.tmp").exists():
        assert time.monotonic() < until
        assert running.poll() is None
        time.sleep(0.01)
    with pytest.raises(StorageError, match="another process is writing"):
        Output.begin(out, {}, forecast=0, resume=True, source=SOURCE)
    running.kill()
    running.wait(60)
    assert not out.exists()
    with pytest.raises(UsageError, match=r"partial output is here(.|\n)*--resume"):
        Output.begin(out, {}, forecast=0, resume=False, source=SOURCE)
    resumed = start(out, True, 0)
    printed, _ = resumed.communicate(timeout=60)
    assert resumed.returncode == 0
    assert printed == "kept model-00001-of-00002.safetensors\n"
    assert tree(out) == tree(tmp_path / "expected")
    assert not staging.parent.exists()


def test_another_job_is_refused_and_nothing_is_touched(tmp_path) -> None:
    out = tmp_path / "out"
    Output.begin(out, JOB, forecast=0, resume=False, source=SOURCE).abort(keep=True)
    before = tree(tmp_path / "out.partial")
    other = JOB | {"preset": "nvfp4a16", "rule": "floor"}
    with pytest.raises(StorageError) as caught:
        Output.begin(out, other, forecast=0, resume=True, source=SOURCE)
    for words in (
        "preset, rule differ",
        "preset=fp8_dynamic; rule=absent",
        "preset=nvfp4a16; rule=floor",
        "out.partial",
    ):
        assert words in str(caught.value)
    assert tree(tmp_path / "out.partial") == before
    Output.begin(out, dict(reversed(JOB.items())), forecast=0, resume=True, source=SOURCE).abort(keep=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_job_record_is_refused(tmp_path, record) -> None:
    out = tmp_path / "out"
    Output.begin(out, JOB, forecast=0, resume=False, source=SOURCE).abort(keep=True)
    (tmp_path / "out.partial" / "job.json").write_bytes(record)
    with pytest.raises(StorageError, match=r"no readable job record(.|\n)*remove .*out.partial"):
        Output.begin(out, JOB, forecast=0, resume=True, source=SOURCE)


def test_somebody_s_own_directory_of_that_name(tmp_path) -> None:
    own = tmp_path / "out.partial"
    own.mkdir()
    (own / "thesis.tex").write_text("x")
    with pytest.raises(StorageError, match=r"not a partial output(.|\n)*thesis.tex"):
        Output.begin(tmp_path / "out", JOB, forecast=0, resume=True, source=SOURCE)
    assert tree(own) == {"thesis.tex": b"x"}


def test_a_shard_of_the_right_name_and_wrong_content(tmp_path) -> None:
    name = "model.safetensors"
    with Output.begin(tmp_path / "out", JOB, forecast=0, resume=False, source=SOURCE) as output:
        assert not output.done(name, specs(1))
        with output.writer(name, specs(1)) as writer:
            for spec in specs(1):
                writer.write(spec.name, content(spec))
            writer.finish()
        assert output.done(name, specs(1))
        assert output.done(name, specs(1)[::-1])
        for other in (specs(2), specs(1)[:1]):
            with pytest.raises(StorageError, match="not the one this job makes"):
                output.done(name, other)
        with pytest.raises(StorageError, match="not the one this job makes"):
            output.done(name, specs(1), {"format": "pt"})


def test_commit_refuses_what_is_not_finished(tmp_path) -> None:
    out = tmp_path / "out"
    with Output.begin(out, JOB, forecast=0, resume=False, source=SOURCE) as output:
        writer = output.writer("model.safetensors", specs(1))
        with pytest.raises(UsageError, match=r"not finished(.|\n)*model.safetensors.tmp"):
            output.commit()
        writer.abort()
        for name in ("a.safetensors", "b.safetensors"):
            with output.writer(name, [Spec("w", DTYPES["U8"], (1,))]) as shard:
                shard.write("w", b"1")
                shard.finish()
        with pytest.raises(UsageError, match=r"'w' is in two shards(.|\n)*a.safetensors and b.safetensors"):
            output.commit()
    assert not out.exists()


def test_the_place_of_the_output(tmp_path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"x")
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link-to-empty").symlink_to(tmp_path / "empty")
    before = sorted(tmp_path.rglob("*"))
    for out, words in (
        (source, "is the source itself"),
        (tmp_path / "link", "is the source itself"),
        (tmp_path / "empty" / ".." / "source", "is the source itself"),
        (source / "out", "inside the source"),
        (tmp_path / "link" / "out", "inside the source"),
        (tmp_path, "around the source"),
        (tmp_path / "file", "exists already"),
        (tmp_path / "link-to-empty", "exists already"),
        (tmp_path / "no" / "out", "parent of the output"),
        (tmp_path / "file" / "out", "parent of the output"),
        (Path("/"), "directory that can be created"),
    ):
        with pytest.raises(UsageError, match=words):
            Output.begin(out, JOB, forecast=0, resume=False, source=source)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(UsageError, match="is the source itself"):
        Output.begin(
            source / "model.safetensors", JOB, forecast=0, resume=False, source=source / "model.safetensors"
        )
    with pytest.raises(StorageError, match="name is too long"):
        Output.begin(tmp_path / ("x" * 250), JOB, forecast=0, resume=False, source=source)


def test_an_empty_directory_is_taken_over(tmp_path, side, expected, monkeypatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    assert tree(make(Path("out"), False, side)) == expected
    with pytest.raises(UsageError, match="exists already"):
        make(Path("out"), True, side)
    assert tree(tmp_path / "out") == expected


def test_names_must_stay_inside(tmp_path, side) -> None:
    with Output.begin(tmp_path / "out", JOB, forecast=0, resume=False, source=SOURCE) as output:
        for name in ("../x", "/etc/x", "a/../../x", ""):
            with pytest.raises(UsageError, match="must lie inside"):
                output.put(name, b"")
            with pytest.raises(UsageError, match="must lie inside"):
                output.copy(side, name)
        with pytest.raises(InputError, match="cannot be read"):
            output.copy(tmp_path / "gone", "x")
        (tmp_path / "link").symlink_to(side)
        output.copy(tmp_path / "link", "deep/x")
        output.put("empty", b"")
        output.put("x.tmp", b"1")
        output.put("x", b"2")
        assert (output.staging / "x.tmp").read_bytes() == b"1"
        assert not (output.staging / "deep" / "x").is_symlink()
        assert (output.staging / "deep" / "x").read_bytes() == side.read_bytes()


def test_a_copy_larger_than_a_block(tmp_path) -> None:
    big = tmp_path / "big"
    big.write_bytes(np.random.default_rng(0).bytes(5_000_001))
    with Output.begin(tmp_path / "out", JOB, forecast=0, resume=False, source=SOURCE) as output:
        output.copy(big, "big")
        assert (output.staging / "big").read_bytes() == big.read_bytes()


def test_a_forecast_beyond_the_disk(tmp_path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(
        StorageError, match=rf"disk is too small(.|\n)*bytes free(.|\n)*{2 * free} in all, 0 already"
    ):
        Output.begin(tmp_path / "out", JOB, forecast=2 * free, resume=False, source=SOURCE)
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def tmpfs(tmp_path: Path, size: int) -> Iterator[Path]:
    """A real filesystem of this many bytes, or a skip that says why there is none."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        why = done.stderr.strip() if done.returncode else None
    except OSError as error:
        why = str(error)
    if why is not None:
        pytest.skip(f"no small filesystem to fill: {why}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk(tmp_path, side) -> None:
    with tmpfs(tmp_path, MARGIN + 2**20) as disk:
        with pytest.raises(StorageError, match="disk is too small"):
            Output.begin(disk / "out", JOB, forecast=2 * 2**20, resume=False, source=SOURCE)
        assert list(disk.iterdir()) == []
        output = Output.begin(disk / "out", JOB, forecast=2**19, resume=False, source=SOURCE)
        filler = disk / "filler"  # another program fills the disk meanwhile
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, MARGIN + 2**19)
        free = shutil.disk_usage(disk).free
        large = [Spec("w", DTYPES["U8"], (2**20,))]
        with pytest.raises(StorageError) as caught:
            output.writer("model.safetensors", large)
        for words in (
            "disk is full",
            f"{free} bytes free",
            f"wanted: {layout(large).size} bytes",
            "free some space",
        ):
            assert words in str(caught.value)
        with pytest.raises(StorageError, match="disk is full"):
            output.put("x", bytes(2**20))
        big = tmp_path / "big"
        big.write_bytes(bytes(2**20))
        with pytest.raises(StorageError, match="disk is full"):
            output.copy(big, "big")
        output.abort(keep=True)
        assert not (disk / "out").exists()
        filler.unlink()
        assert tree(make(disk / "out", True, side)) == tree(make(tmp_path / "elsewhere", False, side))
        assert sorted(path.name for path in disk.iterdir()) == ["out"]


def test_a_full_disk_without_reservation(tmp_path, monkeypatch) -> None:
    """Where the filesystem cannot reserve space the reason is kept, and the write that fails is told."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with (
        tmpfs(tmp_path, 2**20) as disk,
        Writer(disk / "x.safetensors", [Spec("w", DTYPES["U8"], (2**21,))]) as writer,
    ):
        assert str(disk) in writer.fallback
        assert "cannot reserve space" in writer.fallback
        writer.write("w", bytes(2**19))
        with pytest.raises(StorageError, match="disk is full"):
            writer.write("w", bytes(2**20), 2**19)
        with pytest.raises(UsageError, match="not completely written"):
            writer.finish()
        with pytest.raises(StorageError, match="disk is full"):
            writer.write("w", bytes(2**19), 3 * 2**19)
        with pytest.raises(UsageError, match=r"writes failed(.|\n)*2 writes"):
            writer.finish()
    with Output.begin(tmp_path / "out", JOB, forecast=0, resume=False, source=SOURCE) as output:
        for shard in ("a.safetensors", "b.safetensors"):
            output.writer(shard, specs(1)).abort()
        assert len(output.notes) == 1


def test_a_process_limit_on_file_sizes(tmp_path) -> None:
    def limited() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        with pytest.raises(StorageError, match="larger than the filesystem or the process limit"):
            Writer(tmp_path / "x.safetensors", [Spec("w", DTYPES["U8"], (2**20,))])

    assert in_child(limited) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_disk(tmp_path) -> None:
    with tmpfs(tmp_path, 2**20) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(StorageError, match=r"read-only(.|\n)*choose a writable directory"):
            Output.begin(disk / "out", JOB, forecast=0, resume=False, source=SOURCE)
        with pytest.raises(StorageError, match="read-only"):
            Writer(disk / "x.safetensors", specs(1))


def test_a_directory_without_rights(tmp_path) -> None:
    def as_somebody() -> None:
        if os.getuid() == 0:
            os.chdir(tmp_path)  # the way to it is closed to others, the directory itself is not
            tmp_path.chmod(0o755)
            os.setuid(65534)
        else:
            tmp_path.chmod(0o555)
        for begin in (
            lambda: Output.begin("out", JOB, forecast=0, resume=False, source=SOURCE),
            lambda: Writer("x.safetensors", specs(1)),
        ):
            with pytest.raises(NarrowcastError) as caught:
                begin()
            assert re.search("no permission|cannot be entered", str(caught.value))

    assert in_child(as_somebody) == 0
    assert list(tmp_path.iterdir()) == []
