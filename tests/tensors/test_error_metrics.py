"""Clipping, underflow and rounding told apart on examples with known answers; damage found; sums that add."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log10

import numpy as np
import pytest
from numpy.typing import NDArray

from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.codec import decode_table, encode
from narrowcast.numbers.formats import formats
from narrowcast.tensors.metrics import ErrorReport, Errors, classify, error_report, errors, half_steps
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.schemes import Scheme, schemes

F32 = NDArray[np.float32]


def at_scale_one(x: F32, name: str) -> QTensor:
    """Codes of x under a per-tensor scale of 1, so that every error is the element format's own."""
    scheme = schemes[name]
    return QTensor(scheme, encode(x, scheme.element).codes, (np.ones((1, 1), np.float32),))


def test_the_three_kinds_of_error() -> None:
    """E4M3 at scale 1: 464 rounds to 448 and is not clipped, 465 is; 2^-10 underflows; 1.06 rounds by 0.06."""
    x = np.array([[464.0, 465.0, -1000.0, 2.0**-10, -(2.0**-11), 1.06, 2.0, 0.0]], np.float32)
    q = at_scale_one(x, "fp8_tensor")
    clipped, underflowed, beyond = classify(x, q, q.dequantize())
    assert clipped.tolist() == [[False, True, True, False, False, False, False, False]]
    assert underflowed.tolist() == [[False, False, False, True, True, False, False, False]]
    assert not beyond.any()
    report = error_report(x, q)
    signal = float(np.square(x.astype(np.float64)).sum())
    step = float(x[0, 5]) - 1.0  # 1.06 becomes 1
    assert report.errors.clipped == 2
    assert report.errors.underflowed == 2
    assert report.noise_from_clipping == pytest.approx((17**2 + 552**2) / signal, rel=1e-12)
    assert report.noise_from_underflow == pytest.approx((2.0**-20 + 2.0**-22) / signal, rel=1e-12)
    assert report.noise_from_rounding == pytest.approx((16**2 + step**2) / signal, rel=1e-12)
    parts = report.noise_from_clipping + report.noise_from_underflow + report.noise_from_rounding
    assert report.relative_mse == pytest.approx(parts, rel=1e-12)
    assert report.sqnr == pytest.approx(-10 * log10(report.relative_mse), rel=1e-12)
    assert report.max_error == 552
    assert report.max_relative_error == 1.0
    nonzero = [16 / 464, 17 / 465, 0.552, 1, 1, step / float(x[0, 5]), 0]
    assert report.mean_relative_error == pytest.approx(np.mean(nonzero), rel=1e-9)
    assert report.saturated == 3
    assert report.codes_used == len({0x7E, 0xFE, 0x00, 0x80, 0x38, 0x40}) / 256


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("int8_tensor", (127.5, -128.5), (127.6, -128.6)),
        ("fp8_tensor", (464.0, -464.0), (464.1, -464.1)),
    ],
)
def test_clipping_begins_half_a_step_beyond_the_largest_value(
    name: str, inside: tuple[float, float], outside: tuple[float, float]
) -> None:
    for values, count in ((inside, 0), (outside, 2)):
        x = np.array([values], np.float32)
        q = at_scale_one(x, name)
        assert errors(x, q, q.dequantize()).clipped == count


def test_clipping_with_a_zero_point() -> None:
    """uint4 under scale 0.5 and zero point 3 spans -1.5 to 6: clipped beyond -1.75 and 6.25."""
    scheme = schemes["uint4_g32"]
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [-1.75, -1.76, 6.25, 6.26, 0.2, -0.2]
    codes = np.clip(np.rint(x / 0.5 + 3), 0, 15).astype(np.uint8)
    half = np.array([[0x3F00]], np.uint16)
    q = QTensor(scheme, codes, (half,), np.array([[3]], np.uint8))
    clipped, underflowed, beyond = classify(x, q, q.dequantize())
    assert np.flatnonzero(clipped).tolist() == [1, 3]
    assert np.flatnonzero(underflowed).tolist() == [4, 5]
    assert not beyond.any()


