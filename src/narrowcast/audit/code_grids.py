"""Rules about which codes occur, and where zero is: data that lies on a coarser grid than its format has.

    healthy     every code between the smallest and the largest occurs, odd ones as often as even ones
    coarse      all codes are multiples of g, or the low bits of every mantissa are zero: P ≤ 2^-n for n codes

What was quantized twice keeps the coarser grid, if both scales differ by a power of two; somebody who rounds before a
cast to FP8 leaves integers only. The loss is in the file already: only the parent brings it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from narrowcast.audit.findings import Finding
from narrowcast.audit.matrix import Matrix, magnitudes
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import E4M3FN, E8M0, Format, Kind

PARENT = "quantize from the original weights, not from a quantized or rounded copy"
ENOUGH = 64  # codes, each of which has an even chance or better to break a pattern: P(chance) ≤ 2^-64
ZEROS = 0.9  # share of zeros that neither three bits (half) nor 2:4 sparsity on top (three quarters) explain
ENDS = 0.75  # share in the outer half: evenly spread codes have a half, weights a quarter and less
SEEN = 1024  # elements that a statement about which codes occur needs
Mask = NDArray[np.bool_]


@rule("NC330", "warning", scope="matrix", reads="codes")
def few_codes(matrix: Matrix) -> Iterator[Finding]:
    """Most codes of the format are never used.

    What: no more values occur than a format of half as many bits has, such as 16 of INT8's 256.
    Why: the file pays for bits that carry nothing. Either the data had been quantized to the narrower format before, or
    scales are so large that only the bottom of the range is used, and precision was lost for nothing.
    Fix: for the first, store the narrower format; for the second, quantize again from the parent.
    False alarm: weights that take a few values by design, such as ternary ones.
    """
    assert matrix.counts is not None
    bits, total = matrix.element.bits, int(matrix.counts.sum())
    if bits < 4 or total < SEEN:
        return
    used = np.flatnonzero(matrix.counts)
    if len(used) > 2 ** (bits // 2) + 1:  # one more: zeros of both signs
        return
    values = np.unique(matrix.values[used])
    if matrix.zero is None and matrix.share(matrix.values == 0) > ZEROS:
        return  # so few are left that nothing follows from it
    if 1 < len(values) <= 2 ** (bits // 2):
        yield Finding(
            f"{len(values)} of {matrix.element.finite_values} values occur, from {values[0]:g} to {values[-1]:g}",
            tensor=matrix.tensor("codes"), got=f"{len(values)} values in {total} codes", remedy=PARENT,
            wanted=f"more than {2 ** (bits // 2)}", facts={"values": len(values)},
        )  # fmt: skip


@rule("NC340", "warning", scope="matrix", reads="codes")
def coarse_grid(matrix: Matrix) -> Iterator[Finding]:
    """All codes lie on a coarser grid than the format has.

    What: integers that are all multiples of 2 or more, or floats whose lowest mantissa bits are all zero: E4M3 codes
    that are E5M2 or E2M1 numbers, E2M1 codes that are powers of two.
    Why: the data went through a narrower format first, so its error is that format's and not the one of the label.
    Fix: quantize from the original weights.
    False alarm: a lossless conversion of a narrower format, whose precision was never there to lose.
    """
    assert matrix.counts is not None
    if matrix.element.kind is Kind.TABLE or int(matrix.counts.sum()) < ENOUGH:
        return
    found = _divisor(matrix) if matrix.element.kind is Kind.INT else _idle_bits(matrix)
    if found is not None:
        yield Finding(
            found,
            tensor=matrix.tensor("codes"),
            remedy=PARENT,
            wanted=f"every value of {matrix.element.name}",
        )


def _divisor(matrix: Matrix) -> str | None:
    """What is said of integers that are all multiples; those of few values are another rule's."""
    assert matrix.counts is not None
    used = np.flatnonzero(matrix.counts)
    integers = (matrix.values[used] * 2.0**matrix.element.bias).astype(np.int64)
    step = (
        int(np.gcd.reduce(integers - integers[0]))
        if matrix.zero is not None
        else int(np.gcd.reduce(integers))
    )
    if step < 2 or len(used) < 3 or int(matrix.counts[used[integers != 0]].sum()) < ENOUGH:
        return None
    return f"every code is a multiple of {step}, {len(used)} of {2**matrix.element.bits} values occur"


