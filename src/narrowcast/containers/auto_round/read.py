"""What an auto-round checkpoint holds: data first, held against the settings of each module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from narrowcast.containers.auto_round.config import BESIDE, NAME, settings
from narrowcast.containers.auto_round.spellings import AWQ, FLOATS, GPTQ, PLAIN_GPTQ, blocks, fp8, integers
from narrowcast.containers.beside import agreed
from narrowcast.containers.contents import Contents, Source, Stored, contradiction, gather
from narrowcast.containers.spelling import Spelling
from narrowcast.containers.words import SUFFIXES, Told, eights, find_awq, find_gptq
from narrowcast.numbers.formats import E2M1, E4M3FN, E8M0, FP32, formats
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, Tile, schemes, tile_grid
from narrowcast.tensors.storage import stored_scheme

_V2 = (PLAIN_GPTQ, "auto_round:gptqmodel")
_SAID = (
    "quant_method",
    "packing_format",
    "bits",
    "group_size",
    "sym",
    "data_type",
    "act_bits",
    "extra_config",
)
_SCALES = (".weight_scale", ".weight_scale_inv", ".weight_global_scale")
_W4A8 = (".act_scales", ".w_bf16_to_fp8_scale")
_MORE = (".weight", ".weight_packed", ".input_scale", ".input_global_scale", ".weight_zp", *_W4A8)


def claims(source: Source) -> bool:
    """Whether a config names this method."""
    return any(
        config.get("quant_method") == NAME for config in (source.config, source.beside.get(BESIDE, {}))
    )


def read(source: Source) -> Contents:
    """Every matrix with its spelling; CheckpointError where data and config disagree."""
    config = agreed(source, (BESIDE,), _SAID, _normal)
    matrices, behind = [], []
    for module, parts in gather(source.entries, (*SUFFIXES, *_SCALES, *_MORE)).items():
        if ".qweight" in parts or any(suffix in parts for suffix in _SCALES):
            matrices.append(_stored(source, module, parts, _said(source, module, config)))
            behind += [module + suffix for suffix in _W4A8 if suffix in parts]
    notes = (
        (f"{len(behind)} static scales of inputs, such as {behind[0]}, stay behind in a conversion",)
        if behind
        else ()
    )
    return Contents(NAME, tuple(matrices), taken=tuple(behind), notes=notes)


def _normal(source: Source, config: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in config.items() if value is not None}
    kind = str(found.get("data_type", "int"))
    found["data_type"] = "fp" if kind.startswith("fp") else kind
    return found


def _said(source: Source, module: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a module: its own by exact name, by the end of its name, or by a pattern; else the main ones."""
    extra = config.get("extra_config") or {}
    own = extra.get(module)
    if own is None:
        own = next((said for key, said in extra.items() if module.endswith(f".{key}")), None)
    if own is None:
        own = next(
            (
                said
                for key, said in extra.items()
                if re.search(r"[*+?^$()\[\]{}|\\]", key) and _finds(key, module)
            ),
            {},
        )
    said = {**config, **own}
    if int(said.get("bits", 4)) >= 16:
        raise contradiction(
            f"{module} is quantized, and the config says that it is not", source, got=f"tensors of {module}",
            wanted="a plain weight, as extra_config says with 16 bits",
        )  # fmt: skip
    return said


def _finds(pattern: str, module: str) -> bool:
    try:
        return re.search(pattern, module) is not None
    except re.error:
        return False


def _stored(source: Source, module: str, parts: Mapping[str, Entry], said: Mapping[str, Any]) -> Stored:
    if ".qweight" in parts:
        shape, how = _words(source, module, parts, said)
        return Stored(module, shape, how, LinearScheme(how.scheme))
    shape, scheme = _floats(source, module, parts, said)
    _check(source, module, said, scheme)
    static = ".input_scale" in parts or ".input_global_scale" in parts
    linear = LinearScheme(scheme, _inputs(source, module, said), not static)
    if scheme.inner.format in FLOATS:
        how = fp8(scheme, linear, parts[".weight_scale"].shape if ".weight_scale" in parts else None)
    else:
        how = blocks(scheme, linear)
    return Stored(module, shape, how, linear)


def _words(
    source: Source, module: str, parts: Mapping[str, Entry], said: Mapping[str, Any]
) -> tuple[tuple[int, int], Spelling]:
    """Integers in GPTQ's or AWQ's words."""
    form = said.get("packing_format", GPTQ)
    if form not in (GPTQ, AWQ, *_V2) or said["data_type"] != "int":
        raise contradiction(
            f"{module} holds words of integers", source, got=f"{module}.qweight",
            wanted=f"tensors of {said['data_type']} in {form}, as the config says",
        )  # fmt: skip
    if not isinstance(said.get("bits"), int) or not isinstance(said.get("group_size"), int):
        got = f"bits {said.get('bits')}, group_size {said.get('group_size')}"
        raise contradiction(
            f"{module}: the config does not say its groups", source, got=got, wanted="two numbers"
        )
    sym = bool(said.get("sym", True))
    if form != AWQ:
        version = 1 if form == GPTQ else 2
        labels = (f"packing_format {GPTQ}", f"packing_format {PLAIN_GPTQ}")
        found = find_gptq(source, module, parts, Told(said["bits"], said["group_size"], sym, version, labels))
        how = integers(form, found.scheme, version)
        return found.shape, replace(how, parts=found.parts)
    if sym and not eights(source, {module: parts}):
        raise contradiction(
            f"{module}: the config says symmetric, and its zero points differ", source,
            got="zero points other than 8", wanted="8 everywhere",
        )  # fmt: skip
    found = find_awq(source, module, parts, Told(said["bits"], said["group_size"], sym))
    return found.shape, integers(AWQ, found.scheme, 2)


