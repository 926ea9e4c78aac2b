"""A quantized chunk beside its original, measured in one look: energies by row, by column and by kind of error.

    signal = Σ x²      noise = Σ (x - x̂)² = rounding + clipped + underflowed + beyond        (see tensors.metrics)

Sums have one order, so that every backend gives the same bits: lane l of 16 sums the columns l, l + 16, ... of a row in
float64, and the lanes are added in order; a column is summed row by row, through all chunks of the matrix. What
is not finite on either side counts as ``broken`` and adds no energy. Peaks are patterns of float32 magnitudes, which
order like the magnitudes, NaN above all.

Left out: relative errors, which tell nothing about a matrix that energies do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.kernels import Rows
from narrowcast.kernels.reference.rows import qtensor
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import Format
from narrowcast.tensors.metrics import Errors, classify
from narrowcast.tensors.packing import Packing
from narrowcast.tensors.scaling import reduce_tiles
from narrowcast.tensors.schemes import Scheme, Tile

LANES = 16
F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]
SIGNAL, NOISE, CLIPPED, UNDERFLOWED, BEYOND = range(
    5
)  # energies of a row; from CLIPPED on, parts of the noise


@dataclass(frozen=True)
class Sums:
    """What chunks add up to. ``rows`` float64 [5, N] (energies above), ``columns`` float64 [2, K] (signal, noise),
    peaks of the original uint32 [N] and [K]; ``counts`` int64 [4]: elements clipped, underflowed, beyond the bound,
    broken; ``lost`` int64 [3]: tiles that were not zero and are, and the coordinates of the first one (-1: none)."""

    rows: F64
    columns: F64
    row_peaks: NDArray[np.uint32]
    column_peaks: NDArray[np.uint32]
    counts: NDArray[np.int64]
    lost: NDArray[np.int64]

    @classmethod
    def zeros(cls, n: int, k: int) -> Sums:
        return cls(
            np.zeros((5, n)), np.zeros((2, k)), np.zeros(n, np.uint32), np.zeros(k, np.uint32),
            np.zeros(4, np.int64), np.array([0, -1, -1]),
        )  # fmt: skip

    def energy(self, which: int) -> float:
        """One energy of the whole matrix: the exact sum of its rows, rounded once."""
        return fsum(self.rows[which])

    @property
    def errors(self) -> Errors:
        clipped, underflowed, beyond = (int(count) for count in self.counts[:3])
        elements = self.rows.shape[1] * self.columns.shape[1]
        return Errors(elements, self.energy(SIGNAL), self.energy(NOISE), clipped, underflowed, beyond)


# stored [n, K] of a chunk that begins at row ``start``, its format, scheme, packing, rows, outer, start, sums
Measure = Callable[[NDArray[Any], Format, Scheme, Packing, Rows, float | None, int, Sums], None]


def measure(
    stored: NDArray[Any], source: Format, scheme: Scheme, packing: Packing, rows: Rows, outer: float | None,
    start: int, sums: Sums,
) -> None:  # fmt: skip
    """Add the rows from ``start`` on, which begin a tile: ``stored`` is the original in its carrier."""
    x, q = widen(stored, source), qtensor(rows, scheme, packing, stored.shape[1], outer)
    with np.errstate(all="ignore"):
        decoded = q.dequantize()
        add(x, decoded, classify(x, q, decoded), loss_tile(scheme), start, sums)


def loss_tile(scheme: Scheme) -> Tile:
    """The tiles that may be lost: the innermost ones, or rows where a scale serves more than one chunk."""
    rows, columns = scheme.inner.tile
    return (rows, columns) if rows else (1, columns)


def add(
    x: NDArray[np.float32], decoded: NDArray[np.float32], kinds: tuple[Mask, Mask, Mask], tile: Tile, start: int,
    sums: Sums,
) -> None:  # fmt: skip
    """Add rows whose decode and kinds of errors (clipped, underflowed, beyond) are known."""
    wide = x.astype(np.float64)
    error = wide - decoded
    broken = ~np.isfinite(error)
    power = np.where(broken, 0, error * error)
    signal = np.where(np.isfinite(wide), wide * wide, 0)
    stop = start + len(x)
    energies = (signal, power, *(np.where(kind, power, 0) for kind in kinds))
    sums.rows[:, start:stop] = [by_lanes(energy) for energy in energies]
    for own, energy in zip(sums.columns, (signal, power), strict=True):
        for row in energy:
            own += row
    peaks = np.abs(x).view(np.uint32)
    sums.row_peaks[start:stop] = peaks.max(axis=1, initial=0)
    np.maximum(sums.column_peaks, peaks.max(axis=0, initial=0), out=sums.column_peaks)
    sums.counts[:] += [int(mask.sum()) for mask in (*kinds, broken)]
    lost = reduce_tiles(x != 0, tile) & ~reduce_tiles(decoded != 0, tile)
    if lost.any():
        if not sums.lost[0]:
            sums.lost[1:] = np.argwhere(lost)[0]
            sums.lost[1] += start // tile[0]
        sums.lost[0] += int(lost.sum())


def by_lanes(energy: F64) -> F64:
    """Sums of rows [n, K], lane by lane."""
    n, k = energy.shape
    padded = np.zeros((n, -(-k // LANES) * LANES))
    padded[:, :k] = energy
    lanes, total = np.zeros((n, LANES)), np.zeros(n)
    for unit in range(0, padded.shape[1], LANES):
        lanes += padded[:, unit : unit + LANES]
    for lane in range(LANES):
        total += lanes[:, lane]
    return total
