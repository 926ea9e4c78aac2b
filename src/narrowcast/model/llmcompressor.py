"""llm-compressor recipes, where they map: QuantizationModifier and nothing that changes weights.

    quant_stage:
      quant_modifiers:
        QuantizationModifier:
          scheme: FP8_DYNAMIC            # or {W4A16: ["re:.*mlp.*"], FP8_DYNAMIC: ["re:.*self_attn.*"]}
          targets: Linear                # a pattern or a list; default Linear
          ignore: [lm_head]

becomes keep lines for ``ignore`` and one line per target. What does not map is refused by name, with the
remedy, rather than dropped: a recipe that loses a step in silence gives another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from narrowcast.errors import UsageError
from narrowcast.model.patterns import Pattern
from narrowcast.model.recipe import Line, Recipe
from narrowcast.tensors.presets import presets

# Observers of the plain minimum and maximum, which is what a preset does.
_PLAIN_OBSERVERS = ("minmax", "memoryless_minmax", "static_minmax")
_KEYS = ("scheme", "targets", "ignore", "config_groups", "kv_cache_scheme")
_CALIBRATED = "it needs calibration data or changes weights, which this converter does not do"
_REASONS = {
    "GPTQModifier": _CALIBRATED,
    "AWQModifier": _CALIBRATED,
    "SmoothQuantModifier": _CALIBRATED,
    "SparseGPTModifier": "sparsity is not a number format",
    "SpinQuantModifier": _CALIBRATED,
    "QuIPModifier": _CALIBRATED,
}


def read(text: str, path: str = "recipe.yaml") -> Recipe:
    """Read an llm-compressor recipe. Explicit ``config_groups`` are accepted when they equal a preset.

    Raises ``UsageError`` for YAML that is none, and for every modifier and key that does not map.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError(
            "llm-compressor recipes are YAML, and pyyaml is not installed",
            remedy="pip install 'narrowcast[recipes]', or write the recipe as TOML",
        ) from None
    try:
        document = yaml.safe_load(text)
        modifiers = list(_modifiers(document, path))
    except yaml.YAMLError as error:
        raise UsageError("the recipe is not YAML", where=path, got=" ".join(str(error).split())) from None
    except RecursionError:
        raise UsageError("the recipe nests without end", where=path) from None
    if not modifiers:
        raise UsageError("the recipe has no QuantizationModifier", where=path)
    ignores = {tuple(_strings(m.get("ignore", []), "ignore", path)) for m in modifiers}
    if len(ignores) > 1:
        raise UsageError(
            "the modifiers ignore different modules",
            where=path,
            remedy="write the recipe as ordered TOML rules",
        )
    lines = [Line(Pattern.parse(p, path), None, source=f"{path}, ignore") for p in ignores.pop()]
    for modifier in modifiers:
        lines += _target_lines(modifier, path)
    return Recipe(tuple(lines), None)


def _modifiers(node: Any, path: str) -> Iterator[Mapping[str, Any]]:
    """The arguments of every QuantizationModifier, through stages, modifier groups and lists."""
    if isinstance(node, list):
        for item in node:
            yield from _modifiers(item, path)
        return
    if not isinstance(node, Mapping):
        raise UsageError(
            "the recipe is not a mapping of stages and modifiers", where=path, got=repr(node)[:60]
        )
    for key, value in node.items():
        name = str(key)
        if name == "QuantizationModifier":
            if not isinstance(value, Mapping):
                raise UsageError("QuantizationModifier has no arguments", where=path, got=repr(value)[:60])
            yield value
        elif name.endswith("Modifier"):
            raise UsageError(
                f"{name} does not map to a recipe",
                where=path,
                got=_REASONS.get(name, "only QuantizationModifier maps"),
                remedy=f"remove {name} to quantize with round to nearest",
            )
        elif name.endswith(("_stage", "_modifiers")) or name in ("modifiers", "stages"):
            yield from _modifiers(value, path)
        else:
            raise UsageError(f"the recipe has an unknown key {name!r}", where=path)


def _target_lines(modifier: Mapping[str, Any], path: str) -> list[Line]:
    for key, value in modifier.items():
        if key not in _KEYS:
            raise UsageError(
                f"QuantizationModifier: {key} does not map to a recipe", where=path, wanted=", ".join(_KEYS)
            )
        if key == "kv_cache_scheme" and value is not None:
            raise UsageError(
                "QuantizationModifier: kv_cache_scheme needs scales from calibration data",
                where=path,
                remedy="remove it; engines can also quantize the cache with scales of their own",
            )
    scheme, groups = modifier.get("scheme"), modifier.get("config_groups")
    if (scheme is None) == (groups is None):
        raise UsageError("QuantizationModifier needs one of scheme and config_groups", where=path)
    targets = _strings(modifier.get("targets", ["Linear"]), "targets", path)
    if groups is not None:
        pairs = list(_groups(groups, path))
    elif isinstance(scheme, str):
        pairs = [(scheme, targets)]
    elif isinstance(scheme, Mapping):
        pairs = [(str(name), _strings(value, str(name), path)) for name, value in scheme.items()]
    else:
        raise UsageError("scheme is a name, or names with their targets", where=path, got=repr(scheme))
    return [
        Line(Pattern.parse(p, path), name, "preset", source=f"{path}, {name}")
        for name, patterns in pairs
        for p in patterns
    ]


def _groups(groups: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    if not isinstance(groups, Mapping):
        raise UsageError("config_groups is a mapping of groups", where=path, got=repr(groups)[:60])
    for key, group in groups.items():
        if isinstance(group, list):
            yield str(key), _strings(group, str(key), path)
            continue
        name = equal_preset(group) if isinstance(group, Mapping) else None
        if name is None:
            raise UsageError(
                f"config_groups: {key} equals no preset", where=path, remedy="name a preset with scheme:"
            )
        yield name, _strings(group.get("targets", ["Linear"]), str(key), path)


def equal_preset(group: Mapping[str, Any]) -> str | None:
    """The preset whose weights and inputs a config group spells out, or None."""
    from narrowcast.containers.compressed_tensors.config import arguments

    known = {"targets", "weights", "input_activations", "output_activations", "format"}
    if set(group) - known or group.get("output_activations") is not None:
        return None
    said = (_plain(group.get("weights")), _plain(group.get("input_activations")))
    for preset in presets.values():
        linear = preset.linear
        inputs = arguments(linear.input, linear.dynamic, weight=False) if linear.input is not None else None
        if said == (_plain(arguments(linear.weight, False, weight=True)), _plain(inputs)):
            return preset.name
    return None


def _plain(args: Any) -> dict[str, Any] | None:
    """Quantization arguments without what is default or says nothing, so that equal ones compare equal."""
    if not isinstance(args, Mapping):
        return None
    plain: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    plain |= {str(key): value for key, value in args.items() if value not in (None, {})}
    if plain.get("observer") in _PLAIN_OBSERVERS:
        del plain["observer"]
    if "strategy" not in plain:
        size = plain.get("group_size")
        plain["strategy"] = "tensor" if size is None else "group" if size > 0 else "channel"
    if plain.get("group_size") == -1:
        del plain["group_size"]
    if plain.get("scale_dtype") == plain.get("zp_dtype"):
        plain.pop("zp_dtype", None)
    return plain


def _strings(value: Any, key: str, path: str) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise UsageError(f"{key} is a pattern or a list of patterns", where=path, got=repr(value)[:60])
    return found
