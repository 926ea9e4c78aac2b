"""Every page fits 80 columns, and narrower or wider terminals are used as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

import toys
from cli.running import Cli
from narrowcast.arguments import VERBS
from narrowcast.numbers.formats import formats
from narrowcast.tensors.presets import presets
from narrowcast.tensors.schemes import schemes

PAGES: list[list[str]] = [
    ["--help"],
    *([verb, "--help"] for verb in VERBS),
    ["formats"],
    *(["formats", name] for name in formats),
    *(["formats", name, "--value", value] for name in formats for value in ("0.3", "-1e30", "inf", "nan")),
    ["formats", "e5m2:bias=10,nosubnormals"],
    ["formats", "--value", "0.1"],
    ["formats", "--value", "-1e300"],
    ["formats", "--bits", "10000000"],
    ["formats", "--bits", "0x8000000000000001"],
    ["formats", "--row", "0.02 -0.5 1.3e-5 7.9 400", "--scheme", ",".join(schemes), "--span", "127,127.5"],
    ["schemes"],
    *(["schemes", name, "--shape", "128x28672x14336"] for name in schemes),
    ["presets"],
    *(["presets", name] for name in presets),
    ["roundtrip", "randn:4x512", "--formats", ",".join(formats), "--schemes", ",".join(schemes)],
    ["roundtrip", "laplace:4x512", "--schemes", ",".join(schemes), "--rule", "bump(1.8125),four_over_six"],
    ["roundtrip", "student5:4x512", "--schemes", "int8_channel,uint4_channel", "--span", "7,127.125"],
]  # fmt: skip


@pytest.mark.parametrize("words", PAGES, ids=[" ".join(words)[:60] for words in PAGES])
def test_page(cli: Cli, words: list[str]) -> None:
    page = cli(*words)
    assert page.code == 0, page.err
    wide = [line for line in page.out.splitlines() if len(line) > 80]
    assert wide == []
    assert page.out.endswith("\n")
    assert not page.out.endswith("\n\n")
    assert "\n\n\n" not in page.out
    assert all(line == line.rstrip() for line in page.out.splitlines())


@pytest.mark.parametrize("name", ["w4a16_asym", "nvfp4a16"])
def test_pages_of_jobs(cli: Cli, tmp_path: Path, name: str) -> None:
    """Names longer than a terminal lose their middle; paths of the user's own are shown whole."""
    deep = "model.language_model.layers.0.a_rather_long_name_for_a_block"
    shapes = {f"{deep}.mlp.{part}.weight": (192, 192) for part in ("gate_proj", "up_proj", "down_proj")}
    model = toys.write(tmp_path / "m", toys.weights(shapes), toys.llama_config())
    for words in (
        ["inspect", model],
        ["quantize", model, tmp_path / "o", "--preset", name, "--dry-run", "--ignore", "re:.*up_proj|.*gate_proj"],
        ["quantize", model, tmp_path / "o", "--preset", name],
        ["inspect", tmp_path / "o"],
    ):  # fmt: skip
        page = cli(*words)
        assert page.code == 0, page.err
        assert [line for line in page.out.splitlines() if len(line) > 80 and str(tmp_path) not in line] == []
        assert "\n\n\n" not in page.out


def test_a_wider_terminal_is_used(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = cli("formats").out
    monkeypatch.setenv("COLUMNS", "120")
    wide = cli("formats").out
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines())) <= 120
