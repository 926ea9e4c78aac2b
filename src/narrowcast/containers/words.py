"""Integers in words along rows: the parts of GPTQ's and AWQ's tensors, and what such tensors say of themselves.

    m.qweight I32    codes      GPTQ [K·b/32, N]    AWQ [K, N/8]
    m.qzeros  I32    zero       GPTQ [G, N·b/32]    AWQ [G, N/8]       G = ⌈K/group⌉
    m.scales  F16    scale      [G, N]
    m.g_idx   I32    [K]        GPTQ: the group of each column, k // group unless columns are shuffled

Symmetric weights are signed integers q, stored as q + 2^(b-1) under zero points that all say so: 2^(b-1), or one
less in version 1 of GPTQ. They are written from the scheme, checked when they are read, and no part of the scheme.

Shuffled columns (act-order): groups are formed in another order than columns are stored in. A matrix is read with
its columns in that order, each group in one piece, and ``order`` says which column of the model each one is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.contents import Source, contradiction
from narrowcast.containers.spelling import Array, Part
from narrowcast.numbers.formats import Format, formats
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.packing import Packing, pack, packing, unpack
from narrowcast.tensors.schemes import Scheme
from narrowcast.tensors.storage import stored_scheme
from narrowcast.tensors.words import (
    BITS,
    awq_codes,
    awq_words,
    lie,
    lowered,
    raised,
    stand,
    zero_codes,
    zero_words,
)

SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
SCALES = {"fp16": "F16", "bf16": "BF16", "fp32": "F32"}
VERSIONS = {1: "gptq", 2: "gptq_v2"}
Order = NDArray[np.int64]


@dataclass(frozen=True)
class Told:
    """What a config says of one matrix. ``sym`` is None where it says nothing; ``version`` how GPTQ's zero points
    are counted, and ``labels`` what a config calls the first and the second; ``borrows`` whether their writer counts
    down whole words, so that a field may wrap; ``shuffled`` whether columns may be (None: nothing said)."""

    bits: int
    group: int
    sym: bool | None
    version: int = 2
    labels: tuple[str, str] = ("checkpoint_format gptq", "checkpoint_format gptq_v2")
    borrows: bool = False
    shuffled: bool | None = None


@dataclass(frozen=True)
class Found:
    """A matrix [N, K] as its tensors have it."""

    shape: tuple[int, int]
    scheme: Scheme
    parts: tuple[Part, ...]
    packing: Packing
    order: Order | None = None


def words_packing(scheme: Scheme) -> Packing:
    """Codes between GPTQ's words and the kernels: one stream per row, signed ones stored with their offset."""
    return packing(scheme.element.bits, flip=scheme.element.signed, word=32)


