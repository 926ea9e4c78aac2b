"""What a compressed-tensors checkpoint holds: the spelling of each matrix from its tensors, held against its
config group.

    weight_packed U8 + scale F8_E4M3 + global      nvfp4             weight F8_E4M3 + scale U8       mxfp8
    weight_packed U8 + scale U8                    mxfp4 or mxfp6    weight F8_E4M3 + float scale    fp8 by the
    scale's shape
    weight_packed I32 + weight_shape               intN groups       weight I8 + float scale         int8

Widths settle the rest: two codes in a byte and a scale for 32 of them is MXFP4, four in three bytes MXFP6. Only the
block of an FP8 matrix is the config's word, since a grid of ⌈N/rows⌉ does not give rows away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from narrowcast.containers.compressed_tensors.config import NAME, arguments
from narrowcast.containers.compressed_tensors.spellings import FLOATS, spell
from narrowcast.containers.contents import CacheScale, Contents, Source, Stored, contradiction, gather
from narrowcast.numbers.formats import E2M1, E2M3, E4M3FN, E8M0, FP32, INT8, Format, formats
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, Tile, tile_grid
from narrowcast.tensors.storage import stored_scheme

_SUFFIXES = (
    ".weight", ".weight_packed", ".weight_scale", ".weight_global_scale", ".weight_shape", ".weight_zero_point",
    ".input_scale", ".input_global_scale",
)  # fmt: skip
_CACHE = re.compile(r"^(.*)\.([qkv])_scale$")


def claims(source: Source) -> bool:
    """Whether the config names this container."""
    return source.config.get("quant_method") == NAME


def read(source: Source) -> Contents:
    """Every matrix with its spelling; CheckpointError where data and config disagree."""
    matrices = []
    for module, parts in gather(source.entries, _SUFFIXES).items():
        if ".weight_scale" in parts or ".weight_packed" in parts:
            matrices.append(_stored(source, module, parts))
    caches = [(match, name) for name in source.entries if (match := _CACHE.match(name))]
    return Contents(
        NAME,
        tuple(matrices),
        tuple(CacheScale(match[1], match[2], name) for match, name in caches),
        _kv(source),
    )


def _kv(source: Source) -> str | None:
    scheme = source.config.get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        return None
    return "fp8_head" if scheme.get("strategy") == "attn_head" else "fp8"


def _stored(source: Source, module: str, parts: Mapping[str, Entry]) -> Stored:
    group = _group(source, module)
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise contradiction(
            f"{module} is quantized, and no config group says so", source,
            got=", ".join(sorted(module + suffix for suffix in parts)), wanted="a config group whose targets match it",
        )  # fmt: skip
    shape, scheme = _scheme(source, module, parts, weights)
    told, found = _key(weights), _key(arguments(scheme, False, weight=True))
    if told != found:
        differ = sorted(key for key in found if told.get(key) != found[key])
        raise contradiction(
            f"{module}: its config group says something else than its tensors", source,
            got=", ".join(f"{key} {found[key]}" for key in differ) + " in the tensors",
            wanted=", ".join(f"{key} {told.get(key)}" for key in differ) + " as in the config",
        )  # fmt: skip
    inputs = group.get("input_activations")
    linear = LinearScheme(scheme)
    if isinstance(inputs, dict):
        static = ".input_scale" in parts or ".input_global_scale" in parts
        linear = LinearScheme(scheme, input_scheme(inputs), not static)
    return Stored(
        module, shape, spell(str(group.get("format") or source.config.get("format")), scheme, linear), linear
    )


def _scheme(
    source: Source, module: str, parts: Mapping[str, Entry], weights: Mapping[str, Any]
) -> tuple[tuple[int, int], Scheme]:
    """Shape [N, K] and scheme, from dtypes and shapes."""
    scale = parts.get(".weight_scale")
    packed = parts.get(".weight_packed")
    main = packed or parts.get(".weight")
    if scale is None or main is None:
        raise contradiction(
            f"{module} is not complete", source, got=", ".join(sorted(parts)),
            wanted="codes and weight_scale", remedy="download or copy the checkpoint again",
        )  # fmt: skip
    n = main.shape[0]
    if packed is not None and packed.dtype.name == "I32":
        return _integers(source, module, parts, weights)
    if packed is not None:
        if ".weight_global_scale" in parts:
            return (n, 2 * packed.shape[1]), stored_scheme(E2M1, (1, 16), E4M3FN, outer=True)
        k = 32 * scale.shape[1]
        element = E2M1 if 2 * packed.shape[1] == k else E2M3
        return (n, k), stored_scheme(element, (1, 32), E8M0)
    k = main.shape[1]
    if scale.dtype.name == "U8":
        return (n, k), stored_scheme(E4M3FN, (1, 32), E8M0)
    element = {"I8": INT8, "F8_E4M3": E4M3FN}.get(main.dtype.name)
    if element is None:
        raise contradiction(
            f"{module} has a scale and no quantized codes",
            source,
            got=main.dtype.name,
            wanted="I8 or F8_E4M3",
        )
    return (n, k), stored_scheme(element, _tile((n, k), scale, weights), _float(scale))


def _integers(
    source: Source, module: str, parts: Mapping[str, Entry], weights: Mapping[str, Any]
) -> tuple[tuple[int, int], Scheme]:
    bits = int(weights.get("num_bits") or 0)
    packed, scale = parts[".weight_packed"], parts[".weight_scale"]
    if ".weight_shape" not in parts:
        raise contradiction(
            f"{module} has packed codes without their shape",
            source,
            got="weight_packed",
            wanted="weight_shape beside it",
        )
    n, k = (int(size) for size in source.checkpoint.array(f"{module}.weight_shape").reshape(-1))
    if packed.shape != (n, -(-k * bits // 32)):
        raise contradiction(
            f"{module}: its codes do not have the width that the config says", source, got=list(packed.shape),
            wanted=f"[{n}, {-(-k * bits // 32)}] for {bits} bits",
        )  # fmt: skip
    asymmetric = ".weight_zero_point" in parts
    element = formats[f"{'uint' if asymmetric else 'int'}{bits}"]
    return (n, k), stored_scheme(
        element, _tile((n, k), scale, weights), _float(scale), zero=element if asymmetric else None
    )


def _tile(shape: tuple[int, int], scale: Entry, weights: Mapping[str, Any]) -> Tile:
    """The tile that the config names where the scales have its grid, else the one that their shape shows."""
    stored = tuple(size for size in scale.shape if size > 1)
    told = told_tile(weights)
    if told is not None and stored == tuple(size for size in tile_grid(shape, told) if size > 1):
        return told
    if not stored:
        return (0, 0)
    if stored == (shape[0],):
        return (1, 0)
    return 1, -(-shape[1] // scale.shape[-1])


def told_tile(args: Mapping[str, Any]) -> Tile | None:
    """The tile of a config's arguments, or None."""
    block, group = args.get("block_structure"), args.get("group_size")
    if isinstance(block, str):
        block = [int(size) for size in block.split("x")]
    if isinstance(block, list) and len(block) == 2:
        return int(block[0]), int(block[1])
    if isinstance(group, int) and group > 0:
        return 1, group
    strategy = args.get("strategy") or ("channel" if group == -1 else "tensor")
    return {"tensor": (0, 0), "channel": (1, 0), "token": (1, 0)}.get(str(strategy))


