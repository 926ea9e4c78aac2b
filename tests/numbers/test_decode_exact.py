"""Rung 1: every code of every format up to 16 bits against an independent decoder over fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from narrowcast.errors import UsageError
from narrowcast.numbers.codec import decode, decode_table
from narrowcast.numbers.formats import formats
from reference.fractions_oracle import LAYOUTS, Meaning


def as_float(meaning: Meaning) -> float:
    """A code's meaning as float64, which must hold it exactly."""
    if isinstance(meaning, str):
        return float(meaning)
    value = float(meaning)
    assert Fraction(value) == meaning
    return value


@np.errstate(invalid="ignore")  # widening signalling NaNs
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_code(name: str) -> None:
    layout, fmt = LAYOUTS[name], formats[name]
    codes = np.arange(1 << layout.bits)
    meanings = [layout.decode(code) for code in codes.tolist()]
    wanted = np.array([as_float(meaning) for meaning in meanings])
    nan = np.isnan(wanted)
    narrow = decode(codes.astype(np.uint16), fmt)
    assert narrow.dtype == np.float32
    for got in (decode_table(fmt), narrow.astype(np.float64)):
        wrong = np.flatnonzero(
            np.where(nan, ~np.isnan(got), (got != wanted) | (np.signbit(got) != np.signbit(wanted)))
        )
        assert not wrong.size, (
            f"{name} {fmt.fields(int(wrong[0]))}: {got[wrong[0]]} wanted {wanted[wrong[0]]}"
        )
    for code in range(0, 1 << layout.bits, 1 if layout.bits <= 8 else 61):
        assert fmt.value(code) == meanings[code], f"{name} {fmt.fields(code)}"


@pytest.mark.parametrize("name", [*LAYOUTS, "nf4"])
def test_the_decode_table_is_one_array_that_nobody_can_change(name: str) -> None:
    table = decode_table(formats[name])
    assert table is decode_table(formats[name])
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 1


def test_decode_keeps_the_shape_and_any_integer_dtype() -> None:
    codes = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    assert decode(codes, formats["e4m3fn"]).shape == (2, 3, 4)
    assert decode(codes.astype(np.uint16), formats["bf16"]).shape == (2, 3, 4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_code_outside_the_format_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not a code"):
        formats[name].value(1 << formats[name].bits)
    with pytest.raises(UsageError, match="not a code"):
        formats[name].value(-1)
