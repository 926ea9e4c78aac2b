"""Rules about scales that are not there, or are tensors of another kind: on names, dtypes and shapes of the file alone.

    module = codes + scale (+ outer scale) (+ input scale)

A container sets a layer aside that lacks a piece, so these rules look at the tensors of the file, not at matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.schemes import Tile, tile_grid

COPY = "download or copy the checkpoint again; else quantize the layer again from the parent"
_FLOAT_CODES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")
_BYTES = ("U8", "I8", "I32")
_CODES = (".weight", ".weight_packed", ".qweight", "_blocks", "_weight_qdata")
_SCALE = re.compile(r"(scales?|scale_inv|scale_2|SCB|absmax)$")
_NO_SCALE = re.compile(r"input|act|pre_quant|output|zero|global|scale_2$")
_OUTER = (".weight_global_scale", ".weight_scale_2", "_weight_per_tensor_scale")


def codes_of(pieces: Mapping[str, Entry]) -> tuple[str, Entry] | None:
    """The codes among a module's pieces, with what follows the module's name."""
    for ending, entry in pieces.items():
        floats = entry.dtype.name in _FLOAT_CODES and ending in (*_CODES, "")
        if len(entry.shape) > 1 and (floats or (entry.dtype.name in _BYTES and ending in _CODES)):
            return ending, entry
    return None


def scale_of(pieces: Mapping[str, Entry]) -> tuple[str, Entry] | None:
    """The innermost scale among a module's pieces."""
    fits = ((e, entry) for e, entry in pieces.items() if _SCALE.search(e) and not _NO_SCALE.search(e))
    return next(fits, None)


def layer_and_expert(name: str) -> dict[str, int]:
    """The layer and the expert that a name says."""
    layer = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.", name)
    expert = re.search(r"experts\.(\d+)(?:\.|$)", name)
    found = {"layer": layer, "expert": expert}
    return {key: int(match[1]) for key, match in found.items() if match is not None}


def _files(subject: Subject) -> Iterator[tuple[str, Mapping[str, Entry], str, Entry]]:
    """Modules with codes: name, pieces, ending and entry of the codes. A GGUF block holds its scales itself."""
    if any(shard.suffix == ".gguf" for shard in subject.checkpoint.shards):
        return
    for module, pieces in subject.pieces.items():
        codes = codes_of(pieces)
        if codes is not None:
            yield module, pieces, *codes


@rule("NC100", "error")
def missing_scale(subject: Subject) -> Iterator[Finding]:
    """Codes without their scale.

    What: a tensor of FP8, FP4 or packed integer codes, and no tensor beside it that is its scale.
    Why: engines begin with a scale of 1.0, or with whatever memory holds, and load nothing over it; the layer computes
    nonsense and no error is raised.
    Fix: copy the checkpoint again, since a shard or an index has most likely lost it; a scale cannot be had back from
    codes.
    False alarm: weights that were only cast to FP8 and stand for themselves have no scale; then write one of 1.0.
    """
    for module, pieces, ending, entry in _files(subject):
        if scale_of(pieces) is None:
            yield Finding(
                f"{entry.dtype.name} codes without a scale", tensor=module + ending, remedy=COPY,
                got=", ".join(sorted(piece.lstrip("._") for piece in pieces if piece)) or "codes alone",
                wanted="a scale beside the codes", facts=layer_and_expert(module),
            )  # fmt: skip


@rule("NC101", "error")
def missing_outer_scale(subject: Subject) -> Iterator[Finding]:
    """Block scales of NVFP4 without the outer scale above them.

    What: packed E2M1 codes with E4M3 block scales, and neither weight_global_scale nor weight_scale_2.
    Why: block scales go up to 448 by themselves; without the outer scale a layer decodes some thousand times too
    large, or an engine reads memory that nobody wrote.
    Fix: copy the checkpoint again; from the parent, the outer scale is amax / 2688.
    False alarm: torchao's NVFP4 may be of one level; its tensors are not looked at here.
    """
    for module, pieces, ending, entry in _files(subject):
        scale = scale_of(pieces)
        two = scale is not None and scale[1].dtype.name == "F8_E4M3" and entry.dtype.name == "U8"
        if two and ending in (".weight", ".weight_packed") and not any(name in pieces for name in _OUTER):
            name = _OUTER[0] if ending == ".weight_packed" else _OUTER[1]
            yield Finding(
                f"block scales without {name[1:]}", tensor=module + ending, remedy=COPY,
                got=", ".join(sorted(piece[1:] for piece in pieces)), wanted=name[1:],
                facts=layer_and_expert(module),
            )  # fmt: skip


