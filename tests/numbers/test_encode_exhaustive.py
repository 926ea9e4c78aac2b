"""Rung 2: all 65,536 bf16 and fp16 inputs to every format, under every rounding and overflow mode."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from narrowcast.numbers.codec import ROUNDINGS, Counts, encode, to_bf16
from narrowcast.numbers.formats import formats
from reference.array_oracle import encode_array
from reference.critical_points import around, critical_points, sixteen_bit_inputs
from reference.fractions_oracle import EIGHT_BITS, LAYOUTS


def compare(name: str, x: NDArray[np.float64], rounding: str, overflow: str) -> None:
    """Codes and counts of the codec against the array oracle, with the first difference spelled out."""
    layout, fmt = LAYOUTS[name], formats[name]
    noise = (np.arange(len(x)) * 37 % 64 / 64) if rounding == "stochastic" else None
    wanted = encode_array(layout, x, rounding, overflow, noise)
    if overflow == "error":
        x = x[~wanted.over]
        noise = None if noise is None else noise[~wanted.over]
        wanted = encode_array(layout, x, rounding, overflow, noise)
    got = encode(x, fmt, rounding, overflow, noise)  # type: ignore[arg-type]
    wrong = np.flatnonzero(got.codes != wanted.codes)
    if wrong.size:
        i = wrong[0]
        pytest.fail(
            f"{wrong.size} of {len(x)} codes differ under {rounding}, {overflow}; first x={float(x[i])!r}: "
            f"{fmt.fields(int(got.codes[i]))} wanted {fmt.fields(int(wanted.codes[i]))}"
        )
    masks = (wanted.clipped, wanted.underflowed, wanted.nan, wanted.inf)
    assert got.counts == Counts(*(int(mask.sum()) for mask in masks))


def inputs_for(name: str, kind: str) -> NDArray[np.float64]:
    x = sixteen_bit_inputs(kind)
    return x if LAYOUTS[name].nan else x[~np.isnan(x)]


def overflows(name: str) -> list[str]:
    return ["saturate", "special", "error"] if LAYOUTS[name].nan else ["saturate", "error"]


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_sixteen_bit_input_nearest_even(name: str, kind: str) -> None:
    for overflow in overflows(name):
        compare(name, inputs_for(name, kind), "nearest_even", overflow)


@pytest.mark.parametrize(
    "name", ["e4m3fn", "e5m2", "e4m3fnuz", "e2m1", "e8m0", "int4", "uint4", "mxint8", "binary8p4"]
)
def test_every_fp16_input_under_the_other_roundings(name: str) -> None:
    for rounding in ROUNDINGS[1:]:
        compare(name, inputs_for(name, "fp16"), rounding, overflows(name)[-2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_sixteen_bit_input_every_mode(name: str, kind: str) -> None:
    x = inputs_for(name, kind)
    for rounding, overflow in itertools.product(ROUNDINGS, overflows(name)):
        compare(name, x, rounding, overflow)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_every_midpoint_and_its_neighbours(name: str) -> None:
    x = critical_points(LAYOUTS[name])
    for rounding, overflow in itertools.product(ROUNDINGS, overflows(name)):
        compare(name, x, rounding, overflow)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_midpoints_of_sixteen_bit_formats_near_the_ends(name: str) -> None:
    """The subnormals, the first normals, the numbers around one and the top binades."""
    points = np.sort(critical_points(LAYOUTS[name]))
    one = int(np.searchsorted(points, 1.0))
    tiny = int(np.searchsorted(points, 2.0 ** (-LAYOUTS[name].bias)))
    chosen = [
        slice(0, 2000),
        slice(-2000, None),
        slice(one - 1500, one + 1500),
        slice(tiny - 3000, tiny + 3000),
    ]
    for rounding in ROUNDINGS:
        compare(name, np.concatenate([points[part] for part in chosen]), rounding, "special")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_midpoint_of_sixteen_bit_formats(name: str) -> None:
    points = critical_points(LAYOUTS[name])
    for rounding, overflow in itertools.product(ROUNDINGS, overflows(name)):
        compare(name, points, rounding, overflow)


def test_to_bf16_is_encode_with_special_overflow() -> None:
    """The integer form against the definition, at every bf16 midpoint with its float32 neighbours."""
    high = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    x = np.concatenate([(high + np.uint32(low)) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(
        np.float32
    )
    wanted = encode(x, formats["bf16"], overflow="special").codes
    got = to_bf16(x)
    nan = np.isnan(x)
    assert np.array_equal(got[~nan], wanted[~nan])
    assert np.all((got[nan] & 0x7FC0) == 0x7FC0), "every NaN becomes a quiet NaN"
    assert np.array_equal(got[nan] >> 15, wanted[nan] >> 15)


def _nf4_wanted(x: NDArray[np.float64], rounding: str) -> list[int]:
    """Nearest table entry by exact integers: everything is a multiple of 2^-1100."""
    table = [Fraction(v) for v in formats["nf4"].table]
    scale = 1 << 1100
    entries = [int(v * scale) for v in table]
    codes = []
    for value in x.tolist():
        exact = int(Fraction(value) * scale)
        distances = [abs(exact - entry) for entry in entries]
        best = min(distances)
        tied = [code for code, distance in enumerate(distances) if distance == best]
        if len(tied) == 2:
            if rounding == "nearest_even":
                tied = [code for code in tied if code % 2 == 0]
            else:
                tied.sort(key=lambda code: abs(table[code]), reverse=rounding == "nearest_away")
        codes.append(tied[0])
    return codes


@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "nearest_zero"])
def test_nf4_nearest_by_exact_integers(rounding: str) -> None:
    values = np.array(sorted(formats["nf4"].table))
    middles = (values[1:] + values[:-1]) / 2
    assert [Fraction(m) * 2 for m in middles] == [
        Fraction(a) + Fraction(b) for a, b in itertools.pairwise(values)
    ]
    x = np.concatenate([around(np.concatenate([values, middles])), [-9.0, -1.2, 1.2, 9.0, 5e-324, -1e300]])
    got = encode(x, formats["nf4"], rounding).codes  # type: ignore[arg-type]
    assert got.tolist() == _nf4_wanted(x, rounding)


def test_nf4_every_fp16_input() -> None:
    x = sixteen_bit_inputs("fp16")
    x = x[np.isfinite(x)][::4]
    assert encode(x, formats["nf4"]).codes.tolist() == _nf4_wanted(x, "nearest_even")


def test_nf4_directed_roundings_bracket_the_input() -> None:
    table = np.array(formats["nf4"].table)
    x = np.linspace(-0.999, 0.999, 4001)
    down, up = (table[encode(x, formats["nf4"], r).codes] for r in ("down", "up"))  # type: ignore[arg-type]
    zero = table[encode(x, formats["nf4"], "toward_zero").codes]
    assert np.all((down <= x) & (x <= up))
    assert np.all(np.abs(zero) <= np.abs(x))
    ordered = np.sort(table)
    assert np.array_equal(
        np.searchsorted(ordered, up) - np.searchsorted(ordered, down), (down != x) & (up != x)
    )
