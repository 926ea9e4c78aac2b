"""A plot in a file of its own: colours are real in both endings, and places that take none are refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from narrowcast.errors import StorageError, UsageError
from narrowcast.report.drawing import BAND, ERROR, FAINT, INK, SERIES, color_of
from narrowcast.report.page_style import STYLE
from narrowcast.report.plots import check_plot, write_plot

PLACEHOLDERS = (INK, FAINT, BAND, ERROR, *SERIES)


def _paint(axes: Any) -> None:
    """Every kind of artist and every placeholder."""
    axes.axvspan(1, 2, color=BAND, lw=0)
    for i in range(len(SERIES)):
        axes.plot([1, 2, 3], [i, i + 1, i + 3], color=color_of(i), marker="o")
    axes.scatter([2.5], [7.5], color=ERROR)
    axes.bar([1.2], [2], color=color_of(1), alpha=0.5)
    axes.axhline(4, color=FAINT, ls=":")
    axes.set_xscale("log")
    axes.set_xlabel("bytes")
    axes.annotate("here", (2, 3), color=INK)


def test_svg_stands_alone(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    write_plot(_paint, file, title="A title")
    text = file.read_text()
    root = ElementTree.fromstring(text)
    assert not [word for word in ("var(", "currentColor", *PLACEHOLDERS) if word in text]
    assert float(root.attrib["width"]) / float(root.attrib["height"]) == pytest.approx(5 / 3.1, rel=0.01)
    words = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert {"A title", "bytes", "here"} <= set(words)


def test_png_has_the_light_colours(tmp_path: Path) -> None:
    from matplotlib.image import imread

    file = tmp_path / "plot.PNG"
    write_plot(_paint, file)
    pixels = np.rint(imread(file, format="png")[:, :, :3] * 255).astype(int)
    assert pixels.shape[:2] == (620, 1000)
    there = {tuple(each) for each in np.unique(pixels.reshape(-1, 3), axis=0).tolist()}
    for placeholder in PLACEHOLDERS:
        assert tuple(bytes.fromhex(placeholder[1:])) not in there, placeholder
    light = dict(re.findall(r"--(\w+): (#\w{6})", STYLE.partition("@media")[0]))
    for name in ("ink", "faint", "band", "error", *(f"s{i}" for i in range(len(SERIES)))):
        assert tuple(bytes.fromhex(light[name][1:])) in there, name


def test_refusals_come_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(axes: Any) -> None:
        raise AssertionError("painted")

    with pytest.raises(UsageError, match=r"SVG or PNG"):
        write_plot(never, tmp_path / "plot.pdf")
    with pytest.raises(StorageError, match="no directory"):
        write_plot(never, tmp_path / "none" / "plot.svg")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(StorageError, match="a directory"):
        write_plot(never, tmp_path / "folder.svg")
    with pytest.raises(
        StorageError, match="cannot be written"
    ):  # whatever the user, and whatever access() says
        write_plot(_paint, "/proc/plot.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"narrowcast\[page\]"):
        check_plot(tmp_path / "plot.svg")
