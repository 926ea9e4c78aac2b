"""The rule about scales that nobody computed: a buffer of one number, beside codes that were made with others.

    scale = amax(tile) / top        so a tile reaches the top, and tiles of different amax have different scales

Tiles that all reach the top under one and the same scale would all have one amax. Where one scale truly serves many
tiles, as after a lossless move from a scale per tensor, most tiles stay below the top.
"""

from __future__ import annotations

from collections.abc import Iterator

from narrowcast.audit.findings import Finding
from narrowcast.audit.matrix import Matrix, magnitudes
from narrowcast.audit.rules import rule
from narrowcast.numbers.formats import E8M0, Kind

TILES = 64  # of one amax by chance: never, where amax has a mantissa
BINADES = 1024  # of one binade by chance: the amax of 32 normal numbers varies by a factor of 2.5 over so many tiles
REACH = 0.9
LARGE = 448.0  # weights that reach half of it under a scale of 1.0 are none


@rule("NC124", "error", scope="matrix", reads="codes")
def filled_scales(matrix: Matrix) -> Iterator[Finding]:
    """Scales are all one number, though the codes were made with others.

    What: every scale of a matrix has the same value, and nine in ten tiles reach the top of the range, or their zero
    points differ; or the few scales that there are are exactly 1.0, and codes reach the top.
    Why: scales from amax are equal only where amax is. A loader that misses scales fills them with 1.0, and who saves
    that model saves the fill: codes are right, and every tile is off by a factor of its own.
    Fix: take the scales from the checkpoint that the codes came from, or quantize the layer again from the parent.
    False alarm: weights of a few values, such as ternary ones, have one amax everywhere; they are left out.
    """
    if matrix.peaks is None or matrix.element.kind is Kind.TABLE or not matrix.scales.size:
        return
    assert matrix.counts is not None
    if (matrix.scales != matrix.scales.flat[0]).any():
        return
    if int((matrix.counts > 0).sum()) <= 2 ** (matrix.element.bits // 2) + 1:
        return
    if matrix.zero is not None:  # ranges that differ in their ends and not in their lengths
        if matrix.scales.size >= TILES and (matrix.zero != matrix.zero.flat[0]).any():
            yield _finding(matrix, "and their zero points differ", 1.0)
        return
    table, powers = magnitudes(matrix.element), matrix.scale_format is E8M0
    top = float(table.max()) if matrix.element.kind is not Kind.INT else matrix.element.max
    used = matrix.peaks[matrix.peaks > 0]
    reach = float((table[used] >= (top / 2 if powers else 0.98 * top)).mean()) if used.size else 0.0
    many = used.size >= (BINADES if powers else TILES)
    alone = len(matrix.scheme.scales) == 1 and (not powers or top >= LARGE)
    if reach > REACH and (many or (alone and float(matrix.scale_values.flat[0]) == 1.0)):
        yield _finding(matrix, f"and {reach:.0%} of the tiles reach the top", reach)


def _finding(matrix: Matrix, said: str, reach: float) -> Finding:
    value, size = float(matrix.scale_values.flat[0]), matrix.scales.size
    return Finding(
        f"all {size:,} scales are {value:g}, {said}" if size > 1 else f"the scale is {value:g}, {said}",
        tensor=matrix.tensor("scales"), got=f"{value:g}", wanted="amax of each tile / the largest code", count=size,
        remedy="take the scales from where the codes came from, or quantize again",
        facts={"scale": value, "reach": reach},
    )  # fmt: skip
