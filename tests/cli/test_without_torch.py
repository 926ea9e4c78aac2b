"""Verbs that run models say what is missing where torch or transformers is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from narrowcast.cli import main
from narrowcast.verbs import running


@pytest.mark.parametrize("missing", ["torch", "transformers"])
@pytest.mark.parametrize(
    "line",
    ["evaluate MODEL", "trace MODEL", "legal MODEL", "calibrate MODEL -o OUT", "calibrate-kv MODEL OUT"],
)
def test_what_is_missing_is_named(
    line: str, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> Any:
        return None if name == missing else find_spec(name)

    monkeypatch.setattr(running, "find_spec", absent)
    assert main(line.split()) == 2
    assert f"running models needs {missing}\n  remedy: pip install" in capsys.readouterr().err
