"""From a config.json to a geometry: one row for each family, by model_type.

geometry(config)  →  Geometry, or CheckpointError with the field that is missing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from narrowcast.errors import CheckpointError
from narrowcast.model.families import dense
from narrowcast.model.geometry import Geometry
from narrowcast.store.checkpoint import text_config

Family = Callable[[Mapping[str, Any]], Geometry]
FAMILIES: Mapping[str, Family] = {**dense.FAMILIES}


def geometry(config: Mapping[str, Any]) -> Geometry:
    """The geometry of the text model that a config describes. CheckpointError for a family without a row, or a field
    that is missing or no number."""
    text = text_config(config)
    kind = text.get("model_type") or config.get("model_type")
    if kind not in FAMILIES:
        raise CheckpointError(
            "the geometry of this family is not known", where="config.json model_type", got=kind,
            wanted=", ".join(sorted(FAMILIES)),
        )  # fmt: skip
    return FAMILIES[str(kind)](text)
