"""``narrowcast audit`` and ``repair`` called the wrong way, and on names that want to be more than names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import toys
from audit.editing import quantized
from cli.running import Cli


@pytest.mark.parametrize("option", ["--sarif", "--html"])
def test_a_report_replaces_no_file_of_the_model(cli: Cli, tmp_path: Path, option: str) -> None:
    model = toys.llama(tmp_path / "m")
    before = (model / "config.json").read_bytes()
    page = cli("audit", model, "--quick", option, model / "config.json")
    assert page.code == 2
    assert "would replace a file of the model" in page.err
    page = cli("audit", tmp_path / "m", "--quick", option, model / "model.safetensors")
    assert page.code == 2
    assert (model / "config.json").read_bytes() == before
    assert cli("audit", model, "--quick", "--sarif", model / "audit.sarif").code == 0
    assert cli("audit", model, "--quick", "--sarif", model / "audit.sarif").code == 0


def test_reports_are_checked_before_the_work(cli: Cli, tmp_path: Path) -> None:
    """The model does not even exist: what is wrong with the report is said first."""
    for file in ("", tmp_path, tmp_path / "no" / "x.sarif"):
        page = cli("audit", tmp_path / "m", "--sarif", file)
        assert page.code == 3
        assert "the report cannot be written" in page.err
    assert cli("audit", tmp_path / "m", "--sarif", "x", "--html", "x").code == 2


@pytest.mark.parametrize("option", ["--container", "--preset"])
def test_repair_knows_its_names(cli: Cli, tmp_path: Path, option: str) -> None:
    """Also where nothing needs them."""
    page = cli("repair", quantized(tmp_path, "fp8_dynamic"), tmp_path / "out", option, "fp8_blck")
    assert page.code == 2
    assert "unknown" in page.err


def test_doctor_without_standard_input() -> None:
    """A closed standard input is an empty log, and no error of Python."""
    command = [sys.executable, "-m", "narrowcast", "doctor", "-"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=lambda: os.close(0))
    assert done.returncode == 3
    assert "nothing but empty lines" in done.stderr
