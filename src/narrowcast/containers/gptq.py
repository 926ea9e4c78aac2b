"""GPTQ: integers in words along K, as AutoGPTQ began and GPTQModel, vLLM, SGLang and transformers read it.

    w[n, k] = (q[n, k] - zero[g, n]) · scale[g, n]        g = g_idx[k]

``checkpoint_format`` says how zero points are counted: ``gptq`` (v1) stores them less one, ``gptq_v2`` as they are.
Files with the wrong label exist, so it is held against the data: symmetric weights have one zero point, the middle,
and show which it is; an asymmetric v1 cannot store the largest number, unless its writer borrows over whole words.

    symmetric weights     written as v1, which every reader takes
    asymmetric weights    written as v2: GPTQModel refuses them as v1, and v1 has no zero point 0 that all readers share

Scales are fp16 in what is written; an engine that runs the model in bf16 rounds them once more. A bias is carried in
its own dtype, which readers cast. What matrices have of their own is said in ``dynamic``, where the first pattern that
matches decides: ``-:`` not quantized, ``+:`` quantized otherwise.

Sources: GPTQModel 7.7, vLLM 0.32 (auto_gptq.py, gptq_utils.py). Left out: planar and kernel formats (gptq_p, marlin,
bitblas); in ``dynamic``, names of modules that only an engine fuses (qkv_proj).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any

import numpy as np

from narrowcast._version import __version__
from narrowcast.containers.beside import agreed
from narrowcast.containers.container import Container, Document, Group, Layers
from narrowcast.containers.contents import Contents, Source, Stored, contradiction, gather
from narrowcast.containers.spelling import Place, Spelling
from narrowcast.containers.targets import patterns
from narrowcast.containers.words import (
    SUFFIXES,
    VERSIONS,
    Order,
    Told,
    find_gptq,
    gptq_parts,
    words_packing,
)
from narrowcast.errors import UsageError
from narrowcast.numbers.formats import FP16, Format
from narrowcast.tensors.packing import unpack
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, integer
from narrowcast.tensors.words import BITS

NAME = "gptq"
BESIDE = "quantize_config.json"
_SAID = ("quant_method", "bits", "group_size", "sym", "desc_act", "lm_head", "checkpoint_format", "dynamic")
_LOOK_ROWS = 256  # rows that show how zero points are counted


def spelling(linear: LinearScheme, source: Format) -> Spelling:
    """The way this container writes ``linear``; UsageError when it has none."""
    weight = linear.weight
    if not integer(weight) or weight.element.bits not in BITS or weight.inner.tile[0] != 1:
        raise UsageError(
            f"{NAME} has no spelling for {weight.name}",
            wanted="integers of 2, 3, 4 or 8 bits in groups or per channel",
            remedy="choose another preset, such as w4a16; `narrowcast schemes` says who loads what",
        )  # fmt: skip
    if linear.input is not None:
        raise UsageError(
            f"{NAME} keeps inputs wide", got=f"{linear.input.name} inputs", wanted="a weight-only scheme",
            remedy="choose w4a16 or w8a16, or another container",
        )  # fmt: skip
    return spell(weight.with_scale_format(FP16), 1 if weight.zero is None else 2)


def spell(scheme: Scheme, version: int, order: Order | None = None) -> Spelling:
    """The tensors of one version, of columns in their order or in another."""
    return Spelling(
        NAME, VERSIONS[version] + (" desc_act" if order is not None else ""), scheme, words_packing(scheme),
        gptq_parts(scheme, version, order=order), (32, 32), partial(spell, scheme, version),
    )  # fmt: skip


def document(layers: Layers) -> Document:
    """The config block, and the same beside it, where GPTQModel and vLLM look as well."""
    groups = sorted(layers.groups, key=lambda group: -len(group.names))
    versions = {group.how.format.removesuffix(" desc_act") for group in groups}
    if len(versions) > 1:
        raise UsageError(
            "one GPTQ checkpoint counts its zero points in one way", got="symmetric and asymmetric weights",
            wanted="one kind", remedy="choose one preset for all of them, or another container",
        )  # fmt: skip
    base = settings(groups[0])
    block: dict[str, Any] = {
        **base,
        "checkpoint_format": versions.pop(),
        "lm_head": any(_head(name) for group in groups for name in group.names),
        "meta": {"quantizer": [f"narrowcast:{__version__}"]},
        "pack_dtype": "int32",
        "quant_method": NAME,
    }
    dynamic: dict[str, dict[str, Any]] = {}
    for group in groups[1:]:
        other = {key: value for key, value in settings(group).items() if value != base[key]}
        dynamic |= {f"+:{pattern}": other for pattern in patterns(group.names, layers.linear_names)}
    kept = [name for name in layers.ignore if not _head(name)]
    dynamic |= {f"-:{pattern}": {} for pattern in patterns(kept, layers.linear_names)}
    if dynamic:
        block["dynamic"] = dynamic
    block = dict(sorted(block.items()))
    return Document(block, {BESIDE: (json.dumps(block, indent=2) + "\n").encode()})


def settings(group: Group) -> dict[str, Any]:
    """What a group of matrices needs to have said of it."""
    weight = group.linear.weight
    return {
        "bits": weight.element.bits,
        "desc_act": group.how.part("order") is not None,
        "group_size": weight.group or -1,
        "sym": weight.zero is None,
    }


def claims(source: Source) -> bool:
    """Whether a config names this method; AutoGPTQ's first ones beside the weights name none."""
    beside = source.beside.get(BESIDE, {})
    return source.config.get("quant_method") == NAME or (
        beside.get("quant_method", NAME if "bits" in beside else None) == NAME
    )


