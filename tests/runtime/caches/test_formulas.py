"""Every formula against the published vectors, or against another derivation of what it says."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowcast.errors import UsageError
from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.codec import decode, encode
from narrowcast.numbers.formats import E2M1, E4M3FN, E5M2
from narrowcast.runtime.caches import MODES
from narrowcast.runtime.caches.blocks import Fp4Block16, Mxfp8, Nvfp4
from narrowcast.runtime.caches.dynamic import PerTokenHead
from narrowcast.runtime.caches.fp8 import Fp8
from narrowcast.runtime.caches.rotated import (
    block_size,
    packed,
    rotate,
    rotate_back,
    signs,
)
from narrowcast.runtime.caches.rotated import (
    quantize as quantize_int4,
)
from narrowcast.tensors.schemes import schemes

# Signs and rows as published for vLLM 0.32: the seed's Bernoulli draws, and one vector of one token and head.
SIGN_BITS = "0d597365b13580806c3d44a638547f6b818ba44a41c4afab48980b32a04320fa"
X = torch.tensor([-1.5, -0.40625, 0.75, -1.25, -0.09375, 1.0625, -0.9375, 0.21875, 1.375, -0.625, 0.53125, -1.5625,
                  -0.40625, 0.75, -1.25, 0.125])  # fmt: skip
INT8 = [-122, -33, 61, -102, -8, 86, -76, 18, 112, -51, 43, -127, -33, 61, -102, 10]
INT4 = [0, 6, 12, 2, 8, 13, 3, 9, 15, 5, 11, 0, 6, 12, 2, 9]


def every_half() -> torch.Tensor:
    """All bf16 and all fp16 numbers, infinities included, as float32 [1, 1, T, 16]."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    both = torch.cat([patterns.view(torch.bfloat16).float(), patterns.view(torch.float16).float()])
    return both[~both.isnan()][: 16 * 8000].reshape(1, 1, -1, 16)


@pytest.mark.parametrize(("number", "fmt"), [(torch.float8_e4m3fn, E4M3FN), (torch.float8_e5m2, E5M2)])
@pytest.mark.parametrize("scale", [1.0, 0.03, 2.0**-9])
def test_fp8_is_the_codecs_cast_of_the_quotient(number: torch.dtype, fmt: object, scale: float) -> None:
    x = every_half()
    rows, clipped = Fp8(number, torch.tensor([scale])).encode(x)
    with np.errstate(over="ignore"):
        quotient = x.numpy() / np.float32(scale)
    finite = np.where(np.isinf(quotient), np.copysign(np.float32(3e38), quotient), quotient)
    want = encode(finite, fmt)
    assert np.array_equal(rows.numpy(), want.codes)
    assert clipped == int((np.abs(quotient) > fmt.max * (1 + 2.0**-22)).sum())
    back = Fp8(number, torch.tensor([scale])).decode(rows, torch.float32)
    assert np.array_equal(back.numpy(), decode(want.codes, fmt) * np.float32(scale))


def test_fp8_takes_a_scale_for_each_head_and_no_other_number() -> None:
    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(1)) * 30
    scales = torch.tensor([0.1, 0.2, 0.4])
    together, _ = Fp8(torch.float8_e4m3fn, scales).encode(x)
    for head in range(3):
        alone, _ = Fp8(torch.float8_e4m3fn, scales[head : head + 1]).encode(x[:, head : head + 1])
        assert torch.equal(together[:, head : head + 1], alone)
    with pytest.raises(UsageError, match="do not fit"):
        Fp8(torch.float8_e4m3fn, scales[:2]).encode(x)


def test_int8_and_int4_rows_are_the_published_ones() -> None:
    rows, clipped = PerTokenHead(torch.int8).encode(X)
    assert rows[:16].view(torch.int8).tolist() == INT8
    assert bytes(rows[16:].tolist()).hex() == "2693493c"
    assert clipped == 0
    codes, scale, clipped = quantize_int4(X)
    assert codes.tolist() == INT4
    assert (
        scale.view(torch.int32).item() == 0x3E488888
    )  # 0x3e488889 with its low bits cleared, and the zero point 8
    assert bytes(packed(codes).tolist()).hex() == "602cd8935f0bc692"
    assert clipped == 0


def test_int8_rounds_ties_away_from_zero() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])  # a scale of 1
    rows, _ = PerTokenHead(torch.int8).encode(x)
    assert rows[:8].view(torch.int8).tolist() == [127, 1, 2, 3, -1, -2, -3, 127]


def test_int4_codes_are_nearest_in_exact_arithmetic() -> None:
    """Fractions instead of fp32: s = (max - min)/15, z and q rounded half away; the vector has no tie near fp32's
    rounding, so both must agree."""
    x = [Fraction(v) for v in X.tolist()]
    scale = (max(x) - min(x)) / 15

    def away(v: Fraction) -> int:
        return int(v + Fraction(1, 2)) if v >= 0 else -int(-v + Fraction(1, 2))

    zero = away(-min(x) / scale)
    assert zero == 8
    assert [min(max(away(v / scale + zero), 0), 15) for v in x] == INT4


