"""The table of symptoms: found by the words people use, and every command in it exists."""

from __future__ import annotations

import re

import pytest

from doctor import vllm_messages
from narrowcast.arguments import VERBS
from narrowcast.doctor import find, symptoms
from narrowcast.doctor.conjunctions import CONJUNCTIONS
from narrowcast.doctor.reading import COMPLAINTS, KINDS
from narrowcast.errors import UsageError
from narrowcast.tensors.presets import presets

WORDS = {
    "NaN after some hundred tokens": "nan",
    "all exclamation marks": "exclamation-marks",
    "!!!!!!!!!!!!": "exclamation-marks",
    "????????": "question-marks",
    "question marks": "question-marks",
    "fluent nonsense": "fluent-nonsense",
    "long prompts only": "long-prompts",
    "slower than bf16": "slow",
    "out of memory": "out-of-memory",
    "OOM": "out-of-memory",
    "repeats itself": "repeats",
    "worse scores than published": "worse-scores",
    "load error missing keys": "load-error",
    "KeyError": "load-error",
    "garbage only with tensor parallelism": "tensor-parallel",
    "tp 2": "tensor-parallel",
    "wrong with fp16": "fp16",
    "first tokens right then drift": "drift",
    "loads but vision broken": "vision",
    "exclamaton marks": "exclamation-marks",
    "Out_Of_Memory": "out-of-memory",
}


@pytest.mark.parametrize(("text", "name"), WORDS.items())
def test_found_by_words(text: str, name: str) -> None:
    assert find(text).name == name


@pytest.mark.parametrize("name", symptoms)
def test_found_by_name(name: str) -> None:
    assert find(name) is symptoms[name]


def test_unknown_words_are_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no symptom") as refusal:
        find("driftwood")
    assert "drift" in str(refusal.value.wanted)
    assert refusal.value.exit_code == 2
    with pytest.raises(UsageError, match="no symptom"):
        find("")


def test_words_that_fit_several_name_them() -> None:
    with pytest.raises(UsageError, match="several symptoms fit") as refusal:
        find("gibberish")
    assert {"fluent-nonsense", "noise"} <= {
        text.split(" (")[0] for text in str(refusal.value.wanted).split("; ")
    }


TEXTS = [
    text
    for row in symptoms.values()
    for cause in row.causes
    for text in (cause.check, cause.remedy, cause.why)
]
TEXTS += [text for row in (*COMPLAINTS, *CONJUNCTIONS) for text in (row.said, row.consequence, row.remedy)]


def test_commands_exist() -> None:
    for text in TEXTS:
        for verb in re.findall(r"`narrowcast ([\w-]+)", text):
            assert verb in VERBS, text
        for preset in re.findall(r"--preset (\w+)", text):
            assert preset == "NAME" or preset in presets, text
        for engine in re.findall(r"--for ([a-z-]+)", text):
            assert engine in ("vllm", "sglang", "tensorrt-llm", "transformers"), text


def test_findings_that_symptoms_name_exist() -> None:
    known = {row.name for row in (*COMPLAINTS, *CONJUNCTIONS)} | set(KINDS) | {"quantization: none"}
    named = [
        name.partition(":")[0].strip()
        for row in symptoms.values()
        for cause in row.causes
        for group in re.findall(r"`narrowcast doctor LOG` \(([^)]*)\)", cause.check)
        for name in group.split(",")
    ]
    assert len(named) > 20
    assert set(named) <= known


def test_every_symptom_has_causes_to_check() -> None:
    for row in symptoms.values():
        assert len(row.causes) >= 3
        titles = [cause.title for cause in row.causes]
        assert len(titles) == len(set(titles))


# SGLang 0.5.23, docs.sglang.ai/advanced_features/server_arguments.
SGLANG_FLAGS = {
    "--chunked-prefill-size",
    "--context-length",
    "--enable-deterministic-inference",
    "--fp8-gemm-backend",
    "--mem-fraction-static",
    "--moe-runner-backend",
    "--quantization-param-path",
    "--tp",
}
OURS = {"--against", "--dry-run", "--for", "--gpu", "--min-sqnr", "--preset", "--symptom", "--text", "--to"}


def test_flags_exist() -> None:
    source = vllm_messages.source()
    if source is None:
        pytest.skip("the engine's environment (.venv-engine) is not installed; engines/setup.sh makes it")
    theirs = set(re.findall(r'"(--[a-z][a-z0-9-]+)"', (source / "engine" / "arg_utils.py").read_text()))
    used = {flag for text in TEXTS for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)}
    assert used - theirs - SGLANG_FLAGS - OURS == set()