def _floats(
    source: Source, module: str, parts: Mapping[str, Entry], said: Mapping[str, Any]
) -> tuple[tuple[int, int], Scheme]:
    """Shape [N, K] and scheme of FP8, MX or NVFP4, from dtypes and shapes."""
    block, scale = ".weight_scale_inv" in parts, parts.get(".weight_scale_inv") or parts.get(".weight_scale")
    codes = parts.get(".weight_packed") or parts.get(".weight")
    if codes is None or scale is None or len(codes.shape) != 2 or ".weight_zp" in parts:
        raise contradiction(
            f"{module} is not complete", source, got=", ".join(sorted(module + suffix for suffix in parts)),
            wanted="a matrix of codes and its scale, without zero points",
        )  # fmt: skip
    n, k = codes.shape
    dtypes = codes.dtype.name, scale.dtype.name
    if dtypes == ("U8", "U8"):
        return (n, 2 * k), _sized(source, module, stored_scheme(E2M1, (1, 32), E8M0), (n, 2 * k), scale)
    if dtypes == ("F8_E4M3", "U8"):
        return (n, k), _sized(source, module, stored_scheme(E4M3FN, (1, 32), E8M0), (n, k), scale)
    if dtypes == ("U8", "F8_E4M3") and ".weight_global_scale" in parts:
        outer = source.checkpoint.array(f"{module}.weight_global_scale").reshape(-1)
        divides = bool(
            (np.frexp(outer)[0] != 0.5).any()
        )  # the reciprocal of all but powers of two is rounded
        scheme = stored_scheme(E2M1, (1, 16), E4M3FN, outer=True, divides=divides)
        return (n, 2 * k), _sized(source, module, scheme, (n, 2 * k), scale)
    if dtypes[0] != "F8_E4M3" or dtypes[1] not in FLOATS.values():
        raise contradiction(
            f"{module}: no layout has these dtypes", source, got=f"codes {dtypes[0]} and scales {dtypes[1]}",
            wanted="F8_E4M3 under float or U8 scales, or U8 under U8 or F8_E4M3 scales",
        )  # fmt: skip
    size = said.get("group_size")
    tile: Tile = (
        (size[0], size[1]) if isinstance(size, list) and len(size) == 2 else (0, 0) if size == 0 else (1, 0)
    )
    if block != (tile[0] > 1):
        raise contradiction(
            f"{module}: its scale is not what group_size says", source,
            got="weight_scale_inv" if block else "weight_scale", wanted=f"that of group_size {size}",
        )  # fmt: skip
    fmt = formats[str(DTYPES[scale.dtype.name].format)]
    return (n, k), _sized(source, module, stored_scheme(E4M3FN, tile, fmt), (n, k), scale)


def _sized(source: Source, module: str, scheme: Scheme, shape: tuple[int, int], scale: Entry) -> Scheme:
    """The scheme, where its grid of scales has the stored shape."""
    grid = tile_grid(shape, scheme.inner.tile)
    flat = scheme.inner.tile in ((0, 0), (1, 0))
    if scale.shape != grid and not (flat and int(np.prod(scale.shape)) == grid[0] and len(scale.shape) < 2):
        raise contradiction(
            f"{module}: its scales do not have the shape of {scheme.name}", source, got=list(scale.shape),
            wanted=list(grid),
        )  # fmt: skip
    return scheme


def _check(source: Source, module: str, said: Mapping[str, Any], scheme: Scheme) -> None:
    """The config against the data."""
    found = settings(LinearScheme(scheme))
    told = {key: said.get(key, found[key] if key == "sym" else None) for key in found}
    kind = str(told["data_type"])
    told["data_type"] = next((base for base in ("mx_fp", "nv_fp") if kind.startswith(base)), kind)
    differ = sorted(key for key in found if told[key] != found[key])
    if differ:
        raise contradiction(
            f"{module}: the config says something else than its tensors", source,
            got=", ".join(f"{key} {found[key]}" for key in differ) + " in the tensors",
            wanted=", ".join(f"{key} {told[key]}" for key in differ) + " as in the config",
        )  # fmt: skip


def _inputs(source: Source, module: str, said: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a layer's inputs, as the config has it."""
    bits, kind, size = (
        int(said.get("act_bits") or 16),
        str(said.get("act_data_type") or ""),
        said.get("act_group_size"),
    )
    if bits >= 16:
        return None
    if kind.startswith("nv_fp") and bits == 4:
        return schemes["nvfp4"]
    if kind.startswith("mx_fp") and bits in (4, 8):
        return schemes["mxfp4" if bits == 4 else "mxfp8"]
    if kind.startswith("fp") and bits == 8:
        tile: Tile = (1, size) if isinstance(size, int) and size > 0 else (0, 0) if size == 0 else (1, 0)
        return stored_scheme(E4M3FN, tile, FP32)
    raise contradiction(
        f"{module}: its inputs are quantized in a way that is not known", source, got=f"{bits} bits of {kind}",
        wanted="fp8, mx_fp or nv_fp",
    )  # fmt: skip
