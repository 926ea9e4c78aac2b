"""Tables, wrapping and the spelling of numbers."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.report.tables import (
    decibel,
    exact,
    facts,
    hanging,
    middle,
    number,
    paragraph,
    percent,
    quantity,
    rate,
    seconds,
    size,
    table,
)


def test_a_table_that_fits() -> None:
    assert table(("name", "n"), [("a", "1"), ("long name", "10")], "lr", width=80, indent=2) == [
        "  name        n",
        "  ─────────────",
        "  a           1",
        "  long name  10",
    ]


def test_gaps_narrow_before_names_are_cut() -> None:
    rows = [("abcdefghij", "12345678", "12345678")]
    assert len(table(("", "", ""), rows, "Lrr", width=30)[2]) == 30
    assert table(("", "", ""), rows, "Lrr", width=28)[2] == "abcdefghij 12345678 12345678"
    assert table(("", "", ""), rows, "Lrr", width=26)[2] == "abc…ghij 12345678 12345678"


@given(st.lists(st.text("ab.", min_size=1, max_size=60), min_size=1, max_size=5), st.integers(30, 100))
def test_tables_with_a_soft_column_fit(names: list[str], width: int) -> None:
    lines = table(("tensor", "bytes"), [(name, "123 MB") for name in names], "Lr", width=width)
    assert all(len(line) <= width for line in lines)
    assert all(line.endswith("123 MB") for line in lines[2:])


@given(st.text(min_size=1, max_size=40), st.integers(3, 40))
def test_middle_keeps_both_ends(text: str, width: int) -> None:
    short = middle(text, width)
    assert len(short) == min(len(text), width)
    if len(text) > width:
        head, tail = short.split("…") if short.count("…") == 1 else (short[0], short[-1])
        assert text.startswith(head)
        assert text.endswith(tail)


def test_facts_align_and_leave_out_the_empty() -> None:
    lines = facts([("a", "1"), ("gone", ""), ("long", "word " * 20)], width=40)
    assert lines[0] == "  a     1"
    assert all(len(line) <= 40 for line in lines)
    assert all(line.startswith("        word") for line in lines[2:])


def test_hanging_keeps_paths_whole() -> None:
    path = "/a/very/long/path/that-must-not-be-broken/model.safetensors"
    lines = hanging(f"  where: {path} and some more words that follow it", width=50)
    assert any(path in line for line in lines)
    assert all(line.startswith("    ") for line in lines[1:])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.25, "0.25"), (0.125, "0.125"), (2.0**-4, "2^-4"), (2.0**-149, "2^-149"), (65536.0, "65536"),
        (2.0**17, "2^17"), (448.0, "448"), (1 / 3, "0.333333"), (inf, "inf"), (nan, "nan"), (0.0, "0"), (-1.5, "-1.5"),
    ],
)  # fmt: skip
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.30078125, "0.30078125"), (-(2.0**-9), "-2^-9"), (57344.0, "57344"), (-0.0, "-0"), (0.0, "0"), (nan, "nan"),
        (-inf, "-inf"), (3.4028234663852886e38, "3.4028234663852886e+38"), (-1.0, "-1"), (1e17, "1e+17"),
    ],
)  # fmt: skip
def test_exact(value: float, text: str) -> None:
    assert exact(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_exact_says_which_value(value: float) -> None:
    text = exact(value)
    base, _, exponent = text.removeprefix("-").partition("^")
    magnitude = float(base) ** int(exponent) if exponent else float(base)
    assert (-magnitude if text.startswith("-") else magnitude) == value


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (size(0), "0 B"), (size(999), "999 B"), (size(1000), "1.00 kB"), (size(1_310_000_000), "1.31 GB"),
        (size(999_499), "999 kB"), (size(999_600), "1.00 MB"), (size(16.06e9), "16.1 GB"), (size(671e9), "671 GB"),
        (quantity(9999), "9999"), (quantity(134_515_008), "135 M"), (quantity(8_030_261_248), "8.03 G"),
        (rate(1.9e9), "1.90 GB/s"), (seconds(0.843), "0.84 s"), (seconds(12.34), "12.3 s"),
        (seconds(59.96), "1 min 00 s"),
        (seconds(245), "4 min 05 s"), (seconds(7620), "2 h 07 min"), (decibel(31.55), "31.6"), (decibel(inf), "exact"),
        (decibel(-inf), "-"), (decibel(19.034, 2), "19.03"), (percent(0.0417), "4.17 %"),
        (percent(1.5e-8), "1.5e-06 %"),
    ],
)  # fmt: skip
def test_units(got: str, text: str) -> None:
    assert got == text


def test_a_number_and_its_percent_sign_stay_on_one_line() -> None:
    said = "a share of 12.5 % and then one of 7 % again"
    for width in range(12, 44):
        for lines in (hanging(said, width), paragraph(said, width=width)):
            assert " ".join(" ".join(lines).split()) == said
            assert not any(line.lstrip().startswith("%") for line in lines)
            assert max(map(len, lines)) <= width
