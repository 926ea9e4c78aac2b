"""GGUF blocks: codes and scales side by side in the bytes of a row.

    Q8_0    fp16 d · int8 q[32]             x = d · q                 our int8 under fp16 per (1, 32)
    Q4_0    fp16 d · nibbles[32]            x = d · (q - 8)           our int4 under fp16 per (1, 32): code q XOR 8
    MXFP4   E8M0 e · nibbles[32]            x = 2^(e - 127) · E2M1    our mxfp4
    NVFP4   UE4M3 d[4] · 4 x nibbles[16]    x = d · E2M1 · outer      our nvfp4; its outer scale is a tensor apart
    Q4_1    fp16 d · fp16 m · nibbles[32]   x = d · q + m             affine without a zero point: no scheme of ours

Nibbles are split in halves: byte j of a block of 2h holds element j in its low half and element h + j in its high half.
``split`` and ``join`` move codes and scales between such rows and ours without touching a bit, so a matrix keeps its
values from container to container. A d of Q4_0 may be negative, as ggml gives the largest element the code -8.

``quantize`` is ggml's own rule for its types, bit for bit, in fp32 without contraction (id = 1 / d before d is
rounded to fp16):

    Q8_0    d = amax / 127             q = round(x · id), halves away from zero
    Q4_0    d = extreme / -8           q = min(15, trunc(x · id + 8.5)); the extreme is the first of largest magnitude
    Q4_1    d = (max - min) / 15       q = min(15, trunc((x - min) · id + 0.5)), m = min
    MXFP4   e = floor(log2 amax) + 125   the nearest E2M1, a half towards zero
    NVFP4   d = ue4m3(amax / 6)        the nearest E2M1, a half towards zero; no outer scale

Where ggml's C has no defined result (an exponent below 2^-127, a reciprocal that overflows) the nearest meaningful
one is taken: exponent 0, codes 0. Where its result is infinite (a d beyond fp16) or cut off (a d beyond UE4M3),
``quantize`` refuses.

Every other type is only read, through the gguf package, exactly to fp32.

Left out: quantizing to K-quants and the rest, which llama-quantize does better than any copy of it.

Source: ggml/src/ggml-quants.c quantize_row_*_ref, ggml-impl.h; gguf 0.19 quants.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import InputError, RangeError, UsageError
from narrowcast.numbers.codec import decode, to_bf16, widen
from narrowcast.numbers.formats import BF16, E4M3FN, FP16, formats
from narrowcast.store.gguf import GGML_TYPES, GGMLType
from narrowcast.tensors.scaling import check_finite, load_scale, spread
from narrowcast.tensors.schemes import Scheme, schemes

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class BlockType:
    """A type whose rows are codes and scales of a scheme. A block holds ``groups`` runs that share a scale each;
    ``flip`` is what nibbles are XORed with to become codes."""

    type: GGMLType
    scheme: Scheme
    groups: int = 1
    flip: int = 0

    @property
    def group(self) -> int:
        return self.type.block // self.groups

    @property
    def scale_bytes(self) -> int:
        return self.groups * (self.scheme.inner.format.bits // 8)


BLOCKS: Mapping[str, BlockType] = MappingProxyType(
    {
        row.type.name: row
        for row in (
            BlockType(GGML_TYPES["Q8_0"], schemes["int8_g32"].with_scale_format(FP16)),
            BlockType(GGML_TYPES["Q4_0"], schemes["int4_g32"].with_scale_format(FP16), flip=8),
            BlockType(GGML_TYPES["MXFP4"], schemes["mxfp4"]),
            BlockType(GGML_TYPES["NVFP4"], schemes["nvfp4"], groups=4),
        )
    }
)


def block_type(scheme: Scheme) -> BlockType | None:
    """The block type that holds codes and scales of this scheme bit for bit, or None; rules of quantizing and
    arithmetic do not matter."""
    for row in BLOCKS.values():
        own = row.scheme
        levels = [(level.format, level.tile, level.divides) for level in scheme.scales]
        if (
            scheme.element == own.element
            and scheme.zero is None
            and levels == [(level.format, level.tile, level.divides) for level in own.scales]
        ):
            return row
    return None


def split(row: BlockType, stored: U8) -> tuple[U8, NDArray[Any]]:
    """Codes uint8 [n, K] and inner scales [n, K / group] (fp16 as uint16 codes) of rows uint8 [n, bytes].

    Raises InputError for a scale byte that is NaN here and a number to ggml.
    """
    blocks = stored.reshape(len(stored), -1, row.type.nbytes)
    head, body = blocks[..., : row.scale_bytes], blocks[..., row.scale_bytes :]
    codes = body.copy() if row.scheme.element.bits == 8 else _from_halves(body, row) ^ np.uint8(row.flip)
    scales = np.ascontiguousarray(head)
    if row.scheme.inner.format is FP16:
        scales = scales.view("<u2")
    scales = scales.reshape(len(stored), -1)
    return codes.reshape(len(stored), -1), _checked(row, scales)


def join(row: BlockType, codes: U8, scales: NDArray[Any]) -> U8:
    """Rows uint8 [n, bytes] of codes uint8 [n, K] and inner scales [n, K / group]: the inverse of ``split``.

    Raises UsageError for rows that do not fill whole blocks, InputError for scales that ggml reads otherwise.
    """
    row.type.row_bytes(codes.shape[-1])
    n = len(codes)
    head = np.ascontiguousarray(_checked(row, scales)).view(np.uint8).reshape(n, -1, row.scale_bytes)
    if row.scheme.element.bits == 8:
        body = codes.reshape(n, -1, row.type.block)
    else:
        body = _to_halves((codes ^ np.uint8(row.flip)).reshape(-1, row.group), n, row)
    return np.concatenate([head, body], axis=-1).reshape(n, -1)


def _from_halves(body: U8, row: BlockType) -> U8:
    halves = body.reshape(-1, row.group // 2)
    return np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=-1)


def _to_halves(nibbles: U8, n: int, row: BlockType) -> U8:
    """Nibbles [runs, group] as bytes [n, blocks, bytes]."""
    half = row.group // 2
    return (nibbles[:, :half] | (nibbles[:, half:] << np.uint8(4))).reshape(n, -1, row.type.block // 2)


def _checked(row: BlockType, scales: NDArray[Any]) -> NDArray[Any]:
    """Scales, once ggml and the format's definition agree about them; a minus zero loses its sign, as there."""
    if row.scheme.inner.format is FP16:
        return scales
    if row.type.name == "MXFP4":
        wrong, what = scales == 255, "NaN by definition, 2^128 to ggml"
    else:
        scales = np.where(scales == 0x80, np.uint8(0), scales)
        wrong, what = (scales & 0x7F == 0x7F) | (scales > 0x7F), "NaN or negative, zero or positive to ggml"
    if wrong.any():
        raise InputError(
            f"{int(wrong.sum())} block scales of {row.type.name} mean different things to different readers",
            got=f"byte 0x{int(scales[wrong][0]):02x}: {what}",
            remedy="make the checkpoint again, or decode it to bf16 with the program that it was made for",
        )
    return scales


