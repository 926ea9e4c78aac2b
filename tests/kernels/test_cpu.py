"""The compiled backend against the numpy definition: every scheme, source and rule, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compare import (
    SOURCES,
    SUPPORTED,
    assert_equal_errors,
    assert_same,
    assert_same_values,
    compare_all,
    every_kind_of_row,
    outer_of,
    packing_of,
    stored,
    with_rules,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from narrowcast.errors import InputError, UsageError
from narrowcast.kernels import Rows, choose
from narrowcast.kernels.cpu import CPU
from narrowcast.kernels.reference.rows import REFERENCE
from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3FN,
    E5M2,
    E8M0,
    FP16,
    FP32,
    FP64,
    INT4,
    INT8,
    MXINT8,
    UINT4,
    Format,
    formats,
)
from narrowcast.tensors.metrics import half_steps
from narrowcast.tensors.packing import BYTES, Packing, pack, packing, unpack
from narrowcast.tensors.scaling import load_scale
from narrowcast.tensors.schemes import ARITHMETICS, OURS, Scale, Scheme, as_peer, schemes, tile_grid
from narrowcast.tensors.storage import stored_scheme

SHAPES = ((1, 72), (3, 127), (130, 96), (13, 1056))
ELEMENTS = (E4M3FN, E5M2, E3M2, E2M3, E2M1, INT8, INT4, MXINT8, UINT4, formats["e3m4"], formats["e4m3_ieee"])


def ids(value: object) -> str | None:
    return getattr(value, "name", None)


def test_every_row_is_supported_but_those_without_minus_zero() -> None:
    """NF4 is a table, and E4M3FNUZ keeps its NaN where the kernels put the sign of a zero."""
    left_out = {scheme.element.name for scheme in schemes.values() if scheme not in SUPPORTED}
    assert left_out == {"nf4", "e4m3fnuz"}


@pytest.mark.parametrize("source", SOURCES, ids=ids)
@pytest.mark.parametrize("scheme", SUPPORTED, ids=ids)
def test_schemes(scheme: Scheme, source: Format) -> None:
    for shape in SHAPES:
        x = stored(every_kind_of_row(*shape), source)
        compare_all(x, source, scheme, packing_of(scheme), outer_of(scheme, x))


@pytest.mark.parametrize("scheme", [s for s in SUPPORTED if s.inner.tile[0] > 1], ids=ids)
def test_blocks_end_where_the_matrix_does(scheme: Scheme) -> None:
    x = stored(every_kind_of_row(576, 200), BF16)
    compare_all(x, BF16, scheme, BYTES, None)


@pytest.mark.parametrize("source", [BF16, FP32], ids=ids)
@pytest.mark.parametrize("scheme", [s for s in SUPPORTED if s.inner.format is E8M0], ids=ids)
def test_power_of_two_rules(scheme: Scheme, source: Format) -> None:
    x = stored(every_kind_of_row(26, 288), source)
    for variant in with_rules(scheme):
        compare_all(x, source, variant, packing_of(scheme), None)


def _patterns(source: Format) -> np.ndarray:
    """All finite 16-bit patterns of a source, [128, 512], the exponent of infinity replaced by the one below."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    top = np.uint16(0x7F80 if source is BF16 else 0x7C00)
    bits = np.where((bits & top) == top, bits & ~np.uint16(0x80 if source is BF16 else 0x400), bits)
    return bits.reshape(128, 512) if source is BF16 else bits.view(np.float16).reshape(128, 512)


@pytest.mark.parametrize("source", [BF16, FP16], ids=ids)
@pytest.mark.parametrize("element", ELEMENTS, ids=ids)
def test_every_16_bit_pattern_under_given_scales(element: Format, source: Format) -> None:
    scheme = Scheme("given", element, (Scale(FP32, (0, 0), "amax"),))
    x = _patterns(source)
    for scale in (1.0, 0.375, 0.0110001, 3.14159e-5, 2.0**-126, 2.0**-133, 1e-30, 977.0, 2.0**100, 1e38):
        compare_all(x, source, scheme, BYTES, scale)


@pytest.mark.parametrize("source", [BF16, FP16], ids=ids)
@pytest.mark.parametrize("scheme", SUPPORTED, ids=ids)
def test_every_16_bit_pattern_as_a_tile_maximum(scheme: Scheme, source: Format) -> None:
    """Every pattern is once the largest of its row: its scale, and codes under that scale."""
    largest = _patterns(source).reshape(-1)
    shrink = np.array([0.0, 0.25, 0.5, 0.9, 0.999, -0.7] * 3, np.float32)[:16]
    wide = (
        (largest.astype(np.uint32) << 16).view(np.float32) if source is BF16 else largest.astype(np.float32)
    )
    with np.errstate(all="ignore"):
        x = stored(wide[::7, None] * shrink, source)
        x[:, 3] = largest[::7]
        how, outer = packing_of(scheme), outer_of(scheme, x)
        wanted = REFERENCE.quantize(x, source, scheme, how, outer)
    assert_same(CPU.quantize(x, source, scheme, how, outer), wanted, scheme, how, 16, outer)


