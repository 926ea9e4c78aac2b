"""What auto-round's config says of a linear scheme: main settings, and ``extra_config`` for what differs.

Source: auto-round 0.16.1 (schemes.py, export/export_to_autoround).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from narrowcast._version import __version__
from narrowcast.containers.container import Document, Layers
from narrowcast.containers.targets import patterns
from narrowcast.errors import UsageError
from narrowcast.numbers.formats import E8M0, Kind
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, Tile

NAME = "auto-round"
BESIDE = "quantization_config.json"


def document(layers: Layers) -> Document:
    """The config block, and the same beside it, where vLLM looks as well."""
    groups = sorted(layers.groups, key=lambda group: -len(group.names))
    packings = sorted({group.how.format for group in groups})
    if len(packings) > 1:
        raise UsageError(
            f"{NAME} has one packing_format for a whole model", got=" and ".join(packings), wanted="one",
            remedy="choose one preset for all layers, or another container",
        )  # fmt: skip
    base = settings(groups[0].linear)
    block: dict[str, Any] = {**base, "packing_format": packings[0], "quant_method": NAME}
    if packings[0].startswith("auto_round:fp8"):
        block |= {"activation_scheme": "dynamic" if groups[0].linear.dynamic else "static", "fmt": "e4m3"}
    roots = {
        match[1] for group in groups for name in group.names if (match := re.match(r"(.+?)\.\d+\.", name))
    }
    block["block_name_to_quantize"] = ",".join(sorted(roots)) or None
    extra: dict[str, dict[str, Any]] = {}
    for group in groups:
        outside = tuple(
            name for name in group.names if not any(name.startswith(f"{root}.") for root in roots)
        )
        differs = {key: value for key, value in settings(group.linear).items() if base.get(key) != value}
        for names, said in ((group.names, differs), (outside, settings(group.linear))):
            if said:
                extra |= dict.fromkeys(_keys(names, layers), said)
    extra |= {key: {"bits": 16} for key in _keys(layers.ignore, layers)}
    if extra:
        block["extra_config"] = extra
    block["meta"] = {"quantizer": [f"narrowcast:{__version__}"]}
    block = {key: value for key, value in sorted(block.items()) if value is not None}
    return Document(block, {BESIDE: (json.dumps(block, indent=2) + "\n").encode()})


def _keys(names: Sequence[str], layers: Layers) -> list[str]:
    """Modules as keys of extra_config: a name alone means itself, and what has special characters is a pattern."""
    return [
        re.sub(r"\\(.)", r"\1", key[1:-1]) if _single(key) else key
        for key in patterns(names, layers.linear_names)
    ]


def _single(pattern: str) -> bool:
    return pattern.startswith("^") and pattern.endswith("$") and not re.search(r"\\d|(?<!\\)[*+?]", pattern)


def settings(linear: LinearScheme) -> dict[str, Any]:
    """What the config says of a linear scheme."""
    weight = linear.weight
    said: dict[str, Any] = {
        "bits": weight.element.bits, "data_type": _kind(weight), "group_size": _group_size(weight.inner.tile),
        "sym": weight.zero is None,
    }  # fmt: skip
    if linear.input is None:
        return said
    nv = len(linear.input.scales) == 2
    return said | {
        "act_bits": linear.input.element.bits, "act_data_type": "nv_fp4_with_static_gs" if nv else _kind(linear.input),
        "act_dynamic": linear.dynamic or nv, "act_group_size": _group_size(linear.input.inner.tile), "act_sym": True,
    }  # fmt: skip


def _kind(scheme: Scheme) -> str:
    if scheme.element.kind is Kind.INT:
        return "int"
    return "nv_fp" if len(scheme.scales) == 2 else "mx_fp" if scheme.inner.format is E8M0 else "fp"


def _group_size(tile: Tile) -> int | list[int]:
    rows, cols = tile
    return list(tile) if rows > 1 else cols or (-1 if rows else 0)
