"""How torchao's tensor classes lie in a file: the parts and the scheme of each.

    class                       qdata                          scale                       more
    Float8Tensor                F8_E4M3 [N, K]                 F32, one per block_size
    Int8Tensor                  I8 [N, K]                      float, one per block_size   zero_point, act_quant_scale
    IntxUnpackedToInt8Tensor    I8 [N, K] of b bits            float, one per block_size   zero_point
    Int4Tensor                  two in a byte [N, K/2]         float [K/g, N]              zero_point, a float like it
    MXTensor                    F8 [N, K] or U8 [N, K/2]       E8M0 [N, K/32]              scales may be swizzled
    NVFP4Tensor                 U8 [N, K/2]                    F8_E4M3 [N, K/16]           per_tensor_scale multiplies

Low nibbles come first. Integer zero points are signed here; code and zero point are shifted together into the unsigned
integers that every other container has, which changes no value, and zero points that are all 0 are left out. The
zero point of an Int4Tensor is x = code · scale + zero, in the values' own unit, and stays an offset.

Swizzled scales are the hardware layout ``sf_128x4``, kept as [32 ⌈N/128⌉, 16 ⌈columns/4⌉].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from narrowcast.containers.spelling import (
    Array,
    Part,
    Piece,
    Spelling,
    code_part,
    scale_part,
    value_part,
    widened,
)
from narrowcast.errors import CheckpointError
from narrowcast.numbers.formats import E2M1, E4M3FN, E8M0, INT4, Format, formats
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.layouts import layout
from narrowcast.tensors.packing import BYTES, pack, packing
from narrowcast.tensors.scaling import scales_shape
from narrowcast.tensors.schemes import Scheme, Tile
from narrowcast.tensors.storage import stored_scheme

NAME = "torchao"
STEM = "._weight_"
Parts = Mapping[str, Entry]


def float8(parts: Parts, block: Tile) -> Spelling:
    """Codes of 8 bits with float scales."""
    qdata, scale = parts["qdata"], parts["scale"]
    scheme = stored_scheme(_format(qdata), _tile(qdata.shape, block), _format(scale))
    return _spelling(
        "float8", scheme, BYTES, (code_part(f"{STEM}qdata", qdata.dtype.name, BYTES), _scale(scheme, scale))
    )


def integers(parts: Parts, block: Tile, bits: int, zeros: Array | None) -> Spelling:
    """Signed integers of some bits in bytes; ``zeros`` are the zero points, where there are others than 0."""
    qdata, scale = parts["qdata"], parts["scale"]
    element = formats[f"{'int' if zeros is None else 'uint'}{bits}"]
    tile = _tile(qdata.shape, block)
    scheme = stored_scheme(element, tile, _format(scale), zero=None if zeros is None else element)
    how, name = packing(bits), qdata.name

    def codes(stored: Array, count: int) -> Array:
        return pack(_narrow(stored[:count], bits, zeros is not None, name), how)

    codes_part = Part(f"{STEM}qdata", "codes", "I8", lambda n, k: (n, k), decode=codes)
    made = [codes_part, _scale(scheme, scale)]
    if zeros is not None:
        made.append(_zero(scheme, parts["zero_point"], bits, qdata.shape[0]))
    return _spelling(f"int{bits}", scheme, how, tuple(made))


def int4(parts: Parts, group: int) -> Spelling:
    """Two signed codes in a byte, scales and offsets with the rows along the last axis."""
    scale, zero = parts["scale"], parts["zero_point"]
    scheme = stored_scheme(INT4, (1, group), _format(scale))
    scheme = replace(scheme, name=f"{scheme.name}_offset")  # not the symmetric one of that name

    def across(entry: Entry, piece: Piece, wide: bool) -> Part:
        def decode(stored: Array, count: int) -> Array:
            turned = np.ascontiguousarray(stored.T)
            return widened(turned, entry.dtype.name) if wide else turned

        suffix = f"{STEM}{'zero_point' if wide else 'scale'}"
        return Part(suffix, piece, entry.dtype.name, lambda n, k: (k // group, n), across=True, decode=decode)

    made = (
        code_part(f"{STEM}qdata", parts["qdata"].dtype.name, packing(4)),
        across(scale, "scales", False),
        across(zero, "offset", True),
    )
    return _spelling("int4", scheme, packing(4), made)


def microscaling(parts: Parts, element: Format, group: int, swizzled: bool) -> Spelling:
    """E8M0 scales of groups of a row."""
    return _blocks("mx", parts, stored_scheme(element, (1, group), E8M0), swizzled)


def nvfp4(parts: Parts, swizzled: bool) -> Spelling:
    """E4M3 scales of 16 elements, and one of the tensor where there is one."""
    outer = parts.get("per_tensor_scale")
    how = _blocks("nvfp4", parts, stored_scheme(E2M1, (1, 16), E4M3FN, outer=outer is not None), swizzled)
    return (
        how if outer is None else extended(how, value_part(f"{STEM}per_tensor_scale", "outer", outer.shape))
    )


def extended(how: Spelling, *parts: Part) -> Spelling:
    """A spelling with more parts."""
    return _spelling(how.format, how.scheme, how.packing, (*how.parts, *parts))


def _spelling(format: str, scheme: Scheme, how: Any, parts: tuple[Part, ...]) -> Spelling:
    return Spelling(NAME, format, scheme, how, parts)


def _blocks(format: str, parts: Parts, scheme: Scheme, swizzled: bool) -> Spelling:
    how = packing(4) if scheme.element is E2M1 else BYTES
    dtype = parts["scale"].dtype.name
    columns = parts["qdata"].shape[1] * 8 // how.bits // scheme.group
    part = _swizzled(scheme, dtype, columns) if swizzled else scale_part(f"{STEM}scale", dtype, scheme)
    return _spelling(format, scheme, how, (code_part(f"{STEM}qdata", parts["qdata"].dtype.name, how), part))


def _swizzled(scheme: Scheme, dtype: str, columns: int) -> Part:
    """Scales [N, columns] in the layout of block-scaled matrix products: a stored row is that of 128 rows."""
    group, order = scheme.group, layout("sf_128x4")

    def decode(stored: Array, count: int) -> Array:
        unit = (count, columns)
        return np.ascontiguousarray(order.unswizzle(stored.view(np.uint8).reshape(order.stored(unit)), unit))

    def shape(n: int, k: int) -> tuple[int, int]:
        return 32 * -(-n // 128), 16 * -(-k // (4 * group))

    return Part(f"{STEM}scale", "scales", dtype, shape, per=128, decode=decode)


def _scale(scheme: Scheme, entry: Entry) -> Part:
    if scheme.inner.tile == (0, 0):
        return value_part(f"{STEM}scale", "outer", entry.shape, dtype=entry.dtype.name)
    return scale_part(f"{STEM}scale", entry.dtype.name, scheme)


def _zero(scheme: Scheme, entry: Entry, bits: int, n: int) -> Part:
    """Zero points like the scales; those of whole tensors are read with all rows at once."""

    def decode(stored: Array, count: int) -> Array:
        return _narrow(stored[:count], bits, True, entry.name)

    return Part(
        f"{STEM}zero_point", "zero", "I8", lambda n, k: scales_shape((n, k), scheme)[0],
        per=scheme.inner.tile[0] or n, decode=decode,
    )  # fmt: skip


def _narrow(stored: Array, bits: int, shifted: bool, name: str) -> Array:
    """Signed bytes as codes of some bits; ``shifted`` makes them unsigned. CheckpointError beyond the range."""
    half = 1 << (bits - 1)
    low, high = int(stored.min(initial=0)), int(stored.max(initial=0))
    if low < -half or high >= half:
        raise CheckpointError(
            f"{name} has values beyond int{bits}", got=f"{low} to {high}", wanted=f"{-half} to {half - 1}",
            remedy="the checkpoint is damaged, or its metadata names the wrong dtype",
        )  # fmt: skip
    codes = stored.view(np.uint8) & np.uint8((1 << bits) - 1)
    return codes ^ np.uint8(half) if shifted else codes


def _format(entry: Entry) -> Format:
    return formats[DTYPES[entry.dtype.name].format or "fp32"]


def _tile(shape: tuple[int, ...], block: Tile) -> Tile:
    """A block as a tile: 0 for a whole axis, but for the rows of a matrix that has one."""
    if prod(block) == prod(shape):
        return (0, 0)
    return (0 if block[0] == shape[0] and block[0] > 1 else block[0]), (
        0 if block[1] == shape[1] else block[1]
    )
