"""``narrowcast serve``: the command is printed, the engine run and watched, its end told.

The engine is ``tests/serving/fake_engine.py`` on PATH, which prints what vLLM's CPU build printed for this model.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.running import Cli
from serving.fake_engine import REFUSED, SERVED, written

FAKE = Path(__file__).parents[1] / "serving" / "fake_engine.py"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake engine as the only ``vllm`` on PATH; what it was started with is in the directory."""
    folder = tmp_path / "bin"
    folder.mkdir()
    file = folder / "vllm"
    file.write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(FAKE)!r}, run_name='__main__')\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_ENGINE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH without any engine."""
    monkeypatch.setenv("PATH", str(tmp_path))


class Server:
    """narrowcast serve as a process of its own."""

    def __init__(self, folder: Path, *arguments: str, mode: str = "serves") -> None:
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "narrowcast", "serve", *arguments], stdout=out, stderr=err,
                env={**os.environ, "FAKE_MODE": mode, "COLUMNS": "80"}, cwd=folder,
            )  # fmt: skip

    def wait_for(self, text: str) -> str:
        for _ in range(300):
            if text in self.out.read_text() or self.process.poll() is not None:
                break
            time.sleep(0.1)
        return self.out.read_text()


def dead(pid: int) -> bool:
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def server(engine: Path, llama: Path) -> Iterator[Server]:
    made = Server(engine, str(llama), "--gpu", "cpu", "--context", "256", "--", "--enforce-eager")
    yield made
    made.process.kill()
    made.process.wait()


def test_what_is_running_is_told_beside_the_plan_until_ctrl_c(server: Server, engine: Path) -> None:
    page = server.wait_for("asked for")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0
    assert written(SERVED, "out") in page
    assert written(SERVED, "err") in server.err.read_text()
    before, _, after = page.partition("what is running:")
    assert "starting vllm; Ctrl-C stops it" in before
    assert "CPUWNA16LinearKernel for CompressedTensorsWNA16" in after
    assert "state" in after
    (row,) = [line.split() for line in after.splitlines() if line.startswith("  dtype ")]
    assert row == ["dtype", "bfloat16", "bfloat16", "as", "planned"]
    assert server.err.read_text().endswith("narrowcast: vLLM ended after SIGINT: exit code 0\n")
    started = json.loads((engine / "started.json").read_text())
    assert started["argv"][0] == "serve"
    assert started["argv"][-1] == "--enforce-eager"
    assert dead(started["pid"])


def test_the_engine_does_not_outlive_us(server: Server, engine: Path) -> None:
    server.wait_for("what is running:")
    pid = json.loads((engine / "started.json").read_text())["pid"]
    server.process.kill()  # no chance to clean up
    server.process.wait()
    assert dead(pid)


def test_an_engine_that_does_not_start_is_told_with_what_its_log_says(
    engine: Path, llama: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", "dies")
    ran = cli("serve", llama, "--gpu", "cpu", "--context", "256")
    assert ran.code == 1
    assert written(REFUSED, "out") in ran.out
    assert "ends-in-error" in ran.out
    assert "vLLM ended: exit code 1; it never served" in ran.err


def test_quiet_keeps_the_log_and_not_the_findings(
    engine: Path, llama: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", "dies")
    ran = cli("serve", llama, "--gpu", "cpu", "--context", "256", "--quiet")
    assert "Resolved architecture" not in ran.out + ran.err
    assert "ends-in-error" in ran.out


def test_json_is_one_document_whether_it_served_or_not(
    engine: Path, llama: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode, code in (("dies", 1), ("fails", 1)):
        monkeypatch.setenv("FAKE_MODE", mode)
        ran = cli("serve", llama, "--gpu", "cpu", "--context", "256", "--json")
        assert ran.code == code
        assert ran.json["verb"] == "serve"
        assert ran.json["command"]["argv"][:2] == ["vllm", "serve"]
        assert ran.json["running"]["engine"] == "vllm"
        assert {"kind", "planned", "running", "same"} == set(ran.json["beside"][0])
        assert "Resolved architecture" in ran.err  # the log goes where it does no harm


def test_a_checkpoint_that_was_made_is_served(
    engine: Path, llama: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", "fails")
    (engine / f"{llama.name}-w4a16").mkdir()
    cli("serve", llama, "--gpu", "cpu", "--preset", "w4a16")
    assert json.loads((engine / "started.json").read_text())["argv"][:2] == ["serve", f"{llama.name}-w4a16"]


def test_a_dry_run_starts_nothing(engine: Path, llama: Path, cli: Cli) -> None:
    ran = cli("serve", llama, "--gpu", "l4", "--kv", "fp8", "--dry-run")
    assert ran.code == 0
    assert ran.out.startswith("vllm serve ")
    assert "--kv-cache-dtype fp8: what the KV cache holds" in ran.out
    assert not (engine / "started.json").exists()
    assert not ran.err


def test_a_gpu_of_ones_own_by_the_variable(
    cli: Cli, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpus.toml").write_text('[gpu.my-card]\nlike = "t4"\n')
    monkeypatch.setenv("NARROWCAST_GPUS", str(tmp_path / "gpus.toml"))
    own, like = (
        cli("serve", llama, "--gpu", name, "--preset", "fp8_dynamic", "--dry-run")
        for name in ("my-card", "t4")
    )
    assert own.code == like.code == 0
    assert "float16: my-card does not multiply BF16" in own.out
    assert own.out.replace("my-card", "t4") == like.out


def test_without_the_engine_the_command_and_the_reason_are_printed(
    nowhere: None, llama: Path, cli: Cli
) -> None:
    ran = cli("serve", llama, "--gpu", "h100", "--engine", "sglang")
    assert ran.code == 0
    assert ran.out.startswith("sglang serve ")
    assert "SGLang is not installed here" in ran.out
    assert cli("serve", llama, "--gpu", "h100", "--engine", "sglang", "--json").json["installed"] is False


def test_a_preset_goes_into_the_container_that_the_engine_reads(llama: Path, cli: Cli) -> None:
    """TensorRT-LLM reads INT4 from ModelOpt and refuses it in compressed-tensors; who asks for that is told first."""
    words = ("serve", llama, "--gpu", "h100", "--engine", "tensorrt-llm", "--preset", "w4a16", "--dry-run")
    ran = cli(*words)
    assert "--preset w4a16 --container modelopt" in ran.out
    assert "refused" not in ran.out
    assert cli(*words, "--container", "compressed-tensors").out.startswith("refused: ")


def test_what_would_be_refused_is_not_started(engine: Path, llama: Path, cli: Cli) -> None:
    ran = cli("serve", llama, "--gpu", "cpu", "--tp", "64")
    assert ran.code == 2
    assert "the engine would refuse this model" in ran.err
    first = cli("serve", llama, "--gpu", "cpu", "--preset", "w4a16")
    assert first.code == 2
    assert "narrowcast quantize" in first.err
    ranks = cli("serve", llama, "--engine", "sglang", "--gpu", "h100", "--pp", "2", "--gpus-per-node", "1",
                "--executable", engine / "bin" / "vllm")  # fmt: skip
    assert (ranks.code, "--node-rank RANK" in ranks.err) == (2, True)
    assert not (engine / "started.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--gpu", "h1000"), 2, "unknown GPU"),
        (("--engine", "vlm", "--gpu", "l4"), 2, "did you mean vllm"),
        (("--gpu", "l4", "--kv", "fp9"), 2, "unknown mode of the KV cache"),
        (("--gpu", "l4", "--port", "70000"), 2, "no such port"),
        (("--gpu", "l4", "--tp", "0"), 2, "tp must be at least 1"),
        (("--gpu", "l4", "--gpus-per-node", "0"), 2, "at least one GPU"),
        (("--gpu", "l4", "--preset", "fp9"), 2, "unknown preset"),
        (("--gpu", "l4", "--quantization", "fp9"), 2, "no such name"),
        (("--gpu", "l4", "--python", "/nowhere"), 2, "no such program"),
        (("--gpu", "l4", "--context", "many"), 2, "not a number of tokens"),
    ],
)
def test_bad_input_is_one_line(
    nowhere: None, llama: Path, cli: Cli, arguments: tuple[str, ...], code: int, said: str
) -> None:
    ran = cli("serve", llama, *arguments)
    assert ran.code == code
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_a_model_that_is_not_there(nowhere: None, cli: Cli) -> None:
    ran = cli("serve", "/nowhere/model", "--gpu", "l4")
    assert ran.code in (2, 3)
    assert ran.err.startswith("narrowcast: error: ")
