"""AWQ: unsigned 4-bit integers with zero points in words along N, as AutoAWQ writes them.

    w[n, k] = (q[n, k] - zero[g, n]) · scale[g, n]        g = k // group_size

The gemm order interleaves the eight channels of a word (0, 2, 4, 6, 1, 3, 5, 7), for codes and zero points alike;
nothing is stored less one. One width and one group size hold for the whole checkpoint. Weights are symmetric where
every zero point is 8, and are written so. Scales are fp16.

Modules that stay wide are named in ``modules_to_not_convert``, which matches any part of a name: a name that is part
of a quantized module's cannot be kept.

The gemv order, which no engine that loads AWQ runs, is read: words along K in straight order,

    qweight [N, K/8]    qzeros [N, W]    scales [N, 8·W]        W words hold the groups and padding

Sources: AutoAWQ 0.2.9 (gemm.py, gemv.py), vLLM 0.32 (auto_awq.py). Left out: gemv_fast and llm-awq, other layouts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from narrowcast.containers.beside import agreed
from narrowcast.containers.container import Container, Document, Layers
from narrowcast.containers.contents import Contents, Source, Stored, contradiction, gather
from narrowcast.containers.spelling import Array, Part, Spelling, code_part
from narrowcast.containers.words import SUFFIXES, Told, awq_parts, eights, find_awq
from narrowcast.errors import UsageError
from narrowcast.numbers.formats import FP16, UINT4, Format
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.packing import pack, packing, unpack
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, integer
from narrowcast.tensors.storage import stored_scheme

NAME = "awq"
BESIDE = ("quant_config.json", "quantize_config.json")
_SAID = ("quant_method", "bits", "group_size", "zero_point", "version", "modules_to_not_convert", "lm_head")
_ALIASES = {
    "w_bit": "bits",
    "q_group_size": "group_size",
    "format": "version",
    "checkpoint_format": "version",
}


def spelling(linear: LinearScheme, source: Format) -> Spelling:
    """The way this container writes ``linear``; UsageError when it has none."""
    weight = linear.weight
    if (
        not integer(weight)
        or weight.element.bits != 4
        or weight.inner.tile[0] != 1
        or linear.input is not None
    ):
        raise UsageError(
            f"{NAME} has no spelling for {weight.name}" + (f" with {linear.input.name} inputs" if linear.input else ""),
            wanted="weight-only integers of 4 bits in groups",
            remedy="choose w4a16 or w4a16_asym, or another container",
        )  # fmt: skip
    return spell(weight.with_scale_format(FP16))


def spell(scheme: Scheme) -> Spelling:
    """The tensors of the gemm order."""
    return Spelling(
        NAME, "gemm", scheme, packing(4, flip=scheme.element.signed), awq_parts(scheme),
        (8, scheme.group or 2),
    )  # fmt: skip


def document(layers: Layers) -> Document:
    """The config block; UsageError where its one group size and its matching cannot say what is meant."""
    sizes = sorted({group.linear.weight.group or -1 for group in layers.groups})
    if len(sizes) > 1:
        raise UsageError(
            "the one group size of AWQ cannot divide every layer", got=" and ".join(map(str, sizes)), wanted="one",
            remedy="keep the layers that need another with --ignore, or choose another container",
        )  # fmt: skip
    quantized = [name for group in layers.groups for name in group.names]
    kept = [part_of_name(name) for name in layers.ignore]
    for name in kept:
        inside = next((other for other in quantized if name in other), None)
        if inside is not None:
            raise UsageError(
                f"AWQ cannot keep {name}: it matches parts of names", got=f"{inside}, which is quantized",
                wanted="names of kept modules that are part of no other", remedy="choose another container",
            )  # fmt: skip
    block: dict[str, Any] = {
        "bits": 4,
        "group_size": sizes[0],
        "modules_to_not_convert": kept or None,
        "quant_method": NAME,
        "version": "gemm",
        "zero_point": True,
    }
    if any(name.rsplit(".", 1)[-1] == "lm_head" for name in quantized):
        block["lm_head"] = True
    return Document(dict(sorted(block.items())))


def part_of_name(ignored: str) -> str:
    """An ignored module as a part of its name: patterns for stacks are a plain beginning and anything after it."""
    if not ignored.startswith("re:"):
        return ignored
    return re.sub(r"\\(.)", r"\1", ignored.removeprefix("re:^").removesuffix(".*"))


def claims(source: Source) -> bool:
    """Whether a config names this method; AutoAWQ's first ones beside the weights name none, and say ``w_bit``."""
    places = (source.config, *(source.beside.get(name, {}) for name in BESIDE))
    return any(config.get("quant_method", NAME if "w_bit" in config else None) == NAME for config in places)


