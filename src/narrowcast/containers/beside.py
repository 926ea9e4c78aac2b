"""A quantization config that lies in config.json, in a file beside it, or in both, which must then say the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from narrowcast.containers.contents import Source, contradiction

Normal = Callable[[Source, Mapping[str, Any]], dict[str, Any]]


def agreed(source: Source, files: Sequence[str], keys: Sequence[str], normal: Normal) -> dict[str, Any]:
    """Everything that is said, in the spelling that ``normal`` gives it; CheckpointError where two disagree on one of
    ``keys``. Where both say a thing that is no key, config.json is believed."""
    found: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    places = {name: source.beside[name] for name in files if name in source.beside}
    for place, config in (places | {"config.json": source.config}).items():
        said = normal(source, config) if config else {}
        differ = [key for key in keys if key in found and key in said and found[key] != said[key]]
        if differ:
            raise contradiction(
                "the two quantization configs disagree", source,
                got=", ".join(f"{key} {said[key]}" for key in differ) + f" in {place}",
                wanted=", ".join(f"{key} {found[key]} as in {said_by[key]}" for key in differ),
                remedy="remove the one that the tensors do not follow",
            )  # fmt: skip
        found |= said
        said_by |= dict.fromkeys(said, place)
    return found