def test_lost_blocks_and_used_codes() -> None:
    """A tile whose every nonzero value became zero is a lost block; an all-zero tile is none."""
    x = np.zeros((1, 64), np.float32)
    x[0, :32] = 1e-30
    x[0, 0] = 1.0
    x[0, 32:48] = 1e-30
    scheme = schemes["nvfp4"]
    report = error_report(x, quantize(x, scheme))
    assert report.blocks_lost == pytest.approx(2 / 3)
    assert report.errors.underflowed == 47
    assert report.codes_used == 2 / 16
    assert (
        error_report(
            np.zeros((1, 64), np.float32), quantize(np.zeros((1, 64), np.float32), scheme)
        ).blocks_lost
        == 0
    )


def test_both_ends_of_an_integer_count_as_saturated() -> None:
    x = np.array([[-128.0, 127.0, 3.0, -127.0]], np.float32)
    assert error_report(x, at_scale_one(x, "int8_tensor")).saturated == 2


@pytest.mark.parametrize("name", schemes)
def test_a_sound_quantization_has_nothing_beyond_the_bound(name: str) -> None:
    x = np.random.default_rng(0).standard_t(3, (32, 256)).astype(np.float32)
    q = quantize(x, schemes[name])
    assert errors(x, q, q.dequantize()).beyond == 0


def damaged(q: QTensor, codes: F32 | None = None, scales: object = None) -> QTensor:
    new_codes = q.codes if codes is None else codes
    new_scales = q.scales if scales is None else (scales, *q.scales[1:])
    return QTensor(q.scheme, new_codes, new_scales, q.zero)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", schemes)
def test_one_flipped_bit_is_found(name: str) -> None:
    """The top bit of one large element: its sign, or half the range, far outside half a step."""
    scheme = schemes[name]
    x = np.random.default_rng(1).standard_normal((8, 256)).astype(np.float32)
    x[3, 40] = 0.9 * np.abs(x).max()
    q = quantize(x, scheme)
    codes = q.codes.copy()
    codes[3, 40] ^= 1 << (scheme.element.bits - 1)
    bad = damaged(q, codes)
    clipped, _, _ = classify(x, q, q.dequantize())
    found = errors(x, bad, bad.dequantize())
    assert found.beyond == 1 or (clipped[3, 40] and found.clipped), name


@pytest.mark.parametrize("name", schemes)
def test_a_tensor_of_zero_codes_is_found(name: str) -> None:
    """A large value that decodes to zero is no underflow: all but the smallest elements are beyond the bound."""
    x = np.random.default_rng(8).standard_normal((8, 256)).astype(np.float32)
    q = quantize(x, schemes[name])
    zero = encode(np.zeros(1), schemes[name].element).codes[0]
    bad = damaged(q, np.full_like(q.codes, zero if q.zero is None else 0))
    clipped, underflowed, beyond = classify(x, bad, bad.dequantize())
    assert beyond.sum() > x.size / 2
    assert not (underflowed & beyond).any()
    assert not (clipped & (underflowed | beyond)).any()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4_g128", "mxfp6"])
def test_swapped_neighbours_are_found(name: str) -> None:
    x = np.random.default_rng(2).standard_normal((8, 256)).astype(np.float32)
    q = quantize(x, schemes[name])
    codes = q.codes.reshape(8, -1, 2)[:, :, ::-1].reshape(8, 256)
    bad = damaged(q, codes)
    report = error_report(x, bad)
    assert report.errors.beyond > x.size / 2
    assert report.sqnr < 0 < 15 < error_report(x, q).sqnr


def test_a_scale_of_a_neighbouring_tile_is_found() -> None:
    x = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32) * np.float32(
        [[1], [4], [16], [64]]
    )
    q = quantize(x, schemes["mxfp8"])
    bad = damaged(q, scales=np.roll(q.scales[0], 1, axis=0))
    assert errors(x, bad, bad.dequantize()).beyond > 0


@pytest.mark.parametrize("name", ["fp8_channel", "mxfp8_e5m2"])
def test_nan_and_infinity_that_came_back_are_beyond(name: str) -> None:
    x = np.random.default_rng(4).standard_normal((4, 128)).astype(np.float32)
    q = quantize(x, schemes[name])
    codes = q.codes.copy()
    codes[1, 2], codes[2, 3] = 0x7F, 0x7C
    bad = damaged(q, codes)
    found = errors(x, bad, bad.dequantize())
    special = int((~np.isfinite(bad.dequantize())).sum())
    assert special >= 1
    assert found.beyond >= special
    assert found.sqnr == -inf
    assert error_report(x, bad).sqnr == -inf


