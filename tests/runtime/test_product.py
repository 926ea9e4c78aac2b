"""Products beside the numpy definition, within the bound that roundings derive, and exact sums of integers.

``product`` differs from the exact sum of decoded operands by at most K roundings of the sum, one for each folded scale,
one for the decoding of each operand, and one for a reciprocal that stands for a divisor: n = K + 5 in
``gemm.bound``. bf16 units that flush subnormals lose at most 2^-126 a product: the elements themselves are normal.
"""

import numpy as np
import pytest
import torch

from narrowcast.kernels.reference.gemm import bound, gemm, oracle
from narrowcast.runtime import product as under_test
from narrowcast.runtime.inputs import Inputs, operand_of
from narrowcast.runtime.linear import Seen
from narrowcast.runtime.online import LLM_INT8
from narrowcast.runtime.product import Operand, int_sums, product
from narrowcast.runtime.quantizing import quantized
from narrowcast.tensors.schemes import integer, schemes

INPUTS = (
    "fp8_token",
    "fp8_tensor",
    "fp8_group128",
    "fp8_group128_ue8m0",
    "int8_token",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
)
WEIGHTS = tuple(name for name in schemes if "token" not in name)


def matrices(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(m + n + k)
    return torch.randn(m, k, generator=made) * 3, torch.randn(n, k, generator=made) / 8


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("m", [3, 40])
def test_within_the_bound(inputs: str, name: str, m: int) -> None:
    x, w = matrices(m, 24, 256)
    qx, qw = quantized(x, schemes[inputs]), quantized(w, schemes[name])
    groups = integer(schemes[inputs])
    y = product(operand_of(qx), operand_of(qw, groups)).numpy()
    wide_x, wide_w = qx.dequantize(), qw.dequantize()
    allowed = bound(wide_x, wide_w, 256 + 5) + 256 * 2.0**-126
    assert (np.abs(y - oracle(wide_x, wide_w)) <= allowed).all()
    assert (np.abs(y.astype(np.float64) - gemm(qx, qw)) <= 2 * allowed).all()


def test_integers_are_the_definition_bit_for_bit_where_one_scale_folds() -> None:
    x, w = matrices(20, 30, 320)
    qx, qw = quantized(x, schemes["int8_token"]), quantized(w, schemes["int8_channel"])
    codes = qx.elements().astype(np.int64) @ qw.elements().astype(np.int64).T
    wanted = codes.astype(np.float32) * qx.scale_values(0) * qw.scale_values(0).T
    assert np.array_equal(product(operand_of(qx), operand_of(qw)).numpy(), wanted)


@pytest.mark.parametrize("k", [1, 7, 64, 2049])
@pytest.mark.parametrize("units", [True, False])
def test_integer_sums_are_exact(k: int, units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_exact", lambda: units)
    made = np.random.default_rng(k)
    ends = np.array([-128, 127], np.int8)
    for x, w in (
        (made.integers(-128, 128, (5, k), np.int8), made.integers(-128, 128, (6, k), np.int8)),
        (made.choice(ends, (5, k)), np.full((6, k), -128, np.int8)),
    ):
        zero = made.integers(-128, 128, (5, 1)).astype(np.int32)
        sums = int_sums(torch.from_numpy(x), torch.from_numpy(w), torch.from_numpy(zero))
        assert np.array_equal(sums, (x.astype(np.int64) - zero) @ w.astype(np.int64).T)


def test_units_that_saturate_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        both = torch.einsum(
            "mkp,nkp->mnk", x.double().reshape(len(x), -1, 2), w.T.double().reshape(w.shape[1], -1, 2)
        )
        return both.clamp(-32768, 32767).sum(-1).int()

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not under_test._exact.__wrapped__()


def test_outlier_columns_come_back_in() -> None:
    x, w = matrices(6, 10, 96)
    x[:, 5] *= 40
    qw = quantized(w, LLM_INT8)
    made = Inputs(LLM_INT8, threshold=6.0).operand(x, Seen())
    assert made.outliers is not None
    wide_x = made.decoded().numpy()
    assert np.array_equal(wide_x[:, 5], x[:, 5])
    wide_w = qw.dequantize()
    y = product(made, operand_of(qw)).numpy()
    assert (np.abs(y - oracle(wide_x, wide_w)) <= bound(wide_x, wide_w, 96 + 6)).all()


def test_no_rows_no_columns() -> None:
    weight = operand_of(quantized(torch.randn(8, 32), schemes["int8_channel"]))
    assert Inputs(schemes["int8_token"]).operand(torch.empty(0, 32), Seen()).matrix.shape == (0, 32)
    assert product(Operand(torch.empty(0, 32, dtype=torch.int8)), weight).shape == (0, 8)
