"""Load one checkpoint in vLLM and continue a prompt greedily: python load.py MODEL PROMPT TOKENS DTYPE.

Runs in .venv-engine, in a process of its own, because an engine that dies must not take the test along. The
last line of stdout is one JSON object: {"loads", "text", "tokens", "logprobs"} or {"loads": false, "message"}, with the
version and the instruction set of the build that ran.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from importlib.metadata import version
from typing import Any

PATIENCE = 10.0  # seconds for the first token, prompt included
warnings.filterwarnings("ignore")
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's own exception, not "engine core failed"
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def instruction_set() -> str:
    """Which of the wheel's three compiled parts this CPU gets; what they accept differs."""
    import torch

    if not torch.cpu._is_avx512_supported():
        return "avx2"
    return "avx512_bf16" if torch.cpu._is_avx512_bf16_supported() else "avx512"


def generate(engine: Any, prompt: str, tokens: int) -> Any:
    """The greedy continuation: ``tokens`` of them, or one where one takes longer than a few seconds."""
    from vllm import SamplingParams

    def ask(count: int) -> Any:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=1)
        return engine.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]

    start = time.perf_counter()
    first = ask(1)
    return first if time.perf_counter() - start > PATIENCE else ask(tokens)


def attempt(model: str, prompt: str, tokens: int, dtype: str) -> dict[str, Any]:
    """Load and generate; any exception is the engine's verdict."""
    from vllm import LLM

    try:
        # Tiny batches: the engine first runs a full one, and for FP8 some CPUs have only scalar emulation.
        engine = LLM(
            model, dtype=dtype, enforce_eager=True, max_model_len=32, max_num_batched_tokens=8, max_num_seqs=1
        )
        out = generate(engine, prompt, tokens)
    except Exception as refusal:
        text = " ".join(str(refusal).split()).replace(model, "MODEL")
        return {"loads": False, "message": f"{type(refusal).__name__}: {text}"}
    ids = list(out.token_ids)
    logs = [float(step[token].logprob) for step, token in zip(out.logprobs, ids, strict=True)]
    return {"loads": True, "text": out.text, "tokens": ids, "logprobs": logs}


if __name__ == "__main__":
    result = attempt(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    engine = {"engine": "vllm-cpu", "version": version("vllm-cpu"), "instructions": instruction_set()}
    print("\n" + json.dumps({**engine, **result}), flush=True)
    os._exit(0)
