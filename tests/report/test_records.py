"""JSON that every reader accepts, with the schema in front."""

from __future__ import annotations

import json
from fractions import Fraction
from math import inf, nan
from pathlib import Path

import numpy as np

from narrowcast.numbers.formats import Specials
from narrowcast.report.records import SCHEMA, record


def test_values_become_jsons_own() -> None:
    text = record(
        "x",
        {
            "nan": nan, "inf": [inf, -inf], "enum": Specials.FN, "set": frozenset({"b", "a"}), "tuple": (1, 2.5),
            "numpy": np.float32(0.5), "count": np.int64(3), "none": None, "truth": True, "path": Path("a"),
            "nested": {1: np.float64(inf)}, "fraction": Fraction(1, 2),
        },
    )  # fmt: skip
    assert json.loads(text) == {
        "schema": SCHEMA, "verb": "x", "nan": "nan", "inf": ["inf", "-inf"], "enum": "fn", "set": ["a", "b"],
        "tuple": [1, 2.5], "numpy": 0.5, "count": 3, "none": None, "truth": True, "path": "a", "nested": {"1": "inf"},
        "fraction": "1/2",
    }  # fmt: skip
    assert "NaN" not in text
    assert "Infinity" not in text


def test_schema_comes_first() -> None:
    assert list(json.loads(record("x", {"a": 1}))) == ["schema", "verb", "a"]
