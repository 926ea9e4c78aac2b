"""Rung 1 and 2: encode against fractions at every value, midpoint and their neighbours; the oracles agree."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from narrowcast.errors import NonFiniteError, RangeError, UsageError
from narrowcast.numbers.codec import OVERFLOWS, ROUNDINGS, Counts
from narrowcast.numbers.codec import encode as codec_encode
from narrowcast.numbers.formats import formats
from reference.array_oracle import encode_array
from reference.critical_points import critical_points
from reference.fractions_oracle import EIGHT_BITS, LAYOUTS, Result, cast_nan, encode, encode_under

NOISE = (Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(255, 256))
SPECIAL = (math.inf, -math.inf, math.nan)


def modes(name: str) -> list[tuple[str, str]]:
    """Every rounding under every overflow rule that the format has."""
    special = [] if not LAYOUTS[name].nan else ["special"]
    return [(rounding, overflow) for rounding in ROUNDINGS for overflow in ("saturate", *special)]


def describe(name: str, x: float, got: int, wanted: Result) -> str:
    fields = formats[name].fields
    return f"{name}: {x!r} ({x.hex()}) became {fields(got)}, wanted {fields(wanted.code)} {wanted.lost}"


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_points_against_fractions(name: str) -> None:
    """Codes and counts, all roundings and overflow modes."""
    layout, fmt = LAYOUTS[name], formats[name]
    points = critical_points(layout)
    x = np.concatenate([points[:: 1 if fmt.bits < 8 else 7], SPECIAL[: 3 if layout.nan else 2]])
    noise = np.array([float(NOISE[i % 4]) for i in range(len(x))])
    overflows = ("saturate", "special") if layout.nan else ("saturate",)
    for rounding in ROUNDINGS:
        given = noise if rounding == "stochastic" else None
        wanted = [
            encode_under(layout, v, rounding, overflows, NOISE[i % 4]) for i, v in enumerate(x.tolist())
        ]
        for overflow in overflows:
            got = codec_encode(x, fmt, rounding, overflow, given)  # type: ignore[arg-type]
            for value, code, results in zip(x.tolist(), got.codes.tolist(), wanted, strict=True):
                result = results[overflow]
                assert code == result.code, describe(name, value, code, result) + f" ({rounding}, {overflow})"
            lost = [results[overflow].lost for results in wanted]
            assert got.counts == Counts(
                *(lost.count(kind) for kind in ("clipped", "underflowed", "nan", "inf"))
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in LAYOUTS if LAYOUTS[n].bits == 8])
def test_all_points_against_fractions(name: str) -> None:
    layout, fmt = LAYOUTS[name], formats[name]
    x = critical_points(layout)
    for rounding, overflow in modes(name):
        given = np.full(len(x), 0.25) if rounding == "stochastic" else None
        got = codec_encode(x, fmt, rounding, overflow, given)  # type: ignore[arg-type]
        for value, code in zip(x.tolist(), got.codes.tolist(), strict=True):
            result = encode(layout, value, rounding, overflow, Fraction(1, 4))
            assert code == result.code, describe(name, value, code, result) + f" ({rounding}, {overflow})"


@pytest.mark.parametrize("name", LAYOUTS)
def test_array_oracle_agrees_with_fractions(name: str) -> None:
    """The vectorised oracle, which checks the exhaustive inputs, is itself held to the fractions."""
    layout = LAYOUTS[name]
    points = critical_points(layout)
    x = points[:: 11 if layout.bits < 16 else 4999]
    for rounding, overflow in modes(name):
        results = encode_array(layout, x, rounding, overflow, np.full(len(x), 0.25))
        for i, value in enumerate(x.tolist()):
            wanted = encode(layout, value, rounding, overflow, Fraction(1, 4))
            lost = {"clipped": results.clipped, "underflowed": results.underflowed}
            assert results.codes[i] == wanted.code, (name, value, rounding, overflow)
            assert [kind for kind, mask in lost.items() if mask[i]] == ([wanted.lost] if wanted.lost else [])


@pytest.mark.parametrize("name", LAYOUTS)
def test_error_mode_raises_exactly_on_what_leaves_the_range(name: str) -> None:
    layout, fmt = LAYOUTS[name], formats[name]
    points = critical_points(layout)
    x = points[:: 7 if fmt.bits < 16 else 4999]
    for rounding in ROUNDINGS:
        noise = np.full(len(x), 0.25) if rounding == "stochastic" else None
        over = encode_array(layout, x, rounding, "error", noise).over
        inside = codec_encode(x[~over], fmt, rounding, "error", None if noise is None else noise[~over])  # type: ignore[arg-type]
        assert inside.counts.clipped == 0
        with pytest.raises(RangeError) as raised:
            codec_encode(x, fmt, rounding, "error", noise)  # type: ignore[arg-type]
        first = int(np.flatnonzero(over)[0])
        assert f"{int(over.sum())} values outside {name}" in str(raised.value)
        assert f"first at index ({first},)" in str(raised.value)
    for value in (np.inf, -np.inf):
        with pytest.raises(RangeError):
            codec_encode(np.array([value]), fmt, overflow="error")


@pytest.mark.parametrize("name", LAYOUTS)
def test_nan_becomes_the_nan_of_the_format_or_is_refused(name: str) -> None:
    layout, fmt = LAYOUTS[name], formats[name]
    x = np.array([[1.0, math.nan], [-math.nan, 1.0]])
    if not layout.nan:
        with pytest.raises(NonFiniteError, match=r"2 NaN values.*\n.*first at index \(0, 1\)"):
            codec_encode(x, fmt)
        return
    for overflow in OVERFLOWS:
        got = codec_encode(x, fmt, overflow=overflow)  # type: ignore[arg-type]
        assert got.codes[0, 1] == cast_nan(layout, False)
        assert got.codes[1, 0] == cast_nan(layout, True)
        assert got.counts == Counts(nan=2)


def test_rules_that_do_not_exist_are_refused() -> None:
    e4m3, e2m1, one = formats["e4m3fn"], formats["e2m1"], np.ones(1)
    with pytest.raises(UsageError, match="unknown rounding"):
        codec_encode(one, e4m3, "nearest")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown overflow"):
        codec_encode(one, e4m3, overflow="wrap")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs noise"):
        codec_encode(one, e4m3, "stochastic")
    with pytest.raises(UsageError, match="neither infinity nor NaN"):
        codec_encode(one, e2m1, overflow="special")
    with pytest.raises(UsageError, match="no codes"):
        codec_encode(one, formats["fp32"])


def test_dtype_and_shape_of_codes() -> None:
    for name, dtype in (("e2m1", np.uint8), ("e4m3fn", np.uint8), ("bf16", np.uint16), ("fp16", np.uint16)):
        codes = codec_encode(np.zeros((2, 0, 3), np.float32), formats[name]).codes
        assert (codes.dtype, codes.shape) == (dtype, (2, 0, 3))
    assert codec_encode(np.array([[1, -2]], np.int64), formats["int8"]).codes.tolist() == [[1, 254]]
