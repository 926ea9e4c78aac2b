"""Recoding keeps values exactly, and chunks of a tensor are recoded as the whole."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from narrowcast.numbers.formats import BF16, FP16, FP32
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.recode import Misfits, Survey, plan_outer, recode, survey
from narrowcast.tensors.schemes import Scale, Scheme, schemes
from reference.exact_values import (
    divisor,
    exact,
    made,
    mxfp4,
    nvfp4,
    one_row,
    with_scale,
)

PAIRS: list[tuple[Scheme, Scheme]] = [
    *((schemes[a], schemes[b]) for a, b in (
        ("mxfp4", "nvfp4"), ("mxfp4", "mxfp6_e2m3"), ("mxfp4", "mxfp6_e3m2"), ("mxfp4", "mxfp8_e4m3"),
        ("mxfp4", "mxfp8_e5m2"), ("mxfp4", "mxint8"), ("mxfp6_e2m3", "mxfp8_e4m3"), ("mxfp6_e3m2", "mxfp8_e5m2"),
        ("fp8_block128", "fp8_block128_ue8m0"), ("fp8_block128_ue8m0", "fp8_block128"),
        ("fp8_group128", "fp8_group128_ue8m0"), ("fp8_block128", "mxfp8"), ("fp8_block128_ue8m0", "mxfp8"),
        ("int4_g32", "int8_g32"), ("int4_g128", "int8_g32"), ("uint4_g32", "int8_g32"), ("uint4_g128", "int8_g64"),
        ("int4_g32", "uint4_g32"), ("int4_channel", "uint4_g128"), ("uint4_channel", "uint4_g32"),
        ("fp8_tensor", "fp8_channel"), ("fp8_tensor", "fp8_group128"), ("fp8_tensor", "fp8_block128"),
        ("fp8_channel", "fp8_group128"), ("fp8_block128", "fp8_group128"), ("int8_channel", "int8_g64"),
        ("fp8_tensor", "fp8_tensor_fnuz"), ("fp8_channel", "fp8_channel_fnuz"),
        ("fp8_block128", "fp8_block128_fnuz"), ("int4_g128", "fp8_group128"), ("int4_g64", "mxfp8"),
    )),
    (with_scale("int4_g32", BF16), with_scale("int4_g32", FP32)),
    (with_scale("int4_g32", FP16), with_scale("int4_g32", FP32)),
    (with_scale("uint4_g64", FP16), with_scale("uint4_g64", BF16)),
    (with_scale("int4_g32", FP32), with_scale("int4_g32", BF16)),
    (schemes["nvfp4"], divisor("nvfp4")),
    (divisor("nvfp4"), schemes["nvfp4"]),
    (schemes["mxfp4"], divisor("nvfp4")),
    (schemes["nvfp4"], Scheme("nvfp4 under bf16", schemes["nvfp4"].element, (
        schemes["nvfp4"].inner, Scale(BF16, (0, 0), "pow2")))),
]  # fmt: skip
IDS = [f"{a.name}-{b.name}-{i}" for i, (a, b) in enumerate(PAIRS)]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=IDS)
@pytest.mark.parametrize("shape", [(9, 128), (3, 130), (2, 4, 72)], ids=str)
def test_equal_values(source: Scheme, target: Scheme, shape: tuple[int, ...]) -> None:
    """All codes, powers of two as scales: nothing may be lost, in whole, ragged and stacked matrices."""
    if shape[0] == 3 and source.element.bits == 8 and source.inner.tile == (128, 128):
        shape = (131, 130)  # more than one block each way, and ends of blocks
    q = made(source, shape)
    if outer_of(target) and len(shape) == 3:
        q = same_outer(q)
    found = recode(q, target)
    assert found.q is not None, found.reason
    assert found.misfits.exact
    assert found.q.scheme is target
    assert exact(found.q) == exact(q)
    assert found.reason == ""
    assert np.array_equal(found.q.dequantize(), q.dequantize())


def outer_of(scheme: Scheme) -> bool:
    return scheme.scales[-1].tile == (0, 0)


def same_outer(q: QTensor) -> QTensor:
    """The tensor with one outer scale for all leading matrices, as one call of recode gives them."""
    if not outer_of(q.scheme):
        return q
    last = np.full_like(q.scales[-1], q.scales[-1].flat[0])
    return replace(q, scales=(*q.scales[:-1], last))


BACK = [
    ("fp8_block128", "fp8_block128_ue8m0"),
    ("fp8_tensor", "fp8_tensor_fnuz"),
    ("fp8_channel", "fp8_channel_fnuz"),
]


@pytest.mark.parametrize(("a", "b"), BACK)
def test_there_and_back_is_the_same_bytes(a: str, b: str) -> None:
    q = made(schemes[a], (130, 128))
    q = replace(q, codes=np.where(q.codes == 0x80, np.uint8(0), q.codes))  # the sign of zero is not kept
    there = recode(q, schemes[b]).q
    assert there is not None
    back = recode(there, schemes[a]).q
    assert back is not None
    assert np.array_equal(back.codes, q.codes)
    assert all(np.array_equal(x, y) for x, y in zip(back.scales, q.scales, strict=True))


def test_mantissas_survive_where_the_format_holds_them() -> None:
    """Scales with 24, 8 and 11 significant bits go where there is room for them, into all 24 bits of fp32."""
    rng = np.random.default_rng(1)
    for source, target in [
        (schemes["fp8_block128"], schemes["fp8_block128_fnuz"]),
        (schemes["fp8_tensor"], schemes["fp8_channel"]),
        (with_scale("int4_g32", BF16), with_scale("int8_g32", FP32)),
        (with_scale("int4_g32", FP16), with_scale("int8_g32", FP32)),
    ]:

        def scale(_: object, grid: Any, level: Scale) -> NDArray[Any]:
            numbers = rng.uniform(0.001, 3, grid)
            if level.format is BF16:
                return numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
            return (
                numbers.astype(np.float16).view(np.uint16)
                if level.format is FP16
                else numbers.astype(np.float32)
            )

        q = made(source, (5, 160), scale=scale)
        found = recode(q, target)
        assert found.q is not None, found.reason
        assert exact(found.q) == exact(q)
    narrow = recode(found.q, with_scale("int8_g32", BF16))
    assert narrow.q is None
    assert narrow.misfits.by_precision == narrow.misfits.tiles > 0


# ---- MXFP4 to NVFP4


def test_mxfp4_to_nvfp4_is_closed_form() -> None:
    """E4M3 has the powers 2^-9 .. 2^8: 18 exponents in a tensor fit, wherever they lie, with codes untouched."""
    for top in (0, 60, -40):
        exponents = list(range(top - 17, top + 1))
        q = mxfp4(exponents)
        found = recode(q, schemes["nvfp4"])
        assert found.q is not None, found.reason
        assert found.q.codes is q.codes
        assert found.q.scales[1].item() == 2.0 ** (top - 8)
        e4m3 = found.q.scales[0].view(ml_dtypes.float8_e4m3fn).astype(float)
        assert e4m3.ravel().tolist() == [2.0 ** (e - top + 8) for e in exponents for _ in (0, 1)]
        assert exact(found.q) == exact(q)


def test_blocks_beyond_the_spread_are_counted() -> None:
    """Nineteen exponents: both halves of the lowest block have no scale, and everything else has."""
    exponents = [3, -16, -15, 2, -14]
    q = mxfp4(exponents)
    found = recode(q, schemes["nvfp4"], nearest=True)
    assert found.q is None
    m = found.misfits
    assert (m.of, m.tiles, m.by_range, m.by_precision, m.by_code) == (10, 4, 4, 0, 0)
    assert m.elements == 64
    assert m.first == (0, 32)
    assert "4 of 10 tiles (64 elements, first at (0, 32))" in found.reason
    assert "out of e4m3fn's range" in found.reason
    before, after = exact(q), exact(found.nearest)
    assert before[:32] + before[96:] == after[:32] + after[96:]
    assert before[32:96] != after[32:96]
    later = recode(q, schemes["nvfp4"], row=7).misfits
    assert later.first == (7, 32)


def test_a_block_beyond_the_spread_moves_where_its_codes_allow() -> None:
    """Codes 6 and 2 under 2^-10 are 3 and 1 under 2^-9; 1 and 0.5 under 2^9 are 2 and 1 under 2^8."""
    low = mxfp4([3, -15])
    low.codes[0, 32:] = np.tile([7, 4], 16)
    found = recode(low, schemes["nvfp4"])
    assert found.q is not None, found.reason
    assert exact(found.q) == exact(low)
    assert found.q.codes[0, 32:].tolist() == [5, 2] * 16
    assert found.q.codes[0, :32].tolist() == low.codes[0, :32].tolist()
    high = mxfp4([3, 4])
    high.codes[0, 32:] = np.tile([2, 1], 16)
    found = recode(high, schemes["nvfp4"], outer=2.0**-5)
    assert found.q is not None, found.reason
    assert exact(found.q) == exact(high)


# ---- E4M3FN and E4M3FNUZ


def test_e4m3fn_to_fnuz_byte_by_byte() -> None:
    """The rule of ROCm's loaders: scale doubled, 0x80 becomes 0x00, other bytes stay; and NaN becomes NaN."""
    q = one_row(schemes["fp8_channel"], range(256))
    found = recode(q, schemes["fp8_channel_fnuz"])
    assert found.q is not None
    wanted = list(range(256))
    wanted[0x80], wanted[0x7F], wanted[0xFF] = 0x00, 0x80, 0x80
    assert found.q.codes.ravel().tolist() == wanted
    assert found.q.scales[0].item() == 0.75
    assert found.misfits == Misfits(of=1, minus_zeros=1)
    fn = q.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 0.375
    fnuz = found.q.codes.view(ml_dtypes.float8_e4m3fnuz).astype(np.float64) * 0.75
    assert np.array_equal(fn, fnuz, equal_nan=True)


