"""What a Quark checkpoint holds: dtypes and shapes of its tensors, held against the spec of each layer.

    U8 weight + U8 scale          fp4 or fp6, by how many bits a code has      I32 weight           int4 or uint4
    U8 weight + F8_E4M3 scale     fp4 under fp8, two levels                    F8_E4M3 weight       fp8

Which of the two fp6, of int4 and uint4, and how large a block, is the config's word: the tensors look alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from narrowcast.containers.contents import (
    CacheScale,
    Contents,
    Source,
    Stored,
    contradiction,
    gather,
    refuse_implausible,
)
from narrowcast.containers.quark.config import config_of, specs
from narrowcast.containers.quark.spellings import (
    DTYPES,
    INPUTS,
    NAME,
    QUARK,
    REORDERED,
    STRAIGHT,
    from_words,
    spell,
)
from narrowcast.numbers.formats import E4M3FN, E8M0, FP32, formats
from narrowcast.store.folder import some
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, schemes
from narrowcast.tensors.storage import stored_scheme

_SUFFIXES = (
    ".weight", ".weight_scale", ".weight_scale_2", ".weight_zero_point", ".input_scale", ".input_scale_2",
)  # fmt: skip
_CACHE = re.compile(r"^(.*)\.(?:([qkv])_proj\.output_scale|(prob)_output_scale)$")
_ELEMENTS = {word: formats[name] for name, word in QUARK.items()}
_ORDERS = {"reorder": REORDERED, "order": STRAIGHT}
_KEYS = ("dtype", "qscheme", "group_size", "block_size", "is_dynamic")


def claims(source: Source) -> bool:
    """Whether the config names this container."""
    return source.config.get("quant_method") == NAME


def read(source: Source) -> Contents:
    """Every matrix with its spelling; CheckpointError where data and config disagree."""
    export = source.config.get("export")
    if not isinstance(export, dict) or str(export.get("pack_method", "reorder")) not in _ORDERS:
        raise contradiction(
            "the config does not say how integers are packed", source,
            got=f"export {export if export is None else export.get('pack_method')!r}",
            wanted="export with a pack_method of reorder or order",
        )  # fmt: skip
    matrices, taken = [], []
    for module, parts in gather(source.entries, _SUFFIXES).items():
        if ".weight" in parts and ".weight_scale" in parts:
            stored, trivial = _stored(source, module, parts)
            matrices.append(stored)
            taken += trivial
    caches = tuple(
        CacheScale(match[1], match[2] or match[3], name)
        for name in source.entries
        if (match := _CACHE.match(name))
    )
    outputs = [name for name in source.entries if name.endswith(".output_scale") and not _CACHE.match(name)]
    if outputs:
        raise contradiction(
            "outputs of layers are quantized, which no engine loads",
            source,
            got=some(outputs, 3),
            wanted="none",
        )
    kv = _kv(source, export)
    if caches and kv is None:
        raise contradiction(
            "scales of a KV cache that the config does not mention", source,
            got=some([scale.tensor for scale in caches], 3), wanted="a kv_cache_group with output_tensors",
        )  # fmt: skip
    notes = ("the config asks for a KV cache in FP8, and there are no scales: engines take 1.0",)
    return Contents(NAME, tuple(matrices), caches, kv, tuple(taken), notes if kv and not caches else ())


def _kv(source: Source, export: Mapping[str, Any]) -> str | None:
    """The outputs of the layers that the config's kv_cache_group names."""
    group, named = export.get("kv_cache_group"), source.config.get("layer_quant_config")
    if not isinstance(group, list) or not isinstance(named, dict):
        return None
    outputs = [
        config["output_tensors"]
        for name, config in named.items()
        if any(fnmatchcase(name, str(pattern)) for pattern in group)
        and isinstance(config, dict) and isinstance(config.get("output_tensors"), dict)
    ]  # fmt: skip
    kinds = sorted({f"{output.get('dtype')} {output.get('qscheme')}" for output in outputs})
    return ("fp8" if kinds == ["fp8_e4m3 per_tensor"] else ", ".join(kinds)) if kinds else None


def _stored(source: Source, module: str, parts: Mapping[str, Entry]) -> tuple[Stored, list[str]]:
    config = config_of(module, source.config)
    told = config.get("weight")
    if not isinstance(told, dict) and not (isinstance(told, list) and all(isinstance(s, dict) for s in told)):
        told = None
    if not told:
        raise contradiction(
            f"{module} is quantized, and the config says that it is not", source,
            got=", ".join(sorted(module + suffix for suffix in parts)), wanted="a weight spec for it",
        )  # fmt: skip
    first = told[0] if isinstance(told, list) else told
    shape, scheme = _scheme(source, module, parts, first)
    _agree(source, module, scheme, told)
    inputs, static = _input(source, module, config.get("input_tensors")), _static(parts)
    linear = LinearScheme(scheme) if inputs is None else LinearScheme(scheme, inputs, static is None)
    order = _ORDERS[str(source.config["export"].get("pack_method", "reorder"))]
    outer = parts.get(".weight_scale_2")
    how = spell(
        scheme, linear, order=order, zeros=False, static=static.dtype.name if static is not None else "F32",
        outer=outer.dtype.name if outer is not None else "F32",
    )  # fmt: skip
    stored = Stored(module, shape, how, linear)
    _check_shapes(source, stored)
    if len(scheme.scales) == 2:
        refuse_implausible(source, f"{module}.weight_scale_2", scheme.inner.format.max * scheme.element.max)
    return stored, _zeros(source, module, parts, scheme, order)


def _static(parts: Mapping[str, Entry]) -> Entry | None:
    return parts.get(".input_scale_2", parts.get(".input_scale"))


