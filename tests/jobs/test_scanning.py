"""amax from codes is the amax of decoded values, to the bit, and never of a matrix with NaN in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import toys
from narrowcast.errors import NonFiniteError
from narrowcast.jobs.coded import open_coded
from narrowcast.jobs.convert import convert
from narrowcast.jobs.quantize import quantize
from narrowcast.jobs.scanning import scan_codes, tile_maxima
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.scaling import reduce_tiles


@pytest.mark.parametrize("preset", ["fp8_block", "fp8_dynamic", "fp8_per_tensor", "mxfp8a16"])
@pytest.mark.parametrize("sizes", [{"inner": 256}, {"hidden": 192, "inner": 544}])
def test_codes_give_the_amax_of_the_values(tmp_path: Path, preset: str, sizes: dict[str, int]) -> None:
    quantize(toys.llama(tmp_path / "m", layers=1, **sizes), tmp_path / "q", preset)
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        opened = open_coded(checkpoint)
        matrices = [coded for m in opened.modules if m.role == "mlp" for _, coded in opened.coded(m)]
        assert matrices
        for coded in matrices:
            n = coded.shape[0]
            for start, stop in {(0, n), (0, min(128, n)), (128 if n > 128 else 0, n)}:
                seen = scan_codes(coded, checkpoint, start, stop)
                assert seen is not None
                values = coded.read(checkpoint, np.dtype("<f4"), start, stop)
                assert seen.amax == np.abs(values).max()


def test_other_elements_are_decoded(tmp_path: Path) -> None:
    quantize(toys.llama(tmp_path / "m", inner=256, layers=1), tmp_path / "q", "w4a16")
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        opened = open_coded(checkpoint)
        coded = next(c for m in opened.modules if m.role == "mlp" for _, c in opened.coded(m))
        assert scan_codes(coded, checkpoint, 0, 128) is None


def test_a_code_of_nan_is_refused_by_name(tmp_path: Path) -> None:
    quantize(toys.llama(tmp_path / "m", inner=256, layers=1), tmp_path / "q", "fp8_block")
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        entry = checkpoint.entries["model.layers.0.mlp.up_proj.weight"]
    with entry.path.open("r+b") as file:
        file.seek(entry.offset + 200 * 128 + 7)
        file.write(b"\xff")
    with pytest.raises(NonFiniteError, match="1 NaN") as refused:
        convert(tmp_path / "q", tmp_path / "out", "compressed-tensors", preset="nvfp4a16", requantize=True)
    assert "row 200, column 7" in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shape", [(256, 256), (130, 200), (1, 64), (128, 96)])
@pytest.mark.parametrize("tile", [(128, 128), (1, 32), (1, 0), (0, 0), (64, 1)])
def test_maxima_of_tiles(shape: tuple[int, int], tile: tuple[int, int]) -> None:
    codes = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    assert np.array_equal(tile_maxima(codes, tile), reduce_tiles(codes, tile))
