"""Rung 0: every format against tables typed from its specification."""

from __future__ import annotations

import itertools
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest

from narrowcast.numbers.codec import decode_table, encode
from narrowcast.numbers.formats import Kind, formats
from reference.fractions_oracle import LAYOUTS, code_set, number, rows

# quant_map of bitsandbytes 0.50.2, little-endian float32.
NF4_QUANT_MAP = (
    "000080bfb13932bf306b06bfa032cabe4da291be3f353dbe7178babd00000000"
    "fffaa23de3ca243edd047c3e3a03ad3eb8a4e13eab07103fb313393f0000803f"
)

FP4_QUANT_MAP = (
    "00000000abaaaa3babaa2a3f0000803fabaaaa3e0000003fabaa2a3e0000803e"
    "00000000abaaaabbabaa2abf000080bfabaaaabe000000bfabaa2abe000080be"
)


def test_every_format_has_a_typed_row() -> None:
    typed = {row["format"] for name in ("floats.csv", "integers.csv", "wide.csv") for row in rows(name)}
    assert typed | {"nf4", "bnb_fp4"} == set(formats)


@pytest.mark.parametrize("row", rows("floats.csv"), ids=lambda r: r["format"])
def test_float_limits(row: dict[str, str]) -> None:
    fmt = formats[row["format"]]
    assert (fmt.exponent_bits, fmt.mantissa_bits, fmt.bias) == tuple(
        int(row[key]) for key in ("exponent_bits", "mantissa_bits", "bias")
    )
    assert fmt.bits == sum(int(row[key]) for key in ("sign_bits", "exponent_bits", "mantissa_bits"))
    assert fmt.max_code == int(row["max_code"], 16)
    assert Fraction(fmt.max) == number(row["max"])
    assert Fraction(fmt.smallest_normal or 0) == number(row["min_normal"])
    subnormal = number(row["min_subnormal"]) if row["min_subnormal"] else None
    assert fmt.smallest_subnormal == subnormal
    assert Fraction(fmt.smallest) == (subnormal or number(row["min_normal"]))
    assert fmt.finite_values == int(row["finite_values"])
    assert fmt.has_nan == bool(row["nan_codes"])
    assert fmt.has_inf == bool(row["inf_codes"])
    assert fmt.has_minus_zero == bool(row["minus_zero"])


@pytest.mark.parametrize("row", rows("floats.csv"), ids=lambda r: r["format"])
def test_special_codes(row: dict[str, str]) -> None:
    table = decode_table(formats[row["format"]])
    assert set(np.flatnonzero(np.isnan(table))) == code_set(row["nan_codes"])
    assert set(np.flatnonzero(np.isinf(table))) == code_set(row["inf_codes"])
    negative_zero = set(np.flatnonzero((table == 0) & np.signbit(table)))
    assert negative_zero == code_set(row["minus_zero"])


@pytest.mark.parametrize("row", rows("integers.csv"), ids=lambda r: r["format"])
def test_integer_limits(row: dict[str, str]) -> None:
    fmt = formats[row["format"]]
    assert (fmt.bits, fmt.kind) == (int(row["bits"]), Kind.INT)
    assert (Fraction(fmt.min), Fraction(fmt.max)) == (number(row["min"]), number(row["max"]))
    assert Fraction(fmt.smallest) == Fraction(fmt.spacing(0.3)) == number(row["step"])
    assert fmt.finite_values == len(LAYOUTS[row["format"]].values) == 2**fmt.bits
    assert (fmt.has_nan, fmt.has_inf, fmt.has_minus_zero) == (False, False, False)


@pytest.mark.parametrize("row", rows("wide.csv"), ids=lambda r: r["format"])
def test_wide_limits(row: dict[str, str]) -> None:
    fmt = formats[row["format"]]
    assert (fmt.exponent_bits, fmt.mantissa_bits, fmt.bias) == tuple(
        int(row[key]) for key in ("exponent_bits", "mantissa_bits", "bias")
    )
    assert Fraction(fmt.max) == number(row["max"])
    assert Fraction(fmt.smallest_normal or 0) == number(row["min_normal"])
    assert Fraction(fmt.smallest_subnormal or 0) == number(row["min_subnormal"])
    assert fmt.storable == (fmt.name != "tf32")