@pytest.mark.parametrize("level", [FP32, BF16, FP16, E4M3FN], ids=ids)
@pytest.mark.parametrize("name", ["int4_g32", "uint4_g32", "fp8_group128", "int8_g32"])
def test_scale_formats(name: str, level: Format) -> None:
    scheme = schemes[name].with_scale_format(level)
    for source in SOURCES:
        compare_all(stored(every_kind_of_row(26, 272), source), source, scheme, packing_of(scheme), None)


PACKINGS = [
    *(packing(4, flip=flip, word=word) for flip in (False, True) for word in (8, 32)),
    *(
        packing(6),
        packing(6, flip=True, word=32),
        packing(5),
        packing(7, flip=True),
        packing(8, flip=True),
        BYTES,
    ),
]


@pytest.mark.parametrize("how", PACKINGS, ids=ids)
@pytest.mark.parametrize("k", [16, 48, 72, 127, 129, 131])
def test_packings(how: Packing, k: int) -> None:
    scheme = schemes["mxfp4" if how.bits < 6 else "mxfp6" if how.bits < 8 else "fp8_channel"]
    compare_all(stored(every_kind_of_row(13, k), BF16), BF16, scheme, how, None)


def test_outer_scales_far_from_the_data() -> None:
    x = stored(every_kind_of_row(13, 80), BF16)
    for outer in (2.0**-117, 1e-30, 1.0, 3e5, 2.0**100):
        compare_all(x, BF16, schemes["nvfp4"], packing(4), float(np.float32(outer)))
        compare_all(x, BF16, schemes["fp8_tensor"], BYTES, float(np.float32(outer)))


def test_outer_scale_made_from_the_chunk() -> None:
    for name in ("nvfp4", "fp8_tensor", "int8_tensor"):
        x = stored(np.random.default_rng(3).standard_normal((9, 80)), BF16)
        scheme, how = schemes[name], packing(schemes[name].element.bits)
        assert_same(
            CPU.quantize(x, BF16, scheme, how), REFERENCE.quantize(x, BF16, scheme, how), scheme, how, 80, 1.0
        )


@settings(max_examples=60, deadline=None)
@given(
    bits=hnp.arrays(np.uint16, st.tuples(st.integers(1, 4), st.integers(1, 80))),
    scheme=st.sampled_from(SUPPORTED),
)
def test_any_bf16_matrix(bits: np.ndarray, scheme: Scheme) -> None:
    x = np.where((bits & 0x7F80) == 0x7F80, bits & 0xFF7F, bits)
    compare_all(x, BF16, scheme, packing_of(scheme), outer_of(scheme, x))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(
    x=hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 70)), elements=finite),
    scheme=st.sampled_from([variant for scheme in SUPPORTED for variant in with_rules(scheme)]),
)
def test_any_fp32_matrix(x: np.ndarray, scheme: Scheme) -> None:
    compare_all(x, FP32, scheme, packing_of(scheme), outer_of(scheme, x))


@pytest.mark.parametrize("scheme", SUPPORTED, ids=ids)
def test_dequantize_every_code_under_every_kind_of_scale(scheme: Scheme) -> None:
    """All codes, NaN and infinity included, under all E8M0, E4M3 and a spread of other scales."""
    rng, k, how = np.random.default_rng(5), 256, packing_of(scheme)
    codes = np.tile(np.arange(k, dtype=np.uint8) & ((1 << scheme.element.bits) - 1), (64, 1))
    grid = tile_grid(codes.shape, scheme.inner.tile)
    if scheme.inner.format is FP32:
        scales = np.exp(rng.uniform(-80, 80, grid)).astype(np.float32)
    else:
        scales = np.resize(
            np.arange(0, 1 << scheme.inner.format.bits, 7 if scheme.inner.format is BF16 else 1), grid
        )
        scales = scales.astype(np.uint16 if scheme.inner.format is BF16 else np.uint8)
        scales = np.where(np.isnan(load_scale(scales, scheme.inner.format)), 1, scales).astype(scales.dtype)
    zero = None if scheme.zero is None else rng.integers(0, 16, grid).astype(np.uint8)
    rows, outer = Rows(pack(codes, how), scales, zero), outer_of(scheme, codes)
    with np.errstate(all="ignore"):
        for out in SOURCES:
            got = CPU.dequantize(rows, scheme, how, k, out, outer)
            assert_same_values(got, REFERENCE.dequantize(rows, scheme, how, k, out, outer))


