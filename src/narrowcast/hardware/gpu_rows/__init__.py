"""The accelerators that are known by name, one row each; what a row means is told in hardware/gpu.py."""

from __future__ import annotations

from narrowcast.hardware.gpu import GPU
from narrowcast.hardware.gpu_rows import nvidia, others, rtx

ROWS: tuple[GPU, ...] = (*nvidia.ROWS, *rtx.ROWS, *others.ROWS)
