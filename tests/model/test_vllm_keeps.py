"""What layers keep, against vLLM 0.32's own specs of the same models: golden numbers that vllm_keeps.py reads off."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest

from narrowcast.model.families import geometry
from narrowcast.model.geometry import Attention

HERE, ENGINE = Path(__file__).parent, Path(__file__).parents[2] / ".venv-engine/bin/python"
ROWS: list[dict[str, Any]] = json.loads((HERE / "vllm_keeps.json").read_text())
BY_LAYER = [row for row in ROWS if "keeps" in row]


def kept(attention: Attention) -> tuple[Any, ...]:
    a = attention
    if a.kind == "state":
        return "state", a.state - a.recurrent, a.recurrent
    return a.kind, a.kv_heads, a.k_dim, a.v_dim, a.window


def of_vllm(spec: list[Any]) -> tuple[Any, ...]:
    """The convolution's state comes first, the recurrence's second where there is one."""
    if spec[0] == "state":
        return ("state", *map(prod, spec[1:]), *[0] * (3 - len(spec)))
    return tuple(spec)


@pytest.mark.parametrize("row", BY_LAYER, ids=[row["name"] for row in BY_LAYER])
def test_every_layer_keeps_what_vllm_keeps(row: dict[str, Any]) -> None:
    ours: Counter[tuple[Any, ...]] = Counter()
    for attention in geometry(row["config"]).attention:
        ours[kept(attention)] += attention.keeping
    assert ours == {of_vllm(spec): count for count, *spec in row["keeps"]}


SHAPES = [row for row in ROWS if "shapes" in row]


@pytest.mark.parametrize("row", SHAPES, ids=[row["name"] for row in SHAPES])
def test_states_are_as_large_as_vllm_calculates(row: dict[str, Any]) -> None:
    states = [kept(a) for a in geometry(row["config"]).attention if a.kind == "state"]
    assert states == [of_vllm(["state", *row["shapes"]])]


@pytest.mark.slow
def test_the_golden_numbers_are_those_of_the_engine() -> None:
    if not ENGINE.exists():
        pytest.skip("the engine's environment (.venv-engine) is not installed; engines/setup.sh makes it")
    asked = [{name: row[name] for name in row if name not in ("keeps", "shapes")} for row in ROWS]
    script = HERE / "vllm_keeps.py"
    done = subprocess.run([ENGINE, script], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ROWS
