"""Small inputs on which published tools were wrong, and their whole kind: every scheme, every scale format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from narrowcast.errors import NonFiniteError, UsageError
from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.codec import Counts, decode, encode, to_bf16
from narrowcast.numbers.formats import BF16, E2M1, E4M3FN, FP16, FP32
from narrowcast.tensors.metrics import error_report, errors
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import power_of_two_codes, reduce_tiles
from narrowcast.tensors.schemes import Scheme, schemes

F32 = NDArray[np.float32]
LADDER = np.array(
    [
        448, 464, np.nextafter(np.float32(464), np.float32(np.inf)), 465, 1000, np.inf, -np.inf, np.nan, 2.0**-9,
        2.0**-10, np.nextafter(np.float32(2.0**-10), np.float32(1)), 1.5 * 2.0**-9, 4.25, 4.75, -(2.0**-11),
    ],
    np.float32,
)  # fmt: skip
ALL: list[Scheme] = [*schemes.values()] + [
    schemes[name].with_scale_format(fmt)
    for name in ("int4_g32", "uint4_g32", "int8_g32")
    for fmt in (FP16, FP32)
]
IDS = [f"{scheme.name}-{scheme.inner.format.name}" for scheme in ALL]
every_scheme = pytest.mark.parametrize("scheme", ALL, ids=IDS)


def as_bf16(x: NDArray[Any]) -> F32:
    return decode(to_bf16(np.asarray(x, np.float32)), BF16)


def sound_scales(q: QTensor) -> None:
    """Never zero, negative, infinite or NaN; fp32 and bf16 never subnormal."""
    for level, scale in enumerate(q.scheme.scales):
        values = q.scale_values(level)
        assert np.isfinite(values).all(), scale.format.name
        assert (values > 0).all(), scale.format.name
        if scale.format in (FP32, BF16):
            assert (values >= 2.0**-126).all()


# Case 1


def test_e4m3_cast_ladder() -> None:
    special = encode(LADDER, E4M3FN, overflow="special")
    assert special.codes.tobytes().hex(" ").upper() == "7E 7E 7F 7F 7F 7F FF 7F 01 00 01 02 48 4A 80"
    saturated = encode(LADDER, E4M3FN)
    assert saturated.codes.tobytes().hex(" ").upper() == "7E 7E 7E 7E 7E 7E FE 7F 01 00 01 02 48 4A 80"
    assert saturated.counts == special.counts == Counts(clipped=3, underflowed=2, nan=1, inf=2)


# Case 2


def test_e2m1_ladder() -> None:
    ladder = {
        0.25: 0, 0.25000006: 0.5, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4, 5.0001: 6, 7.0: 6, 1e9: 6,
    }  # fmt: skip
    got = encode(np.array([*ladder, -0.2], np.float32), E2M1).codes
    assert decode(got[:-1], E2M1).tolist() == list(ladder.values())
    assert got[-1] == 8


@every_scheme
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_refused_by_name_count_and_index(scheme: Scheme, bad: float) -> None:
    x = np.ones((4, 3, 128), np.float32)
    x[2, 1, 77] = x[3, 0, 5] = bad
    with pytest.raises(NonFiniteError) as raised:
        quantize(x, scheme, where="model.layers.3.mlp.down_proj.weight")
    message = str(raised.value)
    assert "model.layers.3.mlp.down_proj.weight, first at index (2, 1, 77)" in message
    assert ("2 NaN and 0 infinite" if np.isnan(bad) else "0 NaN and 2 infinite") in message
    assert "--ignore" in message


# Case 3


@pytest.mark.parametrize(
    ("name", "amax", "floor", "ceil", "rceil"),
    [
        ("mxfp8", 150, (126, 144), (127, 144), (126, 144)),
        ("mxfp8", 500, (127, 448), (128, 512), (128, 512)),
        ("mxfp8", 957, (128, 896), (129, 960), (129, 960)),
        ("mxfp4", 7, (127, 6), (128, 8), (128, 8)),
        ("mxfp4", 5, (127, 4), (128, 4), (127, 4)),
    ],
)
def test_mx_scale_rules(name: str, amax: float, floor: Any, ceil: Any, rceil: Any) -> None:
    """Byte and decoded maximum: 150 lies between E4M3's 144 and 160 under any power of two, nearer to 144."""
    x = np.zeros((1, 32), np.float32)
    x[0, 3] = amax
    for rule, (byte, decoded) in {"floor": floor, "ceil_log2": ceil, "rceil": rceil}.items():
        q = quantize(x, schemes[name].with_rule(rule))
        assert q.scales[0].tolist() == [[byte]], rule
        assert q.dequantize()[0, 3] == decoded, rule


