"""``narrowcast formats``: the seeds of shared/cases, every way to ask, every refusal."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cli.running import Cli
from narrowcast.numbers.codec import OVERFLOWS, ROUNDINGS, Counts, encode
from narrowcast.numbers.formats import formats

# Derived from the formulas by hand: seeds rows 1 to 19, and row 52 for the ranges.
LARGEST = {"e4m3fn": 448, "e5m2": 57344, "fp16": 65504, "int4": 7, "int8": 127, "e2m1": 6, "e4m3_ieee": 240}
SMALLEST_NORMAL = {"e4m3fn": 2**-6, "e5m2": 2**-14}


def test_table_lists_every_format_on_one_line(cli: Cli) -> None:
    names = [words[0] for words in cli("formats").lines if words]
    assert [name for name in names if name in formats] == list(formats)


def test_json_of_the_table(cli: Cli) -> None:
    rows = {row["name"]: row for row in cli("formats", "--json").json["formats"]}
    assert list(rows) == list(formats)
    for name, value in LARGEST.items():
        assert rows[name]["max"] == value
    for name, value in SMALLEST_NORMAL.items():
        assert rows[name]["smallest_normal"] == value
    assert rows["int4"]["min"] == -8
    assert rows["int8"]["min"] == -128
    assert rows["e4m3fn"]["smallest_subnormal"] == 2**-9
    assert rows["bf16"]["epsilon"] == 2**-7
    assert rows["bf16"]["unit_roundoff"] == 2**-8
    assert rows["tf32"]["bits"] == 19
    assert not rows["tf32"]["storable"]


@pytest.mark.parametrize("name", list(formats))
def test_page_of_every_format(cli: Cli, name: str) -> None:
    page = cli("formats", name)
    assert page.code == 0
    assert formats[name].source in " ".join(page.out.split())


def test_page_of_e4m3fn_has_every_value_and_the_specials(cli: Cli) -> None:
    page = cli("formats", "E4M3").out
    assert "NaN 0x7F and 0xFF, -0 0x80, no infinity" in page
    assert "largest             448                 0x7E  0 1111 110" in page
    assert "smallest subnormal  2^-9 = 0.001953125  0x01  0 0000 001" in page
    assert "256  288  320  352  384  416  448" in page
    assert "8 9 10 11 12 13 14 15  times 2^-9" in page
    assert "17.81 binades" in page  # log2(448 / 2^-9)
    assert math.log2(448 / 2**-9) == pytest.approx(17.81, abs=0.005)


@pytest.mark.parametrize(
    ("spelling", "largest"),
    [
        ("e3m3:bias=3,finite", 2**4 * (2 - 2**-3)),  # top exponent field 7, 7 - 3 = 4
        ("e3m3", 2**4 * (2 - 2**-3)),
        ("ue5m3:bias=15,fn", 2**16 * (2 - 2 * 2**-3)),  # the top code is NaN
        ("e4m3:bias=7,fn", 448),
    ],
)
def test_formats_spelled_on_the_spot(cli: Cli, spelling: str, largest: float) -> None:
    assert cli("formats", spelling, "--json").json["format"]["max"] == largest
    assert cli("formats", spelling).code == 0
    assert cli("formats", spelling, "--value", "0.3").code == 0


# value, format, decoded, code, tie, fate: seeds rows 22, 24, 25, 35 and case 1 of field.md
VALUES = [
    ("70000", "bf16", 70144.0, None, False, "rounded"),
    ("70000", "fp16", 65504.0, 0x7BFF, False, "clipped"),
    ("0.0005", "e4m3fn", 0.0, 0x00, False, "underflowed"),
    ("0.001", "e4m3fn", 2**-9, 0x01, False, "rounded"),
    ("2^-10", "e4m3fn", 0.0, 0x00, True, "underflowed"),
    ("1.375", "e4m3fn", 1.375, 0x3B, False, "exact"),
    ("464", "e4m3fn", 448.0, 0x7E, False, "rounded"),
    ("465", "e4m3fn", 448.0, 0x7E, False, "clipped"),
    ("4.25", "e4m3fn", 4.0, 0x48, True, "rounded"),
    ("4.75", "e4m3fn", 5.0, 0x4A, True, "rounded"),
    ("-2^-11", "e4m3fn", 0.0, 0x80, False, "underflowed"),
    ("nan", "e4m3fn", "nan", 0x7F, False, "nan"),
    ("inf", "e5m2", 57344.0, 0x7B, False, "inf"),
    ("2.5", "int8", 2.0, 0x02, True, "rounded"),
    ("-8.6", "int4", -8.0, 0x8, False, "clipped"),
    ("1/3", "fp32", float(np.float32(1 / 3)), int(np.float32(1 / 3).view(np.uint32)), False, "rounded"),
    ("0.1", "fp64", 0.1, int(np.float64(0.1).view(np.uint64)), False, "exact"),
]


@pytest.mark.parametrize(("value", "name", "decoded", "code", "tie", "fate"), VALUES)
def test_value(
    cli: Cli, value: str, name: str, decoded: float | str, code: int | None, tie: bool, fate: str
) -> None:
    got = cli("formats", name, "--value", value, "--json").json["values"][0]
    assert got["nearest"]["value"] == decoded
    assert code is None or got["nearest"]["code"] == code
    assert (got["tie"], got["result"]) == (tie, fate)
    page = cli("formats", name, "--value", value)
    assert page.code == 0
    assert page.out.splitlines()[0].endswith(f" in {name}")


def test_value_page_in_full(cli: Cli) -> None:
    assert (
        cli("formats", "e4m3fn", "--value", "0.3").out
        == """\
