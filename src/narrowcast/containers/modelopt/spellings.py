"""How ModelOpt spells a quantized linear layer, by the name of its algorithm.

A module ``m`` becomes tensors ``m.<suffix>``; every scale multiplies:

    quant_algo                   weight                weight_scale               more
    FP8                          F8_E4M3 [N, K]        F32 []                     input_scale F32 []
    FP8_PER_CHANNEL_PER_TOKEN    F8_E4M3 [N, K]        F32 [N]
    fp8_pb_wo                    F8_E4M3 [N, K]        F32 [⌈N/128⌉, 1, K/128, 1]
    NVFP4                        U8 [N, K/2]           F8_E4M3 [N, K/16]          weight_scale_2, input_scale F32 []
    W4A16_NVFP4                  the same                                         weight_scale_2
    MXFP8                        F8_E4M3 [N, K]        U8 [N, K/32]
    mxfp4, W4A8_MXFP4_FP8        U8 [N, K/2]           U8 [N, K/32]
    W4A16_AWQ                    U8 [N/2, K]           F32 [N, K/g]               pre_quant_scale [K]
    W4A8_AWQ                     the same                                         weight_scale_2, input_scale F32 []
    W8A16, W8A8_SQ_PER_CHANNEL   I8 [N, K]             F32 [N]                    input_scale F32 []

A byte of U8 [N, K/2] holds two neighbours of a row, a byte of U8 [N/2, K] two rows of one column: row 2i in the low
nibble, 2i + 1 in the high one. An AWQ layer multiplies its input by pre_quant_scale before the product, so the weight
that meets the model's own input is

    W[n, k] = code[n, k] · weight_scale[n, k // g] · pre_quant_scale[k]

and that is what decoding gives, rounded once from the product in fp32. Its readers ask for pre_quant_scale, so ones
are written where there was none. The weight_scale_2 of W4A8_AWQ is no part of that product: engines round the
decoded weight to FP8 with it. Scales in 16 bits stay so when they come from another container.

Source: nvidia-modelopt 0.47 (torch/export/quant_utils.py), vLLM 0.32 (quantization/modelopt.py). Read and not
written: NVFP4_AWQ, whose pre_quant_scale is lost in most layers (fused into a norm), and W4A8_NVFP4_FP8, whose block
scales must stay below 448/6. Left out: NVFP4_SVD, which adds a product of two thin matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.spelling import Part, Spelling, code_part, scale_part, value_part
from narrowcast.errors import UsageError
from narrowcast.numbers.formats import BF16, E8M0, FP16, FP32, INT4, Format
from narrowcast.tensors.packing import BYTES, pack, packing, unpack
from narrowcast.tensors.presets import LinearScheme
from narrowcast.tensors.schemes import Scheme, schemes
from narrowcast.tensors.storage import same_storage, stored_scheme

NAME = "modelopt"
DTYPES: Mapping[str, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "e4m3fn": "F8_E4M3", "e8m0": "U8"}
NIBBLES = packing(4)
BLOCK = (128, 128)  # the only block that engines load under fp8_pb_wo


@dataclass(frozen=True)
class Algorithm:
    """One ``quant_algo``: its weight scheme, its input's (None: kept wide), whether that is made on the fly (None:
    where the file has no scale), and the group_size that its config names."""

    name: str
    weight: str
    input: str | None = None
    dynamic: bool | None = True
    group: int | None = None
    written: bool = True

    def holds(self, scheme: Scheme) -> bool:
        """Whether a weight of this storage is what the name says, up to the dtype of float scales."""
        if self.weight == "int4":
            return scheme.element is INT4 and scheme.zero is None and scheme.inner.tile[0] == 1 < scheme.group
        row = schemes[self.weight]
        floats = scheme.inner.format in (BF16, FP16, E8M0) and row.inner.format is FP32
        return same_storage(scheme.with_scale_format(FP32) if floats else scheme, row)

    def takes(self, linear: LinearScheme) -> bool:
        """Whether the layer's input is what the name says."""
        if self.input is None or linear.input is None:
            return self.input is None and linear.input is None
        return same_storage(linear.input, schemes[self.input]) and self.dynamic in (None, linear.dynamic)

    def linear(self, weight: Scheme, static: bool) -> LinearScheme:
        """What a layer of this name computes; ``static`` says whether its input's scale is in the file."""
        return (
            LinearScheme(weight)
            if self.input is None
            else LinearScheme(weight, schemes[self.input], not static)
        )


_ROWS = (
    Algorithm("FP8", "fp8_tensor", "fp8_tensor", False),
    Algorithm("FP8_PER_CHANNEL_PER_TOKEN", "fp8_channel", "fp8_token"),
    # Weight-only by its name; every engine that loads it quantizes the input to groups of 128.
    Algorithm("fp8_pb_wo", "fp8_block128", "fp8_group128"),
    Algorithm("NVFP4", "nvfp4", "nvfp4", False, 16),
    Algorithm("W4A16_NVFP4", "nvfp4", None, group=16),
    Algorithm("NVFP4_AWQ", "nvfp4", "nvfp4", False, 16, written=False),
    Algorithm("W4A8_NVFP4_FP8", "nvfp4", "fp8_tensor", False, 16, written=False),
    Algorithm("MXFP8", "mxfp8_e4m3", "mxfp8_e4m3", True, 32),
    Algorithm("mxfp4", "mxfp4", "mxfp4"),
    Algorithm("W4A8_MXFP4_FP8", "mxfp4", "fp8_tensor", None, 32),
    Algorithm("W4A16_AWQ", "int4"),
    Algorithm("W4A8_AWQ", "int4", "fp8_tensor", False),
    Algorithm("W8A16", "int8_channel"),
    Algorithm("W8A8_SQ_PER_CHANNEL", "int8_channel", "int8_tensor", False),
)  # fmt: skip
ALGORITHMS: Mapping[str, Algorithm] = {row.name.upper(): row for row in _ROWS}
# Other names of the same tensors.
ALIASES: Mapping[str, str] = {"FP8_BLOCK_SCALES": "FP8_PB_WO", "FP8_PB_REAL": "FP8_PB_WO"}


