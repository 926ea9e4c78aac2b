"""The HTML page: whole in itself, escaped, small, and what it draws is what was counted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import narrowcast
from audit.editing import at, edit, parent, quantized
from audit.test_rules import CASES
from narrowcast.cli import main
from narrowcast.hardware.gpus import gpus
from narrowcast.report.audit import Spent, audit_page, audit_record
from narrowcast.report.audit_page import html_page
from narrowcast.report.drawing import power
from narrowcast.report.figures import _spread
from narrowcast.report.page_style import SCRIPT
from narrowcast.report.records import record
from narrowcast.report.sarif import sarif_text
from narrowcast.report.tables import size
from narrowcast.serving.loading import load
from narrowcast.serving.memory import memory
from narrowcast.serving.question import Question
from report.pages import check_whole

SCALE = "model.layers.{}.mlp.up_proj.weight_scale"
SCHEMA = json.loads((Path(__file__).parent / "sarif" / "sarif-schema-2.1.0.json").read_text())


@pytest.mark.parametrize("preset", ["nvfp4a16", "fp8_dynamic", "w4a16_asym"])
def test_page_is_whole_and_small(tmp_path: Path, preset: str) -> None:
    model = quantized(tmp_path, preset)
    found = narrowcast.audit(model, against=parent(tmp_path))
    page = html_page(found, Spent(1.0, 10**6))
    read = check_whole(page)
    assert len(page.encode()) < 1_500_000
    titles = [
        words
        for words in read.words
        if ": codes" in words or ": scales" in words or "Error by layer" in words
    ]
    assert len(titles) >= 3
    assert sum(tag == "svg" for tag, _ in read.tags) >= 5
    assert not re.search(r"#0[a0]0\d0\d", page)  # placeholders of colours
    assert "prefers-color-scheme: dark" in page


def test_findings_are_there_once_each_and_folded(tmp_path: Path) -> None:
    model = quantized(tmp_path, "nvfp4a16", layers=3)
    edit(model, {SCALE.format(i): at((3, 1), 0x7F) for i in range(3)})
    out = tmp_path / "page.html"
    assert main(["audit", str(model), "--html", str(out), "-q"]) == 1
    read = check_whole(out.read_text())
    rules = [attributes for tag, attributes in read.tags if tag == "details"]
    assert sum("error" in str(attributes["class"]) for attributes in rules) == 1
    assert [words for words in read.words if "mlp.up_proj.weight_scale" in words] == [
        "model.layers.{0-2}.mlp.up_proj.weight_scale [3, 1] (3)"
    ]


def test_what_files_say_is_escaped(tmp_path: Path) -> None:
    model = parent(tmp_path)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "<script>alert(1)</script>", "config_groups": {},
        "ignore": ["<img src=x onerror=alert(2)>"],
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    page = html_page(narrowcast.audit(model), Spent(1.0, 0))
    read = check_whole(page)
    assert page.count("<script>") == 1
    assert page.count(SCRIPT) == 1
    assert not [tag for tag, _ in read.tags if tag == "img"]


def test_a_checkpoint_without_anything_to_draw(tmp_path: Path) -> None:
    """Nothing quantized, or nothing that a container reads."""
    page = html_page(narrowcast.audit(parent(tmp_path)), Spent(1.0, 0))
    assert "<svg" not in page
    check_whole(page)
    file = parent(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    check_whole(html_page(narrowcast.audit(parent(tmp_path)), Spent(1.0, 0)))


def test_no_library_is_said_before_the_work(tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None\nfrom narrowcast.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = ["audit", str(parent(tmp_path)), "--html", str(tmp_path / "x.html")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'narrowcast[page]'" in done.stderr
    assert not (tmp_path / "x.html").exists()


def test_only_the_page_needs_the_library(tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None\nfrom narrowcast.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = ["audit", str(parent(tmp_path)), "--sarif", str(tmp_path / "x.sarif"), "--quick"]
    assert (
        subprocess.run([sys.executable, "-c", code, *words], capture_output=True, timeout=120).returncode == 0
    )
    assert (tmp_path / "x.sarif").exists()


def test_magnitudes_are_spread_over_binades() -> None:
    """Codes 1 and 3 (log2 1.58), half each, under scales in [2^-2, 2^-1): a scale is anywhere in its binade, so that
    3 lies in [2^-1, 1) with what is missing to the next power of two, and in [1, 2) with the rest."""
    scales = np.zeros(320)
    scales[160 - 2] = 1
    found = _spread(np.array([0.5, 0.5]), np.log2([1.0, 3.0]), scales)
    above = np.log2(3) - 1
    wanted = np.zeros(320)
    wanted[158], wanted[159], wanted[160] = 0.5, 0.5 * (1 - above), 0.5 * above
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2**-50)


def test_powers_are_spelled() -> None:
    assert [power(x) for x in (-9, 0, 12)] == ["2⁻⁹", "2⁰", "2¹²"]


@pytest.mark.slow
@pytest.mark.parametrize("code", CASES)
def test_reports_of_every_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Whatever a rule says: the page fits a terminal, SARIF is valid, the record is JSON, HTML is whole."""
    monkeypatch.setenv("COLUMNS", "80")
    ask = CASES[code].fires(tmp_path)
    found, spent = narrowcast.audit(ask.model, **ask.options), Spent(1.0, 10**6)
    page = audit_page(found, spent)
    assert [line for line in page if len(line) > 80 and str(ask.model.parent) not in line] == []
    severities = {one.severity for one in found.findings if one.rule == code}
    assert sum(line.startswith((f"{code} ", f"  {code} ")) for line in page) <= max(len(severities), 1)
    jsonschema.Draft4Validator(SCHEMA).validate(json.loads(sarif_text(found)))
    told = {one["rule"] for one in json.loads(record("audit", audit_record(found, spent)))["findings"]}
    assert code in told or (code == "NC001" and told)  # which gives way to what explains it better
    check_whole(html_page(found, spent))


def test_what_fills_the_gpu(tmp_path: Path) -> None:
    """Bars of the plan's memory where a GPU was asked for; none without one, or where no plan can be made."""
    model = quantized(tmp_path, "fp8_dynamic")
    title, spent = "<b>What fills the GPU</b>", Spent(1.0, 0)
    page = html_page(narrowcast.audit(model, engine="vllm", gpu="l4", tp=2), spent)
    counted = memory(load(str(model)), Question(gpus["l4"], tp=2))
    assert page.count(title) == 1
    assert f"as it is: weights {size(counted.total)}" in page
    assert "on each of 2 l4" in page
    check_whole(page)
    assert title not in html_page(narrowcast.audit(model), spent)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["config_groups"] = {"group_0": "nothing"}
    (model / "config.json").write_text(json.dumps(config))
    assert title not in html_page(narrowcast.audit(model, gpu="l4"), spent)
