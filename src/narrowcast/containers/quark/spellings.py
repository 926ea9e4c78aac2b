"""How Quark spells a quantized linear layer: one dtype and granularity per tensor, every scale a multiplier.

A module ``m`` becomes tensors ``m.<suffix>``:

    dtype, qscheme                 weight               weight_scale                   more
    fp8_e4m3 per_tensor            F8_E4M3 [N, K]       F32 []
    fp8_e4m3 per_channel           F8_E4M3 [N, K]       F32 [N]
    fp8_e4m3 per_block             F8_E4M3 [N, K]       F32 or F8_E8M0 [N/128, K/128]
    fp4, fp6_* per_group 32        U8 [N, K·bits/8]     U8 [N, K/32]
    fp8_e4m3 per_group 32          F8_E4M3 [N, K]       U8 [N, K/32]
    fp4 per_group 16 + fp8         U8 [N, K/2]          F8_E4M3 [N, K/16]              weight_scale_2 F32 []
    int4, uint4 per_group          I32 [K, N/8]         source dtype [K/g, N]          weight_zero_point I32 [K/g, N/8]

A static input has input_scale [], under two levels input_scale_2 []. A word of int4 holds the codes of eight
neighbouring rows, the lowest nibble first: rows 0, 2, 4, 6, 1, 3, 5, 7 of the eight where the config's pack_method is
"reorder", which is what is written, or in their order where it is "order". int4 is in two's complement and its zero
points are zeros, which are written too, since Quark asks for them.

Source: amd-quark 0.13 (torch/utils/pack.py, torch/export), vLLM 0.32 (quantization/quark). Left out: int8 and the
2-bit and 3-bit integers, MX6 and MX9, W4A8 of two integer levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.spelling import Array, Part, Spelling, code_part, scale_part, value_part
from narrowcast.errors import UsageError
from narrowcast.numbers.formats import BF16, E2M1, E2M3, E3M2, E4M3FN, E8M0, FP16, FP32, INT4, UINT4, Format
from narrowcast.tensors.packing import BYTES, pack, packing, unpack
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, schemes
from narrowcast.tensors.storage import same_storage, stored_scheme

NAME = "quark"
DTYPES: Mapping[str, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "e4m3fn": "F8_E4M3", "e8m0": "U8"}
FLOATS = (FP32, BF16, FP16)
MX = (E2M1, E2M3, E3M2, E4M3FN)
NIBBLES = packing(4)
REORDERED = (0, 2, 4, 6, 1, 3, 5, 7)
STRAIGHT = tuple(range(8))
# Schemes of inputs by name.
INPUTS = (
    "fp8_tensor", "fp8_channel", "fp8_group128", "nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3",
)  # fmt: skip


def spelling(linear: LinearScheme, source: Format) -> Spelling:
    """The way this container writes ``linear``; UsageError for weights or inputs that its config cannot say."""
    weight, scale = linear.weight, linear.weight.inner.format
    if len(weight.scales) == 2:  # an outer scale that divides elsewhere multiplies here
        weight = stored_scheme(weight.element, weight.inner.tile, scale, outer=True)
    integers = weight.element is INT4 or (weight.element is UINT4 and weight.zero is UINT4)
    if scale in FLOATS and source is not scale:
        weight = weight.with_scale_format(source if integers and source in FLOATS else FP32)
    tile = weight.inner.tile
    held = (
        (weight.element in MX and scale is E8M0 and tile == (1, 32))
        or (weight.element is E4M3FN and scale in FLOATS and tile in ((0, 0), (1, 0)))
        or (weight.element is E4M3FN and scale in (*FLOATS, E8M0) and tile == (128, 128))
        or same_storage(weight, schemes["nvfp4"])
        or (integers and scale in FLOATS and tile[0] == 1 < tile[1])
    )
    if not held:
        raise UsageError(
            f"{NAME} has no spelling for {weight.name}",
            wanted="fp8 per tensor, channel or block of 128, mxfp4, mxfp6, mxfp8, nvfp4 or int4 and uint4 groups",
            remedy="choose another preset; `narrowcast schemes` says who loads what",
        )  # fmt: skip
    if linear.input is not None and input_name(linear.input) is None:
        raise UsageError(
            f"{NAME} has no word for {linear.input.name} inputs", wanted=", ".join(INPUTS),
            remedy="choose another preset",
        )  # fmt: skip
    return spell(weight, linear)


def input_name(scheme: Scheme) -> str | None:
    """The name of an input's scheme in ``INPUTS``, or None."""
    return next((name for name in INPUTS if same_storage(scheme, schemes[name])), None)


