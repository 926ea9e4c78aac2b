"""From a model on disk, or its config alone, to what an engine would load: ``load``.

With a preset the linear layers of an unquantized model are taken as that preset would write them, layers whose width
no group divides with the smaller groups that ``narrowcast quantize`` takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowcast.model.families import geometry
from narrowcast.model.geometry import Matrix
from narrowcast.numbers.formats import Format, formats
from narrowcast.serving.served import Group, Served
from narrowcast.tensors.presets import LinearScheme, Preset, presets


def load(model: str | Path, *, preset: str | None = None, container: str | None = None) -> Served:
    """The model as it would be served. UsageError for a model or preset that there is not, InputError for files that
    are none."""
    config = json.loads((Path(model) / "config.json").read_text())
    return from_config(str(model), config, preset=preset, container=container)


def from_config(
    name: str, config: Mapping[str, Any], *, preset: str | None = None, container: str | None = None
) -> Served:
    """What the config describes, its linear layers as ``preset`` would write them."""
    shape = geometry(config)
    dtype = formats[shape.dtype]
    chosen = presets[preset] if preset is not None else None
    groups = tuple(_group(matrix, chosen, dtype) for matrix in shape.matrices)
    return Served(
        name, shape, (container or "compressed-tensors") if chosen else "plain", groups,
        shape.vectors * dtype.bits // 8, "config", chosen.name if chosen else None, chosen.kv if chosen else None,
    )  # fmt: skip


def _group(matrix: Matrix, preset: Preset | None, dtype: Format) -> Group:
    wide = matrix.parameters * dtype.bits // 8
    if preset is None or matrix.role in preset.excluded:
        return Group(matrix, None, wide, dtype)
    linear = fitting(preset, matrix.shape[1])
    if linear is None:
        return Group(matrix, None, wide, dtype)
    bits = linear.weight.bits_per_weight(matrix.shape) * matrix.shape[0] * matrix.shape[1]
    each = round(bits / 8) + matrix.bias * dtype.bits // 8
    return Group(matrix, linear, matrix.layers * matrix.experts * each, dtype)


def fitting(preset: Preset, width: int) -> LinearScheme | None:
    """The preset's layer with groups that divide ``width``; None where no group does."""
    found = preset.fitting((width,))
    if found is None or (found.linear.weight.inner.tile[0] == 1 and width % (found.linear.weight.group or 1)):
        return None
    return found.linear
