"""Recoding keeps values exactly: checked by a decoder of its own, in fractions, from the bits of codes and scales."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
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
from narrowcast.tensors.recode import Misfits, Survey, plan_outer, possible, recode, survey
from narrowcast.tensors.scaling import scales_shape
from narrowcast.tensors.schemes import Scale, Scheme, schemes, tile_grid

E4M3FNUZ = formats["e4m3fnuz"]
Value = Fraction | str


# ---- a decoder that shares nothing with the product: bit fields and fractions


def small_float(e: int, m: int, bias: int, special: Callable[[int], str | None]) -> Callable[[int], Value]:
    """A float of 1 + e + m bits with subnormals; ``special`` names codes that are no numbers."""

    def value(code: int) -> Value:
        named = special(code)
        if named:
            return named
        sign, exponent, mantissa = code >> (e + m), (code >> m) & ((1 << e) - 1), code & ((1 << m) - 1)
        significand = Fraction(mantissa, 1 << m) + (1 if exponent else 0)
        return (-1) ** sign * significand * Fraction(2) ** (max(exponent, 1) - bias)

    return value


def signed(bits: int, unit: Fraction = Fraction(1)) -> Callable[[int], Value]:
    return lambda code: (code - (1 << bits) if code >> (bits - 1) else code) * unit


def e5m2_special(code: int) -> str | None:
    if code & 0x7F < 0x7C:
        return None
    return "nan" if code & 3 else "inf"


DECODERS: dict[str, Callable[[int], Value]] = {
    "e2m1": small_float(2, 1, 1, lambda code: None),
    "e2m3": small_float(2, 3, 1, lambda code: None),
    "e3m2": small_float(3, 2, 3, lambda code: None),
    "e4m3fn": small_float(4, 3, 7, lambda code: "nan" if code & 0x7F == 0x7F else None),
    "e4m3fnuz": small_float(4, 3, 8, lambda code: "nan" if code == 0x80 else None),
    "e5m2": small_float(5, 2, 15, e5m2_special),
    "e8m0": lambda code: "nan" if code == 255 else Fraction(2) ** (code - 127),
    "int8": signed(8),
    "int4": signed(4),
    "uint4": lambda code: Fraction(code),
    "uint8": lambda code: Fraction(code),
    "mxint8": signed(8, Fraction(1, 64)),
    "bf16": lambda code: Fraction(struct.unpack("<f", struct.pack("<I", code << 16))[0]),
    "fp16": lambda code: Fraction(struct.unpack("<e", struct.pack("<H", code))[0]),
}


@cache
def small(name: str) -> list[Value]:
    bits = formats[name].bits
    return [DECODERS[name](code) for code in range(1 << bits)]


def scale_value(stored: Any, fmt: Format) -> Fraction:
    value = Fraction(float(stored)) if fmt is FP32 else DECODERS[fmt.name](int(stored))
    assert isinstance(value, Fraction)
    return value


def exact(q: QTensor) -> list[Value]:
    """Every element of [..., N, K] in C order, as a fraction."""
    codes = q.codes.reshape(-1, *q.shape[-2:])
    levels = []
    for level, stored in zip(q.scheme.scales, q.scales, strict=True):
        flat = stored.reshape(-1, *stored.shape[-2:])
        rows = [[[scale_value(s, level.format) for s in row] for row in matrix] for matrix in flat]
        levels.append((level, rows))
    zeros = None if q.zero is None else q.zero.reshape(-1, *q.zero.shape[-2:])
    decoded = small(q.scheme.element.name)
    out: list[Value] = []
    for lead, i, j in product(*(range(n) for n in codes.shape)):
        value = decoded[int(codes[lead, i, j])]
        factor = Fraction(1)
        for level, rows in levels:
            tall, wide = level.tile
            scale = rows[lead][i // tall if tall else 0][j // wide if wide else 0]
            factor = factor / scale if level.divides else factor * scale
        if isinstance(value, Fraction):
            if zeros is not None:
                tall, wide = q.scheme.inner.tile
                value = value - int(zeros[lead, i // tall if tall else 0, j // wide if wide else 0])
            value = value * factor
        out.append(value)
    return out


def made(
    scheme: Scheme,
    shape: tuple[int, ...],
    seed: int = 0,
    scale: Callable[..., Any] | None = None,
    span: int = 4,
) -> QTensor:
    """Every finite code somewhere, random otherwise, under scales of 2^-span .. 2^span."""
    rng = np.random.default_rng(seed)
    numbers = [c for c, v in enumerate(small(scheme.element.name)) if isinstance(v, Fraction)]
    codes = rng.choice(numbers, shape).astype(np.uint8)
    codes.reshape(-1)[: len(numbers)] = numbers
    scales = []
    for level, grid in zip(scheme.scales, scales_shape(shape, scheme), strict=True):
        exponent = rng.integers(-span, span + 1, grid)
        scales.append(stored_power(exponent, level.format) if scale is None else scale(rng, grid, level))
    zero = None
    if scheme.zero is not None:
        zero = rng.integers(0, 1 << scheme.zero.bits, scales[0].shape).astype(np.uint8)
    return QTensor(scheme, codes, tuple(scales), zero)


def stored_power(exponent: Any, fmt: Format) -> NDArray[Any]:
    """2^exponent as a stored scale."""
    exponent = np.asarray(exponent)
    if fmt is E8M0:
        return (exponent + 127).astype(np.uint8)
    numbers = np.ldexp(1.0, exponent)
    if fmt is FP32:
        return numbers.astype(np.float32)
    if fmt is BF16:
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if fmt is FP16:
        return numbers.astype(np.float16).view(np.uint16)
    return numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def with_scale(name: str, fmt: Format) -> Scheme:
    return schemes[name].with_scale_format(fmt)


def divisor(name: str) -> Scheme:
    inner, outer = schemes[name].scales
    return replace(schemes[name], scales=(inner, replace(outer, divides=True)))


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


def mxfp4(exponents: list[int], code: int = 1) -> QTensor:
    """One row with a block per exponent; every block holds 6 and the code, by default 1/2: no shift fits but 0."""
    codes = np.full((1, 32 * len(exponents)), 7, np.uint8)
    codes[:, ::2] = code
    return QTensor(schemes["mxfp4"], codes, (np.array([exponents]).astype(np.uint8) + np.uint8(127),))


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


def one_row(scheme: Scheme, codes: Any, scale: float = 0.375) -> QTensor:
    row = np.array([codes], np.uint8)
    return QTensor(scheme, row, (np.full(tile_grid(row.shape, scheme.inner.tile), scale, np.float32),))


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


# ---- outer scales


def nvfp4(outer: float, scheme: Scheme = schemes["nvfp4"]) -> QTensor:
    q = made(scheme, (4, 64))
    return replace(q, scales=(q.scales[0], np.full((1, 1), outer, np.float32)))


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
    assert "requantize" in reason
    with pytest.raises(UsageError, match=why):
        recode(made_or_quantized(a), schemes[b])


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