0.3 in e4m3fn

  decoded  0.3125
  code     0x2A  0 0101 010
  result   rounded
  error    +0.0125, 4.17 % of the value

  neighbour  value    code  bits        away
  ──────────────────────────────────────────────
  below      0.28125  0x29  0 0101 001  -0.01875
  above      0.3125   0x2A  0 0101 010  +0.0125

  no tie: halfway is 0.296875
  stochastic rounding goes up in 60 %

  rule      result   code  under
  ─────────────────────────────────────────────────────────────────────
  rounding  0.3125   0x2A  nearest_even, nearest_away, nearest_zero, up
            0.28125  0x29  toward_zero, down
  overflow  0.3125   0x2A  any
"""
    )


def test_overflow_modes_of_a_clipped_value(cli: Cli) -> None:
    got = cli("formats", "e4m3fn", "--value", "1000", "--json").json["values"][0]
    assert set(got["roundings"]) == set(ROUNDINGS) - {"stochastic"}
    assert set(got["overflows"]) == set(OVERFLOWS)
    assert got["overflows"]["saturate"]["value"] == 448
    assert got["overflows"]["special"] == {"value": "nan", "code": 0x7F, "bits": "01111111"}
    assert got["overflows"]["error"].startswith("refused")
    assert got["above"] is None


def test_nan_is_refused_where_there_is_none(cli: Cli) -> None:
    got = cli("formats", "e2m1", "--value", "nan", "--json").json["values"][0]
    assert got["nearest"] is None
    assert got["roundings"]["nearest_even"] == "refused: no NaN"
    assert "refused: no NaN" in cli("formats", "e2m1", "--value", "nan").out


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "tf32", "e5m10:ieee"])
@pytest.mark.parametrize("value", [0.3, -1 / 3, 2.0**-30, 70000.0, 1e39, 2.0**-140])
def test_wide_formats_agree_with_numpy_neighbours(cli: Cli, name: str, value: float) -> None:
    """below < x < above with nothing in between: rounding either neighbour's midpoint returns a neighbour."""
    got = cli("formats", name, "--value", repr(value), "--json").json["values"][0]
    below, above = got["below"], got["above"]
    assert below is not None or above is not None
    for point in (below, above):
        if point is not None:
            again = cli("formats", name, "--value", repr(point["value"]), "--json").json["values"][0]
            assert (again["result"], again["nearest"]["code"]) == ("exact", point["code"])
    if below is not None and above is not None:
        assert below["value"] < value < above["value"]
        between = cli("formats", name, "--value", repr(below["value"]), "--json").json["values"][0]
        if got["result"] != "exact":
            assert between["above"]["value"] == above["value"]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_values_of_16_bits_are_the_codecs(cli: Cli, name: str) -> None:
    """These two are explained as values; the code table of the codec must say the same under every rule."""
    small = [0.0, -0.0, 0.3, -1 / 3, 2.0**-14, 2.0**-25, 1.5 * 2.0**-25, 2.0**-134, -3e-41]
    large = [65519.9, 65520.0, -1e5, 3.4e38, 3.3961775292304601e38, 1e39]
    values = [*small, *large, math.inf, -math.inf, math.nan]
    for value in values:
        got = cli("formats", name, "--value", repr(value), "--json").json["values"][0]
        for rule, point in got["roundings"].items():
            assert point["code"] == encode(np.float64([value]), formats[name], rule).codes[0], (value, rule)
        special = encode(np.float64([value]), formats[name], overflow="special").codes[0]
        assert got["overflows"]["special"]["code"] == special, value
        counts = encode(np.float64([value]), formats[name]).counts
        if got["result"] in ("clipped", "underflowed", "nan", "inf"):
            assert getattr(counts, got["result"]) == 1, value
        else:
            assert counts == Counts(), value


