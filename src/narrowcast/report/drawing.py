"""How plots are drawn: SVG with text as text, in the page's own colours, no pixel and no font inside.

Colours are placeholders while matplotlib draws and variables of the page afterwards, so that one drawing serves light
and dark. A drawing is as wide as a phone; series are told apart by colour-blind people (Okabe and Ito), carry their
names in their colours, and have the largest on top of the list.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (5.0, 3.1)  # inches of 72 points: 360 across
INK, FAINT, BAND, ERROR = "#010203", "#040506", "#070809", "#0b0c0d"
SERIES = tuple(f"#0a000{i}" for i in range(6))
_VARIABLES = {INK: "currentColor", FAINT: "var(--faint)", BAND: "var(--band)", ERROR: "var(--error)"} | {
    color: f"var(--s{i})" for i, color in enumerate(SERIES)
}
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "narrowcast", "font.size": 10, "text.color": INK,
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "xtick.color": FAINT, "ytick.color": FAINT,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "lines.linewidth": 1.8, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
}  # fmt: skip
_CLEAN: tuple[tuple[str, str], ...] = (
    (r"^.*?(?=<svg)", ""),  # the prolog names a DTD
    (r"<metadata>.*?</metadata>", ""),
    (r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1"),  # as wide as the page lets it be
    (r"font-family: [^;]*; ?", ""),
    (r' transform="rotate\(-0 [^"]*\)"', ""),
    (r' id="(?!m|p|C)[^"]*"', ""),  # ids that nothing refers to
    (r' id="(patch|matplotlib|Poly)[^"]*"', ""),
    (r"\s*\n\s*", "\n"),
)


@dataclass(frozen=True)
class Drawn:
    """One plot, and what it shows in words."""

    title: str
    caption: str
    svg: str


def check_library() -> None:
    """UsageError where the library for plots is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("plots need matplotlib", remedy="pip install 'narrowcast[page]'") from None


@contextmanager
def style() -> Iterator[None]:
    """The look of every drawing made inside."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def draw(paint: Callable[[Axes], None], inches: tuple[float, float] = SIZE) -> str:
    """One drawing as SVG text; ``paint`` fills its axes."""
    from matplotlib.figure import Figure

    figure = Figure(inches, layout="constrained")
    axes = figure.add_subplot()
    paint(axes)
    content = io.StringIO()
    figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    text = content.getvalue()
    for pattern, instead in _CLEAN:
        text = re.sub(pattern, instead, text, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    return text.strip()


def color_of(i: int) -> str:
    """The colour of series ``i``; beyond the palette all are faint."""
    return SERIES[i] if i < len(SERIES) else FAINT


def width_of(i: int) -> float:
    """Later series are thinner, so that an equal one below stays seen."""
    return max(2.8 - 0.7 * i, 1.0)


def name_series(axes: Axes, names: Sequence[str], heights: NDArray[Any]) -> None:
    """The series' names in their colours, at the top of that third of the axes where the curves are lowest."""
    thirds = [float(part.max(initial=0)) for part in np.array_split(heights, 3)]
    place = min((0, 2, 1), key=thirds.__getitem__)
    at, side = (0.02, 0.5, 0.98)[place], ("left", "center", "right")[place]
    for i, name in enumerate(names):
        axes.text(
            at,
            0.97 - 0.075 * i,
            name,
            color=color_of(i),
            transform=axes.transAxes,
            ha=side,
            va="top",
            weight="bold",
        )


def power(exponent: int, base: int = 2) -> str:
    """2⁻⁹."""
    return str(base) + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
