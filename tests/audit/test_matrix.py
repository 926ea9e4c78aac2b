"""What a matrix says of itself in short is what its grids say at length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audit.editing import quantized
from narrowcast.audit.opening import open_anyway
from narrowcast.audit.passes import look
from narrowcast.audit.subject import Subject


@pytest.mark.parametrize("preset", ["fp8_block", "int8", "w4a16", "nvfp4a16", "mxfp4", "mxfp8", "mxfp6a16"])
def test_counts_are_those_of_the_grids(preset: str, tmp_path: Path) -> None:
    found = open_anyway(quantized(tmp_path, preset))
    with found.checkpoint:
        for held in Subject("", found, "codes").quantized.values():
            matrix = look(held, codes=True)
            assert matrix.tile_amax is not None
            assert matrix.peaks is not None
            assert matrix.amax == float(matrix.tile_amax.max())
            values = held.coded.read(held.checkpoint, np.dtype("<f4"), 0, matrix.shape[0])  # type: ignore[union-attr]
            assert matrix.amax == float(np.abs(values).max())
            assert (
                matrix.peak_counts.tolist()
                == np.bincount(matrix.peaks.ravel(), minlength=len(matrix.peak_counts)).tolist()
            )
            if matrix.scales.dtype == np.uint8:
                assert matrix.scale_counts is not None
                assert (
                    matrix.scale_counts.tolist() == np.bincount(matrix.scales.ravel(), minlength=256).tolist()
                )
            assert matrix.counts is not None
            assert int(matrix.counts.sum()) == matrix.shape[0] * matrix.shape[1]
