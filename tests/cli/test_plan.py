"""The command: pages that fit, answers in words, flags, and inputs that are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import toys
from cli.running import Cli
from model.gguf_toys import UPSTREAM
from serving.configs import DEEPSEEK_V3, GPT_OSS_20B, LLAMA2_7B, LLAMA3_8B, QWEN3_8B

CONFIGS = {
    "llama": LLAMA3_8B,
    "llama2": LLAMA2_7B,
    "deepseek": DEEPSEEK_V3,
    "gpt-oss": GPT_OSS_20B,
    "qwen3": QWEN3_8B,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path, LLAMA3_8B)


def write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("gpu", ["L4", "A100", "MI300X", "B300", "V100", "TPU v5e", "GB10"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_page_fits(name: str, gpu: str, cli: Cli, tmp_path: Path) -> None:
    path = write(tmp_path, CONFIGS[name])
    for more in ((), ("--preset", "fp8_dynamic", "--batch", "16", "--tp", "2")):
        page = cli("plan", path, "--gpu", gpu, *more)
        assert page.code == 0, page.err
        own = str(tmp_path)
        assert [line for line in page.out.splitlines() if len(line) > 80 and own not in line] == []
        assert all(line == line.rstrip() for line in page.out.splitlines())
        assert "\n\n\n" not in page.out
        assert "nan" not in page.out.lower().split()


def test_the_answer_comes_first(cli: Cli, model: Path) -> None:
    page = cli("plan", model, "--gpu", "L4", "--preset", "fp8_dynamic").out
    head = " ".join(page.split("\n\n")[0].split())
    assert head.startswith("config.json as fp8_dynamic on l4, vLLM")
    assert "fits yes: 9.09 GB of weights in 21.7 GB leave room for 95,409 tokens of bf16 cache" in head
    assert "computes in fp8 (CutlassFP8)" in head
    assert "speed a step of one sequence at token 8,192 takes at least 30.4 ms" in head


def test_what_does_not_fit_says_what_would(cli: Cli, tmp_path: Path) -> None:
    """16 sequences of 8192 tokens beside BF16 weights are too many for an L4; not beside FP8 and an FP8 cache. Sixteen
    H100s hold DeepSeek-V3 but not 16 times 32768 latents, and 32 ranks would cut its blocks, so they are no way out."""
    page = cli("plan", write(tmp_path, LLAMA3_8B), "--gpu", "L4", "--context", "8k", "--batch", "16")
    head = " ".join(page.out.split("\n\n")[0].split())
    assert (
        "5 sequences of 8,192, not 16; --tp 2, or --kv int4_per_token_head, or --preset fp8_dynamic --kv"
        in head
    )
    config = write(tmp_path, DEEPSEEK_V3)
    words = ("--gpu", "H100", "--tp", "16", "--context", "32k", "--batch", "16", "--preset", "fp8_block")
    head = " ".join(cli("plan", config, *words).out.split("\n\n")[0].split())
    assert "fits no:" in head
    assert "--tp 32" not in head
    assert "--kv fp8_e4m3 would fit" in head


def test_what_does_not_start_says_so_first(cli: Cli, model: Path) -> None:
    page = cli("plan", model, "--gpu", "H100", "--preset", "fp8_block", "--tp", "3").out
    assert (
        page.splitlines()[1]
        == "  starts  no: model.layers.*.self_attn.q_proj: 32 heads are not a multiple of 3"
    )
    assert "speed" not in page.split("\n\n")[0]


def test_fp8_on_an_a100_is_said_not_to_be_computed(cli: Cli, model: Path) -> None:
    page = " ".join(cli("plan", model, "--gpu", "A100", "--preset", "fp8_dynamic").out.split())
    assert "weight only: decoded and multiplied in bf16 (MarlinFP8)" in page
    assert "instruction: a100 does not multiply FP8" in page
    assert "would change it: int8 is computed in int8 on a100" in page
    assert "FP8 for speed" in page.partition("not to do")[2]


def test_sections_in_their_order(cli: Cli, model: Path) -> None:
    lines = cli("plan", model, "--gpu", "L4").out.splitlines()
    starts = [
        "choice",
        "path",
        "not to do",
        "floor",
        "formats",
        "memory",
        "tensor parallel",
        "assumed",
        "serve",
    ]
    places = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert places == sorted(places)
    assert len(lines) < 115


def test_tokens_in_k_and_m(cli: Cli, model: Path) -> None:
    def context(text: str) -> int:
        return int(
            cli("plan", model, "--gpu", "H100", "--context", text, "--json").json["question"]["context"]
        )

    assert [context(text) for text in ("512", "2k", "32K", "1m")] == [512, 2048, 32768, 1 << 20]


def test_several_gpus_a_line_each(cli: Cli, model: Path) -> None:
    page = cli("plan", model, "--gpu", "L4", "--gpu", "A100", "--gpu", "V100", "--preset", "fp8_dynamic")
    rows = {line.split()[0]: line for line in page.out.splitlines()[3:6]}
    assert "weight only" in rows["a100"]
    assert "refused" in rows["v100"]
    record = cli("plan", model, "--gpu", "L4", "--gpu", "A100", "--json").json
    assert [each["question"]["gpu"] for each in record["plans"]] == ["l4", "a100"]


def test_without_a_gpu_it_is_this_machines(cli: Cli, model: Path) -> None:
    page = cli("plan", model, "--json", "--preset", "int8")
    assert page.code == 0, page.err
    assert page.json["memory"]["capacity"] > 1e9


def test_evaluations_stand_beside_their_presets(cli: Cli, model: Path, tmp_path: Path) -> None:
    interval = {"estimate": 0.4, "low": 0.3, "high": 0.5}
    facts = {
        "schema": 1, "verb": "evaluate", "child": {"path": "x", "online": "fp8_per_channel"}, "parent": {"path": "y"},
        "gap": {"kl": interval, "perplexity": interval, "top1": interval},
        "verdict": {"says": "worse", "sentence": "mean KL 0.4, and 0.01 was asked for", "code": 1},
    }  # fmt: skip
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps(facts))
    page = cli("plan", model, "--gpu", "L4", "--evaluations", file)
    row = next(line for line in page.out.splitlines() if " fp8_dynamic " in line and "worse" in line)
    assert row.split()[0] != "1"
    record = cli("plan", model, "--gpu", "L4", "--evaluations", file, "--json").json["choice"]
    placed = {option["preset"]: option for option in record["options"]}
    assert record["first"] == "fp8_per_tensor"
    assert placed["fp8_dynamic"]["reasons"][-1] == "put down: measured: mean KL 0.4, and 0.01 was asked for"
    quality = cli("plan", model, "--gpu", "L4", "--evaluations", file, "--preset", "fp8_dynamic").out
    assert "quality: mean KL 0.4" in quality
    assert "was measured on y, taken to be this model" in " ".join(quality.split())


def test_an_evaluation_of_another_model_is_refused(cli: Cli, model: Path, tmp_path: Path) -> None:
    other = toys.llama(tmp_path / "other", hidden=96)
    facts = {
        "verb": "evaluate", "child": {"path": "x-int8"}, "parent": {"path": str(other)},
        "gap": {"kl": {"estimate": 0.1}}, "verdict": {"says": "measured"},
    }  # fmt: skip
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps(facts))
    told = cli("plan", model, "--gpu", "L4", "--evaluations", file)
    assert told.code == 2
    assert "another model" in told.err
    assert "width 96" in told.err
    file.write_text(json.dumps(facts | {"parent": {"path": str(model)}}))
    assert "taken to be" not in cli("plan", model, "--gpu", "L4", "--evaluations", file).out


def test_a_plot(cli: Cli, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the plot")
    file = tmp_path / "plan.svg"
    assert cli("plan", model, "--gpu", "L4", "--plot", file).code == 0
    assert "<svg" in file.read_text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--gpu nonsense", 2, "unknown GPU"),
        ("--gpu L4 --tp 0", 2, "tp must be at least 1"),
        ("--gpu L4 --pp 64", 2, "32 layers make no 64 stages"),
        ("--gpu L4 --batch 0", 2, "batch must be at least 1"),
        ("--gpu L4 --batch x", 2, "not a count"),
        ("--gpu L4 --context x", 2, "not a number of tokens"),
        ("--gpu L4 --context 0k", 2, "not a number of tokens"),
        ("--gpu L4 --preset nope", 2, "unknown preset"),
        ("--gpu L4 --engine nope", 2, "unknown engine"),
        ("--gpu L4 --kv nope", 2, "unknown mode of the KV cache"),
        ("--gpu L4 --utilisation 0", 2, "the utilisation is a share"),
        ("--gpu L4 --utilisation 2", 2, "not a share"),
        ("--gpu L4 --container awq", 2, "a container without a preset"),
        ("--gpu L4 --preset int8 --container awq", 2, "awq has no spelling"),
        ("--gpu L4 --evaluations /nowhere.json", 2, "no such evaluation"),
        ("--gpu L4 --plot plan.pdf", 2, "SVG or PNG"),
        ("--gpu L4 --gpu A100 --plot plan.svg", 2, "--plot draws one GPU"),
        ("--gpu L4 --gpus /nowhere.toml", 2, "file of GPUs is not there"),
    ],
)
def test_what_cannot_be_asked(words: str, code: int, said: str, cli: Cli, model: Path) -> None:
    page = cli("plan", model, *words.split())
    assert (page.code, page.out) == (code, "")
    assert said in page.err
    assert "Traceback" not in page.err


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        ({}, 3, "the geometry of this family is not known"),
        ({"model_type": "unheard_of"}, 3, "unheard_of"),
        ({**LLAMA3_8B, "hidden_size": None}, 3, "hidden_size"),
        ({**LLAMA3_8B, "num_hidden_layers": "many"}, 3, "num_hidden_layers"),
        ({**LLAMA3_8B, "intermediate_size": -1}, 3, "intermediate_size"),
    ],
)
def test_configs_that_are_not_understood(config: Any, code: int, said: str, cli: Cli, tmp_path: Path) -> None:
    page = cli("plan", write(tmp_path, config), "--gpu", "L4")
    assert (page.code, page.out) == (code, "")
    assert said in page.err
    assert "--debug" not in page.err


def test_one_file_of_weights_alone(cli: Cli, llama: Path) -> None:
    """Without a config the matrices are known, and what the model keeps of its context is not."""
    page = cli("plan", llama / "model.safetensors", "--gpu", "L4")
    assert page.code == 0, page.err
    assert "what it keeps of its context is not known" in " ".join(page.out.split())


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_a_gguf_file_is_planned_as_it_is(kind: str, cli: Cli) -> None:
    page = cli("plan", UPSTREAM / "llama" / f"{kind}.gguf", "--gpu", "L4", "--json")
    assert page.code == 0, page.err
    assert (page.json["model"]["container"], page.json["choice"]) == ("gguf", None)


def test_models_that_are_none(cli: Cli, tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text("[")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, code in ((broken, 3), (empty, 3), (tmp_path / "missing", 2)):
        page = cli("plan", path, "--gpu", "L4")
        assert page.code == code, page.err
        assert "--debug" not in page.err


def test_json_keys_are_stable(cli: Cli, model: Path) -> None:
    record = cli("plan", model, "--gpu", "L4", "--json").json
    assert list(record) == [
        "schema", "verb", "model", "question", "fits", "runs", "path", "attention", "floor", "floor_of_one", "formats",
        "memory", "caches", "splits", "choice", "quality", "do_not", "serve", "assumed",
    ]  # fmt: skip
    assert list(record["choice"]) == ["first", "fastest", "careful", "wide", "options", "notes"]
    assert list(record["do_not"][0]) == ["name", "what", "why", "instead", "source"]