def test_the_exponent_comes_from_the_value_itself() -> None:
    """255.75 is 2^7.998: a detour through bf16 would round it to 256 and the exponent to 8."""
    assert power_of_two_codes(np.float32([255.75]), "floor", E4M3FN) == 127 + 7 - 8
    assert as_bf16([255.75])[0] == 256


# Case 4


def test_the_scale_is_rounded_before_the_codes_are_made() -> None:
    x = np.random.default_rng(4).standard_normal((128, 128)).astype(np.float32) * 20
    x[0, :4] = [492.8, -246.4, 100, 3]
    q = quantize(x, schemes["fp8_block128_ue8m0"])
    assert q.scale_values().tolist() == [[2.0]]
    assert q.dequantize()[0, :4].tolist() == [480, -240, 96, 3]
    assert np.abs(q.dequantize()).max() <= 492.8 * 1.07
    gaussian = np.random.default_rng(5).standard_normal((256, 512)).astype(np.float32)
    assert error_report(gaussian, quantize(gaussian, schemes["fp8_block128_ue8m0"])).sqnr >= 31


# Case 5


@every_scheme
def test_one_value_among_zeros(scheme: Scheme) -> None:
    """No NaN, scales finite and positive, zeros exact, and the one value within half a step."""
    x = np.zeros((256, 256), np.float32)
    x[0, 0] = 1.0
    q = quantize(x, scheme)
    sound_scales(q)
    decoded = q.dequantize()
    assert decoded[0, 0] > 0.9
    assert errors(x, q, decoded).beyond == 0
    decoded[0, 0] = 0
    assert not decoded.any()


@pytest.mark.parametrize(
    "name", ["fp8_block128", "fp8_channel", "fp8_tensor", "fp8_group128", "mxfp8", "mxfp4"]
)
def test_one_value_among_zeros_is_exact_in_fp8(name: str) -> None:
    x = np.zeros((256, 256), np.float32)
    x[0, 0] = 1.0
    assert np.array_equal(quantize(x, schemes[name]).dequantize(), x)


@every_scheme
def test_zero_tiles_rows_and_tensors(scheme: Scheme) -> None:
    """An all-zero tile has scale 1, codes of zero, and decodes to exact plus zero, whatever stands beside it."""
    rng = np.random.default_rng(0)
    row = rng.standard_normal((4, 32)).astype(np.float32)
    row[2] = 0
    tile = rng.standard_normal((3, 384)).astype(np.float32)
    tile[1, 128:256] = 0
    for x in (row, tile, np.zeros((5, 70), np.float32), np.zeros((2, 3, 128), np.float32)):
        q = quantize(x, scheme)
        sound_scales(q)
        decoded = q.dequantize()
        assert np.isfinite(decoded).all()
        assert not decoded[x == 0].any()
        assert not np.signbit(decoded[x == 0]).any()
        empty = reduce_tiles(np.abs(x), scheme.inner.tile) == 0
        assert (q.scale_values(0)[empty] == 1).all()
        assert errors(x, q, decoded).beyond == 0


# Case 6


def test_nvfp4_zero_block_next_to_a_normal_block() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :16] = np.linspace(-3, 3, 16)
    q = quantize(x, schemes["nvfp4"])
    assert not np.isin(q.scales[0], [0x7F, 0xFF]).any()
    assert not q.dequantize()[0, 16:].any()
    assert q.scales[0][0, 1] == 0x38


# Case 17


def bad_values_weight() -> F32:
    return as_bf16(np.random.default_rng(17).standard_normal((64, 128)) * 0.02)


@every_scheme
@pytest.mark.parametrize("size", [1e-39, 1e-42, 1e-45, 1e-37])
def test_tiny_values_keep_finite_scales_and_are_counted(scheme: Scheme, size: float) -> None:
    x = (np.random.default_rng(1).standard_normal((64, 128)) * size).astype(np.float32)
    q = quantize(x, scheme)
    sound_scales(q)
    decoded = q.dequantize()
    assert np.isfinite(decoded).all()
    lost = errors(x, q, decoded)
    assert lost.beyond == 0
    assert lost.underflowed == ((decoded == 0) & (x != 0)).sum()
    if size < 1e-38:  # held up by the smallest scale; above it a scale may round down and clip a little
        assert lost.clipped == 0


