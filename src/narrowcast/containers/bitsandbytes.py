"""bitsandbytes: NF4, FP4 and INT8 weights, as transformers saves them. Read only.

    4 bit    x[i] = table[code[i]] · absmax[i // blocksize]       i runs over the flattened matrix, row by row
             absmax[b] = map[absmax code b] · nested[b // 256] + offset                       (double quantization)
    8 bit    x[n, k] = code[n, k] · (SCB[n] · fp32(1 / 127))

Two codes share a byte, the first in its high half. Where K is no multiple of the block size, blocks run on across
rows: such a matrix is seen in groups of gcd(K, blocksize) columns, each of which lies in one block, with its scale.

All of it is fp32 arithmetic, one operation after the other. For 8 bit bitsandbytes multiplies (code · SCB) · fp32(1 /
127); one scale for each row is what every other reader of int8 holds, so the two factors are multiplied first here.
Each way has two roundings, and they differ by 2^-22 of the value at most.

Source: bitsandbytes 0.50 functional.py (QuantState), _ops.py; transformers 5.24. Left out: writing, as no current
engine reads it; stacks of experts, which the library does not quantize; the column orders of old Turing kernels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.container import Container
from narrowcast.containers.contents import Contents, Source, Stored, contradiction, gather, left_alone
from narrowcast.containers.spelling import Array, Part, Place, Spelling, Tensors, code_part
from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import BNB_FP4, FP32, INT8, NF4, Format
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.packing import BYTES, pack, packing
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.storage import stored_scheme

NAME = "bitsandbytes"
_TYPES: Mapping[str, Format] = {"nf4": NF4, "fp4": BNB_FP4}
_STATE = ".weight.quant_state.bitsandbytes__"
_SUFFIXES = (
    ".weight", ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map",
    *(_STATE + kind for kind in _TYPES), ".SCB", ".weight_format",
)  # fmt: skip
_PIECE = re.compile(r"\.(\w*absmax|\w*quant_map|quant_state\.\w+|SCB|weight_format)$")
_NIBBLES = packing(4)
# bitsandbytes' own constant, fp32(1 / 127).
_OVER_127 = np.float32(7.874015718698502e-3)


@dataclass(frozen=True)
class Nested:
    """Double quantization: scale = map[code] · nested[block // blocksize] + offset, all in fp32."""

    map: NDArray[np.float32]
    blocksize: int
    offset: np.float32
    suffix: str = ".weight.nested_absmax"


@dataclass(frozen=True)
class Blocks(Spelling):
    """A matrix of 4-bit codes in flattened blocks, whose absmax may be quantized itself."""

    blocksize: int = 64
    nested: Nested | None = None

    def scales(
        self, source: Tensors, place: Place, shape: tuple[int, int], start: int, stop: int
    ) -> tuple[Array, Array | None]:
        """Scales in fp32 for each group of columns."""
        found, zero = super().scales(source, place, shape, start, stop)
        if self.nested is None:
            return found, zero
        outer = np.empty(prod(source.entries[place.stem + self.nested.suffix].shape), np.float32)
        source.read_into(place.stem + self.nested.suffix, outer)
        group = self.scheme.group
        first = np.arange(start, stop)[:, None] * shape[1] + np.arange(0, shape[1], group)
        block = first // self.blocksize
        scales = self.nested.map[found] * outer[block // self.nested.blocksize] + self.nested.offset
        return scales, zero


def spell(fmt: Format, k: int, blocksize: int, nested: Nested | None = None) -> Blocks:
    """Codes and scales of a matrix with K columns."""
    scheme = stored_scheme(fmt, (1, gcd(k, blocksize)), FP32)
    rows = blocksize // gcd(k, blocksize)

    def codes(stored: Array, count: int) -> Array:
        flat = stored.reshape(-1).view(np.uint8)
        if k % 2 == 0:
            return (flat >> np.uint8(4) | flat << np.uint8(4)).reshape(count, -1)
        nibbles = np.stack([flat >> np.uint8(4), flat & np.uint8(15)], axis=-1).reshape(-1)
        return pack(nibbles[: count * k].reshape(count, k), _NIBBLES)

    def scales(stored: Array, count: int) -> Array:
        first = np.arange(count)[:, None] * k + np.arange(0, k, scheme.group)
        of_group: Array = stored.reshape(-1)[first // blocksize]
        return of_group

    parts = (
        # A stored row is one byte.
        Part(
            ".weight", "codes", "U8", lambda n, k: (-(-n * k // 2), 1), per=1 + k % 2,
            makes=k // (2 - k % 2), decode=codes,
        ),
        Part(
            ".weight.absmax", "scales", "F32" if nested is None else "U8", lambda n, k: (-(-n * k // blocksize), 1),
            per=rows, makes=k * rows // blocksize, decode=scales,
        ),
    )  # fmt: skip
    return Blocks(NAME, fmt.name, scheme, _NIBBLES, parts, blocksize=blocksize, nested=nested)


def spell_int8() -> Spelling:
    """Codes int8 [N, K] and SCB, the amax of each row."""

    def scales(stored: Array, count: int) -> Array:
        return (stored[:count] * _OVER_127).reshape(-1, 1)

    parts = (
        code_part(".weight", "I8", BYTES),
        Part(".SCB", "scales", "F32", lambda n, k: (n,), decode=scales),
    )
    return Spelling(NAME, "int8", stored_scheme(INT8, (1, 0), FP32), BYTES, parts)


def claims(source: Source) -> bool:
    """Whether the config names this method, or asks for 4 or 8 bits without naming any, as old configs do."""
    config = source.config
    method = config.get("quant_method")
    return method == NAME or (not method and _bits(config) is not None)


def _bits(config: Mapping[str, Any]) -> int | None:
    for bits in (4, 8):
        if config.get(f"load_in_{bits}bit") or config.get(f"_load_in_{bits}bit"):
            return bits
    return None


def read(source: Source) -> Contents:
    """Every matrix with its spelling; CheckpointError where a piece is missing or the config says otherwise."""
    matrices, taken = [], []
    told = [str(name) for name in source.config.get("llm_int8_skip_modules") or ()]
    for module, parts in gather(source.entries, _SUFFIXES).items():
        extra = parts.keys() - {".weight"}
        if not extra:
            continue
        stored = _int8(source, module, parts) if ".SCB" in parts else _four_bit(source, module, parts)
        denied = next((name for name in told if left_alone(name, module)), None)
        if denied is not None:
            raise contradiction(
                f"{module} is quantized, and the config says that it is not", source, got=", ".join(sorted(parts)),
                wanted=f"a plain weight, as llm_int8_skip_modules has {denied!r}",
            )  # fmt: skip
        matrices.append(stored)
        taken += [module + suffix for suffix in sorted(extra - {part.suffix for part in stored.how.parts})]
    _refuse_others(source, {name for stored in matrices for name in stored.tensors} | set(taken))
    if not matrices:
        raise contradiction(
            f"the config says {NAME}, and no tensor is quantized", source, got=f"{len(source.entries)} tensors",
            wanted="weights with absmax or SCB beside them", remedy="remove the quantization_config",
        )  # fmt: skip
    return Contents(NAME, tuple(matrices), taken=tuple(taken))


def _refuse_others(source: Source, known: set[str]) -> None:
    others = [name for name in source.entries if _PIECE.search(name) and name not in known]
    if others:
        raise contradiction(
            f"{len(others)} pieces of quantized tensors belong to no linear layer", source, got=others[0],
            wanted="pieces of tensors called ...weight",
        )  # fmt: skip


def _int8(source: Source, module: str, parts: Mapping[str, Entry]) -> Stored:
    codes, scale = parts.get(".weight"), parts[".SCB"]
    if codes is None or codes.dtype.name != "I8" or len(codes.shape) != 2 or scale.shape != codes.shape[:1]:
        got = ", ".join(f"{e.name} {e.dtype.name} {list(e.shape)}" for e in parts.values())
        raise contradiction(
            f"{module} is no int8 matrix", source, got=got, wanted="weight I8 [N, K] and SCB [N]"
        )
    if _bits(source.config) == 4:
        raise _otherwise(source, module, "SCB, which 8 bits have", "load_in_4bit")
    form = parts.get(".weight_format")
    if form is not None and (order := source.checkpoint.array(form.name).reshape(-1).tolist()) != [0]:
        raise contradiction(
            f"{module} is stored in the column order of one kernel", source,
            got=f"weight_format {', '.join(map(str, order))}", wanted="0, which is row by row",
            remedy="save the model again with bitsandbytes 0.45 or later",
        )  # fmt: skip
    n, k = codes.shape
    how = spell_int8()
    return Stored(module, (n, k), how, LinearScheme(how.scheme))


def _four_bit(source: Source, module: str, parts: Mapping[str, Entry]) -> Stored:
    kinds = [kind for kind in _TYPES if _STATE + kind in parts]
    needed = {".weight", ".weight.absmax", ".weight.quant_map"}
    missing = sorted(needed - parts.keys()) + ([] if kinds else [f"{_STATE}nf4 or fp4"])
    if missing or len(kinds) > 1:
        raise contradiction(
            f"{module} is not complete", source, got=", ".join(module + suffix for suffix in sorted(parts)),
            wanted=", ".join(module + suffix for suffix in missing) or "one quant_state",
            remedy="download or copy the checkpoint again",
        )  # fmt: skip
    kind = kinds[0]
    state = _state(source, parts[_STATE + kind], kind)
    n, k = state["shape"]
    nested = _nested(source, module, parts, state)
    _agree(source, module, kind, nested)
    blocks = -(-n * k // state["blocksize"])
    codes, scale = parts[".weight"], parts[".weight.absmax"]
    wanted = "F32" if nested is None else "U8"
    if codes.nbytes != -(-n * k // 2) or prod(scale.shape) != blocks or scale.dtype.name != wanted:
        raise contradiction(
            f"{module}: its tensors do not have the sizes that its quant_state says", source,
            got=f"{codes.nbytes} bytes of codes, absmax {scale.dtype.name} {list(scale.shape)}",
            wanted=f"{-(-n * k // 2)} bytes and {wanted} [{blocks}], for {n} x {k} in blocks of {state['blocksize']}",
        )  # fmt: skip
    table = source.checkpoint.array(parts[".weight.quant_map"].name).reshape(-1)
    if not np.array_equal(table, decode_table(_TYPES[kind]).astype(np.float32)):
        raise contradiction(
            f"{module}: its quant_map is not the table of {kind}", source, got=str([float(x) for x in table[:3]]),
            wanted=str([float(x) for x in decode_table(_TYPES[kind])[:3]]),
        )  # fmt: skip
    how = spell(_TYPES[kind], k, state["blocksize"], nested)
    return Stored(module, (n, k), how, LinearScheme(how.scheme))


def _state(source: Source, entry: Entry, kind: str) -> dict[str, Any]:
    """The JSON of a quant_state: shape [N, K], blocksize, and those of double quantization."""
    try:
        state = json.loads(source.checkpoint.array(entry.name).tobytes())
        shape, size = state["shape"], state["blocksize"]
        sound = [type(x) for x in (*shape, size)] == [int] * 3 and min(*shape, size) > 0
    except (ValueError, KeyError, TypeError):
        state, sound = {}, False
    if not sound or state.get("quant_type") != kind:
        raise contradiction(
            f"{entry.name} does not describe a matrix", source, got=json.dumps(state)[:200],
            wanted=f"quant_type {kind}, a shape of two axes and a blocksize",
        )  # fmt: skip
    return dict(state)


def _nested(
    source: Source, module: str, parts: Mapping[str, Entry], state: Mapping[str, Any]
) -> Nested | None:
    names = (".weight.nested_absmax", ".weight.nested_quant_map")
    keys = ("nested_blocksize", "nested_offset")
    there = [name in parts for name in names] + [key in state for key in keys]
    if not any(there):
        return None
    blocks = prod(parts[".weight.absmax"].shape)
    if (
        not all(there)
        or prod(parts[names[0]].shape) != -(-blocks // int(state[keys[0]]))
        or parts[names[1]].shape != (256,)
        or {parts[name].dtype.name for name in names} != {"F32"}
    ):
        raise contradiction(
            f"{module}: its double quantization is not complete", source,
            got=", ".join([*(name for name in names if name in parts), *(key for key in keys if key in state)]),
            wanted=f"F32 nested_absmax and nested_quant_map [256] for {blocks} blocks, and {' and '.join(keys)}",
        )  # fmt: skip
    table = source.checkpoint.array(module + names[1]).astype(np.float32)
    return Nested(table, int(state[keys[0]]), np.float32(state[keys[1]]))


def _agree(source: Source, module: str, kind: str, nested: Nested | None) -> None:
    config = source.config
    if _bits(config) == 8:
        raise _otherwise(source, module, f"a quant_state of {kind}, which 4 bits have", "load_in_8bit")
    told = config.get("bnb_4bit_quant_type")
    if told is not None and told != kind:
        raise _otherwise(source, module, f"a quant_state of {kind}", f"bnb_4bit_quant_type {told}")
    twice = config.get("bnb_4bit_use_double_quant")
    if twice is not None and bool(twice) != (nested is not None):
        found = "scales that are quantized" if nested else "scales in fp32"
        raise _otherwise(source, module, found, f"bnb_4bit_use_double_quant {twice}")


def _otherwise(source: Source, module: str, got: str, wanted: str) -> Exception:
    problem = f"{module}: the config says something else than its tensors"
    return contradiction(problem, source, got=got, wanted=f"{wanted}, as in the config")


CONTAINER = Container(name=NAME, title="bitsandbytes", claims=claims, read=read)
