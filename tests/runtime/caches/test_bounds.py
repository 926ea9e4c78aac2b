"""The error of every element under every mode, against the bound that its format implies."""

import pytest
import torch

from narrowcast.runtime.caches import MODES
from narrowcast.runtime.caches.rotated import rotate

FP32 = 2.0**-24  # relative error of one rounding
E4M3 = (2.0**-4, 2.0**-10)  # half a unit of normal numbers, relative; half a step of subnormal ones
E5M2 = (2.0**-3, 2.0**-17)
UNIT = {torch.float32: FP32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def data(kind: str, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values [batch, heads, tokens, dim]: normal; with channels and a token that stand out; of all sizes."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(2, 3, 64, dim, generator=generator)
    if kind == "outliers":
        x[..., 5] *= 40
        x[:, :, 0] *= 8
        x[..., dim // 2 + 1] -= 12
    if kind == "sizes":
        x *= 2.0 ** torch.randint(-9, 5, x.shape, generator=generator)
    return x.to(dtype)


def by_block(x: torch.Tensor, size: int) -> torch.Tensor:
    """amax of each block, spread over its elements."""
    return (
        x.unflatten(-1, (-1, size)).abs().amax(-1, keepdim=True).expand(*x.shape[:-1], -1, size).flatten(-2)
    )


def float_bound(x: torch.Tensor, scale: torch.Tensor | float, number: tuple[float, float]) -> torch.Tensor:
    return torch.maximum(number[0] * x.abs(), torch.as_tensor(number[1] * scale, dtype=x.dtype))


def bound(mode: str, x: torch.Tensor, dtype: torch.dtype, given: torch.Tensor) -> torch.Tensor:
    """Largest error of each element of float64 x, that came in ``dtype``, before the result is rounded to it again;
    four fp32 roundings (reciprocals, products) move the point where a code rounds by as much."""
    slack = 4 * FP32 * x.abs()
    amax = x.abs().amax(-1, keepdim=True)
    if mode in ("fp8_e4m3", "fp8_head"):
        return float_bound(x, given, E4M3) + slack
    if mode == "fp8_e5m2":
        return float_bound(x, given, E5M2) + slack
    if mode == "fp8_per_token_head":
        return float_bound(x, amax / 448, E4M3) + slack
    if mode == "int8_per_token_head":
        return amax / 127 * (0.5 + 2.0**-15) + slack
    if mode == "mxfp8":
        return (
            float_bound(x, by_block(x, 32) / 448 * 2, E4M3) + slack
        )  # a power of two, less than twice the quotient
    if mode == "fp4_mx_block16":
        return (
            by_block(x, 16) / 6 * 2 + slack
        )  # numbers are at most 2 apart, scales less than twice the quotient
    if mode == "nvfp4":
        # The scale is E4M3 of amax/6: off by 2^-4 of itself or half a subnormal step, times the global scale. Numbers
        # are 2 apart at most, and a scale rounded down clips by 6 times what it lacks.
        quotient = by_block(x, 16) / 6
        off = float_bound(quotient, given, E4M3)
        return torch.maximum(quotient + off, 6 * off) + slack
    # INT4: of the 2-norm of a whole block, which is a head here
    turned = rotate(x.float()).double()
    scale = (turned.amax(-1, keepdim=True) - turned.amin(-1, keepdim=True)) / 15 * (1 + 2 * UNIT[dtype])
    rounding = UNIT[dtype] * turned.abs().amax(-1, keepdim=True)
    sums = 2 * 7 * FP32 * x.abs().sum(-1, keepdim=True)  # the butterfly there and back, seven stages for 128
    return scale * (0.5 + 15 * 2.0**-19 + 2.0**-15) + rounding + sums


def given_scales(mode: str, x: torch.Tensor) -> list[torch.Tensor]:
    """Scales that clip nothing: of the whole tensor or of each head; what divides by 448 leaves NVFP4 headroom."""
    amax = x.float().abs().amax(dim=(0, 2, 3)) if mode == "fp8_head" else x.float().abs().max().reshape(1)
    reaches = {"fp8_e5m2": (57344.0, 57344.0 / 64), "nvfp4": (448.0, 2688.0)}.get(mode, (448.0, 57.0))
    return [amax / reach for reach in reaches]


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize("kind", ["normal", "outliers", "sizes"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mode", list(MODES))
def test_errors_stay_within_the_bound_of_the_format(
    mode: str, dim: int, kind: str, dtype: torch.dtype
) -> None:
    x = data(kind, dim, dtype)
    for scale in given_scales(mode, x):
        codec = MODES[mode].codec(scale)
        rows, clipped = codec.encode(x)
        assert rows.dtype == torch.uint8
        assert rows.shape == (*x.shape[:-1], MODES[mode].row_bytes(dim))
        assert clipped == 0
        decoded = codec.decode(rows, torch.float32)
        error = (decoded.double() - x.double()).abs()
        if mode == "int4_per_token_head":
            error = error.norm(dim=-1, keepdim=True)
        allowed = bound(mode, x.double(), dtype, scale.double().reshape(-1, 1, 1))
        assert bool((error <= allowed).all()), float((error - allowed).max())
        assert float((error / allowed).max()) > 0.4  # a bound that nothing comes near proves nothing
        assert torch.equal(codec.decode(rows, dtype), decoded.to(dtype))
