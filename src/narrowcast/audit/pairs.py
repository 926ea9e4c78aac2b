"""A matrix or tensor beside its original, read once: what was lost, of which kind, in which channels.

    SQNR = 10 log10(Σ x² / Σ (x - x̂)²)        noise = rounding + clipping + underflow + beyond any rounding
    gap  = what the scheme keeps of this data, measured on a sample of it, less what the file keeps of the sample

Sums of rows and columns live while a matrix is read; what stays of it are some numbers, and its worst channels. The
noise is that of the weight as it meets the model's own input: factors of columns (AWQ's pre_quant_scale) are taken
back, and columns counted in the model's order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, lcm, log10, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.audit.pair_sample import Kept, keep
from narrowcast.audit.pair_smoothing import Smoothing, matrix_after, smoothing
from narrowcast.audit.subject import Subject
from narrowcast.jobs.coded import Coded, folded
from narrowcast.jobs.compare import differences
from narrowcast.jobs.diagnosing import ENOUGH, Case, Diagnosis, diagnose, typical
from narrowcast.jobs.matching import Constant, Held
from narrowcast.jobs.stream import CHUNK_BYTES, Workers, chunks
from narrowcast.kernels import Rows, choose_pair
from narrowcast.kernels.reference.dequantize import narrow
from narrowcast.kernels.reference.pair import (
    BEYOND,
    CLIPPED,
    NOISE,
    SIGNAL,
    UNDERFLOWED,
    Sums,
    add,
    loss_tile,
)
from narrowcast.kernels.reference.rows import qtensor
from narrowcast.numbers.formats import FP32, formats
from narrowcast.tensors.metrics import Errors, classify
from narrowcast.tensors.packing import Packing
from narrowcast.tensors.scaling import spread
from narrowcast.tensors.schemes import Scheme

FLOATS = ("bf16", "fp16", "fp32")
WORST = 3  # channels that are kept of a matrix
OUTLIERS = 16  # columns that are kept of a matrix
OUTLIER = 8.0  # times the median amax: normal columns, even of 10^5 rows, stay below 2
SUSPECT, FAR = (
    7.5,
    10.0,
)  # dB below what the scheme can do: a reason is looked for; an error without one (see parent)
LOOKED_INTO = 32  # of each role and scheme: more of a kind have the same reason
FAINT = 2.0**-10  # of the mean signal of a channel: less than that is not worth a word
F64 = NDArray[np.float64]
U32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Channel:
    """One row or column: its SQNR, its shares of the matrix's noise and signal, its amax over the median one."""

    index: int
    sqnr: float
    noise: float
    signal: float
    ratio: float


