"""Sixteen codes and the bytes they pack into: 4, 6 or 8 bits each, the first code in the lowest bits."""

from __future__ import annotations

from narrowcast.kernels.cpu.lanes import Lane, Pointer

_SIX = 0x3F


def pack(codes: Lane, bits: int, packed: Pointer) -> None:
    """Store 16 codes of 32 bits as 2 · ``bits`` bytes."""
    codes = codes.narrowed(8)
    if bits == 4:
        pairs = codes.regrouped(16)
        codes = pairs | (pairs >> 4)
    elif bits == 6:
        fours = codes.regrouped(32)
        fields = (fours >> (2 * i) & (_SIX << (6 * i)) for i in range(4))
        joined = next(fields)
        for field in fields:
            joined = joined | field
        codes = joined.regrouped(8).shuffled([i for i in range(16) if i % 4 < 3])
    packed.store(codes)


def unpack(packed: Pointer, bits: int) -> Lane:
    """Load 16 codes as 32-bit integers."""
    stored = packed.load(2 * bits)
    if bits == 4:
        pairs = stored.words.narrowed(16)
        stored = ((pairs | (pairs << 4)) & 0x0F0F).regrouped(8)
    elif bits == 6:
        joined = stored.shuffled([15 if i % 4 == 3 else i // 4 * 3 + i % 4 for i in range(16)]).regrouped(32)
        fields = ((joined & (_SIX << (6 * i))) << (2 * i) for i in range(4))
        spread = next(fields)
        for field in fields:
            spread = spread | field
        stored = spread.regrouped(8)
    return stored.words
