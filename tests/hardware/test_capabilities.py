"""The capabilities that vLLM's classes ask for, against our rows, by importing them: some 10 s, more when cold."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from narrowcast.hardware import names
from narrowcast.hardware.engines import paths
from narrowcast.hardware.gpus import gpus
from narrowcast.hardware.names import METHOD
from narrowcast.tensors.presets import presets

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-engine" / "bin" / "python"
CT = "compressed-tensors"
# vLLM's class for a layer, and a layer of ours that gets it. None of our rows reaches below 7.5.
LAYERS = {
    "CompressedTensorsW8A8Fp8": (CT, "fp8_dynamic"),
    "CompressedTensorsW8A16Fp8": (CT, "fp8_dynamic"),
    "CompressedTensorsW8A8Int8": (CT, "int8"),
    "CompressedTensorsW4A8Fp8": (CT, "w4afp8"),
    "CompressedTensorsWNA16": (CT, "w4a16"),
    "CompressedTensorsWNA8Int": (CT, "w4a8"),
    "CompressedTensorsW4A4Fp4": (CT, "nvfp4"),
    "CompressedTensorsW4A4Mxfp4": (CT, "mxfp4"),
    "CompressedTensorsW4A8Mxfp4": (CT, "mxfp4xfp8"),
    "CompressedTensorsW8A8Mxfp8": (CT, "mxfp8"),
    "QuarkW8A8Fp8": ("quark", "fp8_dynamic"),
    "QuarkW8A8Fp8PerBlock": ("quark", "fp8_block"),
    "QuarkW8A8Int8": ("quark", "int8"),
    "QuarkW4A16Int4": ("quark", "w4a16"),
    "QuarkNVFP4": ("quark", "nvfp4"),
    "QuarkOCP_MX": ("quark", "mxfp4"),
}
# Classes that no layer of ours gets.
OTHERS = {
    "CompressedTensorsW4A8Int": "experts and CPUs of Arm",
    "CompressedTensorsWNA4Int": "4-bit inputs",
    "CompressedTensorsWNA8O8Int": "8-bit outputs",
    "QuarkW4A8_MXFP4_FP8": "static FP8 inputs, which asks for calibration",
}


@pytest.fixture(scope="module")
def asked() -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed here: engines/setup.sh installs its CPU build")
    script = Path(__file__).with_name("vllm_capabilities.py")
    done = subprocess.run([PYTHON, script], capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_methods_ask_for_the_capability_of_their_rows(asked: dict[str, Any]) -> None:
    version = names.VERSIONS["vllm"][0]
    rows = {row.name: row.low for row in names.rows("vllm", METHOD) if row.holds(version)}
    assert rows == asked["methods"]


@pytest.mark.slow
def test_classes_ask_for_the_capability_from_which_our_rows_run(asked: dict[str, Any]) -> None:
    assert asked["schemes"].keys() == LAYERS.keys() | OTHERS.keys()
    known = sorted({gpu.sm for gpu in gpus.values() if gpu.sm is not None})
    for cls, (container, preset) in LAYERS.items():
        running = {
            gpu.sm: path
            for gpu in gpus.values()
            if gpu.sm is not None
            and (path := paths("vllm", container, presets[preset].linear, gpu)).refusal is None
        }
        if cls == "CompressedTensorsW8A8Fp8":  # below it the weight-only class takes over
            running = {sm: path for sm, path in running.items() if path.low_precision}
        least = next(sm for sm in known if sm >= max(asked["schemes"][cls], 75))
        assert min(running) == least, (cls, asked["schemes"][cls])