# --- ggml's quantizers ---------------------------------------------------------------------------------------------


def quantize(kind: GGMLType, x: F32) -> U8:
    """Rows uint8 [n, bytes] of finite x float32 [n, K] by ggml's reference rule for the type (F32, F16, BF16, Q8_0,
    Q4_0, Q4_1, MXFP4, NVFP4).

    Raises UsageError for another type or ragged rows, NonFiniteError, RangeError where a scale overflows fp16.
    """
    rule = _RULES.get(kind.name)
    if rule is None:
        raise UsageError(
            "this type cannot be quantized to here", got=kind.name, wanted=", ".join(_RULES),
            remedy="write F16 or BF16, and quantize that file with llama-quantize",
        )  # fmt: skip
    kind.row_bytes(x.shape[-1])
    check_finite(x)
    return rule(np.ascontiguousarray(x, np.float32)).reshape(len(x), -1)


def _plain(dtype: str) -> Callable[[F32], U8]:
    def as_bytes(x: F32) -> U8:
        stored = to_bf16(x) if dtype == "BF16" else _fp16(x, "values") if dtype == "F16" else x
        return stored.view(np.uint8)

    return as_bytes


def _q8_0(x: F32) -> U8:
    blocks = x.reshape(-1, 32)
    d = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    scaled = blocks * _reciprocal(d)
    magnitude = np.abs(scaled)
    whole = np.floor(magnitude)
    q = np.copysign(whole + (magnitude - whole >= 0.5), scaled).astype(np.int8)
    return join(BLOCKS["Q8_0"], q.view(np.uint8).reshape(len(x), -1), _scale16(d, len(x)))


def _q4_0(x: F32) -> U8:
    blocks = x.reshape(-1, 32)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
    d = (extreme + np.float32(0)) / np.float32(
        -8
    )  # ggml starts its search at +0: minus zeros alone give d = -0
    q = np.minimum(15, np.trunc(blocks * _reciprocal(d) + np.float32(8.5))).astype(np.uint8)
    return join(BLOCKS["Q4_0"], (q ^ np.uint8(8)).reshape(len(x), -1), _scale16(d, len(x)))


def _q4_1(x: F32) -> U8:
    blocks = x.reshape(-1, 32)
    low = blocks.min(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):  # a span beyond fp32 is refused as beyond fp16
        d = (blocks.max(axis=-1, keepdims=True) - low) / np.float32(15)
    head = [_fp16(part, "block scales").view(np.uint8) for part in (d, low)]
    q = np.minimum(15, np.trunc((blocks - low) * _reciprocal(d) + np.float32(0.5))).astype(np.uint8)
    return np.concatenate([*head, q[:, :16] | (q[:, 16:] << np.uint8(4))], axis=-1)


