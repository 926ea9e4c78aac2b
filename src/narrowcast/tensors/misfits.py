"""What keeps values of one scheme from having equals in another: for any data, and counted in given data.

For any data: a tile of the target that reaches over several scales of the source, and elements with more
significant bits than the target's have,

    bits(E4M3) = 4, bits(E2M1) = 2, bits(INT4) = 3 (|q| ≤ 8), bits(UINT4 - 8) = 3, bits(INT8) = 7

Ranges are a matter of the data: an E4M3 tile whose elements span few binades has an equal in INT8.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import Kind
from narrowcast.tensors.codemaps import Pair, pair_of
from narrowcast.tensors.exactscales import odd_parts, outer_level
from narrowcast.tensors.schemes import Scheme, Tile


@dataclass(frozen=True)
class Misfits:
    """What has no equal in the target; misfits of chunks add up to those of the tensor.

    ``tiles`` of ``of`` innermost tiles of the target, each by its first cause: the scale needs more significant
    bits than its format has, or a sign (``by_precision``), is too large or small for it (``by_range``), or some
    code has no equal (``by_code``). ``elements``: codes without an equal at the natural shift, and all nonzero
    elements where the scale has none. ``first``: index of the first such element. ``minus_zeros`` became plus
    zeros, which are equal. ``outer_ulp``: how far the outer scale is from the exact one, in its last place.
    """

    of: int = 0
    tiles: int = 0
    by_precision: int = 0
    by_range: int = 0
    by_code: int = 0
    elements: int = 0
    minus_zeros: int = 0
    outer_ulp: float = 0.0
    first: tuple[int, ...] | None = None

    @property
    def exact(self) -> bool:
        """Whether every value is kept."""
        return not self.tiles and not self.outer_ulp

    def __add__(self, other: Misfits) -> Misfits:
        counts = (f.name for f in fields(self) if f.name not in ("outer_ulp", "first"))
        summed = {name: getattr(self, name) + getattr(other, name) for name in counts}
        first = other.first if self.first is None else self.first
        return Misfits(**summed, outer_ulp=max(self.outer_ulp, other.outer_ulp), first=first)

    def words(self, target: Scheme) -> str:
        """The reason in one line; empty where everything is kept."""
        scale, parts = target.inner.format.name, []
        if self.by_precision:
            parts.append(f"scales that are no {scale} number at any power of two: {self.by_precision}")
        if self.by_range:
            beside = " under the tensor's outer scale" if outer_level(target) is not None else ""
            parts.append(f"scales out of {scale}'s range{beside}: {self.by_range}")
        if self.by_code:
            parts.append(f"tiles with elements that {target.element.name} has no equal for: {self.by_code}")
        said = []
        if self.tiles:
            at = f", first at {self.first}" if self.first else ""
            said.append(f"{self.tiles} of {self.of} tiles ({self.elements} elements{at}): {', '.join(parts)}")
        if self.outer_ulp:
            said.append(f"the per-tensor scale is rounded by {self.outer_ulp:.2g} ulp")
        return "; ".join(said)


def possible(source: Scheme, target: Scheme) -> str | None:
    """Why no tensor of the one scheme can be expected to have an equal in the other, or None.

    None promises nothing: whether ranges suffice depends on the data.
    """
    pair = pair_of(source, target)
    bits, held = _significant_bits(pair), _held_bits(pair)
    for level in source.scales:
        if not _within(target.inner.tile, level.tile):
            small, large = _tile_words(level.tile), _tile_words(target.inner.tile)
            return f"a scale of {target.name} serves {large}, one of {source.name} only {small}"
    for scheme in (source, target):
        if len(scheme.scales) > 2 or any(s.divides and s.tile != (0, 0) for s in scheme.scales):
            return f"{scheme.name} has scales that only a per-tensor level may have"
    if Kind.TABLE in (pair.source.kind, pair.target.kind) and pair.source != pair.target:
        return f"the values of {pair.source.name} are none of {pair.target.name}'s"
    if bits > held:
        return f"elements of {source.name} have {bits} significant bits, those of {target.name} {held}"
    zero = target.zero
    if zero is not None and not pair.keeps_zero and not zero.min <= pair.middle <= zero.max:
        return f"zero points of {target.name} cannot be {pair.middle}, which stands for none"
    return None


def _significant_bits(pair: Pair) -> int:
    """Of the source's elements; its zero points may all be the middle, as in symmetric data of an asymmetric kind."""
    value = decode_table(pair.source)
    if pair.source_zero is not None and not pair.keeps_zero:
        value = value - (0 if pair.source.signed else 1 << (pair.source.bits - 1))
    return int(odd_parts(value[np.isfinite(value)])[0].max()).bit_length()


def _held_bits(pair: Pair) -> int:
    """Significant bits that every element of the target may have; a table holds its own values only."""
    element = pair.target
    if element.kind is Kind.INT:
        centred = element.signed or (pair.target_zero is not None and not pair.keeps_zero)
        return element.bits - 1 if centred else element.bits
    return 53 if element.kind is Kind.TABLE else element.mantissa_bits + 1


def _within(tile: Tile, of: Tile) -> bool:
    """Whether tiles of one size lie within tiles of another, whatever the shape."""
    return all(
        outer == 0 or (inner != 0 and outer % inner == 0) for inner, outer in zip(tile, of, strict=True)
    )


def _tile_words(tile: Tile) -> str:
    return (
        "tensor"
        if tile == (0, 0)
        else "x".join(str(size or whole) for size, whole in zip(tile, "NK", strict=True))
    )
