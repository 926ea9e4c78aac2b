"""A chunk beside its original through the compiled kernel, bitwise equal to ``kernels.reference.pair``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.kernels import Rows
from narrowcast.kernels.cpu import rows as cpu
from narrowcast.kernels.cpu.parameters import SCALE_KINDS, UNIT, element_row
from narrowcast.kernels.reference.pair import Sums, loss_tile
from narrowcast.numbers.formats import Format
from narrowcast.tensors.packing import Packing
from narrowcast.tensors.schemes import Scheme


def measure(
    stored: NDArray[Any], source: Format, scheme: Scheme, packing: Packing, rows: Rows, outer: float | None,
    start: int, sums: Sums,
) -> None:  # fmt: skip
    """See ``kernels.reference.pair.measure``; only for what ``CPU.supports``."""
    bits, level = cpu._carrier(stored, source), scheme.inner
    n, k = bits.shape
    if not bits.size:
        return
    packed, fused = cpu._codes(rows, scheme, packing, n, k)
    tiles, height = rows.scales.shape[1], loss_tile(scheme)[0]
    whole = sums.rows.shape[1]
    cpu._run(
        "pair", bits.dtype, scheme, fused, bits, n, k, packed, packed.shape[1], level.tile[0] or n, height,
        level.tile[1] or k, tiles, element_row(scheme.element), cpu._half_steps(scheme.element),
        SCALE_KINDS[level.format], cpu._factor(scheme, outer), scheme.zero is not None, fused.flip,
        cpu._pattern(rows.scales), cpu._zeros(rows), start // height, sums.rows[:, start:], whole, sums.columns,
        sums.row_peaks[start:], sums.column_peaks, sums.counts, sums.lost, *cpu._unit_scratch(k, tiles),
        np.zeros(tiles + UNIT, np.uint32), np.zeros(5 * UNIT), np.zeros(4 * UNIT, np.uint32),
        np.zeros(UNIT, np.uint32), cpu._with_slack(0), cpu._with_slack(0, np.uint8), cpu._with_slack(0, np.uint8),
    )  # fmt: skip