def test_e4m3fnuz_to_fn_counts_what_cannot_map() -> None:
    """±240 under half the scale would be 480, beyond 448; with the scale kept, odd subnormals have no equal."""
    fits = [c for c in range(256) if c & 0x7F != 0x7F]
    back = recode(one_row(schemes["fp8_channel_fnuz"], fits), schemes["fp8_channel"])
    assert back.q is not None
    # Byte by byte again; FNUZ's NaN takes one of FN's two, whichever.
    nan = back.q.codes[0, 0x7F] if fits[0x7F] == 0x80 else None
    assert nan in (0x7F, 0xFF)
    assert [c for c in back.q.codes.ravel().tolist() if c & 0x7F != 0x7F] == [c for c in fits if c != 0x80]
    assert back.q.scales[0].item() == 0.375 / 2

    rescued = one_row(schemes["fp8_channel_fnuz"], [0x7F, 0xFF, 0x10, 0x02, 0x00])
    kept = recode(rescued, schemes["fp8_channel"])
    assert kept.q is not None
    assert kept.q.scales[0].item() == 0.375
    assert exact(kept.q) == exact(rescued)

    lost = one_row(schemes["fp8_channel_fnuz"], [0x10, 0x01, 0x7F, 0x33, 0xFF])
    found = recode(lost, schemes["fp8_channel"], nearest=True)
    assert found.q is None
    assert found.misfits == Misfits(of=1, tiles=1, by_code=1, elements=2, first=(0, 2))
    # Keeping the scale loses 2^-11 of it on one element, halving it 32 (480 to 448) on two.
    assert found.nearest is not None
    assert found.nearest.scales[0].item() == 0.375
    off = [abs(a - b) for a, b in zip(exact(found.nearest), exact(lost), strict=True)]  # type: ignore[operator]
    assert [x for x in off if x] == [Fraction(0.375) / 1024]


