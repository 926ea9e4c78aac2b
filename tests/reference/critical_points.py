"""Inputs where rounding decides: values, midpoints, their float32 and float64 neighbours, the far ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.fractions_oracle import Layout

FAR = (
    0.0, 5e-324, 1e-300, 2.0**-149, 1e-45, 1.0, 1e30, 3.4028234663852886e38, 3.5e38, 1e300,
    1.7976931348623157e308,
)  # fmt: skip


def around(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points with their float64 neighbours and, where they are float32 values, their float32 neighbours."""
    parts = [points]
    with np.errstate(over="ignore"):
        single = points[points.astype(np.float32) == points].astype(np.float32)
        for side in (np.inf, -np.inf):
            parts += [np.nextafter(points, side), np.nextafter(single, np.float32(side)).astype(np.float64)]
    return np.unique(np.concatenate(parts))


def critical_points(layout: Layout) -> NDArray[np.float64]:
    """Finite float64 inputs: for every pair of neighbours the values, the middle and a quarter; beyond both
    ends the first two steps; then a few magnitudes far away."""
    values = np.array([float(v) for v in layout.values])
    step = values[-1] - values[-2]
    if layout.step is None and layout.mantissa_bits == 0:
        step = values[-1]
    ends = values[-1] + step * np.array([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
    lower = values[0] - (values[1] - values[0]) * np.array([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
    middles, quarters = (values[:-1] + values[1:]) / 2, values[:-1] + (values[1:] - values[:-1]) / 4
    far = np.array(FAR)
    points = around(np.concatenate([values, middles, quarters, ends, lower]))
    finite = np.concatenate([points, far, -far])
    return finite[np.isfinite(finite)]


def sixteen_bit_inputs(kind: str) -> NDArray[np.float64]:
    """All 65,536 values of bf16 or fp16, NaN and infinities included."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    if kind == "fp16":
        return bits.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
