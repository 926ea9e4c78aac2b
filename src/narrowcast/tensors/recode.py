"""From one scheme to another without rounding, where the numbers allow it, decided tile by tile from the data.

    value = element · S = (element · 2^-r) · (S · 2^r)

A tile of the target must lie within a tile of the source, so that one S serves it. Then T = S · 2^r is stored
where the target's scale format holds it exactly, and codes go through the table of the shift r (codemaps). The
formats give a natural r; a tile whose scale or codes do not fit there takes the nearest r where both do. A tile
of zeros takes any scale.

    MXFP4 → NVFP4             r = 0, codes untouched: 2^e = 2^(e - o) · 2^o, where E4M3 holds 2^-9 .. 2^8
    FP8 blocks ↔ UE8M0        r = 0, codes untouched, where scales are powers of two
    INT4 → INT8, UINT4 → INT8 r = 0: sign extension, code - zero
    E4M3FN ↔ E4M3FNUZ         r = ±1: the same bits, the scale doubled or halved; 0x80 is -0 here and NaN there

What does not fit is counted, and located, never rounded unless asked: ``nearest`` then gives those tiles, of the
target's own scale for their amax and of the shifts around the natural one, the scale of least square error.

Left out: coarser tiles (equal neighbours are a coincidence of the data) and ratios of scales that are no power
of two, except where rounding was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import NonFiniteError, UsageError
from narrowcast.numbers.codec import decode_table, encode
from narrowcast.tensors.codemaps import (
    SHIFTS,
    WINDOW,
    ZERO,
    CodeMap,
    Pair,
    code_map,
    element_index,
    natural_shift,
    pair_of,
    shift_bits,
    target_zeros,
    translate,
    values,
)
from narrowcast.tensors.exactscales import (
    Exact,
    exact_scales,
    inner_format,
    outer_level,
    resample,
    store_exact,
)
from narrowcast.tensors.misfits import Misfits, possible
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.scaling import inner_scale, load_scale, reduce_tiles, store_scale
from narrowcast.tensors.schemes import Scheme, tile_grid
from narrowcast.tensors.storage import same_storage
from narrowcast.tensors.survey import Survey, plan_outer, survey

__all__ = ["Misfits", "Recoded", "Survey", "plan_outer", "possible", "recode", "survey"]

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Recoded:
    """``q``: the same values, or None where some tile has no equal; ``nearest``: if asked for, a complete result
    with those tiles rounded (q itself where nothing is); ``reason``: why q is None, in words."""

    q: QTensor | None
    nearest: QTensor | None
    misfits: Misfits
    reason: str = ""


def recode(
    q: QTensor, target: Scheme, outer: float | None = None, *, nearest: bool = False, row: int = 0
) -> Recoded:
    """``q`` [..., n, K] in another scheme, value for value; see the module docstring.

    ``outer`` is the target's per-tensor scale as stored; one chunk of several must be given that of the whole
    tensor (``plan_outer`` of the summed surveys); leading matrices share it, so experts with outer scales of their
    own are recoded one by one. ``row`` is where the chunk starts, for the place of misfits.
    UsageError where ``possible`` says no; NonFiniteError for scales that are no numbers, and for elements that
    are none and would have to be rounded.
    """
    reason = possible(q.scheme, target)
    if reason is not None:
        raise UsageError(
            "no equal values", where=f"{q.scheme.name} to {target.name}", got=reason,
            remedy="requantize instead, which rounds a second time, or convert from the unquantized parent",
        )  # fmt: skip
    tiles = target.inner.count(q.shape)
    if same_storage(q.scheme, target) and _has_outer(q, outer):
        moved = replace(q, scheme=target)
        return Recoded(moved, moved if nearest else None, Misfits(of=tiles))
    if outer is None and outer_level(target) is not None:
        outer = plan_outer(survey(q), q.scheme, target)
    _check_outer(outer, target)
    work = _Work(q, target, outer, pair_of(q.scheme, target), exact_scales(q, target, outer))
    places = _settle(work)
    misfits = _misfits(work, places, row)
    if not misfits.exact and not nearest:
        return Recoded(None, None, misfits, misfits.words(target))
    made = _assemble(work, places)
    return Recoded(made if misfits.exact else None, made if nearest else None, misfits, misfits.words(target))


def _has_outer(q: QTensor, outer: float | None) -> bool:
    level = outer_level(q.scheme)
    return outer is None or (level is not None and bool((q.scale_values(level) == np.float32(outer)).all()))


def _check_outer(outer: float | None, target: Scheme) -> None:
    level = outer_level(target)
    if level is None and outer is not None:
        raise UsageError("the scheme has no per-tensor scale", where=target.name, got=outer)
    if level is None or outer is None:
        return
    fmt = target.scales[level].format
    if not 0 < outer < np.inf or float(load_scale(store_exact(np.array(outer), fmt), fmt)) != outer:
        raise UsageError(
            "not a stored per-tensor scale", where=target.name, got=outer, wanted=f"a positive {fmt.name}"
        )


@dataclass(frozen=True)
class _Work:
    """One recoding: the chunk, where it goes, and its scales over the target's outer one."""

    q: QTensor
    target: Scheme
    outer: float | None
    pair: Pair
    scales: Exact

    @cached_property
    def natural(self) -> int:
        """The shift that tiles take unless they must not; a scale of the whole tensor says it itself."""
        if inner_format(self.target) is None:
            low, high = self.scales.shifts(None)
            said = int(low.flat[0])
            if (low == high).all() and (low == said).all() and abs(said) <= WINDOW:
                return said
        return natural_shift(self.pair)

    @property
    def natural_map(self) -> CodeMap:
        return code_map(self.pair, self.natural)


