"""Values rounded without codes: fp32 and tf32 against fractions and numpy, others against the codec."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from narrowcast.errors import NonFiniteError, UsageError
from narrowcast.numbers.codec import ROUNDINGS, decode_table, encode, round_values, widen
from narrowcast.numbers.formats import formats
from reference.critical_points import around, critical_points, sixteen_bit_inputs
from reference.fractions_oracle import LAYOUTS, Layout, number, rows

DETERMINISTIC = [rounding for rounding in ROUNDINGS if rounding != "stochastic"]
NONE: frozenset[int] = frozenset()


def wide_layout(name: str) -> tuple[Layout, Fraction]:
    """The grid of a wide format (its codes are never listed) and its largest value."""
    row = next(r for r in rows("wide.csv") if r["format"] == name)
    e, m, bias = (int(row[key]) for key in ("exponent_bits", "mantissa_bits", "bias"))
    return Layout(name, 1, e, m, bias, True, NONE, NONE, None, None), number(row["max"])


def edge_inputs(m: int) -> NDArray[np.float64]:
    """Midpoints of a grid with m mantissa bits: subnormals, around one, and at the top of fp32's range."""
    steps = np.concatenate([np.arange(0, 40), 2.0**m + np.arange(-20, 20), 2.0 ** (m + 1) - np.arange(1, 20)])
    points = [
        np.ldexp(steps + half, e - m) for e in (-126, 0, 1, 126, 127) for half in (0.0, 0.25, 0.5, 0.75)
    ]
    finite = around(np.concatenate(points))
    finite = np.concatenate([finite, [1e39, 1e300, 5e-324, 2.0**-150, np.nextafter(2.0**-150, 0), 0.0]])
    finite = finite[np.isfinite(finite)]
    return np.concatenate([finite, -finite])


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_wide_formats_against_fractions(name: str, rounding: str) -> None:
    layout, top = wide_layout(name)
    x = edge_inputs(layout.mantissa_bits)[::3]
    for value, got in zip(x.tolist(), round_values(x, formats[name], rounding).tolist(), strict=True):  # type: ignore[arg-type]
        wanted = layout.round(Fraction(value), rounding)
        if abs(wanted) > top:
            inward = rounding == "toward_zero" or rounding == ("up" if value < 0 else "down")
            assert abs(got) == (top if inward else float("inf")), (value, got)
            assert (got < 0) == (value < 0)
        else:
            assert Fraction(got) == wanted, (value, got, float(wanted))
            assert np.signbit(got) == np.signbit(value)


def test_fp32_nearest_even_is_numpy_s_own_cast() -> None:
    x = edge_inputs(23)
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float32).astype(np.float64)
    assert np.array_equal(round_values(x, formats["fp32"]), wanted)


def test_fp64_is_the_identity_and_specials_pass() -> None:
    x = np.array([0.1, -0.0, np.inf, -np.inf, np.nan])
    for name in ("fp64", "fp32", "tf32", "bf16", "fp16"):
        got = round_values(x, formats[name])
        assert np.array_equal(got[2:], x[2:], equal_nan=True)
        assert np.signbit(got[1])
    assert round_values(x, formats["fp64"])[0] == 0.1


@pytest.mark.parametrize("name", ["bf16", "fp16", "e5m2", "e4m3_ieee", "e3m4"])
def test_values_equal_the_codec_with_special_overflow(name: str) -> None:
    """Two ways to one number, for the formats that have infinities."""
    fmt = formats[name]
    points = critical_points(LAYOUTS[name])
    x = np.concatenate([points[:: 1 if fmt.bits <= 8 else 101], sixteen_bit_inputs("fp16")[::7]])
    for rounding in DETERMINISTIC:
        through_codes = decode_table(fmt)[encode(x, fmt, rounding, "special").codes]  # type: ignore[arg-type]
        got = round_values(x, fmt, rounding)  # type: ignore[arg-type]
        assert np.array_equal(got, through_codes, equal_nan=True)
        number_ = ~np.isnan(x)
        assert np.array_equal(np.signbit(got)[number_], np.signbit(through_codes)[number_])


@pytest.mark.parametrize(
    "name", ["e4m3fn", "e5m2fnuz", "e2m1", "e8m0", "int8", "uint4", "mxint8", "nf4", "binary8p3"]
)
def test_formats_without_infinity_saturate_as_their_codes_do(name: str) -> None:
    fmt = formats[name]
    x = sixteen_bit_inputs("bf16")
    x = x[np.isfinite(x)][::17]
    for rounding in DETERMINISTIC:
        got = round_values(x, fmt, rounding)  # type: ignore[arg-type]
        if fmt.has_inf:
            assert np.all(np.abs(got) <= fmt.max)
        assert np.array_equal(got, decode_table(fmt)[encode(x, fmt, rounding).codes])  # type: ignore[arg-type]


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown rounding of values"):
        round_values(np.ones(1), formats["fp32"], "stochastic")
    with pytest.raises(UsageError, match="unknown rounding of values"):
        round_values(np.ones(1), formats["fp64"], "nearest")  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError):
        round_values(np.array([np.nan]), formats["e2m1"])


@np.errstate(invalid="ignore")  # comparing signalling NaNs
def test_widen_gives_the_stored_values() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = sixteen_bit_inputs("bf16")
    assert np.array_equal(widen(bits, formats["bf16"]).astype(np.float64), finite, equal_nan=True)
    halves = bits.view(np.float16)
    assert np.array_equal(
        widen(halves, formats["fp16"]).astype(np.float64), sixteen_bit_inputs("fp16"), equal_nan=True
    )
    single = np.array([1e-45, 3.4e38, -0.0], np.float32)
    assert widen(single, formats["fp32"]) is single
    assert widen(np.array([1e300, 0.1]), formats["fp64"]).tolist() == [np.inf, np.float32(0.1)]
    assert widen(np.array([0x7E, 0x01], np.uint8), formats["e4m3fn"]).tolist() == [448.0, 2.0**-9]
