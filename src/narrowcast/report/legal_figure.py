"""A transformer block from top to bottom, and beside each operation the dtypes it was measured in: which are free,
which cost what FP8 linear layers do, which must not be.

Colours repeat what the signs say: + free, ~ like fp8, x keep wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from narrowcast.report.drawing import FAINT, INK, color_of
from narrowcast.report.plots import write_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Operations in the order of computation; the indented are within attention or the network.
FLOW: tuple[tuple[str, str], ...] = (
    ("embedding", ""), ("residual", ""), ("norm inside", ""), ("norm output", ""), ("linear weights", ""),
    ("linear inputs", ""), ("linear accumulators", ""), ("linear outputs", ""), ("rotary", "attention"),
    ("KV cache", "attention"), ("scores", "attention"), ("softmax", "attention"), ("PV", "attention"),
    ("router", "network"), ("act*up", "network"), ("experts' sum", "network"), ("logits", ""),
)  # fmt: skip
SIGNS = {"free": ("+", 2), "like fp8": ("~", 4), "keep wide": ("x", 1)}
_SHORT = {"int8_per_token_head": "int8/head", "fp8_per_token_head": "fp8/head", "int4_per_token_head": "int4/head",
          "mxfp8_e4m3": "mxfp8", "fp8_channel": "fp8", "int8_channel": "int8", "fp8_token": "fp8",
          "int8_token": "int8", "int4_g32": "int4 g32", "e4m3 scaled": "e4m3·s"}  # fmt: skip
CHIP, BOX, ROW, CHARACTER = 0.3, 4.2, 1.0, 0.2


class Reading(Protocol):
    """One measured pair."""

    operation: str
    dtype: str


def rows_of(cells: Sequence[tuple[Reading, str]]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(operation, part of the block, [(dtype, reading)]) in the order of computation; what is not measured is left
    out."""
    rows = []
    for operation, part in FLOW:
        found = [
            (_SHORT.get(cell.dtype, cell.dtype), reading)
            for cell, reading in cells
            if cell.operation == operation
        ]
        if found:
            rows.append((operation, part, found))
    return rows


def height_of(cells: Sequence[tuple[Reading, str]]) -> float:
    """Inches that the figure needs."""
    return 0.34 * len(rows_of(cells)) + 0.5


def paint_legal(axes: Axes, cells: Sequence[tuple[Reading, str]]) -> None:
    """Boxes from top to bottom joined by a line, chips of dtypes to their right."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    rows, widest = rows_of(cells), 0.0
    axes.plot([BOX / 2] * 2, [0, ROW * (len(rows) - 1)], color=FAINT, lw=1.2, zorder=0)
    for place, (operation, part, dtypes) in enumerate(rows):
        y, indent = ROW * place, 0.35 if part else 0.0
        axes.add_patch(
            Rectangle((indent, y - 0.36), BOX - 2 * indent, 0.72, facecolor="white", edgecolor=INK, lw=0.8)
        )
        axes.text(BOX / 2, y, operation, ha="center", va="center", fontsize=8.5, color="black")
        x = BOX + 0.4
        for dtype, reading in dtypes:
            sign, color = SIGNS[reading]
            text = f"{sign} {dtype}"
            width = CHARACTER * len(text) + CHIP
            axes.add_patch(
                FancyBboxPatch((x, y - 0.3), width, 0.6, boxstyle="round,pad=0,rounding_size=0.2",
                               facecolor=color_of(color), alpha=0.3, lw=0)
            )  # fmt: skip
            axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=7.5)
            x += width + 0.12
        widest = max(widest, x)
    axes.text(
        0,
        ROW * len(rows) + 0.1,
        "+ free    ~ like linear layers in FP8    x keep wide",
        fontsize=8,
        va="center",
    )
    axes.set_xlim(-0.2, widest)
    axes.set_ylim(ROW * len(rows) + 0.6, -0.7)
    axes.set_axis_off()


def plot_legal(cells: Sequence[tuple[Reading, str]], file: str) -> None:
    """The figure in a file of its own."""
    write_plot(lambda axes: paint_legal(axes, cells), file, inches=(6.8, height_of(cells)))