def _zeros(
    source: Source, module: str, parts: Mapping[str, Entry], scheme: Scheme, order: tuple[int, ...]
) -> list[str]:
    """The zero points of symmetric codes, which must be zeros."""
    name = f"{module}.weight_zero_point"
    if scheme.zero is not None or ".weight_zero_point" not in parts:
        return []
    values = source.checkpoint.array(name)
    if values.any():
        raise contradiction(
            f"{module} is symmetric and has zero points", source,
            got=f"zero points up to {from_words(values, order).max() if values.ndim == 2 else values.max()}",
            wanted="zeros, as the config's symmetric says",
        )  # fmt: skip
    return [name]


def _scheme(
    source: Source, module: str, parts: Mapping[str, Entry], told: Mapping[str, Any]
) -> tuple[tuple[int, int], Scheme]:
    """Shape [N, K] and scheme, from dtypes and shapes, and the config's word for what they do not show."""
    weight, scale = parts[".weight"], parts[".weight_scale"]
    element = _ELEMENTS.get(str(told.get("dtype")))
    kind, grid = weight.dtype.name, scale.shape
    scales = E8M0 if scale.dtype.name in ("U8", "F8_E8M0") else formats[scale.dtype.format or FP32.name]
    if element is None or len(weight.shape) != 2 or scales.name not in DTYPES:
        raise contradiction(
            f"{module} is quantized in a way that is not read", source,
            got=f"{told.get('dtype')} {list(weight.shape)} under {scale.dtype.name} scales",
            wanted=", ".join(_ELEMENTS),
        )  # fmt: skip
    n, k = weight.shape
    if kind == "I32" and element.bits == 4 and len(grid) == 2:
        n, k = 8 * weight.shape[1], weight.shape[0]
        zero = None if element.signed else element
        return (n, k), stored_scheme(element, (1, k // max(grid[0], 1)), scales, zero=zero)
    if kind == "U8" and len(grid) == 2 and grid[1]:
        group = 16 if scales is E4M3FN else 32
        k = group * grid[1]
        if 8 * weight.shape[1] == k * element.bits:
            return (n, k), stored_scheme(element, (1, group), scales, outer=scales is E4M3FN)
    if kind == "F8_E4M3" and element is E4M3FN:
        tile = (0, 0) if sum(grid) <= 1 else (1, 0) if grid == (n,) else _block(told, (n, k), grid)
        if tile is not None:
            return (n, k), stored_scheme(element, tile, scales)
    raise contradiction(
        f"{module}: its config says something else than its tensors", source,
        got=f"weight {kind} {list(weight.shape)}, weight_scale {scale.dtype.name} {list(grid)}",
        wanted=f"{told.get('dtype')} {told.get('qscheme')} as in the config",
    )  # fmt: skip


def _block(told: Mapping[str, Any], shape: tuple[int, int], grid: tuple[int, ...]) -> tuple[int, int] | None:
    """The config's block or group, where the scales have its grid."""
    size = told.get("block_size") or [1, told.get("group_size") or 0]
    if len(size) == 2 and all(isinstance(s, int) and s > 0 for s in size):
        rows, cols = (int(s) for s in size)
        if grid == (-(-shape[0] // rows), -(-shape[1] // cols)):
            return rows, cols
    return None


def _agree(source: Source, module: str, scheme: Scheme, told: Any) -> None:
    """The config's spec against the one that these tensors would have."""
    found = specs(scheme, False, weight=True)
    ours: list[Mapping[str, Any]] = [*found] if isinstance(found, list) else [found]
    theirs: list[Mapping[str, Any]] = [*told] if isinstance(told, list) else [told]
    keys = [[tuple(_plain(one.get(key)) for key in _KEYS) for one in side] for side in (ours, theirs)]
    if keys[0] != keys[1]:
        raise contradiction(
            f"{module}: its config says something else than its tensors", source,
            got=f"{_said(ours)} in the tensors", wanted=f"{_said(theirs)} as in the config",
        )  # fmt: skip


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value or None


def _said(side: list[Mapping[str, Any]]) -> str:
    sizes = [one.get("group_size") or one.get("block_size") or "" for one in side]
    words = [
        f"{one.get('dtype')} {one.get('qscheme')} {size}".rstrip()
        for one, size in zip(side, sizes, strict=True)
    ]
    return " under ".join(words)


def _input(source: Source, module: str, told: Any) -> Scheme | None:
    if not told:
        return None
    one = [spec if isinstance(spec, dict) else {} for spec in (told if isinstance(told, list) else [told])]
    for name in INPUTS:
        scheme = schemes[name]
        wanted = specs(scheme, True, weight=False)
        ours = wanted if isinstance(wanted, list) else [wanted]
        keys = _KEYS[:-1]
        if [[_plain(x.get(key)) for key in keys] for x in ours] == [
            [_plain(x.get(key)) for key in keys] for x in one
        ]:
            return scheme
    raise contradiction(
        f"{module} has inputs that are quantized in a way that is not read", source, got=_said(one),
        wanted=", ".join(INPUTS),
    )  # fmt: skip


def _check_shapes(source: Source, stored: Stored) -> None:
    wanted = {spec.name: spec for spec in stored.how.specs(stored.place, stored.shape[1])}
    for name, spec in wanted.items():
        entry = source.entries.get(name)
        one = entry is not None and prod(entry.shape) == prod(spec.shape) == 1
        if entry is None or (tuple(entry.shape) != tuple(spec.shape) and not one):
            raise contradiction(
                f"{stored.module} is not complete", source,
                got=f"{name} {'missing' if entry is None else list(entry.shape)}", wanted=f"{list(spec.shape)}",
                remedy="download or copy the checkpoint again",
            )  # fmt: skip
