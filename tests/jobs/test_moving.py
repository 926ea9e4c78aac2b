"""The self-check of what moves: every piece counts, the outer scale too, and elements are counted once."""

from __future__ import annotations

from pathlib import Path

import pytest

import toys
from narrowcast.jobs.convert import convert, plan
from narrowcast.jobs.moving import move_of
from narrowcast.jobs.quantize import quantize, run
from narrowcast.store.checkpoint import Checkpoint


@pytest.mark.parametrize(("preset", "target"), [("nvfp4a16", None), ("mxfp4a16", "nvfp4a16")])
def test_a_wrong_outer_scale_of_the_result_is_seen(tmp_path: Path, preset: str, target: str | None) -> None:
    quantize(toys.llama(tmp_path / "m", inner=256, layers=1), tmp_path / "q", preset)
    settled = plan(tmp_path / "q", tmp_path / "out", "modelopt", preset=target)
    run(settled)
    unit = settled.units[0]
    with Checkpoint.open(tmp_path / "q") as source, Checkpoint.open(tmp_path / "out") as result:
        move = move_of(unit, [unit], source)
        back = unit.how.read(result, unit.place, unit.source.shape, 0, 128)
        outer = unit.how.outer(result, unit.place, unit.source.shape)
        assert outer is not None
        assert move.check(source, 0, 128, back, outer).beyond == 0
        assert move.check(source, 0, 128, back, 2 * outer).beyond == 128 * unit.source.shape[1]


@pytest.mark.parametrize("to", ["plain", "modelopt"])
def test_elements_are_counted_once_and_exact_ones_add_no_signal(tmp_path: Path, to: str) -> None:
    model = toys.llama(tmp_path / "m", inner=256, layers=1)
    quantize(model, tmp_path / "q", "nvfp4a16")
    total = convert(tmp_path / "q", tmp_path / "out", to).total
    shapes = toys.llama_shapes(inner=256, layers=1)
    assert total.elements == sum(shape[0] * shape[1] for name, shape in shapes.items() if "_proj" in name)
    assert (total.signal, total.noise) == (0, 0)
