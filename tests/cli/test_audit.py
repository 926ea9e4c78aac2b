"""``narrowcast audit`` and ``rules``: exit codes, the page, the record, refusals; a callable package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import narrowcast
import toys
from audit.editing import at, edit, edit_config, parent, quantized
from cli.running import Cli
from narrowcast.audit.rules import rules
from narrowcast.report.names import folded
from narrowcast.report.rules import find, rows

SCALE = "model.layers.{}.mlp.up_proj.weight_scale"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers as ``parent``, its NVFP4 as ``child``, and a ``broken`` one."""
    folder = tmp_path_factory.mktemp("models")
    quantized(folder, "nvfp4a16", layers=4)
    broken = quantized(folder, "nvfp4a16", name="broken", layers=4)
    edit(broken, {SCALE.format(i): at((3, 1), 0x7F) for i in range(4)})
    edit_config(broken, lambda config: config["quantization_config"]["ignore"].append("re:.*visual_tower.*"))
    return folder


def test_healthy_is_zero_and_says_what_was_looked_at(cli: Cli, models: Path) -> None:
    page = cli("audit", models / "child", "--select", "NC0,NC1")
    assert (page.code, page.err) == (0, "")
    text = " ".join(page.out.split())
    assert "Nothing found." in text
    assert "rules on headers, scales and codes of 28 quantized and 10 plain tensors." in text or (
        "rules on headers and scales of 28 quantized and 10 plain tensors." in text
    )
    assert "0 errors, 0 warnings, 0 info; compressed-tensors, " in text


def test_broken_is_one_and_says_each_rule_once(cli: Cli, models: Path) -> None:
    page = cli("audit", models / "broken", "--select", "NC110")
    assert page.code == 1
    lines = page.out.splitlines()
    assert "4 errors" in lines
    assert lines.count(f"NC110 nonfinite-scale: {rules()['NC110'].title} (4 findings)") == 1
    assert "  model.layers.{0-3}.mlp.up_proj.weight_scale [3, 1] (4)" in lines
    assert sum(line.startswith("  remedy: ") for line in lines) == 1
    assert lines[-1].startswith("4 errors, 0 warnings, 0 info; ") or lines[-2].startswith("4 errors, ")


@pytest.mark.parametrize(
    "more", [[], ["--quick"], ["--against", "parent"], ["--for", "vllm", "--gpu", "H100"]]
)
def test_every_page_fits(cli: Cli, models: Path, more: list[str]) -> None:
    for name in ("parent", "child", "broken"):
        page = cli("audit", models / name, *(models / word if word == "parent" else word for word in more))
        assert page.code == int(name == "broken"), page.out + page.err
        wide = [line for line in page.out.splitlines() if len(line) > 80 and str(models) not in line]
        assert wide == []
        assert "\n\n\n" not in page.out
        assert all(line == line.rstrip() for line in page.out.splitlines())


def test_three_entries_stand_for_the_rest(cli: Cli, models: Path, tmp_path: Path) -> None:
    """Findings that differ in their words are listed, three of them."""
    model = quantized(tmp_path, "nvfp4a16", layers=6)
    edit(model, {SCALE.format(i): at((i, slice(0, i + 1)), 0x7F) for i in range(6)})
    lines = cli("audit", model, "--select", "NC110").out.splitlines()
    assert "  and 3 more" in lines
    assert sum(line.startswith("  model.layers.") for line in lines) == 3


def test_silenced_and_not_run_are_counted_with_their_reason(cli: Cli, models: Path, tmp_path: Path) -> None:
    page = cli("audit", models / "broken", "--select", "NC110", "--ignore", "NC110=sent back, twice")
    assert page.code == 0
    assert "silenced: 4 of NC110 (sent back, twice)" in page.out
    settings = tmp_path / "audit.toml"
    settings.write_text(
        'select = ["NC110"]\n[[silence]]\nrule = "NC110"\ntensor = "re:model.layers.[01]"\nreason = "known"\n'
    )
    page = cli("audit", models / "broken", "--settings", settings)
    assert page.code == 1
    assert "silenced: 2 of NC110 (known)" in page.out
    assert "2 errors" in page.out.splitlines()
    quick = cli("audit", models / "broken", "--quick", "--ignore", "NC110,NC5")
    assert quick.code == 0
    assert "(--quick)" in quick.out