@dataclass(frozen=True)
class _Places:
    """What becomes of the tiles that do not fit at the natural shift, one entry each.

    ``at``: their index arrays (leading, row, column); ``index``: their elements [f, rows, cols]; ``shift``: the
    shift that they take; ``any_scale``: zeros only; ``cleared``: their scale is zero, which the target cannot say;
    ``failing``: no equal. ``low``, ``high``: shifts that their scales allow.
    """

    at: tuple[NDArray[np.intp], ...]
    index: NDArray[Any]
    shift: Ints
    any_scale: Mask
    cleared: Mask
    failing: Mask
    low: Ints
    high: Ints


def _settle(work: _Work) -> _Places:
    """Find the tiles that do not fit at the natural shift, and the nearest shift at which each does."""
    natural, lost = work.natural, work.natural_map.lost
    low, high = work.scales.shifts(inner_format(work.target))
    fits = work.scales.every((low <= natural) & (natural <= high))
    index = element_index(work.q) if lost.any() or not fits.all() else work.q.codes
    if lost.any():
        marks = translate(index, lost.astype(np.uint8))
        if marks.any():
            fits = fits & (reduce_tiles(_matrices(marks), work.target.inner.tile) == 0)
    at = np.nonzero(~fits)
    tiles = _tiled(index, work)[at[0], at[1], :, at[2], :] if len(at[0]) else np.zeros((0, 1, 1), np.uint8)
    low, high, odd = (work.scales.of(x, at) for x in (low, high, work.scales.odd))
    bits = np.bitwise_and.reduce(shift_bits(work.pair)[tiles], axis=(1, 2))
    shift, settled = np.full(len(tiles), natural), np.zeros(len(tiles), np.bool_)
    for i in sorted(range(len(SHIFTS)), key=lambda i: abs(SHIFTS[i] - natural)):
        here = (
            ~settled & (bits >> np.uint32(i) & 1).astype(np.bool_) & (low <= SHIFTS[i]) & (SHIFTS[i] <= high)
        )
        shift[here] = SHIFTS[i]
        settled |= here
    any_scale = ~settled & ((bits & ZERO) != 0)
    finite = np.isfinite(values(work.pair))[tiles].all(axis=(1, 2))
    cleared = ~settled & ~any_scale & (odd == 0) & finite
    return _Places(at, tiles, shift, any_scale, cleared, ~(settled | any_scale | cleared), low, high)


def _matrices(x: NDArray[Any]) -> NDArray[Any]:
    """[..., N, K] as [leading, N, K]."""
    return x.reshape(-1, *x.shape[-2:])


