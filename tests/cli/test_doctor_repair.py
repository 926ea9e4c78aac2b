"""``narrowcast doctor`` and ``repair`` as commands: streams, exit codes, pages that fit, records, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from audit.editing import edit_config, quantized
from cli.running import Cli

LOGS = Path(__file__).parents[1] / "doctor" / "logs"
NAMES = sorted(path.name for path in LOGS.glob("*.log"))


@pytest.mark.parametrize("name", NAMES)
def test_logs(cli: Cli, name: str) -> None:
    page, record = cli("doctor", LOGS / name), cli("doctor", LOGS / name, "--json")
    if name == "another_program.log":
        assert (page.code, page.out, record.out) == (3, "", "")
        return
    severities = [one["severity"] for one in record.json["findings"]]
    assert page.code == record.code == int("error" in severities)
    assert [line for line in page.out.splitlines() if len(line) > 80 and " " in line.strip()] == []
    assert "\n\n\n" not in page.out


def test_standard_input() -> None:
    log = LOGS / "vllm_cpu_0_32_fp8_dynamic.log"
    command = [sys.executable, "-m", "narrowcast", "doctor"]
    pages = []
    for words in ([str(log)], ["-"], []):
        with log.open("rb") as stream:
            done = subprocess.run(
                [*command, *words], stdin=stream, capture_output=True, text=True, timeout=60
            )
        assert done.returncode == 0, done.stderr
        pages.append(done.stdout)
    assert pages[0] == pages[1] == pages[2]


def test_symptoms(cli: Cli) -> None:
    listed = cli("doctor", "--symptom", "--json").json["symptoms"]
    page = cli("doctor", "--symptom")
    assert page.code == 0
    for symptom in listed:
        assert f"  {symptom['name']}" in page.out
        one = cli("doctor", "--symptom", symptom["name"])
        assert one.code == 0
        assert max(map(len, one.out.splitlines())) <= 80
    words = cli("doctor", "--symptom", "all", "exclamation", "marks", "--json").json
    assert words["symptom"]["name"] == "exclamation-marks"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nope.log"], 3, "cannot be read"),
        (["nope.log", "--symptom", "nan"], 2, "words, not a log"),
        (["--symptom", "zzz"], 2, "lists them"),
    ],
)
def test_refusals_of_doctor(cli: Cli, words: list[str], code: int, said: str) -> None:
    answer = cli("doctor", *words)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err


def test_repair_mends_what_audit_says_it_mends(cli: Cli, tmp_path: Path) -> None:
    """The ignore list keeps layers that are quantized."""
    model = quantized(tmp_path, "fp8_dynamic", head=True)
    edit_config(
        model, lambda config: config["quantization_config"].update(ignore=["lm_head", "re:.*up_proj"])
    )
    before = cli("audit", model)
    assert before.code == 1
    assert "`narrowcast repair MODEL OUT` is for" in before.out
    dry = cli("repair", model, tmp_path / "out", "--dry-run")
    assert dry.code == 1  # the errors are still there
    assert not (tmp_path / "out").exists()
    done = cli("repair", model, tmp_path / "out", "--json")
    assert (done.code, done.err) == (0, "")
    assert list(done.json)[:2] == ["schema", "verb"]
    assert done.json["mended"]
    after = cli("audit", tmp_path / "out")
    assert after.code == 0, after.out


def test_refusals_of_repair(cli: Cli, tmp_path: Path) -> None:
    model = quantized(tmp_path, "fp8_dynamic")
    wrong = cli("repair", model, tmp_path / "out", "--only", "scales")
    assert (wrong.code, wrong.out) == (2, "")
    assert "kv_names" in wrong.err
    assert cli("repair", model, model).code == 2
    assert cli("repair", tmp_path / "none", tmp_path / "out").code in (2, 3)
