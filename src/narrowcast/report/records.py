"""Answers for machines: one JSON object per command, with stable keys.

    {"schema": 1, "verb": "formats", ...}

JSON has no NaN and no infinity, so a number that is not finite becomes the string "nan", "inf" or "-inf".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from math import isfinite
from typing import Any

SCHEMA = 1


def record(verb: str, facts: Mapping[str, Any]) -> str:
    """The JSON text of one answer, keys in the order given."""
    return json.dumps({"schema": SCHEMA, "verb": verb} | plain(facts), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """``value`` in JSON's own types: enums by value, tuples and sets as lists, numpy scalars as numbers."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, set | frozenset):
        return [plain(part) for part in sorted(value)]
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)