def _tiled(x: NDArray[Any], work: _Work) -> NDArray[Any]:
    """Elements [..., N, K] as [leading, tile rows, rows, tile columns, columns]: a view where whole tiles fill the
    matrix, else a copy padded with an index that stands for zero."""
    rows, cols = work.target.inner.tile
    leading, n, k = _matrices(x).shape
    rows, cols = rows or n, cols or k
    _, down, across = tile_grid((leading, n, k), (rows, cols))
    x = _matrices(x)
    if (down * rows, across * cols) != (n, k):
        zero = int(np.argmax(values(work.pair) == 0))
        x = np.pad(x, ((0, 0), (0, down * rows - n), (0, across * cols - k)), constant_values=zero)
    return x.reshape(leading, down, rows, across, cols)


def _misfits(work: _Work, places: _Places, row: int) -> Misfits:
    """Counts of what has no equal, and where it starts."""
    failing, natural, q = places.failing, work.natural, work.q
    signs = sum(int(np.count_nonzero(q.codes == code)) for code in work.natural_map.signs)
    total = work.target.inner.count(q.shape)
    if not failing.any():
        return Misfits(of=total, minus_zeros=signs, outer_ulp=work.scales.ulp)
    low, high, index = places.low[failing], places.high[failing], places.index[failing]
    fits = (low <= natural) & (natural <= high)
    bad = np.where(fits[:, None, None], work.natural_map.lost[index], values(work.pair)[index] != 0)
    tile, inner_row, inner_col = np.nonzero(bad)
    *_, n, k = q.shape
    _, rows, cols = bad.shape
    at = [x[failing][tile] for x in places.at]
    flat = (at[0] * n + at[1] * rows + inner_row) * k + at[2] * cols + inner_col
    first = [int(i) for i in np.unravel_index(int(flat.min()), q.shape)]
    first[-2] += row
    none = low > high
    by = {"by_precision": none, "by_range": ~none & ~fits, "by_code": fits}
    counts = {cause: int(tiles.sum()) for cause, tiles in by.items()}
    return Misfits(
        of=total, tiles=len(index), **counts, elements=len(tile), minus_zeros=signs, first=tuple(first),
        outer_ulp=work.scales.ulp,
    )  # fmt: skip


def _assemble(work: _Work, places: _Places) -> QTensor:
    """Codes, scales and zero points of the target; misfits rounded."""
    target, natural, table = work.target, work.natural, work.natural_map
    codes = work.q.codes if table.same else translate(element_index(work.q), table.table)
    numbers, fmt = work.scales.numbers(natural), target.inner.format
    moved = np.ldexp(work.scales.of(numbers, places.at), places.shift - natural)
    moved[places.any_scale | places.cleared] = 1
    with np.errstate(over="ignore"):  # misfits only, which are replaced
        inner = np.array(work.scales.every(store_exact(numbers, fmt)))
        inner[places.at] = store_exact(moved, fmt)
    new = _moved_codes(work, places)
    if places.failing.any():
        rounded, scales = _nearest(work, places)
        new[places.failing] = rounded
        inner[tuple(x[places.failing] for x in places.at)] = scales
    kept = places.any_scale | ((places.shift == natural) & ~places.cleared & ~places.failing)
    if not kept.all():
        codes = _replaced(codes, new, work, places)
    stored = [inner.reshape(tile_grid(work.q.shape, target.inner.tile))]
    outside = outer_level(target)
    if outside is not None:
        level = target.scales[outside]
        grid = tile_grid(work.q.shape, level.tile)
        stored[outside:] = [store_exact(np.full(grid, work.outer), level.format)]
    return QTensor(target, codes, tuple(stored), _zeros(work))


def _moved_codes(work: _Work, places: _Places) -> NDArray[np.uint8]:
    """Codes [f, rows, cols] of the tiles that take another shift, and zeros for those whose scale is zero."""
    new: NDArray[np.uint8] = work.natural_map.table[places.index]
    for shift in np.unique(places.shift[places.shift != work.natural]):
        here = places.shift == shift
        new[here] = code_map(work.pair, int(shift)).table[places.index[here]]
    zero = np.argmax(values(work.pair) == 0)
    if places.cleared.any():
        new[places.cleared] = work.natural_map.table[zero]
    return new