@every_scheme
@pytest.mark.parametrize("outlier", [3e38, -3e38, 3.4028235e38])
def test_one_outlier_shows_in_the_counts(scheme: Scheme, outlier: float) -> None:
    """Everything that shares the outlier's scale is lost, and counted element by element."""
    x = bad_values_weight()
    x[7, 9] = outlier
    q = quantize(x, scheme)
    sound_scales(q)
    decoded = q.dequantize()
    lost = errors(x, q, decoded)
    shared = np.zeros(x.shape, bool)
    rows, cols = scheme.inner.tile
    shared[slice(7 // rows * rows, 7 // rows * rows + rows) if rows else slice(None)] = True
    if cols:
        shared[:, : 9 // cols * cols] = shared[:, 9 // cols * cols + cols :] = False
    if len(scheme.scales) == 2:
        shared[:] = True
    shared[7, 9] = False
    assert not decoded[shared].any()
    assert lost.underflowed >= (shared & (x != 0)).sum()
    # A value within half a step of 2^128 may decode to infinity; then the self-check says so.
    assert np.isfinite(decoded[7, 9]) or lost.beyond == 1
    assert np.isfinite(np.delete(decoded, 7 * 128 + 9)).all()


@every_scheme
def test_both_signs_of_the_largest_magnitude(scheme: Scheme) -> None:
    x = np.full((2, 128), 3e38, np.float32)
    x[:, ::2] *= -1
    q = quantize(x, scheme)
    sound_scales(q)
    assert not np.isnan(q.dequantize()).any()


finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
magnitudes = st.sampled_from([0.0, 1e-45, 1e-39, 2.0**-126, 1e-20, 0.02, 1.0, 448.0, 6e4, 1e30, 3e38])
arrays = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(1, 80)), elements=st.one_of(finite32, magnitudes)
)


@every_scheme
@settings(max_examples=12, deadline=None, derandomize=True)
@given(x=arrays)
def test_any_finite_weight_has_sound_scales_and_stays_within_the_bound(scheme: Scheme, x: F32) -> None:
    """Scales are sound; every element is within half its step, clipped or underflowed, unless fp32 itself overflows."""
    q = quantize(x, scheme)
    sound_scales(q)
    decoded = q.dequantize()
    assert not np.isnan(decoded).any()
    assert errors(x, q, decoded).beyond == np.isinf(decoded).sum()


def test_what_cannot_be_quantized_is_refused() -> None:
    for shape in ((8,), ()):
        with pytest.raises(UsageError, match="works on matrices"):
            quantize(np.ones(shape, np.float32), schemes["mxfp8"])
    for shape in ((0, 64), (4, 0), (0, 4, 64)):
        with pytest.raises(UsageError, match="nothing to quantize"):
            quantize(np.ones(shape, np.float32), schemes["mxfp8"], where="empty.weight")
    with pytest.raises(UsageError, match="does not apply to a e4m3fn scale"):
        quantize(np.ones((2, 32), np.float32), schemes["nvfp4"].with_rule("floor"))
    for rule in ("ceil", "bump(3)", "bump(0.5)", "bump()", "bump(1.75"):
        with pytest.raises(UsageError, match="unknown rule of a power-of-two scale"):
            quantize(np.ones((2, 32), np.float32), schemes["mxfp4"].with_rule(rule))


def test_given_outer_scales_are_used_as_they_are() -> None:
    """Fused siblings share one outer scale: the smaller one keeps its accuracy through its own block scales."""
    rng = np.random.default_rng(7)
    gate, up = (rng.uniform(-1, 1, (32, 32)).astype(np.float32) * amax for amax in (1.0, 0.25))
    gate[0, 0], up[0, 0] = 1.0, 0.25
    shared = np.full((1, 1), 2.0**-11, np.float32)  # the smallest power of two ≥ 1 / 2688
    for x in (gate, up):
        q = quantize(x, schemes["nvfp4"], outer=shared)
        assert q.scales[1] == shared
        assert np.abs(q.dequantize()).max() == pytest.approx(np.abs(x).max(), rel=0.06)
    q = quantize(gate, schemes["fp8_tensor"], outer=np.full((1, 1), 0.5, np.float32))
    assert q.scales[0].tolist() == [[0.5]]
    assert q.dequantize()[0, 0] == 1.0
