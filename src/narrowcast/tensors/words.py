"""Words of 32 bits that run along the rows of a matrix: how GPTQ and AWQ lay out integers and zero points.

    GPTQ codes   int32 [K·b/32, N]    column n is the bit stream of row n's K codes
    GPTQ zeros   int32 [G, N·b/32]    row g is the bit stream of group g's N zero points
    AWQ          int32 [X, N/8]       nibble i of word c is channel 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i]

A bit stream is the little-endian one of every other packing: element i occupies bits [i·b, (i+1)·b), so that codes
of 3 bits straddle words, 32 of them in three.

GPTQ of version 1 stores every zero point less one. Its writers subtract one from each field of a word at once, as
1 + 2^b + 2^2b + ..., so that a zero point of 0 borrows from the next field, and its reader adds the same and carries
back; fields of 3 bits, which straddle, are counted modulo 8 one by one.

Sources: GPTQModel 7.7 (nn_modules/qlinear, utils/model.py), AutoAWQ 0.2.9 (modules/linear/gemm.py). Left out: the
planar layout of GPTQModel's 5 to 7 bits, and the repacked layouts of single kernels (Marlin, BitBLAS).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.tensors.packing import U8, pack, packing, unpack

I32 = NDArray[np.int32]
BITS = (2, 3, 4, 8)
AWQ_ORDER = np.array((0, 2, 4, 6, 1, 3, 5, 7))
_AWQ_PLACE = np.argsort(AWQ_ORDER)  # where in its word a channel lies


def stand(rows: U8) -> I32:
    """Packed rows [n, 4·w] of bytes as columns of words: int32 [w, n]."""
    if rows.shape[-1] % 4:
        raise UsageError("rows do not fill 32-bit words", got=f"{rows.shape[-1]} bytes")
    return np.ascontiguousarray(np.ascontiguousarray(rows).view("<i4").T)


def lie(words: I32) -> U8:
    """The inverse of ``stand``: int32 [w, n] to packed rows [n, 4·w] of bytes."""
    return np.ascontiguousarray(words.T).view(np.uint8)


def zero_words(zero: U8, bits: int) -> I32:
    """Zero points [n, groups] packed along n, tail bits zero: int32 [groups, ⌈n·bits/32⌉]."""
    words: I32 = pack(np.ascontiguousarray(zero.T), packing(bits, word=32)).view("<i4")
    return words


def zero_codes(words: I32, bits: int, n: int) -> U8:
    """The inverse: int32 [groups, words] to n zero points of each group, [n, groups]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    return np.ascontiguousarray(unpack(packed, packing(bits, word=32), n).T)


def raised(words: I32, bits: int) -> I32:
    """Zero points of version 1 as they are meant: one more in every field, carried as its reader does.

    ``words`` int32 [groups, words]; of 3 bits, words come in threes.
    """
    return _moved(words, bits, 1)


def lowered(words: I32, bits: int) -> I32:
    """The inverse of ``raised``: one less in every field, borrowed as the writers of version 1 do."""
    return _moved(words, bits, -1)


def _moved(words: I32, bits: int, by: int) -> I32:
    if bits == 3:
        zero = zero_codes(words, bits, words.shape[1] * 32 // bits)
        return zero_words((zero + np.uint8(by % 8)) & np.uint8(7), bits)
    ones = by * sum(1 << at for at in range(0, 32, bits))
    return (words.view(np.uint32) + np.uint32(ones % 2**32)).view(np.int32)


def awq_words(codes: U8) -> I32:
    """Nibbles [n, x], n a multiple of 8, as AWQ lays them: int32 [x, n/8]."""
    n, x = codes.shape
    if n % 8:
        raise UsageError("AWQ packs eight rows into a word", got=f"{n} rows")
    channels = np.ascontiguousarray(codes.T).reshape(x, n // 8, 8)[..., AWQ_ORDER]
    words: I32 = pack(channels.reshape(x, n), packing(4, word=32)).view("<i4")
    return words


def awq_codes(words: I32) -> U8:
    """The inverse of ``awq_words``: int32 [x, n/8] to nibbles [n, x]."""
    x, count = words.shape
    stream = unpack(np.ascontiguousarray(words).view(np.uint8), packing(4, word=32), 8 * count)
    return np.ascontiguousarray(stream.reshape(x, count, 8)[..., _AWQ_PLACE].reshape(x, 8 * count).T)
