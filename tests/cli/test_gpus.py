"""``narrowcast gpus``: every row on 80 columns, one with its sources, a user's own, the machine's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.running import Cli
from narrowcast.hardware.gpus import gpus


def fits(text: str) -> bool:
    lines = text.splitlines()
    return all(len(line) <= 80 and line == line.rstrip() for line in lines) and "\n\n\n" not in text


def test_all_of_them(cli: Cli) -> None:
    page = cli("gpus")
    assert page.code == 0
    assert fits(page.out)
    assert [name for name in gpus if f"\n{name} " not in page.out] == []
    h100 = next(line for line in page.lines if line[:1] == ["h100"])
    assert h100 == ["h100", "sm90", "80", "3.35", "989", "1979", "1979", "-", "fn", "-"]
    mi300x = next(line for line in page.lines if line[:1] == ["mi300x"])
    assert mi300x == ["mi300x", "gfx942", "192", "5.3", "1307", "2615", "2615", "-", "fnuz", "-"]
    assert "mx+nv" in next(line for line in page.lines if line[:1] == ["b200"])
    assert [row["name"] for row in cli("gpus", "--json").json["gpus"]] == list(gpus)


@pytest.mark.parametrize("name", gpus)
def test_one(cli: Cli, name: str) -> None:
    """Every number is there, and each has a source that is written below."""
    page, row = cli("gpus", name), gpus[name]
    assert page.code == 0
    assert fits(page.out)
    lines = {line[0]: line for line in page.lines if line}
    whole = " ".join(page.out.split())
    for column in row.peaks:
        number = re.match(r"\[\d+\]", lines[column][-1])
        assert number is not None
        source = row.source_of(column)
        assert f"{number[0]} {source.words}, {source.date}" in whole
    assert all(text in whole for text in row.notes)


def test_a_page(cli: Cli) -> None:
    page = cli("gpus", "NVIDIA H100 80GB HBM3")
    lines = {line[0]: line[1:] for line in page.lines if line}
    assert lines["fp8"] == ["1979", "TFLOPS", "591", "FLOP/B", "1403", "70.9", "%", "[1][2]"]
    assert lines["bf16"] == ["989", "TFLOPS", "295", "FLOP/B", "794.5", "80.3", "%", "[1][2]"]
    assert lines["bandwidth"] == ["3.35", "TB/s", "[1]"]
    assert lines["fp4"] == ["-"]
    assert "[2] largest products found by the MAMF finder" in page.out
    assert "not known" in cli("gpus", "rtx 5090").out
    assert "0.15 POPS" in cli("gpus", "b300").out


def test_json_counts_in_bytes_and_operations(cli: Cli) -> None:
    row = cli("gpus", "h100", "--json").json["gpu"]
    assert (row["memory"], row["bandwidth"]) == (80e9, pytest.approx(3.35e12))
    assert row["peaks"]["bf16"] == 989e12
    assert row["peaks"]["fp4"] is None
    assert row["ridges"]["bf16"] == pytest.approx(295.2, abs=0.1)
    assert row["achieved"]["fp8"] == pytest.approx(1402.6e12)
    assert row["capability"] == [9, 0]
    assert row["sources"]["achieved"]["date"] == "2026-08-22"
    assert set(row["sources"]) == {
        "memory",
        "bandwidth",
        "fp32",
        "tf32",
        "bf16",
        "fp16",
        "fp8",
        "int8",
        "achieved",
    }
    assert {"text", "about"} == set(row["notes"][0])


def test_ones_own(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text('[gpu.my-card]\nlike = "h100"\nbandwidth = 3.9\n')
    page = cli("gpus", "my card", "--gpus", file)
    assert page.code == 0
    assert "3.9 TB/s" in page.out
    assert str(file) in page.out.replace("\n  ", "")
    assert "my-card" in cli("gpus", "--gpus", file).out
    assert cli("gpus", "my-card").code == 2
    monkeypatch.setenv("NARROWCAST_GPUS", str(file))
    assert cli("gpus", "my-card").out == page.out
    file.write_text('[gpu.my-card]\nlike = "h100"\nram = 3.9\n')
    wrong = cli("gpus", "my-card")
    assert wrong.code == 3
    assert "ram" in wrong.err
    assert str(file) in wrong.err


def test_other_verbs_know_ones_own(
    cli: Cli, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text('[gpu.my-card]\nlike = "h100"\n')
    monkeypatch.setenv("NARROWCAST_GPUS", str(file))
    asked = ["audit", llama, "--quick", "--for", "vllm", "--gpu"]
    mine, like = cli(*asked, "my-card", "--json"), cli(*asked, "h100", "--json")
    assert mine.code == like.code
    assert mine.json["findings"] == like.json["findings"]
    unknown = cli(*asked, "my-cart")
    assert unknown.code == 2
    assert "did you mean my-card" in unknown.err


def test_here(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executables that answer as the driver does."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\necho 'NVIDIA L4, 23034, 8.9'\necho 'NVIDIA L4, 23034, 8.9'\necho 'Tesla T4, 15360, 7.5'\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    page = cli("gpus", "--here")
    assert page.code == 0
    assert fits(page.out)
    assert page.out.startswith("2 x l4\n")
    assert "\nt4\n" in page.out
    assert f"{23034 * (1 << 20) / 1e9:.4g} GB" in page.out
    assert "nvidia-smi on this machine" in page.out
    assert [row["name"] for row in cli("gpus", "here", "--json").json["here"]] == ["l4", "l4", "t4"]
    assert cli("gpus", "h100", "--here").code == 2


def test_an_unknown_one_names_its_neighbours(cli: Cli) -> None:
    page = cli("gpus", "h1000")
    assert page.code == 2
    assert "did you mean h100" in page.err
    assert "Traceback" not in page.err


def test_it_needs_no_arrays() -> None:
    """Neither numpy nor torch is imported to look a card up."""
    code = (
        "import sys; from narrowcast.cli import main; assert main(['gpus', 'h100']) == 0; "
        "assert not {'numpy', 'torch'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
