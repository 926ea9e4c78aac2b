"""One quantized matrix as a rule sees it: grids of scales, counts of codes, the largest code of every tile.

    amax(tile) = |decode(peak(tile))| · scale(tile) · outer       exact: a positive scale keeps the order

Rules decide on counts (of codes, of stored scales), which cost nothing once they are made, and look at grids only to
say where. Everything lazy here is made at most once, and dropped with the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.spelling import Array
from narrowcast.jobs.coded import Coded
from narrowcast.jobs.matching import Held
from narrowcast.kernels import choose_pairs, choose_survey
from narrowcast.kernels.reference.survey import Counts, Ranks
from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import Format
from narrowcast.tensors.packing import BYTES
from narrowcast.tensors.scaling import load_scale, scales_shape
from narrowcast.tensors.schemes import Scheme

F32 = NDArray[np.float32]
_EVERY_BYTE, _NO_RANKS = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)


@cache
def ranks(element: Format) -> Ranks:
    """The rank of every code by magnitude, uint8 [2^bits]: equal magnitudes have one rank, zero and NaN rank 0."""
    magnitudes = np.abs(decode_table(element))
    finite = np.where(np.isfinite(magnitudes), magnitudes, 0)
    return np.searchsorted(np.unique(finite), finite).astype(np.uint8)


@cache
def magnitudes(element: Format) -> F32:
    """The magnitude of every rank, float32 ascending from 0."""
    values = np.abs(decode_table(element))
    return np.unique(np.where(np.isfinite(values), values, 0)).astype(np.float32)


@dataclass
class Matrix:
    """A quantized matrix [N, K]. ``scales`` is the grid of innermost scales as stored (float32, or codes of the
    scale's format; [1, 1] where the only scale is one for the tensor), ``zero`` the zero points alike. ``outer`` and
    ``input`` are the tensor's own scale and its input's as multipliers, None where there is none. ``counts`` int64
    [2^bits] and ``peaks`` uint8 (ranks of magnitude, a grid like ``scales``) are None where codes were not read.
    """

    held: Held
    coded: Coded
    scales: NDArray[Any]
    zero: Array | None
    outer: float | None
    input: float | None
    counts: Counts | None = None
    peaks: Ranks | None = None
    later: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The module's name; of a stack, that of one expert's projection."""
        return self.held.name

    @property
    def role(self) -> str:
        return self.held.role

    @property
    def scheme(self) -> Scheme:
        found: Scheme = self.coded.how.scheme
        return found

    @property
    def element(self) -> Format:
        return self.scheme.element

    @property
    def shape(self) -> tuple[int, int]:
        return self.coded.shape

    @property
    def scale_format(self) -> Format:
        """The format that the innermost scales are stored in."""
        return self.scheme.inner.format

    def tensor(self, piece: str) -> str:
        """The tensor in the file that holds a piece (``codes``, ``scales``, ``outer``, ``input``, ``zero``)."""
        part = self.coded.how.part(piece)  # type: ignore[arg-type]
        if part is None and piece == "scales":
            part = self.coded.how.part("outer")  # the only scale, where it is one for the tensor
        return self.coded.place.stem + part.suffix if part is not None else self.name

    @cached_property
    def scale_values(self) -> F32:
        """The innermost scales as numbers, without the outer one; a grid like ``scales``."""
        return load_scale(self.scales, self.scale_format)

    @property
    def scale_table(self) -> NDArray[np.float64]:
        """What each code of an innermost scale decodes to, where scales are codes of eight bits."""
        return decode_table(self.scale_format)

    @cached_property
    def scale_counts(self) -> Counts | None:
        """How often each code of a scale occurs, int64 [256]; None where scales are wider than a byte."""
        if self.scales.dtype != np.uint8:
            return None
        if self.joint is not None:
            return self.joint.sum(axis=0)
        return _counts(self.scales)

    @cached_property
    def joint(self) -> Counts | None:
        """How many tiles have a peak (rank) and a scale (code), int64 [ranks, 256]; None without codes, or where scales
        are wider than a byte."""
        if self.peaks is None or self.scales.dtype != np.uint8 or self.scales.shape != self.peaks.shape:
            return None
        return choose_pairs()(self.peaks, self.scales, len(magnitudes(self.element)))

    @cached_property
    def peak_counts(self) -> Counts:
        """How many tiles have each peak, int64 [ranks]."""
        assert self.peaks is not None
        if self.joint is not None:
            return self.joint.sum(axis=1)
        return _counts(self.peaks)[: len(magnitudes(self.element))]

    @cached_property
    def tile_amax(self) -> F32 | None:
        """The largest decoded magnitude of every tile; None without codes, or where zero points move them."""
        if self.peaks is None or self.zero is not None:
            return None
        with np.errstate(all="ignore"):
            return magnitudes(self.element)[self.peaks] * self.multipliers

    @cached_property
    def multipliers(self) -> F32:
        """What each tile is multiplied by: the innermost scale under the outer one; a grid like ``scales``."""
        return self._under_outer(self.scale_values)

    def _under_outer(self, scales: F32) -> F32:
        if self.outer is None or len(self.scheme.scales) == 1:
            return scales
        with np.errstate(all="ignore"):
            divides = self.scheme.scales[-1].divides
            outer = np.array(1 / np.float64(self.outer) if divides else self.outer, np.float32)
            found: F32 = (np.divide if divides else np.multiply)(scales, outer)
        return found

    @cached_property
    def amax(self) -> float | None:
        """The largest finite decoded magnitude, None as in ``tile_amax``."""
        if self.peaks is None or self.zero is not None:
            return None
        with np.errstate(all="ignore"):
            if self.joint is None:
                found = self.tile_amax
            else:  # each pair that occurs once
                scales = self._under_outer(load_scale(_EVERY_BYTE, self.scale_format))
                found = (magnitudes(self.element)[:, None] * scales)[self.joint > 0]
        assert found is not None
        return float(np.where(np.isfinite(found), found, 0).max(initial=0))

    @cached_property
    def values(self) -> F32:
        """What the codes decode to, float32 [2^bits] without scales."""
        return decode_table(self.element)

    def share(self, codes: NDArray[np.bool_]) -> float:
        """The share of elements whose code is among a mask [2^bits]; 0 where there are none."""
        assert self.counts is not None
        return float(self.counts[codes].sum() / max(self.counts.sum(), 1))

    @property
    def tile(self) -> tuple[int, int]:
        return self.scheme.inner.tile

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape that a grid of innermost scales has."""
        return scales_shape(self.shape, self.scheme)[0]


def _counts(grid: NDArray[np.uint8]) -> Counts:
    """How often each byte occurs in a matrix, int64 [256]."""
    return choose_survey(BYTES)(grid, BYTES, grid.shape[1], (0, 0), _NO_RANKS)[0]


def first(mask: NDArray[np.bool_]) -> tuple[int, ...] | None:
    """Coordinates of the first true element."""
    return tuple(int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape)) if mask.any() else None