@dataclass(slots=True)
class Pair:
    """A tensor and its original. ``unlike`` says why they cannot be compared; then nothing else is filled.

    Of a quantized matrix ``clipping``, ``underflow`` and ``beyond`` are energies, parts of ``errors.noise``; ``broken``
    counts elements that are not finite on one side, which have no energy. ``lost`` counts innermost tiles (rows, where
    a scale serves the matrix) that became zero, ``first_lost`` are the coordinates of one. ``amax`` is the
    original's, ``kept`` what schemes keep of a sample of it, ``sampled`` dB of the file on the same rows. Of a plain
    tensor ``errors`` are those of its values, ``differing`` counts them, and ``cast`` says that they are the
    parent's, rounded to the dtype.
    """

    child: Held
    original: Held
    unlike: str = ""
    errors: Errors = field(default_factory=Errors)
    clipping: float = 0.0
    underflow: float = 0.0
    beyond: float = 0.0
    broken: int = 0
    lost: int = 0
    first_lost: tuple[int, int] | None = None
    amax: float = 0.0
    kept: Kept | None = None
    sampled: float = nan
    rows: tuple[Channel, ...] = ()
    columns: tuple[Channel, ...] = ()
    outliers: tuple[Channel, ...] = ()
    median: tuple[float, float] = (inf, inf)
    differing: int = 0
    cast: bool = False
    diagnosis: Diagnosis | None = None
    smoothed: Smoothing | None = None

    @property
    def name(self) -> str:
        return self.child.name

    @property
    def coded(self) -> Coded | None:
        """What the child holds, if it is quantized."""
        return self.child.coded

    @property
    def scheme(self) -> str:
        return self.child.scheme

    @property
    def sqnr(self) -> float:
        """dB of the whole matrix; infinite without noise, minus infinity where nothing can be compared."""
        return -inf if self.unlike else self.errors.sqnr

    @property
    def expected(self) -> float:
        """dB that the stored scheme keeps of this data; NaN where that is not known."""
        return self.kept.scheme if self.kept is not None else nan

    @property
    def gap(self) -> float:
        """dB that the file keeps less than its scheme can; NaN where that is not known."""
        expected = self.expected
        if (
            expected == inf and self.sampled < inf
        ):  # the parent lies on the grid, and the file does not hold it
            expected = typical(self.child.element)
        return expected - self.sampled if isfinite(expected) else nan

    @property
    def tiles(self) -> int:
        """How many tiles ``lost`` is counted of."""
        assert self.coded is not None
        (rows, columns), (n, k) = loss_tile(self.coded.how.scheme), self.coded.shape
        return -(-n // rows) * -(-k // (columns or k))

    def share(self, energy: float) -> float:
        """A part of the noise, as a share."""
        return energy / self.errors.noise if self.errors.noise else 0.0

    @property
    def rounding(self) -> float:
        """The energy of what was only rounded."""
        return max(self.errors.noise - self.clipping - self.underflow - self.beyond, 0.0)


def in_words(diagnosis: Diagnosis) -> str:
    """What a diagnosis says, with the two sides by name."""
    said = re.sub(r"\bB\b", "this file", re.sub(r"\bA\b", "the parent", diagnosis.said))
    return said or diagnosis.name


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor is in."""
    match = re.search(r"\.(\d+)\.", name)
    return int(match[1]) if match is not None else None


def look_at_pair(child: Held, original: Held) -> Pair:
    """Read both once."""
    pair = Pair(child, original)
    if child.source.shape != original.source.shape or child.shape != original.shape:
        pair.unlike = f"{list(child.shape)} where the parent has {list(original.shape)}"
    elif child.coded is None:
        _plain(pair)
    elif original.element.name in (*FLOATS, "fp64") or original.coded is not None:
        _quantized(pair, child.coded)
    else:
        pair.unlike = f"quantized floats where the parent has {original.scheme}"
    return pair


def _plain(pair: Pair) -> None:
    """Values of a tensor that is not quantized here; bits where both sides have one dtype."""
    child, original = pair.child, pair.original
    rows, columns = child.source.shape
    alike, cast, errors = True, child.element.name in FLOATS and child.dtype != original.dtype, Errors()
    size = max(child.source.chunk_bytes, original.source.chunk_bytes)
    for i, j in chunks(rows if columns else 0, 4 * columns, original.row_multiple, size):
        if child.dtype == original.dtype:
            a, b = original.stored(i, j), child.stored(i, j)
            if np.array_equal(_bits(a), _bits(b)):
                errors += Errors(a.size)
                continue
        a, b = original.values(i, j), child.values(i, j)
        tally = differences(a, b, i)
        errors, alike = errors + tally.errors, False
        pair.differing += tally.differing
        cast = cast and np.array_equal(narrow(a.astype(np.float32), child.element), child.stored(i, j))
    pair.errors, pair.cast = errors, cast and not alike


def _bits(stored: NDArray[Any]) -> NDArray[Any]:
    """Elements as integers, so that NaN equals NaN and 0 is not -0."""
    return stored.view(f"u{stored.itemsize}") if stored.itemsize in (1, 2, 4, 8) else stored.view(np.uint8)


def _quantized(pair: Pair, coded: Coded) -> None:
    sums = measure(pair.child, coded, pair.original)
    pair.errors, pair.broken = sums.errors, int(sums.counts[3])
    pair.clipping, pair.underflow = sums.energy(CLIPPED), sums.energy(UNDERFLOWED)
    pair.beyond, pair.lost = sums.energy(BEYOND), int(sums.lost[0])
    pair.first_lost = (int(sums.lost[1]), int(sums.lost[2])) if pair.lost else None
    rows, columns = peaks(sums.row_peaks), peaks(sums.column_peaks)
    pair.amax = float(rows.max(initial=0.0))
    with np.errstate(all="ignore"):
        pair.rows, one = _worst(sums.rows[SIGNAL], sums.rows[NOISE], rows)
        pair.columns, other = _worst(sums.columns[0], sums.columns[1], columns)
        pair.outliers = _outliers(sums.columns[0], sums.columns[1], columns)
        pair.median = one, other
        pair.kept = keep(
            pair.original, coded, pair.child.columns(), pair.amax, [c.index for c in pair.outliers]
        )
    if pair.kept is not None:
        signal, noise = (
            sum(float(sums.rows[which, i:j].sum()) for i, j in pair.kept.ranges) for which in (SIGNAL, NOISE)
        )
        pair.sampled = decibels(signal, noise)


def decibels(signal: float, noise: float) -> float:
    if not noise:
        return inf
    return 10 * log10(signal / noise) if signal else -inf


def peaks(bits: U32) -> NDArray[np.float32]:
    """Magnitudes of patterns, those that are not finite as 0."""
    found = bits.view(np.float32)
    return np.where(np.isfinite(found), found, np.float32(0))


def measure(child: Held, coded: Coded, original: Held) -> Sums:
    """The sums of a matrix, columns in the model's order."""
    (n, k), source, how = coded.shape, child.checkpoint, coded.how
    sums, outer = Sums.zeros(n, k), coded.outer(source)
    order, factors = child.columns()
    plain = original.dtype is not None and original.dtype.format in FLOATS
    fmt = formats[str(original.dtype.format)] if plain and original.dtype is not None else FP32
    multiple = lcm(child.row_multiple, original.row_multiple)
    across = 8 if any(part.across for part in how.parts) else 1
    size = max(across * CHUNK_BYTES, original.source.chunk_bytes)
    for i, j in chunks(n if k else 0, k * (original.carrier.itemsize if plain else 4), multiple, size):
        x: NDArray[Any] = original.stored(i, j) if plain else original.values(i, j).astype(np.float32)
        x = x if order is None else x[:, order]
        rows, scheme, factor = folded(coded.rows(source, i, j), how.scheme, outer)
        offsets = how.offsets(source, coded.place, coded.shape, i, j)
        if factors is None and offsets is None:
            choose_pair(scheme, fmt, how.packing)(
                np.ascontiguousarray(x), fmt, scheme, how.packing, rows, factor, i, sums
            )
        else:
            wide = x if fmt is FP32 else original.values(i, j)[:, order if order is not None else slice(None)]
            _moved(wide.astype(np.float32), scheme, how.packing, rows, factor, offsets, factors, i, sums)
    if order is None:
        return sums
    for array in (sums.columns, sums.column_peaks):
        array[..., order] = array.copy()
    return sums


def _moved(
    x: NDArray[np.float32], scheme: Scheme, packing: Packing, rows: Rows, outer: float | None,
    offsets: NDArray[Any] | None, factors: NDArray[Any] | None, start: int, sums: Sums,
) -> None:  # fmt: skip
    """Rows whose decoded values are moved by offsets and multiplied by factors of columns: kinds of errors are told
    apart where codes are made, on the original without both."""
    q = qtensor(rows, scheme, packing, x.shape[1], outer)
    with np.errstate(all="ignore"):
        codes = q.dequantize()
        moves = spread(offsets, scheme.inner.tile, x.shape) if offsets is not None else np.float32(0)
        scales = factors if factors is not None else np.float32(1)
        kinds = classify(x / scales - moves, q, codes)
        add(x, ((codes + moves) * scales).astype(np.float32), kinds, loss_tile(scheme), start, sums)


def _worst(signal: F64, noise: F64, amax: NDArray[np.float32]) -> tuple[tuple[Channel, ...], float]:
    """The channels of least SQNR among those that carry something, worst first, and the median SQNR of those."""
    carries = np.flatnonzero(signal > FAINT * signal.mean()) if signal.size else np.zeros(0, np.int64)
    if not carries.size:
        return (), inf
    ratios = noise[carries] / signal[carries]
    order = carries[np.argsort(-ratios, kind="stable")[:WORST]]
    middle = float(np.median(ratios))
    return _channels(order, signal, noise, amax), -10 * log10(middle) if middle > 0 else inf


def _outliers(signal: F64, noise: F64, amax: NDArray[np.float32]) -> tuple[Channel, ...]:
    """The columns whose amax is far above the median one, largest first."""
    middle = float(np.median(amax)) if amax.size else 0.0
    found = np.flatnonzero(amax > OUTLIER * middle) if middle else np.zeros(0, np.int64)
    return _channels(found[np.argsort(-amax[found], kind="stable")[:OUTLIERS]], signal, noise, amax)


def _channels(which: NDArray[Any], signal: F64, noise: F64, amax: NDArray[np.float32]) -> tuple[Channel, ...]:
    all_signal, all_noise = float(signal.sum()) or 1.0, float(noise.sum()) or 1.0
    middle = float(np.median(amax)) or 1.0
    return tuple(
        Channel(
            int(i), decibels(float(signal[i]), float(noise[i])), float(noise[i]) / all_noise,
            float(signal[i]) / all_signal, float(amax[i]) / middle,
        )
        for i in which
    )  # fmt: skip


def explain(subject: Subject, pool: Workers) -> None:
    """Look for the mistake behind what is far from the parent: in the first ones of each role and scheme, and in all
    of them where these were smoothed, since then each has its own factors."""
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in subject.pairs.values():
        if suspicious(pair):
            groups.setdefault((pair.child.role, pair.scheme), []).append(pair)
    _look_into([pair for group in groups.values() for pair in group[:LOOKED_INTO]], subject, pool)
    rest = [
        pair for group in groups.values() if any(one.smoothed for one in group[:LOOKED_INTO])
        for pair in group[LOOKED_INTO:]
    ]  # fmt: skip
    _look_into(rest, subject, pool)
    for group in groups.values():
        for pair in group:
            _rows_alone(pair, subject)


def _rows_alone(pair: Pair, subject: Subject) -> None:
    """Factors of rows are smoothing only where the columns after them have factors too; else scales of rows are wrong,
    such as those of another matrix or in another order."""
    found = pair.smoothed
    if found is None or not found.of_rows:
        return
    after = subject.pairs.get(matrix_after(pair.name) or "")
    if after is None or after.smoothed is None or after.smoothed.of_rows:
        pair.smoothed = None
        pair.diagnosis = None if pair.lost else Diagnosis(
            "rows scaled", "B's rows each have a factor of their own, and nothing takes them back",
            "compare its scales with the parent's row amax: they are another matrix's, in another order, or a fill; "
            "else quantize it again", found.before, found.after,
        )  # fmt: skip


def _look_into(pairs: Sequence[Pair], subject: Subject, pool: Workers) -> None:
    def work(pair: Pair) -> tuple[Diagnosis | None, Smoothing | None]:
        case = Case(pair.original, pair.child, subject.originals.get, subject.held.get)
        if pair.child.source.shape[0] == 1 or isinstance(pair.child.source, Constant):
            return None, None
        diagnosis = diagnose(case)
        plain = pair.unlike or (diagnosis is not None and diagnosis.name != "columns scaled")
        return diagnosis, None if plain else smoothing(case.a.values, case.b.values)

    with pool.map(work, pairs) as results:
        for pair, (diagnosis, smoothed) in zip(pairs, results, strict=True):
            pair.diagnosis, pair.smoothed = diagnosis, smoothed


def suspicious(pair: Pair) -> bool:
    """Whether the distance from the parent asks for a reason."""
    if pair.unlike or pair.coded is None:
        return bool(pair.unlike) or (pair.differing > 0 and not pair.cast)
    return pair.gap >= SUSPECT or (pair.sqnr < ENOUGH and pair.errors.signal > 0)