@pytest.mark.parametrize("row", rows("values.csv"), ids=lambda r: f"{r['format']}-{r['code']}")
def test_values_printed_in_the_specifications(row: dict[str, str]) -> None:
    meaning = formats[row["format"]].value(int(row["code"], 16))
    special = row["value"] in ("nan", "inf", "-inf", "-0")
    assert meaning == (row["value"] if special else number(row["value"]))


def test_nf4_values_are_the_float32_table_of_bitsandbytes() -> None:
    expected = np.frombuffer(bytes.fromhex(NF4_QUANT_MAP), "<f4")
    assert decode_table(formats["nf4"]).tolist() == expected.astype(np.float64).tolist()


def test_fp4_values_are_the_float32_table_of_bitsandbytes() -> None:
    """Twelfths, and a zero of each sign that has none; zero is encoded as the first of them."""
    expected = np.frombuffer(bytes.fromhex(FP4_QUANT_MAP), "<f4")
    table = decode_table(formats["bnb_fp4"])
    assert table.tolist() == expected.astype(np.float64).tolist()
    twelfths = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3])
    assert table[:8].astype(np.float32).tolist() == (twelfths / 12).astype(np.float32).tolist()
    assert encode(np.array([0.0, -0.0, 1e-9, -1e-9]), formats["bnb_fp4"]).codes.tolist() == [0, 0, 0, 0]
    assert encode(table[1:8], formats["bnb_fp4"]).codes.tolist() == list(range(1, 8))
    assert encode(table[9:], formats["bnb_fp4"]).codes.tolist() == list(range(9, 16))


def test_nf4_values_are_quantiles_of_the_normal_distribution() -> None:
    """QLoRA's construction: 8 quantiles below zero, 7 above, from the offset 0.9677083, scaled to 1.

    The published table was computed in float32, hence the bound of one float32 epsilon.
    """
    quantile = NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    derived = np.array(sorted([*above, 0.0, *below])) / max(above)
    assert np.abs(derived - decode_table(formats["nf4"])).max() < 2.0**-23


@pytest.mark.parametrize("name", LAYOUTS)
def test_derived_numbers_follow_from_the_typed_layout(name: str) -> None:
    """Extremes, epsilon, roundoff, spacing, binades and finite values, from the independent value list."""
    fmt, layout = formats[name], LAYOUTS[name]
    values = list(layout.values)
    assert (Fraction(fmt.min), Fraction(fmt.max)) == (values[0], values[-1])
    positive = [v for v in values if v > 0]
    assert Fraction(fmt.smallest) == positive[0]
    assert fmt.finite_values == len(values)
    ratio = positive[-1] / positive[0]
    assert 2.0**fmt.binades == pytest.approx(float(ratio), rel=1e-12)
    assert Fraction(2) ** fmt.emax <= positive[-1] < Fraction(2) ** (fmt.emax + 1)
    if fmt.kind is Kind.FLOAT and Fraction(1) in layout.values and fmt.bits <= 8:
        above = next(v for v in values if v > 1)
        assert (fmt.epsilon, fmt.unit_roundoff) == (above - 1, (above - 1) / 2)
    stride = 1 if fmt.bits <= 8 else 97
    for here, above in list(itertools.pairwise(positive))[::stride]:
        between = here + (above - here) / 3
        for x in (here, between):
            assert fmt.spacing(float(x)) == above - here, (float(x), float(above - here))
            assert fmt.spacing(-float(x)) == above - here


@pytest.mark.parametrize("name", LAYOUTS)
def test_spacing_beyond_the_range_is_the_widest_one(name: str) -> None:
    fmt, values = formats[name], list(LAYOUTS[name].values)
    top = values[-1] if fmt.name == "e8m0" else values[-1] - values[-2]
    assert fmt.spacing(fmt.max * 8) == fmt.spacing(-fmt.max * 2.0**20) == fmt.spacing(fmt.max) == top
    if fmt.smallest_subnormal:
        assert fmt.spacing(0.0) == fmt.spacing(fmt.smallest / 1024) == fmt.smallest


def test_bits_by_field() -> None:
    assert formats["e4m3fn"].fields(0b01111110) == "0 1111 110"
    assert formats["e8m0"].fields(127) == "01111111"
    assert formats["int4"].fields(8) == "1000"
    assert formats["e2m1"].fields(0b1101) == "1 10 1"
