"""gpt-oss: stacks of experts as MXFP4 blocks and scales, everything else in bf16.

    x[e, n, 32 b + i] = E2M1(nibble i of blocks[e, n, b]) · 2^(scales[e, n, b] - 127)        low nibble first

Blocks are uint8 [E, N, K/32, 16] and scales uint8 [E, N, K/32], the output channels before the inputs: this is the
format's word and not the shape's, which says nothing where N = K. The dequantized parameter of the model lies the
other way round, [E, K, N]. Of gate_up_proj, even rows are the gate and odd rows the up projection.

OpenAI's own files call the same tensors ``block.N.mlp.mlp1_weight.blocks`` and have no quantization_config; these
are read, and written under the names of transformers alone.

Source: transformers 5.24 integrations/mxfp4.py, openai/gpt-oss gpt_oss/torch/weights.py. Left out: MXFP4 linears
outside the experts, which no reader of this container has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from narrowcast.containers.container import Container, Document, Layers
from narrowcast.containers.contents import Contents, Source, Stored, contradiction, gather, left_alone
from narrowcast.containers.spelling import Part, Place, Spelling
from narrowcast.errors import UsageError
from narrowcast.numbers.formats import Format
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.packing import packing
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import schemes
from narrowcast.tensors.storage import same_storage

NAME = "mxfp4"
MODEL = "gpt_oss"
MXFP4 = schemes["mxfp4"]
KEPT = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
_GROUP, _BYTES = 32, 16
_SUFFIXES = ("_blocks", "_scales")
_OPENAI = re.compile(r"^block\.\d+\.mlp\.mlp[12]_weight\.(blocks|scales)$")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)$")
# Projection to its stack, the first row of it there, and the step between rows.
_ROWS = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
}


def spell(suffixes: tuple[str, str] = _SUFFIXES) -> Spelling:
    """The two tensors of a stack."""
    blocks, scales = suffixes
    parts = (
        Part(blocks, "codes", "U8", lambda n, k: (n, k // _GROUP, _BYTES)),
        Part(scales, "scales", "U8", lambda n, k: (n, k // _GROUP)),
    )
    return Spelling(NAME, NAME, MXFP4, packing(4), parts, (1, _GROUP))


def spelling(linear: LinearScheme, source: Format) -> Spelling:
    """MXFP4 weights under wide inputs; UsageError for anything else."""
    if not same_storage(linear.weight, MXFP4):
        raise UsageError(
            f"{NAME} has no spelling for {linear.weight.name}", wanted="mxfp4 weights",
            remedy="choose the preset mxfp4a16, or another container",
        )  # fmt: skip
    if linear.input is not None:
        raise UsageError(
            f"{NAME} leaves inputs to the engine, and cannot say that they are {linear.input.name}", wanted="mxfp4a16",
            remedy="--preset mxfp4a16, which changes no code and no scale",
        )  # fmt: skip
    return spell()


def places(shapes: Mapping[str, tuple[int, int]], config: Mapping[str, Any]) -> dict[str, Place]:
    """Experts e of ``...experts.{e}.gate_proj`` and so on as rows of the stacks ``...experts.gate_up_proj``.

    UsageError for a model that is not gpt-oss, for matrices that are no experts, and for stacks that would have holes.
    """
    if config.get("model_type") != MODEL:
        raise UsageError(
            f"the container {NAME} is gpt-oss's own", got=f"model_type {config.get('model_type')}", wanted=MODEL,
            remedy="compressed-tensors holds mxfp4 weights of any model",
        )  # fmt: skip
    found = {name: _EXPERT.match(name) for name in shapes}
    others = [name for name, match in found.items() if match is None]
    if others:
        raise UsageError(
            f"{NAME} holds experts only, and {len(others)} other layers would be quantized", got=others[0],
            remedy="--targets 're:.*\\.experts\\..*' quantizes the experts alone",
        )  # fmt: skip
    members: dict[str, list[tuple[int, str]]] = {}
    for match in filter(None, found.values()):
        members.setdefault(f"{match[1]}.{_ROWS[match[3]][0]}", []).append((int(match[2]), match[3]))
    for stem, rows in members.items():
        _refuse_holes(stem, rows)
    made = {}
    for name, place in found.items():
        assert place is not None
        leaf, first, step = _ROWS[place[3]]
        stem = f"{place[1]}.{leaf}"
        experts = len(members[stem]) // step
        made[name] = Place(stem, step * shapes[name][0], experts, int(place[2]), first, step)
    return made


def _refuse_holes(stem: str, rows: list[tuple[int, str]]) -> None:
    leaves = sorted({leaf for leaf, row in _ROWS.items() if stem.endswith(f".{row[0]}")})
    experts = 1 + max(expert for expert, _ in rows)
    missing = sorted({(e, leaf) for e in range(experts) for leaf in leaves} - set(rows))
    if missing:
        expert, leaf = missing[0]
        raise UsageError(
            f"{stem} would have holes: {len(missing)} of its matrices are missing",
            got=f"nothing for expert {expert}, {leaf}", wanted=f"{', '.join(leaves)} of experts 0 to {experts - 1}",
            remedy="quantize all experts of a layer, or none",
        )  # fmt: skip


def document(layers: Layers) -> Document:
    """The config block of the released models, with the stacks that are kept besides."""
    kept = [path for name in layers.ignore if (path := _stack_path(name))]
    return Document({"modules_to_not_convert": [*KEPT, *kept], "quant_method": NAME})


def _stack_path(ignored: str) -> str:
    """``model.layers.3.mlp.experts`` of the pattern that keeps a stack, or nothing."""
    match = re.fullmatch(r"re:\^(.*experts)\\\.\.\*", ignored)
    return match[1].replace("\\", "") if match else ""


def claims(source: Source) -> bool:
    """Whether the config names this method, or there is none beside OpenAI's own names."""
    method = source.config.get("quant_method")
    return method == NAME or (not source.config and any(map(_OPENAI.match, source.entries)))