def _replaced(
    codes: NDArray[np.uint8], new: NDArray[np.uint8], work: _Work, places: _Places
) -> NDArray[np.uint8]:
    """A copy of the codes with the tiles at ``places`` put in."""
    tiled = _tiled(codes, work).copy()
    tiled[places.at[0], places.at[1], :, places.at[2], :] = new
    leading, down, rows, across, cols = tiled.shape
    whole = tiled.reshape(leading, down * rows, across * cols)
    *_, n, k = codes.shape
    return np.array(whole[:, :n, :k], np.uint8).reshape(codes.shape)


def _zeros(work: _Work) -> NDArray[np.uint8] | None:
    """Zero points of the target: the source's, one per new tile, or the middle of the range."""
    q, target, fmt = work.q, work.target, work.target.zero
    if fmt is None:
        return None
    if work.pair.keeps_zero and q.zero is not None:
        kept: NDArray[np.uint8] = resample(q.zero, q.scheme.inner.tile, target.inner.tile, q.shape)
        return kept
    code = encode(np.array(float(work.pair.middle)), fmt).codes
    return np.full(tile_grid(q.shape, target.inner.tile), int(code), np.uint8)


def _nearest(work: _Work, places: _Places) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Codes [f, rows, cols] and stored scales [f] of the misfits, of the least square error among the candidates.

    Candidates are the nearest stored scale at the natural shift and its two neighbours, and the one that the
    target's rule gives for the tile's amax. Values are in units of the target's outer scale, in float64. A tile
    of more elements than there are codes is rounded code by code.
    """
    target, pair, table = work.target, work.pair, decode_table(work.target.element)
    index = places.index[places.failing].reshape(int(places.failing.sum()), -1).astype(np.intp)
    cells, weight = _cells(index, len(values(pair)))
    value = np.where(weight > 0, values(pair)[cells], 0)
    if not np.isfinite(value).all():
        problem = "tiles that must be rounded hold NaN or infinite elements"
        raise NonFiniteError(problem, where=f"{work.q.scheme.name} to {target.name}")
    size = work.scales.of(work.scales.numbers(), tuple(x[places.failing] for x in places.at))
    value, zero = value * size[:, None], target_zeros(pair)[cells]
    best = np.full(len(size), np.inf)
    chosen, scale = np.zeros(cells.shape, np.uint8), None
    for stored, number in _candidates(work, np.abs(size), np.abs(value).max(axis=1)):
        divided = value / number[:, None]
        codes = encode(divided + zero if zero.any() else divided, target.element).codes.astype(np.uint8)
        off = (table[codes] - zero) * number[:, None] - value
        error = np.sum(weight * off * off, axis=1)
        better = error < best
        best = np.where(better, error, best)
        chosen = np.where(better[:, None], codes, chosen)
        scale = stored if scale is None else np.where(better, stored, scale)
    assert scale is not None
    made: NDArray[np.uint8] = chosen if cells is index else np.take_along_axis(chosen, index, axis=1)
    return made.reshape(-1, *places.index.shape[1:]), scale


def _cells(index: NDArray[np.intp], codes: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """What to round per tile [f, ...] and how often it occurs: its elements, or every code if those are fewer."""
    tiles, elements = index.shape
    if elements <= codes:
        return index, np.ones(index.shape, np.int64)
    first = np.arange(tiles)[:, None] * codes
    counts = np.bincount((index + first).ravel(), minlength=tiles * codes)
    return np.broadcast_to(np.arange(codes), (tiles, codes)), counts.reshape(tiles, codes)


def _candidates(work: _Work, size: Floats, amax: Floats) -> Iterator[tuple[NDArray[Any], Floats]]:
    """Scales [f] as stored and as numbers in units of the outer scale."""
    level = work.target.inner
    if inner_format(work.target) is None:
        yield np.ones(len(size)), np.ones(len(size))
        return
    with np.errstate(over="ignore"):
        stored = [store_scale(np.ldexp(size, work.natural + r), level.format) for r in (0, -1, 1)]
        # An asymmetric rule maps the whole range, which is twice the amax, on its span.
        reached = 2 * amax if work.target.zero is not None else amax
        stored.append(inner_scale(reached, replace(work.target, scales=(level,)), None))
    for candidate in stored:
        yield candidate, load_scale(candidate, level.format).astype(np.float64)
