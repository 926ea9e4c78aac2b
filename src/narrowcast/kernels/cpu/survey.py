"""The compiled survey of codes: what ``kernels.reference.survey`` finds, at the speed of a byte histogram or faster.

Two facts make it quick. There are few 4-bit codes, so 64 bytes are compared with each of them at once. And where some
simple key orders codes as their ranks do, the largest code of a tile is the largest key, found 64 bytes at a time:

    sign and magnitude       key = the code without its sign
    two's complement         key = |code|
    unsigned                 key = the code

Tables of values (NF4) have no such key: their bytes are looked up. Other widths, and tiles that cut words of eight
bytes, are left to the reference.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowcast.kernels.cpu.compile import kernel
from narrowcast.kernels.cpu.parameters import TABLES, WORDS
from narrowcast.kernels.cpu.rows import call
from narrowcast.kernels.reference import survey as reference
from narrowcast.kernels.reference.survey import Counts, Ranks, tile_maxima
from narrowcast.tensors.packing import Packing
from narrowcast.tensors.schemes import Tile

WIDTHS = (4, 8)


class Key(NamedTuple):
    """How codes become keys, and the rank of every key, uint8 [256]; None where a key is its own rank."""

    turn: int
    shift: int
    limit: int
    ranks: Ranks | None


ANY = Key(0, 0, 255, None)  # where nobody asks for keys


def survey(
    packed: NDArray[np.uint8], packing: Packing, k: int, tile: Tile, ranks: Ranks
) -> tuple[Counts, Ranks]:
    """See ``kernels.reference.survey.survey``: the same result, bit for bit."""
    columns, bits = tile[1] * packing.bits, k * packing.bits
    if (
        packing.bits not in WIDTHS
        or columns % 64
        or bits % 8
        or not packed.size
        or len(ranks) > 1 << packing.bits
    ):
        return reference.survey(packed, packing, k, tile, ranks)
    packed = np.ascontiguousarray(packed)
    key = key_of(ranks.tobytes(), packing.bits)
    counts, keys = _run(packed, packing, bits // 8, key or ANY)
    if counts[len(ranks) :].any():
        return reference.survey(packed, packing, k, tile, ranks)  # which refuses it
    if key is not None:
        peaks = tile_maxima(keys, (tile[0], columns // 64))
        return counts[: len(ranks)], peaks if key.ranks is None else _look_up(key.ranks, peaks)
    found = _look_up(_ranks_of_bytes(ranks, packing), packed[:, : bits // 8])
    return counts[: len(ranks)], tile_maxima(found, (tile[0], columns // 8))


def pairs(first: Ranks, second: NDArray[np.uint8], rows: int) -> Counts:
    """See ``kernels.reference.survey.pairs``."""
    if first.shape != second.shape or (first.size and int(first.max()) >= rows):
        return reference.pairs(first, second, rows)  # which refuses it
    counts = np.zeros((rows, 256), np.int64)
    one, two = np.ascontiguousarray(first), np.ascontiguousarray(second)
    call(kernel("pairs", "uint8"), one, two, one.size, counts)
    return counts


def _run(packed: Ranks, packing: Packing, width: int, key: Key) -> tuple[Counts, Ranks]:
    """Counts of codes [2^bits], and the greatest key of every eight bytes, uint8 [n, ⌈width / 8⌉]."""
    n, row_bytes = packed.shape
    groups = -(-width // 8)
    counts, keys = np.zeros(TABLES * 256, np.int64), np.empty(n * groups + WORDS, np.uint8)
    flip = packing.flip * (0x11 if packing.bits == 4 else 1)
    last = np.full(8 * WORDS, flip, np.uint8)
    run = kernel("survey", "uint8", bits=packing.bits)
    call(run, packed, row_bytes, n, width, flip, key.turn, key.shift, key.limit, counts, keys, last)
    found = counts[:16] if packing.bits == 4 else counts.reshape(TABLES, 256).sum(axis=0)
    return found[np.arange(len(found)) ^ packing.flip], keys[: n * groups].reshape(n, groups)


def _look_up(table: Ranks, places: Ranks) -> Ranks:
    """``table[places]`` of a table of 256 bytes, three times as fast as by index."""
    found = np.frombuffer(places.tobytes().translate(table.tobytes()), np.uint8)
    return found.reshape(places.shape)


def _ranks_of_bytes(ranks: Ranks, packing: Packing) -> Ranks:
    """The greater rank of the codes in a byte, uint8 [256]."""
    table = np.zeros(1 << packing.bits, np.uint8)
    table[: len(ranks)] = ranks
    table = table[np.arange(len(table)) ^ packing.flip]
    pairs: Ranks = np.maximum.outer(table, table).reshape(-1)
    return pairs if packing.bits == 4 else table


@cache
def key_of(ranks: bytes, bits: int) -> Key | None:
    """The key that orders codes as these ranks do, uint8 [at most 2^bits]; None where there is none."""
    table = np.zeros(1 << bits, np.uint8)
    table[: len(ranks)] = np.frombuffer(ranks, np.uint8)
    half, codes = 1 << (bits - 1), np.arange(1 << bits)
    for turn, shift in ((0, 256 - half), ((1 << bits) - 1, 1), (0, 0)):
        keys = np.where(codes >= half, ((codes ^ turn) + shift) % 256, codes)
        limit = int(keys[table > 0].max(initial=0))  # beyond it are NaN and infinity
        found = _ordered(table, np.where(keys > limit, 0, keys))
        if found is not None:
            same = np.array_equal(found[: limit + 1], np.arange(limit + 1))
            return Key(turn, shift, limit, None if same else found)
    return None


def _ordered(table: Ranks, keys: NDArray[np.int64]) -> Ranks | None:
    """The rank of every key, uint8 [256]; None where equal keys differ in rank, or the order is another."""
    found = np.zeros(256, np.uint8)
    np.maximum.at(found, keys, table)
    found = np.maximum.accumulate(found)
    return found if np.array_equal(found[keys], table) else None