def _idle_bits(matrix: Matrix) -> str | None:
    """What is said of floats whose lowest mantissa bits are all zero, as far as normal numbers show it."""
    assert matrix.counts is not None
    normal, low = _normals(matrix.element)
    counts = np.where(normal, matrix.counts, 0)
    if int(counts.sum()) < ENOUGH or int((counts > 0).sum()) < 3:
        return None
    idle = 0
    while idle < matrix.element.mantissa_bits and not counts[(low & ((2 << idle) - 1)) != 0].any():
        idle += 1
    if not idle:
        return None
    kept = matrix.element.mantissa_bits - idle
    return f"the lowest {idle} of {matrix.element.mantissa_bits} mantissa bits are never set" + (
        "" if kept else ": powers of two only"
    )


@cache
def _normals(element: Format) -> tuple[Mask, NDArray[np.int64]]:
    """Which codes are normal numbers, and the mantissa of every code."""
    values, codes = np.abs(decode_table(element)), np.arange(2**element.bits)
    normal = np.isfinite(values) & (values >= (element.smallest_normal or 0))
    return normal, codes & ((1 << element.mantissa_bits) - 1)


@rule("NC341", "warning", scope="matrix", reads="codes")
def integers_only(matrix: Matrix) -> Iterator[Finding]:
    """Codes of a float format decode to integers only.

    What: no code is a fraction, though many lie where the format has more fractions than integers.
    Why: somebody divided by the scale and called round() before the cast. What is below half a unit became zero, and
    the small weights, for which a float format is chosen, lost their precision.
    Fix: quantize again from the original weights with a cast alone.
    False alarm: weights that were integers under one scale before, such as a lossless conversion from INT4.
    """
    assert matrix.counts is not None
    if matrix.element.kind is not Kind.FLOAT:
        return
    fractions, doubtful = _fractions(matrix.element)
    if not matrix.counts[fractions].any() and int(matrix.counts[doubtful].sum()) >= ENOUGH:
        doubted = int(matrix.counts[doubtful].sum())
        yield Finding(
            f"no code is a fraction, and {doubted} are integers among more fractions", tensor=matrix.tensor("codes"),
            got="integers only", wanted=f"fractions as well, such as {2.0**-matrix.element.mantissa_bits:g}",
            remedy=PARENT, count=doubted,
        )  # fmt: skip


@cache
def _fractions(element: Format) -> tuple[Mask, Mask]:
    """Codes that are fractions, and integers in binades that hold as many fractions or more: from 1 to 2^mantissa."""
    values = np.abs(decode_table(element))
    finite = np.isfinite(values)
    whole = values == np.floor(np.where(finite, values, 0))
    return finite & ~whole, finite & whole & (values >= 1) & (values < 2**element.mantissa_bits)


@rule("NC350", "error")
def zero_point_version(subject: Subject) -> Iterator[Finding]:
    """Zero points are counted in the other version of GPTQ than the config says.

    What: version 1 stores zero points less one, version 2 as they are. Symmetric weights of 4 bits have 0x77777777 in
    version 1 and 0x88888888 in version 2, and these have the other.
    Why: an engine that believes the label shifts every weight by one step, and the model speaks fluent nonsense.
    Fix: correct checkpoint_format in the config, gptq or gptq_v2, and compare with the parent.
    False alarm: asymmetric weights whose zero points are all equal by accident.
    """
    for refusal in subject.found.layer_refusals:
        error = refusal.error
        if refusal.module is not None and "zero points look like v" in error.problem:
            version = "v1" if "like v1" in error.problem else "v2"
            yield Finding(
                f"its zero points look like {version}", tensor=f"{refusal.module}.qzeros", got=_text(error.got),
                wanted=_text(error.wanted), remedy=error.remedy,
            )  # fmt: skip


def _text(facet: object) -> str | None:
    return None if facet is None else str(facet)


@rule("NC351", "warning", scope="matrix", reads="codes")
def zero_point_beside(matrix: Matrix) -> Iterator[Finding]:
    """Zero points are a step or more beside the middle of the codes.

    What: weights have a mean near zero, so codes have a mean near their zero point; here the two are one step apart all
    over the matrix, or more than that where all zero points are one number.
    Why: a step is about a third of a deviation at 4 bits. One step: usually the version of the zero points was mistaken
    (GPTQ's first version stores them less one). More: they are a fill that nobody computed. Every weight is shifted.
    Fix: compare with the parent, `narrowcast compare`; then correct the version in the config, or convert again.
    False alarm: a layer whose weights have a mean far from zero.
    """
    assert matrix.counts is not None
    total = int(matrix.counts.sum())
    if matrix.zero is None or matrix.element.bits < 4 or total < SEEN or matrix.scheme.zero is None:
        return
    middle = float(decode_table(matrix.scheme.zero)[matrix.zero].mean(dtype=np.float64))
    mean = float((matrix.values.astype(np.float64) * matrix.counts).sum() / total)
    filled = matrix.zero.size > 1 and bool((matrix.zero == matrix.zero.flat[0]).all())
    beside = abs(mean - middle) > 0.75 if filled else 0.75 < abs(mean - middle) < 1.25
    if beside and not _constant(matrix):
        yield Finding(
            f"the codes' mean is {mean - middle:+.2f} steps from the mean zero point", tensor=matrix.tensor("zero"),
            got=f"codes around {mean:.2f}, zero points around {middle:.2f}", wanted="less than half a step",
            remedy="compare with the parent; if all are shifted, the version of the zero points is the other"
            if abs(mean - middle) < 1.25
            else "quantize the layer again from the parent",
            facts={"mean": mean, "zero": middle},
        )  # fmt: skip


