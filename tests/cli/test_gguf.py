"""The face of GGUF conversion: pages, JSON, exit codes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from demo.source import smollm2_gguf

import toys
from narrowcast.cli import main
from narrowcast.store.gguf import GGUFFile

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer's worth of a real GGUF file would not be a model, so the real one in its own types."""
    out = tmp_path_factory.mktemp("gguf") / "plain"
    assert main(["convert", str(smollm2_gguf()), str(out), "--to", "plain", "--quiet"]) == 0
    return out


@pytest.mark.slow
def test_there_and_back_on_the_command_line(model: Path, tmp_path: Path, capsys: Capture) -> None:
    capsys.readouterr()
    out = tmp_path / "m.gguf"
    assert main(["convert", str(model), str(out), "--to", "gguf", "--type", "q8_0", "--quiet"]) == 0
    page = capsys.readouterr().out
    assert "Q8_0" in page
    assert all(len(line) <= 80 for line in page.splitlines() if str(tmp_path) not in line)
    assert main(["convert", str(out), str(tmp_path / "ct"), "--to", "compressed-tensors", "--json"]) == 0
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "ct"), str(tmp_path / "n.gguf"), "--to", "gguf", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {"from": "int8_g32", "type": "Q8_0", "how": "moved", "count": 210} in said["matrices"]
    assert main(["inspect", str(out)]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--to", "gguf", "--preset", "nvfp4a16"], "--preset does not go with --to gguf"),
        (["--to", "gguf", "--dry-run"], "--dry-run does not go with --to gguf\n  remedy: leave it out"),
        (["--to", "gguf"], "ends in .gguf"),
        (["--to", "gguf", "--type", "q5_k"], "no GGUF type to write"),
        (["--to", "plain", "--type", "q8_0"], "--type goes with --to gguf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(words: list[str], problem: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), *words]) == 2
    assert problem in capsys.readouterr().err


def test_inspect_shows_types_and_bytes_of_the_file(capsys: Capture) -> None:
    assert main(["inspect", str(smollm2_gguf()), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["dtypes"]["Q4_1"]["tensors"] == 210
    with GGUFFile(smollm2_gguf()) as file:
        assert said["bytes"] == sum(tensor.nbytes for tensor in file.tensors.values())
    assert not said["oddities"]


def test_a_config_that_says_gguf_is_believed_of_gguf_files_only(tmp_path: Path, capsys: Capture) -> None:
    model = toys.llama(tmp_path / "m", layers=1)
    config = json.loads((model / "config.json").read_text())
    claim = {"quant_method": "gguf", "types": 1, "blocks": 2}
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": claim}))
    assert main(["inspect", str(model)]) in (0, 3)
    assert main(["convert", str(model), str(tmp_path / "out"), "--to", "plain"]) == 3
    assert "the quantization method is not known" in capsys.readouterr().err


def test_a_damaged_file_is_bad_input(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(smollm2_gguf().read_bytes()[:3_000_000])
    assert main(["convert", str(path), str(tmp_path / "out"), "--to", "plain"]) == 3
    assert "cut short" in capsys.readouterr().err
    assert main(["inspect", str(path)]) == 3
