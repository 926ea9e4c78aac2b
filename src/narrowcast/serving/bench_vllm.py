"""Decode steps and prefill of a checkpoint in vLLM: python bench_vllm.py JSON FLAGS..., FLAGS as for vllm serve.

Runs as a script in the engine's own Python, which has no narrowcast; JSON is {"batches", "prompt", "tokens"}. Requests
of random tokens end by length; a step is what the further tokens add, and all requests of a batch are read at once:

    step = (seconds of 1 + tokens tokens − seconds of 1 token) / tokens          prefill = seconds of 1 token

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


def main() -> None:
    """Measure and print."""
    import vllm
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    asked = json.loads(sys.argv[1])
    flags = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(sys.argv[2:])
    engine = LLM.from_engine_args(EngineArgs.from_cli_args(flags))
    size = engine.llm_engine.model_config.get_vocab_size()
    found = [
        [batch, *_timed(engine, batch, asked["prompt"], asked["tokens"], size)] for batch in asked["batches"]
    ]
    print("\n" + json.dumps({"version": vllm.__version__, "timings": found}), flush=True)
    os._exit(0)  # the engine's own end takes longer and may fail


def _timed(engine: Any, batch: int, prompt: int, tokens: int, size: int) -> tuple[float, float]:
    """Seconds of a prefill and of a step, after one round that is thrown away."""
    draw = random.Random(0)
    one, many = [], []
    for _ in range(1 + RUNS):
        ids = [{"prompt_token_ids": [draw.randrange(size) for _ in range(prompt)]} for _ in range(batch)]
        one.append(_seconds(engine, ids, 1))
        many.append(_seconds(engine, ids, 1 + tokens))
    first = statistics.median(one[1:])
    return first, (statistics.median(many[1:]) - first) / tokens


def _seconds(engine: Any, ids: list[dict[str, list[int]]], count: int) -> float:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    start = time.perf_counter()
    engine.generate(ids, sampling, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
