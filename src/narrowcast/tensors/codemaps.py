"""Tables from the codes of one element format to the codes of another that stand for the same number.

    table[code] = the target code of (decode(code) - zero) · 2^-r

where the scale takes the 2^r that the element gives up. A format's bits often fit another at one shift only:
E4M3FN's bits mean half as much in E4M3FNUZ (r = 1), E2M1's halves are whole numbers in INT8 (r = -1).

Zero points are the upper bits of the index into a table. They stay what they are where element and zero point
keep their formats; a symmetric target takes code - zero itself, and an asymmetric one gets the middle of its
range as every zero point.

Left out: shifts beyond 15 binades (no two formats of 8 bits with data in common need one), and factors that are
no power of two, which would have to be guessed from the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.numbers.codec import Overflow, decode_table, encode
from narrowcast.numbers.formats import Format
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import spread
from narrowcast.tensors.schemes import Scheme

WINDOW = 15
SHIFTS = tuple(sorted(range(-WINDOW, WINDOW + 1), key=abs))  # the smallest first
ZERO = np.uint32(1 << 31)  # in shift_bits: the element is zero

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Pair:
    """The element and zero point formats on both sides."""

    source: Format
    source_zero: Format | None
    target: Format
    target_zero: Format | None

    @property
    def keeps_zero(self) -> bool:
        """Whether zero points are taken over as they are."""
        kept = (self.source, self.source_zero) == (self.target, self.target_zero)
        return self.source_zero is not None and kept

    @property
    def middle(self) -> int:
        """The zero point of every tile of a target that does not keep the source's."""
        return 0 if self.target_zero is None or self.target.signed else 1 << (self.target.bits - 1)


def pair_of(source: Scheme, target: Scheme) -> Pair:
    return Pair(source.element, source.zero, target.element, target.zero)


@dataclass(frozen=True)
class CodeMap:
    """``table`` uint8 and ``lost`` (codes without an equal) by index; ``same``: the table changes no code.

    ``signs`` are the indices of minus zeros that lose their sign, which equals no change of value.
    """

    table: NDArray[np.uint8]
    lost: Mask
    same: bool
    signs: tuple[int, ...]


@cache
def values(pair: Pair) -> Floats:
    """What every index stands for on the source's side: decode(code) - zero, exact in float64."""
    table = decode_table(pair.source)
    if pair.source_zero is None:
        return table
    return (table[None, :] - decode_table(pair.source_zero)[:, None]).ravel()


@cache
def target_zeros(pair: Pair) -> Floats:
    """The zero point on the target's side of every index."""
    if pair.keeps_zero and pair.source_zero is not None:
        return np.repeat(decode_table(pair.source_zero), 1 << pair.source.bits)
    return np.full(len(values(pair)), float(pair.middle))


@cache
def code_map(pair: Pair, shift: int) -> CodeMap:
    """The table of one shift."""
    value = values(pair)
    codes = np.arange(len(value)) % (1 << pair.source.bits)
    plain = pair.source_zero is None and pair.target_zero is None
    if shift == 0 and pair.source == pair.target and (plain or pair.keeps_zero):
        return CodeMap(codes.astype(np.uint8), np.zeros(len(value), np.bool_), True, ())
    nan, inf = np.isnan(value), np.isinf(value)
    sayable = ~(nan | inf) | (nan & pair.target.has_nan) | (inf & pair.target.has_inf)
    wanted = np.where(sayable, np.ldexp(value, -shift), 0)
    # A zero point of 0 is not added: it would take the sign off a minus zero.
    wanted = np.where(target_zeros(pair) == 0, wanted, wanted + target_zeros(pair))
    overflow: Overflow = "special" if pair.target.has_inf else "saturate"
    made = encode(wanted, pair.target, overflow=overflow).codes.astype(np.uint8)
    got = decode_table(pair.target)[made]
    kept = sayable & ((got == wanted) | (nan & np.isnan(got)))
    signs = np.flatnonzero(kept & (value == 0) & np.signbit(value) & ~np.signbit(got))
    same = bool(kept.all()) and bool((made == codes).all()) and not signs.size
    return CodeMap(made, ~kept, same, tuple(int(i) for i in signs))


@cache
def natural_shift(pair: Pair) -> int:
    """The shift at which most codes have an equal; the smallest of several."""
    if pair.keeps_zero:
        return 0
    return min(SHIFTS, key=lambda shift: int(code_map(pair, shift).lost.sum()))  # min takes the first


@cache
def shift_bits(pair: Pair) -> NDArray[np.uint32]:
    """By index, bit i says whether SHIFTS[i] has an equal for it; bit 31 whether it is zero."""
    bits = np.where(values(pair) == 0, ZERO, np.uint32(0))
    for i, shift in enumerate(SHIFTS):
        bits |= (~code_map(pair, shift).lost).astype(np.uint32) << np.uint32(i)
    return bits


def element_index(q: QTensor) -> NDArray[Any]:
    """Codes with their zero points above them, uint8 where both fit: the index into the tables of a pair."""
    if q.zero is None or q.scheme.zero is None:
        return q.codes
    bits = q.scheme.element.bits
    zero: NDArray[Any] = q.zero.astype(np.uint8 if bits + q.scheme.zero.bits <= 8 else np.uint16)
    zero = zero << zero.dtype.type(bits)
    index: NDArray[Any] = spread(zero, q.scheme.inner.tile, q.shape) | q.codes
    return index


def translate(index: NDArray[Any], table: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """table[index]; one byte at a time through bytes.translate, which takes a third of the time of np.take."""
    if index.dtype != np.uint8:
        return np.take(table, index)
    padded = np.zeros(256, np.uint8)
    padded[: len(table)] = table
    raw = bytearray(np.ascontiguousarray(index)).translate(padded.tobytes())
    return np.frombuffer(raw, np.uint8).reshape(index.shape)
