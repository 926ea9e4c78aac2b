"""narrowcast verdict as people run it: pages that say the verdict first, exit codes, JSON, counters of a canary."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.running import Cli
from studies.answer_files import flips, pair, plain, write


def fits(page: str) -> bool:
    return all(len(line) <= 80 and line == line.rstrip() for line in page.splitlines()) and not page.endswith(
        "\n\n"
    )


def text(page: str) -> str:
    return " ".join(page.split())


CASES = [
    (30, 28, 1319, 1000, 0, "no difference shown: -0.152 pt, p = 0.896, and the interval lies within ±2 pt."),
    (60, 20, 1319, 1000, 1, "worse: 40 more answers flipped to wrong than to right of 1319, p = 8.6e-6."),
    (20, 60, 1319, 1000, 0, "better: 40 more answers flipped to right than to wrong of 1319, p = 8.6e-6."),
    (5, 3, 100, 75, 4, "These 100 questions could only see a change of about 7.6 pt; 1562 would see 2 pt."),
]


@pytest.mark.parametrize(("lost", "gained", "n", "right", "code", "said"), CASES)
def test_says_the_verdict_first(
    cli: Cli, tmp_path: Path, lost: int, gained: int, n: int, right: int, code: int, said: str
) -> None:
    files = pair(tmp_path, lost, gained, n, right)
    page, record = cli("verdict", *files), cli("verdict", *files, "--json")
    assert (page.code, record.code) == (code, code)
    assert said in text(page.out)
    assert text(page.out).startswith(record.json["verdict"] + ":")
    assert fits(page.out)
    facts = record.json
    assert (facts["schema"], facts["verb"], facts["exit_code"]) == (1, "verdict", code)
    assert (facts["whole"]["lost"], facts["whole"]["gained"], facts["whole"]["questions"]) == (
        lost,
        gained,
        n,
    )


def test_one_file_twice(cli: Cli, tmp_path: Path) -> None:
    a, _ = pair(tmp_path, 1, 2, 10)
    page = cli("verdict", a, a)
    assert page.code == 0
    assert text(page.out).startswith(
        "no difference shown: every answer is the same, the difference is exactly 0."
    )


def test_invalid(cli: Cli, tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", plain([1, 0, 1], logprob=[-1.0, -2.0, -3.0]))
    b = write(tmp_path / "b.jsonl", plain([1, 0, 1], logprob=[-1.0, float("nan"), -3.0]))
    page, record = cli("verdict", a, b), cli("verdict", a, b, "--json")
    assert (page.code, record.code) == (4, 4)
    assert "invalid: nothing was compared, for 1 reason." in page.out
    assert "log-probs of B are not finite: 1 in all" in text(page.out)
    assert "first: logprob nan: q1 (b.jsonl:2)" in text(page.out)
    assert fits(page.out)
    assert record.json["whole"] is None
    assert record.json["refusals"][0]["reason"] == "nonfinite"


def test_tasks(cli: Cli, tmp_path: Path) -> None:
    for name, (lost, gained) in {
        "a_task_with_quite_a_long_name_for_a_column": (30, 2),
        "arc": (2, 31),
    }.items():
        for side, scores in zip("ab", flips(lost, gained, 400, 100), strict=True):
            write(tmp_path / side / f"{name}.jsonl", plain(scores))
    page = cli("verdict", tmp_path / "a", tmp_path / "b")
    assert page.code == 1
    said = text(page.out)
    assert said.startswith("worse: not all together, but a_task_with_quite_a_long_name_for_a_column (p = ")
    assert "2 tasks are 2 comparisons: read Holm's p" in said
    assert fits(page.out)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--failures", "412/98231", "655/99120"], 1, "worse: 0.241 pt more failures"),
        (["--successes", "412/98231", "655/99120"], 0, "better: 0.241 pt more successes"),
        (["--failures", "412/98231", "455/99120"], 4, "can only be shown of an --effect that matters"),
        (
            ["--failures", "412/98231", "455/99120", "--effect", "0.01"],
            0,
            "no difference shown: it lies within ±1 pt",
        ),
        (["--failures", "4/98", "4/99", "--effect", "0.01"], 4, "it may still be larger than ±1 pt"),
    ],
)
def test_counters(cli: Cli, words: list[str], code: int, said: str) -> None:
    page, record = cli("verdict", *words), cli("verdict", *words, "--json")
    assert (page.code, record.code) == (code, code)
    assert said in text(page.out)
    assert fits(page.out)
    assert record.json["a"]["n"] in (98231, 98)
    assert record.json["single_look"]["low"] > record.json["interval"]["low"]


@pytest.mark.parametrize(
    "words",
    [
        ["verdict"],
        ["verdict", "a.jsonl"],
        ["verdict", "--failures", "1/2"],
        ["verdict", "--failures", "3/2", "1/2"],
        ["verdict", "--failures", "0/0", "1/2"],
        ["verdict", "--failures", "1/2", "1/2", "--successes", "1/2", "1/2"],
        ["verdict", "--failures", "1/2", "1/2", "--metric", "acc"],
        ["verdict", "a.jsonl", "b.jsonl", "--effect", "2"],
        ["verdict", "a.jsonl", "b.jsonl", "--confidence", "nan"],
        ["verdict", "a.jsonl", "b.jsonl", "--k", "-1"],
        ["verdict", "a.jsonl", "b.jsonl", "--k", "0"],
        ["verdict", "a.jsonl", "b.jsonl", "--effect", "1e-300"],
        ["verdict", "--failures", "1/2", "1/2", "--effect", "1e-300"],
    ],
)
def test_usage(cli: Cli, words: list[str]) -> None:
    answer = cli(*words)
    assert answer.code == 2
    assert answer.err.startswith("narrowcast: error: ")


def test_bad_file(cli: Cli, tmp_path: Path) -> None:
    answer = cli("verdict", tmp_path / "none.jsonl", tmp_path / "none.jsonl")
    assert answer.code == 3
    assert "no such file" in answer.err


def test_an_empty_name_is_not_the_current_directory(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a.jsonl", plain([1.0, 0.0]))
    monkeypatch.chdir(tmp_path)
    answer = cli("verdict", "", file)
    assert (answer.code, "no such file" in answer.err) == (3, True)


def test_is_light(tmp_path: Path) -> None:
    """Nothing heavy is imported for a verdict."""
    a, b = pair(tmp_path, 1, 2, 10)
    code = (
        "import sys; from narrowcast.cli import main; "
        f"main(['verdict', {str(a)!r}, {str(b)!r}]); "
        "print([m for m in ('torch', 'numba', 'scipy', 'transformers') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
