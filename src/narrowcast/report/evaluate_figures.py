"""The plots of an evaluation: how the divergence is spread over predictions, where in the model it comes from, and what
KV caches add.

    histogram   counts of KL(parent || child) by prediction, as they were gathered
    layers      relative error of hidden states so far, and of each layer by itself beside what its format explains
    cosines     1 - cosine of hidden states: means, and the worst token
    caches      KL of the child beside itself by mode, ordered by bytes per token

Divergences and errors span decades, so their axes are logarithmic; what is exactly zero is said in words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from math import floor, isfinite, log10
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowcast.report.drawing import BAND, ERROR, FAINT, INK, SIZE, Drawn, color_of, draw, power, style
from narrowcast.report.tables import middle, number, percent, size
from narrowcast.studies.evaluation import CacheRow, Divergence, Evaluation, Gap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DECADES = 1.2  # that an axis spans at least
LABEL = 30  # characters of a mode's name above its point
Line = tuple[str, Sequence[float | None], str, Any]  # name, values by layer, colour, dashes


def figures(found: Evaluation) -> dict[str, list[Drawn]]:
    """Plots by the part of the page they belong to: gap, layers, caches."""
    with style():
        gap = _histogram(found.gap) if found.gap is not None else None
        layers = _layers(found.divergence) if found.divergence is not None else []
        caches = _caches(found.caches, found.gap.kl.estimate if found.gap is not None else None)
    return {
        "gap": [gap] if gap is not None else [],
        "layers": layers,
        "caches": [caches] if caches is not None else [],
    }


def _histogram(gap: Gap) -> Drawn | None:
    """The divergence by prediction; None where every one is zero."""
    counts = np.array(gap.kl_histogram.counts, float)
    if not counts.any():
        return None
    total = counts.sum() + gap.kl_histogram.zero
    filled = np.nonzero(counts)[0]
    first, last = int(filled[0]), int(filled[-1]) + 1
    edges = np.array(gap.kl_histogram.edges[first : last + 1])
    at = dict(gap.kl_percentiles.at)
    marks = [("median", at.get(50.0)), ("mean", gap.kl.estimate), ("99 %", at.get(99.0))]

    def paint(axes: Axes) -> None:
        shares = 100 * counts[first:last] / total
        axes.stairs(shares, edges, color=color_of(0), fill=True, alpha=0.3, lw=0)
        axes.stairs(shares, edges, color=color_of(0))
        axes.set_ylim(0, 1.3 * shares.max())
        inside = sorted(
            (value, name) for name, value in marks if value is not None and edges[0] <= value <= edges[-1]
        )
        left = bool(inside) and log10(inside[0][0] / edges[0]) > 0.25 * log10(edges[-1] / edges[0])
        for i, (value, name) in enumerate(inside):  # no line reaches up to the words of another
            top = 0.98 - 0.075 * (len(inside) - 1 - i if left else i)
            _mark(axes, value, f"{name} {number(value, 2)}", INK, top, left)
        _decades(axes.xaxis, edges, _decimal)
        axes.set_xlabel("KL of a prediction, nats")
        axes.set_ylabel("share of predictions, %")

    zero = gap.kl_histogram.zero
    none = f" Exactly zero, and not in the plot: {percent(zero / total)}." if zero else ""
    return Drawn(
        "Divergence by prediction",
        f"KL(parent || child) of next tokens, on a logarithmic axis. A mean far beyond the median comes from few "
        f"predictions.{none}",
        draw(paint),
    )


def _layers(divergence: Divergence) -> list[Drawn]:
    """Error and cosine by layer; none where all layers are equal."""
    rows = [row for row in divergence.layers if row.relative > 0]
    if not rows:
        return []
    at = [row.layer for row in divergence.layers]
    jump = _layer(divergence)
    so_far = [row.relative for row in divergence.layers]
    local = [row.local for row in divergence.layers]
    expected = [row.expected for row in divergence.layers]
    lines: list[Line] = [("so far", so_far, color_of(0), "-"), ("this layer's", local, color_of(1), "-"),
             ("its format's", expected, INK, (0, (2, 3)))]  # fmt: skip

    def paint(axes: Axes) -> None:
        _by_layer(axes, at, lines, jump)
        axes.set_ylabel("relative error, %")

    looked = any(value is not None for value in local)
    own = (
        " “This layer's” is what it makes of the parent's own input, as a share of what it adds; “its format's” is "
        "what plain rounding explains of that."
        if looked
        else ""
    )
    said = f" {divergence.jump.where} is the first that its format cannot explain." if divergence.jump else ""
    drawn = Drawn(
        "Error by layer",
        f"“So far” is the error of hidden states behind each layer of the running models.{own}"
        f"{said[:1] + said[1:2].upper() + said[2:]}",
        draw(paint),
    )
    return [drawn, _cosines(divergence, at, jump)]


def _cosines(divergence: Divergence, at: Sequence[int], jump: int | None) -> Drawn:
    mean = [1 - row.cosine for row in divergence.layers]
    least = [1 - row.least_cosine for row in divergence.layers]
    lines: list[Line] = [("worst token", least, color_of(3), "-"), ("mean", mean, color_of(2), "-")]

    def paint(axes: Axes) -> None:
        _by_layer(axes, at, lines, jump, _decimal)
        axes.set_ylabel("1 - cosine")

    return Drawn(
        "Direction by layer",
        "1 - cosine of the angle between the two hidden states of a token: 0 is the same direction, 1 a right angle.",
        draw(paint),
    )


def _layer(divergence: Divergence) -> int | None:
    """The number of the layer that jumps; None where the fault lies elsewhere."""
    found = re.match(r"layer (\d+)", divergence.jump.where) if divergence.jump else None
    return int(found[1]) if found else None


def _by_layer(
    axes: Axes, at: Sequence[int], lines: Iterable[Line], jump: int | None,
    spell: Callable[[float], str] = lambda x: _decimal(100 * x),
) -> None:  # fmt: skip
    """Lines over layers on a logarithmic axis, their names above the plot, the jump marked."""
    seen: list[float] = []
    kept = [(name, _positive(values), color, dashes) for name, values, color, dashes in lines]
    kept = [line for line in kept if np.isfinite(line[1]).any()]
    place = 0.0
    for name, values, color, dashes in kept:
        mark = "o" if len(at) < 4 else ""
        axes.plot(at, values, color=color, ls=dashes, marker=mark)
        seen += values[np.isfinite(values)].tolist()
        shown = f"- - {name}" if dashes != "-" else name
        axes.text(place, 1.03, shown, color=color, weight="bold", transform=axes.transAxes)
        place += 0.04 + 0.021 * len(shown)
    _decades(axes.yaxis, np.array(seen), spell)
    if jump is not None:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.09)  # room for its name
        _mark(axes, jump, f"layer {jump}", ERROR, 0.98, jump > (at[0] + at[-1]) / 2)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer")


def _mark(axes: Axes, x: float, said: str, color: str, top: float, left: bool) -> None:
    """A dashed line at ``x`` with words at its ``top``, on its left side or its right."""
    axes.axvline(x, 0, top, color=color, lw=1.2, ls=(0, (4, 3)))
    axes.annotate(
        said, (x, top), xycoords=axes.get_xaxis_transform(), xytext=(-4 if left else 4, 0),
        textcoords="offset points", ha="right" if left else "left", va="top", color=color,
    )  # fmt: skip


def _positive(values: Sequence[float | None]) -> np.ndarray:
    """What a logarithmic axis can show; gaps for the rest."""
    numbers = np.array([np.nan if value is None else value for value in values], float)
    return np.where(numbers > 0, numbers, np.nan)


def _caches(rows: Sequence[CacheRow], weights: float | None) -> Drawn | None:
    """A point for each mode, the smallest cache on top; ``weights`` is the child's own KL beside the parent."""
    rows = sorted(rows, key=lambda row: (row.bytes_per_token, -_kl(row)))
    points = [_kl(row) for row in rows if _kl(row) > 0]
    if not points:
        return None
    ends = [
        end
        for row in rows
        if row.alone
        for end in (row.alone.kl.low, row.alone.kl.high)
        if end > 0 and isfinite(end)
    ]
    wide = np.array(
        [*points, *[end for end in ends if end > min(points) / 10], *([weights] if weights else [])]
    )

    def paint(axes: Axes) -> None:
        _decades(axes.xaxis, wide, _decimal)
        left = axes.get_xlim()[0]
        if weights:
            axes.axvline(weights, color=FAINT, lw=1, ls=(0, (4, 3)))
        for y, row in enumerate(rows):
            axes.axhline(y, color=BAND, lw=1)
            name = f"{middle(row.mode, LABEL)}: {size(row.bytes_per_token)} a token"
            color = INK if row.alone is not None else ERROR
            axes.text(0, y - 0.22, name if row.alone is not None else f"{name}, NaN", va="bottom", color=color,
                      transform=axes.get_yaxis_transform())  # fmt: skip
            if row.alone is None or _kl(row) <= 0:
                continue
            kl = row.alone.kl
            if isfinite(kl.low) and isfinite(kl.high):
                axes.plot([max(kl.low, left), kl.high], [y, y], color=color_of(0), lw=4, alpha=0.35,
                          solid_capstyle="butt")  # fmt: skip
            axes.plot([kl.estimate], [y], color=color_of(0), marker="o", markersize=7)
        axes.set_ylim(len(rows) - 0.5, -0.9)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("KL beside the child with a wide cache, nats")

    beside = " The dashed line is what the weights cost: the child beside its parent." if weights else ""
    return Drawn(
        "What a cache costs",
        f"KL that each quantized KV cache adds to the child, with its interval, the smallest cache first.{beside}",
        draw(paint, (SIZE[0], 0.8 + 0.42 * len(rows))),
    )


