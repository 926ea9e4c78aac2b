"""The command line inside the test process, on an 80-column terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

import toys
from cli.running import Cli, Ran
from narrowcast.cli import main


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # --help and --version
            code = int(stop.code or 0)
        streams = capsys.readouterr()
        return Ran(code, streams.out, streams.err)

    return run


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy Llama in bf16 whose hidden size 128 does not divide; read it only."""
    return toys.llama(tmp_path_factory.mktemp("llama") / "toy-llama", hidden=192)