def test_one_value_in_every_format(cli: Cli) -> None:
    answers = cli("formats", "--value", "-0.5", "--json").json["values"]
    assert [answer["format"] for answer in answers] == list(formats)
    assert cli("formats", "--value", "-0.5").code == 0


def test_bits(cli: Cli) -> None:
    """Seeds row 20, and hex is the same pattern."""
    answer = cli("formats", "--bits", "00111000", "--json").json["bits"]
    assert (answer["values"]["int8"], answer["values"]["e4m3fn"]) == (56, 1.0)
    assert list(answer["values"]) == [name for name, fmt in formats.items() if fmt.bits == 8]
    assert cli("formats", "--bits", "0x38").out == cli("formats", "--bits", "0011_1000").out
    assert "e4m3fn       1-4-3   0 0111 000  1" in cli("formats", "--bits", "00111000").out


def test_bits_of_specials_and_other_widths(cli: Cli) -> None:
    values = cli("formats", "--bits", "0xFF", "--json").json["bits"]["values"]
    assert (values["e4m3fn"], values["e8m0"], values["int8"], values["binary8p3"]) == (
        "nan",
        "nan",
        -1,
        "-inf",
    )
    assert cli("formats", "--bits", "1000", "--json").json["bits"]["values"]["int4"] == -8
    assert cli("formats", "--bits", "0x3F800000", "--json").json["bits"]["values"] == {"fp32": 1.0}
    assert cli("formats", "e3m3", "--bits", "0011000", "--json").json["bits"]["values"] == {"e3m3": 1.0}


def test_row_of_seeds(cli: Cli) -> None:
    """Seeds rows 27 and 28: fp8 to four decimals, int8 with scale 400/127 to two."""
    row = "0.02 -0.5 1.3 7.9 -0.004 3.1 400"
    asked = ("formats", "--row", row, "--scheme", "fp8_tensor,int8_tensor", "--span", "127")
    fp8, int8 = cli(*asked, "--json").json["row"]["results"]
    assert [round(x, 4) for x in fp8["decoded"]] == [0.0192, -0.5022, 1.3393, 8.0357, -0.0035, 3.125, 400]
    assert [round(x, 2) for x in int8["decoded"]] == [0, 0, 0, 9.45, 0, 3.15, 400]
    assert int8["decoded"].count(0) == 4
    assert (fp8["span"], int8["span"]) == (448, 127)  # the span is for integers
    assert int8["scales"] == [[float(np.float32(400) / np.float32(127))]]
    page = cli(*asked).out
    assert "   7.9      8.0357   +1.72 %       9.4488  +19.61 %" in page