def gptq_parts(
    scheme: Scheme, version: int, *, g_idx: bool = True, order: Order | None = None
) -> tuple[Part, ...]:
    """GPTQ's tensors for a scheme of integers; ``order`` [K] where columns are shuffled."""
    bits, how = scheme.element.bits, words_packing(scheme)

    def write(rows: Array) -> Array:
        return stand(rows if order is None else _shuffled(rows, how, np.argsort(order)))

    def read(words: Array, count: int) -> Array:
        return lie(words) if order is None else _shuffled(lie(words), how, order)

    parts = [
        Part(".qweight", "codes", "I32", lambda n, k: (-(-k * bits // 32), n), across=True, encode=write, decode=read),
        _zeros(scheme, version),
        _scales(scheme),
    ]  # fmt: skip
    if order is not None:
        parts.append(_shuffle(scheme))
    elif g_idx:
        parts.append(Part(".g_idx", "shape", "I32", lambda n, k: (k,), per=0,
                          encode=lambda shape: _groups(int(shape[1]), scheme)))  # fmt: skip
    return tuple(parts)


def awq_parts(scheme: Scheme) -> tuple[Part, ...]:
    """AWQ's tensors for a scheme of 4-bit integers."""
    raw = packing(4)  # what lies in a row's bytes, offsets and all
    codes = Part(
        ".qweight", "codes", "I32", lambda n, k: (k, n // 8), per=8, across=True,
        encode=lambda rows: awq_words(unpack(rows, raw, 2 * rows.shape[1])),
        decode=lambda words, count: pack(awq_codes(words)[:count], raw),
    )  # fmt: skip
    if scheme.zero is None:
        return codes, _same_zeros(scheme, 8, awq_words), _scales(scheme)
    zero = Part(
        ".qzeros", "zero", "I32", _zeros_shape(scheme), per=8, across=True,
        encode=awq_words, decode=lambda words, count: awq_codes(words)[:count],
    )  # fmt: skip
    return codes, zero, _scales(scheme)


def _zeros_shape(scheme: Scheme) -> Callable[[int, int], tuple[int, ...]]:
    return lambda n, k: (_tiles(k, scheme), -(-n * scheme.element.bits // 32))


def _same_zeros(scheme: Scheme, said: int, words: Callable[[Array], Array]) -> Part:
    """Zero points that say no more than that weights are symmetric."""

    def write(shape: Array) -> Array:
        n, k = (int(size) for size in shape)
        return words(np.full((n, _tiles(k, scheme)), said, np.uint8))

    return Part(".qzeros", "shape", "I32", _zeros_shape(scheme), per=0, encode=write)


def _zeros(scheme: Scheme, version: int) -> Part:
    bits = scheme.element.bits
    if scheme.zero is None:
        return _same_zeros(scheme, _middle(bits, version), lambda zero: zero_words(zero, bits))
    rows, words = (32, bits) if 32 % bits else (32 // bits, 1)

    def write(zero: Array) -> Array:
        stored = zero_words(zero, bits)
        return lowered(stored, bits) if version == 1 else stored

    def read(stored: Array, count: int) -> Array:
        return zero_codes(raised(stored, bits) if version == 1 else stored, bits, count)

    return Part(
        ".qzeros", "zero", "I32", _zeros_shape(scheme), per=rows, makes=words, across=True,
        encode=write, decode=read,
    )  # fmt: skip


def _scales(scheme: Scheme) -> Part:
    dtype = SCALES[scheme.inner.format.name]
    return Part(
        ".scales", "scales", dtype, lambda n, k: (_tiles(k, scheme), n), across=True,
        encode=lambda scales: np.ascontiguousarray(scales.T),
        decode=lambda stored, count: np.ascontiguousarray(stored.T),
    )  # fmt: skip


def _shuffle(scheme: Scheme) -> Part:
    """g_idx of shuffled columns, as the model's column of each one that is read."""

    def write(order: Array) -> Array:
        g_idx = np.empty(len(order), np.int32)
        g_idx[order] = _groups(len(order), scheme)
        return g_idx

    return Part(".g_idx", "order", "I32", lambda n, k: (k,), per=0, encode=write,
                decode=lambda g_idx, count: np.argsort(g_idx, kind="stable"))  # fmt: skip


def _shuffled(rows: Array, how: Packing, order: Array) -> Array:
    return pack(unpack(rows, how, len(order))[:, order], how)


def _tiles(k: int, scheme: Scheme) -> int:
    return -(-k // scheme.group) if scheme.group else 1


def _groups(k: int, scheme: Scheme) -> NDArray[np.int32]:
    return (np.arange(k) // (scheme.group or k)).astype(np.int32)


def _middle(bits: int, version: int) -> int:
    """The zero point of symmetric weights, as a version stores it."""
    return (1 << (bits - 1)) - (version == 1)


def find_gptq(source: Source, module: str, parts: Mapping[str, Entry], told: Told) -> Found:
    """A GPTQ matrix, from its tensors, held against what the config says of it."""
    _whole(source, module, parts)
    bits, n = told.bits, parts[".qweight"].shape[1]
    if bits not in BITS:
        raise contradiction(
            f"{module}: its packing is not known", source, got=f"{bits} bits", wanted="2, 3, 4 or 8"
        )
    k = parts[".qweight"].shape[0] * 32 // bits
    if ".g_idx" in parts and parts[".g_idx"].shape != (0,):
        k = prod(parts[".g_idx"].shape)
    group = told.group if told.group > 0 else 0
    tiles = -(-k // group) if group else 1
    shapes = {
        ".qweight": (-(-k * bits // 32), n), ".qzeros": (tiles, -(-n * bits // 32)), ".scales": (tiles, n)
    }  # fmt: skip
    _check_shapes(source, module, parts, shapes, f"{bits} bits in groups of {told.group}")
    zero = zero_codes(source.checkpoint.array(f"{module}.qzeros"), bits, n)
    symmetric = _symmetric_gptq(source, module, zero, told)
    scheme = _scheme(parts, bits, group, symmetric)
    order = _order(source, module, parts, scheme, k, told)
    made = gptq_parts(scheme, told.version, g_idx=".g_idx" in parts, order=order)
    return Found((n, k), scheme, made, words_packing(scheme), order)


def _symmetric_gptq(source: Source, module: str, zero: NDArray[np.uint8], told: Told) -> bool:
    """Whether zero points say that weights are symmetric; refused where they deny the version or the label."""
    ours, other = _middle(told.bits, told.version), _middle(told.bits, 3 - told.version)
    label, twin = told.labels[told.version - 1], told.labels[2 - told.version]
    if told.sym is not False and bool((zero == ours).all()):
        return True
    if told.sym is not False and bool((zero == other).all()):
        raise contradiction(
            f"{module}: its zero points look like {'v1' if told.version == 2 else 'v2'}", source,
            got=f"zero points of {other} under {label}",
            wanted=f"{ours} for symmetric weights of {told.bits} bits",
            remedy=f"if the weights decode well so, write {twin} into the config",
        )  # fmt: skip
    if told.sym:
        low, high = int(zero.min()), int(zero.max())
        raise contradiction(
            f"{module}: the config says symmetric, and its zero points differ", source,
            got=f"zero points from {low} to {high}", wanted=f"{ours} everywhere",
        )  # fmt: skip
    top = (1 << told.bits) - 1
    if told.version == 1 and not told.borrows and bool((zero == top).any()):
        raise contradiction(
            f"{module}: its zero points look like v2", source,
            got=f"{int((zero == top).sum())} zero points stored as {top}, which v1 counts as {top + 1}",
            wanted=f"at most {top}",
            remedy=f"if the weights decode well so, write {twin} into the config; "
            "if they are v1, these were zeros, which readers of v1 decode differently",
        )  # fmt: skip
    return False


def _order(
    source: Source, module: str, parts: Mapping[str, Entry], scheme: Scheme, k: int, told: Told
) -> Order | None:
    """The columns group by group, or None where that is how they lie."""
    if ".g_idx" not in parts or parts[".g_idx"].shape == (0,):
        return None
    g_idx = source.checkpoint.array(f"{module}.g_idx").reshape(-1).astype(np.int64)
    wanted = _groups(k, scheme)
    if np.array_equal(g_idx, wanted):
        return None
    order: Order = np.argsort(g_idx, kind="stable")
    if not np.array_equal(g_idx[order], wanted):
        raise contradiction(
            f"{module}: its g_idx is no grouping of its columns", source,
            got=f"groups of {_sizes(g_idx)} columns", wanted=f"groups of {scheme.group or k}",
        )  # fmt: skip
    if told.shuffled is False:
        raise contradiction(
            f"{module}: its columns are shuffled over the groups, and the config says that they are not", source,
            got="a g_idx that is not k // group_size", wanted="desc_act true",
            remedy="set desc_act to true, so that no engine ignores g_idx",
        )  # fmt: skip
    return order


def _sizes(g_idx: Order) -> str:
    found = np.unique(np.unique(g_idx, return_counts=True)[1])
    return " and ".join(str(size) for size in found[:3])


def find_awq(source: Source, module: str, parts: Mapping[str, Entry], told: Told) -> Found:
    """An AWQ matrix in gemm order. ``told.sym`` says whether its zero points are all 8 because weights are
    symmetric."""
    _whole(source, module, parts)
    if told.bits != 4:
        raise contradiction(f"{module}: AWQ packs 4 bits", source, got=f"{told.bits} bits", wanted="4")
    k, words = parts[".qweight"].shape
    group = told.group if told.group > 0 else 0
    tiles = -(-k // group) if group else 1
    shapes = {".qzeros": (tiles, words), ".scales": (tiles, 8 * words)}
    _check_shapes(source, module, parts, shapes, f"4 bits in groups of {told.group}")
    scheme = _scheme(parts, 4, group, bool(told.sym))
    return Found((8 * words, k), scheme, awq_parts(scheme), packing(4, flip=scheme.element.signed))


def eights(source: Source, modules: Mapping[str, Mapping[str, Entry]]) -> bool:
    """Whether every AWQ zero point of a checkpoint is 8, the middle: weights are then symmetric."""
    return all(
        bool((source.checkpoint.array(f"{module}.qzeros").view(np.uint32) == 0x88888888).all())
        for module, parts in modules.items()
        if ".qzeros" in parts
    )


def _whole(source: Source, module: str, parts: Mapping[str, Entry]) -> None:
    missing = [suffix for suffix in (".qweight", ".qzeros", ".scales") if suffix not in parts]
    if missing:
        raise contradiction(
            f"{module} is not complete", source, got=", ".join(sorted(parts)),
            wanted=f"{', '.join(missing)} as well", remedy="download or copy the checkpoint again",
        )  # fmt: skip
    flat = [suffix for suffix in (".qweight", ".qzeros", ".scales") if len(parts[suffix].shape) != 2]
    if flat:
        raise contradiction(
            f"{module}: its tensors are no matrices", source,
            got=", ".join(f"{suffix[1:]} {list(parts[suffix].shape)}" for suffix in flat), wanted="two axes",
        )  # fmt: skip
    dtypes = {suffix: parts[suffix].dtype.name for suffix in (".qweight", ".qzeros", ".scales")}
    if dtypes[".qweight"] != "I32" or dtypes[".qzeros"] != "I32" or dtypes[".scales"] not in SCALES.values():
        raise contradiction(
            f"{module}: its tensors have other dtypes than words and scales", source,
            got=", ".join(f"{suffix[1:]} {name}" for suffix, name in dtypes.items()),
            wanted="I32 words under F16, BF16 or F32 scales",
        )  # fmt: skip


def _check_shapes(
    source: Source, module: str, parts: Mapping[str, Entry], wanted: Mapping[str, tuple[int, ...]], said: str
) -> None:
    differ = [suffix for suffix, shape in wanted.items() if parts[suffix].shape != shape]
    if differ:
        raise contradiction(
            f"{module}: its tensors do not have the shapes that the config gives them", source,
            got=", ".join(f"{suffix[1:]} {list(parts[suffix].shape)}" for suffix in differ),
            wanted=", ".join(f"{suffix[1:]} {list(wanted[suffix])}" for suffix in differ) + f" for {said}",
        )  # fmt: skip


def _scheme(parts: Mapping[str, Entry], bits: int, group: int, symmetric: bool) -> Scheme:
    scale: Format = formats[str(DTYPES[parts[".scales"].dtype.name].format)]
    element = formats[f"{'int' if symmetric else 'uint'}{bits}"]
    return stored_scheme(element, (1, group), scale, zero=None if symmetric else element)
