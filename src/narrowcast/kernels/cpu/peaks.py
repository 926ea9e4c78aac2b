"""The scanning kernel: the largest magnitude of a chunk, in its carrier."""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu.bits import inlined
from narrowcast.kernels.cpu.scales import row_peak


@inlined
def peak_kernel(stored: Any, peak: Any) -> None:
    """peak[0] = the largest magnitude of stored [n, k]; a pattern above infinity's is a NaN."""
    largest = peak[0]
    for i in range(stored.shape[0]):
        largest = row_peak(stored[i], largest)
    peak[0] = largest