def test_row_lands_on_448(cli: Cli) -> None:
    """Seeds row 26: amax 22.4 gives scale 0.05, and the largest element lands on 448."""
    (answer,) = cli("formats", "--row", "22.4 1", "--scheme", "fp8_tensor", "--json").json["row"]["results"]
    assert answer["scales"] == [[float(np.float32(22.4) / np.float32(448))]]
    assert answer["codes"][0] == 0x7E


def test_row_under_rules_and_spans(cli: Cli) -> None:
    """Case 3 of field.md: A = 7 gives E2M1 bytes 127, 128, 128 under floor, ceil_log2 and rceil."""
    asked = ("formats", "--row", "7 0 0", "--scheme", "mxfp4", "--rule", "floor,ceil_log2,rceil", "--json")
    results = cli(*asked).json["row"]["results"]
    assert [r["rule"] for r in results] == ["floor", "ceil_log2", "rceil"]
    assert [math.log2(r["scales"][0][0]) + 127 for r in results] == [127, 128, 128]
    assert [r["decoded"][0] for r in results] == [6, 8, 8]


REFUSED = [
    (("formats", "e4m4fn"), "unknown format", "did you mean e4m3fn"),
    (("formats", "e9m9"), "too wide", "exponent"),
    (("formats", "e3m3:bias=x"), "unknown format option", "bias=N"),
    (("formats", "e4m3", "--value", "three"), "not a number", "0.3"),
    (("formats", "e4m3", "--value", "1e999"), "beyond float64", "1e999"),
    (("formats", "e4m3", "--value", "2^-2000"), "beyond float64", "2^-1074"),
    (("formats", "--bits", "012"), "not a pattern of bits", "00111000"),
    (("formats", "--bits", "0x"), "not a pattern of bits", "0x38"),
    (("formats", "--bits", "00111"), "no format has this many bits", "leading zeros count"),
    (("formats", "e4m3", "--bits", "0011"), "no format has this many bits", "8 bits"),
    (("formats", "--row", "1 2"), "--row needs a --scheme", "fp8_tensor"),
    (("formats", "e4m3", "--row", "1", "--scheme", "mxfp4"), "--row takes schemes", "--scheme"),
    (("formats", "--row", " ", "--scheme", "mxfp4"), "an empty row", "numbers"),
    (("formats", "--row", "1 x", "--scheme", "mxfp4"), "not a number", "x"),
    (("formats", "--row", "1 2", "--scheme", "mxfp5"), "unknown scheme", "did you mean mxfp"),
    (
        ("formats", "--row", "1 2", "--scheme", "mxfp4", "--rule", "flor"),
        "no scheme here takes this rule",
        "floor",
    ),
    (("formats", "--row", "1 2", "--scheme", "mxfp4", "--span", "127"), "integer schemes", "int8_channel"),
    (("formats", "--row", "1 2", "--scheme", "int8_tensor", "--span", "-1"), "positive", "-1"),
    (("formats", "e4m3", "--scheme", "mxfp4"), "--scheme goes with --row", "--row"),
    (("formats", "--value", "1", "--bits", "1"), "not allowed with", "--help"),
    (("formats", "--valu", "1"), "unrecognized arguments", "--help"),
]


@pytest.mark.parametrize(("asked", "problem", "hint"), REFUSED, ids=[" ".join(a) for a, _, _ in REFUSED])
def test_refusals(cli: Cli, asked: tuple[str, ...], problem: str, hint: str) -> None:
    answer = cli(*asked)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("narrowcast: error: ")
    assert problem in answer.err
    assert hint in answer.err
    assert "Traceback" not in answer.err


def test_row_with_nan_names_the_place(cli: Cli) -> None:
    answer = cli("formats", "--row", "1 nan", "--scheme", "fp8_tensor")
    assert answer.code == 3
    assert "1 NaN and 0 infinite values" in answer.err
    assert "the row, first at index (0, 1)" in answer.err
