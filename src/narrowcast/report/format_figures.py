"""Figures about formats: how far each reaches, how fine its steps are, and what shares a scale.

    ranges   one bar per format over powers of two: subnormal values faint, normal ones full
    ruler    every value of a format from 0 to 16 beside another's, with a band where their steps are equal
    layouts  the same 32 elements under block formats: element codes, block scales, the tensor's scale

An integer's bar begins at 1, the step of its grid: without a scale it holds nothing smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log2
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import Format, Kind, formats
from narrowcast.report.drawing import BAND, FAINT, INK, Drawn, color_of, draw, power
from narrowcast.report.plots import write_plot
from narrowcast.report.tables import exact
from narrowcast.tensors.schemes import Scheme, schemes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANGED = (
    "fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3fn", "e4m3fnuz", "e3m2", "e2m3", "e2m1", "e8m0", "int8", "int4",
)  # fmt: skip
RULER_END = 16.0  # where a ruler ends that reaches further
ELEMENTS = 32  # elements of a layout, one block of MX
Floats = NDArray[np.float64]


def magnitudes(fmt: Format) -> Floats:
    """Finite magnitudes of a format of at most 16 bits, each once, ascending."""
    values = decode_table(fmt).astype(np.float64)
    return np.unique(np.abs(values[np.isfinite(values)]))


def paint_ranges(axes: Axes, chosen: Sequence[Format]) -> None:
    """Bars from the smallest positive value to the largest, the subnormal part faint."""
    for place, fmt in enumerate(chosen):
        least, top = _least(fmt), log2(fmt.max)
        normal = log2(fmt.smallest_normal) if fmt.smallest_normal else least
        color = color_of(_family(fmt))
        if normal > least:
            axes.barh(place, normal - least, left=least, color=color, alpha=0.35, height=0.62, lw=0)
        axes.barh(place, max(top - normal, 0.6), left=normal, color=color, height=0.62, lw=0)
        axes.text(top + 2, place, _largest(fmt), va="center", fontsize=9)
    axes.set_yticks(range(len(chosen)), [fmt.name for fmt in chosen])
    axes.invert_yaxis()
    axes.axvline(0, color=FAINT, lw=0.8, zorder=0)
    low = min(_least(fmt) for fmt in chosen)
    high = max(log2(fmt.max) for fmt in chosen)
    span = high - low
    axes.set_xlim(low - 0.03 * span, high + 0.22 * span)
    step = next(each for each in (2, 4, 8, 16, 32, 64) if span / each <= 9)
    ticks = [e for e in range(-256, 257, step) if low - 1 <= e <= high + 1]
    axes.set_xticks(ticks, [power(e) for e in ticks])
    axes.set_xlabel("magnitude")
    axes.tick_params(axis="y", length=0)


def _least(fmt: Format) -> float:
    return log2(fmt.smallest_subnormal or fmt.smallest_normal or 1)


def _largest(fmt: Format) -> str:
    return exact(fmt.max) if fmt.max < 1e6 else f"{fmt.max:.2g}"


def _family(fmt: Format) -> int:
    if fmt.kind is Kind.INT:
        return 3
    return 0 if fmt.bits > 8 else 1 if fmt.bits == 8 else 2


def paint_ruler(axes: Axes, chosen: Sequence[Format]) -> None:
    """Ticks at every value between 0 and the smaller reach, and a band where all steps are equal."""
    end = min(RULER_END, *(fmt.max for fmt in chosen))
    grids = [grid[grid <= end] for grid in (magnitudes(fmt) for fmt in chosen)]
    for first, last in _equal_steps(grids, end):
        axes.axvspan(first, last, color=BAND, lw=0)
    for place, (fmt, grid) in enumerate(zip(chosen, grids, strict=True)):
        color = color_of(place)
        axes.vlines(grid, place - 0.3, place + 0.3, color=color, lw=1.2)
        axes.text(end * 1.02, place, f"{fmt.name}\n{len(grid)} values", va="center", color=color, fontsize=9)
    axes.set_ylim(len(chosen) - 0.5, -0.5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlim(-0.01 * end, end * 1.2)
    axes.set_xlabel("magnitude at scale 1; shaded where steps are equal")
    step = 4 if end > 8 else 1 if end > 2 else 0.25
    axes.set_xticks(np.arange(0, end + step / 2, step))


def _equal_steps(grids: Sequence[Floats], end: float) -> list[tuple[float, float]]:
    """Intervals between powers of two in which all grids have one step."""
    found = []
    edges = [0.0, *(2.0**e for e in range(-12, 12) if 2.0**e < end), end]
    for first, last in pairwise(edges):
        steps = {_step(grid, first, last) for grid in grids}
        if len(steps) == 1 and None not in steps:
            found.append((first, last))
    return found


def _step(grid: Floats, first: float, last: float) -> float | None:
    inside = grid[(grid >= first) & (grid <= last)]
    gaps = np.unique(np.diff(inside))
    return float(gaps[0]) if len(gaps) == 1 and inside[0] == first else None


def paint_layouts(axes: Axes, chosen: Sequence[Scheme]) -> None:
    """Each scheme's first 32 elements of a row as cells under the scales that they share."""
    for place, scheme in enumerate(chosen):
        _layout(axes, scheme, 3.2 * place)
    axes.set_xlim(-0.5, ELEMENTS + 0.5)
    axes.set_ylim(3.2 * len(chosen) - 0.9, -1.1)
    axes.set_axis_off()