def test_a_nan_scale_byte_is_beyond() -> None:
    x = np.random.default_rng(5).standard_normal((4, 32)).astype(np.float32)
    q = quantize(x, schemes["nvfp4"])
    scales = q.scales[0].copy()
    scales[3, 1] = 0x7F
    assert errors(x, damaged(q, scales=scales), damaged(q, scales=scales).dequantize()).beyond == 16


def test_the_bound_is_tight() -> None:
    """Half a step passes, a little more does not: 1 + 1/16 is E4M3's midpoint above 1."""
    scheme = schemes["fp8_tensor"]
    one = np.array([[0x38]], np.uint8)
    for x, count in (
        (1.0625, 0),
        (1.0626, 1),
        (0.9374, 1 if half_steps(scheme.element)[0x38] < 0.0626 else 0),
    ):
        q = QTensor(scheme, one, (np.ones((1, 1), np.float32),))
        wide = np.array([[x]], np.float32)
        assert errors(wide, q, q.dequantize()).beyond == count, x


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e2m1", "e2m3", "int4", "uint4", "mxint8", "nf4", "e8m0"])
def test_half_steps_reach_every_input_that_rounds_to_the_code(name: str) -> None:
    """For every code, the midpoints to its neighbours lie within its half step, and one of them on it."""
    fmt = formats[name]
    table, half = decode_table(fmt), half_steps(fmt)
    finite = np.unique(table[np.isfinite(table)])
    for code, value in enumerate(table):
        if not np.isfinite(value):
            assert half[code] == 0
            continue
        at = int(np.searchsorted(finite, value))
        gaps = [finite[i + 1] - finite[i] for i in (at - 1, at) if 0 <= i < len(finite) - 1]
        assert half[code] >= np.float32(max(gaps) / 2) or name == "e8m0", (name, code)
        assert half[code] <= np.float32(fmt.spacing(fmt.max) / 2) or name == "nf4"


def test_sums_add_over_row_chunks() -> None:
    x = np.random.default_rng(6).standard_t(3, (40, 128)).astype(np.float32)
    for scheme in (schemes["mxfp4"], schemes["int4_g32"], schemes["nvfp4"]):
        q = quantize(x, scheme)
        whole = errors(x, q, q.dequantize())
        parts = Errors()
        for start in range(0, 40, 8):
            part = q.rows(start, start + 8)
            parts = parts + errors(x[start : start + 8], part, part.dequantize())
        counts = ("elements", "clipped", "underflowed", "beyond")
        assert [getattr(parts, n) for n in counts] == [getattr(whole, n) for n in counts]
        assert parts.signal == pytest.approx(whole.signal, rel=1e-12)
        assert parts.noise == pytest.approx(whole.noise, rel=1e-12)


def test_sqnr_at_the_ends() -> None:
    assert Errors(4, 1.0, 0.0).sqnr == inf
    assert Errors(4, 0.0, 1.0).sqnr == -inf
    assert Errors(4, 1.0, inf).sqnr == -inf
    assert Errors(4, 1.0, float("nan")).sqnr == -inf
    assert Errors(4, 100.0, 1.0).sqnr == 20


def test_an_all_zero_tensor_reports_nothing_lost() -> None:
    x = np.zeros((4, 64), np.float32)
    report: ErrorReport = error_report(x, quantize(x, schemes["mxfp8"]))
    assert report.sqnr == inf
    assert (report.relative_mse, report.max_relative_error, report.mean_relative_error) == (0, 0, 0)
    assert report.errors == Errors(elements=256)


def test_custom_tiles_are_measured_too() -> None:
    """Classification follows the scheme's tiles, not a list of known ones."""
    base = schemes["fp8_tensor"]
    scheme: Scheme = replace(base, scales=(replace(base.inner, tile=(3, 5)),))
    x = np.random.default_rng(7).standard_normal((10, 13)).astype(np.float32)
    q = quantize(x, scheme)
    assert q.scales[0].shape == (4, 3)
    assert errors(x, q, q.dequantize()).beyond == 0
