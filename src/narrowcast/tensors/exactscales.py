"""Scales as exact numbers, odd · 2^e, and which of them a stored format holds.

    S = Π scales of the source = odd · 2^e          T = S · 2^r / outer

T is stored in the target's innermost scale. It fits a format of p significand bits when odd < 2^p, and then for
every r of one interval, whose ends are the format's smallest step and its largest value.

A per-tensor level counts as outer even when it is the only one: what is left for the innermost scale is then the
number 1. An outer scale that rounds (one over a number that has no exact inverse) changes all values by one
common factor within half an ulp; it is reported in ulps, and codes and inner scales stay as they are.

Left out: sums of scales, and scales of zero points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import frexp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import NonFiniteError
from narrowcast.numbers.codec import decode_table, encode, to_bf16
from narrowcast.numbers.formats import BF16, FP16, FP32, Format, Kind
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import load_scale
from narrowcast.tensors.schemes import Scheme, Tile, tile_grid

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
WIDEST = (
    1 << 39
)  # times a 24-bit significand it still fits int64; beyond it no stored scale can hold the product
NEVER = 10_000


@dataclass(frozen=True)
class Reach:
    """What a scale format holds: odd < 2^bits, last bit ≥ 2^lowest, 2^floor ≤ value ≤ ceiling · 2^top."""

    bits: int
    lowest: int
    floor: int
    top: int
    ceiling: float
    zero: bool
    sign: bool


@cache
def reach(fmt: Format | None) -> Reach:
    """The reach of a format; of None, the number 1 alone.

    Subnormals of fp32 and bf16 do not count: hardware that flushes them would make the whole tile zero. A sign
    counts only in formats of 16 bits and more, since FP8 scales are read as unsigned.
    """
    if fmt is None:
        return Reach(1, 0, 0, 0, 1.0, False, False)
    wide = fmt.bits >= 16
    smallest = (fmt.smallest_normal if fmt in (FP32, BF16) else None) or fmt.smallest
    integer = fmt.kind is Kind.INT
    bits = fmt.bits - fmt.signed if integer else fmt.mantissa_bits + 1
    lowest = -fmt.bias if integer else (1 if fmt.subnormals else 0) - fmt.bias - fmt.mantissa_bits
    floor = frexp(smallest)[1] - 1
    return Reach(bits, lowest, floor, fmt.emax, fmt.max / 2.0**fmt.emax, integer or fmt.subnormals, wide)


def odd_parts(numbers: NDArray[Any]) -> tuple[Ints, Ints]:
    """|numbers| as odd · 2^exponent, exact for finite numbers of at most 53 bits; zero is 0 · 2^0."""
    half, exponent = np.frexp(np.abs(np.asarray(numbers, np.float64)))
    whole = (half * 2.0**53).astype(np.int64)
    last = whole & -whole
    trailing = np.frexp(np.maximum(last, 1).astype(np.float64))[1] - 1
    return whole >> trailing, np.where(whole == 0, 0, exponent.astype(np.int64) - 53 + trailing)


def store_exact(numbers: NDArray[Any], fmt: Format) -> NDArray[Any]:
    """Numbers as stored scales, nearest even, without the floors that a quantizer puts under its scales."""
    if fmt is FP32:
        return np.asarray(numbers).astype(np.float32)
    if fmt is FP16:
        halves: NDArray[Any] = np.asarray(numbers).astype(np.float16).view(np.uint16)
        return halves
    if fmt is BF16:
        return to_bf16(np.asarray(numbers).astype(np.float32))
    codes: NDArray[Any] = encode(numbers, fmt).codes
    return codes


def resample(stored: NDArray[Any], tile: Tile, to: Tile, shape: tuple[int, ...]) -> NDArray[Any]:
    """A value per tile of ``shape`` as a value per tile ``to``, which must lie within: each takes its parent's."""
    if tile == to:
        return stored
    *_, rows, cols = tile_grid(shape, to)
    down = np.arange(rows) * to[0] // tile[0] if tile[0] else np.zeros(rows, np.intp)
    across = np.arange(cols) * to[1] // tile[1] if tile[1] else np.zeros(cols, np.intp)
    taken: NDArray[Any] = stored[..., down[:, None], across]
    return taken


@dataclass(frozen=True)
class Exact:
    """Scales relative to the target's outer scale, ±odd · 2^exponent, per innermost tile of the target or, where
    ``index`` says which each tile has, per code of the source's scale format.

    ``never``: no stored number can be it, at any shift, and ``size`` is its odd part only to 53 bits.
    ``ulp``: by how much an outer scale was rounded.
    """

    odd: Ints
    size: NDArray[np.float64]
    exponent: Ints
    negative: Mask
    never: Mask
    ulp: float
    index: NDArray[Any] | None

    def every(self, x: NDArray[Any]) -> NDArray[Any]:
        """A fact per scale as a fact per tile [leading, rows, columns]."""
        tiles = x if self.index is None else np.take(x, self.index)
        return tiles.reshape(-1, *tiles.shape[-2:])

    def of(self, x: NDArray[Any], at: tuple[NDArray[np.intp], ...]) -> NDArray[Any]:
        """A fact per scale for some of the tiles."""
        picked: NDArray[Any] = (
            self.every(x)[at] if self.index is None else x[self.index.reshape(-1, *self.index.shape[-2:])[at]]
        )
        return picked

    def numbers(self, shift: Ints | int = 0) -> NDArray[np.float64]:
        """The scales times 2^shift, in float64."""
        size = np.ldexp(self.size, self.exponent + shift)
        signed: NDArray[np.float64] = np.where(self.negative, -size, size)
        return signed

    def shifts(self, fmt: Format | None) -> tuple[Ints, Ints]:
        """Ends (lowest, highest) of the shifts at which the format holds each scale; lowest > highest if none."""
        within = reach(fmt)
        leading = np.frexp(np.maximum(self.odd, 1).astype(np.float64))[1] - 1
        over = np.ldexp(self.odd.astype(np.float64), -leading) > within.ceiling
        low = np.maximum(within.lowest - self.exponent, within.floor - self.exponent - leading)
        high = within.top - self.exponent - leading - over
        fits = ~self.never & (self.odd < 1 << within.bits) & (~self.negative | within.sign)
        low, high = np.where(fits, low, NEVER), np.where(fits, high, -NEVER)
        if not within.zero:
            return np.where(self.odd == 0, NEVER, low), np.where(self.odd == 0, -NEVER, high)
        return np.where(self.odd == 0, -NEVER, low), np.where(self.odd == 0, NEVER, high)


