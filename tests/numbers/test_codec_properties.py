"""Rung 3: what any rounding to a grid must satisfy, on inputs that hypothesis looks for."""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from narrowcast.numbers.codec import ROUNDINGS, decode_table, encode
from narrowcast.numbers.formats import Format, Kind, formats
from reference.fractions_oracle import EIGHT_BITS, LAYOUTS

NAMES = [*EIGHT_BITS, "nf4"]
SIGNED_FLOATS = [n for n in EIGHT_BITS if formats[n].kind is Kind.FLOAT and formats[n].signed]
NEAREST = ("nearest_even", "nearest_away", "nearest_zero")
quick = settings(max_examples=20, deadline=None, derandomize=True)


def values_of(x: NDArray[np.float64], fmt: Format, rounding: str, **more: object) -> NDArray[np.float64]:
    return np.asarray(decode_table(fmt)[encode(x, fmt, rounding, **more).codes])  # type: ignore[arg-type]


def inputs(fmt: Format) -> st.SearchStrategy[NDArray[np.float64]]:
    """Arrays that crowd where rounding happens: inside the range, near values and midpoints, and anywhere."""
    table = decode_table(fmt)
    grid = np.unique(table[np.isfinite(table)])
    inside = st.floats(grid[0] * 1.2, grid[-1] * 1.2, allow_nan=False)
    near = st.tuples(st.sampled_from(grid.tolist()), st.floats(-1, 1)).map(lambda p: p[0] * (1 + p[1] / 8))
    middle = st.integers(0, len(grid) - 2).map(lambda i: float(grid[i] + grid[i + 1]) / 2)
    anywhere = st.floats(allow_nan=False, allow_infinity=False)
    return st.lists(st.one_of(inside, near, middle, anywhere), min_size=1, max_size=30).map(np.array)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_nearest_is_nearest(name: str, data: st.DataObject) -> None:
    """No value of the format lies closer to x than the one chosen, distances taken exactly."""
    fmt = formats[name]
    x = data.draw(inputs(fmt))
    table = decode_table(fmt)
    grid = sorted({Fraction(v) for v in table[np.isfinite(table)].tolist()})
    for rounding in NEAREST:
        for value, chosen in zip(x.tolist(), values_of(x, fmt, rounding).tolist(), strict=True):
            exact = Fraction(value)
            at = bisect_left(grid, exact)
            best = min(abs(exact - g) for g in grid[max(at - 1, 0) : at + 1])
            assert abs(exact - Fraction(chosen)) == best, (value, chosen, rounding)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_directed_roundings_do_not_cross_the_input(name: str, data: st.DataObject) -> None:
    fmt = formats[name]
    x = data.draw(inputs(fmt))
    x = x[(x >= fmt.min) & (x <= fmt.max)]
    down, up, zero = (values_of(x, fmt, r) for r in ("down", "up", "toward_zero"))
    assert np.all(down <= x)
    assert np.all(up >= x)
    assert np.all(np.abs(zero) <= np.abs(x))
    assert np.array_equal(zero, np.where(x < 0, up, down))
    for rounding in NEAREST:
        nearest = values_of(x, fmt, rounding)
        assert np.all((nearest == down) | (nearest == up))


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_monotone(name: str, data: st.DataObject) -> None:
    """x ≤ y keeps its order, saturated ends included; for stochastic rounding under the same noise."""
    fmt = formats[name]
    x = np.sort(data.draw(inputs(fmt)))
    noise = np.full(len(x), data.draw(st.floats(0, 0.999)))
    for rounding in ROUNDINGS:
        more = {"noise": noise} if rounding == "stochastic" else {}
        assert np.all(np.diff(values_of(x, fmt, rounding, **more)) >= 0), rounding


@pytest.mark.parametrize("name", [*LAYOUTS, "nf4"])
def test_idempotent(name: str) -> None:
    """Every code encodes its own value under every rule: minus zero where it exists, NaN as some NaN."""
    fmt = formats[name]
    codes = np.arange(1 << fmt.bits)
    table = decode_table(fmt)
    finite = codes[np.isfinite(table)]
    for rounding in ROUNDINGS:
        noise = np.zeros(len(finite)) if rounding == "stochastic" else None
        for overflow in ("saturate", "error"):
            again = encode(table[finite], fmt, rounding, overflow, noise)  # type: ignore[arg-type]
            assert np.array_equal(again.codes, finite), rounding
            assert again.counts.clipped == again.counts.underflowed == 0
    if fmt.has_inf:
        infinite = codes[np.isinf(table)]
        assert np.array_equal(encode(table[infinite], fmt, overflow="special").codes, infinite)
    if fmt.has_nan:
        nan = codes[np.isnan(table)]
        assert np.isnan(table[encode(table[nan], fmt).codes]).all()


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_closed(name: str, data: st.DataObject) -> None:
    """Saturating codes are numbers of the format, infinities included."""
    fmt = formats[name]
    x = np.concatenate([data.draw(inputs(fmt)), [np.inf, -np.inf]])
    for rounding in ROUNDINGS:
        more = {"noise": np.full(len(x), 0.5)} if rounding == "stochastic" else {}
        got = values_of(x, fmt, rounding, **more)
        assert np.isfinite(got).all()
        assert (got[-2], got[-1]) == (fmt.max, fmt.min)


