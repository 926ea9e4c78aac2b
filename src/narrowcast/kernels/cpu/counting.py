"""The surveying kernel: how often each byte occurs, and the greatest key in every eight bytes.

    key(c) = (c >= half ? (c XOR turn) + shift : c), and 0 beyond ``limit``        c = code, half = its sign bit

With the right ``turn`` and ``shift`` keys order codes by magnitude, in a format of sign and magnitude as in one of
two's complement. A byte of two codes has the greater of their keys. Sixty-four bytes are eight words of eight; halving
a word three times leaves its greatest byte in the lowest.

Bytes are counted in eight tables in turn, so that a run of equal ones does not wait for its own last count. Of 4-bit
codes there are few enough to ask for each: 64 bytes are compared with it at once, and the bits of the answer counted.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from narrowcast.kernels.cpu.lanes import Lane, Pointer, at, greater, intrinsic, traced
from narrowcast.kernels.cpu.loops import loop
from narrowcast.kernels.cpu.parameters import TABLES, WORDS
from narrowcast.kernels.cpu.units import Codes

BLOCK = 8 * WORDS  # bytes at a time


@intrinsic
def word(context: Any, pointer: Any, index: Any) -> Any:
    """Eight bytes from the byte ``index`` on."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        first = builder.gep(args[0], [args[1]], inbounds=True)
        return builder.load(builder.bitcast(first, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(pointer, types.int64), generate


@intrinsic
def byte(context: Any, words: Any, place: Any) -> Any:
    """Byte ``place`` of a word, as an index."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = args[0].type
        moved = builder.lshr(args[0], builder.shl(args[1], ir.Constant(kind, 3)))
        return builder.and_(moved, ir.Constant(kind, 255))

    return types.int64(words, types.int64), generate


@loop
def count_words(packed: Any, words: int, counts: Any) -> None:
    """Count the bytes of whole words, each place of a word in a table of its own."""
    for u in range(words):
        eight = word(packed, 8 * u)
        for place in range(TABLES):
            counts[place * 256 + byte(eight, place)] += 1


@intrinsic
def count_nibbles(context: Any, packed: Any, counts: Any) -> Any:
    """Count both codes of each byte of a block, counts [16]."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        stored = Pointer(builder, args[0], types.uint8).load(BLOCK)
        halves = stored & 0x0F, stored >> 4
        places = [
            builder.gep(args[1], [ir.Constant(ir.IntType(64), code)], inbounds=True) for code in range(16)
        ]
        found = [
            builder.add(builder.load(place), builder.add(*(half.equals(code).holding for half in halves)))
            for code, place in enumerate(places)
        ]
        for place, count in zip(places, found, strict=True):
            builder.store(count, place)
        return _context.get_dummy_value()

    return types.void(packed, counts), generate


@loop
def count_codes(packed: Any, width: int, counts: Any) -> None:
    """Count the 4-bit codes of a row."""
    whole = width // BLOCK
    for u in range(whole):
        count_nibbles(at(packed, u * BLOCK), counts)
    for j in range(whole * BLOCK, width):
        counts[packed[j] & 15] += 1
        counts[packed[j] >> 4] += 1


@loop
def count_bytes(packed: Any, width: int, counts: Any) -> None:
    """Count the bytes of a row."""
    count_words(packed, width // 8, counts)
    for j in range(width // 8 * 8, width):
        counts[packed[j]] += 1


def _key(codes: Lane, half: int, turn: Lane, shift: Lane, limit: Lane) -> Lane:
    key = (codes >= half).select((codes ^ turn) + shift, codes)
    return (key > limit).select(0, key)


def greatest_keys(bits: int) -> Any:
    """The function that finds the greatest key in each word of a block."""
    half = 1 << (bits - 1)

    @traced("p", "p", "u8", "u8", "u8", "u8")
    def keys(packed: Pointer, out: Pointer, flip: Lane, turn: Lane, shift: Lane, limit: Lane) -> None:
        stored = packed.load(BLOCK) ^ flip
        if bits == 8:
            found = _key(stored, half, turn, shift, limit)
        else:
            low, high = stored & 0x0F, stored >> 4
            found = greater(_key(low, half, turn, shift, limit), _key(high, half, turn, shift, limit))
        for width in (32, 16, 8):
            found = greater(found, (found.regrouped(64) >> width).regrouped(8))
        out.store(found.regrouped(64))

    return keys


def survey_kernel(how: Codes) -> Any:
    """The function that counts the bytes of ``n`` rows, ``width`` bytes of each, or their 4-bit codes, and finds the
    greatest key in each eight bytes of a row, keys [n, ⌈width / 8⌉] with room for a whole last block. ``last`` is room
    for a block; its bytes all mean code 0."""
    keys, count = greatest_keys(how.bits), count_codes if how.bits == 4 else count_bytes

    def survey(
        packed: Any, row_bytes: int, n: int, width: int, flip: int, turn: int, shift: int, limit: int, counts: Any,
        out: Any, last: Any,
    ) -> None:  # fmt: skip
        groups, whole = (width + 7) // 8, width // BLOCK
        for i in range(n):
            row, found = at(packed, i * row_bytes), at(out, i * groups)
            count(row, width, counts)
            for u in range(whole):
                keys(at(row, u * BLOCK), at(found, u * WORDS), flip, turn, shift, limit)
            if whole * BLOCK < width:
                for j in range(whole * BLOCK, width):
                    last[j - whole * BLOCK] = row[j]
                keys(last, at(found, whole * WORDS), flip, turn, shift, limit)

    return survey


def pairs_kernel(how: Codes) -> Any:
    """The function that counts pairs of bytes, counts [first, second]."""

    def pairs(first: Any, second: Any, count: int, counts: Any) -> None:
        for i in range(count):
            counts[first[i] * 256 + second[i]] += 1

    return pairs
