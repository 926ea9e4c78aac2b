"""What fits: weights, cache and the rest on each GPU, and the tokens and sequences that are left room for.

    room      = utilisation · memory - weights - activations     memory as programs see it
    weights   Σ bytes(group) · share       a split matrix by its pieces, whole ones and vectors on every GPU
    sequence  = Σ kept layers · kv heads on this GPU · bytes of K and V of one token · min(context, window)  +  states
    tokens    = context · room / sequence                   in sequences of the asked context
    fits      batch · sequence <= room                      on the stage that has the least room

vLLM measures activations and takes them from its budget; other engines leave them to the rest of the memory, which is
assumed to hold the runtime and captured graphs too. Estimates, of a chunk of a prompt and of logits being sorted:

    vLLM      max( 2 · chunk · (2 · hidden + widest layer on this GPU),  16 · batch · vocabulary )
    others    2 · chunk · (2 · hidden + widest layer on this GPU)  +  4 · batch · vocabulary / tp

Sources: vLLM 0.32 (get_pp_indices; pad_vocab_size; keys are copied where there are fewer of them than GPUs, latents
always; the specs of v1/kv_cache_interface.py). Left out: blocks of tokens, the page that a hybrid model's layers share,
which vLLM fills up, layers that a flag keeps wide (--kv-cache-dtype-skip-layers), and weights of speculative decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.hardware.cache_modes import CACHE_MODES
from narrowcast.hardware.engines import ENGINES
from narrowcast.model.roles import Role
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served
from narrowcast.serving.stages import Cache, Stage, fullest

SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, that of the pipeline stage with the least room. ``capacity`` None: the GPU's memory is not
    known, and nothing that follows from it. ``cache`` is the asked mode (None: what the model keeps is not known), and
    ``modes`` are all that the engine has for this model. ``smallest``: the smallest tensor parallelism, of those that
    divide the query heads, with which it would fit."""

    capacity: float | None
    budget: float | None
    overhead: float | None
    activations: int
    weights: Mapping[str, int]
    room: float | None
    cache: Cache | None
    modes: tuple[Cache, ...]
    stage: int
    smallest: int | None
    assumptions: tuple[str, ...]

    @property
    def total(self) -> int:
        """All weights on the GPU."""
        return sum(self.weights.values())

    @property
    def fits(self) -> bool | None:
        """Whether weights and the asked batch fit; None where that is not known."""
        if self.room is not None and self.room < 0:
            return False
        return None if self.cache is None else self.cache.fits

    @property
    def tokens(self) -> int | None:
        """Tokens that the cache holds."""
        return None if self.cache is None else self.cache.tokens

    @property
    def sequences(self) -> int | None:
        """Sequences of the asked context that it holds."""
        return None if self.cache is None else self.cache.sequences

    def to_json(self) -> dict[str, Any]:
        """Everything, under stable keys, in bytes."""
        return {
            "capacity": self.capacity, "budget": self.budget, "overhead": self.overhead,
            "activations": self.activations, "weights": {**self.weights, "total": self.total}, "room": self.room,
            "fits": self.fits, "cache": _json(self.cache) if self.cache is not None else None,
            "modes": [_json(mode) for mode in self.modes], "stage": self.stage, "smallest_tp": self.smallest,
            "assumptions": list(self.assumptions),
        }  # fmt: skip


def _json(cache: Cache) -> dict[str, Any]:
    return {
        "mode": cache.mode, "scales": cache.scales, "bytes_per_token": cache.token,
        "bytes_per_token_windows_full": cache.full, "bytes_per_sequence": cache.sequence, "tokens": cache.tokens,
        "sequences": cache.sequences, "longest": cache.longest, "spare": cache.spare, "fits": cache.fits,
    }  # fmt: skip


def memory(served: Served, question: Question) -> Memory:
    """What fits. UsageError for a mode of the cache that cannot store this model's keys."""
    stage = fullest(served, question)
    smallest = next((tp for tp in _widths(served) if _fits(served, replace(question, tp=tp))), None)
    capacity = question.gpu.usable
    budget = None if capacity is None else question.utilisation * capacity
    return Memory(
        capacity, budget, None if capacity is None or budget is None else capacity - budget, stage.activations,
        stage.weights, stage.room, stage.cache, tuple(stage.modes()), stage.number, smallest,
        tuple(_assumptions(served, question, stage)),
    )  # fmt: skip


