"""Quantized matrices as sources: exact values, from any row, under scales that divide."""

from __future__ import annotations

import numpy as np

from narrowcast.jobs.coded import folded, in_order
from narrowcast.kernels import Rows, choose
from narrowcast.kernels.reference.rows import REFERENCE
from narrowcast.numbers.formats import BF16, E2M1, E4M3FN, FP32
from narrowcast.tensors.packing import packing
from narrowcast.tensors.storage import stored_scheme


def test_a_dividing_outer_scale_is_folded_to_the_same_bits_on_compiled_kernels() -> None:
    """A global scale of 1001 has no exact inverse; (s / 1001) · e must not become s · (1 / 1001) · e."""
    rng = np.random.default_rng(5)
    scheme = stored_scheme(E2M1, (1, 16), E4M3FN, outer=True, divides=True)
    rows = Rows(rng.integers(0, 256, (32, 64), np.uint8), rng.integers(1, 0x7F, (32, 8), np.uint8))
    wanted = REFERENCE.dequantize(rows, scheme, packing(4), 128, FP32, 1001.0)
    simple, plain, outer = folded(rows, scheme, 1001.0)
    chosen = choose(plain, FP32, packing(4))
    assert not chosen.reason
    for out in (FP32, BF16):
        exact = REFERENCE.dequantize(rows, scheme, packing(4), 128, out, 1001.0)
        assert np.array_equal(chosen.backend.dequantize(simple, plain, packing(4), 128, out, outer), exact)
    multiplied = REFERENCE.dequantize(
        rows,
        stored_scheme(E2M1, (1, 16), E4M3FN, outer=True),
        packing(4),
        128,
        FP32,
        float(1 / np.float32(1001)),
    )
    assert not np.array_equal(multiplied, wanted)  # so the difference is one that a test can see


def test_shuffled_columns_go_back_to_where_they_belong() -> None:
    stored = np.array([[10, 20, 30]])
    assert in_order(stored, np.array([2, 0, 1])).tolist() == [[20, 30, 10]]