def _kl(row: CacheRow) -> float:
    return row.alone.kl.estimate if row.alone is not None else 0.0


def _decades(axis: Any, values: np.ndarray, spell: Callable[[float], str]) -> None:
    """A logarithmic axis around positive ``values``: few labels, at decades or at 1, 2, 5 where decades are few."""
    low, high = log10(float(values.min())), log10(float(values.max()))
    spare = max(DECADES - (high - low), 0.16) / 2
    low, high = low - spare, high + spare
    steps = (1,) if high - low > 2.5 else (1, 3) if high - low > 1.5 else (1, 2, 5)
    every = max(1, -(-round(high - low) // 6))
    ticks = [m * 10.0**e for e in range(floor(low), floor(high) + 1) for m in steps if e % every == 0]
    ticks = [tick for tick in ticks if low <= log10(tick) <= high]
    vertical = axis.axis_name == "y"
    axes = axis.axes
    (axes.set_yscale if vertical else axes.set_xscale)("log")
    (axes.set_ylim if vertical else axes.set_xlim)(10**low, 10**high)
    axis.set_ticks(ticks, [spell(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def _decimal(x: float) -> str:
    """0.01; 10⁻⁵ and 3·10⁻⁵ for what is smaller."""
    exponent = floor(log10(x) + 1e-9)
    if exponent >= -3:
        return f"{x:g}"
    lead = round(x / 10.0**exponent)
    return power(exponent, 10) if lead == 1 else f"{lead}·{power(exponent, 10)}"
