"""``narrowcast schemes`` and ``narrowcast presets``: counts derived by hand, every row, every refusal."""

from __future__ import annotations

from math import ceil

import pytest

from cli.running import Cli
from narrowcast.tensors.presets import presets
from narrowcast.tensors.schemes import schemes

N, K = 4096, 14336


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("fp8_tensor", [1]),
        ("fp8_channel", [N]),
        ("fp8_group128", [N * ceil(K / 128)]),
        ("fp8_block128", [ceil(N / 128) * ceil(K / 128)]),
        ("nvfp4", [N * ceil(K / 16), 1]),
    ],
)
def test_scale_counts(cli: Cli, name: str, counts: list[int]) -> None:
    """Seeds row 37."""
    scales = cli("schemes", name, "--shape", f"{N}x{K}", "--json").json["scheme"]["scales"]
    assert [scale["count"] for scale in scales] == counts


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("int4_g128", 4 + 16 / 128),
        ("mxfp4", 4 + 8 / 32),
        ("mxfp8", 8 + 8 / 32),
        ("nvfp4", 4 + 8 / 16 + 32 / (N * K)),
        ("uint4_g128", 4 + (16 + 4) / 128),
    ],
)
def test_bits_per_weight(cli: Cli, name: str, bits: float) -> None:
    """Seeds rows 29 and 30, with the tensor scale of NVFP4 counted as well."""
    answer = cli("schemes", name, "--shape", f"{N}x{K}", "--json").json["scheme"]
    assert answer["bits_per_weight"] == bits
    assert answer["bytes"] * 8 == round(bits * N * K)


def test_partial_tiles_count_as_whole_ones(cli: Cli) -> None:
    """576 rows in five 128-row blocks."""
    scales = cli("schemes", "fp8_block128", "--shape", "576x576", "--json").json["scheme"]["scales"]
    assert scales[0]["count"] == 25


def test_leading_axes_have_tiles_of_their_own(cli: Cli) -> None:
    scales = cli("schemes", "fp8_tensor", "--shape", "128x2880x2880", "--json").json["scheme"]["scales"]
    assert scales[0]["count"] == 128


def test_group_shapes_are_vllms(cli: Cli) -> None:
    found = {}
    for row in cli("schemes", "--json").json["schemes"]:
        found[row["name"]] = row["scales"][0]["group_shape"]
    assert found["fp8_tensor"] == [-1, -1]
    assert found["fp8_channel"] == [-1, 1]
    assert found["mxfp4"] == [1, 32]
    assert found["fp8_block128"] == [128, 128]


@pytest.mark.parametrize("name", list(schemes))
def test_page_of_every_scheme(cli: Cli, name: str) -> None:
    page = cli("schemes", name, "--shape", "576x1536")
    assert page.code == 0
    words = " ".join(page.out.split())
    assert schemes[name].loads in words
    assert schemes[name].source in words


@pytest.mark.parametrize("name", [*presets, "fp8_dynamic+kv8", "FP8_DYNAMIC", "W4A16", "NVFP4A16"])
def test_page_of_every_preset(cli: Cli, name: str) -> None:
    page = cli("presets", name)
    assert page.code == 0
    assert page.out.splitlines()[0] == presets[name].name
    assert presets[name].linear.weight.name in page.out


def test_tables_have_one_line_for_each_row(cli: Cli) -> None:
    assert [w[0] for w in cli("schemes").lines if w and w[0] in schemes] == list(schemes)
    assert [w[0] for w in cli("presets").lines if w and w[0] in presets] == list(presets)
    assert [row["name"] for row in cli("presets", "--json").json["presets"]] == list(presets)


def test_calibrated_presets_name_the_nearest(cli: Cli) -> None:
    rows = {row["name"]: row for row in cli("presets", "--json").json["presets"]}
    assert {name for name, row in rows.items() if row["calibrated"]} == {"fp8", "nvfp4"}
    assert rows["nvfp4"]["nearest"] == "nvfp4a16"
    assert "nvfp4a16 instead of nvfp4" in " ".join(cli("presets").out.split())


REFUSED = [
    (("schemes", "nvfp5"), "unknown scheme", "did you mean nvfp4"),
    (("presets", "w4a61"), "unknown preset", "did you mean w4a16"),
    (("presets", "fp8+kv9"), "unknown KV cache suffix", "+kv8"),
    (("schemes", "nvfp4", "--shape", "12"), "not a shape", "4096x14336"),
    (("schemes", "nvfp4", "--shape", "0x12"), "not a shape", "4096x14336"),
    (("presets", "w4a16", "--shape", "axb"), "not a shape", "4096x14336"),
]


@pytest.mark.parametrize(("asked", "problem", "hint"), REFUSED)
def test_refusals(cli: Cli, asked: tuple[str, ...], problem: str, hint: str) -> None:
    answer = cli(*asked)
    assert (answer.code, answer.out) == (2, "")
    assert problem in answer.err
    assert hint in answer.err
