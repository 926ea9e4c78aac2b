"""Rules about codes: NaN, saturation, tensors of one value. What needs arithmetic on a histogram stands in
``code_grids``, what is about unquantized tensors in ``code_floats``.

A survey leaves two things of a matrix: how often each code occurs, and the largest code of each tile. Both follow from
how quantizers work, whatever the weights are:

    each tile's amax is mapped to the top         so a top code in each tile, and few more
    weights thin out towards the top              so the top interval holds no more than its neighbour, by width

Coordinates are looked for only after a rule has fired, in a second reading of that matrix.

Left out: the order of nibbles, which no histogram shows; beside a parent it is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.audit import code_floats, code_grids  # noqa: F401 - their rules are here too
from narrowcast.audit.code_grids import ZEROS
from narrowcast.audit.findings import Finding
from narrowcast.audit.matrix import Matrix
from narrowcast.audit.rules import rule
from narrowcast.jobs.stream import CHUNK_BYTES, chunks
from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import E8M0, Format, Kind

AGAIN = "quantize the layer again from the parent: narrowcast quantize"
MANY = 64  # elements below which a single value is no wonder


@rule("NC301", "error", scope="matrix", reads="codes")
def nonfinite_code(matrix: Matrix) -> Iterator[Finding]:
    """A code is NaN or infinite.

    What: weights hold codes that are no numbers: E4M3 bytes 0x7F and 0xFF, E5M2 0x7C to 0x7F, 0x80 in the FNUZ formats.
    Why: one of them turns the whole output row into NaN, and the next layer spreads it over every token.
    Fix: quantize the layer again with a saturating cast, from a parent without NaN. A FNUZ file with many 0x80 was cast
    as E4M3FN, where that byte is minus zero: cast the bytes to 0x00, or correct the format's name.
    False alarm: none known.
    """
    assert matrix.counts is not None
    bad = ~np.isfinite(matrix.values)
    count = int(matrix.counts[bad].sum())
    if count:
        at, code = _first(matrix, bad)
        yield Finding(
            f"{count} codes are NaN or infinite", tensor=matrix.tensor("codes"), at=at, got=f"0x{code:02X}",
            wanted="finite codes", remedy=AGAIN, count=count,
        )  # fmt: skip


def _first(matrix: Matrix, mask: NDArray[np.bool_]) -> tuple[tuple[int, int] | None, int]:
    """Coordinates of the first element whose code is in a mask [2^bits], and the code."""
    coded, k = matrix.coded, matrix.shape[1]
    for i, j in chunks(matrix.shape[0], k, coded.how.row_multiple, CHUNK_BYTES):
        codes = coded.codes(matrix.held.checkpoint, i, j)
        found = mask[codes]
        if found.any():
            row, column = divmod(int(found.argmax()), k)
            return (i + row, column), int(codes[row, column])
    return None, 0


@rule("NC310", "warning", scope="matrix", reads="codes")
def saturated_codes(matrix: Matrix) -> Iterator[Finding]:
    """Many more codes are at the end of the range than the scheme explains.

    What: each tile has its largest element at the top by construction, and weights thin out towards the top, so the
    last interval should hold one code for each tile and, by width, what its neighbour holds. Here it holds more than
    twice that.
    Why: scales are too small and the largest weights were clipped. These are the weights that matter most.
    Fix: quantize the layer again from the parent with scales from amax, or look at the step that set the scales.
    False alarm: weights that were clamped in training, or that take only a few values, such as ternary ones.
    """
    if matrix.element.kind is Kind.TABLE:
        return
    found, expected = _saturation(matrix, matrix.scale_format is E8M0)
    if _beyond(found, expected) and matrix.scale_format is not E8M0 and _powers(matrix):
        found, expected = _saturation(matrix, True)  # powers of two in a wider dtype
    assert matrix.counts is not None
    total = int(matrix.counts.sum())
    if _beyond(found, expected) and found > total / 1000:  # enough to matter
        yield Finding(
            f"{found / total:.1%} of the codes are at the end of the range, {expected / total:.2%} are explained",
            tensor=matrix.tensor("codes"), got=f"{found} of {total}", wanted=f"about {expected:.0f}", remedy=AGAIN,
            count=found, facts={"share": found / total, "explained": expected / total},
        )  # fmt: skip


def _saturation(matrix: Matrix, powers: bool) -> tuple[int, float]:
    """Codes at the end of the range, and how many the scheme explains."""
    assert matrix.counts is not None
    assert matrix.peaks is not None
    shifted = matrix.zero is not None or matrix.coded.how.part("offset") is not None
    ends, beside, ratio = _ends(matrix.element, shifted, powers)
    expected = (2 if shifted else 1) * matrix.peaks.size + ratio * int(matrix.counts[beside].sum())
    return int(matrix.counts[ends].sum()), expected


def _beyond(found: int, expected: float) -> bool:
    """Twice the expectation, and by five deviations of a count."""
    return found > 2 * expected + 5 * sqrt(expected) + 10


def _powers(matrix: Matrix) -> bool:
    usable = matrix.scale_values[np.isfinite(matrix.scale_values) & (matrix.scale_values > 0)]
    return bool((np.frexp(usable)[0] == 0.5).all())


@cache
def _ends(element: Format, shifted: bool, powers: bool) -> tuple[NDArray[np.bool_], NDArray[np.bool_], float]:
    """Codes at the end of the range, their neighbours, and the width of the ends' intervals over the neighbours'.

    A scale that is a power of two maps amax to anything below the next binade, all of which is cut to the top.
    """
    values = decode_table(element)
    if shifted:
        return _among(values, element.min, element.max), _among(values, element.min + 1, element.max - 1), 0.5
    sizes = np.where(np.isfinite(values), np.abs(values), 0)
    ladder = np.unique(sizes[sizes <= element.max])
    if len(ladder) < 3:  # of two bits, where nothing lies between zero and the top
        return sizes < 0, sizes < 0, 0.0
    top, second, third = (float(v) for v in ladder[:-4:-1])
    whole = element.kind is Kind.INT
    until = 2.0 ** (element.emax + 1) if powers else top + (top - second) / 2 if whole else top
    edge = (top + second) / 2
    return sizes >= top, sizes == second, (until - edge) / (edge - (second + third) / 2)


def _among(values: NDArray[Any], *wanted: float) -> NDArray[np.bool_]:
    return np.isin(values, np.array(wanted, np.float32))


@rule("NC320", "warning", scope="matrix", reads="codes")
def zero_codes(matrix: Matrix) -> Iterator[Finding]:
    """Every code of a quantized matrix is zero.

    What: the whole matrix decodes to zero, whatever its scales say.
    Why: the layer adds nothing. The weights were lost on the way: an uninitialised buffer, a scale far too large, an
    outlier in the parent.
    Fix: look at the parent's tensor with `narrowcast inspect`, and quantize the layer again.
    False alarm: a layer that is zero in the parent too, such as one that was initialised so and never trained.
    """
    assert matrix.counts is not None
    total = int(matrix.counts.sum())
    if total and matrix.zero is None and int(matrix.counts[matrix.values == 0].sum()) == total:
        yield Finding(
            "every code is zero",
            tensor=matrix.tensor("codes"),
            got=f"{total} zeros",
            remedy=AGAIN,
            count=total,
        )


@rule("NC321", "warning", scope="matrix", reads="codes")
def constant_codes(matrix: Matrix) -> Iterator[Finding]:
    """Every code of a quantized matrix is the same.

    What: one code, which is not zero, fills the whole matrix.
    Why: no trained matrix looks like this. It is a placeholder, or a buffer that was filled and never written.
    Fix: quantize the layer again from the parent.
    False alarm: a test model with constant weights.
    """
    assert matrix.counts is not None
    used = np.flatnonzero(matrix.counts)
    if len(used) == 1 and matrix.counts[used[0]] >= MANY:
        code = int(used[0])
        if matrix.values[code] != 0 or matrix.zero is not None:
            yield Finding(
                f"every code is 0x{code:02X}", tensor=matrix.tensor("codes"), got=f"{matrix.values[code]:g} everywhere",
                remedy=AGAIN, count=int(matrix.counts[code]),
            )  # fmt: skip


@rule("NC324", "warning", scope="matrix", reads="codes")
def mostly_zero_codes(matrix: Matrix) -> Iterator[Finding]:
    """Nearly every code of a quantized matrix is zero.

    What: more than nine in ten codes are zero, though not all. A format of three bits or more gives at most every
    second weight a zero.
    Why: a few huge weights set the scales, and everything else fell below half a step and is lost.
    Fix: look for an outlier in the parent, `narrowcast inspect` shows amax; use finer tiles, or leave the layer wide.
    False alarm: a pruned model, whose parent is as sparse.
    """
    assert matrix.counts is not None
    if matrix.zero is not None or matrix.element.bits < 3 or matrix.element.kind is Kind.TABLE:
        return
    total = int(matrix.counts.sum())
    zeros = int(matrix.counts[matrix.values == 0].sum())
    if total >= MANY and ZEROS < zeros / total < 1:
        yield Finding(
            f"{zeros} of {total} codes are zero ({zeros / total:.2%})", tensor=matrix.tensor("codes"),
            got=f"{total - zeros} weights that are not zero", wanted="at most every second zero",
            remedy="look for an outlier in the parent; use finer tiles, or leave the layer wide", count=zeros,
            facts={"share": zeros / total},
        )  # fmt: skip
