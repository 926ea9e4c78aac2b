"""What schemes keep of a matrix, tried on a sample of its original with the quantizer of this toolkit.

    scheme    as it is stored: the same element, tiles and formats of scales
    finer     the same element under fp32 scales of the tensor, of channels, of groups of 128, 32, 16
    outliers  dB that the other columns would gain if the outlier columns were not there

The sample is whole rows, spread over the matrix, in steps of the scheme's tiles. A SQNR is of the values as they meet
the model's own input, whatever the container does to columns in between.

Left out: searches for better scales. A file whose scales were searched for is better than what is expected of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, log10
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import NarrowcastError
from narrowcast.jobs.coded import Coded
from narrowcast.jobs.matching import Held
from narrowcast.kernels import choose
from narrowcast.numbers.formats import FP32, Format, Kind
from narrowcast.tensors.packing import BYTES
from narrowcast.tensors.scaling import outer_scale
from narrowcast.tensors.schemes import Scheme, Tile
from narrowcast.tensors.storage import stored_scheme

F32 = NDArray[np.float32]
SAMPLE = 1 << 16  # elements: the noise of so many is known to 0.1 dB
STRIPS = 4
TILES: dict[str, Tile] = {
    "tensor": (0, 0), "channel": (1, 0), "group 128": (1, 128), "group 32": (1, 32), "group 16": (1, 16),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kept:
    """dB: of the stored scheme, of finer ones by name, and what outlier columns cost the others. ``ranges`` are the
    rows of the sample."""

    scheme: float
    finer: tuple[float, ...]
    outliers: float
    ranges: tuple[tuple[int, int], ...]

    def by_tile(self) -> dict[str, float]:
        return dict(zip(TILES, self.finer, strict=True))


def strips(n: int, k: int, multiple: int) -> list[tuple[int, int]]:
    """Row ranges of about ``SAMPLE`` elements, each of whole ``multiple``s, spread over n rows."""
    wanted = max(SAMPLE // max(k, 1), 1)
    count = min(STRIPS, max(wanted // multiple, 1))
    height = max(wanted // count // multiple, 1) * multiple
    starts = sorted({(n - height) * (2 * i + 1) // (2 * count) // multiple * multiple for i in range(count)})
    if height >= n or starts[0] < 0:
        return [(0, n)]
    found: list[tuple[int, int]] = []
    for i in starts:
        if not found or i >= found[-1][1]:
            found.append((i, i + height))
    return found


def keep(
    original: Held, coded: Coded, columns: tuple[Any, Any], amax: float, outliers: Sequence[int]
) -> Kept | None:
    """Try the schemes; ``columns`` are order and factors of the stored columns. None where the sample is empty or no
    quantizer makes the scheme."""
    n, k = coded.shape
    order, factors = columns
    scheme = _remade(coded)
    ranges = strips(n, k, scheme.inner.tile[0] or 1)
    values = np.concatenate([original.values(i, j) for i, j in ranges]).astype(np.float32)
    values = np.where(np.isfinite(values), values, np.float32(0))
    if not values.any():
        return None
    try:
        base = values if order is None else values[:, order]
        own = _noise(base, scheme, amax, factors)
        row = stored_rows(scheme.element)
        tried = [
            _sqnr(values, _noise(values, replace(row, scales=_tiled(row, tile)), amax, None))
            for tile in TILES.values()
        ]
        cost = _cost(base, scheme, amax, factors, order, outliers, own) if outliers else 0.0
    except NarrowcastError:
        return None
    return Kept(_sqnr(values, own), tuple(tried), cost, tuple(ranges))


def _remade(coded: Coded) -> Scheme:
    """The scheme that makes what is stored: with zero points in codes where the file has them as floats."""
    scheme: Scheme = coded.how.scheme
    if coded.how.part("offset") is None:
        return scheme
    unsigned = scheme.element
    return stored_scheme(unsigned, scheme.inner.tile, FP32, zero=None if unsigned.signed else unsigned)


def stored_rows(element: Format) -> Scheme:
    """A scheme of rows for an element, with zero points where it has no sign."""
    bare = element.kind is Kind.INT and not element.signed
    return stored_scheme(element, (1, 0), FP32, zero=element if bare else None)


def _tiled(scheme: Scheme, tile: Tile) -> tuple[Any, ...]:
    return (replace(scheme.inner, tile=tile),)


def _noise(
    x: F32, scheme: Scheme, amax: float, factors: F32 | None, without: Sequence[int] = ()
) -> NDArray[np.float64]:
    """(x - x̂)² of a sample by column, after the scheme."""
    made = x if factors is None else (x / factors).astype(np.float32)
    if len(without):
        made = made.copy()
        made[:, without] = 0
    outer = None
    if scheme.outer is not None and scheme.zero is None:
        largest = float(np.abs(made).max()) if factors is not None or len(without) else amax
        outer = float(outer_scale(np.full((1, 1), largest, np.float32), scheme)[0, 0])
    moving = scheme.zero is not None and scheme.inner.tile == (
        0,
        0,
    )  # the compiled one takes no zero point per tensor
    backend = choose(scheme, FP32, BYTES, "reference" if moving else "auto").backend
    rows = backend.quantize(made, FP32, scheme, BYTES, outer)
    back = backend.dequantize(rows, scheme, BYTES, x.shape[1], FP32, outer)
    with np.errstate(all="ignore"):
        error = np.subtract(x, back if factors is None else back * factors, dtype=np.float64)
        found: NDArray[np.float64] = np.square(error, out=error).sum(axis=0)
    return found if np.isfinite(found).all() else np.where(np.isfinite(error), error, 0).sum(axis=0)


def _cost(
    x: F32,
    scheme: Scheme,
    amax: float,
    factors: F32 | None,
    order: Any,
    outliers: Sequence[int],
    own: NDArray[np.float64],
) -> float:
    """dB that the columns beside the outliers lose to them."""
    at = list(outliers) if order is None else np.flatnonzero(np.isin(order, outliers)).tolist()
    rest = np.ones(len(own), np.bool_)
    rest[at] = False
    before = float(own[rest].sum())
    after = float(_noise(x, scheme, amax, factors, at)[rest].sum())
    return 10 * log10(before / after) if before and after else 0.0


def _sqnr(x: F32, noise: NDArray[np.float64]) -> float:
    signal, total = float(np.square(x, dtype=np.float64).sum()), float(noise.sum())
    return inf if not total else 10 * log10(signal / total) if signal else -inf
