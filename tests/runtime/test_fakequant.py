"""The torch fake-quant: forward bits of the definition, gradients as if it were not there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import narrowcast
from narrowcast.errors import NonFiniteError, UsageError
from narrowcast.tensors.schemes import schemes


@pytest.mark.parametrize("scheme", list(schemes))
def test_forward_is_the_decode_of_the_definition(scheme: str) -> None:
    x = torch.randn(33, 160, generator=torch.Generator().manual_seed(1))
    got = narrowcast.fake_quantize(x, scheme)
    wanted = narrowcast.quantize_tensor(x.numpy(), scheme).dequantize()
    assert got.dtype is torch.float32
    assert np.array_equal(got.numpy(), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtype_is_kept_with_one_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(8, 64).to(dtype)
    got = narrowcast.fake_quantize(x, "nvfp4")
    assert got.dtype is dtype
    exact = narrowcast.dequantize(narrowcast.quantize_tensor(x, "nvfp4"))
    assert torch.equal(got, torch.from_numpy(exact).to(dtype))


@pytest.mark.parametrize("scheme", ["fp8_tensor", "int4_g32", "uint4_g32", "mxfp4", "nvfp4"])
def test_gradient_passes_straight_through(scheme: str) -> None:
    """dL/dx = dL/dy: with L = Σ w·y the gradient of x is w, exactly, wherever x was rounded, clipped or lost."""
    x = torch.randn(16, 64, requires_grad=True)
    w = torch.randn(16, 64)
    (narrowcast.fake_quantize(x, scheme) * w).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, w)


def test_gradient_of_a_layer_uses_the_quantized_weight() -> None:
    """y = v·Q(W)ᵀ: the gradient of v sees Q(W), the gradient of W is the one of an unquantized layer."""
    weight = torch.randn(24, 64, requires_grad=True)
    v = torch.randn(5, 64, requires_grad=True)
    out = v @ narrowcast.fake_quantize(weight, "mxfp4").T
    up = torch.randn_like(out)
    out.backward(up)
    quantized = torch.from_numpy(narrowcast.dequantize(narrowcast.quantize_tensor(weight.detach(), "mxfp4")))
    assert v.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(v.grad, up @ quantized, rtol=0, atol=0)
    torch.testing.assert_close(weight.grad, up.T @ v.detach(), rtol=0, atol=0)


def test_refusals() -> None:
    with pytest.raises(NonFiniteError):
        narrowcast.fake_quantize(torch.full((2, 32), float("inf")), "mxfp4")
    with pytest.raises(UsageError, match="unknown scheme"):
        narrowcast.fake_quantize(torch.zeros(2, 32), "mxfp5")
    with pytest.raises(UsageError, match="not an array of floats"):
        narrowcast.fake_quantize(torch.zeros(2, 32, dtype=torch.int32), "mxfp4")
