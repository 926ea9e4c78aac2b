"""One model's decode steps and prefill, timed on this machine: quantized checkpoints by our packed layers, plain ones
by transformers in bf16. Tokens are drawn at random: what is said does not change how long it takes, and a mixture of
experts is spread over many of them.

    prefill   one pass over [batch, prompt], the head for the last token
    step      one pass over [batch, 1] on the cache of all tokens before, the median of ``tokens`` steps
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from narrowcast.serving.timing import Timing

PREFILLS = 3  # passes over the prompt, of which the median counts
PRODUCT = 2048  # rows and columns of the product whose rate bounds a prefill
PRODUCTS = 7


def timings(
    model: str | Path, batches: tuple[int, ...], prompt: int, tokens: int, threads: int,
    done: Callable[[int], None] = lambda count: None,
) -> Iterator[Timing]:  # fmt: skip
    """One timing for each batch. Raises what opening the model raises."""
    with _threads(threads):
        whole = _loaded(model)
        for batch in batches:
            yield _timed(whole, batch, prompt, tokens, done)


def runs_as(model: str | Path) -> str:
    """What multiplies its linear layers here, in words."""
    return "packed layers" if _quantized(model) else "transformers, bf16"


def product_rate(threads: int) -> float:
    """FLOP a second of torch's bf16 product of two square matrices, the best of several: what arithmetic can reach
    here."""
    with _threads(threads):
        a, b = (torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16) for _ in range(2))
        torch.mm(a, b)
        best = min(_seconds(lambda: torch.mm(a, b)) for _ in range(PRODUCTS))
    return float(2 * PRODUCT**3 / best)


def _quantized(model: str | Path) -> bool:
    from narrowcast.jobs.coded import open_coded
    from narrowcast.jobs.opening import open_model

    with open_model(model) as checkpoint:
        return bool(open_coded(checkpoint).contents.matrices)


def _loaded(model: str | Path) -> Any:
    from narrowcast.runtime.decode import packed
    from narrowcast.runtime.walk import Running

    if _quantized(model):
        return packed(model, dtype="bfloat16")[0]
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with Running.open(model, "bfloat16") as running:  # refuses what cannot run, in our words
        root = running.root
    return AutoModelForCausalLM.from_pretrained(root, dtype=torch.bfloat16).eval()


def _timed(whole: Any, batch: int, prompt: int, tokens: int, done: Callable[[int], None]) -> Timing:
    ids = torch.randint(0, whole.config.get_text_config().vocab_size, (batch, prompt), generator=_seed())
    prefills, steps = [], []
    with torch.inference_mode():
        for _ in range(PREFILLS):
            start = time.perf_counter()
            out = whole(ids, use_cache=True, logits_to_keep=1)
            prefills.append(time.perf_counter() - start)
            done(1)
        cache = out.cache
        for _ in range(tokens):
            following = torch.randint(0, ids.max() + 1, (batch, 1), generator=_seed())
            start = time.perf_counter()
            cache = whole(following, cache=cache, use_cache=True).cache
            steps.append(time.perf_counter() - start)
            done(1)
    return Timing(batch, prompt, tokens, statistics.median(prefills), statistics.median(steps))


def _seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