@pytest.mark.parametrize("name", SIGNED_FLOATS)
@quick
@given(data=st.data())
def test_sign_symmetric(name: str, data: st.DataObject) -> None:
    fmt = formats[name]
    x = data.draw(inputs(fmt))
    for rounding, mirrored in [*((r, r) for r in (*NEAREST, "toward_zero")), ("up", "down"), ("down", "up")]:
        got, flipped = values_of(x, fmt, rounding), values_of(-x, fmt, mirrored)
        assert np.array_equal(got, -flipped)
        if fmt.has_minus_zero:
            assert np.array_equal(np.signbit(got), ~np.signbit(flipped))


@pytest.mark.parametrize("name", [*SIGNED_FLOATS, "e8m0"])
@quick
@given(data=st.data(), shift=st.integers(-6, 6))
def test_power_of_two_equivariant(name: str, data: st.DataObject, shift: int) -> None:
    """round(2^k x) = 2^k round(x) while both stay normal: what lets power-of-two scales be exact."""
    fmt = formats[name]
    x = data.draw(inputs(fmt))
    x = x[np.abs(x) < 1e300]
    moved = np.ldexp(x, shift)
    low, high = fmt.smallest_normal or 0.0, fmt.max
    inside = (np.abs(x) >= low) & (np.abs(x) <= high) & (np.abs(moved) >= low) & (np.abs(moved) <= high)
    x, moved = x[inside & (x >= fmt.min)], moved[inside & (x >= fmt.min)]
    parity_kept = fmt.mantissa_bits > 0 or shift % 2 == 0  # without mantissa bits evenness is the exponent's
    for rounding in ("nearest_even", "nearest_away", "nearest_zero", "toward_zero", "up", "down"):
        if rounding == "nearest_even" and not parity_kept:
            continue
        assert np.array_equal(values_of(moved, fmt, rounding), np.ldexp(values_of(x, fmt, rounding), shift))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "nf4"])
def test_stochastic_rounding_is_unbiased_by_construction(name: str) -> None:
    """At j/16 of the way exactly j of 16 equally spaced noises round up: their mean is x itself."""
    fmt = formats[name]
    table = decode_table(fmt)
    grid = np.unique(table[np.isfinite(table)])
    fraction = np.arange(16) / 16
    x = grid[:-1, None] + fraction * np.diff(grid)[:, None]
    noise = np.arange(16) / 16
    got = np.stack([values_of(x, fmt, "stochastic", noise=np.full(x.shape, level)) for level in noise])
    assert np.array_equal((got == grid[1:, None]).sum(axis=0), np.broadcast_to(np.arange(16), x.shape))
    assert np.array_equal(got.mean(axis=0), x)


@quick
@given(st.lists(st.floats(-500, 500), min_size=1, max_size=20), st.integers(0, 2**32 - 1))
def test_stochastic_rounding_is_a_function_of_its_noise(values: list[float], seed: int) -> None:
    x, fmt = np.array(values), formats["e4m3fn"]
    noise = np.random.default_rng(seed).random(len(x))
    once, twice = (encode(x, fmt, "stochastic", noise=noise).codes for _ in range(2))
    assert np.array_equal(once, twice)
    down, up = (values_of(x, fmt, r) for r in ("down", "up"))
    got = decode_table(fmt)[once]
    assert np.all((got == down) | (got == up))


@quick
@given(st.lists(st.floats(width=32), min_size=0, max_size=40))
def test_counts_add_up_over_chunks(values: list[float]) -> None:
    x, fmt = np.array(values, np.float32), formats["e5m2"]
    cut = len(x) // 2
    parts = encode(x[:cut], fmt).counts + encode(x[cut:], fmt).counts
    assert parts == encode(x, fmt).counts
    assert parts.nan == np.isnan(x).sum()
    assert parts.inf == np.isinf(x).sum()
