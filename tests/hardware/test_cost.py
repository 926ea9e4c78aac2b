"""Bytes over bandwidth, products over peaks, and the larger of both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from narrowcast.hardware.cost import Work, column, floor, peak_of, ridge, ridges
from narrowcast.hardware.engines import ENGINES, engines
from narrowcast.hardware.gpus import gpus

# Peak over bandwidth as published or as it follows from the datasheets, in FLOP per byte.
RIDGES = {
    ("h100", "bf16"): 295, ("h100", "fp8"): 591, ("a100", "bf16"): 153, ("a100", "int8"): 306, ("h200", "bf16"): 206,
    ("h200", "fp8"): 412, ("h20", "bf16"): 37, ("h20", "fp8"): 74, ("l40s", "bf16"): 419, ("l40s", "fp8"): 848,
    ("l4", "bf16"): 403, ("rtx 4090", "bf16"): 164, ("mi300x", "fp8"): 493, ("mi355x", "fp8"): 625,
    ("rtx 5090", "fp4"): 935, ("gb10", "fp4"): 1817, ("tpu v5e", "bf16"): 240, ("tpu v5e", "int8"): 480,
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "arithmetic"), RIDGES)
def test_ridge_points(gpu: str, arithmetic: str) -> None:
    """Within one FLOP per byte."""
    found = ridge(gpus[gpu], arithmetic)
    assert found is not None
    assert abs(found - RIDGES[gpu, arithmetic]) <= 1
    assert ridges(gpus[gpu])[arithmetic] == found


def test_floor_is_the_larger_bound() -> None:
    gpu = gpus["h100"]
    memory = floor(Work(3.35e12, {"bf16": 989e12 / 4, "fp8": 1979e12 / 4}), gpu)
    assert (memory.memory, memory.compute, memory.seconds, memory.bound) == (1.0, 0.5, 1.0, "memory")
    compute = floor(
        Work(3.35e11, {"bf16": 989e12, "nvfp4": 0.0}), replace(gpu, peaks=dict(gpu.peaks) | {"fp4": 1.0})
    )
    assert (compute.seconds, compute.bound) == (1.0, "compute")


def test_what_is_not_known_is_said() -> None:
    """A GPU without a peak still has the bound of its bytes, and the other way round."""
    gpu = gpus["a100"]
    found = floor(Work(2.04e12, {"fp8": 1.0, "bf16": 1.0}), gpu)
    assert (found.compute, found.seconds, found.unknown) == (None, 1.0, ("fp8",))
    blind = floor(Work(1.0, {"bf16": 312e12}), replace(gpu, bandwidth_tb_s=None))
    assert (blind.memory, blind.seconds, blind.bound) == (None, 1.0, "compute")
    nothing = floor(Work(1.0, {"bf16": 1.0}), gpus["cpu"])
    assert (nothing.seconds, nothing.bound) == (None, None)


def test_achievable_is_above_the_bound() -> None:
    gpu, work = replace(gpus["h100"], achieved={"bf16": 989 / 1.25}), Work(0.0, {"bf16": 1e15, "fp8": 0.0})
    bound, estimate = floor(work, gpu).compute, floor(work, gpu, achievable=True).compute
    assert bound is not None
    assert estimate is not None
    assert estimate / bound == pytest.approx(1.25)


def test_every_engines_arithmetic_has_a_column() -> None:
    """Words of kernels lead to a column of peaks, or to bf16 where weights alone are narrow."""
    words = {kernel.arithmetic for name in ENGINES for row in engines[name].rows for kernel in row.family} - {
        "unknown"
    }
    known = set().union(*(gpu.peaks for gpu in gpus.values()))
    assert {peak_of(word) for word in words} <= known
    assert (peak_of("nvfp4"), peak_of("mxfp8"), peak_of("bf16: weight only")) == ("fp4", "fp8", "bf16")
    assert (column(gpus["t4"], "bf16"), column(gpus["l4"], "bf16")) == ("fp16", "bf16")
