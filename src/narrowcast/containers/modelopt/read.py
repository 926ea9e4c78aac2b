"""What a ModelOpt checkpoint holds: the scheme of each matrix from its tensors, held against its label.

    U8 weight + F8_E4M3 scale    nvfp4              F8_E4M3 weight + U8 scale       mxfp8
    U8 weight + U8 scale         mxfp4              F8_E4M3 weight + float scale    fp8: [] tensor, [N] channel,
    U8 weight + float scale      int4 in two rows                                   [n, 1, k, 1] blocks
    I8 weight + float scale      int8

The size of FP8 blocks stands nowhere: they are those of 128 that engines take where the grid of scales is theirs, else
what divides the matrix evenly. A weight_scale_2 above 1 would make weights of thousands and is refused: it is a
divisor from another container.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from narrowcast.containers.contents import (
    CacheScale,
    Contents,
    Source,
    Stored,
    contradiction,
    gather,
    refuse_implausible,
)
from narrowcast.containers.modelopt.config import BESIDE, KV, MIXED, Labels, excluded, labels
from narrowcast.containers.modelopt.spellings import ALGORITHMS, BLOCK, NAME, Algorithm, spell
from narrowcast.containers.spelling import Spelling, widened
from narrowcast.numbers.formats import E2M1, E4M3FN, E8M0, FP32, INT4, INT8, Format, formats
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.folder import some
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, Tile, tile_grid
from narrowcast.tensors.storage import stored_scheme

_SUFFIXES = (".weight", ".weight_scale", ".weight_scale_2", ".input_scale", ".pre_quant_scale")
_THIN = re.compile(r"\.svdquant_lora_[ab]$")
_CACHE = re.compile(r"^(.*?)(?:\.(?:q|k|v|qkv)_proj)?\.([qkv])_scale$")
_BIAS = re.compile(r"\.[kv]_bias$")
_FLOATS = ("F32", "BF16", "F16")


def claims(source: Source) -> bool:
    """Whether either config names this container."""
    named = str(source.config.get("quant_method") or "").lower().startswith(NAME)
    beside = source.beside.get(BESIDE, {})
    return named or isinstance(beside.get("quantization"), dict)


def read(source: Source) -> Contents:
    """Every matrix with its spelling; CheckpointError where data and configs disagree."""
    if source.config and not str(source.config.get("quant_method") or NAME).lower().startswith(NAME):
        raise contradiction(
            f"config.json and {BESIDE} name two quantization methods", source, got=source.config["quant_method"],
            wanted=NAME, remedy="remove the one that the tensors do not follow",
        )  # fmt: skip
    said = labels(source)
    thin = [name for name in source.entries if _THIN.search(name)]
    if thin or said.algorithm == "NVFP4_SVD":
        raise contradiction(
            "NVFP4_SVD adds a product of two thin matrices to each weight, which is not read", source,
            got=some(thin, 3) or said.algorithm, wanted="weights that are codes and scales alone",
            remedy="start from the checkpoint before its SVD",
        )  # fmt: skip
    matrices, taken = [], []
    for module, parts in gather(source.entries, _SUFFIXES).items():
        if ".weight" in parts and ".weight_scale" in parts:
            stored, trivial = _stored(source, module, parts, said)
            matrices.append(stored)
            taken += trivial
    quantized = {stored.module for stored in matrices}
    _refuse_unquantized(source, said, quantized)
    caches = tuple(
        CacheScale(match[1], match[2], name) for name in source.entries if (match := _CACHE.match(name))
    )
    taken += [name for name in source.entries if said.kv == "NVFP4_AFFINE" and _BIAS.search(name)]
    kv = KV.get(said.kv, said.kv.lower()) if said.kv else None
    return Contents(
        NAME, tuple(matrices), caches, kv, tuple(taken), tuple(_notes(source, said, quantized, len(caches))),
        frozenset({BESIDE}),
    )  # fmt: skip


def _notes(source: Source, said: Labels, quantized: set[str], caches: int) -> list[str]:
    notes = []
    if said.kv and not caches:
        notes.append(f"the config asks for a {said.kv} KV cache, and there are no scales: engines take 1.0")
    if caches and not said.kv:
        notes.append(f"{caches} scales of a KV cache, and no config asks for one")
    kinds = {name.rpartition(".")[2] for name in quantized}
    wide = [
        name.removesuffix(".weight")
        for name, entry in source.entries.items()
        if name.endswith(".weight") and entry.dtype.name in _FLOATS and len(entry.shape) == 2
        and (module := name.removesuffix(".weight")).rpartition(".")[2] in kinds
        and module not in quantized and not excluded(module, said.exclude)
    ]  # fmt: skip
    if wide and said.algorithm != MIXED:
        notes.append(
            f"{len(wide)} layers are not quantized, and the config does not exclude them: {some(wide, 3)}"
        )
    return notes


def _refuse_unquantized(source: Source, said: Labels, quantized: set[str]) -> None:
    wide = [
        name
        for name, (algorithm, _) in said.layers.items()
        if algorithm and name not in quantized and f"{name}.weight" in source.entries
    ]
    if wide:
        raise contradiction(
            "quantized_layers names modules that are not quantized", source, got=f"no scales of {some(wide, 3)}",
            wanted=f"{said.layers[wide[0]][0]} as in {said.where}",
        )  # fmt: skip


def _stored(
    source: Source, module: str, parts: Mapping[str, Entry], said: Labels
) -> tuple[Stored, list[str]]:
    shape, scheme = _scheme(source, module, parts)
    row = _row(source, module, scheme, said)
    static, half = ".input_scale" in parts, "NVFP4" if said.wide else ""
    if half and row.name == half:
        row = ALGORITHMS["W4A16_NVFP4"]
    linear = row.linear(scheme, static)
    if row.name == "fp8_pb_wo" and scheme.inner.tile != BLOCK:
        linear = LinearScheme(scheme)  # no engine loads these, and their name says that inputs stay wide
    how, trivial = _spelled(source, module, parts, row, linear)
    if len(scheme.scales) == 2:
        refuse_implausible(source, f"{module}.weight_scale_2", scheme.inner.format.max * scheme.element.max)
    return Stored(module, shape, how, linear), trivial


def _spelled(
    source: Source, module: str, parts: Mapping[str, Entry], row: Algorithm, linear: LinearScheme
) -> tuple[Spelling, list[str]]:
    """The tensors of a module as they are there, and those of them that say nothing."""
    columns, trivial = parts.get(".pre_quant_scale"), []
    if columns is not None:
        values = widened(source.checkpoint.array(columns.name).reshape(-1), columns.dtype.name)
        if values.size and bool((values == 1).all()):
            trivial, columns = [columns.name], None
        elif (
            not row.name.endswith("_AWQ")
            or not bool(((values > 0) & np.isfinite(values)).all())
            or columns.dtype.name not in _FLOATS
        ):
            raise contradiction(
                f"{module} has a pre_quant_scale that its label does not go with", source,
                got=f"{values.size} values of {columns.dtype.name} from {values.min():.4g} to {values.max():.4g}",
                wanted=f"positive floats under an AWQ algorithm, not {row.name}",
            )  # fmt: skip
    if ".input_scale" in parts and row.input is None:
        trivial.append(f"{module}.input_scale")  # older exports of weight-only layers have one
    dtype = columns.dtype.name if columns is not None else None
    how = spell(row, linear.weight, ".input_scale" in parts and row.input is not None, dtype)
    absent = [
        name for name in how.names(Stored(module, (0, 0), how, linear).place) if name not in source.entries
    ]
    if absent:
        raise contradiction(
            f"{module} is not complete", source, got=", ".join(sorted(module + suffix for suffix in parts)),
            wanted=f"{some(absent, 3)} of {row.name}", remedy="download or copy the checkpoint again",
        )  # fmt: skip
    return how, trivial


def _row(source: Source, module: str, scheme: Scheme, said: Labels) -> Algorithm:
    """The label's algorithm, if the data are what it says."""
    name, group = said.of(module)
    row = ALGORITHMS.get(name)
    if name and row is None:
        raise contradiction(
            "the algorithm is not known", source, got=f"{name} in {said.where}", wanted=", ".join(ALGORITHMS)
        )
    if row is None or (said.algorithm != MIXED and excluded(module, said.exclude)):
        raise contradiction(
            f"{module} is quantized, and {said.where} says that it is not", source, got=f"{scheme.name} in the tensors",
            wanted="no quantized layer that the config leaves out",
        )  # fmt: skip
    blocks = row.name == "fp8_pb_wo" and scheme.element is E4M3FN and scheme.inner.tile[0] > 1
    if not (row.holds(scheme) or blocks) or (group and scheme.group and group != scheme.group and not blocks):
        size = f" in groups of {group}" if group else ""
        raise contradiction(
            f"{module}: its label says something else than its tensors", source,
            got=f"{scheme.name} in the tensors", wanted=f"{name}{size} as in {said.where}",
        )  # fmt: skip
    return row


