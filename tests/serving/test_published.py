"""Measurements that others published lie on the right side of the bounds: none is faster."""

from __future__ import annotations

import pytest

from narrowcast.hardware.gpus import gpus
from narrowcast.serving.loading import from_config
from narrowcast.serving.question import Question
from narrowcast.serving.side_by_side import side_by_side
from narrowcast.serving.steps import steps
from serving.published import SPEEDUPS, Measured, Speedup, measurements

# How much slower than its bound a measurement is at most while it still tells something about the bound: slow engines
# are on the right side of any. The closest ones are named, so that a bound that moves away from them is seen.
CLOSE = {
    ("Llama-3-8B", "rtx 4090", "BF16", 1): 1.25, ("Llama-3-8B", "a100", "BF16", 1): 1.45,
    ("Llama-2-70B", "a100", "INT8", 1): 1.6, ("Llama-2-70B", "a100", "BF16", 8): 2.0,
    ("gpt-oss-120b", "gb10", "MXFP4", 1): 1.3, ("Qwen1.5-72B", "l20", "BF16", 8): 2.0,
}  # fmt: skip


def _name(one: Measured | Speedup) -> str:
    return f"{one.model} {one.format} {one.gpu}"


@pytest.mark.parametrize("one", measurements(), ids=_name)
def test_no_measurement_is_faster(one: Measured, record_property: pytest.RecordProperty) -> None:
    bound = steps(one.served(), one.question()).decode.seconds
    assert bound is not None
    ratio = 1 / one.rate / bound
    record_property("measured over bound", ratio)
    assert ratio >= 1, one.source
    assert ratio < CLOSE.get((one.model, one.gpu, one.format, one.tp), float("inf")), (
        "the bound has moved away"
    )


def test_there_are_enough() -> None:
    every = list(measurements())
    assert len(every) >= 8
    assert len({one.gpu for one in every}) >= 8
    assert len({one.engine for one in every}) >= 8
    assert all(one.source.startswith("https://") and one.date for one in every)


@pytest.mark.parametrize("one", SPEEDUPS, ids=_name)
def test_no_speedup_is_larger_than_the_bytes_allow(one: Speedup) -> None:
    """Of the linears' own table where the head stays wide; torchao narrows the head too."""
    table = side_by_side(from_config(one.model, one.config), Question(gpus[one.gpu], context=1))
    covers = "all" if "torchao" in one.source else "linears"
    gain = next(row.gain for row in table.rows if (row.name, row.covers) == (one.format, covers))
    assert one.ratio <= gain
