"""The rows against runs of vLLM's CPU build; test_drift.py holds them against the engines' sources."""

from __future__ import annotations

import json
from pathlib import Path

from narrowcast.containers import containers
from narrowcast.hardware.engines import paths
from narrowcast.hardware.gpus import gpus
from narrowcast.numbers.formats import BF16
from narrowcast.tensors.presets import presets

ROOT = Path(__file__).parents[2]


def word(container: str, preset: str) -> str:
    """The container's own word for a preset."""
    spelling = containers[container].spelling
    assert spelling is not None
    return spelling(presets[preset].linear, BF16).format


def test_cpu_rows_agree_with_runs() -> None:
    """What vLLM's CPU build did with a file of each kind is what the rows say of the CPU.

    A layer of 576 rows is refused in blocks of 128 for its shape, which tests of tensor parallelism cover.
    """
    files = json.loads((ROOT / "engines" / "results.json").read_text())["avx512_bf16"]["files"]
    tried = 0
    for name, run in files.items():
        container, preset = name.split("/")
        if "is not divisible by weight quantization block" in run.get("message", ""):
            continue
        path = paths("vllm", container, presets[preset].linear, gpus["cpu"], format=word(container, preset))
        assert (path.refusal is None) is run["loads"], (name, path.refusal, run)
        tried += 1
    assert tried > 45
