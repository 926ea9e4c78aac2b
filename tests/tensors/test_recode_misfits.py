"""What has no equal in another scheme: refused, counted exactly, and rounded to the nearest code where asked for."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from narrowcast.errors import NonFiniteError, UsageError
from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.formats import BF16, E8M0, FP16, FP32, Format, formats
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.recode import Misfits, possible, recode, survey
from narrowcast.tensors.schemes import Scale, Scheme, schemes
from reference.exact_values import (
    exact,
    made,
    mxfp4,
    scale_value,
    small,
    stored_power,
    with_scale,
)

# ---- what cannot be


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        ("fp8_channel", "fp8_tensor", "serves tensor"),
        ("nvfp4", "mxfp4", "serves 1x32"),
        ("mxfp8", "fp8_block128", "serves 128x128"),
        ("fp8_group128", "fp8_block128_ue8m0", "serves 128x128"),
        ("int4_g64", "int4_g128", "serves 1x128"),
        ("mxfp8_e4m3", "mxfp4", "4 significant bits, those of mxfp4 2"),
        ("int8_g32", "mxfp8_e4m3", "7 significant bits, those of mxfp8_e4m3 4"),
        ("int8_g32", "int4_g32", "7 significant bits, those of int4_g32 3"),
        ("mxfp8_e4m3", "uint4_g32", "4 significant bits, those of uint4_g32 3"),
        ("nf4_b64", "mxfp8", "none of e4m3fn's"),
        ("mxfp4", "nf4_b64", "serves 1x64"),
    ],
)
def test_pairs_that_never_fit_say_why(a: str, b: str, why: str) -> None:
    reason = possible(schemes[a], schemes[b])
    assert reason is not None
    assert why in reason
    with pytest.raises(UsageError, match=why) as refusal:
        recode(made_or_quantized(a), schemes[b])
    assert "requantize" in str(refusal.value.remedy)


def made_or_quantized(name: str) -> QTensor:
    return quantize(np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256), schemes[name])


def test_every_pair_either_fits_or_is_refused_with_a_reason() -> None:
    """All pairs of rows: a result equals the source, and where there is none the misfits say how much."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((4, 128)) * np.exp(rng.standard_normal((4, 128)))).astype(np.float32)
    ran = 0
    for source in schemes.values():
        q = quantize(x, source)
        for target in schemes.values():
            if possible(source, target):
                continue
            ran += 1
            found = recode(q, target, nearest=True)
            assert (found.q is None) == bool(found.reason) == (not found.misfits.exact)
            assert found.nearest is not None
            if found.q is not None and source is not target:
                assert np.array_equal(found.q.dequantize(), q.dequantize()), (source.name, target.name)
    assert ran > 150


@pytest.mark.parametrize(
    ("number", "tiles"), [(448.0, 0), (480.0, 1), (2.0**-9, 0), (2.0**-10, 1), (1.0625, 1)]
)
def test_ends_of_a_scale_format(number: float, tiles: int) -> None:
    """E4M3 ends at 448, within its top binade, and at 2^-9; 1.0625 is between two of its numbers."""
    nvfp4 = schemes["nvfp4"]
    source = replace(nvfp4, scales=(Scale(BF16, (1, 16), "amax"),))
    codes = np.array([[1, 7] * 8], np.uint8)  # 1/2 and 6: no room to shift
    q = QTensor(source, codes, (np.full((1, 1), number, ml_dtypes.bfloat16).view(np.uint16),))
    found = recode(q, nvfp4, outer=1.0)
    assert found.misfits.tiles == tiles
    if number == 1.0625:
        assert found.misfits.by_precision == 1
        assert "no e4m3fn number at any power of two: 1" in found.reason


def test_zero_scales() -> None:
    """A zero scale stays where the format has zero; E8M0 has none, so the codes become zeros instead."""
    q = made(schemes["fp8_block128"], (8, 64))
    q.scales[0][:] = 0
    same = recode(q, schemes["fp8_group128"]).q
    assert same is not None
    assert same.codes is q.codes
    assert not same.scales[0].any()
    cleared = recode(q, schemes["mxfp8"]).q
    assert cleared is not None
    assert not cleared.codes.any()
    assert (cleared.scales[0] == 127).all()


def test_tiny_scales_are_not_stored_as_fp32_subnormals() -> None:
    """2^-127 of E8M0 is subnormal in fp32: elements move down a binade instead, or do not fit."""
    q = QTensor(schemes["mxfp8_e4m3"], np.full((1, 32), 0x7E, np.uint8), (np.zeros((1, 1), np.uint8),))
    target = replace(schemes["mxfp8_e4m3"], scales=(Scale(FP32, (1, 32), "amax"),))
    found = recode(q, target)
    assert found.q is not None
    assert found.q.scales[0].item() == 2.0**-126
    assert exact(found.q) == exact(q)
    odd = replace(q, codes=np.full((1, 32), 0x01, np.uint8))
    assert recode(odd, target).misfits.by_range == 1


