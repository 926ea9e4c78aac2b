"""Other projects' own code, in virtual environments beside the tests' own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def run(venv: str, script: str, arguments: Sequence[object] = (), given: str = "") -> list[dict[str, Any]]:
    """The lines of JSON that a script of tests/containers prints; skips where the environment is not there."""
    python = ROOT / venv / "bin/python"
    if not python.exists():
        pytest.skip(f"needs {venv} (benchmarks/setup.sh makes it)")
    done = subprocess.run(
        [python, ROOT / "tests/containers" / script, *map(str, arguments)],
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
