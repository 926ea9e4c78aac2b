"""QTensor: a quantized tensor as mathematics, one code per element, scales as stored.

    x ≈ (decode(codes) - zero) · Π spread(scale)        (a scale that divides enters as its reciprocal)

Codes are bit patterns (int4 -8 is 0b1000), never packed and never swizzled; packing, hardware layouts and
file spellings are tables around this type, so moving between containers need not touch a value. Tiles come
from the scheme and are never inferred from shapes: 576 rows in blocks of 128 end in a block of 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import InputError
from narrowcast.numbers.codec import decode
from narrowcast.tensors.scaling import element_divisor, load_scale, scales_shape, spread
from narrowcast.tensors.schemes import Scheme


@dataclass(frozen=True)
class QTensor:
    """Codes uint8 [..., N, K]; ``scales`` inner to outer, each tile_grid-shaped: float32 for fp32 levels, else
    codes of the level's format; ``zero`` codes shaped like the innermost scales for asymmetric schemes."""

    scheme: Scheme
    codes: NDArray[np.uint8]
    scales: tuple[NDArray[Any], ...]
    zero: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        wanted = scales_shape(self.codes.shape, self.scheme)
        got = [scale.shape for scale in self.scales]
        if got != wanted:
            raise InputError("scales do not fit the codes", where=self.scheme.name, got=got, wanted=wanted)
        if (self.zero is None) != (self.scheme.zero is None):
            raise InputError("zero points and scheme disagree", where=self.scheme.name)
        if self.zero is not None and self.zero.shape != wanted[0]:
            raise InputError("zero points do not fit the scales", got=self.zero.shape, wanted=wanted[0])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def bits_per_weight(self) -> float:
        return self.scheme.bits_per_weight(self.shape)

    def scale_values(self, level: int = 0) -> NDArray[np.float32]:
        """Decoded values of one scale level."""
        scale = self.scheme.scales[level]
        return load_scale(self.scales[level], scale.format)

    def rows(self, start: int, stop: int) -> QTensor:
        """Rows start:stop of the last matrix axis pair; ``start`` must begin a tile of every level."""
        parts = []
        for level, stored in zip(self.scheme.scales, self.scales, strict=True):
            height = level.tile[0]
            if height and start % height:
                raise InputError("row slice cuts a tile", got=start, wanted=f"a multiple of {height}")
            parts.append(stored[..., start // height : -(-stop // height), :] if height else stored)
        height = self.scheme.inner.tile[0]
        zero = self.zero
        if zero is not None and height:
            zero = zero[..., start // height : -(-stop // height), :]
        return QTensor(self.scheme, self.codes[..., start:stop, :], tuple(parts), zero)

    def elements(self) -> NDArray[np.float32]:
        """Decoded elements with the zero point taken off (exact: small integers)."""
        elements = decode(self.codes, self.scheme.element)
        if self.zero is None or self.scheme.zero is None:
            return elements
        zero = decode(self.zero, self.scheme.zero)
        less_zero: NDArray[np.float32] = elements - spread(zero, self.scheme.inner.tile, self.shape)
        return less_zero

    def dequantize(self) -> NDArray[np.float32]:
        """Exact decode: the fp32 product of all scales, times the element in fp32."""
        outer = self.scale_values(1) if len(self.scales) == 2 else None
        scale = element_divisor(self.scales[0], self.scheme, outer)
        with np.errstate(
            over="ignore"
        ):  # a product beyond fp32 is infinite, as in every engine; metrics count it
            values: NDArray[np.float32] = self.elements() * spread(scale, self.scheme.inner.tile, self.shape)
        return values