def test_one_scale_for_the_tensor_is_chosen_from_all_codes() -> None:
    """Per tensor, every chunk must take the shift that the codes of all chunks allow."""
    source, target = schemes["fp8_tensor_fnuz"], schemes["fp8_tensor"]
    chunks = [one_row(source, [0x10, 0x02, 0x04]), one_row(source, [0x7F, 0x10, 0x70])]
    outer = plan_outer(survey(chunks[0]) + survey(chunks[1]), source, target)
    assert outer == 0.375
    assert plan_outer(survey(chunks[0]), source, target) == 0.1875
    for chunk in chunks:
        found = recode(chunk, target, outer)
        assert found.q is not None, found.reason
        assert found.q.scales[0].item() == outer
        assert exact(found.q) == exact(chunk)
    # What has no equal is counted at that shift: the odd subnormal, not the 240 that the natural shift loses.
    lost = recode(one_row(source, [0x10, 0x01, 0x7F]), target)
    assert lost.misfits == Misfits(of=1, tiles=1, by_code=1, elements=1, first=(0, 1))


# ---- outer scales


def test_an_outer_scale_turns_into_a_divisor_only_if_its_inverse_is_exact() -> None:
    turned = recode(nvfp4(2.0**-20), divisor("nvfp4"))
    assert turned.q is not None
    assert turned.q.scales[1].item() == 2.0**20

    q = nvfp4(0.1)
    found = recode(q, divisor("nvfp4"), nearest=True)
    assert found.q is None
    assert found.nearest is not None
    assert found.nearest.codes is q.codes
    assert np.array_equal(found.nearest.scales[0], q.scales[0])
    stored, wanted = found.nearest.scales[1].item(), 1 / Fraction(float(np.float32(0.1)))
    assert stored == np.float32(float(wanted))
    ulps = abs(Fraction(stored) - wanted) / Fraction(float(np.spacing(np.float32(stored))))
    assert 0 < ulps <= Fraction(1, 2)
    assert found.misfits.outer_ulp == pytest.approx(float(ulps), rel=1e-6)
    assert found.misfits.tiles == 0
    assert "per-tensor scale is rounded" in found.reason