def test_negative_scales_go_where_signs_are_read() -> None:
    q = made(with_scale("int4_g32", FP16), (2, 64))
    q.scales[0][0, 1] |= 0x8000
    kept = recode(q, with_scale("int8_g32", FP32))
    assert kept.q is not None
    assert exact(kept.q) == exact(q)
    assert recode(q, schemes["mxfp8"]).misfits.by_precision == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_no_numbers_are_refused(bad: float) -> None:
    q = made(schemes["fp8_block128"], (8, 64))
    q.scales[0][0, 0] = bad
    with pytest.raises(NonFiniteError, match="scales are NaN, infinite"):
        recode(q, schemes["mxfp8"])
    with pytest.raises(NonFiniteError, match="scales are NaN, infinite"):
        survey(q)


def test_nan_elements_map_to_nan_or_count() -> None:
    q = made(schemes["mxfp8_e5m2"], (8, 32)).rows(0, 1)
    q.codes[:] = 0x3C  # 1.0
    q.codes[0, 5] = 0x7F
    found = recode(q, schemes["mxfp8_e4m3"])
    assert found.q is not None
    assert [v == "nan" for v in exact(found.q)] == [j == 5 for j in range(32)]
    q.codes[0, 6] = 0x7C  # infinity, which E4M3FN has not
    lost = recode(q, schemes["mxfp8_e4m3"])
    assert lost.misfits == Misfits(of=1, tiles=1, by_code=1, elements=1, first=(0, 6))
    with pytest.raises(NonFiniteError, match="hold NaN or infinite elements"):
        recode(q, schemes["mxfp8_e4m3"], nearest=True)


@pytest.mark.parametrize("outer", [0.0, -1.0, np.nan, np.inf, 0.1])
def test_outer_scales_are_stored_positive_numbers(outer: float) -> None:
    with pytest.raises(UsageError, match="not a stored per-tensor scale"):
        recode(mxfp4([0]), schemes["nvfp4"], outer)


def test_an_outer_scale_without_a_place_is_refused() -> None:
    with pytest.raises(UsageError, match="no per-tensor scale"):
        recode(mxfp4([0]), schemes["mxfp8"], 1.0)


def test_misfits_add_up() -> None:
    a = Misfits(10, 3, 1, 1, 1, 20, 2, 0.25, (1, 2))
    b = Misfits(5, 1, 0, 1, 0, 7, 0, 0.5, (8, 0))
    assert a + b == Misfits(15, 4, 1, 2, 1, 27, 2, 0.5, (1, 2))
    assert Misfits(of=4) + b == replace(b, of=9)


# ---- rounding, where asked for


ROUNDED = [
    ("fp8_block128", "mxfp8"), ("fp8_channel", "fp8_group128_ue8m0"), ("mxfp8_e5m2", "mxfp8_e4m3"),
    ("int4_g32", "mxfp6_e2m3"), ("uint4_g32", "int4_g32"), ("uint4_g64", "int4_g32"), ("mxfp6_e3m2", "mxfp6_e2m3"),
    ("fp8_block128_fnuz", "fp8_block128"), ("fp8_tensor_fnuz", "fp8_tensor"), ("fp8_group128_ue8m0", "uint8_g128"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), ROUNDED)