def _widths(served: Served) -> Iterator[int]:
    """Tensor parallelism that divides the query heads of every layer."""
    heads = [attention.q_heads for attention in served.geometry.attention if attention.q_heads]
    return (size for size in SIZES if not any(count % size for count in heads))


def _fits(served: Served, question: Question) -> bool:
    stage = fullest(served, question)
    if stage.room is None or stage.room < 0:
        return False
    return stage.cache is None or stage.cache.fits is True


def _assumptions(served: Served, question: Question, stage: Stage) -> Iterator[str]:
    """What the answer rests on, in sentences."""
    capacity = question.gpu.usable
    if capacity is None:
        yield "The memory of this GPU is not known, so nothing is said about what fits."
    else:
        yield from _budget(question, stage, capacity)
    if not served.geometry.attention:
        yield "What this model keeps of its context is not known, so its cache is not counted."
    if question.tp > 1:
        yield from _spread(served, question)
    if question.pp > 1:
        yield (
            f"Layers of each kind are taken to be spread evenly over {question.pp} stages; stage {stage.number + 1} "
            "has the least room."
        )
    kinds = {one.kind for one in served.geometry.attention}
    if kinds & {"sliding", "chunked"}:
        yield (
            "A layer with a window keeps min(context, window) tokens; while a prompt is read, engines hold up to one "
            "chunk more of it, and vLLM fills the pages of layers that differ up to one size. Its start-up log counts "
            "with that, and prints fewer tokens."
        )
    if "state" in kinds:
        yield "States are counted once for each sequence; vLLM keeps them in pages as large as those of attention."
    if any(group.matrix.role is Role.MTP for group in served.groups):
        size = sum(group.nbytes for group in served.groups if group.matrix.role is Role.MTP)
        yield f"Layers that predict further tokens ({size / 1e9:.2f} GB) are loaded for speculative decoding alone."
    mode = stage.cache
    if mode is not None and question.engine not in CACHE_MODES[mode.mode].engines:
        yield f"{ENGINES[question.engine]} has no {mode.mode} cache; its size is that of engines that do."
    if mode is not None and CACHE_MODES[mode.mode].wide_layers and "state" not in kinds:
        n = min(CACHE_MODES[mode.mode].wide_layers, served.geometry.layers // 2)
        yield f"{mode.mode} keeps the first {n} and the last {n} layers in 16 bits, as vLLM does."


def _budget(question: Question, stage: Stage, capacity: float) -> Iterator[str]:
    """What may be taken of the memory, and by what."""
    rest = (1 - question.utilisation) * capacity
    yield (
        f"Programs see {capacity / 1e9:.1f} GB of this GPU's memory, {capacity / 2**30:.1f} GiB, of which "
        f"{question.utilisation:.0%} may be taken."
    )
    chunk = min(stage.chunk, question.context)
    about = f"Activations of {chunk} tokens at once are estimated at {stage.activations / 1e9:.2f} GB"
    if question.engine == "vllm":
        yield (
            f"{about} and taken from the cache; what vLLM measures differs by some tenths. The other "
            f"{rest / 1e9:.1f} GB hold the runtime and captured graphs; where ranks share layers on NVLink, NCCL's "
            "buffers took 2 GB more."
        )
        return
    yield (
        f"{about}"
        + (f", of which {stage.beyond / 1e9:.2f} GB are taken from the cache" if stage.beyond > 0 else "")
        + f". They, the runtime and captured graphs are in the other {rest / 1e9:.1f} GB."
    )


def _spread(served: Served, question: Question) -> Iterator[str]:
    """What is copied over the GPUs of one layer instead of split."""
    yield "Norms, routers and other whole tensors are on every GPU."
    few = [
        one for one in served.geometry.attention if 0 < one.kv_heads < question.tp and one.kind != "latent"
    ]
    if few:
        yield f"{few[0].kv_heads} key heads are fewer than {question.tp} GPUs: each is kept more than once."
    if any(one.kind == "latent" for one in served.geometry.attention):
        yield "A latent cache is not split: every GPU keeps all of it."
