"""What a chunk of codes looks like: how often each code occurs, and the largest code of every tile.

    counts[c] = |{i : code_i = c}|          peaks[t] = max over i in tile t of rank(code_i)

Ranks order codes as the caller wants, usually by magnitude with NaN at 0. One look at the bytes answers most
questions about codes: saturation, codes that no value has, tiles that became zero. How often a peak meets a scale
answers the others, the largest decoded value among them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import InputError
from narrowcast.tensors.packing import Packing, unpack
from narrowcast.tensors.scaling import reduce_tiles
from narrowcast.tensors.schemes import Tile

Counts = NDArray[np.int64]
Ranks = NDArray[np.uint8]
NARROW = 64  # columns of a tile below which numpy's own reduction costs more than halving


def survey(
    packed: NDArray[np.uint8], packing: Packing, k: int, tile: Tile, ranks: Ranks
) -> tuple[Counts, Ranks]:
    """Counts int64 [2^bits] of the codes in ``packed`` [n, row_bytes] of rows of ``k``, and the greatest rank in each
    tile, uint8 [tiles, tiles]. ``ranks`` is uint8 [2^bits of the format]; the first row begins a tile. InputError for a
    byte that is no code."""
    codes = unpack(packed, packing, k)
    counts = np.bincount(codes.reshape(-1), minlength=len(ranks))
    if len(counts) > len(ranks):
        raise InputError(
            "a byte is no code of the format", where=packing.name, got=len(counts) - 1, wanted=f"below {len(ranks)}"
        )  # fmt: skip
    return counts.astype(np.int64), tile_maxima(ranks[codes], tile)


def pairs(first: Ranks, second: NDArray[np.uint8], rows: int) -> Counts:
    """How often each pair of bytes meets in two arrays of one shape: int64 [rows, 256]; ``first`` is below ``rows``."""
    both = first.reshape(-1).astype(np.uint16) << np.uint16(8) | second.reshape(-1)
    return np.bincount(both, minlength=rows * 256).astype(np.int64).reshape(rows, 256)


def tile_maxima(codes: Ranks, tile: Tile) -> Ranks:
    """The largest entry of every tile of [n, k]. Whole tiles are reduced rows first, then by halves while they are
    narrow: maxima of long rows are what a processor finds fastest."""
    n, k = codes.shape
    rows, columns = tile[0] or n, tile[1] or k
    if n % rows == 0 and rows > 1:
        codes = codes.reshape(n // rows, rows, k).max(axis=1)
        rows = 1
    while k % columns == 0 and columns % 2 == 0 and columns <= NARROW:
        codes = np.maximum(codes[:, ::2], codes[:, 1::2])
        k, columns = k // 2, columns // 2
    if k % columns == 0 and columns > 1:
        codes = codes.reshape(len(codes), k // columns, columns).max(axis=-1)
        columns = 1
    return codes if rows == columns == 1 else reduce_tiles(codes, (rows, columns))
