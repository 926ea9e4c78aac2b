"""Figures of formats show what the formats are: values typed from the OCP specifications, counted in what is drawn."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from narrowcast.cli import main
from narrowcast.errors import UsageError
from narrowcast.numbers.formats import formats
from narrowcast.report import format_figures as figures
from narrowcast.report import legal_figure as legal
from narrowcast.tensors.schemes import schemes


def drawn(paint):
    """The axes that a figure fills."""
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    paint(axes)
    return axes


def test_magnitudes_of_e2m1():
    assert figures.magnitudes(formats["e2m1"]).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_ruler_shades_where_int8_and_e4m3_have_one_step():
    """E4M3's step is 1 in [8, 16) and 0.5 in [4, 8) (seeds row 21); INT8's is 1 everywhere."""
    axes = drawn(lambda a: figures.paint_ruler(a, [formats["int8"], formats["e4m3fn"]]))
    (band,) = axes.patches
    assert (band.get_x(), band.get_x() + band.get_width()) == (8, 16)
    ticks = [len(lines.get_segments()) for lines in axes.collections]
    assert ticks[0] == 17
    # 8 subnormals and zero make 8 values below 2^-6; then 8 for each binade up to 16, and 16 itself
    assert ticks[1] == 8 + 8 * 10 + 1


def test_ranges_begin_at_the_smallest_subnormal_and_end_at_the_largest_value():
    axes = drawn(lambda a: figures.paint_ranges(a, [formats["fp16"], formats["e4m3fn"]]))
    faint, full, faint8, full8 = axes.patches
    assert (faint.get_x(), full.get_x()) == (-24, -14)
    assert full.get_x() + full.get_width() == pytest.approx(np.log2(65504))
    assert (faint8.get_x(), full8.get_x()) == (-9, -6)
    assert full8.get_x() + full8.get_width() == pytest.approx(np.log2(448))


def test_layouts_have_as_many_scales_as_32_elements_need():
    axes = drawn(lambda a: figures.paint_layouts(a, [schemes["mxfp4"], schemes["nvfp4"]]))
    widths = [round(patch.get_width() + 0.12) for patch in axes.patches]
    assert widths == [32, *[1] * 32, 32, 16, 16, *[1] * 32]
    said = [text.get_text() for text in axes.texts]
    assert "mxfp4: 4.25 bits per element" in said
    assert "nvfp4: 4.5 bits per element" in said


def test_legal_keeps_the_order_of_computation_and_signs_every_dtype():
    cells = [
        (SimpleNamespace(operation=operation, dtype=dtype), reading)
        for operation, dtype, reading in (
            ("logits", "e4m3", "keep wide"), ("linear weights", "fp8_channel", "like fp8"),
            ("residual", "bf16", "free"),
        )
    ]  # fmt: skip
    assert [row[0] for row in legal.rows_of(cells)] == ["residual", "linear weights", "logits"]
    said = [text.get_text() for text in drawn(lambda a: legal.paint_legal(a, cells)).texts]
    assert [text for text in said if text[:2] in ("+ ", "~ ", "x ")][:3] == ["+ bf16", "~ fp8", "x e4m3"]


def test_every_operation_that_is_measured_has_a_place_in_the_figure():
    from narrowcast.studies import legal_variants as study

    named = {study.WEIGHTS, study.INPUTS, study.ACCUMULATORS, study.KV, *(row[0] for row in study.OUTPUTS)}
    assert named == {operation for operation, _ in legal.FLOW}


@pytest.mark.parametrize(
    "words", [["formats"], ["formats", "e4m3fn"], ["formats", "int4"], ["schemes"], ["schemes", "nvfp4"]]
)
def test_verbs_write_the_file(words, tmp_path: Path, capsys):
    file = tmp_path / "figure.svg"
    assert main([*words, "--plot", str(file)]) == 0
    text = file.read_text()
    assert "<svg" in text
    assert re.search(r"<text", text)
    assert capsys.readouterr().out


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, capsys):
    with pytest.raises(UsageError, match="too many values"):
        figures.plot_formats("fp32", str(tmp_path / "a.svg"))
    assert main(["formats", "--value", "3", "--plot", str(tmp_path / "a.svg")]) == 2
    assert main(["formats", "--plot", str(tmp_path / "a.pdf")]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