@rule("NC102", "error")
def wrong_scale_dtype(subject: Subject) -> Iterator[Finding]:
    """A scale is stored in a dtype that readers convert by value.

    What: exponents of an MX format as F8_E8M0 where compressed-tensors and Quark keep bytes (U8), or block scales of
    NVFP4 in another dtype than F8_E4M3.
    Why: vLLM copies into a tensor of its own dtype, which converts numbers: 2^-8 becomes the byte 0, and the byte 0x38
    becomes 56 where it was 1.0. TensorRT-LLM stops. (An outer scale in sixteen bits is only rounded, and so an
    information.)
    Fix: write the same bytes under the dtype that is read.
    False alarm: a reader that views the tensor as bytes; none of the engines does so for these containers.
    """
    method = str(subject.quantization.get("quant_method") or "")
    for module, pieces, _, codes in _files(subject):
        scale = pieces.get(".weight_scale")
        outer = next((pieces[name] for name in _OUTER[:2] if name in pieces), None)
        if scale is not None and scale.dtype.name == "F8_E8M0" and method in ("compressed-tensors", "quark"):
            yield _dtype(module, scale, "U8")
        # A second scale beside float scales is W4A8_AWQ's, and no level above blocks.
        elif scale is not None and outer is not None and codes.dtype.name == "U8":
            if scale.dtype.name in ("U8", "I8", "F8_E8M0", "F8_E5M2"):
                yield _dtype(module, scale, "F8_E4M3")
            elif scale.dtype.name == "F8_E4M3" and outer.dtype.name in ("F16", "BF16"):
                yield Finding(
                    f"the outer scale is rounded to {outer.dtype.name}", tensor=outer.name, got=outer.dtype.name,
                    wanted="F32", severity="info",
                )  # fmt: skip


def _dtype(module: str, scale: Entry, wanted: str) -> Finding:
    return Finding(
        f"scales are {scale.dtype.name}; readers take {wanted}", tensor=scale.name, got=scale.dtype.name, wanted=wanted,
        remedy=f"store the same bytes as {wanted}",
    )  # fmt: skip


@rule("NC103", "error")
def wrong_scale_shape(subject: Subject) -> Iterator[Finding]:
    """The grid of scales does not fit the codes, or is transposed.

    What: a grid of block or group scales has other sizes than ⌈N/rows⌉ by ⌈K/columns⌉, for a layer that its container
    set aside.
    Why: an engine refuses to load it, or reads scales of other blocks.
    Fix: transpose the grid where it is only transposed; else the pieces are of two saves: copy the checkpoint again.
    False alarm: a layout that only one kernel reads (swizzled, padded) does not belong into a checkpoint either.
    """
    block = _block(subject.quantization)
    for module, pieces, _, codes in _files(subject):
        scale = scale_of(pieces)
        if module in subject.quantized or scale is None or len(codes.shape) != 2:
            continue
        tile = _tile(codes, scale[1], block)
        if tile is None:
            continue
        n, k = codes.shape
        k *= 2 if codes.dtype.name in ("U8", "I8") else 1
        wanted, got = tile_grid((n, k), tile), tuple(size for size in scale[1].shape)
        if len(got) == 4:
            got = (got[0], got[2])
        if len(got) != 2 or got == wanted:
            continue
        turned = got == wanted[::-1]
        yield Finding(
            f"the grid of scales is {'transposed' if turned else 'of other sizes than the codes'}",
            tensor=scale[1].name, got=str(list(got)), wanted=f"{list(wanted)} for {n}x{k} in {tile[0]}x{tile[1]}",
            remedy="transpose the grid of scales" if turned else COPY,
        )  # fmt: skip


def _tile(codes: Entry, scale: Entry, block: Tile | None) -> Tile | None:
    """The tile of a grid of scales, where dtypes or the config tell it."""
    packed = codes.dtype.name == "U8"
    if scale.dtype.name == "F8_E4M3" and packed:
        return (1, 16)
    if codes.dtype.name.startswith("F8") and block is not None and len(scale.shape) > 1:
        return block
    if scale.dtype.name in ("U8", "F8_E8M0") and (packed or codes.dtype.name.startswith("F8")):
        return (1, 32)
    return None


def _block(config: Mapping[str, Any]) -> Tile | None:
    """The one block size that a config names."""
    found = [config.get("weight_block_size")]
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        found.append(weights.get("block_structure") if isinstance(weights, Mapping) else None)
    blocks = {
        tuple(block)
        for block in found
        if isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) for size in block)
    }
    if len(blocks) != 1:
        return None
    rows, cols = blocks.pop()
    return (rows, cols) if rows > 0 and cols > 0 else None
