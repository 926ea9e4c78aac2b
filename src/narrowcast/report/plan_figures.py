"""The figures of a plan: the roofline with the model's steps on it, and what fills a GPU's memory.

    roofline   FLOP a second over FLOP per byte, both logarithmic: the slope is the bandwidth, the level lines are the
               peaks, and they meet in the ridges. A step stands where its bound puts it: decoding on the slope, a
               prompt at a peak, in the colours of formats
    memory     a bar for each way of storing the model: weights by class, and the cache of the asked batch

A point's height is its FLOP over the least seconds of it. Experts count as uniform routing touches them, since the
fewest that could be touched say nothing of a large batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from narrowcast.errors import UsageError
from narrowcast.hardware.cost import column, floor
from narrowcast.hardware.gpus import GPU
from narrowcast.report.drawing import BAND, ERROR, FAINT, INK, Drawn, color_of, draw, style
from narrowcast.report.plots import write_plot
from narrowcast.report.tables import middle, number, size
from narrowcast.serving.memory import Memory, memory
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served
from narrowcast.serving.side_by_side import in_format
from narrowcast.serving.steps import arithmetic, attention_arithmetic
from narrowcast.serving.traffic import decode, prefill

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = (
    "BF16",
    "FP8",
    "INT4 g128",
    "NVFP4",
)  # formats of the roofline, by the names of the side-by-side table
MANY = 32  # sequences beside one, where the question has but one
ROOFLINE, MARGIN = (5.0, 3.6), 3.0
CHARACTER, APART = 0.019, 0.045  # of the axes' width: a letter of a class's name, and the room after it
SEEN = 0.004  # of the axis: what is narrower is not seen, and not named
BARS, BAR = 1.0, 0.46  # inches of the axis and the names, and of one bar
CLASSES = ("attention", "mlp", "experts", "embedding and head", "other", "cache")
_SHOWN_AS = {
    "attention": "attention", "mlp": "mlp", "experts": "experts", "shared experts": "experts",
    "embedding": "embedding and head", "output head": "embedding and head",
}  # fmt: skip
MARKS = ("o", "s", "^")
LAST = 3  # of the formats shown
LEGEND, LINE = 0.36, 0.065  # of the axes' height: the first line of the legend, and one line


@dataclass(frozen=True)
class Point:
    """A step of the model in a format: FLOP per byte, FLOP a second at most; ``step`` 0 is one sequence, 1 several, 2 a
    prompt."""

    format: str
    step: int
    intensity: float
    rate: float


def shown(gpu: GPU) -> tuple[str, str, str, str]:
    """The formats on a GPU's roofline: 16 bits, the 8 and the 4 bits that it multiplies, and weights in 4 bits."""
    eight = "FP8" if gpu.peak("fp8") or not gpu.peak("int8") else "INT8"
    four = "MXFP4" if "mxfp4" in gpu.formats and "nvfp4" not in gpu.formats else "NVFP4"
    return "BF16", eight, "INT4 g128", four


def points(served: Served, question: Question) -> tuple[list[Point], dict[str, float]]:
    """The steps of the model in each format shown, and the peaks that they run at, lowest first, by the words of those
    that share one. UsageError for a GPU whose numbers are not known."""
    gpu, found, words = question.gpu, [], set[str]()
    for name in shown(gpu):
        model = in_format(served, name)
        how, attention = arithmetic(model, question), attention_arithmetic(model, question)
        words |= {column(gpu, word) for word in how}
        steps = [decode(model, question, how, attention, batch=n, uniform=True) for n in (1, _many(question))]
        for step, traffic in enumerate([*steps, prefill(model, question, how, attention, uniform=True)]):
            bound, flops = floor(traffic.work, gpu), sum(traffic.flops.values())
            if bound.memory is None or bound.compute is None:
                raise UsageError("a roofline needs the bandwidth and the peaks of the GPU", got=gpu.name)
            found.append(Point(name, step, flops / traffic.moved, flops / max(bound.memory, bound.compute)))
    shared: dict[float, list[str]] = {}
    for word in sorted(words):
        shared.setdefault(gpu.peak(word) or 0.0, []).append(word)
    return found, {", ".join(names): peak for peak, names in sorted(shared.items())}


