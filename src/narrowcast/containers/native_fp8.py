"""Native FP8 (``quant_method: "fp8"``): E4M3 weights under one scale, or under a scale for each block.

    per tensor   weight F8_E4M3 [N, K], weight_scale ()                      w = code · scale
    block        weight F8_E4M3 [N, K], weight_scale_inv [⌈N/rows⌉, ⌈K/cols⌉]    w = code · scale_inv

Scales multiply, ``inv`` or not. They are floats, or powers of two: as E8M0, or held in floats where ``scale_fmt``
is ue8m0. A weight_scale_inv is a scalar where the config has no weight_block_size (transformers). Partial blocks at
the edges are stored as they are, with no padding; transformers finds the block as shape / grid, and so reads whole
blocks only. DeepSeek V4 calls a scale ``.scale`` and packs its routed experts as E2M1, two in a byte, under one E8M0
for 32 of them; transformers 5 saves experts as stacks, ``gate_up_proj`` [E, 2I, H] with ``gate_up_proj_scale_inv``.

Inputs are always quantized: per token or with the stored scale of the tensor, and under blocks in groups as wide.
vLLM and SGLang read a scale per tensor as ``weight_scale``, transformers as ``weight_scale_inv``; what is written is
the first. The config has no word for a KV cache: its scales are tensors, and engines are told by a flag.

Source: transformers 5.24 (integrations/finegrained_fp8.py), vLLM 0.32 (quantization/fp8.py). Left out: writing
packed E2M1 and stacks, for which one-by-one names do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from narrowcast.containers.caches import cache_scales
from narrowcast.containers.container import CacheSpelling, Container, Document, Layers
from narrowcast.containers.contents import Contents, Source, Stored, contradiction, gather
from narrowcast.containers.skipped import skipped_by
from narrowcast.containers.spelling import Part, Spelling, code_part, scale_part, value_part, widened
from narrowcast.errors import UsageError
from narrowcast.numbers.formats import BF16, E2M1, E4M3FN, E8M0, FP16, FP32, Format, formats
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.packing import BYTES, packing
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, Tile, schemes, tile_grid
from narrowcast.tensors.storage import stored_scheme

NAME = "fp8"
FLOATS = (BF16, FP16, FP32)
_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "e8m0": "F8_E8M0"}
_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", "_scale_inv")
_INPUTS = (".input_scale", ".activation_scale", "_activation_scale")
_CODES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "I8", "U8")
_GROUP = 32  # E2M1 codes that share a scale
_EXPERT = re.compile(r"\.experts\.")


def spelling(linear: LinearScheme, source: Format) -> Spelling:
    """E4M3 per tensor or in blocks, with the inputs that go with it; UsageError for anything else."""
    weight, inputs = linear.weight, linear.input
    rows, cols = weight.inner.tile
    scale, input_tile = weight.inner.format, inputs.inner.tile if inputs is not None else None
    plain = weight.element is E4M3FN and len(weight.scales) == 1 and (scale in FLOATS or scale is E8M0)
    fp8_input = inputs is not None and inputs.element is E4M3FN and len(inputs.scales) == 1
    per_tensor = (rows, cols) == (0, 0) and scale is not E8M0 and input_tile in ((1, 0), (0, 0))
    block = rows > 0 and cols > 0 and input_tile == (1, cols) and linear.dynamic
    if not (plain and fp8_input and (per_tensor or block)) or (linear.calibrated and input_tile != (0, 0)):
        computes = f"{weight.name} with {inputs.name if inputs is not None else 'wide'} inputs"
        raise UsageError(
            f"{NAME} cannot say {computes}",
            wanted="fp8 weights per tensor with fp8 inputs per token or tensor, or in blocks with groups as wide",
            remedy="the presets fp8_per_tensor, fp8_block and fp8_block_ue8m0 fit; compressed-tensors holds the others",
        )  # fmt: skip
    names = (".weight", ".weight_scale" if per_tensor else ".weight_scale_inv", ".input_scale")
    return _spell(weight, linear, names, ("F8_E4M3", _DTYPES[scale.name], "F32"), ())


def _spell(
    scheme: Scheme, linear: LinearScheme, names: tuple[str, str, str], dtypes: tuple[str, str, str],
    one: tuple[int, ...],
) -> Spelling:  # fmt: skip
    """The parts: suffixes and dtypes of codes, scale and input scale; ``one`` is the shape of a single scale."""
    how = BYTES if scheme.element.bits == 8 else packing(scheme.element.bits)
    parts: list[Part] = [code_part(names[0], dtypes[0], how)]
    if scheme.inner.tile == (0, 0):
        parts.append(value_part(names[1], "outer", one, dtype=dtypes[1]))
    else:
        parts.append(scale_part(names[1], dtypes[1], scheme))
    if linear.calibrated:
        parts.append(value_part(names[2], "input", one, dtype=dtypes[2]))
    return Spelling(NAME, f"{NAME}-{scheme.name}", scheme, how, tuple(parts))


def document(layers: Layers) -> Document:
    """The keys that vLLM, SGLang and transformers read; UsageError for layers that one such config cannot hold."""
    told: set[tuple[Tile, bool, bool]] = set()
    for group in layers.groups:
        linear = group.linear
        powers = E8M0 in (linear.weight.inner.format, linear.input.inner.format if linear.input else None)
        told.add((linear.weight.inner.tile, powers, linear.calibrated))
    if len(told) > 1:
        names = sorted({group.linear.weight.name for group in layers.groups})
        raise UsageError(
            f"{NAME} has one block size, scale format and kind of inputs for a whole model",
            got=", ".join(names) if len(names) > 1 else f"{names[0]} with static and dynamic inputs",
            wanted="one scheme", remedy="--to compressed-tensors holds mixtures",
        )  # fmt: skip
    kept = [_plain_name(name) for name in layers.ignore]
    for group in layers.groups:
        for name in group.names:
            by = skipped_by(name, kept)
            if by is not None:
                raise UsageError(
                    f"engines would keep {name}, because a kept layer has part of its name",
                    got=by, remedy="quantize both or keep both",
                )  # fmt: skip
    tile, powers, static = next(iter(told))
    config: dict[str, Any] = {"activation_scheme": "static" if static else "dynamic"}
    config |= {"modules_to_not_convert": kept, "quant_method": NAME}
    if powers:
        config["scale_fmt"] = "ue8m0"
    if tile != (0, 0):
        config["weight_block_size"] = list(tile)
    return Document(config)


def _plain_name(entry: str) -> str:
    """A kept module as a name: a pattern for everything under a path becomes the path, which engines match so."""
    return re.sub(r"\\(.)", r"\1", entry[4:].removesuffix(r"\..*")) if entry.startswith("re:^") else entry


@dataclass(frozen=True)
class _Told:
    """What the configs say."""

    block: Tile | None
    activation: str | None
    powers: bool
    scale_fmt: str | None
    experts: str
    kept: tuple[str, ...]
    converted: tuple[str, ...]

    @classmethod
    def of(cls, source: Source) -> _Told:
        config, model = source.config, source.checkpoint.config or {}
        if config.get("fmt") not in (None, "e4m3"):
            raise contradiction(
                "the config names a code that no engine reads", source, got=config["fmt"], wanted="e4m3"
            )
        default = "fp4" if str(model.get("model_type")).startswith("deepseek_v4") else "fp8"
        experts = config.get("expert_dtype") or model.get("expert_dtype") or default
        return cls(
            block_of(source), config.get("activation_scheme"),
            config.get("scale_fmt") == "ue8m0", config.get("scale_fmt"),
            "fp4" if config.get("store_dtype") == "mxfp4" else str(experts),
            tuple(config.get("ignored_layers") or config.get("modules_to_not_convert") or ()),
            tuple(config.get("modules_to_convert") or ()),
        )  # fmt: skip


def block_of(source: Source) -> Tile | None:
    """The block of weights that shares a scale, as the config says it; CheckpointError for what is none."""
    size = source.config.get("weight_block_size")
    if size is None:
        return None
    if not _is_block(size):
        raise contradiction(
            "weight_block_size is not a block", source, got=size, wanted="two positive numbers or null"
        )
    return size[0], size[1]


def _is_block(size: object) -> bool:
    return isinstance(size, list) and len(size) == 2 and all(type(x) is int and x > 0 for x in size)


def claims(source: Source) -> bool:
    """Whether the config names this method."""
    return source.config.get("quant_method") == NAME


def read(source: Source) -> Contents:
    """Every matrix with its spelling; CheckpointError where data and config disagree."""
    told = _Told.of(source)
    matrices = []
    for module, parts in gather(source.entries, (".weight", *_SCALES, *_INPUTS)).items():
        found = [suffix for suffix in _SCALES if suffix in parts]
        stacked = found == ["_scale_inv"]
        codes = source.entries.get(module) if stacked else parts.get(".weight")
        if found == [".scale"] and (codes is None or codes.dtype.name not in _CODES):
            continue  # a norm's
        if not found:
            continue
        if codes is None or len(found) > 1 or len(codes.shape) != 2 + stacked:
            raise contradiction(
                f"{module} is not complete", source, got=", ".join(sorted(module + suffix for suffix in parts)),
                wanted="a matrix of codes and one scale", remedy="download or copy the checkpoint again",
            )  # fmt: skip
        matrices.append(_stored(source, told, module, codes, (found[0], parts)))
    caches = cache_scales(source.entries)
    return Contents(NAME, tuple(matrices), caches, "fp8" if caches else None)


def _stored(
    source: Source, told: _Told, module: str, codes: Entry, found: tuple[str, Mapping[str, Entry]]
) -> Stored:
    suffix, parts = found
    scale = parts[suffix]
    *experts, n, k = codes.shape
    packed = codes.dtype.name in ("I8", "U8")
    _check_codes(source, told, module, codes)
    shape = (n, 2 * k if packed else k)
    fmt = _scale_format(source, told, module, scale)
    grid = scale.shape[len(experts) :]
    converted = any(module.endswith(name) for name in told.converted)
    block = (1, _GROUP) if packed else None if converted and suffix == ".weight_scale" else told.block
    tile = _tile(source, (module, scale), shape, grid, block)
    scheme = stored_scheme(E2M1 if packed else E4M3FN, tile, fmt)
    given = [name for name in _INPUTS if name in parts]
    linear = LinearScheme(scheme) if converted else _linear(told, scheme, bool(given))
    if told.activation is not None and not converted and (told.activation == "static") != bool(given):
        raise contradiction(
            f"{module}: config and tensors disagree about its input", source,
            got="an input scale" if given else "no input scale", wanted=f"activation_scheme {told.activation}",
        )  # fmt: skip
    kept = skipped_by(module, told.kept)
    if kept is not None:
        raise contradiction(
            f"{module} is quantized, and the config keeps it unquantized", source,
            got=f"{module}{suffix}", wanted=f"no quantized layer that {kept!r} names",
        )  # fmt: skip
    stacked = bool(experts)
    names = ("" if stacked else ".weight", suffix, given[0] if given else "")
    dtypes = (codes.dtype.name, scale.dtype.name, parts[given[0]].dtype.name if given else "F32")
    how = _spell(scheme, linear, names, dtypes, () if not scale.shape else (1,))
    return Stored(module, shape, how, linear, experts[0] if stacked else None)


def _check_codes(source: Source, told: _Told, module: str, codes: Entry) -> None:
    """Codes are E4M3, or packed E2M1 exactly where the config says so."""
    packed = codes.dtype.name in ("I8", "U8")
    routed = _EXPERT.search(f"{module}.") is not None
    if codes.dtype.name != "F8_E4M3" and not packed:
        raise contradiction(
            f"{module} has a scale and no E4M3 codes", source, got=codes.dtype.name, wanted="F8_E4M3"
        )
    if packed and not (routed and told.experts == "fp4"):
        raise contradiction(
            f"{module} is packed, and the config does not say that it is", source, got=codes.dtype.name,
            wanted=f"F8_E4M3, as expert_dtype {told.experts} says" if routed else "F8_E4M3 outside routed experts",
        )  # fmt: skip
    if not packed and routed and told.experts == "fp4":
        raise contradiction(
            f"{module} is not packed, and the config says that experts are", source, got=codes.dtype.name,
            wanted="I8 or U8, as expert_dtype fp4 says",
        )  # fmt: skip


def _scale_format(source: Source, told: _Told, module: str, scale: Entry) -> Format:
    """The format of a scale, with the config's promise of powers of two kept."""
    name = scale.dtype.name
    if name == "F8_E8M0" or (name == "U8" and told.powers):
        if told.scale_fmt not in (None, "ue8m0"):
            raise contradiction(
                f"{module}: config and scales disagree", source, got=f"{name} scales",
                wanted=f"scale_fmt {told.scale_fmt}, which is F32",
            )  # fmt: skip
        return E8M0
    fmt = formats.get(DTYPES[name].format or "")
    if fmt not in FLOATS:
        raise contradiction(
            f"{module} has scales that nothing explains", source, got=name,
            wanted="F32, BF16, F16 or F8_E8M0" + (", or U8 with scale_fmt ue8m0" if name == "U8" else ""),
        )  # fmt: skip
    if told.powers and len(scale.shape) > 1:
        values = widened(source.checkpoint.array(scale.name), name)
        other = values[np.frexp(values)[0] != 0.5]
        if other.size:
            raise contradiction(
                f"{module}: the config promises scales that are powers of two", source,
                got=f"{other.size} others, such as {other[0]:.9g}", wanted="scale_fmt ue8m0",
                remedy="remove scale_fmt from the config, if the scales are right",
            )  # fmt: skip
    return fmt


