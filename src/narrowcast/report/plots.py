"""One plot in a file of its own, SVG or PNG by the name's ending: ``write_plot``.

The same ``paint`` fills a drawing of a page and a file. A page lends its colours to a drawing and shows it dark as well
as light; a file has to bring colours that are real, so the light ones are set in, on a white ground. Text in an SVG
stays text.

Left out: endings that matplotlib could write too (PDF, JPEG). SVG prints, and PNG goes where SVG cannot.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from narrowcast.errors import StorageError, UsageError
from narrowcast.report.drawing import BAND, ERROR, FAINT, INK, SERIES, SIZE, check_library, draw, style
from narrowcast.report.page_style import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Paint = Callable[["Axes"], None]
ENDINGS = (".svg", ".png")
DPI = 200


def check_plot(file: str | Path) -> None:
    """Refuse, before any work, a file that could not be written afterwards: UsageError for another ending or without
    the library that draws, StorageError for a place that takes no file. A file that is there is replaced, as reports
    are."""
    path = Path(file)
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(
            "a plot is written as SVG or PNG", got=path, wanted=f"a name with {' or '.join(ENDINGS)}"
        )
    folder = path.absolute().parent
    got = None
    if path.is_dir():
        got = "a directory"
    elif not folder.is_dir():
        got = f"no directory {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        got = "no right to write there"
    if got is not None:
        raise StorageError("the plot cannot be written", where=path, got=got)
    check_library()


def write_plot(
    paint: Paint, file: str | Path, *, inches: tuple[float, float] = SIZE, title: str = ""
) -> None:
    """Draw with ``paint``, which fills matplotlib axes in the placeholder colours of ``drawing``, into ``file``.

    ``inches`` is the drawing's width and height, ``title`` a line above it (a page has titles of its own). SVG comes
    from the same code as a page's drawing; PNG is rendered at 200 pixels an inch. UsageError as ``check_plot``;
    StorageError when the disk takes no more.
    """
    check_plot(file)
    path = Path(file)

    def titled(axes: Axes) -> None:
        paint(axes)
        if title:
            axes.set_title(title, loc="left", weight="bold", fontsize=10)

    with style():
        content = _png(titled, inches) if path.suffix.lower() == ".png" else _svg(titled, inches).encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise StorageError("the plot cannot be written", where=path, got=error.strerror) from None


@cache
def _named() -> dict[str, str]:
    """The light colours of pages by name."""
    return dict(re.findall(r"--(\w+): (#\w+)", STYLE.partition("@media")[0]))


def _svg(paint: Paint, inches: tuple[float, float]) -> str:
    """The page's drawing with colours in the place of the page's variables, and a size and a ground of its own."""
    text, named = draw(paint, inches), _named()
    for name, color in named.items():
        text = text.replace(f"var(--{name})", color)
    width, height = (round(96 * side) for side in inches)
    opening = f'<svg width="{width}" height="{height}" font-family="system-ui, sans-serif"'
    text = text.replace("currentColor", named["ink"]).replace("<svg", opening, 1)
    ground = f'<rect width="100%" height="100%" fill="{named["bg"]}"/>'
    return re.sub(r"(<svg[^>]*>)", rf"\1\n{ground}", text, count=1) + "\n"


def _png(paint: Paint, inches: tuple[float, float]) -> bytes:
    """The drawing as pixels."""
    from matplotlib.figure import Figure

    figure = Figure(inches, layout="constrained")
    paint(figure.add_subplot())
    figure.draw_without_rendering()  # ticks come into being here
    named = _named()
    colors = {INK: "ink", FAINT: "faint", BAND: "band", ERROR: "error"} | {
        placeholder: f"s{i}" for i, placeholder in enumerate(SERIES)
    }
    _recolor(figure, {placeholder: named[name] for placeholder, name in colors.items()})
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI, facecolor=named["bg"], metadata={"Software": None})
    return content.getvalue()


def _recolor(figure: Figure, colors: Mapping[str, str]) -> None:
    """Give every artist the real colours in the place of the placeholders, alphas kept."""
    from matplotlib.colors import to_rgb, to_rgba_array

    for artist in figure.findobj():
        for name in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            get, put = (getattr(artist, f"{verb}_{name}", None) for verb in ("get", "set"))
            if get is None or put is None:
                continue
            found = to_rgba_array(get())
            changed = found.copy()
            for placeholder, color in colors.items():
                changed[np.isclose(found[:, :3], to_rgb(placeholder)).all(1), :3] = to_rgb(color)
            if (changed != found).any():
                put(changed if len(changed) > 1 else tuple(changed[0]))
