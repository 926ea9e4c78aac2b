"""``narrowcast vectors``: files, page, record, refusals."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from cli.running import Cli
from narrowcast.tensors.presets import presets
from narrowcast.tensors.schemes import schemes


def test_writes_two_files_and_says_so(cli: Cli, tmp_path: Path) -> None:
    answer = cli("vectors", "NVFP4", "--shape", "4x8x64", "--out", tmp_path / "new", "--json").json
    assert (answer["weight"], answer["input"], answer["accumulate"]) == ("nvfp4", "nvfp4", "fp32")
    assert answer["shape"] == {"M": 4, "N": 8, "K": 64}
    paths = [Path(file["path"]) for file in answer["files"]]
    assert [path.name for path in paths] == ["nvfp4_4x8x64.npz", "nvfp4_4x8x64.h"]
    for file, path in zip(answer["files"], paths, strict=True):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]
    arrays = np.load(paths[0])
    assert list(arrays) == list(answer["arrays"])
    for name, told in answer["arrays"].items():
        assert (str(arrays[name].dtype), list(arrays[name].shape)) == (told["dtype"], told["shape"])
        assert f"nvfp4_4x8x64_{name}[" in paths[1].read_text()


def test_a_scheme_takes_an_input_and_a_seed(cli: Cli, tmp_path: Path) -> None:
    words = ["vectors", "int4_g128", "--shape", "2x3x256", "--out", tmp_path, "--json"]
    assert cli(*words).json["input"] is None
    answer = cli(*words, "--input", "int8_token", "--seed", "7").json
    assert (answer["input"], answer["accumulate"], answer["seed"]) == ("int8_token", "int32", 7)
    assert answer["files"][0]["path"].endswith("int4_g128_int8_token_2x3x256_seed7.npz")


@pytest.mark.parametrize("name", [*schemes, *presets])
def test_page_fits(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    page = cli("vectors", name, "--shape", "2x3x160")
    assert page.code == 0, page.err
    assert [line for line in page.out.splitlines() if len(line) > 80] == []
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nvfp4"], 2, "--shape"),
        (["nvfp4", "--shape", "4x8"], 2, "MxNxK"),
        (["nvfp4", "--shape", "0x8x8"], 2, "not a shape"),
        (["nvfp4", "--shape", "4096x4096x4096"], 2, "too many elements"),
        (["fp9", "--shape", "4x8x64"], 2, "no scheme and no preset"),
        (["fp8_dynamic", "--shape", "4x8x64", "--input", "fp8_token"], 2, "the preset brings"),
        (["nvfp4", "--shape", "4x8x64", "--seed", "-1"], 2, "not a count"),
        (["nvfp4", "--shape", "4x8x64", "--out", "/proc/none"], 3, "/proc/none"),
    ],
)
def test_refusals(cli: Cli, words: list[str], code: int, said: str) -> None:
    answer = cli("vectors", *words)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
