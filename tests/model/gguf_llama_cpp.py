"""Asks llama.cpp about GGUF files; run by the tests with .venv-peers/bin/python, answers in JSON.

tokenize [{"model": path, "texts": [...]}]   ->  [[ids of each text] of each model]
generate [{"model": path, "prompt": ids, "tokens": n}]  ->  [{"logits": path of .npy, "ids": [...]}]
"""

from __future__ import annotations

import json
import sys
from typing import Any


def tokenize(job: dict[str, Any]) -> list[list[int]]:
    """Token ids of texts, with whatever the file says about framing them."""
    from llama_cpp import Llama

    model = Llama(job["model"], vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=True, special=True) for text in job["texts"]]


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Logits of every position of a prompt, in fp32, and the tokens that follow it greedily."""
    import llama_cpp
    import numpy as np
    from llama_cpp import Llama

    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def without_amx() -> Any:
        """Matrix units need the kernel's leave, which containers may lack; the plain buffers do without them."""
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    llama_cpp.llama_cpp.llama_model_default_params = without_amx
    context = len(job["prompt"]) + job["tokens"] + 1
    model = Llama(
        job["model"],
        n_ctx=context,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        verbose=False,
        flash_attn=False,
    )
    model.eval(job["prompt"])
    logits = np.array(model.scores[: len(job["prompt"])], np.float32)
    where = job["model"] + ".npy"
    np.save(where, logits)
    ids: list[int] = []
    for _ in range(job["tokens"]):
        ids.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(ids[-1:])
    return {"logits": where, "ids": ids}


if __name__ == "__main__":
    answers = {"tokenize": tokenize, "generate": generate}[sys.argv[1]]
    json.dump([answers(job) for job in json.load(sys.stdin)], sys.stdout)
