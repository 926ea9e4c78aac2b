"""Packings: how the codes of one row become bytes.

Every packing that engines load for weights is one little-endian bit stream per row: element i occupies bits
[i·b, (i+1)·b), the first element in the lowest bits, padded with zero bits to whole words. What differs is the
word (it only pads) and whether the sign bit is flipped, which stores a signed integer q as q + 2^(b-1).

    byte = Σ_i (code_i XOR flip) << (i·b mod 8)

So nibble pairs of FP4, FP6's four codes in three bytes, and int32 words of 3-bit integers are rows of one table.

Left out: half-split (GGUF) and interleaved (AWQ) orders, which are permutations of K in front of a packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Packing:
    """``bits`` per code, XORed with ``flip``, in words of ``word`` bits (8 or 32) along a row."""

    name: str
    bits: int
    flip: int = 0
    word: int = 8

    def row_bytes(self, k: int) -> int:
        """Bytes of a packed row of k codes."""
        return -(-k * self.bits // self.word) * self.word // 8

    def whole(self, k: int) -> bool:
        """Whether k codes fill whole bytes, which containers without a stored shape require."""
        return k * self.bits % 8 == 0


def packing(bits: int, *, flip: bool = False, word: int = 8) -> Packing:
    """The packing of ``bits``-wide codes, optionally offset-binary, padded to ``word`` bits."""
    if not 1 <= bits <= 8 or word not in (8, 32):
        got = f"{bits} bits in {word}-bit words"
        raise UsageError("no such packing", got=got, wanted="1 to 8 bits, words of 8 or 32")
    name = f"{bits}-bit{' offset' if flip else ''} in {word}-bit words"
    return Packing(name, bits, 1 << (bits - 1) if flip else 0, word)


BYTES = Packing("one code per byte", 8)


def pack(codes: U8, how: Packing) -> U8:
    """Codes [..., K] uint8 to packed bytes [..., row_bytes(K)] uint8."""
    values = codes ^ np.uint8(how.flip) if how.flip else codes
    if how.bits == 8:
        return _padded(values, how)
    if how.bits == 4 and codes.shape[-1] % 2 == 0:
        return _padded(values[..., 0::2] | (values[..., 1::2] << np.uint8(4)), how)
    shifts = np.arange(how.bits, dtype=np.uint8)
    stream = (values[..., None] >> shifts) & np.uint8(1)
    return _padded(np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little"), how)


def _padded(packed: U8, how: Packing) -> U8:
    missing = -packed.shape[-1] % (how.word // 8)
    if not missing:
        return np.ascontiguousarray(packed)
    return np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)])


def unpack(packed: U8, how: Packing, k: int) -> U8:
    """The inverse of pack: packed bytes [..., row_bytes(k)] to codes [..., k] uint8."""
    if packed.shape[-1] != how.row_bytes(k):
        wanted = f"{how.row_bytes(k)} for {k} codes"
        raise UsageError(
            "packed row has the wrong length", where=how.name, got=packed.shape[-1], wanted=wanted
        )
    if how.bits == 8:
        codes = packed[..., :k]
    elif how.bits == 4:
        both = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
        codes = both.reshape(*packed.shape[:-1], -1)[..., :k]
    else:
        stream = np.unpackbits(packed, axis=-1, count=k * how.bits, bitorder="little")
        weights = np.uint8(1) << np.arange(how.bits, dtype=np.uint8)
        codes = (stream.reshape(*packed.shape[:-1], k, how.bits) * weights).sum(axis=-1, dtype=np.uint8)
    return codes ^ np.uint8(how.flip) if how.flip else np.ascontiguousarray(codes)
