"""Rules about scales: what a scale itself can have wrong, matrix by matrix.

    0x7F, 0/0, sign bits, underflow       found on counts of stored scales; grids are read only to say where

Rules about scales that are absent or of another dtype or shape are in ``scale_pieces``, about their size in
``scale_sizes``, about fused siblings in ``scale_siblings``, about inputs in ``scale_inputs``.

A tile is in use where one of its codes is not zero. A scale over codes that are all zero is free to be anything
finite, and libraries put 0, 1, an epsilon or 2^-127 there; so whatever is said of small scales is said of tiles in use.
With a zero point, or without the codes, use is unknown, and only a share above LOST is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.audit import scale_fill, scale_inputs, scale_pieces, scale_siblings, scale_sizes
from narrowcast.audit.findings import Finding
from narrowcast.audit.matrix import Matrix, first
from narrowcast.audit.rules import rule
from narrowcast.numbers.formats import FP16, Kind
from narrowcast.tensors.schemes import integer

__all__ = ["scale_fill", "scale_inputs", "scale_pieces", "scale_siblings", "scale_sizes"]

AGAIN = "quantize the layer again from the parent"
# A share of dead tiles that no source explains: a tile is all zero only where its source is, or where it underflowed.
LOST = 0.1
PLAUSIBLE_BYTES = (64, 190)  # E8M0: from 2^-63 to 2^63; weights lie within 2^-20 and 2^10
_COARSE = 16  # fp16 units below which a rounded scale is wrong by more than 3 %, the error of E4M3 itself


def in_use(matrix: Matrix) -> NDArray[np.bool_] | None:
    """Tiles that have a code other than zero, a grid like ``scales``; None where that is not known."""
    return None if matrix.peaks is None or matrix.zero is not None else matrix.peaks > 0


@rule("NC110", "error", scope="matrix", reads="scales")
def nonfinite_scale(matrix: Matrix) -> Iterator[Finding]:
    """A scale is NaN or infinite.

    What: an innermost scale decodes to NaN or infinity: E4M3 bytes 0x7F and 0xFF, E8M0 byte 255, NaN in fp32.
    Why: every element under it becomes NaN, and the next matrix product spreads it over the whole row.
    Fix: quantize the layer again from the parent; the usual cause is 0/0 on an all-zero block.
    False alarm: none known.
    """
    if matrix.scale_counts is not None and not matrix.scale_counts[~np.isfinite(matrix.scale_table)].any():
        return
    bad = ~np.isfinite(matrix.scale_values)
    if bad.any():
        yield _of(matrix, bad, "scales that are not finite: {n}", "a finite positive scale")


@rule("NC111", "error", scope="matrix", reads="codes")
def zero_scale(matrix: Matrix) -> Iterator[Finding]:
    """A scale is zero over codes that are not.

    What: an innermost scale is zero, and codes under it are not. With zero points, where use is not known, more than a
    tenth of all scales are zero.
    Why: the tile decodes to zero, and engines that divide by the scale make NaN of it. Small scales become zero when
    they are stored in fp16 or E4M3.
    Fix: quantize the layer again from the parent, with scales in fp32 or bf16.
    False alarm: a pruned model whose zero points are not read here may have that many zero tiles.
    """
    counts = matrix.scale_counts
    if counts is not None and not counts[matrix.scale_table == 0].any():
        return
    zero = matrix.scale_values == 0
    used = in_use(matrix)
    if used is not None and (zero & used).any():
        yield _of(matrix, zero & used, "{n} scales are zero over codes that are not", "a positive scale")
    elif used is None and zero.size and float(zero.mean()) > LOST:
        yield _of(matrix, zero, "{n} scales are zero", "positive scales", "warning")


@rule("NC112", "error", scope="matrix", reads="scales")
def negative_scale(matrix: Matrix) -> Iterator[Finding]:
    """A scale is negative: its sign bit is set.

    What: a scale of float codes, or of codes with a zero point, is negative; among E4M3 bytes it is 0x80 and above.
    Why: engines take scales as magnitudes: some keep the sign and flip the tile, others drop it, and a cutoff such as
    max over scales takes another one.
    Fix: quantize the layer again from the parent; the usual cause is a scale from a signed minimum instead of amax, or
    bytes of another tensor.
    False alarm: symmetric integers are left out, since auto-round and GPTQ store negative scales for them on purpose.
    """
    if matrix.element.kind is not Kind.FLOAT and not (integer(matrix.scheme) and matrix.zero is not None):
        return
    counts = matrix.scale_counts
    if counts is not None and not counts[np.signbit(matrix.scale_table)].any():
        return
    with np.errstate(invalid="ignore"):
        values = matrix.scale_values
        wrong = np.signbit(values) & ~np.isnan(values)
    if wrong.any():
        yield _of(matrix, wrong, "{n} scales have the sign bit set", "a positive scale")


@rule("NC113", "warning", scope="matrix", reads="codes")
def subnormal_scale(matrix: Matrix) -> Iterator[Finding]:
    """A scale is subnormal in its dtype and has lost its precision.

    What: a scale in fp32 or bf16 is below 2^-126, or one in fp16 has fewer than 16 units of 2^-24 left, over codes that
    are not zero (with zero points: more than a tenth of all scales).
    Why: GPUs flush fp32 subnormals to zero; in fp16 the scale is off by more than 3 %, for a whole tile at once.
    Fix: quantize again with scales in bf16 or fp32; a source with weights near 1e-39 is worth a look itself.
    False alarm: layers that were never trained may have such weights, and nothing is lost with them.
    """
    fmt = matrix.scale_format
    if matrix.scale_counts is not None or fmt.smallest_normal is None:
        return  # E4M3 and E8M0 have rules of their own
    edge = _COARSE * 2.0**-24 if fmt is FP16 else fmt.smallest_normal
    values = matrix.scale_values
    small = (values > 0) & (values < edge)
    used = in_use(matrix)
    if used is not None:
        small &= used
    if small.any() and (used is not None or float(small.mean()) > LOST):
        yield _of(matrix, small, f"{{n}} scales are subnormal in {fmt.name}", f"{edge:.3g} or more")


@rule("NC114", "error", scope="matrix", reads="scales")
def value_cast_exponents(matrix: Matrix) -> Iterator[Finding]:
    """E8M0 bytes are no exponents: somebody cast numbers to bytes.

    What: most bytes of scales in use are below 64 or above 190, which is below 2^-63 or above 2^63.
    Why: a byte of E8M0 is an exponent with a bias of 127. A float scale that is cast to uint8 becomes 0, 1 or 2, and an
    exponent without its bias 248 or 250; readers take both for powers of two and make zeros or infinities.
    Fix: store 127 + log2(scale), or view the E8M0 tensor as bytes instead of converting it; then check with
    `narrowcast compare`.
    False alarm: under `--quick`, which reads no codes, a tensor that is zero throughout.
    """
    counts = matrix.scale_counts
    if counts is None or matrix.scale_format.name != "e8m0":
        return
    low, high = PLAUSIBLE_BYTES
    if not counts[:low].any() and not counts[high + 1 : 255].any():
        return
    used = in_use(matrix)
    bytes_ = matrix.scales if used is None else matrix.scales[used]
    known = bytes_[bytes_ != 255]  # NaN is another rule's
    odd = (known < low) | (known > high)
    if used is None and not odd.all():
        odd &= known > 1  # what libraries give to tiles of zeros
    if not known.size or float(odd.mean()) <= LOST:
        return
    taken = np.unique(known[odd])
    grid = ((matrix.scales < low) | (matrix.scales > high)) & (matrix.scales != 255)
    grid &= True if used is None else used
    yield _of(
        matrix, grid, f"{{n}} E8M0 bytes are no exponents: {taken[0]} to {taken[-1]}",
        "bytes near 127, which are 2^(byte - 127)",
        remedy="store 127 + log2(scale); view E8M0 as bytes, do not convert",
    )  # fmt: skip


@rule("NC115", "warning", scope="matrix", reads="codes")
def lost_blocks(matrix: Matrix) -> Iterator[Finding]:
    """Many blocks are all zero beside blocks that are not.

    What: more than a tenth of the blocks hold only zero codes, in rows and columns of blocks that are not all zero.
    Why: a block is scaled by its own amax, so a block of zeros comes from a source of zeros or from a scale that
    underflowed: one outlier lifted the outer scale, and everything else became zero.
    Fix: compare with the parent (`narrowcast compare`); look for an outlier or infinity in the source, and keep this
    layer wide or clip it.
    False alarm: weights that were pruned in blocks. Whole rows and columns of zeros are not counted.
    """
    if matrix.peaks is None or matrix.zero is not None or 0 in matrix.tile or matrix.peaks.size == 0:
        return
    dead = matrix.peaks == 0
    if np.count_nonzero(dead) <= LOST * dead.size:
        return
    rows, columns = ~dead.all(axis=1), ~dead.all(axis=0)
    inside = dead & rows[:, None] & columns[None, :]
    among = int(rows.sum()) * int(columns.sum())
    share = int(inside.sum()) / max(among, 1)
    if share > LOST:
        yield _of(
            matrix, inside, f"{share:.0%} of blocks are all zero beside others that are not",
            f"at most {LOST:.0%}", piece="codes", remedy="`narrowcast compare` with the parent shows what was lost",
        )  # fmt: skip


def _of(
    matrix: Matrix, bad: NDArray[np.bool_], said: str, wanted: str, severity: Any = None, *,
    piece: str = "scales", remedy: str = AGAIN,
) -> Finding:  # fmt: skip
    count, at = int(bad.sum()), first(bad)
    assert at is not None
    return Finding(
        said.format(n=count), tensor=matrix.tensor(piece), at=at, got=_stored(matrix, at), wanted=wanted, count=count,
        remedy=remedy, severity=severity, facts={"share": count / bad.size},
    )  # fmt: skip


def _stored(matrix: Matrix, at: tuple[int, ...]) -> str:
    """A stored scale as its byte where it is one, else as its number."""
    stored = matrix.scales[at]
    return (
        f"0x{int(stored):02X}" if matrix.scales.dtype == np.uint8 else f"{float(matrix.scale_values[at]):.6g}"
    )
