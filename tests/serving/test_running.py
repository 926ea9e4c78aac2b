"""The engine as a child: its streams pass through unchanged and are read, signals reach it, nothing is left behind.

The child is ``fake_engine.py``, which prints what vLLM's CPU build printed; the real one runs in engines/serve.py.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from narrowcast.doctor import Report
from narrowcast.errors import InputError, UsageError
from narrowcast.hardware.gpus import gpus
from narrowcast.serving import running
from narrowcast.serving.command import Command, command
from narrowcast.serving.loading import from_config
from narrowcast.serving.question import Question
from serving.fake_engine import REFUSED, SERVED, written

FAKE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAKE_ENGINE", str(tmp_path))
    return tmp_path


def ran(
    mode: str, *signals: int, environment: dict[str, str] | None = None
) -> tuple[Any, list[Report], bytes, bytes]:
    """The end of a run whose engine is told ``signals`` one after the other once it serves."""
    reports: list[Report] = []
    out, err = io.BytesIO(), io.BytesIO()

    def ready(report: Report) -> None:
        reports.append(report)
        for i, number in enumerate(signals):
            threading.Timer(0.2 * i, os.kill, (os.getpid(), number)).start()

    ended = running.run(FAKE, {"FAKE_MODE": mode, **(environment or {})}, ready=ready, out=out, err=err)
    return ended, reports, out.getvalue(), err.getvalue()


def gone(pid: int) -> bool:
    """Whether no process of that number runs; a zombie, which its new parent has not yet buried, does not. A killed
    process needs its turn to end, which takes seconds on a machine that others use."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_streams_pass_through_byte_for_byte_and_are_read(folder: Path) -> None:
    ended, reports, out, err = ran("serves", signal.SIGINT)
    assert out.decode() == written(SERVED, "out")
    assert err.decode() == written(SERVED, "err")
    assert (ended.code, ended.signal, ended.served, ended.exit_code) == (0, signal.SIGINT, True, 0)
    told = {(one.kind, one.what) for report in reports for one in report.running}
    assert ("linear kernel", "CPUWNA16LinearKernel for CompressedTensorsWNA16") in told
    assert ("state", "serving") in told  # uvicorn says it on stderr, all else is on stdout


def test_the_engine_ends_by_the_signal_that_we_got(folder: Path) -> None:
    ended, *_ = ran("serves", signal.SIGTERM)
    assert (ended.code, ended.signal) == (0, signal.SIGTERM)


def test_our_handlers_are_as_before(folder: Path) -> None:
    before = [signal.getsignal(number) for number in running._SIGNALS]
    ran("dies")
    assert [signal.getsignal(number) for number in running._SIGNALS] == before


def test_an_engine_that_dies_at_its_start_leaves_the_findings_of_its_log(folder: Path) -> None:
    ended, reports, out, _ = ran("dies")
    assert not reports  # it was never ready
    assert out.decode() == written(REFUSED, "out")
    assert (ended.code, ended.signal, ended.served, ended.exit_code) == (1, None, False, 1)
    assert ended.report.failed


def test_an_engine_that_dies_while_serving_is_a_failure(folder: Path) -> None:
    ended, reports, *_ = ran("fails")
    assert len(reports) == 1
    assert (ended.code, ended.served, ended.exit_code) == (3, True, 1)


def test_a_second_and_a_third_signal_end_an_engine_that_ignores_them(folder: Path) -> None:
    ended, *_ = ran("stubborn", signal.SIGINT, signal.SIGINT, signal.SIGINT)
    assert (ended.code, ended.exit_code) == (-signal.SIGKILL, 0)


def test_patience_ends_an_engine_that_ignores_one_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "PATIENCE", (0.3, 0.3))
    start = time.monotonic()
    ended, *_ = ran("stubborn", signal.SIGTERM)
    assert ended.code == -signal.SIGKILL
    assert 0.6 <= time.monotonic() - start < 30


def test_workers_that_outlive_the_engine_are_killed(folder: Path) -> None:
    ended, *_ = ran("worker", signal.SIGINT)
    assert ended.code == 0
    assert gone(int((folder / "worker").read_text()))


def test_an_exception_of_ours_leaves_nothing_behind(folder: Path) -> None:
    def ready(report: Report) -> None:
        raise RuntimeError("the page could not be made")

    with pytest.raises(RuntimeError):
        running.run(FAKE, {"FAKE_MODE": "worker"}, ready=ready, out=None, err=None)
    assert gone(json.loads((folder / "started.json").read_text())["pid"])
    assert gone(int((folder / "worker").read_text()))


def test_a_start_that_is_interrupted_says_so() -> None:
    ended = running.Ended(0, signal.SIGINT, False, None)
    assert ended.exit_code == 130


def test_a_reader_of_ours_that_goes_away_does_not_end_the_engine(folder: Path) -> None:
    class Closed(io.RawIOBase):
        def write(self, data: Any) -> int:
            raise BrokenPipeError

    def ready(report: Report) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    ended = running.run(FAKE, {}, ready=ready, out=Closed(), err=Closed())
    assert (ended.code, ended.served) == (0, True)


def test_variables_are_set_for_the_engine_beside_ours(folder: Path) -> None:
    ran("serves", signal.SIGINT, environment={"VLLM_USE_DEEP_GEMM_E8M0": "0"})
    environment = json.loads((folder / "started.json").read_text())["environment"]
    assert environment["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    assert environment["PATH"] == os.environ["PATH"]


def test_a_program_that_cannot_be_started_is_bad_input(tmp_path: Path) -> None:
    file = tmp_path / "vllm"
    file.write_text("no program")
    with pytest.raises(InputError, match="cannot be started"):
        running.run((str(file),), {}, ready=lambda report: None, out=None, err=None)


# ---- Finding it


@pytest.fixture
def made() -> Command:
    return command(from_config("model", LLAMA), Question(gpus["l4"], "vllm", context=512))


def test_the_command_on_path_comes_first(
    made: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "vllm"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert running.found(made) == made.argv
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert running.found(made) is None  # this interpreter has no vLLM
    assert running.found(made, executable=str(file)) == (str(file), "serve", "model", *made.options)


def test_an_interpreter_runs_the_module(made: Command) -> None:
    argv = running.found(made, python=sys.executable)
    assert argv is not None
    assert argv[:5] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "model")


def test_a_program_that_is_not_there_is_named(made: Command) -> None:
    with pytest.raises(UsageError, match="no such program"):
        running.found(made, python="/nowhere/python")


def test_files_are_written_once_and_never_over_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = command(from_config("model", LLAMA), Question(gpus["h100"], "tensorrt-llm", context=512, kv="fp8"))
    running.write_files(made)
    running.write_files(made)
    (name,) = made.files
    assert (tmp_path / name).read_text() == made.files[name]
    (tmp_path / name).write_text("kv_cache_config: {}\n")
    with pytest.raises(UsageError, match="a file of that name"):
        running.write_files(made)