def read(source: Source) -> Contents:
    """Every matrix with its spelling; CheckpointError where data and config disagree."""
    config = _config(source)
    modules = {m: parts for m, parts in gather(source.entries, SUFFIXES).items() if ".qweight" in parts}
    _check_head(source, modules, config)
    matrices = [_stored(source, module, parts, config) for module, parts in modules.items()]
    return Contents(NAME, tuple(matrices), notes=tuple(_doubts(source, matrices)))


def _config(source: Source) -> dict[str, Any]:
    """What the config and the file beside it say."""
    found = agreed(source, (BESIDE,), _SAID, _normal)
    for key in ("bits", "group_size"):
        if not isinstance(found.get(key), int):
            raise contradiction(
                f"the config does not say {key}", source, got=found.get(key), wanted=f"{key} of the words"
            )
    if found["checkpoint_format"] not in VERSIONS.values():
        raise contradiction(
            "this GPTQ layout is not read", source, got=f"checkpoint_format {found['checkpoint_format']}",
            wanted="gptq or gptq_v2", remedy="save the model as gptq with the library that made it",
        )  # fmt: skip
    return found


def _normal(source: Source, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with one spelling of what has several."""
    found = {key: value for key, value in config.items() if value is not None}
    labels = {str(found[key]).lower() for key in ("checkpoint_format", "format") if key in found}
    if len(labels) > 1:
        raise contradiction(
            "a config names two formats", source, got=f"format {config['format']}",
            wanted=f"checkpoint_format {config['checkpoint_format']}",
        )  # fmt: skip
    return {**found, "checkpoint_format": labels.pop() if labels else "gptq"}


def _stored(source: Source, module: str, parts: Mapping[str, Any], config: Mapping[str, Any]) -> Stored:
    over = _override(source, module, config)
    said = {**config, **over}
    version = next(number for number, label in VERSIONS.items() if label == config["checkpoint_format"])
    quantizer = str((config.get("meta") or {}).get("quantizer") or "")
    shuffled = said.get("desc_act")
    told = Told(
        int(said["bits"]), int(said["group_size"]), said.get("sym"), version, borrows="gptqmodel" in quantizer,
        shuffled=shuffled if isinstance(shuffled, bool) else None,
    )  # fmt: skip
    found = find_gptq(source, module, parts, told)
    how = replace(spell(found.scheme, version, found.order), parts=found.parts)
    return Stored(module, found.shape, how, LinearScheme(found.scheme))


def _override(source: Source, module: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``dynamic`` says of a quantized module."""
    pattern, said = dynamic_of(source, module, config)
    if pattern.startswith("-:"):
        raise contradiction(
            f"{module} is quantized, and the config says that it is not", source, got=f"{module}.qweight",
            wanted=f"a plain weight, as dynamic {pattern} says",
        )  # fmt: skip
    return said


def dynamic_of(source: Source, module: str, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The first pattern of ``dynamic`` that matches from the start of a module's name, and what it says; patterns with
    -: say that it is not quantized. CheckpointError for a pattern that is none."""
    for pattern, said in (config.get("dynamic") or {}).items():
        try:
            matches = re.match(pattern.removeprefix("+:").removeprefix("-:"), module)
        except re.error as error:
            raise contradiction(
                "a pattern in dynamic is no regular expression", source, got=f"{pattern}: {error}",
                wanted="a regular expression after -: or +:",
            ) from None  # fmt: skip
        if matches and (isinstance(said, Mapping) or pattern.startswith("-:")):
            return pattern, said if isinstance(said, Mapping) else {}
    return "", {}


def _check_head(source: Source, modules: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """The head is quantized exactly where the config says so."""
    heads = [module for module in modules if _head(module)]
    if bool(heads) != bool(config.get("lm_head", False)):
        raise contradiction(
            f"lm_head is {'' if heads else 'not '}quantized, and the config says otherwise", source,
            got=f"{heads[0]}.qweight" if heads else "no lm_head.qweight",
            wanted=f"lm_head {config.get('lm_head', False)}",
        )  # fmt: skip


def _head(name: str) -> bool:
    return name.rsplit(".", 1)[-1] == "lm_head"


def _doubts(source: Source, matrices: list[Stored]) -> Iterator[str]:
    """Weights average to about zero, so asymmetric codes average to about their zero point; a distance of one step
    is a doubt about the label, though no proof."""
    asymmetric = (m for m in matrices if m.how.scheme.zero is not None and m.how.scheme.element.bits <= 4)
    stored = next(asymmetric, None)
    if stored is None:
        return
    scheme, (n, k) = stored.how.scheme, stored.shape
    step = stored.how.row_multiple
    stop = min(n, lcm(step, _LOOK_ROWS))
    rows = stored.how.read(source.checkpoint, Place(stored.module, n), stored.shape, 0, stop)
    assert rows.zero is not None
    zero = np.repeat(rows.zero, scheme.group or k, axis=1)[:, :k]
    off = float((unpack(rows.packed, stored.how.packing, k).astype(np.float32) - zero).mean())
    version = 2 if stored.how.format.startswith(VERSIONS[2]) else 1
    if abs(off - (1 if version == 2 else -1)) < 0.25:
        yield (
            f"{stored.module}: on average its codes lie {abs(off):.2f} steps {'above' if off > 0 else 'below'} their "
            f"zero points; the label {VERSIONS[version]} may be wrong, and {VERSIONS[3 - version]} right"
        )


CONTAINER = Container(
    name=NAME,
    title="GPTQ",
    claims=claims,
    read=read,
    spelling=spelling,
    document=document,
    files=(BESIDE,),
)
