"""What a result says of itself beside its matrices: its config, and the scales of its KV cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from narrowcast.containers.container import Document, Group, Layers
from narrowcast.containers.spelling import Array, widened
from narrowcast.jobs.building import Builder
from narrowcast.jobs.cache_scales import CacheScales
from narrowcast.jobs.calibrated import Calibration, attentions, check_cache
from narrowcast.jobs.plan import Unit
from narrowcast.model.modules import Module
from narrowcast.model.resolve import Resolved
from narrowcast.tensors.presets import LinearScheme


def cache_values(builder: Builder) -> dict[Path, list[tuple[str, Array]]]:
    """KV cache scales under the names of the output's container, by the shard that they were in. Those that the result
    cannot have are left out, and the builder's fallbacks say so. Calibrated ones lie beside the projections of keys."""
    if builder.calibration is not None and builder.calibration.kv is not None:
        return _calibrated(builder, builder.calibration, builder.calibration.kv)
    scales, cache = builder.opened.contents.cache_scales, builder.container.cache
    found: dict[Path, list[tuple[str, Array]]] = {}
    if scales and (cache is None or _kv(builder) is None):
        builder.fallbacks.append(
            f"{scales[0].attention}: {builder.container.name} has no scales of "
            f"{'a' if cache is None else 'such a'} KV cache; {len(scales)} were left out"
        )
        return {}
    for scale in scales:
        assert cache is not None
        entry = builder.checkpoint.entries[scale.tensor]
        value = widened(builder.checkpoint.array(scale.tensor).reshape(-1), entry.dtype.name)
        shape = cache.shape if value.size == 1 else (value.size, 1, 1)
        name = scale.attention + cache.suffixes.get(scale.which, f".{scale.which}_scale")
        found.setdefault(entry.path, []).append((name, value.reshape(shape)))
    return found


def _calibrated(builder: Builder, found: Calibration, kv: str) -> dict[Path, list[tuple[str, Array]]]:
    cache = check_cache(builder.container, kv)
    keys = attentions(builder.modules, builder.checkpoint.root)
    values: dict[Path, list[tuple[str, Array]]] = {}
    for path, tensors in CacheScales.of(found.stats, found.stat, kv).tensors(cache, keys).items():
        values.setdefault(builder.opened.entries[keys[path].tensor].path, []).extend(tensors.items())
    return values


def describe(builder: Builder, resolved: Resolved) -> Document:
    """The config: groups of equal linear schemes, and every other linear module by exact name."""
    groups: dict[tuple[LinearScheme, str], list[Unit]] = {}
    for unit in builder.units:
        if unit.linear is not None:
            groups.setdefault((unit.linear, unit.how.format), []).append(unit)
    listed = tuple(
        Group(linear, units[0].how, tuple(u.module for u in units)) for (linear, _), units in groups.items()
    )
    names = [unit.module for unit in builder.units]
    ignore = _kept(builder, resolved, set(names))
    container = builder.container
    assert container.document is not None
    asked = _asked(builder)
    kv = _kv(builder)
    if kv != asked and container.cache is not None:
        builder.fallbacks.append(
            f"config: {container.name} has no KV cache scheme {asked}; it is not asked for"
        )
    config = builder.checkpoint.config or {}
    embeddings = frozenset(unit.module for unit in builder.units if unit.role == "embedding")
    return container.document(Layers(listed, (*names, *ignore), tuple(ignore), kv, config, embeddings))


def _kept(builder: Builder, resolved: Resolved, inside: set[str]) -> list[str]:
    taken = {unit.source.tensor for unit in builder.units}
    return kept_names([assignment.module for assignment in resolved.assignments], taken, inside)


def kept_names(modules: Sequence[Module], taken: set[str], inside: set[str]) -> list[str]:
    """What a config ignores: linear modules by name, stacks of experts and absent heads by what engines call them.
    ``taken`` are tensors of quantized modules, ``inside`` the names that these have."""
    kept = [module for module in modules if module.tensor not in taken]
    linear = [module for module in kept if module.kind == "Linear" and module.experts is None]
    ignore = [module.name for module in linear if module.name not in inside]
    # Engines build the modules of stacked experts themselves, so a kept stack is ignored by its path.
    stacks = [module.name for module in kept if module.experts is not None]
    ignore += dict.fromkeys(f"re:^{re.escape(name.rsplit('.', 1)[0])}\\..*" for name in stacks)
    heads = [head for module in modules if (head := module.tied) is not None and head not in ignore]
    return ignore + [head for head in heads if "embed" not in head and head not in inside]


def _kv(builder: Builder) -> str | None:
    """The scheme of the KV cache that the result asks for."""
    kv, container = _asked(builder), builder.container
    return kv if container.cache is not None and kv in container.cache_schemes else None


def _asked(builder: Builder) -> str | None:
    """The scheme of the KV cache that a preset asks for, or the source."""
    found = builder.calibration.kv if builder.calibration is not None else None
    return found or builder.opened.contents.kv