@pytest.mark.parametrize("source", SOURCES, ids=ids)
@pytest.mark.parametrize("scheme", SUPPORTED, ids=ids)
def test_check_counts_what_the_definition_counts_on_damaged_codes(scheme: Scheme, source: Format) -> None:
    """Random codes, and single flipped bits: everything that can be beyond, clipped or underflowed."""
    x = stored(np.random.default_rng(2).laplace(size=(6, 1070)), source)
    how, outer, k = packing_of(scheme), outer_of(scheme, x), x.shape[1]
    rng = np.random.default_rng(3)
    with np.errstate(all="ignore"):
        whole = REFERENCE.quantize(x, source, scheme, how, outer)
        codes = unpack(whole.packed, how, k)
        random = rng.integers(0, 1 << scheme.element.bits, codes.shape).astype(np.uint8)
        flipped = codes.copy()
        flipped[:, ::97] ^= np.uint8(1)
        for damaged in (random, flipped):
            rows = replace(whole, packed=pack(damaged, how))
            got = CPU.check(x, source, scheme, how, rows, outer)
            assert_equal_errors(got, REFERENCE.check(x, source, scheme, how, rows, outer))
        assert CPU.check(x, source, scheme, how, whole, outer).beyond == 0
        assert CPU.check(x, source, scheme, how, replace(whole, packed=pack(random, how)), outer).beyond > 0


@pytest.mark.parametrize("scheme", SUPPORTED, ids=ids)
def test_one_damaged_element_is_seen(scheme: Scheme) -> None:
    """The self-check can fail: the largest element's sign, or its top bit, is enough."""
    x = stored(np.random.default_rng(4).standard_normal((3, 1056)) + 4.0, BF16)
    how, outer = packing_of(scheme), outer_of(scheme, x)
    whole = REFERENCE.quantize(x, BF16, scheme, how, outer)
    codes = unpack(whole.packed, how, 1056)
    codes[1, 700] ^= np.uint8(1 << (scheme.element.bits - 1))
    assert CPU.check(x, BF16, scheme, how, replace(whole, packed=pack(codes, how)), outer).beyond == 1


@pytest.mark.parametrize("element", ELEMENTS, ids=ids)
def test_check_decides_at_the_bound_itself(element: Format) -> None:
    """Every code against numbers half a step away from its value, a few float32 more or less, on both sides."""
    scheme = Scheme("given", element, (Scale(FP32, (0, 0), "amax"),))
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    values, half = decode_table(element), half_steps(element)
    codes, values, half = (a[np.isfinite(values)] for a in (codes, values, half))
    seen = set()
    for scale in (1.0, 0.37, 2.0**-100, 2.0**-101, 1e-37, 2.0**100, 1.1 * 2.0**100):
        rows = Rows(codes[None], np.full((1, 1), scale, np.float32))
        for ulps in (-64, -4, -3, -2, -1, 0, 1, 2, 3, 4, 64):
            for side in (-1, 1):
                x = ((values + side * half * (1 + ulps * 2.0**-24)) * np.float32(scale)).astype(np.float32)[
                    None
                ]
                wanted = REFERENCE.check(x, FP32, scheme, BYTES, rows)
                assert_equal_errors(CPU.check(x, FP32, scheme, BYTES, rows), wanted)
                seen.add(wanted.beyond > 0)
    assert seen == {True, False}


def test_check_of_wrong_scales_counts_like_the_definition() -> None:
    x = stored(every_kind_of_row(13, 528), BF16)
    for name in ("fp8_channel", "mxfp4", "nvfp4", "int8_channel", "uint4_g32"):
        scheme, how = schemes[name], packing_of(schemes[name])
        outer = outer_of(scheme, x)
        with np.errstate(all="ignore"):
            whole = REFERENCE.quantize(x, BF16, scheme, how, outer)
            scales = whole.scales * np.float32(0.9) if whole.scales.dtype == np.float32 else whole.scales - 1
            rows = replace(whole, scales=scales.astype(whole.scales.dtype))
            wanted = REFERENCE.check(x, BF16, scheme, how, rows, outer)
            assert_equal_errors(CPU.check(x, BF16, scheme, how, rows, outer), wanted)


