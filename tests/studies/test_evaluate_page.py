"""The page of an evaluation: whole in itself, escaped, with the numbers that were found, whatever part is absent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from narrowcast.cli import main
from narrowcast.jobs.quantize import quantize
from narrowcast.report.evaluate_page import _strip, html_page
from narrowcast.report.tables import number
from narrowcast.studies.evaluation import (
    Asked,
    CacheRow,
    Continuation,
    Divergence,
    Evaluation,
    Gap,
    Greedy,
    Histogram,
)
from report.pages import Reader, check_whole
from studies import calibrated_toys as toys
from studies.evaluations import JUMP, alone, divergence, everything, gap, interval

PARTS = ("Predictions", "Layers", "KV caches", "Greedy text", "Retrieval", "Structured output")


def words_of(page: str) -> str:
    """What is read, with single blanks, the style left out."""
    check_whole(page)
    unstyled = re.sub(r"<style.*?</style>", "", page, flags=re.DOTALL)
    return " ".join(" ".join(Reader(unstyled).words).split())


def sections(page: str) -> list[str]:
    return re.findall(r"<h2>([^<]*)</h2>", page)


def tone(page: str) -> str:
    found = re.search(r"<p class='says (\w+)'>", page)
    assert found is not None
    return found[1]


def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent, child = toys.llama(tmp_path / "parent"), tmp_path / "int4"
    quantize(parent, child, "w4a16")
    files = [arg for file in toys.texts(tmp_path / "texts", 90, 33, 57) for arg in ("--text", file)]
    out = tmp_path / "page.html"
    options = ["--context", "40", "--kv", "fp8_e4m3,int4_per_token_head", "--greedy", "1", "--html", str(out)]
    assert main(["evaluate", str(child), "--against", str(parent), *files, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    page = out.read_text(encoding="utf-8")
    words = words_of(page)
    assert sections(page) == list(PARTS[:4])
    assert found["verdict"]["sentence"][1:] in words
    assert found["text"]["sha256"][:12] in words
    for side in ("parent", "child"):
        assert number(found[side]["perplexity"]["estimate"], 5) in words
        assert found[side]["path"] in words
    kl, top1 = found["gap"]["kl"], found["gap"]["top1"]
    for end in ("estimate", "low", "high"):
        assert number(kl[end], 3) in words
        assert f"{100 * top1[end]:.2f} %" in words
    for row in found["caches"]:
        assert row["mode"] in words
        assert number(row["alone"]["kl"]["estimate"], 3) in words
    for row in found["divergence"]["layers"]:
        assert f"{row['cosine']:.5f}" in words
    for row in found["gap"]["worst"]:
        assert number(row["kl"], 3) in words
        assert row["token"] in words
    assert len(page.encode()) < 1_500_000


def test_every_part_is_there() -> None:
    page = html_page(everything())
    words = words_of(page)
    assert sections(page) == list(PARTS)
    assert sum(tag == "figure" for tag, _ in Reader(page).tags) == 4
    numbers = (
        "16.01", "16.83", "+5.17 %", "+3.11 % to +7.42 %", "0.0314", "0.0251 to 0.039", "91.23 %", "88.76 %",
        "-1.32 pt", "6.41 points (rms)", "2.61", "97 % → <0.0001 %", "0.0021", "0.0333", "NaN", "led by 0.062 nats",
        "part after 3 tokens", "4 / 2 of 4", "1 of 2 continuations of 32", "1 min 01 s",
        "median 0.013", "mean 0.031", "99 % 0.41",
    )  # fmt: skip
    assert [one for one in numbers if one not in words] == []
    assert "of 8 outputs parent child JSON 7 6 fits the schema 5 3" in words
    assert not re.search(r"#0[0-9a]0[0-9b]0[0-9d]\b", page)  # placeholders of colours
    assert "prefers-color-scheme: dark" in page


def test_what_models_and_files_say_is_escaped() -> None:
    page = html_page(everything())
    read = check_whole(page)
    assert not [tag for tag, _ in read.tags if tag == "script"]
    assert sum(tag == "style" for tag, _ in read.tags) == 1 + 4  # the page's and those of plots
    assert {c for c in page if not c.isprintable()} == {"\n"}
    assert page.count("alert(") == page.count("&lt;script&gt;alert(")
    assert page.count("alert(") > 15  # every place where words of others stand
    assert "⏎⇥" in page  # blanks of a token are seen
    assert "(empty)" in page


Absent = Callable[[Evaluation], Evaluation]
ABSENT: dict[str, tuple[Absent, tuple[str, ...]]] = {
    "caches": (lambda e: replace(e, caches=()), ("KV caches",)),
    "greedy": (lambda e: replace(e, greedy=None), ("Greedy text",)),
    "retrieval": (lambda e: replace(e, retrieval=None), ("Retrieval",)),
    "structured": (lambda e: replace(e, structured=None), ("Structured output",)),
    "divergence": (lambda e: replace(e, divergence=None), ("Layers",)),
    "worst": (lambda e: replace(e, gap=gap(worst=0)), ()),
    "parent": (
        lambda e: replace(e, parent=None, gap=None, divergence=None, greedy=None, caches=tuple(
            replace(row, gap=None) for row in e.caches)),
        ("Predictions", "Layers", "Greedy text"),
    ),
    "layers looked at": (
        lambda e: replace(e, divergence=Divergence(tuple(
            replace(row, local=None, expected=None) for row in divergence().layers))),
        (),
    ),
    "all": (lambda e: Evaluation(e.text, e.child), PARTS),
}  # fmt: skip


@pytest.mark.parametrize("part", ABSENT)
def test_what_was_not_measured_has_no_section(part: str) -> None:
    without, gone = ABSENT[part]
    page = html_page(without(everything()))
    check_whole(page)
    assert sections(page) == [name for name in PARTS if name not in gone]
    assert "None" not in words_of(page)


def test_models_alone_have_counts_alone() -> None:
    found = everything()
    assert found.retrieval is not None
    cells = tuple(replace(cell, parent=None) for cell in found.retrieval.cells)
    assert found.structured is not None
    found = replace(
        found,
        retrieval=replace(found.retrieval, cells=cells[:3]),  # and a hole in the grid
        structured=replace(found.structured, parent_json=None, parent_valid=None),
    )
    words = words_of(html_page(found))
    assert "child, of tasks solved" in words
    assert "JSON - 6 fits the schema - 3" in words


def identical(count: int = 3) -> Evaluation:
    zero, one = interval(0, 0, 0), interval(1, 1, 1)
    nothing = gap(worst=0)
    flat = replace(nothing.kl_percentiles, at=((50.0, 0.0),), least=0.0, largest=0.0)
    same = Gap(True, zero, zero, flat, Histogram((1e-8, 1.0), (0,), 9), one, one, zero, 0.0, flat)
    layers = tuple(
        replace(row, relative=0.0, cosine=1.0, least_cosine=1.0) for row in divergence(count).layers
    )
    cache = CacheRow("fp8_e4m3, unity", 11520, 0.0, interval(17, 15, 19), same, same)
    return replace(
        everything(), gap=same, divergence=Divergence(layers), caches=(cache,), greedy=None, retrieval=None,
        structured=None,
    )  # fmt: skip


def test_identical_models_have_nothing_to_draw() -> None:
    page = html_page(identical())
    check_whole(page)
    assert (tone(page), sections(page)) == ("good", ["KV caches"])
    assert "<svg" not in page
    assert "100.00 % to 100.00 %" in page


def test_one_document_gives_no_intervals() -> None:
    found = everything()
    assert found.gap is not None
    one = replace(
        found.gap, kl=alone(0.03), perplexity=alone(0.05), top1=alone(0.9), top5=alone(0.9), shift=alone(-0.01)
    )  # fmt: skip
    caches = tuple(replace(row, alone=one if row.alone else None, gap=one) for row in found.caches)
    page = html_page(replace(found, gap=one, caches=caches))
    words = words_of(page)
    assert words.count("one document") == 5 + 1  # and the verdict's
    assert "inf" not in words
    assert "class=range" not in page


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [(Asked(max_kl=0.1), "good"), (Asked(max_kl=0.03), "undecided"), (Asked(max_kl=0.01), "bad"), (Asked(), "open")],
)  # fmt: skip
def test_verdicts_have_colours_and_limits_are_drawn(asked: Asked, wanted: str) -> None:
    page = html_page(replace(everything(), divergence=None, asked=asked))
    assert tone(page) == wanted
    assert page.count("class=limit") == (asked.max_kl is not None)
    assert (f"at most {asked.max_kl} was asked for" in words_of(page)) == (asked.max_kl is not None)


def test_a_probable_bug_is_above_all_numbers_and_in_the_plots() -> None:
    page = html_page(everything())
    assert tone(page) == "bad"
    assert page.index("probable bug") < page.index("class=numbers")
    assert page.count(f">layer {JUMP}<") == 2
    elsewhere = replace(divergence().faults[0], where="the embedding", part=None)
    page = html_page(replace(everything(), divergence=replace(divergence(), faults=(elsewhere,))))
    assert "The embedding is the first" in page
    assert f">layer {JUMP}<" not in page


def test_strips_are_to_scale() -> None:
    """From 0 to 0.04 over 148 units from 6 on."""
    drawn = _strip(interval(0.02, 0.01, 0.03), 0.0, 0.04)
    assert "M6.0 2V22" in drawn
    assert "M43.0 12H117.0" in drawn
    assert 'cx="80.0"' in drawn
    assert "M154.0 2V22" in drawn


@pytest.mark.parametrize("layers", [1, 2, 120])
def test_models_of_any_depth(layers: int) -> None:
    whole = divergence(layers)
    check_whole(
        html_page(replace(everything(), divergence=replace(whole, faults=whole.faults[: layers - 1])))
    )


def test_continuations_show_where_they_part() -> None:
    row = Continuation("d", "p", "one two\nthree", "one  two  four", 2, 1.0)
    page = html_page(replace(everything(), greedy=Greedy(8, 4, 0, (row,), 2.0)))
    assert "<span class=same>one two </span>three" in page
    assert "<span class=same>one two </span>four" in page


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    text = f"import sys\n{code}\nfrom narrowcast.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", text, *words], capture_output=True, text=True, timeout=120)


def test_no_library_is_said_before_the_work(tmp_path: Path) -> None:
    out = tmp_path / "x.html"
    done = run("sys.modules['matplotlib'] = None", "evaluate", str(tmp_path), "--html", str(out))
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'narrowcast[page]'" in done.stderr
    assert not out.exists()


def test_the_page_replaces_no_file_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "config.json"
    file.write_text("{}")
    assert main(["evaluate", str(tmp_path), "--against", str(file.parent), "--html", str(file)]) == 2
    assert "would replace a file of the model" in capsys.readouterr().err
    assert file.read_text() == "{}"
