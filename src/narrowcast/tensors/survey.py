"""What a per-tensor scale must be chosen from, gathered chunk by chunk before anything is recoded.

    T[tile] = S[tile] · 2^r / outer       for every tile of the tensor with the same outer

The target's own rule puts the largest T as high as its format goes, so that what does not fit is what is
smallest. Where the source has an outer scale and all T fit beside it, that number is taken over.

Left out: the choice of an outer scale that keeps the most tiles where not all fit (dropping large tiles to keep
small ones trades large errors for small ones).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import frexp

import numpy as np
from numpy.typing import NDArray

from narrowcast.numbers.codec import decode_table
from narrowcast.tensors.codemaps import (
    SHIFTS,
    Pair,
    code_map,
    element_index,
    natural_shift,
    pair_of,
    target_zeros,
    translate,
    values,
)
from narrowcast.tensors.exactscales import (
    check_scales,
    odd_parts,
    outer_level,
    reach,
    resample,
    store_exact,
)
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import SMALLEST_OUTER, load_scale, reduce_tiles
from narrowcast.tensors.schemes import Scheme


@dataclass(frozen=True, eq=False)
class Survey:
    """Of the tiles that hold a nonzero element under a nonzero scale; sums of surveys are surveys of the whole.

    ``largest`` and ``smallest``: ends of the scales, with the outer scale's power of two but without its odd part;
    ``lowest``: exponent of their last significant bit; ``bits``: most significant bits of one;
    ``outers``: what outer scales multiply by; ``counts``: codes by index, for a source of one scale in all.
    """

    tiles: int = 0
    largest: float = 0.0
    smallest: float = np.inf
    lowest: int = 10_000
    bits: int = 0
    outers: frozenset[Fraction] = frozenset()
    counts: NDArray[np.int64] | None = None

    @property
    def powers_of_two(self) -> bool:
        """Whether every inner scale is a power of two."""
        return self.bits <= 1

    def __add__(self, other: Survey) -> Survey:
        counts = [c for c in (self.counts, other.counts) if c is not None]
        return Survey(
            self.tiles + other.tiles,
            max(self.largest, other.largest),
            min(self.smallest, other.smallest),
            min(self.lowest, other.lowest),
            max(self.bits, other.bits),
            self.outers | other.outers,
            np.sum(counts, axis=0) if counts else None,
        )


def nonzero_tiles(q: QTensor) -> NDArray[np.bool_]:
    """Which innermost tiles hold a nonzero element."""
    pair = pair_of(q.scheme, q.scheme)
    marks = translate(element_index(q), (values(pair) != 0).astype(np.uint8))
    rows, cols = q.scheme.inner.tile
    if rows == 1 and cols and cols % 8 == 0 and q.shape[-1] % cols == 0:
        words = marks.reshape(*q.shape[:-1], -1, cols).view(np.uint64)  # eight elements at a time
        any_word: NDArray[np.bool_] = np.asarray(words.any(axis=-1))
        return any_word
    some: NDArray[np.bool_] = reduce_tiles(marks, q.scheme.inner.tile) != 0
    return some


def survey(q: QTensor) -> Survey:
    """Facts of one chunk [..., n, K], or of a whole tensor."""
    check_scales(q)
    scheme, outside = q.scheme, outer_level(q.scheme)
    inner = np.ones(q.scales[0].shape) if outside == 0 else load_scale(q.scales[0], scheme.inner.format)
    odd, exponent = odd_parts(inner)
    alive = np.where(odd, nonzero_tiles(q), False)
    outers: frozenset[Fraction] = frozenset()
    counts = None
    if outside is not None:
        level = scheme.scales[outside]
        numbers = load_scale(q.scales[outside], level.format)
        power = resample(odd_parts(numbers)[1], level.tile, scheme.inner.tile, q.shape)
        exponent = exponent - power if level.divides else exponent + power
        alive &= resample(numbers, level.tile, scheme.inner.tile, q.shape) != 0
        found = [Fraction(float(n)) for n in np.unique(numbers[numbers != 0])]
        outers = frozenset(1 / n if level.divides else n for n in found)
    if outside == 0:
        width = len(values(pair_of(scheme, scheme)))
        counts = np.bincount(element_index(q).ravel(), minlength=width).astype(np.int64)
    if not alive.any():
        return Survey(outers=outers, counts=counts)
    odd, exponent = odd[alive], exponent[alive]
    scales = np.ldexp(odd.astype(np.float64), exponent)
    bits = int(odd.max()).bit_length()
    return Survey(
        odd.size, float(scales.max()), float(scales.min()), int(exponent.min()), bits, outers, counts
    )


def plan_outer(found: Survey, source: Scheme, target: Scheme) -> float | None:
    """The target's outer scale as stored (a divisor where it divides), or None where the target has none.

    A power of two, unless the source's own outer scale (the largest of several) has an odd part, which is then
    taken over; one over such a number is rounded to the stored format. For a target of one scale in all: the
    source's scale, moved by the shift at which the codes that occur have equals, or else lose the least square
    error.
    """
    outside = outer_level(target)
    if outside is None:
        return None
    pair, level = pair_of(source, target), target.scales[outside]
    largest = max(found.outers, default=Fraction(1))
    if not found.tiles:
        wanted = largest
    elif outside == 0:
        wanted = largest * Fraction(2) ** _best_shift(pair, found.counts)
    else:
        wanted = _beside(found, pair, source, target)
    number = float(1 / wanted if level.divides else wanted)
    return float(load_scale(store_exact(np.array(number), level.format), level.format))


def _beside(found: Survey, pair: Pair, source: Scheme, target: Scheme) -> Fraction:
    """The source's outer scale where all scales fit beside it, else the largest one as high as it goes."""
    fmt, shift = target.inner.format, natural_shift(pair)
    within = reach(fmt)
    for outer in sorted(found.outers, reverse=True) if outer_level(source) == 1 else []:
        power = shift - _power(outer)
        over, under = found.largest * 2.0**power > fmt.max, found.smallest * 2.0**power < 2.0**within.floor
        if not over and not under and found.lowest + power >= within.lowest:
            return outer
    widest = max(found.outers, default=Fraction(1))
    half, exponent = np.frexp(found.largest * 2.0**shift / fmt.max)
    exponent -= half == 0.5
    ends = reach(target.scales[-1].format)
    lowest, highest = max(ends.floor, frexp(SMALLEST_OUTER)[1] - 1), ends.top
    if target.scales[-1].divides:
        lowest, highest = max(lowest, -highest), min(highest, -ends.floor)
    power = int(np.clip(exponent, lowest, highest))
    return widest * Fraction(2) ** (power - _power(widest))


def _power(number: Fraction) -> int:
    """The exponent e of odd / odd · 2^e."""

    def trailing(n: int) -> int:
        return (n & -n).bit_length() - 1

    return trailing(number.numerator) - trailing(number.denominator)


def _best_shift(pair: Pair, counts: NDArray[np.int64] | None) -> int:
    """The shift nearest to the natural one that keeps every code which occurs, else of the least square error."""
    natural = natural_shift(pair)
    if counts is None:
        return natural
    nearest = sorted(SHIFTS, key=lambda shift: abs(shift - natural))
    errors = [_square_error(pair, shift, counts) for shift in nearest]
    return nearest[int(np.argmin(errors))]  # the first of several zeros


def _square_error(pair: Pair, shift: int, counts: NDArray[np.int64]) -> float:
    """Σ (decoded after - decoded before)² over all elements, in units of the source's scale; NaN codes aside."""
    value, made = values(pair), code_map(pair, shift)
    after = np.ldexp(decode_table(pair.target)[made.table] - target_zeros(pair), shift)
    finite = np.isfinite(value) & np.isfinite(after)
    return float(np.sum(counts[finite] * (after[finite] - value[finite]) ** 2))
