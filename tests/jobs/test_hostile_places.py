"""Folders with strange contents and outputs in strange places: one refusal, nothing lost, nothing half made."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import toys
from narrowcast.errors import CheckpointError, NarrowcastError, StorageError, UsageError
from narrowcast.jobs.quantize import plan, quantize, run
from narrowcast.store.places import partial_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return toys.llama(tmp_path / "m", layers=1)


def everything(folder: Path) -> set[str]:
    return {os.fsdecode(os.fsencode(path)) for path in map(str, folder.rglob("*"))}


# --- what lies in the source's folder


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_is_refused_before_anything_waits_for_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A pipe never answers and /dev/zero never ends."""
    odd = model / kind
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "device":
        odd.symlink_to("/dev/zero")
    else:
        monkeypatch.chdir(model)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(kind)
    with pytest.raises(CheckpointError, match="neither a file nor a directory") as refusal:
        plan(model, tmp_path / "out", "fp8_dynamic")
    assert refusal.value.where == odd


def test_leavings_of_a_killed_run_are_not_carried(tmp_path: Path, model: Path) -> None:
    (model / "tokenizer.json.narrowcast-tmp").write_text("{")
    result = quantize(model, tmp_path / "out", "fp8_dynamic")
    assert not list(tmp_path.glob("out/*tmp"))
    assert any("narrowcast-tmp" in text for text in result.plan.warnings)


def test_readmes_and_records_of_the_source_are_not_lost_in_silence(tmp_path: Path, model: Path) -> None:
    for name in ("README.md", "README.source.md", "narrowcast.json"):
        (model / name).write_text(name)
    result = quantize(model, tmp_path / "out", "fp8_dynamic")
    assert (tmp_path / "out" / "README.source.md").read_text() == "README.source.md"
    assert (tmp_path / "out" / "README.source.source.md").read_text() == "README.md"
    assert "Quantized by" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "narrowcast.json").read_text())["recipe"] == "fp8_dynamic"
    assert any("narrowcast.json" in text for text in result.plan.warnings)


def test_names_that_are_not_utf8(tmp_path: Path, model: Path) -> None:
    source = Path(os.fsdecode(b"m\xff: [x] #1"))
    os.rename(model, tmp_path / source)
    for old, new in (("model.safetensors", b"mod\xe9l.safetensors"), ("tokenizer.json", b"caf\xe9.txt")):
        os.rename(tmp_path / source / old, tmp_path / source / os.fsdecode(new))
    quantize(tmp_path / source, tmp_path / "out", "fp8_dynamic")
    assert (tmp_path / "out" / os.fsdecode(b"caf\xe9.txt")).is_file()
    yaml = pytest.importorskip("yaml")
    front = (tmp_path / "out" / "README.md").read_text().split("---")[1]
    assert yaml.safe_load(front)["base_model"].endswith(": [x] #1")


def test_weights_in_a_subfolder_are_pointed_to(tmp_path: Path, model: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        plan(model.parent, tmp_path / "out", "fp8_dynamic")
    assert str(model) in str(refusal.value.remedy)


@pytest.mark.parametrize("name", ["./missing", "../missing", "missing/model.safetensors", ".", "a/b/c"])
def test_a_path_is_never_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NarrowcastError) as refusal:
        plan(name, "out", "fp8_dynamic")
    assert "hub did not" not in str(refusal.value)


# --- where the result goes


