"""The kernel that measures a chunk beside its original, against the numpy definition and against tensors.metrics."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from compare import SOURCES, SUPPORTED, every_kind_of_row, outer_of, packing_of, stored, with_rules

from narrowcast.kernels import Rows, choose_pair
from narrowcast.kernels.cpu import CPU
from narrowcast.kernels.cpu.pair import measure as compiled
from narrowcast.kernels.reference.pair import NOISE, SIGNAL, Sums, measure
from narrowcast.kernels.reference.rows import qtensor
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import BF16, E8M0, FP32, Format
from narrowcast.tensors.metrics import error_report, errors
from narrowcast.tensors.packing import BYTES, Packing
from narrowcast.tensors.schemes import Scheme, schemes

SHAPES = ((1, 72), (3, 127), (130, 96), (13, 1056))


def ids(value: object) -> str | None:
    return getattr(value, "name", None)


def quantized(x: np.ndarray, source: Format, scheme: Scheme, packing: Packing) -> tuple[Rows, float | None]:
    outer = outer_of(scheme, x)
    return CPU.quantize(x, source, scheme, packing, outer), outer


def assert_same(a: Sums, b: Sums) -> None:
    for field in fields(Sums):
        one, other = getattr(a, field.name), getattr(b, field.name)
        assert one.tobytes() == other.tobytes(), f"{field.name}: {one} {other}"


def both(
    x: np.ndarray,
    source: Format,
    scheme: Scheme,
    packing: Packing,
    rows: Rows,
    outer: float | None,
    step: int = 0,
) -> Sums:
    """The sums of both backends, which must be the same bits; the compiled one goes through chunks of ``step`` rows."""
    n, k = x.shape
    found, wanted = Sums.zeros(n, k), Sums.zeros(n, k)
    measure(x, source, scheme, packing, rows, outer, 0, wanted)
    height = scheme.inner.tile[0]
    for i in range(0, n, step or n):
        j = min(i + (step or n), n)
        tiles = slice(i // height, -(-j // height)) if height else slice(None)
        zero = None if rows.zero is None else rows.zero[tiles]
        compiled(
            x[i:j], source, scheme, packing, Rows(rows.packed[i:j], rows.scales[tiles], zero), outer, i, found
        )
    assert_same(found, wanted)
    return wanted


@pytest.mark.parametrize("source", SOURCES, ids=ids)
@pytest.mark.parametrize("scheme", SUPPORTED, ids=ids)
def test_bitwise(scheme: Scheme, source: Format) -> None:
    """Its own quantization, that of other rows, and codes at random, in one piece and in chunks."""
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        x = stored(every_kind_of_row(*shape), source)
        for rule in with_rules(scheme)[:2]:
            rows, outer = quantized(x, source, rule, packing_of(scheme))
            both(x, source, rule, packing_of(scheme), rows, outer)
            both(
                stored(np.roll(every_kind_of_row(*shape), 1, 0), source),
                source,
                rule,
                packing_of(scheme),
                rows,
                outer,
            )
            both(x, source, rule, packing_of(scheme), rows, outer, step=scheme.inner.tile[0] or 2)
        noise = rng.integers(0, 1 << scheme.element.bits, shape).astype(np.uint8)
        both(x, source, rule, BYTES, Rows(noise, rows.scales, rows.zero), outer)


@pytest.mark.parametrize("scheme", SUPPORTED, ids=ids)
def test_what_is_not_finite(scheme: Scheme) -> None:
    """NaN and infinity in the original, and as scales where the format has them, add no energy."""
    x = np.random.default_rng(3).standard_normal((130, 96)) / 64
    rows, outer = quantized(stored(x, FP32), FP32, scheme, BYTES)
    x[2, 3], x[5, 90], x[7, :] = np.nan, np.inf, -np.inf
    found = both(x.astype(np.float32), FP32, scheme, BYTES, rows, outer)
    assert found.counts[3] == 2 + 96
    assert np.isfinite(found.rows).all()
    scales = rows.scales.copy()
    scales.flat[0] = np.nan if scales.dtype == np.float32 else (0x7F if scales.dtype == np.uint8 else 0x7FC0)
    both(x.astype(np.float32), FP32, scheme, BYTES, Rows(rows.packed, scales, rows.zero), outer)


@pytest.mark.parametrize("scheme", [one for one in SUPPORTED if one.inner.format is not E8M0], ids=ids)
def test_negative_scales(scheme: Scheme) -> None:
    """AutoRound has them: minus x under minus s is x under s, in every count and energy."""
    x = every_kind_of_row(130, 96)
    rows, outer = quantized(stored(x, FP32), FP32, scheme, BYTES)
    with np.errstate(over="ignore"):
        x *= 1.4  # so that some are clipped, and some beyond
    plain = both(stored(x, FP32), FP32, scheme, BYTES, rows, outer)
    sign = {np.dtype("f4"): None, np.dtype("u2"): 0x8000, np.dtype("u1"): 0x80}[rows.scales.dtype]
    flipped = -rows.scales if sign is None else rows.scales ^ rows.scales.dtype.type(sign)
    turned = both(stored(-x, FP32), FP32, scheme, BYTES, Rows(rows.packed, flipped, rows.zero), outer)
    assert_same(turned, plain)
    assert (
        plain.counts[0] > 0 or not scheme.inner.tile[0]
    )  # what a scale of the whole tensor clips is infinite


@pytest.mark.parametrize("scheme", SUPPORTED, ids=ids)
def test_against_metrics(scheme: Scheme) -> None:
    """Counts are those of ``errors``, energies within 1 ulp for each addition of another order."""
    rng = np.random.default_rng(2)
    x = rng.standard_t(3, (130, 96)) * np.where(rng.random((130, 1)) < 0.5, 1e-3, 3)
    x[5], x[6, 32:64] = 0, 0
    x = stored(x, BF16)
    rows, outer = quantized(x, BF16, scheme, BYTES)
    found = both(x, BF16, scheme, BYTES, rows, outer)
    wide, q = widen(x, BF16), qtensor(rows, scheme, BYTES, 96, outer)
    wanted = errors(wide, q, q.dequantize())
    got = found.errors
    assert (got.elements, got.clipped, got.underflowed, got.beyond) == (
        wanted.elements, wanted.clipped, wanted.underflowed, wanted.beyond,
    )  # fmt: skip
    close = {"rel": wanted.elements * 2.0**-52}
    assert got.signal == pytest.approx(wanted.signal, **close)
    assert got.noise == pytest.approx(wanted.noise, **close)
    report = error_report(wide, q)
    assert found.energy(2) / wanted.signal == pytest.approx(report.noise_from_clipping, abs=1e-15, **close)
    assert found.energy(3) / wanted.signal == pytest.approx(report.noise_from_underflow, abs=1e-15, **close)
    for which, sums in zip((SIGNAL, NOISE), found.columns, strict=True):
        assert sums.sum() == pytest.approx(found.energy(which), **close)
    assert (
        found.column_peaks.view(np.float32).max()
        == np.abs(wide).max()
        == found.row_peaks.view(np.float32).max()
    )


def test_lost_tiles() -> None:
    """A block of 16 that an outer scale flushes: counted, and where."""
    scheme = schemes["nvfp4"]
    x = np.full((4, 48), 1.0, np.float32)
    rows, outer = quantized(x, FP32, scheme, BYTES)
    packed = rows.packed.copy()
    packed[2, 16:32] = 0
    packed[3, 32:] = 8  # minus zero is zero as well
    x[1], packed[1] = 0, 0  # zero before: nothing is lost
    found = both(x, FP32, scheme, BYTES, Rows(packed, rows.scales), outer, step=3)
    assert found.lost.tolist() == [2, 2, 1]


def test_choice() -> None:
    assert choose_pair(schemes["nvfp4"], BF16, BYTES) is compiled
    assert choose_pair(schemes["nf4"], BF16, BYTES) is measure
