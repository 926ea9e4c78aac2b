"""The face of convert: pages, JSON, exit codes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import toys
from narrowcast.cli import main
from narrowcast.jobs.quantize import quantize


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    model = toys.llama(tmp_path / "m", inner=256, layers=1)
    quantize(model, tmp_path / "fp8", "fp8_block")
    return tmp_path / "fp8"


def test_to_plain_says_what_was_decoded(
    fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(fp8), str(tmp_path / "out"), "--to", "plain", "--quiet"]) == 0
    page = capsys.readouterr().out
    assert "decoded" in page
    assert "fp8_block128" in page
    assert all(len(line) <= 80 for line in page.splitlines() if str(tmp_path) not in line)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_second_rounding_is_refused_until_it_is_asked_for(
    fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(fp8), str(tmp_path / "out"), "--to", "compressed-tensors", "--preset", "nvfp4a16"]
    assert main(words) == 2
    assert "--requantize" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*words, "--requantize", "--json", "--parent", str(tmp_path / "m")]) == 0
    said = json.loads(capsys.readouterr().out)
    loss = said["second_rounding"]["mlp"]
    assert loss["first"] > loss["second"]  # FP8 loses less than FP4
    assert loss["both"] < loss["straight"]  # and two roundings more than one


def test_without_a_parent_the_second_rounding_is_still_told(
    fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(fp8), str(tmp_path / "out"), "--to", "compressed-tensors", "--preset", "nvfp4a16"]
    assert main([*words, "--requantize", "--quiet"]) == 0
    page = capsys.readouterr().out
    assert "rounded a second time" in page
    assert "--parent" in page


def test_a_dry_run_writes_nothing(fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(fp8), str(tmp_path / "out"), "--to", "plain", "--dry-run"]) == 0
    assert "Nothing was written." in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_fp16_names_every_tensor_that_overflows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = toys.weights(toys.llama_shapes(layers=1))
    down, up = (f"model.layers.0.mlp.{name}.weight" for name in ("down_proj", "up_proj"))
    weights[down][3, 5] = 1e5
    weights[up][1, 2] = 1e-30
    model = toys.write(tmp_path / "m", weights, toys.llama_config(layers=1))
    words = ["convert", str(model), str(tmp_path / "out"), "--to", "plain", "--dtype", "fp16"]
    assert main(words) == 3
    said = capsys.readouterr().err
    assert "1 values would overflow" in said
    assert f"{down} (1 over, 0 under, the first 99840 at row 3, column 5)" in said  # 1e5 in bf16 is 99840
    assert f"{up} (0 over, 1 under" in said
    assert not (tmp_path / "out").exists()
    assert main([*words, "--saturate", "--quiet"]) == 0
    assert "clipped 1 values" in capsys.readouterr().out
    from safetensors.numpy import load_file

    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out[down][3, 5] == 65504
    assert out[up][1, 2] == 0
    assert {value.dtype for value in out.values()} == {np.dtype("float16")}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float16"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "gptqq"], "did you mean gptq"),
        (["--to", "plain", "--preset", "nvfp4a16"], "no preset"),
        (["--to", "compressed-tensors", "--dtype", "fp16"], "--dtype is what plain floats become"),
        (["--to", "compressed-tensors", "--ignore", "lm_head"], "where a preset goes"),
        (["--to", "onnx", "--preset", "nvfp4a16"], "does not go with --to onnx"),
    ],
)
def test_what_cannot_be_asked(
    fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["convert", str(fp8), str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err


def test_the_same_container_is_a_copy(fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even of what narrowcast does not know, such as a config key of another version."""
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"]["a_key_of_tomorrow"] = 1
    (fp8 / "config.json").write_text(json.dumps(config))
    assert main(["convert", str(fp8), str(tmp_path / "out"), "--to", "compressed-tensors", "--quiet"]) == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (fp8 / name).read_bytes()