def spell(
    scheme: Scheme, linear: LinearScheme, *, order: tuple[int, ...] = REORDERED, zeros: bool = True,
    static: str = "F32", outer: str = "F32",
) -> Spelling:  # fmt: skip
    """The tensors of one scheme; ``order`` is that of the eight rows in a word, ``zeros`` whether symmetric integers
    have zero points, ``static`` and ``outer`` the dtypes of the input's scale and of the weight's second one."""
    integers = scheme.element in (INT4, UINT4)
    parts = _words(scheme, order, zeros) if integers else [_codes(scheme), *_scales(scheme, outer)]
    if linear.calibrated:
        two = linear.input is not None and len(linear.input.scales) == 2
        parts.append(value_part(".input_scale_2" if two else ".input_scale", "input", (), dtype=static))
    rows, cols = scheme.inner.tile
    how = BYTES if scheme.element.bits == 8 else packing(scheme.element.bits)
    multiples = (8 if integers else max(rows, 1), max(cols, 1))
    return Spelling(NAME, word(scheme), scheme, how, tuple(parts), multiples)


def word(scheme: Scheme) -> str:
    """Dtype and granularity as the config says them."""
    tile = {(0, 0): "per_tensor", (1, 0): "per_channel"}.get(scheme.inner.tile)
    return (
        f"{QUARK[scheme.element.name]} {tile or ('per_block' if scheme.inner.tile[0] > 1 else 'per_group')}"
    )


QUARK: Mapping[str, str] = {
    "e4m3fn": "fp8_e4m3", "e2m1": "fp4", "e2m3": "fp6_e2m3", "e3m2": "fp6_e3m2", "int4": "int4", "uint4": "uint4",
}  # fmt: skip


def _codes(scheme: Scheme) -> Part:
    if scheme.element.bits == 8:
        return code_part(".weight", "F8_E4M3", BYTES)
    return code_part(".weight", "U8", packing(scheme.element.bits))


def _scales(scheme: Scheme, second: str) -> list[Part]:
    dtype, tile = DTYPES[scheme.inner.format.name], scheme.inner.tile
    if tile == (0, 0):
        return [value_part(".weight_scale", "outer", (), dtype=dtype)]
    if tile == (1, 0):
        return [Part(".weight_scale", "scales", dtype, lambda n, k: (n,), per=1)]
    if tile[0] > 1 and scheme.inner.format is E8M0:
        dtype = "F8_E8M0"
    outer = [value_part(".weight_scale_2", "outer", (), dtype=second)] if len(scheme.scales) == 2 else []
    return [scale_part(".weight_scale", dtype, scheme), *outer]


def _words(scheme: Scheme, order: tuple[int, ...], zeros: bool) -> list[Part]:
    """Codes, scales and zero points, whose rows run along the last axis."""
    group = scheme.group

    def turned(stored: Array, count: int) -> Array:
        return np.ascontiguousarray(stored.T)

    codes = Part(
        ".weight", "codes", "I32", lambda n, k: (k, n // 8), per=8, across=True,
        encode=lambda rows: to_words(unpack(rows, NIBBLES, 2 * rows.shape[1]), order),
        decode=lambda stored, count: pack(from_words(stored, order), NIBBLES),
    )  # fmt: skip
    scales = Part(
        ".weight_scale", "scales", DTYPES[scheme.inner.format.name], lambda n, k: (k // group, n), across=True,
        encode=lambda rows: np.ascontiguousarray(rows.T), decode=turned,
    )  # fmt: skip
    zero = Part(
        ".weight_zero_point", "zero", "I32", lambda n, k: (k // group, n // 8), per=8, across=True,
        encode=lambda rows: to_words(rows, order), decode=lambda stored, count: from_words(stored, order),
    )  # fmt: skip
    if (
        scheme.zero is None
    ):  # zeros, in the shape of a chunk's codes; the codes themselves are read after them
        zero = replace(
            zero, piece="codes",
            encode=lambda rows: np.zeros((2 * rows.shape[1] // group, rows.shape[0] // 8), np.int32),
        )  # fmt: skip
    return [zero, codes, scales] if zeros or scheme.zero is not None else [codes, scales]


def to_words(codes: NDArray[np.uint8], order: tuple[int, ...]) -> NDArray[np.int32]:
    """Codes [n, X] to words [X, n/8]: nibble i of a word holds row ``order[i]`` of its eight."""
    eights = codes.reshape(-1, 8, codes.shape[1])[:, order].astype(np.uint32)
    words = np.bitwise_or.reduce(eights << (np.arange(8, dtype=np.uint32) * 4)[None, :, None], axis=1)
    return np.ascontiguousarray(words.T).view(np.int32)


def from_words(words: Array, order: tuple[int, ...]) -> NDArray[np.uint8]:
    """The inverse: words [X, n/8] to codes [n, X]."""
    shifts = (np.arange(8, dtype=np.uint32) * 4)[None, :, None]
    nibbles = np.ascontiguousarray(words.T).view(np.uint32)[:, None, :] >> shifts & np.uint32(15)
    codes = np.empty(nibbles.shape, np.uint8)
    codes[:, order] = nibbles
    return codes.reshape(-1, words.shape[0])