def test_dots_go_where_the_system_takes_them(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``link/../out`` lies beside what the link points to, for this command as for any other."""
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/deep")
    monkeypatch.chdir(tmp_path)
    result = quantize("m", "link/../out", "fp8_dynamic")
    assert (tmp_path / "far" / "out" / "config.json").is_file()
    assert result.bytes == sum(p.stat().st_size for p in (tmp_path / "far" / "out").iterdir())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["file", "link to a directory", "link to nothing", "pipe"])
def test_a_partial_output_that_is_none(tmp_path: Path, model: Path, kind: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    place = partial_path(tmp_path / "out")
    if kind == "file":
        place.write_text("mine")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("other" if kind == "link to a directory" else "nowhere")
    before = everything(tmp_path)
    with pytest.raises(StorageError, match="not a partial output"):
        quantize(model, tmp_path / "out", "fp8_dynamic", resume=True)
    assert everything(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("mount", [["-t", "tmpfs", "tmpfs"], ["--bind", "BIND"]])
def test_a_mount_point_is_refused_at_once(tmp_path: Path, model: Path, mount: list[str]) -> None:
    """An empty directory is taken over by a rename, which a mount point refuses: after hours of work, or now."""
    out = tmp_path / "out"
    for folder in (out, tmp_path / "BIND"):
        folder.mkdir()
    words = [str(tmp_path / "BIND") if word == "BIND" else word for word in mount]
    if subprocess.run(["mount", *words, str(out)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(StorageError, match="mount point") as refusal:
            quantize(model, out, "fp8_dynamic")
        assert "inside it" in str(refusal.value.remedy)
        assert not partial_path(out).exists()
        assert os.listdir(out) == []
    finally:
        subprocess.run(["umount", "-l", str(out)], check=True)


def test_an_empty_directory_is_taken_over(tmp_path: Path, model: Path) -> None:
    (tmp_path / "out").mkdir()
    quantize(model, tmp_path / "out", "fp8_dynamic")
    assert (tmp_path / "out" / "config.json").is_file()


# --- resuming under other circumstances


class Stopped(RuntimeError):
    pass


def stop_at(step: int) -> type:
    class Stopping:
        steps = 0

        def __init__(self, total: int, label: str) -> None:
            pass

        def advance(self, n: int) -> None:
            Stopping.steps += 1
            if Stopping.steps >= step:
                raise Stopped

        def done(self) -> None:
            pass

    return Stopping


def test_files_that_left_the_source_leave_the_resumed_result(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "m", shards=2)
    for name in ("old/a.py", "old/b.py", "gone.txt", "z.txt"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(name)
    settled = plan(model, tmp_path / "out", "int8")
    (model / "z.txt").unlink()
    with pytest.raises(NarrowcastError):  # the last side file is not there: everything before it is
        run(settled)
    assert (partial_path(tmp_path / "out") / "model" / "old" / "a.py").exists()
    shutil.rmtree(model / "old")
    (model / "gone.txt").unlink()
    quantize(model, tmp_path / "out", "int8", resume=True)
    quantize(model, tmp_path / "fresh", "int8")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "fresh").iterdir()
    }


def test_a_job_with_another_outer_rule_is_another_job(tmp_path: Path) -> None:
    model = toys.llama(tmp_path / "m", shards=3)
    with pytest.raises(Stopped):
        quantize(model, tmp_path / "out", "nvfp4a16", workers=1, progress=stop_at(25))
    assert list(partial_path(tmp_path / "out").rglob("*.safetensors"))
    with pytest.raises(StorageError, match="another job"):
        quantize(model, tmp_path / "out", "nvfp4a16", rule="amax", resume=True)


def test_a_kept_partial_output_is_announced(tmp_path: Path, model: Path) -> None:
    """What stops a run and leaves a partial output says how to go on."""
    settled = plan(model, tmp_path / "out", "int8")
    (model / "tokenizer.json").unlink()
    with pytest.raises(NarrowcastError, match="--resume"):
        run(settled)
    assert partial_path(tmp_path / "out").exists()
    with pytest.raises(UsageError, match="--resume"):
        quantize(model, tmp_path / "out", "int8")


@pytest.mark.parametrize("change", ["touched", "removed"])
def test_a_source_that_changes_under_the_run_gives_no_result(tmp_path: Path, change: str) -> None:
    model = toys.llama(tmp_path / "m", shards=2)
    shard = model / "model-00001-of-00002.safetensors"

    class Changing:
        def __init__(self, total: int, label: str) -> None:
            pass

        def advance(self, n: int) -> None:
            if change == "touched":
                os.utime(shard, (1, 1))
            else:
                shard.unlink(missing_ok=True)

        def done(self) -> None:
            pass

    with pytest.raises(NarrowcastError, match=r"changed|gone"):
        quantize(model, tmp_path / "out", "int8", progress=Changing)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_filesystem_without_locks_is_used_with_a_note(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Cluster filesystems are mounted without flock; there a second run is the only thing that goes unnoticed."""

    def refuse(fd: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    result = quantize(model, tmp_path / "out", "int8")
    assert any("cannot lock" in note for note in result.reasons)


def test_a_filesystem_that_does_not_sync_directories_is_used(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = os.fsync

    def files_only(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        honest(fd)

    monkeypatch.setattr(os, "fsync", files_only)
    quantize(model, tmp_path / "out", "int8")


# --- closed and full standard streams


def shell(command: str, cwd: Path) -> int:
    program = f"{sys.executable} -m narrowcast"
    return subprocess.run(["bash", "-c", command.replace("narrowcast", program, 1)], cwd=cwd).returncode


@pytest.mark.parametrize("streams", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_fail_the_job_or_end_up_in_its_files(
    tmp_path: Path, model: Path, streams: str
) -> None:
    """The next file that is opened gets the number of a closed stream, and with it all that is printed there."""
    quantize(model, tmp_path / "fresh", "int8")
    assert shell(f"narrowcast quantize m out --preset int8 {streams}", tmp_path) == 0
    for path in (tmp_path / "fresh").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_a_full_standard_output_is_no_riddle(tmp_path: Path) -> None:
    assert shell("narrowcast presets >/dev/full 2>err", tmp_path) == 3
    assert "standard output cannot be written" in (tmp_path / "err").read_text()
    assert shell("narrowcast inspect nowhere 2>/dev/full", tmp_path) == 2


# --- kills


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_killed_again_and_again_ends_in_the_same_bytes(
    tmp_path: Path, how: signal.Signals
) -> None:
    """The real command, stopped as soon as it has finished one more shard than before."""
    model = toys.llama(tmp_path / "m", shards=3, hidden=256, inner=704)
    quantize(model, tmp_path / "fresh", "nvfp4a16")
    words = [sys.executable, "-m", "narrowcast", "quantize", "m", "out", "--preset", "nvfp4a16", "--resume"]
    staging = partial_path(tmp_path / "out") / "model"
    for shards in (1, 2):
        with subprocess.Popen(
            words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as running:
            while running.poll() is None and len(list(staging.glob("*.safetensors"))) < shards:
                time.sleep(0.001)
            running.send_signal(how)
    subprocess.run(words, cwd=tmp_path, stdout=subprocess.DEVNULL, check=not (tmp_path / "out").exists())
    assert not partial_path(tmp_path / "out").exists()
    for path in (tmp_path / "fresh").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