def _layout(axes: Axes, scheme: Scheme, top: float) -> None:
    element, group = scheme.element, scheme.group or ELEMENTS
    bits = scheme.bits_per_weight((4096, 4096))
    axes.text(0, top - 0.75, f"{scheme.name}: {bits:.4g} bits per element", weight="bold", va="center")
    y = top
    if scheme.outer is not None and scheme.outer is not scheme.inner:
        _cell(axes, 0, y, ELEMENTS, f"{scheme.outer.format.name}, one for the tensor", 2)
        y += 0.75
    whole = not scheme.group
    for start in range(0, ELEMENTS, min(group, ELEMENTS)):
        width = min(group, ELEMENTS - start)
        said = f"{scheme.inner.format.name} for {_shared(scheme)}"
        _cell(axes, start, y, width, said if width > 8 or whole else scheme.inner.format.name, 4)
    y += 0.75
    for i in range(ELEMENTS):
        _cell(axes, i, y, 1, "", 0)
    axes.text(ELEMENTS / 2, y + 1.0, f"{ELEMENTS} elements of {element.name}, {element.bits} bits each",
              ha="center", va="center", fontsize=9)  # fmt: skip


def _shared(scheme: Scheme) -> str:
    rows, columns = scheme.inner.tile
    if (rows, columns) == (0, 0):
        return "the tensor"
    if not columns:
        return "the row"
    return f"{columns} elements" if rows == 1 else f"a block of {rows}x{columns}"


def _cell(axes: Axes, x: float, y: float, width: float, text: str, color: int) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle(
            (x + 0.06, y), width - 0.12, 0.6, facecolor=color_of(color), alpha=0.28, edgecolor=INK, lw=0.5
        )
    )
    if text:
        axes.text(x + width / 2, y + 0.31, text, ha="center", va="center", fontsize=9)


def plot_formats(name: str | None, file: str) -> None:
    """The ranges of the common formats, or the values of one beside INT8's (an integer's beside E4M3's)."""
    if name is None:
        chosen = [formats[each] for each in RANGED]
        write_plot(
            lambda axes: paint_ranges(axes, chosen), file, inches=(5.6, 3.8), title="Ranges of formats"
        )
        return
    fmt = formats[name]
    if fmt.bits > 16:
        raise UsageError(
            f"{fmt.name} has too many values to draw",
            wanted="at most 16 bits",
            remedy="without a name --plot draws ranges",
        )
    pair = [formats["e4m3fn" if fmt.kind is Kind.INT else "int8"], fmt]
    write_plot(lambda axes: paint_ruler(axes, pair), file, inches=(5.6, 1.9), title="Values and their steps")


def layout(scheme: Scheme) -> Drawn:
    """For a page: what shares a scale in a scheme."""
    return Drawn(
        f"{scheme.name}: what shares a scale",
        f"{ELEMENTS} neighbouring elements of a row, and above them the scales by which they are multiplied.",
        draw(lambda axes: paint_layouts(axes, [scheme]), (6.4, 1.7)),
    )


def plot_schemes(name: str | None, file: str) -> None:
    """What shares a scale in one scheme, or in MXFP4 beside NVFP4."""
    chosen = [schemes[each] for each in ((name,) if name is not None else ("mxfp4", "nvfp4"))]
    inches = (6.4, 0.3 + 1.4 * len(chosen))
    write_plot(lambda axes: paint_layouts(axes, chosen), file, inches=inches)
