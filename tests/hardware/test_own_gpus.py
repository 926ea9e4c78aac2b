"""A user's own accelerators: read whole, like another row, refused with the key, the file and what was wanted."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import pytest

from narrowcast.errors import InputError, NarrowcastError, UsageError
from narrowcast.hardware.gpus import gpus
from narrowcast.hardware.own_gpus import VARIABLE, known, named, read

WHOLE = """
[gpu.my-card]
like = "b200"
memory = 96
bandwidth = 3.9
peaks = { bf16 = 835, fp8 = 1671.5 }
achieved = { bf16 = 700 }
notes = ["the board in rack 4"]
aliases = ["rack 4"]

[gpu.other]
capability = "8.9"
memory = 20
bandwidth = 0.36
source = "its datasheet"
date = 2026-05-01

[gpu.third]
like = "other"
memory = 40
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "gpus.toml"
    path.write_text(text)
    os.utime(path, (1_750_000_000, 1_750_000_000))
    return path


def test_a_row_like_another(tmp_path: Path) -> None:
    """What is said is the file's, with its day; what is not, the other's, with its own source."""
    path = write(tmp_path, WHOLE)
    row, like = named("My Card", path), gpus["b200"]
    assert row.name == "my-card"
    assert named("RACK-4", path) is not like
    assert (row.memory, row.bandwidth) == (96e9, pytest.approx(3.9e12))
    assert row.peaks == {**like.peaks, "bf16": 835, "fp8": 1671.5}
    assert row.achieved == {"bf16": 700}  # what was measured for another fp8 peak says nothing here
    assert (row.arch, row.capability, row.formats, row.vendor) == ("sm100", (10, 0), like.formats, "nvidia")
    mine = (str(path), date.fromtimestamp(1_750_000_000).isoformat())
    assert [row.source_of(what) for what in ("memory", "bandwidth", "bf16", "fp8", "achieved")] == [mine] * 5
    assert row.source_of("int8") == like.source_of("int8")
    assert row.source_of("fp32") == like.source_of("fp32") != like.source
    assert "the board in rack 4" in row.notes_about()
    assert not any("7.7 to 8.0" in note for note in row.notes)  # about the other's bandwidth
    assert any("half of the operands zero" in note for note in row.notes_about("int8"))


def test_a_row_of_its_own(tmp_path: Path) -> None:
    row = named("other", write(tmp_path, WHOLE))
    assert (row.vendor, row.arch, row.capability, row.sm) == ("nvidia", "sm89", (8, 9), 89)
    assert row.formats == gpus["l4"].formats
    assert row.peak("fp8") is None
    assert row.source == ("its datasheet", "2026-05-01")
    third = named("third", write(tmp_path, WHOLE))
    assert (third.memory_gb, third.bandwidth_tb_s) == (40, 0.36)
    assert third.source_of("bandwidth") == ("its datasheet", "2026-05-01")
    assert third.source_of("memory").words.endswith("gpus.toml")


def test_another_architecture_multiplies_something_else(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[gpu.a]\nlike = "h100"\ncapability = "12.1"\n[gpu.b]\narch = "gfx942"\n'
        '[gpu.c]\narch = "xe2"\nvendor = "intel"\nformats = ["bf16", "int8"]\n',
    )
    rows = {row.name: row for row in read(path)}
    assert "nvfp4" in rows["a"].formats
    assert rows["a"].capability == (12, 1)
    assert (rows["b"].vendor, rows["b"].fp8_kind, rows["b"].memory) == ("amd", "fnuz", None)
    assert (rows["c"].vendor, rows["c"].formats) == ("intel", {"bf16", "int8"})


def test_found_through_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, WHOLE)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert known() is gpus
    with pytest.raises(UsageError, match="unknown GPU"):
        named("my-card")
    monkeypatch.setenv(VARIABLE, str(path))
    assert named("my-card").memory_gb == 96
    assert list(known())[: len(gpus)] == list(gpus)
    assert named("H100") is gpus["h100"]
    other = tmp_path / "other.toml"
    other.write_text('[gpu.mine]\nlike = "l4"\n')
    assert "my-card" not in known(other)  # a file that is named comes before the variable


REFUSED = [
    ("[gpu.x\n", "cannot be read", "line 1"),
    ("x = 1\n", "says something else", "[gpu.NAME]"),
    ('[gpus.x]\nlike = "h100"\n', "says something else", "gpus"),
    ("[gpu]\nx = 1\n", "not a table", "[gpu.x]"),
    ('[gpu.h100]\nlike = "h200"\n', "taken", "h100"),
    ('[gpu.here]\nlike = "h200"\n', "taken", "here"),
    ('[gpu.x]\nlike = "h100"\nram = 1\n', "not known", "got: ram"),
    ('[gpu.x]\nlike = "h1000"\n', "no such GPU", "h1000"),
    ("[gpu.x]\nmemory = 80\n", "architecture", 'capability = "8.9"'),
    ('[gpu.x]\ncapability = "9"\n', "capability", "major.minor"),
    ('[gpu.x]\ncapability = "3.5"\n', "multiplies", "sm35"),
    ('[gpu.x]\nlike = "h100"\nmemory = "80 GB"\n', "memory", "number of GB"),
    ('[gpu.x]\nlike = "h100"\nmemory = -1\n', "memory", "number of GB"),
    ('[gpu.x]\nlike = "h100"\nbandwidth = true\n', "bandwidth", "number of TB/s"),
    ('[gpu.x]\nlike = "h100"\nbandwidth = inf\n', "bandwidth", "number of TB/s"),
    ('[gpu.x]\nlike = "h100"\nbandwidth = 5e-324\n', "bandwidth", "number of TB/s"),
    ('[gpu.x]\nlike = "h100"\nmemory = 1e300\n', "memory", "number of GB"),
    ('[gpu.x]\nlike = "h100"\npeaks = { bf8 = 1 }\n', "peaks", "fp32, tf32"),
    ('[gpu.x]\nlike = "h100"\npeaks = { bf16 = "many" }\n', "peaks", "from 1e-09"),
    ('[gpu.x]\nlike = "h100"\nachieved = 3\n', "achieved", "table"),
    ('[gpu.x]\nlike = "h100"\nformats = ["e5m3"]\n', "formats", "e4m3fn"),
    ('[gpu.x]\nlike = "h100"\nnotes = "one"\n', "notes", "list of texts"),
    ('[gpu.x]\nlike = "h100"\naliases = ["h200"]\n', "aliases", "h200"),
    ('[gpu.x]\nlike = "h100"\nsource = 3\n', "source", "text"),
    ('[gpu.x]\nlike = "h100"\ndate = "yesterday"\n', "date", "2026-05-01"),
]


@pytest.mark.parametrize(("text", "problem", "said"), REFUSED)
def test_what_is_wrong_is_refused(tmp_path: Path, text: str, problem: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read(path)
    assert problem in caught.value.problem
    assert str(path) in str(caught.value.where)
    assert said in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=VARIABLE):
        known(tmp_path / "no.toml")
    with pytest.raises(NarrowcastError):
        known(tmp_path)
