"""Inputs of linears: bits of the definition, what a thread remembers, what is clipped, zero points, outliers."""

import hashlib
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowcast.kernels.reference.quantize import quantize as definition
from narrowcast.numbers.formats import INT8
from narrowcast.runtime.engine import NVFP4, as_engine
from narrowcast.runtime.inputs import Inputs, operand_of
from narrowcast.runtime.linear import ScaledLinear, Seen
from narrowcast.runtime.online import LLM_INT8, METHODS
from narrowcast.runtime.product import Operand
from narrowcast.runtime.quantizing import SOURCES, decoded, elements, quantized
from narrowcast.tensors.schemes import ARITHMETICS, Scheme, schemes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ENGINES = [m.linear.weight for m in METHODS.values()] + [m.linear.input for m in METHODS.values()]
EVERY = [*schemes.values(), *(s for s in ENGINES if s is not None)]
EVERY += [NVFP4, as_engine(schemes["fp8_tensor"])]
EVERY += [schemes["fp8_token"].with_arithmetic(ARITHMETICS[name]) for name in ("reciprocal", "fp64")]


def rows(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, one of them zeros, the first of them subnormal in fp16."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=made) * torch.exp2(torch.linspace(-20, 12, m))[:, None]
    x[m // 2] = 0 if m > 2 else x[m // 2]
    return x.to(dtype)


@pytest.mark.parametrize("scheme", EVERY, ids=[f"{i} {s.name}" for i, s in enumerate(EVERY)])
@pytest.mark.parametrize("shape", [(1, 576), (9, 576), (40, 160), (5, 1024)])
def test_bits_are_those_of_the_definition(scheme: Scheme, shape: tuple[int, int]) -> None:
    for dtype in DTYPES:
        x = rows(*shape, dtype)
        fast, slow = quantized(x, scheme), definition(x.float().numpy(), scheme, source=SOURCES[dtype])
        assert np.array_equal(fast.codes, slow.codes)
        for a, b in zip(fast.scales, slow.scales, strict=True):
            assert np.array_equal(a, b)
            assert a.dtype == b.dtype
        assert (fast.zero is None) == (slow.zero is None)
        assert fast.zero is None or np.array_equal(fast.zero, slow.zero)
        assert np.array_equal(decoded(fast).numpy(), slow.dequantize(), equal_nan=True)
        assert np.array_equal(elements(fast).numpy(), slow.elements())


@pytest.mark.parametrize("scheme", EVERY, ids=[f"{i} {s.name}" for i, s in enumerate(EVERY)])
@pytest.mark.parametrize("exponent", [-126, -100, 0, 100])
def test_what_is_called_narrow_is_held_by_bf16_in_normal_numbers(scheme: Scheme, exponent: int) -> None:
    x = torch.randn(48, 160, generator=torch.Generator().manual_seed(3)) * 2.0**exponent
    made = operand_of(quantized(x, scheme))
    if made.narrow:
        assert torch.equal(made.matrix.bfloat16().float(), made.matrix)
        size = made.matrix.abs()
        assert not ((size > 0) & (size < 2.0**-126)).any()
    if exponent in (0, -100) and scheme.element.bits < 8 and scheme.inner.format.name == "e8m0":
        assert made.narrow  # the claim is made where it holds


def test_e8m0_extremes_are_not_called_narrow() -> None:
    """2^-127 times the smallest E4M3 (2^-9) is 2^-136: no bf16 number at all."""
    x = torch.full((1, 32), 2.0**-135)
    x[0, 0] = 2.0**-118
    made = operand_of(quantized(x, schemes["mxfp8"]))
    assert ((made.matrix > 0) & (made.matrix < 2.0**-126)).any()
    assert not made.narrow


@pytest.mark.parametrize("name", ["fp8_token", "fp8_tensor", "int8_token", "fp8_group128", "mxfp8", "mxfp4"])
def test_a_row_with_nan_or_infinity_comes_out_as_nan_alone(name: str) -> None:
    x = rows(5, 128, torch.float32) + 1
    x[1, 3], x[4, 0] = torch.inf, torch.nan
    made = Inputs(schemes[name]).operand(x, Seen())
    whole = made.decoded()
    assert whole[[1, 4]].isnan().all()
    assert whole[[0, 2, 3]].isfinite().all()


def test_what_a_static_scale_cannot_hold_is_clipped_and_counted() -> None:
    seen = Seen()
    x = torch.tensor([[0.0, 447.0, 448.0, -449.0, 1e4]])
    made = Inputs(schemes["fp8_tensor"], static=1.0).operand(x, seen)
    assert made.decoded().tolist() == [[0.0, 448.0, 448.0, -448.0, 448.0]]
    assert (seen.elements, seen.clipped) == (5, 2)


def test_nvfp4_under_a_given_outer_scale() -> None:
    x = rows(4, 64, torch.bfloat16)
    wanted = definition(x.float().numpy(), schemes["nvfp4"], outer=np.full((1, 1), 0.25, np.float32))
    assert np.array_equal(Inputs(schemes["nvfp4"], 0.25).operand(x, Seen()).decoded(), wanted.dequantize())


def test_nvfp4_under_an_outer_scale_of_each_token() -> None:
    """Every token as if it were alone, under amax / 2688."""
    scheme = METHODS["nvfp4_per_token"].linear.input
    assert scheme is not None
    x = rows(6, 64, torch.bfloat16, 5)
    q = quantized(x, scheme)
    for i in range(6):
        alone = quantized(x[i : i + 1], scheme)
        assert np.array_equal(q.codes[i : i + 1], alone.codes)
        amax = np.float64(x[i].float().abs().max())
        assert q.scales[1][i, 0] == (np.float32(amax / 2688) if amax else 1)


ASYMMETRIC = replace(schemes["int8_tensor"], zero=INT8)


def test_asymmetric_static_inputs_by_fractions() -> None:
    x = torch.tensor([[-3.0, -0.25, 0.0, 0.75, 5.0, 40.0]])
    seen = Seen()
    made = Inputs(ASYMMETRIC, static=0.25, zero=-7).operand(x, seen)
    wanted = [min(max(round(Fraction(v) / Fraction(1, 4)) - 7, -128), 127) for v in x[0].tolist()]
    assert made.matrix[0].tolist() == wanted
    assert made.decoded()[0].tolist() == [float((c + 7) * Fraction(1, 4)) for c in wanted]
    assert seen.clipped == 1


def test_asymmetric_dynamic_inputs_cover_the_range_of_a_token() -> None:
    x = torch.tensor([[0.0, 255.0], [-255.0, 0.0], [-51.0, 204.0]])
    made = Inputs(replace(ASYMMETRIC, scales=schemes["int8_token"].scales)).operand(x, Seen())
    assert made.zero is not None
    assert made.zero.tolist() == [[-128], [127], [-77]]
    assert torch.equal(made.decoded(), x)


def test_outlier_columns_stay_wide_and_scales_do_not_see_them() -> None:
    """Codes and scales of bitsandbytes 0.50.2's int8_vectorwise_quant(A, 6.0), executed on this input."""
    i = np.arange(9 * 160, dtype=np.int64).reshape(9, 160)
    wide = ((i * 7919 + 104729) % 100003 - 50001) / 4096 * 2.0 ** ((i // 160 * 5) % 23 - 14)
    wide[0] = 0
    x = torch.from_numpy(wide.astype(np.float32)).bfloat16().half() / 64
    x[3, 17], x[8, 100], x[1, 4] = 7.5, -6.0, 65.0
    made = Inputs(LLM_INT8, threshold=6.0).operand(x, Seen())
    assert made.outliers is not None
    assert made.outliers.places.tolist() == sorted(set((x.abs() >= 6).nonzero()[:, 1].tolist()))
    assert torch.equal(made.outliers.values, x[:, made.outliers.places].float())
    digest = hashlib.sha256(made.matrix.contiguous().numpy().tobytes()).hexdigest()
    assert digest == "60c7fd17c73dcb6eafaaf2a0a89e135dd49f4650d3cbc4b21c703a954fe48d6a"
    assert made.scale is not None
    amax = [0.0, 0.000370025634765625, 0.01190185546875, 0.37890625, 5.875, 4.649162292480469e-05]
    assert torch.equal(made.scale[1:6, 0], torch.tensor(amax[1:]) / 127)


def test_factors_and_order_come_before_the_quantizer() -> None:
    x = rows(3, 64, torch.bfloat16)
    order, factors = torch.randperm(64), torch.rand(64) + 0.5
    made = Inputs(schemes["int8_token"], order=order, factors=factors).operand(x, Seen())
    wanted = definition((x[:, order] * factors.bfloat16()).float().numpy(), schemes["int8_token"])
    assert np.array_equal(made.decoded(), wanted.dequantize())


class Counting(Inputs):
    """Inputs that count how often they quantize."""

    calls = 0

    def operand(self, x: torch.Tensor, seen: Seen) -> Operand:
        type(self).calls += 1
        return super().operand(x, seen)


def test_one_tensor_is_quantized_once_for_layers_that_read_it_alike_and_never_stale() -> None:
    Counting.calls = 0
    weight = Operand(torch.eye(64))
    q, k = (ScaledLinear(n, weight, Counting(schemes["fp8_tensor"], 0.01), None) for n in "qk")
    other = ScaledLinear("v", weight, Counting(schemes["fp8_token"]), None)
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        first = q(x)
        assert torch.equal(k(x), first)
        assert Counting.calls == 1
        assert (k.seen.elements, k.seen.clipped) == (q.seen.elements, q.seen.clipped)
        x.mul_(2)  # the same tensor, other numbers
        assert not torch.equal(q(x), first)
        other(x)
        q(x.clone())
    assert Counting.calls == 4
    with torch.inference_mode():
        y = torch.randn(1, 64)
        q(y)
        k(y)
    assert Counting.calls == 6  # tensors without a version are not remembered
