"""What a compressed-tensors checkpoint holds: the spelling of each matrix from its tensors, held against its
config group.

    weight_packed U8 + scale F8_E4M3 + global      nvfp4             weight F8_E4M3 + scale U8       mxfp8
    weight_packed U8 + scale U8                    mxfp4 or mxfp6    weight F8_E4M3 + float scale    fp8 by the
    scale's shape
    weight_packed I32 + weight_shape               intN groups       weight I8 + float scale         intN

Widths settle the rest: two codes in a byte and a scale for 32 of them is MXFP4, four in three bytes MXFP6. The config's
word alone are the block of an FP8 matrix, since a grid of ⌈N/rows⌉ does not give rows away, and the width of integers
that each fill a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from narrowcast.containers.compressed_tensors.cache import cache_of
from narrowcast.containers.compressed_tensors.config import NAME, arguments
from narrowcast.containers.compressed_tensors.groups import Group, Groups
from narrowcast.containers.compressed_tensors.spellings import FLOATS, spell
from narrowcast.containers.compressed_tensors.transforms import transforms
from narrowcast.containers.contents import Contents, Source, Stored, contradiction, gather
from narrowcast.containers.spelling import Array
from narrowcast.errors import CheckpointError
from narrowcast.numbers.formats import E2M1, E2M3, E4M3FN, E8M0, FP32, Format, formats
from narrowcast.store.checkpoint import text_config
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, Tile, schemes, tile_grid
from narrowcast.tensors.storage import stored_scheme

_SUFFIXES = (
    ".weight", ".weight_packed", ".weight_scale", ".weight_global_scale", ".weight_shape", ".weight_zero_point",
    ".weight_g_idx", ".input_scale", ".input_global_scale", ".input_zero_point",
)  # fmt: skip
_SPARSE = ("sparse-bitmask", "sparse-24-bitmask", "marlin-24")
_FLOATS = {4: E2M1, 6: E2M3, 8: E4M3FN}
_KEYS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")


def claims(source: Source) -> bool:
    """Whether the config names this container, or is one of before it was named."""
    method = source.config.get("quant_method")
    return method == NAME or (method is None and {"config_groups", "format"} <= source.config.keys())


def read(source: Source) -> Contents:
    """Every matrix with its spelling; CheckpointError where data and config disagree."""
    _refuse_two(source)
    _refuse_sparse(source)
    groups = Groups.of(source)
    matrices, taken = [], []
    for module, parts in gather(source.entries, _SUFFIXES).items():
        if ".weight_scale" in parts or ".weight_packed" in parts:
            stored, trivial = _stored(source, groups, module, parts)
            matrices.append(stored)
            taken += trivial
    names = [stored.module for stored in matrices]
    groups.refuse_ignored(source, names)
    online, fused = transforms(source)
    cache = cache_of(source, groups)
    notes = list(cache.notes)
    if fused:
        notes.append(
            f"transforms {', '.join(fused)} are in the weights already; a conversion does not mention them"
        )
    if source.config.get("moe_sparsity_config"):
        notes.append("moe_sparsity_config stays behind in a conversion")
    return Contents(
        NAME,
        tuple(matrices),
        cache.scales,
        cache.scheme,
        (*taken, *cache.taken),
        tuple(notes),
        online=online,
        takes=groups.takes,
    )


def _refuse_two(source: Source) -> None:
    """Refuse a config that has two different blocks, in the places where versions of the library wrote them."""
    config = source.checkpoint.config or {}
    text = text_config(config)
    parts = {"": config} if text is config else {"": config, "the text model's ": text}
    found = [
        (f"{where}{key}", block)
        for where, part in parts.items()
        for key in ("quantization_config", "compression_config")
        if isinstance(block := part.get(key), Mapping)
    ]
    for (first, one), (name, other) in pairwise(found):
        differ = [key for key in ("config_groups", "format") if one.get(key) != other.get(key)]
        if differ:
            raise contradiction(
                "the quantization configs disagree", source, got=f"{', '.join(differ)} of {first}",
                wanted=f"the same in {name}", remedy="remove the one that the tensors do not follow",
            )  # fmt: skip


def _refuse_sparse(source: Source) -> None:
    config = source.config
    told = [config.get("format"), (config.get("sparsity_config") or {}).get("format")]
    told += [
        group.get("format")
        for group in (config.get("config_groups") or {}).values()
        if isinstance(group, Mapping)
    ]
    sparse = [name for name in told if name in _SPARSE]
    if sparse:
        raise CheckpointError(
            "sparse weights are not read", where=source.checkpoint.root, got=sparse[0], wanted="dense codes",
            remedy="decompress the checkpoint with compressed-tensors 0.14, the last that could",
        )  # fmt: skip


def _stored(
    source: Source, groups: Groups, module: str, parts: Mapping[str, Entry]
) -> tuple[Stored, list[str]]:
    """A matrix, and tensors of it that say nothing more."""
    group = groups.taking(module)
    if group is None or group.weights is None:
        raise contradiction(
            f"{module} is quantized, and no config group says so", source,
            got=", ".join(sorted(module + suffix for suffix in parts)), wanted="a config group whose targets match it",
        )  # fmt: skip
    shape, scheme = _scheme(source, module, parts, group.weights)
    found = arguments(scheme, False, weight=True)
    differ = [key for key in _KEYS if group.weights.get(key) != found.get(key)]
    if differ:
        raise contradiction(
            f"{module}: its config group says something else than its tensors", source,
            got=", ".join(f"{key} {found.get(key)}" for key in differ) + " in the tensors",
            wanted=", ".join(f"{key} {group.weights.get(key)}" for key in differ) + " as in the config",
        )  # fmt: skip
    label = _label(source, module, group, scheme, parts)
    order = _order(source, module, parts, scheme, shape[1])
    taken = [f"{module}.weight_g_idx"] if order is None and ".weight_g_idx" in parts else []
    linear, more = _linear(source, module, group, scheme, parts)
    given = parts.get(".input_global_scale") or parts.get(".input_scale")
    how = spell(label, scheme, linear, input_dtype=given.dtype.name if given else "F32", order=order)
    return Stored(module, shape, how, linear), taken + more


def _label(source: Source, module: str, group: Group, scheme: Scheme, parts: Mapping[str, Entry]) -> str:
    """The format that the tensors have, with what the config calls it."""
    if ".weight_packed" not in parts:
        fits = ("mxfp8-quantized",) if scheme.inner.format is E8M0 else ("float-quantized", "naive-quantized")
        fits = fits if scheme.element is E4M3FN else ("int-quantized",)
    elif parts[".weight_packed"].dtype.name == "I32":
        fits = ("pack-quantized",)
    elif scheme.inner.format is E8M0:
        fits = (f"mxfp{scheme.element.bits}-pack-quantized",)
    else:
        fits = ("nvfp4-pack-quantized",)
    told = group.format or source.config.get("format")
    if told in (None, "mixed-precision"):
        return fits[0] if group.inputs is not None else fits[-1]
    if told not in fits:
        raise contradiction(
            f"{module} is not in the format that the config names", source, got=f"tensors of {' or '.join(fits)}",
            wanted=f"{told}, as the config says",
        )  # fmt: skip
    return str(told)


def _scheme(
    source: Source, module: str, parts: Mapping[str, Entry], weights: Mapping[str, Any]
) -> tuple[tuple[int, int], Scheme]:
    """Shape [N, K] and scheme, from dtypes and shapes."""
    scale = parts.get(".weight_scale")
    packed = parts.get(".weight_packed")
    main = packed or parts.get(".weight")
    if scale is None or main is None or len(main.shape) != 2:
        raise contradiction(
            f"{module} is not complete", source, got=", ".join(sorted(parts)),
            wanted="codes and weight_scale", remedy="download or copy the checkpoint again",
        )  # fmt: skip
    n, k = main.shape
    if 0 in (n, *scale.shape) or (packed is not None and not scale.shape):
        raise contradiction(
            f"{module} has scales that belong to no codes", source, got=f"weight_scale {list(scale.shape)}",
            wanted=f"scales of a matrix of {n} rows",
        )  # fmt: skip
    if packed is not None and packed.dtype.name == "I32":
        return _packed_integers(source, module, parts, weights)
    if packed is not None:
        if ".weight_global_scale" in parts:
            return (n, 2 * k), stored_scheme(
                E2M1, (1, 16), E4M3FN, outer=True, divides=_divides(source, module)
            )
        columns = 32 * scale.shape[-1]
        return (n, columns), stored_scheme(E2M1 if 2 * k == columns else E2M3, (1, 32), E8M0)
    if scale.dtype.name == "U8":
        return (n, k), stored_scheme(E4M3FN, (1, 32), E8M0)
    tile = _tile((n, k), scale, weights)
    if main.dtype.name == "I8":
        return (n, k), _integers(parts, weights, tile, _float(scale))
    if main.dtype.name != "F8_E4M3":
        raise contradiction(
            f"{module} has a scale and no quantized codes",
            source,
            got=main.dtype.name,
            wanted="I8 or F8_E4M3",
        )
    return (n, k), stored_scheme(E4M3FN, tile, _float(scale))


def _divides(source: Source, module: str) -> bool:
    """Whether a global scale must stay the divisor that it is: the reciprocal of all but powers of two is rounded."""
    divisor = source.checkpoint.array(f"{module}.weight_global_scale").reshape(-1)
    if divisor.size != 1 or not (np.isfinite(divisor[0]) and divisor[0] > 0):
        raise CheckpointError(
            f"{module} has no global scale that divides", where=source.checkpoint.root,
            got=", ".join(f"{value:g}" for value in divisor[:3]) or "no number", wanted="one positive number",
        )  # fmt: skip
    return bool(np.frexp(divisor[0])[0] != 0.5)


def _packed_integers(
    source: Source, module: str, parts: Mapping[str, Entry], weights: Mapping[str, Any]
) -> tuple[tuple[int, int], Scheme]:
    bits = int(weights["num_bits"])
    packed, scale = parts[".weight_packed"], parts[".weight_scale"]
    if ".weight_shape" not in parts:
        raise contradiction(
            f"{module} has packed codes without their shape", source, got="weight_packed",
            wanted="weight_shape beside it",
        )  # fmt: skip
    told = [int(size) for size in source.checkpoint.array(f"{module}.weight_shape").reshape(-1)]
    if len(told) != 2 or min(told) < 0 or len(packed.shape) != 2:
        raise contradiction(
            f"{module} has a weight_shape that is none", source, got=told, wanted="[rows, columns] of its matrix",
        )  # fmt: skip
    n, k = told
    if packed.shape != (n, -(-k * bits // 32)):
        raise contradiction(
            f"{module}: its codes do not have the width that the config says", source, got=list(packed.shape),
            wanted=f"[{n}, {-(-k * bits // 32)}] for {bits} bits",
        )  # fmt: skip
    return (n, k), _integers(parts, weights, _tile((n, k), scale, weights), _float(scale))


def _integers(parts: Mapping[str, Entry], weights: Mapping[str, Any], tile: Tile, scale: Format) -> Scheme:
    """Integers of the config's width: signed, or with zero points where the file has them."""
    asymmetric = ".weight_zero_point" in parts
    element = element_of({**weights, "type": "int"}, signed=not asymmetric)
    return stored_scheme(element, tile, scale, zero=element if asymmetric else None)


