"""Figures of a plan: points stand where their bounds put them, bars add up, and no word lies on another."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from narrowcast.errors import UsageError
from narrowcast.hardware.gpus import gpus
from narrowcast.report import plan_figures
from narrowcast.report.plan_figures import paint_memory, paint_roofline, parts, plot_plan, points, shown
from narrowcast.serving.loading import from_config
from narrowcast.serving.memory import Memory, memory
from narrowcast.serving.question import Question
from serving.configs import DEEPSEEK_V3, GPT_OSS_120B, LLAMA2_70B, LLAMA3_8B

CASES: dict[str, tuple[dict[str, Any], Question]] = {
    "l4": (LLAMA3_8B, Question(gpus["l4"], batch=8, context=8192)),
    "a100": (LLAMA2_70B, Question(gpus["a100"], batch=8, context=4096)),
    "t4": (LLAMA3_8B, Question(gpus["t4"], context=2048)),
    "b200": (GPT_OSS_120B, Question(gpus["b200"], batch=16, context=131072)),
    "h200": (DEEPSEEK_V3, Question(gpus["h200"], tp=8, batch=64, context=4096)),
    "mi355x": (LLAMA3_8B, Question(gpus["mi355x"], batch=256, context=1024)),
}
PRESETS = (None, "fp8_dynamic", "w4a16", "mxfp4xfp8+kv8")


def _named(config: dict[str, Any], question: Question) -> dict[str, Memory]:
    found = {}
    for preset in PRESETS:
        served = from_config("model", config, preset=preset)
        found[preset or "bf16"] = memory(served, question)
    return found


@pytest.mark.parametrize("case", CASES)
def test_points_are_below_the_roofs(case: str) -> None:
    config, question = CASES[case]
    gpu = question.gpu
    assert gpu.bandwidth is not None
    found, roofs = points(from_config("model", config), question)
    assert [point.format for point in found[::3]] == list(shown(gpu))
    for point in found:
        # Three roundings: a division of each and a product here.
        assert point.rate <= min(max(roofs.values()), point.intensity * gpu.bandwidth) * (1 + 4 * 2.0**-53)
    for point in found:
        if point.step == 0:  # one sequence waits for bytes, whatever the format
            assert point.rate == pytest.approx(point.intensity * gpu.bandwidth, rel=1e-12)
    prompt = next(point for point in found if (point.format, point.step) == ("BF16", 2))
    wide = gpu.peak("bf16") or gpu.peak("fp16")
    assert prompt.rate == pytest.approx(wide, rel=1e-12)


def test_formats_are_those_that_a_gpu_multiplies() -> None:
    names = {name: shown(gpus[name]) for name in ("h100", "a100", "t4", "b200", "mi355x")}
    assert names["h100"] == names["b200"] == ("BF16", "FP8", "INT4 g128", "NVFP4")
    assert names["a100"][1] == names["t4"][1] == "INT8"
    assert names["mi355x"][3] == "MXFP4"


@pytest.mark.parametrize("case", CASES)
def test_bars_add_up(case: str) -> None:
    config, question = CASES[case]
    for found in _named(config, question).values():
        bar = parts(found, question.batch)
        assert found.cache is not None
        assert sum(bar.values()) == found.total + question.batch * found.cache.sequence
        assert set(bar) <= set(plan_figures.CLASSES)
        assert found.room is not None
        assert found.fits == (question.batch * found.cache.sequence <= found.room)


@pytest.mark.parametrize("case", CASES)
def test_words_do_not_overlap(case: str) -> None:
    """The boxes of all words of a figure, as they are drawn, lie apart and inside it."""
    from matplotlib.figure import Figure

    config, question = CASES[case]
    served, named = from_config("model", config), _named(config, question)
    for inches, paint in (
        (plan_figures.ROOFLINE, lambda axes: paint_roofline(axes, served, question)),
        ((5.0, 2.8), lambda axes: paint_memory(axes, named, question.batch)),
    ):
        figure = Figure(inches, layout="constrained")
        paint(figure.add_subplot())
        figure.draw_without_rendering()
        axes = figure.axes[0]
        ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
        low, high = axes.get_window_extent().min, axes.get_window_extent().max
        boxes = [text.get_window_extent() for text in axes.texts]
        for one, other in combinations(boxes, 2):
            assert not one.overlaps(other)
        for box in boxes:
            assert box.x0 >= low[0] - 1
            assert box.x1 <= high[0] + 1
            assert not any(box.overlaps(tick.get_window_extent()) for tick in ticks if tick.get_text())


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_one_file_with_both(tmp_path: Path, ending: str) -> None:
    config, question = CASES["l4"]
    file = tmp_path / f"plan.{ending}"
    plot_plan(from_config("some/Llama-3-8B", config), question, _named(config, question), str(file))
    if ending == "svg":
        root = ElementTree.fromstring(file.read_text())
        words = " ".join("".join(each.itertext()) for each in root.iter() if each.tag.endswith("text"))
        for word in (
            "Llama-3-8B on l4",
            "fp8 242 TFLOPS, ridge 807",
            "decode, 8 sequences",
            "too large",
            "cache",
        ):
            assert word in words, word
    else:
        assert file.read_bytes().startswith(b"\x89PNG")


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    served = from_config("model", LLAMA3_8B)
    blind = replace(gpus["h100"], peaks={})
    with pytest.raises(UsageError, match="peaks of the GPU"):
        points(served, Question(blind))
    empty = Question(replace(gpus["h100"], memory_gb=None))
    with pytest.raises(UsageError, match="memory of the GPU"):
        plot_plan(served, empty, {"bf16": memory(served, empty)}, str(tmp_path / "plan.svg"))
    assert not list(tmp_path.iterdir())
