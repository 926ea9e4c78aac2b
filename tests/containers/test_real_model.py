"""The same proof on real weights: SmolLM2-135M, decoded by the compressed-tensors package and held to the SQNR that
its format can give."""

from __future__ import annotations

from pathlib import Path

import pytest

import toys
from cross_read import check_decode
from narrowcast.jobs.quantize import plan, run

# The plausibility table: a loss beyond these cannot come from the format. Gaussian and Student-t(4) weights bracket
# a language model's; one dB below the lower of the two.
FLOOR_DB = {
    "fp8": 30.5,
    "int8": 32.0,
    "w8a16": 32.0,
    "mxfp8": 30.0,
    "mxfp6": 28.0,
    "nvfp4": 19.4,
    "mxfp4": 16.6,
    "w4": 13.3,
}


@pytest.mark.parametrize(
    "preset",
    [
        p if p in ("fp8_dynamic", "nvfp4a16") else pytest.param(p, marks=pytest.mark.slow)
        for p in toys.PRESETS
    ],
)
def test_every_preset_on_a_real_model(tmp_path: Path, smollm2_dir: Path, preset: str) -> None:
    settled = plan(smollm2_dir, tmp_path / "out", preset)
    result = run(settled)
    check_decode(tmp_path / "out", settled)
    floor = next(db for stem, db in FLOOR_DB.items() if preset.startswith(stem))
    assert result.total.sqnr > floor
    assert settled.coverage_params == pytest.approx(
        1 - 28_311_552 / 134_515_008, abs=0.001
    )  # all but the embedding