def _float(scale: Entry) -> Format:
    fmt = formats[DTYPES[scale.dtype.name].format or "fp32"]
    return fmt if fmt in FLOATS else FP32


def input_scheme(args: Mapping[str, Any]) -> Scheme:
    """The scheme of an activation from its arguments."""
    bits, kind = args.get("num_bits"), args.get("type")
    stored = "uint8" in str(args.get("scale_dtype") or "")
    if args.get("strategy") == "tensor_group":
        return stored_scheme(E2M1, (1, 16), E4M3FN, outer=True)
    element = {(8, "float"): E4M3FN, (6, "float"): E2M3, (4, "float"): E2M1}.get((bits, kind)) or formats[
        f"int{bits}"
    ]
    return stored_scheme(element, told_tile(args) or (0, 0), E8M0 if stored else FP32)


def _group(source: Source, module: str) -> Mapping[str, Any]:
    """The config group that takes a module: by name first, then by class."""
    groups = [g for g in (source.config.get("config_groups") or {}).values() if isinstance(g, dict)]
    for by_name in (True, False):
        for group in groups:
            if any(_takes(str(target), module, by_name) for target in group.get("targets") or ()):
                return group
    return {}


def _takes(target: str, module: str, by_name: bool) -> bool:
    if target.startswith("re:"):
        try:
            return by_name and re.match(target[3:], module) is not None
        except re.error:
            return False
    return target == module if by_name else target == "Linear"


def _key(args: Mapping[str, Any]) -> dict[str, Any]:
    """What of a group's arguments must agree with the data."""
    block = args.get("block_structure")
    keys: Iterator[tuple[str, Any]] = (
        (name, args.get(name)) for name in ("num_bits", "type", "symmetric", "strategy")
    )
    group = args.get("group_size")
    block_text = [int(size) for size in block.split("x")] if isinstance(block, str) else block
    return dict(keys) | {"group_size": None if group == -1 else group, "block_structure": block_text}
