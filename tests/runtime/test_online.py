"""Online schemes: the engine's own bits.

Digests are of codes and scales that vLLM 0.32.0's own functions gave, executed with torch 2.13.0 on the CPU on
``values(40, 160)``: per_block_cast_to_fp8, _fp8_channel_scale and _fp8_quant_per_channel, _mxfp8_e4m3_quantize_torch,
QuantFP8.forward_native (per token, per group of 32, static), scaled_int8_quant (compiled). What has no function that a
CPU runs (mxfp4, NVFP4, the experts' int8) is derived here with fractions.
"""

import hashlib
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from narrowcast.errors import UsageError
from narrowcast.numbers.codec import decode
from narrowcast.numbers.formats import E2M1, E4M3FN
from narrowcast.runtime.online import FP8_TOKEN, METHODS, MXFP4, MXFP8, TOKEN_FLOOR, Online, siblings
from narrowcast.runtime.quantizing import quantized
from narrowcast.tensors.schemes import Scheme, schemes


def values(n: int, k: int) -> torch.Tensor:
    """bf16 rows of very different sizes, the first of zeros."""
    i = np.arange(n * k, dtype=np.int64).reshape(n, k)
    x = ((i * 7919 + 104729) % 100003 - 50001).astype(np.float64) / 4096 * 2.0 ** ((i // k * 5) % 23 - 14)
    x[0] *= 0  # some of them negative
    return torch.from_numpy(x.astype(np.float32)).bfloat16()


def digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def weight(name: str) -> Scheme:
    return METHODS[name].linear.weight


def inputs(name: str) -> Scheme:
    found = METHODS[name].linear.input
    assert found is not None
    return found


GROUP = inputs("fp8_per_block")
# vLLM's Python twin of the per-group kernel puts the per-token floor under its scales; the arithmetic is the kernel's.
TWIN = replace(GROUP, scales=(replace(GROUP.inner, tile=(1, 32), floor=TOKEN_FLOOR),))


@pytest.mark.parametrize(
    ("scheme", "scale", "codes", "scales"),
    [
        (weight("fp8_per_block"), None, "3a7873bb8c08784a", "7e1abf98f86446cc"),
        (weight("fp8_per_channel"), None, "d4bd04c14531c438", "a21ed4e48a406ff8"),
        (FP8_TOKEN, None, "d4bd04c14531c438", "a21ed4e48a406ff8"),
        (TWIN, None, "d9e9f4c19bc99183", "c317ff307087616c"),
        (MXFP8, None, "7adac39f5e94024e", "fc8477c6b7ad11af"),
        (weight("fp8_per_tensor"), 0.37, "259cdebe3192e1b3", "c15be853aa689258"),
        (schemes["int8_tensor"], 0.37, "d0746bea1ff1a7f6", "c15be853aa689258"),
    ],
    ids=["per block", "per channel", "per token", "per group", "mxfp8", "static fp8", "static int8"],
)
def test_bits_of_the_engine(scheme: Scheme, scale: float | None, codes: str, scales: str) -> None:
    q = quantized(values(40, 160), scheme, scale)
    assert digest(q.codes) == codes
    assert digest(q.scales[0]) == scales


def test_dynamic_int8_of_the_engine() -> None:
    """Its scale of a token of zeros is 0, ours 1; both decode to zeros."""
    q = quantized(values(40, 160), inputs("int8_per_channel_weight_only"))
    assert digest(q.codes) == "987c75ae21ee4392"
    scales = q.scales[0].copy()
    scales[0] = 0
    assert digest(scales) == "7c4ad6f056f252fd"


def test_the_floor_of_a_block_is_1e_4_of_its_amax() -> None:
    q = quantized(torch.full((128, 128), 1e-6), weight("fp8_per_block"))
    assert q.scales[0][0, 0] == np.float32(1e-4) / np.float32(448)
    assert (decode(q.codes, E4M3FN) == 4.5).all()  # 1e-6 · (448 / 1e-4) = 4.48, and E4M3 has 4.5


def _nearest(value: Fraction, table: list[Fraction]) -> int:
    """Index of the nearest magnitude, ties to the even code, what lies beyond saturated."""
    return min(range(len(table)), key=lambda i: (abs(table[i] - value), i % 2))


def test_mxfp4_by_fractions() -> None:
    x = values(40, 160)
    q = quantized(x, MXFP4)
    table = [Fraction(float(v)) for v in decode(np.arange(8, dtype=np.uint8), E2M1)]
    for row in range(0, 40, 7):
        for group in range(5):
            block = [Fraction(float(v)) for v in x[row, 32 * group : 32 * group + 32].float()]
            amax = max(abs(v) for v in block)
            exponent = -127
            if amax:
                while Fraction(2) ** (exponent + 1) <= amax:
                    exponent += 1
                exponent += (amax >= Fraction(7, 4) * Fraction(2) ** exponent) - 2
            assert q.scales[0][row, group] == max(exponent, -127) + 127
            for j, v in enumerate(block):
                code = _nearest(abs(v) / Fraction(2) ** exponent, table)
                assert q.codes[row, 32 * group + j] & 7 == code


def test_int8_of_experts_is_computed_in_the_weights_dtype() -> None:
    """torch's own bf16 arithmetic: amax / 127 and w / s rounded to bf16 before they are rounded to integers."""
    w = values(40, 160)[1:]
    scales = w.abs().amax(dim=1) / 127
    codes = w.div(scales.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    q = quantized(w, weight("int8_per_channel_weight_only"))
    assert np.array_equal(q.scales[0][:, 0], scales.float())
    assert np.array_equal(q.codes.view(np.int8), codes)


def test_nvfp4_scales_by_rounded_steps() -> None:
    w = values(40, 160)
    q = quantized(w, weight("nvfp4_per_token"))
    amax = np.float32(w.float().abs().max())
    outer = np.float32(1) / (np.float32(2688) / amax)
    assert q.scales[1][0, 0] == outer
    inner = decode(q.scales[0], E4M3FN)
    blocks = w.float().numpy().reshape(40, 10, 16)
    inverse = np.float32(1) / (inner * outer)
    y = np.abs(blocks * inverse[..., None])
    got = decode(q.codes, E2M1).reshape(40, 10, 16)
    step = np.where(y < 2, 0.5, np.where(y < 4, 1, 2))
    assert (np.abs(np.abs(got) - np.minimum(y, 6)) <= step / 2).all()


def test_fused_siblings_share_what_the_engine_shares() -> None:
    parts = {
        "a.q_proj": torch.randn(96, 64),
        "a.k_proj": torch.randn(40, 64) * 9,
        "a.v_proj": torch.randn(40, 64),
    }
    assert siblings("a.q_proj") == [*parts]
    whole = torch.cat([*parts.values()])
    for name, rows in (("fp8_per_tensor", 1), ("fp8_per_block", 2)):
        online = Online(name)
        wanted = torch.from_numpy(quantized(whole, online.linear.weight).dequantize())
        got = [online.quantize(path, [*parts], parts.__getitem__)[0].decoded() for path in parts]
        assert torch.equal(torch.cat(got), wanted)
        assert quantized(whole, online.linear.weight).scales[0].shape[0] == rows
    alone, _ = Online("fp8_per_channel").quantize("a.q_proj", [*parts], parts.__getitem__)
    assert alone.matrix.shape == (96, 64)


@pytest.mark.parametrize(
    ("name", "near"),
    [("fp8_per_chanel", "fp8_per_channel"), ("mxfp9", "mxfp8"), ("nonsense!", "narrowcast presets")],
)
def test_unknown_names_are_refused_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(UsageError) as refused:
        Online(name)
    assert near in str(refused.value)


def test_presets_are_taken_with_our_arithmetic_unless_they_need_statistics() -> None:
    assert Online("fp8_dynamic").linear.weight is schemes["fp8_channel"]
    with pytest.raises(UsageError, match="statistics"):
        Online("nvfp4")


def test_a_width_that_the_engine_refuses() -> None:
    with pytest.raises(UsageError, match="multiple of 32"):
        Online("mxfp8").quantize("up_proj", ["up_proj"], lambda _: torch.zeros(4, 40))


def test_the_engines_names_that_run_here_are_those_that_it_lists() -> None:
    """All but what only others have, and what is no scheme of its own: an old name, and a way to spell several."""
    from narrowcast.hardware import names

    listed = {row.name for row in names.rows("vllm", names.METHOD) if "online" in row.does}
    assert set(METHODS) - {"llm_int8"} == listed - {"fp8", "humming", "online"}