def _mxfp4(x: F32) -> U8:
    blocks = x.reshape(-1, 32)
    amax = np.abs(blocks).max(axis=-1)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(amax.astype(np.float64)).astype(np.float32)) - 2 + 127
    e = np.where(amax > 0, np.maximum(exponent, 0), 0).astype(np.uint8)
    codes = _nearest_e2m1(blocks, decode(e, BLOCKS["MXFP4"].scheme.inner.format)[:, None])
    return join(BLOCKS["MXFP4"], codes.reshape(len(x), -1), e.reshape(len(x), -1))


def _nvfp4(x: F32) -> U8:
    blocks = x.reshape(-1, 16)
    wanted = np.abs(blocks).max(axis=-1) / np.float32(6)
    _refuse_beyond(int((wanted > 448).sum()), "block scales", wanted, "UE4M3", 448)
    d = _ue4m3(wanted)
    codes = _nearest_e2m1(blocks, decode(d, E4M3FN)[:, None])
    return join(BLOCKS["NVFP4"], codes.reshape(len(x), -1), d.reshape(len(x), -1))


def _reciprocal(d: F32) -> F32:
    """1 / d, and 0 where d is zero or too small for one; such a d is zero in fp16 whatever the codes."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _scale16(d: F32, n: int) -> NDArray[np.uint16]:
    return _fp16(d, "block scales").view("<u2").reshape(n, -1)


def _fp16(values: F32, what: str) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        narrow = values.astype("<f2")
    _refuse_beyond(int(np.isinf(narrow).sum()), what, values, "fp16", FP16.max)
    return narrow


def _refuse_beyond(count: int, what: str, values: F32, fmt: str, largest: float) -> None:
    if count:
        raise RangeError(
            f"{count} {what} are beyond {fmt}", got=f"{float(np.abs(values).max()):g}", wanted=f"at most {largest:g}",
            remedy="write BF16 or MXFP4, or scale the tensor down",
        )  # fmt: skip


_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _nearest_e2m1(blocks: F32, scale: F32) -> U8:
    """The E2M1 code nearest to each element under its scale, a half towards zero, zero always positive: ggml's search
    for the first smallest error over codes 0 to 15. Every midpoint times a scale is exact in fp32; under scale 0 every
    code is equally good and the first is 0."""
    magnitude = np.abs(blocks)
    codes = np.zeros(blocks.shape, np.uint8)
    for midpoint in _MIDPOINTS:
        codes += magnitude > np.float32(midpoint) * scale
    codes[np.broadcast_to(scale == 0, codes.shape)] = 0
    return codes | np.where(np.signbit(blocks) & (codes > 0), np.uint8(8), np.uint8(0))


def _ue4m3(x: F32) -> U8:
    """Unsigned E4M3 of 0 ≤ x ≤ 448 as ggml rounds: halves up, and 448 (byte 0x7E) for everything that is 256 or
    rounds to it."""
    bits = x.view(np.uint32)
    normal = ((bits + np.uint32(1 << 19)) >> np.uint32(20)) - np.uint32((127 - 7) << 3)
    subnormal = np.minimum(7, np.floor(x * np.float32(512) + np.float32(0.5)))
    small = x < np.float32(2**-6)
    return np.where(
        small, subnormal, np.where(x >= 256, 0x7E, np.where(normal >= 15 << 3, 0x7E, normal))
    ).astype(np.uint8)


_RULES: Mapping[str, Callable[[F32], U8]] = {
    "F32": _plain("F32"), "F16": _plain("F16"), "BF16": _plain("BF16"), "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1,
    "MXFP4": _mxfp4, "NVFP4": _nvfp4,
}  # fmt: skip
WRITTEN = tuple(_RULES)


# --- decoding ------------------------------------------------------------------------------------------------------


def dequantize(kind: GGMLType, stored: NDArray[Any]) -> F32:
    """Rows of any type as float32 [n, K]; NVFP4 without its outer scale.

    ``stored``: uint8 [n, bytes], or numbers in their own dtype. Raises UsageError when the gguf package is needed for
    the type and is missing, or does not know it either.
    """
    if kind.dtype is not None:
        name = DTYPE_FORMATS.get(kind.dtype)
        raw = np.ascontiguousarray(stored).view(np.uint8)
        if name is None:
            return raw.view(f"<i{kind.nbytes}").astype(np.float32)
        return widen(raw.view("<u2" if name == BF16.name else f"<f{kind.nbytes}"), formats[name])
    row = BLOCKS.get(kind.name)
    if row is not None:
        codes, scales = split(row, stored)
        level = row.scheme.inner
        return decode(codes, row.scheme.element) * spread(
            load_scale(scales, level.format), level.tile, codes.shape
        )
    return _by_the_package(kind, stored)


DTYPE_FORMATS = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}


def _by_the_package(kind: GGMLType, stored: U8) -> F32:
    try:
        import gguf
    except ImportError:
        raise UsageError(
            f"{kind.name} needs the gguf package", remedy="pip install 'narrowcast[gguf]'"
        ) from None
    try:
        values: F32 = gguf.quants.dequantize(
            np.ascontiguousarray(stored), gguf.GGMLQuantizationType(kind.number)
        )
    except (NotImplementedError, ValueError):
        raise UsageError("nothing here decodes this GGUF type", got=kind.name) from None
    return values