def spelling(linear: LinearScheme, source: Format) -> Spelling:
    """The way this container writes ``linear``; UsageError where none of its algorithms computes it."""
    weight = linear.weight
    if len(weight.scales) == 2:  # an outer scale that divides elsewhere multiplies here
        weight = stored_scheme(weight.element, weight.inner.tile, weight.inner.format, outer=True)
    rows = [row for row in ALGORITHMS.values() if row.written and row.holds(weight)]
    row = next((row for row in rows if row.takes(linear)), None)
    if row is None:
        raise UsageError(
            f"{NAME} has no algorithm that computes {weight.name} with {_input(linear)}",
            wanted="; ".join(f"{row.name}: {_words(row)}" for row in rows or ALGORITHMS.values() if row.written),
            remedy="--preset with one of these, where the weights are the same, changes no code and no scale",
        )  # fmt: skip
    scale = weight.inner.format
    powers = scale is E8M0 and row.name == "fp8_pb_wo"
    if powers or (scale in (BF16, FP16) and source is not scale):
        weight = weight.with_scale_format(FP32)
    return spell(row, weight, linear.calibrated)


def _input(linear: LinearScheme) -> str:
    if linear.input is None:
        return "a wide input"
    return f"{linear.input.name} inputs, {'made on the fly' if linear.dynamic else 'with a stored scale'}"


def _words(row: Algorithm) -> str:
    weight = "int4 groups" if row.weight == "int4" else row.weight
    if row.input is None:
        return f"{weight} with a wide input"
    return f"{weight} with {row.input}{'' if row.dynamic is not False else ' of a stored scale'}"


def spell(row: Algorithm, scheme: Scheme, static: bool, pre_scale: str | None = "F32") -> Spelling:
    """The tensors of one algorithm; ``static``: the input's scale is one of them, ``pre_scale``: its dtype, where an
    AWQ layer has one."""
    int4 = row.weight == "int4"
    parts = [_two_rows() if int4 else _codes(scheme), *_scales(scheme)]
    if pre_scale is not None and row.name.endswith("_AWQ"):
        columns = value_part(".pre_quant_scale", "pre_scale", dtype=pre_scale)
        parts.append(replace(columns, shape=lambda n, k: (k,)))
    if row.name == "W4A8_AWQ":
        parts.append(value_part(".weight_scale_2", "recast", ()))
    if static:
        parts.append(value_part(".input_scale", "input", ()))
    how = NIBBLES if scheme.element.bits == 4 else BYTES
    wide = 1 if row.weight in ("fp8_tensor", "fp8_channel", "int8_channel") else scheme.group
    return Spelling(NAME, row.name, scheme, how, tuple(parts), (2 if int4 else 1, wide))


def _codes(scheme: Scheme) -> Part:
    if scheme.element.bits == 4:
        return code_part(".weight", "U8", NIBBLES)
    return code_part(".weight", "F8_E4M3" if scheme.element.name == "e4m3fn" else "I8", BYTES)


def _scales(scheme: Scheme) -> list[Part]:
    dtype, tile = DTYPES[scheme.inner.format.name], scheme.inner.tile
    if tile == (0, 0):
        return [value_part(".weight_scale", "outer", (), dtype=dtype)]
    if tile == (1, 0):
        return [Part(".weight_scale", "scales", dtype, lambda n, k: (n,), per=1)]
    if tile[0] > 1:
        rows, cols = tile
        return [
            Part(
                ".weight_scale", "scales", dtype, lambda n, k: (-(-n // rows), 1, -(-k // cols), 1), per=rows
            )
        ]
    outer = [value_part(".weight_scale_2", "outer", ())] if len(scheme.scales) == 2 else []
    return [scale_part(".weight_scale", dtype, scheme), *outer]


def _two_rows() -> Part:
    return Part(
        ".weight", "codes", "U8", lambda n, k: (n // 2, k), per=2, encode=pack_rows,
        decode=lambda stored, count: unpack_rows(stored),
    )  # fmt: skip


def pack_rows(packed: NDArray[Any]) -> NDArray[np.uint8]:
    """Neighbours packed along a row [n, K/2] to neighbours packed along a column [n/2, K]."""
    codes = unpack(packed, NIBBLES, 2 * packed.shape[1])
    return codes[0::2] | codes[1::2] << np.uint8(4)


def unpack_rows(stored: NDArray[Any]) -> NDArray[np.uint8]:
    """The inverse: [n/2, K] to [n, K/2]."""
    codes = np.stack([stored & np.uint8(15), stored >> np.uint8(4)], axis=1)
    return pack(codes.reshape(-1, stored.shape[1]), NIBBLES)