def test_signs_and_the_rotation_are_the_published_ones() -> None:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(SIGN_BITS), np.uint8), bitorder="little")
    for size in (16, 32, 64, 128, 256):
        assert signs(size).tolist() == (2.0 * bits[:size] - 1).tolist()
    want = [-2.5, 6.5, -0.5, 4.5, 3.5, -7.5, -1.5, 5.5, -2, -6, 0, -4, 3, 7, -1, -5]
    assert rotate(torch.arange(16) / 8).tolist() == want


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 192])
def test_the_rotation_is_orthogonal_so_that_either_side_may_turn(dim: int) -> None:
    """Rᵀ R = b I over the integers: q·k = (R q)·(R k) / b, and turning back what was turned changes nothing."""
    matrix = rotate(torch.eye(dim)).to(torch.int64)  # row i is R eᵢ
    assert set(matrix.unique().tolist()) <= {-1, 0, 1}
    assert torch.equal(matrix @ matrix.T, block_size(dim) * torch.eye(dim, dtype=torch.int64))
    whole = torch.randint(-1000, 1000, (7, dim), generator=torch.Generator().manual_seed(dim)).float()
    assert torch.equal(rotate_back(rotate(whole)), whole)


def test_int4_loses_a_vector_whose_range_holds_no_zero_and_says_so() -> None:
    """The first element alone: its column of H is ones, so the rotated vector is constant."""
    x = torch.zeros(1, 1, 1, 16)
    x[..., 0] = 8.0
    rows, clipped = MODES["int4_per_token_head"].codec(torch.ones(1)).encode(x)
    back = MODES["int4_per_token_head"].codec(torch.ones(1)).decode(rows, torch.float32)
    assert clipped == 16
    assert float(back.abs().max()) < 1e-3
    elsewhere = torch.zeros(1, 1, 1, 16)
    elsewhere[..., 1] = 8.0
    rows, clipped = MODES["int4_per_token_head"].codec(torch.ones(1)).encode(elsewhere)
    assert clipped == 0


def vectors(dim: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(2, 3, 40, dim, generator=torch.Generator().manual_seed(seed)).bfloat16()
    x[..., 5] *= 60
    x[0, 0, 0] = 0
    x[0, 1, 0] *= 2.0**-100
    return x


@pytest.mark.parametrize("dim", [16, 64, 80])
@pytest.mark.parametrize("k_scale", [1.0, 0.05, 1 / 3000])
def test_nvfp4_block_by_block(dim: int, k_scale: float) -> None:
    """The same formula with numpy scalars and the codec's casts."""
    x = vectors(dim)
    scale = torch.tensor([k_scale])
    rows, clipped = Nvfp4(scale).encode(x)
    one, multiplier = np.float32(1), np.float32(k_scale)
    given = one / multiplier
    blocks = x.float().numpy().reshape(-1, 16)
    codes = rows.numpy().reshape(-1, dim // 2 + dim // 16)
    for i, block in enumerate(blocks):
        row, at = divmod(i, dim // 16)
        amax = np.abs(block).max()
        stored = encode(np.float32(given * (amax * (one / np.float32(6)))), E4M3FN).codes
        assert codes[row, dim // 2 + at] == stored
        held = decode(stored, E4M3FN)
        factor = one / (held * (one / given)) if held else np.float32(0)
        elements = encode(block * factor, E2M1).codes
        pairs = codes[row, at * 8 : at * 8 + 8]
        assert np.array_equal(np.stack([pairs & 15, pairs >> 4], -1).ravel(), elements)
    assert clipped == int((x.float().abs() > np.float32(k_scale) * 2688).sum())


@pytest.mark.parametrize("dim", [32, 64, 96])
def test_mxfp8_is_the_scheme_of_weights_and_activations(dim: int) -> None:
    x = vectors(dim)[:, :, 1:]
    rows, _ = Mxfp8().encode(x)
    want = quantize(x.float().numpy(), schemes["mxfp8_e4m3"])
    assert np.array_equal(rows[..., :dim].numpy(), want.codes)
    assert np.array_equal(rows[..., dim:].numpy(), want.scales[0])
    assert np.array_equal(Mxfp8().decode(rows, torch.float32).numpy(), want.dequantize())


@pytest.mark.parametrize("dim", [16, 64, 80])
def test_sglangs_fp4_rounds_ties_up_in_magnitude(dim: int) -> None:
    """The codec rounds to nearest, ties away; exponents by frexp instead of a logarithm."""
    x = vectors(dim)
    x[1, 0, 0, :8] = torch.tensor([0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0])
    rows, _ = Fp4Block16().encode(x)
    blocks = x.float().numpy().reshape(*x.shape[:-1], -1, 16)
    amax = np.maximum(np.abs(blocks).max(-1) / np.float32(6), np.float32(1e-10))
    half, exponent = np.frexp(amax)
    exponent = np.where(half == 0.5, exponent - 1, exponent)
    assert np.array_equal(rows[..., dim // 2 :].numpy(), exponent + 127)
    want = encode(blocks / np.ldexp(1.0, exponent)[..., None], E2M1, "nearest_away").codes
    pairs = rows[..., : dim // 2].numpy()
    codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(blocks.shape)
    assert np.array_equal(codes & 7, want & 7)
    assert np.array_equal((codes >> 3).astype(bool), blocks < 0)  # minus zero comes in as zero
    assert codes[1, 0, 0, 0, :8].tolist() == [1, 10, 3, 12, 5, 14, 7, 7]


@pytest.mark.parametrize(
    ("mode", "dim"), [("nvfp4", 24), ("mxfp8", 80), ("fp4_mx_block16", 40), ("int4_per_token_head", 7)]
)
def test_head_sizes_that_blocks_do_not_fill_are_refused(mode: str, dim: int) -> None:
    with pytest.raises(UsageError, match=f"head size {dim}"):
        MODES[mode].codec(torch.ones(1)).encode(torch.zeros(1, 1, 1, dim))