def _many(question: Question) -> int:
    return question.batch if question.batch > 1 else MANY


def paint_roofline(axes: Axes, served: Served, question: Question) -> None:
    """Roofs, ridges and steps of one GPU."""
    gpu = question.gpu
    found, roofs = points(served, question)
    assert gpu.bandwidth is not None
    top = max(roofs.values())
    low = min(point.intensity for point in found) / MARGIN
    high = max(top / gpu.bandwidth, *(point.intensity for point in found)) * MARGIN
    axes.plot([low, top / gpu.bandwidth], [low * gpu.bandwidth, top], color=FAINT, lw=1.2, zorder=1)
    for word, peak in roofs.items():
        corner = peak / gpu.bandwidth
        axes.plot([corner, high], [peak, peak], color=FAINT, lw=1.2, zorder=1)
        axes.plot([corner], [peak], marker="|", color=INK, markersize=9, mew=1.4, zorder=2)
        label = f"{word} {number(peak / 1e12, 4)} TFLOPS, ridge {corner:.0f}"
        axes.text(corner, peak * 1.12, label, fontsize=8, ha="right", va="bottom")
    for point in found:
        _mark(axes, point, shown(gpu).index(point.format))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(point.rate for point in found) / MARGIN, top * 2.2)
    axes.set_xlabel("FLOP per byte")
    axes.set_ylabel("FLOP a second at most")
    _legend(axes, question)


def _mark(axes: Axes, point: Point, series: int) -> None:
    """A point in its format's colour; later formats are smaller, and the last is a ring around what it lies on."""
    ring, color = series == LAST, color_of(series)
    axes.plot(
        [point.intensity], [point.rate], marker=MARKS[point.step], markersize=9.5 if ring else 8 - series, zorder=3,
        mew=1.4 if ring else 0, markerfacecolor="none" if ring else color, markeredgecolor=color, ls="",
    )  # fmt: skip


def _legend(axes: Axes, question: Question) -> None:
    """Formats in their colours and steps by their marks, in the corner below the roofs, where no step can be."""
    for i, name in enumerate(shown(question.gpu)):
        axes.text(0.98, LEGEND - LINE * i, name, color=color_of(i), transform=axes.transAxes, ha="right", va="center",
                  weight="bold", fontsize=8.5)  # fmt: skip
    words = ("1 sequence", f"{_many(question)} sequences", f"prompt of {question.context} tokens")
    for i, (mark, word) in enumerate(zip(MARKS, words, strict=True)):
        y, kind = LEGEND - LINE * (i + 1), "" if i == 2 else "decode, "
        axes.plot([0.42], [y], marker=mark, color=FAINT, transform=axes.transAxes, markersize=5.5, mew=0)
        axes.text(0.45, y, kind + word, transform=axes.transAxes, va="center", fontsize=8.5)


def parts(found: Memory, batch: int) -> dict[str, float]:
    """Bytes on one GPU by what a bar shows; the cache is that of the asked batch."""
    sums: dict[str, float] = {}
    for name, count in found.weights.items():
        shown = _SHOWN_AS.get(name, "other")
        sums[shown] = sums.get(shown, 0.0) + count
    if found.cache is not None:
        sums["cache"] = float(batch * found.cache.sequence)
    return {name: sums[name] for name in CLASSES if sums.get(name)}


