"""The product of quantized matrices: against scalar loops, exact fractions, and the bound for any order of adding."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from narrowcast.errors import NonFiniteError, RangeError, UsageError
from narrowcast.kernels.reference.gemm import UNIT, bound, decoded, gemm, oracle, roundings, stretches
from narrowcast.kernels.reference.quantize import quantize
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.schemes import schemes

F32 = NDArray[np.float32]


def matrix(rows: int, k: int, seed: int, spread: int = 6) -> F32:
    """Normal samples over a range of 2^±spread."""
    rng = np.random.default_rng(seed)
    powers = np.exp2(rng.integers(-spread, spread + 1, (rows, k)))
    return (rng.standard_normal((rows, k)) * powers).astype(np.float32)


def exactly(x: F32, w: F32) -> list[list[Fraction]]:
    return [[sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(row, col, strict=True)) for col in w]
            for row in x]  # fmt: skip


def test_fp32_is_the_scalar_loop() -> None:
    """One product, one sum, k ascending; every intermediate a float32."""
    x, w = quantize(matrix(5, 67, 1), schemes["mxfp8"]), quantize(matrix(4, 67, 2), schemes["nvfp4"])
    got = gemm(x, w)
    for m, row in enumerate(x.dequantize()):
        for n, col in enumerate(w.dequantize()):
            acc = np.float32(0)
            for a, b in zip(row, col, strict=True):
                acc = np.float32(acc + np.float32(a * b))
            assert got[m, n].tobytes() == acc.tobytes()


def test_the_order_matters_and_is_ascending() -> None:
    """2^24 + 1 stays 2^24: the one is lost where it comes second, and kept where the large ones cancel first."""
    ones = np.ones((1, 3), np.float32)
    assert gemm(np.array([[2.0**24, 1, -(2.0**24)]], np.float32), ones).item() == 0
    assert gemm(np.array([[2.0**24, -(2.0**24), 1]], np.float32), ones).item() == 1
    assert oracle(np.array([[2.0**24, 1, -(2.0**24)]], np.float32), ones).item() == 1


def test_products_are_rounded_before_they_are_added() -> None:
    """(1 + 2^-23)² - (1 + 2^-22) is 2^-46, which only a fused multiply-add would keep."""
    near = np.float32(1 + 2.0**-23)
    x = np.array([[-1, near]], np.float32)
    assert gemm(x, np.array([[1 + 2.0**-22, near]], np.float32)).item() == 0


@given(seed=st.integers(0, 2**32), k=st.integers(1, 80), spread=st.sampled_from([0, 6, 40, 70]))
@settings(max_examples=60, deadline=None)
def test_every_order_stays_within_the_bound(seed: int, k: int, spread: int) -> None:
    """Serial, reversed, shuffled, pairwise; the largest spread makes products underflow."""
    x, w = matrix(2, k, seed, spread), matrix(3, k, seed + 1, spread)
    if spread == 70:
        x, w = x * np.float32(2.0**-10), w * np.float32(2.0**-10)
    exact, allowed = exactly(x, w), bound(x, w, roundings(x, w))
    order = np.random.default_rng(seed).permutation(k)
    pairwise_sum = (x[:, None, :] * w[None, :, :]).sum(axis=-1, dtype=np.float32)
    for y in (gemm(x, w), gemm(x[:, ::-1], w[:, ::-1]), gemm(x[:, order], w[:, order]), pairwise_sum):
        for m in range(2):
            for n in range(3):
                assert abs(Fraction(float(y[m, n])) - exact[m][n]) <= Fraction(float(allowed[m, n]))


def test_the_bound_is_not_idle() -> None:
    """Adding 2^-24 to 1 loses it every time: the error of n terms is n·u, which is the bound up to its (n·u)²."""
    n = 1000
    x = np.full((1, n + 1), UNIT, np.float32)
    x[0, 0] = 1
    ones = np.ones_like(x)
    error = float(oracle(x, ones).item()) - float(gemm(x, ones).item())
    assert error == n * UNIT
    assert error > 0.99 * bound(x, ones, n + 1).item()


@given(seed=st.integers(0, 2**32), k=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_the_oracle_rounds_the_exact_sum_once(seed: int, k: int) -> None:
    x, w = matrix(2, k, seed, 60), matrix(2, k, seed + 1, 60)
    for got, wanted in zip(oracle(x, w).ravel(), np.ravel(exactly(x, w)), strict=True):
        assert got == float(wanted)  # Fraction to float rounds to nearest even


PAIRS = [
    ("int8_token", "int8_channel"),
    ("int8_tensor", "int8_tensor"),
    ("int8_token", "int4_channel"),
    ("int8_token", "int4_g128"),
    ("int8_g32", "int4_g64"),
]


@pytest.mark.parametrize(("inputs", "weights"), PAIRS)
def test_int32_sums_codes_exactly_and_scales_stretches(inputs: str, weights: str) -> None:
    """By integers and float32 scalars, and within the bound of the decoded operands."""
    x = quantize(matrix(3, 300, 3, 3), schemes[inputs])
    w = quantize(matrix(4, 300, 4, 3), schemes[weights])
    y = gemm(x, w, "int32")
    steps = [group for group in (x.scheme.group, w.scheme.group) if group] or [300]
    width = min(steps)
    for m in range(3):
        for n in range(4):
            acc = np.float32(0)
            for first in range(0, 300, width):
                codes = range(first, min(first + width, 300))
                total = sum(_code(x, m, k) * _code(w, n, k) for k in codes)
                scale = np.float32(_scale(x, m, first) * _scale(w, n, first))
                acc = np.float32(acc + np.float32(np.float32(total) * scale))
            assert y[m, n] == acc
    wide_x, wide_w = decoded(x), decoded(w)
    error = np.abs(y - oracle(wide_x, wide_w))
    assert (error <= bound(wide_x, wide_w, roundings(x, w, "int32"))).all()
    assert roundings(x, w, "int32") == -(-300 // width) + 4


def _code(q: QTensor, row: int, k: int) -> int:
    code, bits = int(q.codes[row, k]), q.scheme.element.bits
    return code - (1 << bits) if code >> (bits - 1) else code


def _scale(q: QTensor, row: int, k: int) -> np.float32:
    rows, cols = q.scheme.inner.tile
    scales = q.scale_values()
    return np.float32(scales[row // rows if rows else 0, k // cols if cols else 0])


def test_int32_with_scales_that_are_powers_of_two_rounds_once() -> None:
    x, w = (
        quantize(matrix(3, 50, 5), schemes["int8_tensor"]),
        quantize(matrix(2, 50, 6), schemes["int8_tensor"]),
    )
    two = (np.full((1, 1), 0.125, np.float32),)
    x, w = QTensor(x.scheme, x.codes, two), QTensor(w.scheme, w.codes, two)
    assert np.array_equal(gemm(x, w, "int32"), oracle(decoded(x), decoded(w)).astype(np.float32))


def test_stretches_end_where_either_scale_changes() -> None:
    x, w = quantize(matrix(1, 100, 7), schemes["int8_g64"]), quantize(matrix(1, 100, 8), schemes["int4_g32"])
    assert stretches(x, w) == [0, 32, 64, 96, 100]


def test_int32_overflow_is_an_error() -> None:
    """2^31 is one more than int32 holds: 131072 products of -128 with itself."""
    codes = np.full((1, 2**17), 0x80, np.uint8)
    q = QTensor(schemes["int8_tensor"], codes, (np.ones((1, 1), np.float32),))
    with pytest.raises(RangeError, match="2147483648"):
        gemm(q, q, "int32")
    less = QTensor(q.scheme, codes[:, 1:], q.scales)
    assert gemm(less, less, "int32").item() == np.float32(2**31 - 2**14)


def test_what_does_not_multiply_is_refused() -> None:
    x, w = matrix(2, 32, 9), quantize(matrix(2, 32, 10), schemes["fp8_channel"])
    for bad in (lambda: gemm(x[:, :4], w), lambda: gemm(x[0], w), lambda: gemm(x, w, "fp16")):
        with pytest.raises(UsageError):
            bad()
    for scheme in ("fp8_channel", "mxint8", "uint4_g128"):
        q = quantize(matrix(2, 32, 11), schemes[scheme])
        with pytest.raises(UsageError, match="int32"):
            gemm(q, q, "int32")
    with pytest.raises(UsageError, match="wide operand"):
        gemm(x, quantize(x, schemes["int8_channel"]), "int32")
    with pytest.raises(NonFiniteError):
        oracle(np.full((1, 1), np.inf, np.float32), np.ones((1, 1), np.float32))
    with pytest.raises(UsageError, match="roundings"):
        bound(x, x, 2**23)
