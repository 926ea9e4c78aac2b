"""``narrowcast engines``: all, one with names and kernels, two side by side, a name in each; on 80 columns."""

from __future__ import annotations

import pytest

from cli.running import Cli
from narrowcast.hardware import names
from narrowcast.hardware.engines import ENGINES

PAGES = [
    [],
    *([engine] for engine in ENGINES),
    ["vllm", "sglang"],
    ["fp8"],
    ["nvfp4", "mxfp8"],
    ["vllm", "auto"],
]


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_pages_fit(cli: Cli, words: list[str]) -> None:
    page = cli("engines", *words)
    assert page.code == 0, page.err
    lines = page.out.splitlines()
    assert [line for line in lines if len(line) > 80 or line != line.rstrip()] == []
    assert "\n\n\n" not in page.out


def test_all_say_how_much_is_known(cli: Cli) -> None:
    lines = {line[0]: line for line in cli("engines").lines if line}
    assert lines["vllm"][1:] == ["0.32.0", "9", "30", "22", "45"]
    assert [engine["name"] for engine in cli("engines", "--json").json["engines"]] == list(ENGINES)


def test_one_engine_has_all_its_names(cli: Cli) -> None:
    page = cli("engines", "vllm")
    for row in names.rows("vllm"):
        assert any(line[:1] == [row.name] for line in page.lines), row.name
    assert "0.33.0" in page.out
    record = cli("engines", "vllm", "--json").json["engine"]
    assert len(record["rows"]) == len(names.rows("vllm"))
    assert {"weights": "fp8_block128 (fp8_group) +1"}.items() <= next(
        each for each in record["families"] if "CutlassFp8Block" in each["kernels"]
    ).items()


def test_a_name_means_what_it_means_in_each_engine(cli: Cli) -> None:
    page = cli("engines", "fp8")
    for title in ("vLLM 0.32.0: --quantization fp8", "vLLM 0.32.0: --kv-cache-dtype fp8", "SGLang 0.5.23: "):
        assert title in page.out
    assert "fp8_per_tensor, with a warning" in " ".join(page.out.split())
    only = cli("engines", "SGLang", "FP8", "--json").json["names"]
    assert [(row["engine"], row["name"], row["flag"]) for row in only] == [
        ("sglang", "fp8", "--quantization")
    ]


def test_two_engines_side_by_side(cli: Cli) -> None:
    page = cli("engines", "sglang", "vllm").out
    assert "  vLLM    --quantization fp8_per_channel\n  SGLang  --quantization fp8 (or w8a8_fp8)\n" in page
    rows = cli("engines", "vllm", "sglang", "--json").json["factorings"]
    assert next(row for row in rows if "GGUF" in row["what"])["vllm"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fp8_per_tensr"], "fp8_per_tensor"),
        (["vlm"], "vllm"),
        (["sglang", "turboquant_k8v4"], "no such name in SGLang"),
        (["vllm", "transformers"], "vllm sglang"),
    ],
)
def test_what_is_not_known_is_a_usage_error(cli: Cli, words: list[str], said: str) -> None:
    page = cli("engines", *words)
    assert page.code == 2
    assert said in page.err
