"""What a step costs at least: bytes over the bandwidth, products over the peak, and the larger of both.

    seconds  ≥  max( bytes / bandwidth,  Σ FLOP[arithmetic] / peak[arithmetic] )
    ridge    =  peak / bandwidth          FLOP per byte at which both are equal

A lower bound: launches, synchronisation, unfused element-wise work and what a kernel leaves of the peak come on top.
One multiplication and one addition are two FLOP. Where a GPU has no BF16, engines multiply in FP16, and its peak
counts. With ``achievable`` the share of the peak that large products reach in measurements is taken, where one is
known: that is an estimate, and no bound.

Source: Williams, Waterman, Patterson, "Roofline" (2009).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from narrowcast.hardware.gpus import GPU

Bound = Literal["memory", "compute"]
# The arithmetic of a path, by its first word, to the peak that bounds it.
PEAKS: Mapping[str, str] = {
    "nvfp4": "fp4", "mxfp4": "fp4", "mxfp6": "fp6", "mxfp8": "fp8",
}  # fmt: skip


def peak_of(arithmetic: str) -> str:
    """The column of peaks that an engine's arithmetic runs at: ``bf16: weight only`` at bf16, ``nvfp4`` at fp4."""
    word = arithmetic.partition(":")[0]
    return PEAKS.get(word, word)


def column(gpu: GPU, arithmetic: str) -> str:
    """The same on one GPU: fp16 instead of bf16 where only that is there."""
    word = peak_of(arithmetic)
    return "fp16" if word == "bf16" and gpu.peak("bf16") is None and gpu.peak("fp16") is not None else word


@dataclass(frozen=True)
class Work:
    """What one step asks of one GPU: bytes to move, and FLOP by arithmetic."""

    moved: float
    flops: Mapping[str, float]


@dataclass(frozen=True)
class Floor:
    """The lower bound in seconds; None where the GPU's number is not known. ``unknown`` names the peaks that are."""

    memory: float | None
    compute: float | None
    unknown: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        known = [bound for bound in (self.memory, self.compute) if bound is not None]
        return max(known) if known else None

    @property
    def bound(self) -> Bound | None:
        """What the step waits for at least."""
        if self.seconds is None:
            return None
        return "memory" if self.seconds == self.memory else "compute"


def floor(work: Work, gpu: GPU, *, achievable: bool = False) -> Floor:
    """The lower bound of one step on one GPU."""
    memory = None if gpu.bandwidth is None else work.moved / gpu.bandwidth
    total, unknown = 0.0, []
    for arithmetic, flops in work.flops.items():
        name = column(gpu, arithmetic)
        peak = (gpu.achievable(name) if achievable else None) or (
            gpu.peak(name) if achievable else gpu.fastest(name)
        )
        if peak is None:
            unknown.append(name)
        else:
            total += flops / peak
    return Floor(memory, total if not unknown else None, tuple(dict.fromkeys(unknown)))


def ridge(gpu: GPU, arithmetic: str) -> float | None:
    """FLOP per byte at which bandwidth and peak are equal; None where either is unknown."""
    peak = gpu.peak(column(gpu, arithmetic))
    return None if peak is None or gpu.bandwidth is None else peak / gpu.bandwidth


def ridges(gpu: GPU) -> dict[str, float]:
    """Every ridge point of a GPU, by column of its peaks."""
    found = {name: ridge(gpu, name) for name in gpu.peaks}
    return {name: each for name, each in found.items() if each is not None}
