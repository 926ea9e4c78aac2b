"""Formats spelled on the spot: a row is enough, so every spelling decodes and rounds as its layout says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from narrowcast.errors import UsageError
from narrowcast.numbers.codec import ROUNDINGS, encode
from narrowcast.numbers.formats import Format, formats
from reference.array_oracle import encode_array
from reference.critical_points import critical_points
from reference.fractions_oracle import Layout


def layout_of(e: int, m: int, signed: bool, specials: str, subnormals: bool, bias: int) -> Layout:
    """The layout that a spelling promises, its special codes listed one by one."""
    body = 1 << (e + m)
    signs = (0, body) if signed else (0,)
    top = body - 1
    nan: set[int] = set()
    inf: set[int] = set()
    minus_zero: int | None = body if signed and subnormals else None
    cast_nan: int | None = None
    if specials == "ieee":
        first = body - (1 << m)
        nan = {s | c for s in signs for c in range(first + 1, body)}
        inf = {s | first for s in signs}
        cast_nan = first | (1 << (m - 1))
    elif specials == "fn":
        nan, cast_nan = {s | top for s in signs}, top
    elif specials in ("fnuz", "extended"):
        nan, cast_nan, minus_zero = {body}, body, None
        inf = {s | top for s in signs} if specials == "extended" else set()
    return Layout(
        "", int(signed), e, m, bias, subnormals, frozenset(nan), frozenset(inf), minus_zero, cast_nan
    )


def spellings(widths: range) -> list[tuple[str, Layout]]:
    found = []
    kinds = ("ieee", "fn", "fnuz", "extended", "finite")
    for e, m, signed, specials, subnormals in itertools.product(
        range(1, 9), range(8), (True, False), kinds, (True, False)
    ):
        meaningless = (specials == "ieee" and m == 0) or (specials in ("fnuz", "extended") and not signed)
        if e + m + signed not in widths or meaningless or e == 8:
            continue
        bias = 2 ** (e - 1) - 1
        layout = layout_of(e, m, signed, specials, subnormals, bias)
        if len(layout.values) < 2 or layout.highest <= 0:
            continue
        text = f"{'' if signed else 'u'}e{e}m{m}:{specials}" + ("" if subnormals else ",nosubnormals")
        found.append((text, layout))
    return found


def check(text: str, layout: Layout) -> None:
    fmt = formats[text]
    for code in range(1 << layout.bits):
        assert fmt.value(code) == layout.decode(code), (text, fmt.fields(code))
    assert fmt.finite_values == len(layout.values)
    if layout.sign_bits and not layout.subnormals:
        return  # a signed format without zero: nothing says which sign zero takes
    points = critical_points(layout)
    x = points[:: max(1, len(points) // 400)]
    for rounding in ROUNDINGS:
        for overflow in ("saturate", "special") if layout.nan else ("saturate",):
            noise = np.full(len(x), 0.25) if rounding == "stochastic" else None
            got = encode(x, fmt, rounding, overflow, noise)  # type: ignore[arg-type]
            wanted = encode_array(layout, x, rounding, overflow, noise)
            wrong = np.flatnonzero(got.codes != wanted.codes)
            assert not wrong.size, (
                text,
                rounding,
                overflow,
                x[wrong[0]],
                got.codes[wrong[0]],
                wanted.codes[wrong[0]],
            )
            assert got.counts.clipped == wanted.clipped.sum(), (text, rounding)
            assert got.counts.underflowed == wanted.underflowed.sum(), (text, rounding)


def test_every_spelling_up_to_six_bits() -> None:
    found = spellings(range(2, 7))
    assert len(found) > 150
    for text, layout in found[::4]:
        check(text, layout)


@pytest.mark.slow
def test_every_spelling_up_to_eight_bits() -> None:
    for text, layout in spellings(range(2, 9)):
        check(text, layout)


def test_a_spelling_is_the_named_row() -> None:
    """The same ten facts make the same format, whatever its name."""
    pairs = {
        "e4m3:fn": "e4m3fn", "e5m2:ieee": "e5m2", "e4m3:bias=8,fnuz": "e4m3fnuz",
        "e4m3:bias=11,fnuz": "e4m3b11fnuz", "e2m1": "e2m1",
        "e3m2:finite": "e3m2", "e2m3:bias=1": "e2m3", "ue8m0:fn,nosubnormals": "e8m0",
        "e3m4:ieee": "e3m4", "e5m2:bias=16,extended": "binary8p3", "e8m7:ieee": "bf16", "e5m10:ieee": "fp16",
    }  # fmt: skip
    for text, name in pairs.items():
        spelled, row = formats[text], formats[name]
        codes = range(0, 1 << row.bits, 1 if row.bits <= 8 else 251)
        assert [spelled.value(c) for c in codes] == [row.value(c) for c in codes], text
        assert spelled.bits == row.bits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("e4m0:ieee", "needs a mantissa bit"),
        ("ue4m3:fnuz", "unsigned format lacks"),
        ("ue4m3:extended", "unsigned format lacks"),
        ("e1m0:fn", "leave no numbers"),
        ("e1m0:extended,nosubnormals", "leave no numbers"),
        ("e8m7:finite", "must fit fp32"),
        ("e4m3:bias=160", "must fit fp32"),
        ("e4m3:bias=2000", "unknown format option"),
        ("e4m3:bias=--5", "unknown format option"),
        ("e4m3:bias=", "unknown format option"),
        ("e4m3:wide", "unknown format option"),
        ("e9m3", "too wide"),
        ("e8m8", "too wide"),
        ("e0m3", "too wide"),
        ("e4", "unknown format"),
        ("float9", "unknown format"),
    ],
)
def test_spellings_without_meaning_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        formats[text]


def test_unknown_names_come_with_near_ones() -> None:
    with pytest.raises(UsageError, match="did you mean") as raised:
        formats["e4m3fnu"]
    assert "e4m3fnuz" in str(raised.value)
    assert "e4m3fnu" not in formats
    assert "E4M3" in formats
    assert formats["E4M3"] is formats["e4m3fn"]


def test_aliases_are_unique_and_lower_case() -> None:
    names = [name for row in formats.values() for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)


def test_the_largest_bias_that_fp32_decodes() -> None:
    assert formats["e8m7:bias=128"].max == formats["bf16"].max
    assert isinstance(formats["e4m3:bias=147"], Format)
    assert formats["e4m3:bias=147"].smallest == 2.0**-149


def test_a_name_without_a_format_may_be_asked_for() -> None:
    assert formats.get("intfour") is None
    assert formats.get("", "nothing") == "nothing"
    assert formats.get("BF16") is formats["bf16"]
