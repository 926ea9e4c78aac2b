"""What kind of value stands under the keys of a quantization config, in whatever container it is.

Readers of a config look for names in lists and for keys in tables. A value of another kind would break far from its
cause, and a string where a list of names belongs would be taken for its letters. Null stands for nothing everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowcast.errors import CheckpointError

_NAMES = frozenset({
    "ignore", "ignored_layers", "modules_to_not_convert", "modules_to_convert", "llm_int8_skip_modules",
    "exclude_modules", "exclude", "targets",
})  # fmt: skip
_TABLES = frozenset({
    "config_groups", "sparsity_config", "transform_config", "dynamic_config", "quantized_layers", "meta",
    "quantization", "extra_config", "layer_quant_config", "global_quant_config", "export",
})  # fmt: skip
_TABLE_LISTS = frozenset({"apply"})
_INTEGERS = frozenset({"num_bits"})


def refuse_other_kinds(block: Mapping[str, Any], where: Path) -> None:
    """Raise CheckpointError, with the path of the key, for a value of a kind that no reader takes."""
    _look(block, "", where)


def _look(value: Any, path: str, where: Path) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            at = f"{path}.{key}" if path else str(key)
            wanted = _wanted(key, inner, top=not path)
            if wanted is not None:
                raise CheckpointError(
                    f"{at} is no {wanted}", where=where, got=f"{inner!r:.60}", wanted=f"a {wanted}, or null",
                    remedy="copy the config from the checkpoint's origin, or correct the value",
                )  # fmt: skip
            if key != "meta":  # what a quantizer noted for itself
                _look(inner, at, where)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _look(inner, f"{path}[{i}]", where)


def _wanted(key: str, value: Any, *, top: bool) -> str | None:
    """What should stand under a key, where something else does."""
    if value is None:
        return None
    names = isinstance(value, list) and all(isinstance(item, str) for item in value)
    tables = isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
    if key in _NAMES and not names:
        return "list of names"
    if (key in _TABLES or (top and key == "dynamic")) and not isinstance(value, Mapping):
        return "table"
    if key in _TABLE_LISTS and not tables:
        return "list of tables"
    if key in _INTEGERS and type(value) is not int:
        return "whole number"
    if key == "block_structure" and isinstance(value, list) and [type(x) for x in value] != [int, int]:
        return "pair of whole numbers"
    return None