def _order(source: Source, module: str, parts: Mapping[str, Entry], scheme: Scheme, k: int) -> Array | None:
    """The columns group by group, or None where that is how they lie."""
    if ".weight_g_idx" not in parts:
        return None
    g_idx = source.checkpoint.array(f"{module}.weight_g_idx").astype(np.int64)
    groups = np.arange(k) // (scheme.group or k)
    if g_idx.shape == (k,) and ((g_idx == groups).all() or (g_idx == -1).all()):
        return None
    order = np.argsort(g_idx, kind="stable")
    if g_idx.shape != (k,) or not (g_idx[order] == groups).all() or ".weight_packed" not in parts:
        raise contradiction(
            f"{module}: its g_idx is no grouping of its columns", source, got=f"weight_g_idx {list(g_idx.shape)}",
            wanted=f"{scheme.group} columns of {k} in each group",
        )  # fmt: skip
    return order


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
    """The tile of whole arguments, or None."""
    block, group, strategy = args.get("block_structure"), args.get("group_size"), args.get("strategy")
    if isinstance(block, list) and len(block) == 2:
        return int(block[0]), int(block[1])
    if isinstance(group, int) and group > 0:
        return 1, group
    return {"tensor": (0, 0), "channel": (1, 0), "token": (1, 0)}.get(str(strategy))


