"""``narrowcast evaluate``: the page, the record and the exit codes; what models write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from narrowcast.cli import main
from narrowcast.errors import InputError
from narrowcast.jobs.quantize import quantize
from narrowcast.report.evaluate import evaluate_page
from narrowcast.runtime.walk import Running
from narrowcast.studies.continuations import write
from narrowcast.studies.retrieval import solved
from narrowcast.studies.structured import first_value, fits, read_schema
from studies import calibrated_toys as toys
from studies.evaluations import everything


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    folder = tmp_path_factory.mktemp("command")
    parent = toys.llama(folder / "parent")
    quantize(parent, folder / "w4a16", "w4a16")
    lines = folder / "text.jsonl"
    texts = [Path(file).read_text() for file in toys.texts(folder, *[40] * 12)]
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return parent, folder / "w4a16", str(lines)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["evaluate", *map(str, words)])
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def test_the_page_fits_and_the_record_says_the_same(
    models: tuple[Path, Path, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parent, child, text = models
    words = [child, "--against", parent, "--text", text, "--kv", "fp8_e4m3", "--greedy", "2"]
    code, page, _ = run(capsys, *words)
    assert code == 0
    assert [line for line in page.splitlines() if len(line) > 80] == []
    assert page.startswith(("Perplexity", "This text does not tell"))
    found: dict[str, Any] = json.loads(run(capsys, *words, "--json")[1])
    assert (found["schema"], found["verb"], found["exit_code"]) == (1, "evaluate", 0)
    assert found["gap"]["kl"]["units"] == 12
    assert found["gap"]["kl"]["method"] == "bootstrap"
    assert len(found["divergence"]["layers"]) == 2
    assert found["caches"][0]["mode"] == "fp8_e4m3, unity"
    assert len(found["greedy"]["rows"]) == 2
    assert f"{found['gap']['kl']['estimate']:.3g}" in page
    layers = found["divergence"]["layers"]
    most = max(layer["local"] / layer["expected"] for layer in layers)
    assert f"No layer errs by more than {most:.3g} times what its format explains" in page


def test_names_of_caches_are_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = everything()
    row = replace(found.caches[0], mode="fp8_head, computed, fp8_p448 attention", clipped=8.12e-6)
    lines = evaluate_page(replace(found, caches=(row,)))
    assert [line for line in lines if line.startswith("fp8_head, computed, fp8_p448 attn ")]
    assert max(map(len, lines)) <= 80


def test_exit_codes(models: tuple[Path, Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    parent, child, text = models
    words = [child, "--against", parent, "--text", text, "--greedy", "0"]
    kl = json.loads(run(capsys, *words, "--json")[1])["gap"]["kl"]
    assert run(capsys, *words, "--max-kl", kl["high"] * 1.01)[0] == 0
    assert run(capsys, *words, "--max-kl", kl["low"] * 0.99)[0] == 1
    code, page, _ = run(capsys, *words, "--max-kl", kl["estimate"])
    assert (code, page[:9]) == (4, "Undecided")
    assert run(capsys, child, "--text", text, "--max-kl", "1")[0] == 2
    assert run(capsys, *words[:-1], "2", "--stream")[0] == 2


def test_greedy_text_is_what_generate_writes(models: tuple[Path, Path, str]) -> None:
    parent = models[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(parent, attn_implementation="sdpa")
    ids = torch.tensor([[1, 5, 9, 40], [2, 2, 30, 7]])
    wanted = model.generate(ids, do_sample=False, max_new_tokens=6, eos_token_id=None, pad_token_id=0)[:, 4:]
    with Running.open(parent) as opened:
        found, margins = write(opened.resident(), ids, 6)
    assert torch.equal(found, wanted)
    assert bool((margins >= 0).all())


def test_the_likeliest_answer_is_the_one_whose_tokens_are(models: tuple[Path, Path, str]) -> None:
    with Running.open(models[0]) as opened, torch.inference_mode():
        model = opened.resident()
        ids, answers = [3, 14, 15, 9], [[i, j] for i in (7, 20, 31) for j in (1, 2)]
        scores = []
        for first, second in answers:
            logp = torch.log_softmax(model(input_ids=torch.tensor([[*ids, first]])).logits[0].double(), 1)
            scores.append(float(logp[-2, first] + logp[-1, second]))
        order = sorted(range(len(answers)), key=lambda i: -scores[i])
        assert solved(model, ids, [answers[i] for i in order])
        assert not solved(model, ids, [answers[i] for i in order[::-1]])


def test_json_is_found_and_held_against_the_schema(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    assert read_schema(tmp_path / "schema.json") == schema
    assert first_value('Sure:\n```json\n{"n": 3}\n``` and more') == (True, {"n": 3})
    assert first_value('{"n": 3') == (False, None)
    assert first_value("no brackets") == (False, None)
    assert fits({"n": 3}, schema)
    assert not fits({"n": "3"}, schema)
    (tmp_path / "bad.json").write_text('{"type": 7}')
    with pytest.raises(InputError, match="not a JSON schema"):
        read_schema(tmp_path / "bad.json")
    with pytest.raises(InputError, match="refers to another"):
        fits({}, {"$ref": "https://example.org/schema.json"})


def test_structured_and_retrieval_at_the_floor_say_that_they_tell_nothing(
    models: tuple[Path, Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent, child, text = models
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    words = [
        child,
        "--against",
        parent,
        "--text",
        text,
        "--greedy",
        "0",
        "--schema",
        tmp_path / "schema.json",
    ]
    code, page, _ = run(capsys, *words)
    assert code == 0
    assert "both fail (0 and 0 of 8 valid): tells nothing." in page
