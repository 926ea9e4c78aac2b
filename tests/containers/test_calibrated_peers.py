"""The same model with calibrated scales, by llm-compressor, ModelOpt and by narrowcast: the same tensors.

Names and shapes are equal, and where the dtypes are too (ModelOpt, NVFP4 of llm-compressor) so is the rest of the
layout. llm-compressor keeps FP8 scales in bf16, narrowcast in fp32, which loses nothing. Values differ with the text
that ran; that they lie within a factor of four tells a multiplier from a divisor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from narrowcast.jobs.quantize import quantize
from narrowcast.studies.calibrate import calibrate

PEERS = Path(__file__).parents[2] / ".bench/peers"


@pytest.fixture(scope="module")
def stats(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stats") / "stats.safetensors"
    return calibrate(smollm2_dir, out, tokens=256, context=128).out


def entries(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                found[name] = part.get_dtype(), tuple(part.get_shape())
    return found


def scalars(folder: Path, ending: str) -> dict[str, Any]:
    with safe_open(folder / "model.safetensors", "pt") as opened:
        return {n: float(opened.get_tensor(n)) for n in opened.keys() if n.endswith(ending)}  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "preset", "container", "dtypes", "scale"),
    [
        ("llmc-fp8-kv", "fp8+kv8", "compressed-tensors", False, ".v_scale"),
        ("llmc-nvfp4", "nvfp4", "compressed-tensors", True, ".q_proj.input_global_scale"),
        ("mo-fp8-kv", "fp8+kv8", "modelopt", True, ".v_scale"),
        ("mo-nvfp4", "nvfp4", "modelopt", True, ".q_proj.input_scale"),
        ("mo-nvfp4-kv8", "nvfp4+kv8", "modelopt", True, ".k_scale"),
    ],
)
def test_the_tensors_of_other_tools(
    smollm2_dir: Path, stats: Path, tmp_path: Path, peer: str, preset: str, container: str, dtypes: bool, scale: str
) -> None:  # fmt: skip
    if not (PEERS / peer).is_dir():
        pytest.skip(f"{peer} is not there (benchmarks/peers makes it)")
    quantize(smollm2_dir, tmp_path / "out", preset, container=container, stats=stats)
    ours, theirs = entries(tmp_path / "out"), entries(PEERS / peer)
    assert set(ours) == set(theirs)
    assert {name: shape for name, (_, shape) in ours.items()} == {
        name: shape for name, (_, shape) in theirs.items()
    }
    if dtypes:
        assert ours == theirs
    own, other = scalars(tmp_path / "out", scale), scalars(PEERS / peer, scale)
    assert len(own) == 30
    assert all(0.25 < value / other[name] < 4 for name, value in own.items())
