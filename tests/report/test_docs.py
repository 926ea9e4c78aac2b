"""The generated reference pages: committed as they are made, noticed when they are not, every row in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from narrowcast.arguments import VERBS, parsers
from narrowcast.containers import containers
from narrowcast.numbers.formats import formats
from narrowcast.report import docs
from narrowcast.report.containers import written
from narrowcast.tensors.presets import presets
from narrowcast.tensors.schemes import schemes

FOLDER = Path(__file__).parents[2] / "docs"


def test_committed_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--check"]) == 0, capsys.readouterr().err


def test_every_row_is_there() -> None:
    made = docs.pages()
    for name, rows in (("formats.md", formats), ("schemes.md", schemes), ("presets.md", presets)):
        assert [row for row in rows if f"| `{row}` |" not in made[name]] == []
    assert all(f"## {verb}\n" in made["cli.md"] for verb in VERBS)


def test_a_stale_page_is_noticed_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs, "FOLDER", tmp_path)
    assert docs.main(["--check"]) == 1
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    (tmp_path / "presets.md").write_text("old\n")
    assert docs.main(["--check"]) == 1
    assert "presets.md in docs/ differ" in capsys.readouterr().err
    assert (tmp_path / "presets.md").read_text() == "old\n"


def test_pages_do_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    wide = docs.pages()
    monkeypatch.setenv("COLUMNS", "60")
    assert docs.pages() == wide


def test_help_names_every_container_that_is_written() -> None:
    made = parsers(dict.fromkeys(VERBS, lambda _: 0))
    for verb, names in (
        ("convert", [name for name, row in containers.items() if row.document is not None]),
        ("quantize", [row.name for row in written()]),
    ):
        said = re.search(r"Containers are ([^.;]*)[.;]", made[verb].format_help())
        assert said is not None
        assert re.split(r",\s+|\s+and\s+", said[1]) == names
