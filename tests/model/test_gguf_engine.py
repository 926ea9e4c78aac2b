"""Written GGUF files in llama.cpp: they load, and compute what transformers computes with the decoded weights."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import gguf_toys
from model.test_gguf_tokenizer import PEERS, needs_llama_cpp
from narrowcast.model.gguf_model import GGUFModel
from narrowcast.model.gguf_vocabulary import vocabulary_fields
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import BF16
from narrowcast.store.safetensors import Reader

TOKENS = 12


def decoded(path: Path) -> dict[str, torch.Tensor]:
    with GGUFModel.open(path) as model:
        return {name: torch.from_numpy(model.values(name, 0, model.shape(name)[0])) for name in model.moves}


def by_llama_cpp(path: Path, prompt: list[int], tokens: int) -> tuple[Any, list[int]]:
    script = Path(__file__).with_name("gguf_llama_cpp.py")
    job = json.dumps([{"model": str(path), "prompt": prompt, "tokens": tokens}])
    done = subprocess.run([PEERS, script, "generate"], input=job, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (answer,) = json.loads(done.stdout)
    return torch.from_numpy(np.load(answer["logits"])), answer["ids"]


def greedy(model: Any, prompt: list[int], tokens: int) -> tuple[Any, list[int]]:
    """Logits of the prompt in fp32, and the tokens that follow."""
    ids = list(prompt)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return logits, ids[len(prompt) :]


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).square().mean().sqrt())


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "MXFP4", "NVFP4"])
def test_the_real_model_speaks_in_llama_cpp(kind: str, smollm2_dir: Path, tmp_path: Path) -> None:
    """Wide types say the same words. Elsewhere llama.cpp rounds activations as Q8_0 rounds weights, which moves logits
    about as far as Q8_0 weights do, and less than four-bit weights do.
    """
    settings = json.loads((smollm2_dir / "config.json").read_text())
    with Reader(smollm2_dir / "model.safetensors") as reader:
        state = {name: widen(np.array(reader.array(name)), BF16) for name in reader.entries}
    path = gguf_toys.write(
        tmp_path / f"{kind}.gguf", settings, state, kind, vocabulary_fields(smollm2_dir, settings)
    )
    prompt = AutoTokenizer.from_pretrained(smollm2_dir)(
        "The capital of France is Paris. The capital of Italy is"
    )
    theirs, said = by_llama_cpp(path, prompt["input_ids"], TOKENS)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    original, _ = greedy(model, prompt["input_ids"], 0)
    model.load_state_dict(decoded(path), strict=False)
    ours, words = greedy(model, prompt["input_ids"], TOKENS)
    print(
        kind,
        f"to llama.cpp {distance(ours, theirs):.4f}, to the original {distance(ours, original):.4f}",
        said,
        words,
    )
    if kind in ("F16", "BF16"):
        assert said == words
    else:
        assert distance(ours, theirs) < distance(ours, original) * (2 if kind == "Q8_0" else 1)
