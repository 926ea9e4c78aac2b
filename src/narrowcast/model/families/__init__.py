"""From a config.json to a geometry: one row for each family, by model_type.

geometry(config)   →  Geometry, or CheckpointError with the field that is missing

fields, blocks     what is read, and what families are made of
dense, early, experts, hybrid, nemotron, gemma, crossed   families, by what their layers are
towers             text parts of multimodal models
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from narrowcast.errors import CheckpointError
from narrowcast.model.families import crossed, dense, early, experts, gemma, hybrid, nemotron
from narrowcast.model.families.fields import Fields
from narrowcast.model.families.towers import DEFAULTS, TOWERS, in_tower
from narrowcast.model.geometry import Geometry
from narrowcast.store.checkpoint import text_config

Family = Callable[[Fields], Geometry]
FAMILIES: Mapping[str, Family] = {
    **dense.FAMILIES,
    **early.FAMILIES,
    **experts.FAMILIES,
    **hybrid.FAMILIES,
    **gemma.FAMILIES,
    "mllama": crossed.mllama,
    "nemotron_h": nemotron.nemotron_h,
}
# Parts that are beside a text model that stands at the top of its config (Qwen2-VL).
_BESIDE = ("vision_config", "visual", "audio_config")


def geometry(config: Mapping[str, Any]) -> Geometry:
    """The geometry of the text model that a config describes. CheckpointError for a family without a row, or a field
    that is missing or no number."""
    if not isinstance(config, Mapping):
        raise CheckpointError(
            "the config is no object",
            where="config.json",
            got=repr(config)[:60],
            wanted="an object with model_type",
        )
    text, outer = text_config(config), config.get("model_type")
    tower = TOWERS.get(outer) if isinstance(outer, str) else None
    kind = text.get("model_type") or (tower.family if tower else None) or outer
    if not isinstance(kind, str) or _plain(kind) not in FAMILIES:
        raise CheckpointError(
            "the geometry of this family is not known", where="config.json model_type", got=repr(kind)[:60],
            wanted=", ".join(sorted(FAMILIES)),
        )  # fmt: skip
    spare = DEFAULTS.get(kind) if text is not config else None
    thinker = config.get("thinker_config")  # between the two, of models that have a talker too
    outside = {**config, **thinker} if isinstance(thinker, Mapping) else config
    found = FAMILIES[_plain(kind)](Fields(text, _plain(kind), outer=outside, spare=spare))
    multimodal = text is not config or any(config.get(part) for part in _BESIDE)
    return in_tower(found, tower or TOWERS["qwen2_vl"]) if multimodal else found


def _plain(kind: str) -> str:
    """The family of a text part: gemma3_text is gemma3, mllama_text_model is mllama."""
    return kind if kind in FAMILIES else kind.removesuffix("_model").removesuffix("_text")