def test_nearest_rounds_misfits_only_and_to_the_nearest_code(a: str, b: str) -> None:
    target = (
        schemes[b]
        if b in schemes
        else replace(schemes["int8_g128"], element=formats["uint8"], zero=formats["uint8"])
    )
    rng = np.random.default_rng(7)

    def scale(_: object, grid: Any, level: Scale) -> NDArray[Any]:
        exponent = rng.integers(-3, 3, grid)
        if level.format not in (FP32, BF16):
            return stored_power(exponent, level.format)
        numbers = (np.ldexp(1.0, exponent) * rng.choice([1, 1.375], grid)).astype(np.float32)
        return numbers if level.format is FP32 else numbers.astype(ml_dtypes.bfloat16).view(np.uint16)

    q = made(schemes[a], (6, 96), scale=scale)
    found = recode(q, target, nearest=True)
    assert found.nearest is not None
    assert found.misfits.tiles > 0
    before, after, result = exact(q), exact(found.nearest), found.nearest
    table = [v for v in small(target.element.name) if isinstance(v, Fraction)]
    changed = set()
    for i, (x, y) in enumerate(zip(before, after, strict=True)):
        row, col = divmod(i, 96)
        tall, wide = target.inner.tile
        tile = (row // tall if tall else 0, col // wide if wide else 0)
        if x == y:
            continue
        changed.add(tile)
        step = scale_value(result.scales[0][tile], target.inner.format)
        zero = 0 if result.zero is None else int(result.zero[tile])
        assert isinstance(x, Fraction)
        assert isinstance(y, Fraction)
        assert abs(x - y) == min(abs((v - zero) * step - x) for v in table)
    assert 0 < len(changed) <= found.misfits.tiles


def test_rounding_is_no_worse_than_the_rule_of_the_target() -> None:
    """Symmetric data under an asymmetric target: both signs of the amax fit, with its range of 15 steps over 2 amax."""
    source = replace(schemes["fp8_channel"], element=formats["e3m2"])
    q = made(source, (2, 128), scale=lambda rng, grid, level: np.full(grid, 0.3, np.float32))
    found = recode(q, schemes["uint4_g128"], nearest=True)
    assert found.nearest is not None
    x = q.dequantize().astype(np.float64)
    step = np.abs(x).max(axis=1, keepdims=True) * 2 / 15
    step = step.astype(ml_dtypes.bfloat16).astype(np.float64)
    ruled = (np.clip(np.rint(x / step) + 8, 0, 15) - 8) * step
    assert np.sum((found.nearest.dequantize() - x) ** 2) <= np.sum((ruled - x) ** 2) * (1 + 1e-6)


def test_rounding_code_by_code_is_rounding_element_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of more elements than codes weigh every code by how often it occurs."""
    rng = np.random.default_rng(11)
    source = replace(schemes["fp8_channel"], element=formats["e3m2"])
    codes = np.repeat(rng.integers(1, 24, (640, 1)), 200, axis=1).astype(
        np.uint8
    )  # one code nearly everywhere
    codes[:, :1] = rng.integers(20, 28, (640, 1))
    q = QTensor(source, codes, (rng.uniform(0.1, 1, (640, 1)).astype(np.float32),))
    target = replace(schemes["fp8_channel"], element=formats["e2m3"], scales=(Scale(E8M0, (1, 0), "rceil"),))
    fast = recode(q, target, nearest=True).nearest
    monkeypatch.setattr(
        "narrowcast.tensors.recode._cells", lambda index, codes: (index, np.ones(index.shape, np.int64))
    )
    slow = recode(q, target, nearest=True).nearest
    assert fast is not None
    assert slow is not None
    assert np.array_equal(fast.scales[0], slow.scales[0])
    assert np.array_equal(fast.codes, slow.codes)


# ---- any codes, any scales


KINDS = [
    "mxfp4",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "mxint8",
    "int4_g32",
    "uint4_g32",
    "int8_g32",
]


@st.composite
def tensors(draw: st.DrawFn) -> QTensor:
    scheme = schemes[draw(st.sampled_from(KINDS))]
    few = draw(st.lists(st.integers(0, (1 << scheme.element.bits) - 1), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    codes = rng.choice(few, (2, 40)).astype(np.uint8)
    if scheme.inner.format is E8M0:
        scales = rng.integers(0, 255, (2, 2)).astype(np.uint8)
    else:
        odd = rng.choice([1, 1.5, 1.0078125], (2, 2)) * np.ldexp(1.0, rng.integers(-130, 120, (2, 2)))
        scales = np.maximum(odd, 2.0**-126).astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    zero = rng.integers(0, 16, (2, 2)).astype(np.uint8) if scheme.zero else None
    return QTensor(scheme, codes, (scales,), zero)


def scale_fits(value: Fraction, fmt: Format) -> bool:
    """Whether a positive number is a stored scale: not a subnormal of bf16."""
    if fmt is E8M0:
        return any(value == Fraction(2) ** e for e in range(-127, 128))
    number = float(value)
    return 2.0**-126 <= number <= FP32.max and Fraction(float(ml_dtypes.bfloat16(number))) == value


def fits_somewhere(values: list[Fraction], scale: Fraction, target: Scheme) -> bool:
    """By trying: a shift of at most 15 binades at which the scale and every element has an equal."""
    middle = 1 << (target.element.bits - 1) if target.zero is not None else 0
    table = {v - middle for v in small(target.element.name) if isinstance(v, Fraction)}
    if not any(values):
        return True
    return any(
        scale_fits(scale * Fraction(2) ** r, target.inner.format)
        and all(v / Fraction(2) ** r in table for v in values)
        for r in range(-15, 16)
    )


@settings(max_examples=150, deadline=None)
@given(tensors(), st.sampled_from(KINDS))
def test_a_tile_is_a_misfit_exactly_if_no_shift_fits(q: QTensor, name: str) -> None:
    target = schemes[name]
    if possible(q.scheme, target) or q.scheme.zero is target.zero is not None:
        return
    decoded = small(q.scheme.element.name)
    if any(isinstance(decoded[int(c)], str) for c in np.unique(q.codes)):
        return
    found = recode(q, target)
    misfits = 0
    for row, tile in product((0, 1), (0, 1)):
        zero = 0 if q.zero is None else int(q.zero[row, tile])
        codes = q.codes[row, 32 * tile : 32 * tile + 32]
        values = [decoded[int(c)] - zero for c in np.unique(codes)]  # type: ignore[operator]
        scale = scale_value(q.scales[0][row, tile], q.scheme.inner.format)
        misfits += not fits_somewhere(values, scale, target)
    assert found.misfits.tiles == misfits
    assert (found.q is None) == bool(misfits)
    if found.q is not None:
        assert exact(found.q) == exact(q)