def _float(scale: Entry) -> Format:
    fmt = formats[DTYPES[scale.dtype.name].format or "fp32"]
    return fmt if fmt in FLOATS else FP32


def _linear(
    source: Source, module: str, group: Group, scheme: Scheme, parts: Mapping[str, Entry]
) -> tuple[LinearScheme, list[str]]:
    """What a layer computes, and an input's zero point that is only zero."""
    given = [suffix for suffix in (".input_scale", ".input_global_scale") if suffix in parts]
    inputs = group.inputs
    # A layer's weight is the same whichever way its outer scale is held.
    weight = schemes["nvfp4"] if len(scheme.scales) == 2 else scheme
    wants = inputs is not None and inputs["dynamic"] in (False, "local")
    expected = (
        ".input_global_scale"
        if inputs is not None and inputs["strategy"] == "tensor_group"
        else ".input_scale"
    )
    if given != ([expected] if wants else []):
        raise contradiction(
            f"{module}: config and tensors disagree about its input", source,
            got=", ".join(name[1:] for name in given) or "no input scale",
            wanted=expected[1:] if wants else "none, as the config says",
        )  # fmt: skip
    if inputs is None:
        return LinearScheme(weight), []
    zero = parts.get(".input_zero_point")
    symmetric = bool(inputs["symmetric"])
    if symmetric and zero is not None and source.checkpoint.array(zero.name).any():
        raise contradiction(
            f"{module}: the config says that inputs are symmetric", source, got="input_zero_point other than 0",
            wanted="symmetric false",
        )  # fmt: skip
    if not symmetric and wants and zero is None:
        raise contradiction(
            f"{module}: config and tensors disagree about its input", source, got="no input_zero_point",
            wanted="one, as symmetric false says",
        )  # fmt: skip
    taken = [zero.name] if zero is not None and symmetric else []
    return LinearScheme(weight, input_scheme(inputs), not wants), taken


def element_of(args: Mapping[str, Any], *, signed: bool = True) -> Format:
    """The element that whole arguments name. CheckpointError for one that there is not."""
    bits, kind = args["num_bits"], args["type"]
    found = _FLOATS.get(bits) if kind == "float" else None
    if kind == "int":
        found = formats.get(f"{'int' if signed else 'uint'}{bits}")
    if found is None:
        raise CheckpointError(
            "a config group names an element that there is not", where="config.json config_groups",
            got=f"{kind} of {bits} bits", wanted=f"int, or float of {', '.join(map(str, _FLOATS))} bits",
        )  # fmt: skip
    return found


def input_scheme(args: Mapping[str, Any]) -> Scheme:
    """The scheme of an activation from its whole arguments."""
    if args["strategy"] == "tensor_group":
        return schemes["nvfp4"]
    element = element_of(args)
    scale = E8M0 if "uint8" in str(args.get("scale_dtype") or "") else FP32
    return stored_scheme(
        element, told_tile(args) or (0, 0), scale, zero=None if args["symmetric"] else element
    )