def outer_level(scheme: Scheme) -> int | None:
    """Which level is the outer one: the second of two, or a per-tensor scale by itself."""
    return len(scheme.scales) - 1 if len(scheme.scales) == 2 or scheme.inner.tile == (0, 0) else None


def inner_format(scheme: Scheme) -> Format | None:
    """The format of what the outer scale leaves to the tiles; None where it leaves nothing."""
    return None if outer_level(scheme) == 0 else scheme.inner.format


def check_scales(q: QTensor) -> None:
    """Refuse NaN and infinite scales, and outer scales that are not positive."""
    for i, level in enumerate(q.scheme.scales):
        numbers = load_scale(q.scales[i], level.format)
        bad = ~np.isfinite(numbers)
        if i == 1:
            bad |= numbers <= 0
        if bad.any():
            first = tuple(int(n) for n in np.argwhere(bad)[0])
            raise NonFiniteError(
                f"{int(bad.sum())} scales are NaN, infinite or, per tensor, not positive",
                where=f"{q.scheme.name}, level {i}, first at {first}",
                got=float(numbers[first]),
                remedy="the checkpoint is damaged here; convert without this tensor",
            )


def exact_scales(q: QTensor, target: Scheme, outer: float | None) -> Exact:
    """The product of the source's scales, over the target's outer scale."""
    check_scales(q)
    tile, outside, index = target.inner.tile, outer_level(q.scheme), None
    fmt = q.scheme.inner.format
    odd, above, below = (np.ones((), np.int64) for _ in range(3))
    inner = load_scale(q.scales[0], fmt) if outside != 0 else np.ones(q.scales[0].shape)
    if outside != 0 and fmt.bits <= 8 and all(stored.size == 1 for stored in q.scales[1:]):
        index = resample(q.scales[0], q.scheme.inner.tile, tile, q.shape)
        inner = np.nan_to_num(decode_table(fmt), posinf=0, neginf=0)  # codes that check_scales found absent
    else:
        inner = resample(inner, q.scheme.inner.tile, tile, q.shape)
    odd, exponent = odd_parts(inner)
    negative = np.signbit(inner) & (inner != 0)
    if outside is not None:
        level = q.scheme.scales[outside]
        numbers = load_scale(q.scales[outside], level.format)
        numbers = numbers.reshape(()) if index is not None else resample(numbers, level.tile, tile, q.shape)
        part, power = odd_parts(numbers)
        above, below = (below, part) if level.divides else (part, above)
        exponent = exponent - power if level.divides else exponent + power
        negative = negative ^ (np.signbit(numbers) & (numbers != 0))
    if outer is not None:
        above, below, exponent = _over(outer, target, above, below, exponent)
    above, below, exponent, ulp = _snapped(above, below, exponent, outer, target)
    never = (above > WIDEST) | (odd * np.minimum(above, WIDEST) % below != 0)
    product = np.where(never, odd, odd * np.minimum(above, WIDEST) // below)
    size = np.where(never, odd * (above / below), product)
    exponent = np.where(product == 0, 0, exponent)
    return Exact(product, size, exponent, negative, never & (odd != 0), ulp, index)


def _over(outer: float, target: Scheme, above: Ints, below: Ints, exponent: Ints) -> tuple[Ints, Ints, Ints]:
    """above / below · 2^exponent over what the target's outer scale multiplies by, reduced."""
    part, power = odd_parts(np.array(outer))
    if target.scales[-1].divides:
        above, exponent = above * part, exponent + power
    else:
        below, exponent = below * part, exponent - power
    common = np.gcd(above, below)
    return above // common, below // common, exponent


def _snapped(
    above: Ints, below: Ints, exponent: Ints, outer: float | None, target: Scheme
) -> tuple[Ints, Ints, Ints, float]:
    """Where above / below is a power of two but for the rounding of the outer scale: that power, and the ulps."""
    if outer is None or bool(((above == below) | (above == 0)).all()):
        return above, below, exponent, 0.0
    ratio = above.astype(np.float64) / below
    power = np.rint(np.log2(np.maximum(ratio, 2.0**-60))).astype(np.int64)
    off = np.abs(np.ldexp(ratio, -power) - 1)
    stored = target.scales[-1].format
    half_ulp = stored.spacing(outer) / outer / 2
    # Of a rounded quotient, the error is at most half an ulp of the result, up to its own second order.
    near = off <= half_ulp * (1 + 4 * half_ulp)
    ulp = float(np.max(np.where(near, off, 0.0))) / (2 * half_ulp)
    one = np.ones_like(above)
    return (
        np.where(near, one, above),
        np.where(near, one, below),
        np.where(near, exponent + power, exponent),
        ulp,
    )