def test_an_odd_outer_scale_is_taken_over() -> None:
    q = nvfp4(0.1)
    bf16_blocks = Scheme(
        "fp4 under bf16 and fp32", q.scheme.element, (Scale(BF16, (1, 16), "amax"), q.scheme.scales[1])
    )
    found = recode(q, bf16_blocks)
    assert found.q is not None, found.reason
    assert found.q.scales[1].item() == np.float32(0.1)
    assert exact(found.q) == exact(q)


@pytest.mark.parametrize(
    ("number", "power"),
    [(448, 0), (480, 1), (1024, 2), (2.0**-9, 0), (1.875 * 2.0**-8, -15), (1.75 * 2.0**-10, -18)],
)
def test_an_outer_scale_moves_only_if_a_scale_does_not_fit_beside_it(number: float, power: int) -> None:
    """E4M3 ends at 448 and steps by 2^-9: what lies beyond goes as high as it can, 1.875 to 240 and 1.75 to 448."""
    nvfp4_scheme, base = schemes["nvfp4"], float(np.float32(0.1))
    source = replace(nvfp4_scheme, scales=(Scale(BF16, (1, 16), "amax"), nvfp4_scheme.scales[1]))
    stored = np.full((1, 1), number, ml_dtypes.bfloat16).view(np.uint16)
    q = QTensor(source, np.array([[1, 7] * 8], np.uint8), (stored, np.full((1, 1), base, np.float32)))
    assert plan_outer(survey(q), source, nvfp4_scheme) == base * 2.0**power
    found = recode(q, nvfp4_scheme)
    assert found.q is not None, found.reason
    assert exact(found.q) == exact(q)


def test_surveys_of_siblings_know_all_outer_scales() -> None:
    both = survey(nvfp4(0.25)) + survey(nvfp4(2.0))
    assert both.outers == {Fraction(1, 4), Fraction(2)}
    assert plan_outer(both, schemes["nvfp4"], schemes["nvfp4"]) in (0.25, 2.0)


def test_siblings_share_the_outer_scale_that_the_sum_of_their_surveys_gives() -> None:
    source, target = schemes["mxfp4"], schemes["nvfp4"]
    siblings = [mxfp4([0, -3]), mxfp4([4, 1]), mxfp4([-9, -6])]
    outer = plan_outer(sum((survey(q) for q in siblings), Survey()), source, target)
    assert outer == 2.0 ** (4 - 8)
    for q in siblings:
        found = recode(q, target, outer)
        assert found.q is not None
        assert found.q.scales[1].item() == outer
        assert exact(found.q) == exact(q)


