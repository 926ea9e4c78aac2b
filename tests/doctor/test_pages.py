"""The pages at 80 columns: nothing is wider, nothing is lost, names of flags stay whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from narrowcast.doctor import diagnose, read, symptoms
from narrowcast.report.doctor import doctor_page, symptom_page, symptoms_page

LOGS = sorted(
    path for path in Path(__file__).with_name("logs").glob("*.log") if path.stem != "another_program"
)


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def flat(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_log_page_has_every_finding(path: Path) -> None:
    report = diagnose(read(path))
    lines = doctor_page(report)
    assert max(map(len, lines)) <= 80
    text = flat(lines)
    for finding in report.findings:
        assert f"{finding.name} (" in text
        assert flat([finding.said]) in text
        assert flat([finding.consequence]) in text
    for fact in report.running:
        assert fact.what in text
    for kind in report.unsaid:
        assert kind in text.partition("Not said in this log:")[2]


def test_a_healthy_page() -> None:
    path = next(path for path in LOGS if path.stem == "tensorrt_llm_0_18_mpi")
    assert doctor_page(diagnose(read(path))) == [
        "TensorRT-LLM 0.18.0, 7 lines",
        "",
        "  backend              PyTorch",
        "  memory for KV cache  26.91 GiB",
        "  KV cache size        220480 tokens",
        "  state                serving",
        "",
        "Nothing to report.",
    ]


def test_errors_show_their_line_and_come_first() -> None:
    path = next(path for path in LOGS if path.stem == "sglang_0_5_too_little_memory")
    lines = doctor_page(diagnose(read(path)))
    heads = [line for line in lines if re.match(r"\d+ (?:error|warning|note)", line)]
    assert heads == ["1 error:", "1 warning:"]
    assert "says: RuntimeError: Not enough memory." in flat(lines)


@pytest.mark.parametrize("name", symptoms)
def test_a_symptom_page(name: str) -> None:
    lines = symptom_page(symptoms[name])
    assert max(map(len, lines)) <= 80
    text = flat(lines)
    for number, cause in enumerate(symptoms[name].causes, 1):
        assert f"{number}. {cause.title} why: {cause.why} check: {cause.check} remedy: {cause.remedy}" in text


def test_the_page_of_symptoms() -> None:
    lines = symptoms_page()
    assert max(map(len, lines)) <= 80
    assert all(re.search(rf"^  {name}  ", "\n".join(lines), re.M) for name in symptoms)


def test_the_manual_says_what_the_program_does() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    path = next(path for path in LOGS if path.stem == "vllm_0_11_fp8_ampere")
    assert "\n".join(["```text", *doctor_page(diagnose(read(path))), "```"]) in manual
    rows = [f"| `{row.name}` | {row.seen} |" for row in symptoms.values()]
    assert "\n".join(rows) + "\n\n" in manual