def _tile(
    source: Source,
    named: tuple[str, Entry],
    shape: tuple[int, int],
    grid: tuple[int, ...],
    block: Tile | None,
) -> Tile:
    """The tile of a scale grid: the config's block where the grid is its, one tile where there is no block. A stack
    of gate and up projections has a row of scales for each of the two where both fit into one block."""
    module, scale = named
    n = shape[0]
    two = module.endswith("gate_up_proj") and n % 2 == 0
    if block is None:
        if prod(grid) == 1:
            return (0, 0)
        if two and grid == (2, 1):
            return (n // 2, 0)
        raise contradiction(
            f"{module} has {prod(grid)} scales, and the config names no block", source, got=list(scale.shape),
            wanted="one scale, or a weight_block_size",
        )  # fmt: skip
    wanted = tile_grid(shape, block)
    if grid == wanted:
        return block
    if two and wanted[0] == 1 and grid == (2, wanted[1]):
        return (n // 2, block[1])
    raise contradiction(
        f"{module}: its scales are not those of {block[0]}x{block[1]} blocks", source, got=list(scale.shape),
        wanted=f"{list(wanted)} for {shape[0]}x{shape[1]}, as "
        + ("the format says of packed experts" if block == (1, _GROUP) else "the config's weight_block_size says"),
    )  # fmt: skip


def _linear(told: _Told, scheme: Scheme, static: bool) -> LinearScheme:
    """What a layer computes: inputs in the granularity that engines give them beside such a weight."""
    cols = scheme.inner.tile[1]
    if scheme.element is E2M1:
        return LinearScheme(scheme, schemes["fp8_group128"])
    if static:
        return LinearScheme(scheme, schemes["fp8_tensor"], False)
    if cols == 0:
        return LinearScheme(scheme, schemes["fp8_token"])
    powers = told.powers or scheme.inner.format is E8M0
    return LinearScheme(scheme, stored_scheme(E4M3FN, (1, cols), E8M0 if powers else FP32))


CONTAINER = Container(
    name=NAME,
    title="native FP8 (DeepSeek, AutoFP8, transformers)",
    claims=claims,
    read=read,
    spelling=spelling,
    document=document,
    cache=CacheSpelling({"q": ".q_scale", "k": ".k_scale", "v": ".v_scale"}),
    cache_schemes=("fp8",),
)
