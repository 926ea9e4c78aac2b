"""``narrowcast compare``: exit codes, page, record, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import toys
from cli.running import Cli
from narrowcast.jobs.quantize import quantize

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, its NVFP4, and that with the nibbles of every byte swapped."""
    folder = tmp_path_factory.mktemp("models")
    toys.llama(folder / "bf16", hidden=192)
    quantize(folder / "bf16", folder / "nvfp4", "nvfp4a16")
    shutil.copytree(folder / "nvfp4", folder / "swapped")
    tensors = load_file(folder / "swapped" / "model.safetensors")
    for name, x in tensors.items():
        if name.endswith("weight_packed"):
            tensors[name] = (x << 4) | (x >> 4)
    save_file(tensors, folder / "swapped" / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("a", "b", "more", "code", "verdict"),
    [
        ("nvfp4", "nvfp4", [], 0, "Equal: all 20 tensors."),
        ("bf16", "nvfp4", [], 1, "Different: 14 of 20 tensors."),
        ("bf16", "nvfp4", ["--min-sqnr", "18"], 0, "Within 18 dB: 14 of 20 tensors differ, none by more."),
        ("bf16", "nvfp4", ["--min-sqnr", "25"], 1, "Worse than 25 dB: 14 of 20 tensors."),
        ("bf16", "nvfp4", ["--only", "re:.*norm"], 0, "Equal: all 5 tensors."),
    ],
)
def test_exit_codes_and_verdicts(
    cli: Cli, models: Path, a: str, b: str, more: list[str], code: int, verdict: str
) -> None:
    page = cli("compare", models / a, models / b, *more)
    assert page.code == code, page.err
    assert page.out.splitlines()[-1] == verdict
    record = cli("compare", models / a, models / b, *more, "--json")
    assert record.code == code
    assert record.json["passed"] is (code == 0)


def test_page_names_the_mistake_and_fits(cli: Cli, models: Path) -> None:
    page = cli("compare", models / "bf16", models / "swapped")
    assert page.code == 1
    assert [line for line in page.out.splitlines() if len(line) > 80 and str(models) not in line] == []
    assert "\n\n\n" not in page.out
    text = " ".join(page.out.split())
    assert "and 13 more: B's neighbouring columns are swapped" in text
    assert "remedy: unpack the low nibble first" in text
    assert ["attention", "bf16", "nvfp4", "8", "0"] in [line[:5] for line in page.lines]


def test_record(cli: Cli, models: Path) -> None:
    answer = cli("compare", models / "bf16", models / "swapped", "--json").json
    assert (answer["schema"], answer["verb"]) == (1, "compare")
    assert answer["a"] == {"path": str(models / "bf16"), "container": "plain"}
    assert answer["b"] == {"path": str(models / "swapped"), "container": "compressed-tensors"}
    assert answer["grades"] == {"identical": 6, "respelled": 0, "equal": 0, "differs": 14, "shape": 0}
    (tensor,) = [tensor for tensor in answer["tensors"] if tensor["name"] == Q]
    assert tensor["a"] == {"scheme": "bf16", "shape": [192, 192]}
    assert tensor["b"] == {"scheme": "nvfp4", "shape": [192, 192]}
    assert tensor["sqnr"] == pytest.approx(answer["worst_sqnr"], abs=1)
    assert set(tensor["first"]) == {"row", "column", "a", "b", "a_code", "b_code"}
    assert tensor["diagnosis"]["name"] == "swapped neighbours"
    assert tensor["diagnosis"]["after"] > 15
    norm = next(tensor for tensor in answer["tensors"] if tensor["role"] == "norm")
    assert norm == {
        "name": norm["name"], "role": "norm", "grade": "identical", "a": {"scheme": "bf16", "shape": [192]},
        "b": {"scheme": "bf16", "shape": [192]}, "sqnr": "inf", "diagnosis": None,
    }  # fmt: skip


def test_page_of_other_shapes_and_lost_tensors(cli: Cli, models: Path, tmp_path: Path) -> None:
    other = toys.llama(tmp_path / "other", hidden=192, inner=320, layers=1)
    page = cli("compare", models / "bf16", other, "--min-sqnr", "0")
    assert page.code == 1
    assert [line for line in page.out.splitlines() if len(line) > 80 and str(tmp_path) not in line] == []
    assert "352x192" in page.out
    assert "320x192" in page.out
    assert "only in A" in page.out
    assert "tensors are on one side only" in page.out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nvfp4"], 2, "B"),
        (["bf16", "nvfp4", "--only", "model.layers.0.mlp.gate"], 2, "gate_proj"),
        (["bf16", "nvfp4", "--min-sqnr", "high"], 2, "not a number of dB"),
        (["bf16", "nvfp4", "--min-sqnr", "nan"], 2, "not a number of dB"),
        (["bf16", "none"], 2, "none"),
        (["bf16", "empty"], 3, "empty"),
        (["bf16", "mislabelled"], 3, "quantization"),
    ],
)
def test_refusals(cli: Cli, models: Path, words: list[str], code: int, said: str) -> None:
    (models / "empty").mkdir(exist_ok=True)
    if "mislabelled" in words:
        shutil.copytree(models / "nvfp4", models / "mislabelled")
        path = models / "mislabelled" / "config.json"
        config = json.loads(path.read_text())
        del config["quantization_config"]
        path.write_text(json.dumps(config))
    places = {name: models / name for name in ("bf16", "nvfp4", "empty", "none", "mislabelled")}
    answer = cli("compare", *(places.get(word, word) for word in words))
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