def read(source: Source) -> Contents:
    """Every stack; CheckpointError where a piece is missing, has another shape, or the config denies it."""
    stacks: dict[str, tuple[dict[str, Entry], tuple[str, str]]] = {}
    for suffixes in (_SUFFIXES, (".blocks", ".scales")):
        for module, parts in gather(source.entries, suffixes).items():
            if suffixes == _SUFFIXES or _OPENAI.match(module + ".blocks"):
                stacks[module] = parts, suffixes
    model = (source.checkpoint.config or {}).get("model_type")
    if source.config and model != MODEL:
        raise contradiction(
            f"the method {NAME} is gpt-oss's own", source, got=f"model_type {model}", wanted=MODEL,
        )  # fmt: skip
    if not stacks:
        raise contradiction(
            f"the config says {NAME}, and no tensor holds blocks", source, got=f"{len(source.entries)} tensors",
            wanted="..._blocks and ..._scales", remedy="remove the quantization_config of a model that has none",
        )  # fmt: skip
    kept = [str(pattern) for pattern in source.config.get("modules_to_not_convert") or ()]
    return Contents(NAME, tuple(_stored(source, module, *found, kept) for module, found in stacks.items()))


def _stored(
    source: Source, module: str, parts: Mapping[str, Entry], suffixes: tuple[str, str], kept: list[str]
) -> Stored:
    blocks, scales = (parts.get(suffix) for suffix in suffixes)
    if blocks is None or scales is None:
        raise contradiction(
            f"{module} is not complete", source, got=", ".join(module + suffix for suffix in parts),
            wanted=" and ".join(module + suffix for suffix in suffixes),
            remedy="download or copy the checkpoint again",
        )  # fmt: skip
    entries = (blocks, scales)
    whole = len(blocks.shape) == 4 and blocks.shape[-1] == _BYTES and scales.shape == blocks.shape[:-1]
    if not whole or any(entry.dtype.name != "U8" for entry in entries):
        raise contradiction(
            f"{module}: blocks and scales do not fit each other", source,
            got=" and ".join(f"{entry.name} {entry.dtype.name} {list(entry.shape)}" for entry in entries),
            wanted=f"U8 [experts, rows, columns/{_GROUP}, {_BYTES}] and U8 [experts, rows, columns/{_GROUP}]",
        )  # fmt: skip
    denied = next((pattern for pattern in kept if left_alone(pattern, module.rpartition(".")[0])), None)
    if denied is not None:
        raise contradiction(
            f"{module} is quantized, and the config says that it is not", source, got=blocks.name,
            wanted=f"plain weights, as modules_to_not_convert has {denied!r}",
        )  # fmt: skip
    experts, n, groups, _ = blocks.shape
    return Stored(module, (n, groups * _GROUP), spell(suffixes), LinearScheme(MXFP4), experts, "interleaved")


CONTAINER = Container(
    name=NAME,
    title="gpt-oss MXFP4",
    claims=claims,
    read=read,
    spelling=spelling,
    document=document,
    places=places,
)
