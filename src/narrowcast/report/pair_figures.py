"""The plots of an audit against the parent: where in the model the error is, what it is made of, and which channels
have most of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite, nan
from typing import TYPE_CHECKING

import numpy as np

from narrowcast.audit.pairs import Channel, Pair, layer_of
from narrowcast.audit.subject import Subject
from narrowcast.report.drawing import INK, SIZE, Drawn, color_of, draw, name_series, width_of
from narrowcast.report.tables import decibel, middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BARS = 10  # worst channels
KINDS = ("rounding", "clipping", "underflow")
LEAST = 4.0  # dB that the axis spans
LABEL = 46  # characters that fit above a bar


def pair_figures(subject: Subject) -> list[Drawn]:
    """Plots of the quantized matrices that were compared; none without a parent."""
    roles: dict[str, list[Pair]] = {}
    for pair in subject.pairs.values():
        if pair.coded is not None and not pair.unlike:
            roles.setdefault(pair.child.role, []).append(pair)
    drawn = []
    if any(layer_of(pair.name) is not None for pairs in roles.values() for pair in pairs):
        drawn.append(_layers(roles))
    if any(pair.errors.noise for pairs in roles.values() for pair in pairs):
        drawn.append(_kinds(roles))
    worst = _worst([pair for pairs in roles.values() for pair in pairs])
    return [*drawn, _channels(worst)] if worst else drawn


def _layers(roles: Mapping[str, Sequence[Pair]]) -> Drawn:
    lines = {role: _by_layer(pairs) for role, pairs in roles.items()}
    lines = {role: line for role, line in lines.items() if len(line)}
    expected = {role: [p.expected for p in roles[role] if isfinite(p.expected)] for role in lines}

    def paint(axes: Axes) -> None:
        for i, (role, line) in enumerate(lines.items()):
            layer, low, high = line.T
            axes.fill_between(layer, low, high, color=color_of(i), alpha=0.18, lw=0)
            axes.plot(layer, low, color=color_of(i), lw=width_of(i), marker="o" if len(layer) < 3 else "")
            if expected[role]:
                axes.axhline(float(np.median(expected[role])), color=color_of(i), lw=1, ls=(0, (4, 3)))
        axes.xaxis.get_major_locator().set_params(integer=True)
        low, high = axes.get_ylim()
        spare = (
            max(LEAST - (high - low), 0.25 * (high - low)) / 2
        )  # else a hundredth of a dB looks like a cliff
        axes.set_ylim(low - spare, high + spare)
        axes.set_xlabel("layer")
        axes.set_ylabel("SQNR, dB")
        name_series(axes, list(lines), np.zeros(3))

    return Drawn(
        "Error by layer and role",
        "SQNR is signal over quantization noise; 6 dB are one bit, higher is better. The line is the worst matrix of "
        "each layer, shaded up to the best. Dashed: what the scheme keeps of such data (median).",
        draw(paint),
    )


def _by_layer(pairs: Sequence[Pair]) -> np.ndarray:
    """Layer, worst and best dB of its matrices [layers, 3]."""
    found: dict[int, list[float]] = {}
    for pair in pairs:
        layer = layer_of(pair.name)
        if layer is not None and isfinite(pair.sqnr):
            found.setdefault(layer, []).append(pair.sqnr)
    return np.array([(layer, min(levels), max(levels)) for layer, levels in sorted(found.items())]).reshape(
        -1, 3
    )


def _share(part: float) -> str:
    return "<0.01" if 0 < part < 0.01 else f"{part:.3g}"


def _kinds(roles: Mapping[str, Sequence[Pair]]) -> Drawn:
    """Energies of the error by kind, each role's as shares of its own."""
    energies = {
        role: np.array([(p.rounding + p.beyond, p.clipping, p.underflow) for p in pairs]).sum(0)
        for role, pairs in roles.items()
    }
    shares = {role: 100 * parts / parts.sum() for role, parts in energies.items() if parts.sum()}

    def paint(axes: Axes) -> None:
        left = np.zeros(len(shares))
        for i in range(len(KINDS)):
            widths = np.array([parts[i] for parts in shares.values()])
            axes.barh(range(len(shares)), widths, left=left, height=0.5, color=color_of(i), lw=0)
            left += widths
        for y, (role, parts) in enumerate(shares.items()):
            axes.text(0, y - 0.32, f"{role}: {' + '.join(map(_share, parts))} %", va="bottom")
        for i, kind in enumerate(KINDS):
            axes.text(36 * i, -1.2, kind, color=color_of(i), weight="bold", va="bottom")
        axes.set_ylim(len(shares) - 0.4, -1.5)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the squared error, %")

    return Drawn(
        "What the error is made of",
        "Shares of rounding, clipping and underflow. Rounding is what the format costs; clipping and underflow are "
        "values beyond its ends, which a scale decides.",
        draw(paint, (SIZE[0], 0.9 + 0.5 * (len(shares) + 1))),
    )


def _worst(pairs: Sequence[Pair]) -> list[tuple[float, str, Channel]]:
    """Channels farthest below the median channel of their matrix: dB below, name with row or column, channel."""
    found = []
    for pair in pairs:
        for axis, channels, median in zip(
            ("row", "column"), (pair.rows, pair.columns), pair.median, strict=True
        ):
            for channel in channels:
                below = median - channel.sqnr if isfinite(median) and channel.sqnr > -inf else nan
                if below > 0:
                    found.append((below, f"{pair.name} {axis} {channel.index}", channel))
    return sorted(found, key=lambda one: -one[0])[:BARS]


def _channels(worst: Sequence[tuple[float, str, Channel]]) -> Drawn:
    def paint(axes: Axes) -> None:
        places = range(len(worst))
        axes.barh(places, [below for below, _, _ in worst], height=0.3, color=color_of(0), lw=0)
        for y, (_, name, channel) in enumerate(worst):
            axes.text(
                0, y - 0.2, f"{middle(name, LABEL)}, {decibel(channel.sqnr)} dB", va="bottom", color=INK
            )
        axes.set_ylim(len(worst) - 0.5, -0.9)
        axes.set_yticks([])
        axes.set_xlabel("dB below the median channel of the matrix")
        axes.spines["left"].set_visible(False)

    return Drawn(
        "Worst channels",
        "Rows and columns whose SQNR is farthest below that of their matrix's median channel.",
        draw(paint, (SIZE[0], 0.8 + 0.42 * len(worst))),
    )