@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_scan(source: Format) -> None:
    x = stored(every_kind_of_row(13, 130), source)
    assert CPU.scan(x, source) == REFERENCE.scan(x, source)
    bad = x.astype(x.dtype)
    infinity, nan = (np.uint16(0x7F80), np.uint16(0xFFC1)) if source is BF16 else (np.inf, np.nan)
    bad[3, 5], bad[7, 7], bad[7, 8] = infinity, nan, nan
    assert CPU.scan(bad, source) == REFERENCE.scan(bad, source)


def test_non_finite_input_does_not_crash() -> None:
    for source, value in ((BF16, 0x7FC0), (FP32, np.nan), (FP32, -np.inf), (FP16, np.inf)):
        x = np.full(
            (3, 40), value, np.uint16 if source is BF16 else np.float16 if source is FP16 else np.float32
        )
        for scheme in SUPPORTED:
            with np.errstate(all="ignore"):
                rows = CPU.quantize(x, source, scheme, packing_of(scheme), outer_of(scheme, x))
                CPU.check(x, source, scheme, packing_of(scheme), rows, outer_of(scheme, x))


def test_views_and_read_only_arrays() -> None:
    x = stored(every_kind_of_row(26, 160), BF16)
    scheme, how = schemes["mxfp8"], BYTES
    view = x[::2, 32:96]
    wanted = REFERENCE.quantize(np.ascontiguousarray(view), BF16, scheme, how)
    assert_same(CPU.quantize(view, BF16, scheme, how), wanted, scheme, how, 64, None)
    frozen = np.ascontiguousarray(view)
    frozen.flags.writeable = False
    assert_same(CPU.quantize(frozen, BF16, scheme, how), wanted, scheme, how, 64, None)


def test_a_byte_that_is_no_code_is_refused() -> None:
    x = stored(every_kind_of_row(3, 64), BF16)
    rows = REFERENCE.quantize(x, BF16, schemes["mxfp4"], BYTES)
    rows.packed[1, 7] = 0x93
    with pytest.raises(InputError, match="no code"):
        CPU.check(x, BF16, schemes["mxfp4"], BYTES, rows)
    with pytest.raises(InputError, match="no code"):
        CPU.dequantize(rows, schemes["mxfp4"], BYTES, 64, BF16)


def test_parts_that_do_not_fit_are_refused() -> None:
    scheme, how, k = schemes["uint4_g32"], packing(4), 64
    x = stored(every_kind_of_row(3, k), BF16)
    rows = REFERENCE.quantize(x, BF16, scheme, how)
    damaged = [
        replace(rows, packed=rows.packed[:, :-1]),
        replace(rows, packed=rows.packed[:2]),
        replace(rows, scales=rows.scales[:, :1]),
        replace(rows, zero=rows.zero[:1]),
        replace(rows, zero=None),
    ]
    for parts in damaged:
        with pytest.raises(InputError):
            CPU.check(x, BF16, scheme, how, parts)
        with pytest.raises(InputError):
            CPU.dequantize(parts, scheme, how, k if parts.packed.shape[0] == 3 else 63, BF16)
    for shape in ((0, 16), (3, 0)):
        with pytest.raises(UsageError):
            CPU.quantize(np.empty(shape, np.uint16), BF16, scheme, how)


def test_what_is_not_supported_has_a_reason() -> None:
    e4m3fnuz = replace(schemes["fp8_channel"], element=formats["e4m3fnuz"])
    odd_tile = replace(schemes["mxfp8"], scales=(Scale(E8M0, (1, 24), "rceil"),))
    cases = [
        (schemes["fp8_channel"], FP64, "fp64"),
        (schemes["nf4"], BF16, "table"),
        (e4m3fnuz, BF16, "minus zero"),
        (odd_tile, BF16, "multiple"),
        (as_peer(schemes["nvfp4"], "compressed-tensors"), BF16, "arithmetic"),
        *(
            (schemes["fp8_channel"].with_arithmetic(a), BF16, "arithmetic")
            for a in ARITHMETICS.values()
            if a != OURS
        ),
    ]
    whole = stored_scheme(UINT4, (0, 0), FP32, zero=UINT4)
    assert "whole tensor" in (CPU.supports(whole, BF16, packing(4)) or "")
    assert "does not fit" in (CPU.supports(schemes["fp8_channel"], BF16, packing(4)) or "")
    for scheme, source, word in cases:
        reason = CPU.supports(scheme, source, BYTES)
        assert reason is not None
        assert word in reason
        assert choose(scheme, source, BYTES).backend is REFERENCE
    assert choose(schemes["fp8_channel"], BF16, BYTES).backend is CPU