def read(source: Source) -> Contents:
    """Every matrix with its spelling; CheckpointError where data and config disagree."""
    config = agreed(source, BESIDE, _SAID, _normal)
    for key in ("bits", "group_size"):
        if not isinstance(config.get(key), int):
            raise contradiction(
                f"the config does not say {key}", source, got=config.get(key), wanted=f"{key} of the words"
            )
    modules = {m: parts for m, parts in gather(source.entries, SUFFIXES[:3]).items() if ".qweight" in parts}
    _check_kept(source, modules, config)
    order = config.get("version", "gemm")
    if order not in ("gemm", "gemv"):
        raise contradiction(
            "this AWQ layout is not read", source, got=f"version {order}", wanted="gemm or gemv",
            remedy="save the model in gemm order with the library that made it",
        )  # fmt: skip
    symmetric = order == "gemm" and eights(source, modules)
    if config.get("zero_point") is False and not symmetric:
        raise contradiction(
            "the config says that there are no zero points, and there are", source, got="zero points other than 8",
            wanted="zero_point true",
        )  # fmt: skip
    told = Told(config["bits"], config["group_size"], symmetric)
    find = _gemm if order == "gemm" else _gemv
    return Contents(NAME, tuple(find(source, module, parts, told) for module, parts in modules.items()))


def _normal(source: Source, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with one spelling of what has several."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = _ALIASES.get(key, key)
        said = value.lower() if name == "version" and isinstance(value, str) else value
        if name in found and found[name] != said:
            raise contradiction(f"a config names two of {name}", source, got=said, wanted=found[name])
        found[name] = said
    return {key: value for key, value in found.items() if value is not None}


def _check_kept(source: Source, modules: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    kept = config.get("modules_to_not_convert") or ()
    for module in modules:
        part = next((part for part in kept if part in module), None)
        if part is not None:
            raise contradiction(
                f"{module} is quantized, and the config says that it is not", source, got=f"{module}.qweight",
                wanted=f"a plain weight, as modules_to_not_convert says with {part}",
            )  # fmt: skip


def _gemm(source: Source, module: str, parts: Mapping[str, Entry], told: Told) -> Stored:
    found = find_awq(source, module, parts, told)
    return Stored(module, found.shape, spell(found.scheme), LinearScheme(found.scheme))


def _gemv(source: Source, module: str, parts: Mapping[str, Entry], told: Told) -> Stored:
    """A matrix in gemv order: rows of words, groups padded to whole words."""
    n, words = parts[".qweight"].shape
    group = told.group if told.group > 0 else 8 * words
    scheme = stored_scheme(UINT4, (1, group), FP16, zero=UINT4)
    tiles = -(-8 * words // group)
    shapes = {suffix: parts[suffix].shape for suffix in (".qzeros", ".scales") if suffix in parts}
    width = shapes.get(".qzeros", (0, 0))[-1]
    if told.bits != 4 or shapes != {".qzeros": (n, width), ".scales": (n, 8 * width)} or 8 * width < tiles:
        raise contradiction(
            f"{module}: its tensors do not have the shapes of the gemv order", source,
            got=", ".join(f"{suffix[1:]} {list(entry.shape)}" for suffix, entry in parts.items()),
            wanted=f"4 bits, qzeros [{n}, W] and scales [{n}, 8 W] for {tiles} groups",
        )  # fmt: skip
    how = packing(4, word=32)

    def padded(chunk: Array) -> Array:
        return np.pad(chunk, ((0, 0), (0, 8 * width - chunk.shape[1])))

    made = (
        code_part(".qweight", "I32", how),
        Part(".qzeros", "zero", "I32", lambda n, k: (n, width), encode=lambda zero: pack(padded(zero), how),
             decode=lambda stored, count: unpack(stored.view(np.uint8), how, 8 * width)[:count, :tiles].copy()),
        Part(".scales", "scales", "F16", lambda n, k: (n, 8 * width), encode=padded,
             decode=lambda stored, count: stored[:count, :tiles].copy()),
    )  # fmt: skip
    return Stored(module, (n, 8 * words), Spelling(NAME, "gemv", scheme, how, made), LinearScheme(scheme))


CONTAINER = Container(
    name=NAME,
    title="AWQ",
    claims=claims,
    read=read,
    spelling=spelling,
    document=document,
    files=BESIDE,
    one_group=True,
)
