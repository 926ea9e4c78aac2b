"""One model's decode steps and prefill, timed on this machine: quantized checkpoints by our packed layers, plain ones
by transformers in bf16. Tokens are drawn at random: what is said does not change how long it takes, and a mixture of
experts is spread over many of them.

    prefill   one pass over [batch, prompt], the head for the last token
    step      one pass over [batch, 1] on the cache of all tokens before, the median of ``tokens`` steps
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from narrowcast.jobs.coded import open_coded
from narrowcast.jobs.opening import open_model
from narrowcast.runtime.decode import FEW, PackedLinear, packed
from narrowcast.runtime.linear import ScaledLinear
from narrowcast.runtime.walk import Running
from narrowcast.serving.timing import Ran, Timing

PREFILLS = 3  # passes over the prompt, of which the median counts
PRODUCT = 2048  # rows and columns of the product whose rate bounds a prefill
PRODUCTS = 7
# Why a layer of a packed model holds numbers instead of codes (``PackedWeights._stays_packed``).
_DECODED = (
    "columns in another order or with factors of their own, or inputs with zero points, are held decoded"
)


def time_ours(
    model: str | Path, batches: Sequence[int], prompt: int, tokens: int, threads: int,
    done: Callable[[int], None] = lambda count: None,
) -> Ran:  # fmt: skip
    """Timings of each batch. Raises what opening the model raises."""
    quantized = _quantized(model)
    with _threads(threads):
        whole = packed(model, dtype="bfloat16")[0] if quantized else _plain(model)
        found = tuple(_timed(whole, batch, prompt, tokens, done) for batch in batches)
    if not quantized:
        return Ran("transformers, bf16", found)
    return Ran("packed layers", found, (), tuple(_fallbacks(whole, max(batches))))


def product_rate(threads: int, integers: bool = False) -> float | None:
    """FLOP a second of torch's bf16 product of two square matrices, or of that of int8 codes, the best of several: what
    arithmetic can reach here. None where torch has no such product on this machine."""
    with _threads(threads):
        a, b = (_square(integers) for _ in range(2))
        multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = (
            torch._int_mm if integers else torch.mm
        )
        try:
            multiply(a, b)
        except RuntimeError:
            return None
        best = min(_seconds(lambda: multiply(a, b)) for _ in range(PRODUCTS))
    return float(2 * PRODUCT**3 / best)


def _square(integers: bool) -> torch.Tensor:
    if integers:
        return torch.randint(-127, 128, (PRODUCT, PRODUCT), dtype=torch.int8)
    return torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16)


def _quantized(model: str | Path) -> bool:
    with open_model(model) as checkpoint:
        return bool(open_coded(checkpoint).contents.matrices)


def _plain(model: str | Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with Running.open(model, "bfloat16") as running:  # refuses what cannot run, in our words
        root = running.root
    return AutoModelForCausalLM.from_pretrained(root, dtype=torch.bfloat16).eval()


def _fallbacks(whole: Any, batch: int) -> Iterator[str]:
    """Layers that take a slower way, with its reason."""
    slow: dict[str, int] = {}
    layers = [each for each in whole.modules() if isinstance(each, PackedLinear | ScaledLinear)]
    for layer in layers:
        reason = layer.reason if isinstance(layer, PackedLinear) else _DECODED
        if reason:
            slow[reason] = slow.get(reason, 0) + 1
    for reason, count in slow.items():
        yield f"{count} of {len(layers)} quantized linear layers without a packed product: {reason}"
    if any(getattr(each, "inputs", None) is not None for each in layers):
        yield "inputs are quantized by some ten operations of torch before each product, which a GPU's kernel fuses"
    if batch > FEW and any(isinstance(each, PackedLinear) for each in layers):
        yield f"steps of more than {FEW} sequences, as prompts, decode every weight before they multiply it"


def _timed(whole: Any, batch: int, prompt: int, tokens: int, done: Callable[[int], None]) -> Timing:
    draw = torch.Generator().manual_seed(0)
    size = int(whole.config.get_text_config().vocab_size)
    ids = torch.randint(size, (batch, prompt), generator=draw)
    prefills, steps = [], []
    with torch.inference_mode():
        for _ in range(PREFILLS):
            start = time.perf_counter()
            out = whole(ids, use_cache=True, logits_to_keep=1)
            prefills.append(time.perf_counter() - start)
            done(1)
        cache = out.cache
        for _ in range(tokens):
            following = torch.randint(size, (batch, 1), generator=draw)
            start = time.perf_counter()
            cache = whole(following, cache=cache, use_cache=True).cache
            steps.append(time.perf_counter() - start)
            done(1)
    return Timing(batch, prompt, tokens, statistics.median(prefills), statistics.median(steps))


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
