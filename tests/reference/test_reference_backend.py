"""The numpy backend on chunks of packed rows, its arithmetics, and its decodes to other dtypes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.kernels import Rows, choose
from narrowcast.kernels.reference.dequantize import dequantize
from narrowcast.kernels.reference.quantize import quantize, tensor_amax
from narrowcast.kernels.reference.rows import REFERENCE, qtensor
from narrowcast.numbers.codec import decode, to_bf16
from narrowcast.numbers.formats import BF16, E4M3FN, FP16, FP32, Format
from narrowcast.tensors.metrics import Errors, errors
from narrowcast.tensors.packing import packing
from narrowcast.tensors.scaling import outer_scale
from narrowcast.tensors.schemes import ARITHMETICS, Arithmetic, Scheme, schemes

SOURCES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}


def weight(shape: tuple[int, ...] = (300, 72), seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def carrier(x: NDArray[np.float32], source: Format) -> NDArray[np.generic]:
    return {BF16: to_bf16, FP16: lambda v: v.astype(np.float16), FP32: lambda v: v}[source](x)


def packing_of(scheme: Scheme):  # type: ignore[no-untyped-def]
    return packing(
        scheme.element.bits, flip=scheme.element.name == "int4", word=32 if scheme.element.bits == 4 else 8
    )


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", schemes)
def test_chunks_of_rows_are_the_whole_tensor(name: str, source: str) -> None:
    """Any chunking on tile boundaries, with the outer scale of the whole, gives the same bytes."""
    scheme, fmt = schemes[name], SOURCES[source]
    stored = carrier(weight(), fmt)
    how = packing_of(scheme)
    outer = None
    if scheme.outer is not None:
        outer = float(
            outer_scale(np.full((1, 1), REFERENCE.scan(stored, fmt).amax, np.float32), scheme, fmt)[0, 0]
        )
    whole = REFERENCE.quantize(stored, fmt, scheme, how, outer)
    decoded = REFERENCE.dequantize(whole, scheme, how, 72, FP32, outer)
    total = Errors()
    for start in range(0, 300, 128):
        chunk = stored[start : start + 128]
        rows = REFERENCE.quantize(chunk, fmt, scheme, how, outer)
        assert np.array_equal(rows.packed, whole.packed[start : start + 128])
        if scheme.inner.tile[0]:
            step = scheme.inner.tile[0]
            at = slice(start // step, start // step + rows.scales.shape[0])
            assert np.array_equal(rows.scales, whole.scales[at])
            assert rows.zero is None or np.array_equal(rows.zero, whole.zero[at])
        assert np.array_equal(
            REFERENCE.dequantize(rows, scheme, how, 72, FP32, outer), decoded[start : start + 128]
        )
        total = total + REFERENCE.check(chunk, fmt, scheme, how, rows, outer)
    check = REFERENCE.check(stored, fmt, scheme, how, whole, outer)
    assert (total.clipped, total.underflowed, total.beyond) == (check.clipped, check.underflowed, 0)
    assert total.elements == check.elements == 300 * 72
    q = quantize(weight() if fmt is FP32 else np.asarray(_wide(stored, fmt)), scheme, source=fmt)
    assert errors(_wide(stored, fmt), q, q.dequantize()) == check


def _wide(stored: NDArray[np.generic], source: Format) -> NDArray[np.float32]:
    return decode(stored, BF16) if source is BF16 else stored.astype(np.float32)


def test_scan_counts_what_is_not_finite() -> None:
    x = weight((4, 8))
    x[1, 2], x[3, 3], x[3, 4] = np.nan, np.inf, -np.inf
    for source in SOURCES.values():
        scan = REFERENCE.scan(carrier(x, source), source)
        finite = _wide(carrier(x, source), source)
        assert (scan.nan, scan.inf, scan.first) == (1, 2, 10)
        assert scan.amax == np.abs(finite[np.isfinite(finite)]).max()
    assert REFERENCE.scan(weight((2, 3)), FP32).first == -1


@pytest.mark.parametrize("name", ["fp8_channel", "mxfp4", "nvfp4", "int4_g32", "uint4_g32"])
def test_decodes_round_once(name: str) -> None:
    q = quantize(weight(), schemes[name])
    exact = dequantize(q)
    assert exact.dtype == np.float32
    assert np.array_equal(dequantize(q, BF16), to_bf16(exact))
    assert np.array_equal(dequantize(q, FP16), exact.astype(np.float16))


def test_decodes_that_do_not_exist_are_refused() -> None:
    q = quantize(weight(), schemes["mxfp4"])
    with pytest.raises(UsageError, match="unknown reader"):
        dequantize(q, as_="some-reader")
    with pytest.raises(UsageError, match="cannot dequantize"):
        dequantize(q, E4M3FN)


@pytest.mark.parametrize("name", ["fp8_channel", "int8_channel", "nvfp4", "mxfp6", "int4_g32"])
def test_arithmetics_round_where_they_say(name: str) -> None:
    """Each against its formula written out: x / s in fp32, x · (1/s) in fp32, x / s in fp64."""
    x = weight((16, 96), 3)
    for word in ("narrowcast", "reciprocal", "fp64"):
        scheme = schemes[name].with_arithmetic(ARITHMETICS[word])
        q = quantize(x, scheme)
        scale = np.float32(1) * q.scale_values(0)
        if len(q.scales) == 2:
            scale = scale * q.scale_values(1)
        repeat = x.shape[1] // scale.shape[1]
        s = np.repeat(scale, repeat, axis=1)
        if word == "narrowcast":
            y = (x / s).astype(np.float64)
        elif word == "reciprocal":
            y = (x * (np.float32(1) / s)).astype(np.float64)
        else:
            y = x.astype(np.float64) / s
        wanted = quantize_codes(y, scheme)
        assert np.array_equal(q.codes, wanted), word


def quantize_codes(y: NDArray[np.float64], scheme: Scheme) -> NDArray[np.uint8]:
    from reference.array_oracle import encode_array
    from reference.fractions_oracle import LAYOUTS

    return encode_array(LAYOUTS[scheme.element.name], y, "nearest_even", "saturate").codes.astype(np.uint8)


def test_reciprocal_and_division_differ_somewhere() -> None:
    """Else the field would be idle: a quotient on a tie that the reciprocal misses by one unit."""
    x = weight((64, 512), 5)
    codes = [
        quantize(x, schemes["int8_channel"].with_arithmetic(ARITHMETICS[word])).codes
        for word in ("narrowcast", "reciprocal")
    ]
    assert 0 < (codes[0] != codes[1]).sum() < x.size / 1000


def test_round_first_and_clamp_first() -> None:
    """With a zero point of 7 and x / s = 0.5: round(0.5 + 7) = 8 but round(0.5) + 7 = 7."""
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = [-7.0, 8.0, 0.5]  # scale 1, zero point 7
    codes = {}
    for order in ("clamp_first", "round_first"):
        scheme = schemes["uint4_g32"].with_arithmetic(Arithmetic(order=order))  # type: ignore[arg-type]
        q = quantize(x, scheme)
        assert q.zero is not None
        assert q.zero[0, 0] == 7
        codes[order] = q.codes[0, :3].tolist()
    assert codes == {"clamp_first": [0, 15, 8], "round_first": [0, 15, 7]}


def test_outer_rules() -> None:
    """The power of two is the smallest that reaches, exact powers stay, 4/6 leaves room for a factor of 1.5."""
    scheme = schemes["nvfp4"]
    exact = np.array(
        [2688.0, 2688.0 * 2**-5, np.nextafter(np.float32(2688), np.float32(1e9)), 1.0, 1e-45, 0.0], np.float32
    )
    powers = [1.0, 2.0**-5, 2.0, 2.0**-11, 2.0**-117, 1.0]
    assert outer_scale(exact.reshape(-1, 1, 1), scheme).ravel().tolist() == powers
    for rule, reach in (("amax", 2688.0), ("four_over_six", 1536.0)):
        changed = replace(scheme, scales=(scheme.inner, replace(scheme.scales[1], rule=rule)))
        assert outer_scale(np.full((1, 1), 3.7, np.float32), changed) == np.float32(np.float32(3.7) / reach)
        assert outer_scale(np.zeros((1, 1), np.float32), changed) == 1
    assert outer_scale(np.full((1, 1), 896.0, np.float32), schemes["fp8_tensor"]) == 2.0


def test_the_inner_scale_never_exceeds_what_e4m3_holds() -> None:
    """Under every outer rule the largest block scale is at most 448, and used."""
    x = weight((64, 256), 9)
    for rule, top in (("pow2", 448), ("amax", 448), ("four_over_six", 256)):
        scheme = schemes["nvfp4"]
        q = quantize(x, replace(scheme, scales=(scheme.inner, replace(scheme.scales[1], rule=rule))))
        assert top / 2 < q.scale_values(0).max() <= top, rule


def test_tensor_amax_keeps_leading_axes() -> None:
    x = weight((3, 2, 4, 8))
    assert tensor_amax(x).shape == (3, 2, 1, 1)
    assert tensor_amax(x)[2, 1, 0, 0] == np.abs(x[2, 1]).max()


def test_rows_become_a_tensor_again() -> None:
    x, scheme = weight((8, 66)), schemes["int4_g32"]
    how = packing_of(scheme)
    rows = REFERENCE.quantize(x, FP32, scheme, how)
    assert isinstance(rows, Rows)
    q = qtensor(rows, scheme, how, 66)
    assert np.array_equal(q.codes, quantize(x, scheme).codes)


def test_the_reference_can_be_asked_for_and_runs_everything() -> None:
    for scheme in schemes.values():
        choice = choose(scheme, FP32, packing_of(scheme), wanted="reference")
        assert choice.backend is REFERENCE
        assert choice.reason == "asked for"
        assert REFERENCE.supports(scheme, FP32, packing_of(scheme)) is None