@rule("NC352", "error", scope="matrix", reads="codes")
def codes_at_both_ends(matrix: Matrix) -> Iterator[Finding]:
    """Most codes lie at the two ends of the range, and few near zero.

    What: of signed integers without zero points, more than three quarters lie in the outer half of the range.
    Why: weights are dense near zero and thin out, whatever their scale. Codes that were stored with an offset of half
    the range (uint4b8, uint8 - 128) and are read as two's complement, or the other way round, turn this inside out:
    small weights become the largest ones.
    Fix: flip the highest bit of every code, or correct the format; then check with `narrowcast compare`.
    False alarm: weights of two values; those of fewer than eight are left out.
    """
    assert matrix.counts is not None
    total, used = int(matrix.counts.sum()), int((matrix.counts > 0).sum())
    if matrix.element.kind is not Kind.INT or matrix.zero is not None or matrix.element.bits < 4:
        return
    share = matrix.share(np.abs(matrix.values) >= (matrix.element.max + 1) / 2)
    if total >= SEEN and used >= 8 and share > ENDS:
        yield Finding(
            f"{share:.0%} of the codes are in the outer half of the range", tensor=matrix.tensor("codes"),
            got=f"{share:.0%}", wanted="less than half", count=round(share * total), facts={"share": share},
            remedy="flip the highest bit of every code: they were stored with an offset; else quantize again",
        )  # fmt: skip


def _constant(matrix: Matrix) -> bool:
    assert matrix.counts is not None
    return int((matrix.counts > 0).sum()) < 4


@rule("NC360", "warning", scope="matrix", reads="codes")
def tiles_below_the_top(matrix: Matrix) -> Iterator[Finding]:
    """Most tiles never use the upper end of their range.

    What: a scale maps its tile's largest weight to the top code, or where scales are powers of two to the top two
    binades. In two thirds of the tiles nothing comes near it.
    Why: these scales were not made for these tiles: codes of a whole row or tensor under scales by block, codes that
    are transposed against their scales, or scales from amax over the wrong maximum. If codes and scales do not belong
    together, weights are wrong by the ratio; if they do, precision was given away.
    Fix: compare with the parent, `narrowcast compare`; then quantize again.
    False alarm: scales learned or searched upwards, which few methods do.
    """
    if matrix.peaks is None or matrix.zero is not None or matrix.element.kind is Kind.TABLE:
        return
    table, peaks = magnitudes(matrix.element), matrix.peaks
    filled = int(matrix.peak_counts[1:].sum())
    if filled < 32:
        return
    top = float(table.max()) if matrix.element.kind is not Kind.INT else matrix.element.max
    near = top / 4 if matrix.scale_format is E8M0 else 0.98 * top
    high = int(matrix.peak_counts[np.searchsorted(table, near) :].sum())
    if 3 * high >= filled:
        return
    sure = _normal_scales(matrix) & (peaks > 0)
    if matrix.scale_format is not E8M0 and bool((np.frexp(matrix.scale_values[sure])[0] == 0.5).all()):
        near = top / 4  # powers of two in a wider dtype
    filled, high = int(sure.sum()), int((peaks[sure] >= np.searchsorted(table, near)).sum())
    if filled >= 32 and 3 * high < filled:
        middle = float(np.median(table[peaks[sure]]))
        yield Finding(
            f"{filled - high} of {filled} tiles stay below {near:g}, the median maximum is {middle:g} of {top:g}",
            tensor=matrix.tensor("scales"), got=f"{high / filled:.0%} of tiles reach the top",
            wanted="nearly all", remedy="compare with the parent, then quantize again", count=filled - high,
            facts={"share": high / filled, "median": middle},
        )  # fmt: skip


def _normal_scales(matrix: Matrix) -> Mask:
    """Scales that are stored with all their bits: a subnormal one may be off by half."""
    smallest = E4M3FN.smallest_normal if matrix.scale_format is E4M3FN else 0.0
    return (
        np.isfinite(matrix.scale_values)
        & (matrix.scale_values > 0)
        & (matrix.scale_values >= (smallest or 0))
    )