def paint_memory(axes: Axes, named: Mapping[str, Memory], batch: int) -> None:
    """A bar for each way of storing the model, what it leaves in words above it; the band is memory that is left to the
    engine's own use. UsageError where the GPU's memory is not known."""
    bars = {name: parts(found, batch) for name, found in named.items()}
    first = next(iter(named.values()))
    if first.capacity is None or first.budget is None:
        raise UsageError("memory bars need the memory of the GPU")
    axes.axvspan(first.budget / 1e9, first.capacity / 1e9, color=BAND, lw=0, zorder=0)
    for place, (name, bar) in enumerate(bars.items()):
        left = 0.0
        for kind, count in bar.items():
            axes.barh(
                place, count / 1e9, left=left / 1e9, height=0.42, color=color_of(CLASSES.index(kind)), lw=0
            )
            left += count
        axes.text(0, place - 0.36, _words(name, named[name]), fontsize=8.5, va="center",
                  color=INK if named[name].fits is not False else ERROR)  # fmt: skip
    widest = max(first.capacity, *(sum(bar.values()) for bar in bars.values()))
    _classes(
        axes, [kind for kind in CLASSES if any(bar.get(kind, 0) > SEEN * widest for bar in bars.values())]
    )
    axes.set_xlim(0, widest / 1e9)
    axes.set_ylim(len(bars) - 0.6, -1.5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("GB on one GPU; the band is left to the engine")


def memory_figure(served: Served, question: Question) -> Drawn:
    """The bars of the model as it is and in 16 bits, for a page. UsageError as ``paint_memory``."""
    named = {
        "as it is": memory(served, question),
        "in 16 bits": memory(in_format(served, "BF16"), question),
    }

    def paint(axes: Axes) -> None:
        paint_memory(axes, named, question.batch)

    gpus = question.gpu.name if question.tp == 1 else f"each of {question.tp} {question.gpu.name}"
    caption = (
        f"Weights by class, and the cache of {question.batch} sequence of {question.context:,} tokens, on {gpus}, as "
        "narrowcast plan counts them from the headers."
    )
    with style():
        return Drawn("What fills the GPU", caption, draw(paint, (ROOFLINE[0], BARS + BAR * len(named))))


def _classes(axes: Axes, kinds: Sequence[str]) -> None:
    """The classes' names in their colours, in lines above the bars."""
    lines: list[list[str]] = [[]]
    for kind in kinds:
        if sum(CHARACTER * len(word) + APART for word in (*lines[-1], kind)) > 1:
            lines.append([])
        lines[-1].append(kind)
    for up, line in enumerate(reversed(lines)):
        x = 0.0
        for kind in line:
            axes.text(x, -0.85 - 0.4 * up, kind, color=color_of(CLASSES.index(kind)), va="center", weight="bold",
                      fontsize=8.5, transform=axes.get_yaxis_transform())  # fmt: skip
            x += CHARACTER * len(kind) + APART


def _words(name: str, found: Memory) -> str:
    """What a bar comes to."""
    spare = found.room if found.cache is None else found.cache.spare
    if spare is None:
        return name
    rest = f"{size(spare)} free" if spare >= 0 else f"{size(-spare)} too large"
    return f"{name}: weights {size(found.total)}, {rest}"


def plot_plan(served: Served, question: Question, named: Mapping[str, Memory], file: str) -> None:
    """Both figures in one file: the roofline of the model, and ``named`` ways of storing it. Errors as ``write_plot``;
    UsageError where the GPU's numbers are not known."""
    low = BARS + BAR * len(named)

    def paint(axes: Axes) -> None:
        figure = axes.figure
        grid = figure.add_gridspec(2, 1, height_ratios=[ROOFLINE[1], low])
        axes.set_subplotspec(grid[0])
        paint_roofline(axes, served, question)
        paint_memory(figure.add_subplot(grid[1]), named, question.batch)

    write_plot(paint, file, inches=(ROOFLINE[0], ROOFLINE[1] + low), title=_title(served, question))


def _title(served: Served, question: Question) -> str:
    count = question.tp * question.pp
    gpus = question.gpu.name if count == 1 else f"{count} x {question.gpu.name}"
    return f"{middle(Path(served.name).name or served.name, 30)} on {gpus}"
