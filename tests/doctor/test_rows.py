"""Every row fires on the line it is for, says so in an engine's own words, and leaves other lines alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from doctor import vllm_messages
from narrowcast.doctor.conjunctions import CONJUNCTIONS
from narrowcast.doctor.reading import COMPLAINTS, EXPECTED, FACTS, KINDS, diagnose
from narrowcast.doctor.rows import Complaint, Fact
from narrowcast.hardware.names import Name, every

FIRING = [
    tuple(line.split("\t"))
    for line in Path(__file__).with_name("firing.txt").read_text().splitlines()
    if not line.startswith("#")
]
# One line may rightly give two findings.
TOGETHER = {"weight-only-block-format", "kv-quantized", "failed-later", "ends-in-error"}
# The engine that a lone line is read as where it does not show it itself.
BANNERS = {
    "vllm": "(APIServer pid=1) INFO 11-30 01:00:00 [api_utils.py:347] vLLM server version 0.0.1, serving model m",
    "sglang": "[2026-11-30 01:00:00] Load weight begin. avail mem=1.00 GB",
    "tensorrt-llm": "[11/30/2026-01:00:00] [TRT-LLM] [I] Set logger level to INFO",
}


def matched(row: Fact | Complaint) -> list[re.Match[str]]:
    """Where the row's own regex matches in lines that are meant for it."""
    names = {row.name} if isinstance(row, Complaint) else set()
    meant = [line for name, line in FIRING if name in names or (isinstance(row, Fact) and " = " in name)]
    return [match for line in meant if (match := re.search(row.regex, line)) is not None]


@pytest.mark.parametrize(("name", "line"), FIRING)
def test_a_line_gives_what_it_says(name: str, line: str) -> None:
    engine = next(row for row in (*COMPLAINTS, *FACTS) if _gives(row, name, line)).engines[0]
    report = diagnose([BANNERS[engine], line])
    kind, equals, what = name.partition(" = ")
    findings = {finding.name for finding in report.findings}
    if not equals:
        assert name in findings
        assert findings <= {name, *TOGETHER}
    elif kind == "version":
        assert what in (report.version, diagnose([line]).version)
    else:
        assert (kind, what) in {(one.kind, one.what) for one in report.running}


def _gives(row: Fact | Complaint, name: str, line: str) -> bool:
    kind = name.partition(" = ")[0]
    return (row.name if isinstance(row, Complaint) else row.kind) in (name, kind) and bool(
        re.search(row.regex, line)
    )


def test_every_row_has_a_line() -> None:
    lacking = [row for row in (*FACTS, *COMPLAINTS) if not matched(row) and getattr(row, "least", 1) == 1]
    assert lacking == []


def test_words_of_a_row_are_in_its_lines() -> None:
    """Else the row is never tried."""
    for row in (*FACTS, *COMPLAINTS):
        for match in matched(row):
            assert set(re.findall(r"[A-Za-z]\w*", match.string)) & set(row.words), (row, match.string)


def test_rows_of_vllm_are_messages_of_its_source() -> None:
    source = vllm_messages.source()
    if source is None:
        pytest.skip("the engine's environment (.venv-engine) is not installed; engines/setup.sh makes it")
    stamp = "vLLM 0.32 "
    stamped = [row for row in (*FACTS, *COMPLAINTS) if row.source.startswith(stamp)]
    assert len(stamped) > 80
    for row in stamped:
        path = source / row.source.removeprefix(stamp)
        assert path.is_file(), row
        lines = [*matched(row), *(re.search(row.regex, line) for line in BANNERS.values())]
        found = [match for match in lines if match is not None]
        assert any(vllm_messages.says(path, match.string, match.span()) for match in found), row


@pytest.mark.parametrize(
    "name", [row for row in every() if row.says], ids=lambda row: f"{row.engine} {row.name}"
)
def test_what_an_engine_says_of_a_name_is_understood(name: Name) -> None:
    """The messages that `narrowcast engines` quotes are ones that the doctor finds in a log."""
    report = diagnose([BANNERS[name.engine], f"ValueError: {name.says}"])
    found = {finding.name for finding in report.findings}
    assert any(row.name in found and re.search(row.regex, name.says) for row in COMPLAINTS), found


def test_names_and_kinds_are_consistent() -> None:
    names = [row.name for row in (*COMPLAINTS, *CONJUNCTIONS)]
    assert len(names) == len(set(names))
    kinds = {row.kind for row in FACTS}
    assert kinds == set(KINDS)
    assert {row.kind for row in EXPECTED} <= kinds
    for row in CONJUNCTIONS:
        assert {kind for kind, _ in row.facts} <= kinds
        assert set(row.complaints) <= set(names)
        assert set(row.absent) <= {*names, *kinds}


@pytest.mark.parametrize("row", COMPLAINTS, ids=lambda row: row.name)
def test_texts_fill_from_the_regex(row: Complaint) -> None:
    groups = dict.fromkeys(re.compile(row.regex).groupindex, "x")
    for text in (row.said, row.consequence, row.remedy):
        assert text.format_map(groups).endswith((".", "x")), text
