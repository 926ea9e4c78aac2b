"""What torchao says beside the tensors: each tensor's class and attributes in the metadata, the recipe in the config.

    told("m.weight")     from {"_type": class, "_data": attributes, "_tensor_data_names": names of its tensors}
    expected(config)     classes that the configs under quant_type make

Attributes are JSON trees of {"_type", "_data"}; ``plain`` takes the wrapping off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from narrowcast.containers.contents import Source, contradiction

# The tensor classes that a config makes, by the name of its class.
MAKES: Mapping[str, tuple[str, ...]] = {
    "Float8WeightOnlyConfig": ("Float8Tensor",),
    "Float8DynamicActivationFloat8WeightConfig": ("Float8Tensor",),
    "Float8DynamicActivationInt4WeightConfig": ("Int4Tensor",),
    "Int4WeightOnlyConfig": ("Int4Tensor", "Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor"),
    "Int8WeightOnlyConfig": ("Int8Tensor",),
    "Int8DynamicActivationInt8WeightConfig": ("Int8Tensor",),
    "Int8StaticActivationInt8WeightConfig": ("Int8Tensor",),
    "IntxWeightOnlyConfig": ("IntxUnpackedToInt8Tensor",),
    "Int8DynamicActivationIntxWeightConfig": ("IntxUnpackedToInt8Tensor",),
    "MXDynamicActivationMXWeightConfig": ("MXTensor",),
    "NVFP4WeightOnlyConfig": ("NVFP4Tensor",),
    "NVFP4DynamicActivationNVFP4WeightConfig": ("NVFP4Tensor",),
}


@dataclass(frozen=True)
class Told:
    """One quantized tensor: its name, its class, its attributes without their wrapping, the names of its parts."""

    name: str
    kind: str
    attributes: Mapping[str, Any]
    parts: tuple[str, ...]

    @property
    def stem(self) -> str:
        """What the names of its tensors begin with."""
        module, _, leaf = self.name.rpartition(".")
        return f"{module}._{leaf}_"


def told(source: Source) -> dict[str, Told]:
    """The quantized tensors by name; CheckpointError for metadata that is no description."""
    found = {}
    for metadata in source.checkpoint.metadata.values():
        for name, text in metadata.items():
            if name in source.entries or not text.startswith("{"):
                continue
            one = _told(source, name, text)
            if one is not None:
                found[name] = one
    return found


def keys(source: Source) -> frozenset[str]:
    """Keys of the metadata that are torchao's."""
    found = {"tensor_names"}
    for metadata in source.checkpoint.metadata.values():
        found |= {key for key, text in metadata.items() if text.startswith('{"_type"')}
    return frozenset(found)


def _told(source: Source, name: str, text: str) -> Told | None:
    try:
        tree = json.loads(text)
        if tree["_type"] == "Tensor":
            return None
        names = tree["_tensor_data_names"]
        attributes = {key: plain(value) for key, value in tree["_data"].items()}
        sound = isinstance(names, list) and isinstance(tree["_type"], str)
    except (ValueError, KeyError, TypeError, AttributeError):
        sound, names, attributes, tree = False, [], {}, {}
    if not sound:
        raise contradiction(
            f"the metadata of {name} does not describe a tensor", source, got=text[:80],
            wanted='{"_type", "_data", "_tensor_data_names"}', remedy="save the checkpoint again",
        )  # fmt: skip
    return Told(name, tree["_type"], attributes, tuple(map(str, names)))


def plain(tree: Any) -> Any:
    """A value without its wrapping: a dtype or an enum as its name, an object as its attributes with its class."""
    if isinstance(tree, list):
        return [plain(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "_type" in tree and "_data" in tree:
        data = tree["_data"]
        if not isinstance(data, dict):
            return data
        return {"_type": tree["_type"], **{key: plain(value) for key, value in data.items()}}
    return {key: plain(value) for key, value in tree.items()}


def recipes(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Every config inside a quant_type whose class is known."""
    if isinstance(tree, list):
        for item in tree:
            yield from recipes(item)
    elif isinstance(tree, dict):
        if isinstance(tree.get("_type"), str) and tree["_type"] in MAKES:
            yield tree
        for value in tree.values():
            yield from recipes(value)


def agree(source: Source, tensors: Mapping[str, Told]) -> None:
    """Refuse tensors of a class that no config makes, or whose attributes the only config denies."""
    found = list(recipes(source.config.get("quant_type")))
    for recipe in found:
        if not isinstance(recipe.get("_data", {}), dict):
            raise contradiction(
                f"the config's {recipe['_type']} has no table of attributes", source, got=f"{recipe['_data']!r:.60}",
                wanted="_data with its attributes", remedy="copy the config from the checkpoint's origin",
            )  # fmt: skip
    known = [plain(recipe) for recipe in found]
    made = {kind for recipe in known for kind in MAKES[recipe["_type"]]}
    for one in tensors.values():
        if known and one.kind not in made:
            raise contradiction(
                f"{one.name}: the config makes other tensors than its metadata names", source, got=one.kind,
                wanted=f"{' or '.join(sorted(made))}, which {' and '.join(sorted({r['_type'] for r in known}))} makes",
            )  # fmt: skip
        if len(known) == 1:
            _same(source, one, known[0])


def _same(source: Source, one: Told, recipe: Mapping[str, Any]) -> None:
    attributes = one.attributes
    block = attributes.get("block_size")
    has = {
        "group_size": block[-1] if isinstance(block, list) else None,
        "block_size": block if isinstance(block, int) else None,
        "weight_dtype": attributes.get("elem_dtype") or attributes.get("target_dtype"),
    }
    for key, value in has.items():
        if value is not None and recipe.get(key) not in (None, -1, value):
            raise contradiction(
                f"{one.name}: the config says another {key} than its metadata", source,
                got=f"{value} in the metadata", wanted=f"{recipe[key]} in the config",
            )  # fmt: skip
