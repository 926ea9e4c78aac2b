"""What an evaluation says of a child's accumulators and of its stored input scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from narrowcast.errors import UsageError
from narrowcast.jobs.quantize import quantize
from narrowcast.report.evaluate import evaluate_page
from narrowcast.store.safetensors import Reader
from narrowcast.studies.calibrate import calibrate
from narrowcast.studies.evaluate import Options, evaluate
from studies import calibrated_toys as toys


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.llama(tmp_path_factory.mktemp("numerics") / "parent")


@pytest.fixture(scope="module")
def files(parent: Path) -> list[str]:
    return toys.texts(parent.parent / "texts", 60, 44)


def _halved(folder: Path, ending: str) -> None:
    """Input scales of so-called linears, half as large: what a calibration on too tame a text leaves."""
    path = folder / "model.safetensors"
    reader = Reader(path)
    data = bytearray(path.read_bytes())
    for name, entry in reader.entries.items():
        if name.endswith(f"{ending}.input_scale"):
            where = data.rindex(reader.array(name).tobytes())
            data[where : where + entry.nbytes] = (reader.array(name) * np.float32(0.5)).tobytes()
    reader.close()
    path.write_bytes(data)


def test_input_scales_that_clip_are_named(parent: Path, files: list[str]) -> None:
    stats, out = parent.parent / "stats.safetensors", parent.parent / "fp8"
    options = Options(tokens=None, context=40, greedy=0)
    calibrate(parent, stats, files, tokens=200, context=40)
    quantize(parent, out, "fp8", stats=stats)
    exact = evaluate(out, text=files, options=options)
    assert (
        max((one.share for one in exact.clipped), default=0) < 0.01
    )  # its own rounding moves the amax a little
    _halved(out, "o_proj")
    found = evaluate(out, text=files, options=options)
    assert {one.name for one in found.clipped if one.share > 0.01} <= {
        f"model.layers.{i}.self_attn.o_proj" for i in range(8)
    }
    assert found.clipped[0].share > 0
    assert "stored input scales clip" in "\n".join(evaluate_page(found))


def test_sums_as_a_tensor_core_forms_them(parent: Path, files: list[str]) -> None:
    options = Options(tokens=40, context=40, greedy=0, accumulate="hopper")
    found = evaluate(parent, online="fp8_per_tensor", text=files, options=options)
    assert found.sums
    assert all(
        one.error is not None and one.worst is not None and one.error <= one.worst for one in found.sums
    )
    page = "\n".join(evaluate_page(found))
    assert "Hopper FP8 wgmma" in page
    assert max(map(len, page.split("\n"))) <= 80
    with pytest.raises(UsageError, match="unknown accumulator"):
        evaluate(parent, text=files, options=Options(accumulate="volta"))