def _scheme(source: Source, module: str, parts: Mapping[str, Entry]) -> tuple[tuple[int, int], Scheme]:
    """Shape [N, K] and scheme, from dtypes and shapes."""
    weight, scale = parts[".weight"], parts[".weight_scale"]
    kind = (weight.dtype.name, "float" if scale.dtype.name in _FLOATS else scale.dtype.name)
    if len(weight.shape) != 2:
        raise contradiction(
            f"{module} is no matrix", source, got=list(weight.shape), wanted="[N, K], one for each expert"
        )
    n, k = weight.shape
    found: Scheme | None = None
    if kind == ("U8", "F8_E4M3") and len(scale.shape) == 2:
        k *= 2
        found = stored_scheme(E2M1, (1, _group(k, scale)), E4M3FN, outer=True)
    elif kind == ("U8", "U8") and len(scale.shape) == 2:
        k *= 2
        found = stored_scheme(E2M1, (1, _group(k, scale)), E8M0)
    elif kind == ("U8", "float") and len(scale.shape) == 2:
        n *= 2
        found = stored_scheme(INT4, (1, _group(k, scale)), _float(scale))
    elif kind == ("F8_E4M3", "U8") and len(scale.shape) == 2:
        found = stored_scheme(E4M3FN, (1, _group(k, scale)), E8M0)
    elif kind == ("F8_E4M3", "float"):
        found = stored_scheme(E4M3FN, _tile((n, k), scale), _float(scale))
    elif kind == ("I8", "float"):
        found = stored_scheme(INT8, _tile((n, k), scale), _float(scale))
    if found is None or not _grid_fits((n, k), found, scale):
        raise contradiction(
            f"{module} is quantized in no way of {NAME}", source,
            got=f"weight {weight.dtype.name} {list(weight.shape)}, weight_scale {scale.dtype.name} {list(scale.shape)}",
            wanted="codes with the scales of one of its algorithms",
        )  # fmt: skip
    return (n, k), found


def _grid_fits(shape: tuple[int, int], scheme: Scheme, scale: Entry) -> bool:
    grid = [size for size in tile_grid(shape, scheme.inner.tile) if size > 1]
    return grid == [size for size in scale.shape if size > 1]


def _group(k: int, scale: Entry) -> int:
    return -(-k // max(scale.shape[1], 1))


def _tile(shape: tuple[int, int], scale: Entry) -> Tile:
    """Tensor, channel or block, by the number of axes that the scales have."""
    if len(scale.shape) == 4:
        grid = (scale.shape[0], scale.shape[2])
        if grid == tile_grid(shape, BLOCK):
            return BLOCK
        rows, cols = (-(-size // max(count, 1)) for size, count in zip(shape, grid, strict=True))
        # One block along an axis may be larger than the matrix, which squares it.
        return (max(rows, cols) if grid[0] == 1 else rows, max(rows, cols) if grid[1] == 1 else cols)
    # A single scale in one axis belongs to the channel where there is one channel.
    return (0, 0) if sum(scale.shape) <= 1 and scale.shape != shape[:1] else (1, 0)


def _float(scale: Entry) -> Format:
    return formats[DTYPES[scale.dtype.name].format or FP32.name]
