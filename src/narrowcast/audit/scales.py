"""Rules about scales."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from narrowcast.audit.findings import Finding
from narrowcast.audit.matrix import Matrix, first
from narrowcast.audit.rules import rule


@rule("NC110", "error", scope="matrix", reads="scales")
def nonfinite_scale(matrix: Matrix) -> Iterator[Finding]:
    """A scale is NaN or infinite.

    What: an innermost scale decodes to NaN or infinity: E4M3 bytes 0x7F and 0xFF, E8M0 byte 255, NaN in fp32.
    Why: every element under it becomes NaN, and the next matrix product spreads it over the whole row.
    Fix: quantize the layer again from the parent; the usual cause is 0/0 on an all-zero block.
    False alarm: none known.
    """
    if matrix.scale_counts is not None and not matrix.scale_counts[~_finite(matrix)].any():
        return
    bad = ~np.isfinite(matrix.scale_values)
    if bad.any():
        at = first(bad)
        assert at is not None
        yield Finding(
            f"{int(bad.sum())} scales are not finite", tensor=matrix.tensor("scales"), at=at,
            got=_stored(matrix, at), wanted="a finite positive scale", count=int(bad.sum()),
            remedy="quantize the layer again from the parent",
        )  # fmt: skip


def _finite(matrix: Matrix) -> np.ndarray:
    from narrowcast.numbers.codec import decode_table

    return np.isfinite(decode_table(matrix.scale_format))


def _stored(matrix: Matrix, at: tuple[int, ...]) -> str:
    """A stored scale as its byte where it is one, else as its number."""
    stored = matrix.scales[at]
    return (
        f"0x{int(stored):02X}" if matrix.scales.dtype == np.uint8 else f"{float(matrix.scale_values[at]):.6g}"
    )