# ---- surveys and chunks


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8_block128", "fp8_tensor", "uint4_g32", "int4_g128"])
def test_surveys_add_up(name: str) -> None:
    q = made(schemes[name], (256, 128))
    whole, parts = survey(q), survey(q.rows(0, 128)) + survey(q.rows(128, 256))
    for field in ("tiles", "largest", "smallest", "lowest", "bits", "outers"):
        if name == "fp8_tensor" and field == "tiles":
            continue  # the one tile is in both chunks
        assert getattr(whole, field) == getattr(parts, field), field
    assert (whole.counts is None) == (name != "fp8_tensor")
    if whole.counts is not None:
        assert np.array_equal(whole.counts, parts.counts)
        assert whole.counts.tolist() == [int((q.codes == c).sum()) for c in range(256)]
    assert whole.powers_of_two


def test_a_survey_sees_nonzero_tiles_only() -> None:
    """The scale of a tile of zeros says nothing: 2^100 there does not move the outer scale."""
    q = mxfp4([0, 100, -2])
    q.codes[0, 32:64] = [0, 8] * 16  # zeros of both signs
    found = survey(q)
    assert (found.tiles, found.largest, found.smallest, found.lowest) == (2, 1.0, 0.25, -2)
    made_ = recode(q, schemes["nvfp4"])
    assert made_.q is not None
    assert made_.q.scales[1].item() == 2.0**-8
    assert exact(made_.q) == exact(q)
    assert made_.q.codes is q.codes


@pytest.mark.parametrize(
    ("a", "b"), [("mxfp4", "nvfp4"), ("uint4_g32", "int8_g32"), ("fp8_block128", "mxfp8")]
)
def test_chunks_are_the_rows_of_the_whole(a: str, b: str) -> None:
    source, target = schemes[a], schemes[b]
    q = made(source, (300, 64))
    cuts = [(0, 128), (128, 256), (256, 300)]
    chunks = [q.rows(*cut) for cut in cuts]
    outer = plan_outer(sum((survey(c) for c in chunks), Survey()), source, target)
    whole = recode(q, target, outer).q
    assert whole is not None
    for (start, stop), chunk in zip(cuts, chunks, strict=True):
        part = recode(chunk, target, outer, row=start).q
        assert part is not None
        assert np.array_equal(part.codes, whole.codes[start:stop])
        assert np.array_equal(part.scales[0], whole.rows(start, stop).scales[0])


# ---- paths that must not touch codes


@pytest.mark.parametrize(
    ("a", "b"),
    [("fp8_channel", "fp8_token"), ("mxfp4", "nvfp4"), ("fp8_block128", "fp8_block128_ue8m0"),
     ("fp8_tensor", "fp8_channel"), ("uint4_g128", "uint4_g32"), ("int4_channel", "int4_g64")],
)  # fmt: skip
def test_codes_are_the_same_array(a: str, b: str) -> None:
    q = made(schemes[a], (128, 130))
    found = recode(q, schemes[b])
    assert found.q is not None
    assert found.q.codes is q.codes


def test_the_same_storage_is_the_same_tensor() -> None:
    """Rule, span and arithmetic say how a tensor was made: scales that are no numbers pass as they are."""
    q = made(schemes["mxfp4"], (2, 64))
    q.scales[0][0, 0] = 255
    found = recode(q, schemes["mxfp4"].with_rule("floor"), nearest=True)
    assert found.q is not None
    assert found.q is found.nearest
    assert found.q.codes is q.codes
    assert found.q.scales[0] is q.scales[0]
    assert found.q.scheme.inner.rule == "floor"


def test_same_scheme_under_another_outer_scale() -> None:
    q = nvfp4(2.0**-3)
    found = recode(q, schemes["nvfp4"], 2.0**-5)
    assert found.q is not None
    assert found.q.scales[1].item() == 2.0**-5
    assert exact(found.q) == exact(q)