def test_record(cli: Cli, models: Path) -> None:
    answer = cli("audit", models / "broken", "--select", "NC110", "--json")
    assert (answer.code, answer.err) == (1, "")
    record = answer.json
    assert list(record) == [
        "schema", "verb", "model", "container", "passed", "depth", "for", "gpu", "tp", "against", "counts", "findings",
        "rules_run", "rules_skipped", "idle_silences", "quantized_share", "seconds", "bytes_read",
    ]  # fmt: skip
    assert record["counts"] == {"error": 4, "warning": 0, "info": 0, "silenced": 0}
    first = record["findings"][0]
    assert (first["rule"], first["tensor"], first["at"], first["got"]) == (
        "NC110",
        SCALE.format(0),
        [3, 1],
        "0x7F",
    )
    weights = {name: np.prod(shape) for name, shape in toys.llama_shapes(layers=4).items()}
    linear = sum(n for name, n in weights.items() if "_proj." in name)
    assert record["quantized_share"] == pytest.approx(linear / sum(weights.values()), rel=1e-12)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["none"], 2, "none"),
        (["child", "--for", "llama"], 2, "tensorrt-llm"),
        (["child", "--gpu", "H1000"], 2, "H100"),
        (["child", "--tp", "0"], 2, "tensor-parallel"),
        (["child", "--select", "NC99"], 2, "no such rule"),
        (["child", "--select", "nonfinite-scales"], 2, "nonfinite-scale"),
        (["child", "--settings", "none"], 3, "settings"),
        (["child", "--against", "none"], 2, "none"),
        (["child", "--sarif", "none/x.sarif"], 3, "cannot be written"),
    ],
)
def test_refusals(cli: Cli, models: Path, words: list[str], code: int, said: str) -> None:
    places = {name: models / name for name in ("child", "none", "none/x.sarif")}
    answer = cli("audit", *(places.get(word, word) for word in words))
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err


def test_rules_are_those_that_run(cli: Cli) -> None:
    """The table read from source is the table that runs."""
    listed = {row["code"]: row for row in cli("rules", "--json").json["rules"]}
    assert list(listed) == list(rules())
    for code, rule in rules().items():
        row = rows()[code]
        assert (row.name, row.severity, row.scope, row.reads, row.title, row.family, row.text) == (
            rule.name, rule.severity, rule.scope, rule.reads + " of both" * rule.parent, rule.title, rule.family,
            rule.text,
        )  # fmt: skip
        assert list(row.sections()) == ["What", "Why", "Fix", "False alarm"]
        assert {"what", "why", "fix", "false_alarm"} <= set(listed[code])


def test_rules_pages(cli: Cli) -> None:
    page = cli("rules")
    assert page.code == 0
    assert all(f"  {code}  {rule.name}  " in page.out for code, rule in rules().items())
    assert (
        cli("rules", "NC110").out
        == cli("rules", "nonfinite-scale").out
        == cli("rules", "nonfinite_scale").out
    )
    for code in rules():
        assert max(map(len, cli("rules", code).out.splitlines())) <= 80
    assert max(map(len, page.out.splitlines())) <= 80
    assert find("nc110").code == "NC110"
    wrong = cli("rules", "NC1100")
    assert wrong.code == 2
    assert "did you mean" in wrong.err


def test_names_fold() -> None:
    names = [f"m.{i}.e.{e}.w" for i in range(3) for e in (0, 1, 5)]
    assert folded(names) == [("m.{0-2}.e.{0-1,5}.w", 9)]
    assert folded([*names, "m.3.e.0.w"]) == [("m.{0-2}.e.{0-1,5}.w", 9), ("m.3.e.0.w", 1)]
    for alone in (
        "a",
        "fp8.x",
        "fp9.x",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
    ):
        assert folded([alone]) == [(alone, 1)]


def test_the_package_is_callable(models: Path) -> None:
    """Whatever was imported first."""
    code = (
        "import sys, narrowcast\n"
        "assert 'numpy' not in sys.modules and callable(narrowcast.audit)\n"
        f"found = narrowcast.audit({str(models / 'broken')!r}, select=['NC110'])\n"
        "import narrowcast.audit.rules as rules\n"
        "assert callable(narrowcast.audit) and rules.rules()\n"
        "print(found.passed, len(found.open_findings))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False 4\n", done.stderr
    assert not narrowcast.audit(models / "broken", select=["NC110"]).passed


def test_hostile_names_do_not_reach_the_terminal(cli: Cli, tmp_path: Path) -> None:
    model = parent(tmp_path)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": ["\x1b[31m", 128]}
    (model / "config.json").write_text(json.dumps(config))
    page = cli("audit", model)
    assert page.code == 1
    assert "\x1b" not in page.out + page.err


def test_a_silence_that_fits_nothing_is_told(cli: Cli, models: Path, tmp_path: Path) -> None:
    """A pattern is held against the beginning of a name: what it misses is not silenced without a word."""
    settings = tmp_path / "audit.toml"
    settings.write_text('[[silence]]\nrule = "NC402"\ntensor = "re:experts"\nreason = "stacked on purpose"\n')
    answer = cli("audit", models / "child", "--settings", settings, "--quick")
    assert "silences nothing: NC402 on re:experts (stacked on purpose)" in answer.out
