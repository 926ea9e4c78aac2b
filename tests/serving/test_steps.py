"""Bytes and FLOP of a step, counted one by one: layers, heads, tokens, experts; and what follows from them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import pytest

from narrowcast.errors import UsageError
from narrowcast.hardware.cost import Work, floor, peak_of
from narrowcast.hardware.gpus import gpus
from narrowcast.model.geometry import Attention, Geometry, Keeps, Matrix, Split
from narrowcast.model.roles import Role
from narrowcast.numbers.formats import BF16
from narrowcast.serving.loading import from_config
from narrowcast.serving.paths import kernels
from narrowcast.serving.question import Question
from narrowcast.serving.served import Group, Served
from narrowcast.serving.steps import arithmetic, attention_arithmetic, possible, steps
from narrowcast.serving.traffic import decode, expected, prefill, streamed
from narrowcast.tensors.presets import presets
from serving.configs import DEEPSEEK_V3, LLAMA3_8B

HIDDEN, VOCABULARY = 32, 64
Sized = tuple[str, int, int, Split, int]  # leaf, N, K, side that is split, heads that stay whole


@dataclass(frozen=True)
class Layer:
    """One layer written out: matrices, experts (number, active, matrices of one), and what it keeps."""

    matrices: tuple[Sized, ...]
    keeps: Keeps
    q_heads: int = 0
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    window: int | None = None
    state: int = 0
    borrows: bool = False
    rank: int = 0
    index: int = 0
    chosen: int | None = None
    experts: tuple[int, int, tuple[Sized, ...]] | None = None


def _attention(q: int, kv: int, dim: int) -> tuple[Sized, ...]:
    return (
        ("q_proj", q * dim, HIDDEN, "column", q), ("k_proj", kv * dim, HIDDEN, "column", kv),
        ("v_proj", kv * dim, HIDDEN, "column", kv), ("o_proj", HIDDEN, q * dim, "row", q),
    )  # fmt: skip


_MLP: tuple[Sized, ...] = (("up_proj", 48, HIDDEN, "column", 0), ("down_proj", HIDDEN, 48, "row", 0))
_LATENT: tuple[Sized, ...] = (
    ("q_a_proj", 16, HIDDEN, "whole", 0), ("q_b_proj", 4 * 12, 16, "column", 4), ("kv_a_proj", 28, HIDDEN, "whole", 0),
    ("kv_b_proj", 4 * 16, 24, "column", 4), ("o_proj", HIDDEN, 4 * 8, "row", 4),
)  # fmt: skip
_ROUTER: tuple[Sized, ...] = (("gate", 8, HIDDEN, "whole", 0),)
_DENSE = Layer(_attention(8, 2, 8) + _MLP, "full", 8, 2, 8, 8)
_SLIDING = replace(_DENSE, keeps="sliding", window=16)
_CHUNKED = replace(_DENSE, keeps="chunked", window=16)
_MOE = Layer(_attention(8, 2, 8) + _ROUTER, "full", 8, 2, 8, 8, experts=(8, 2, _MLP))
# Four heads, queries 8 + 4 rotary, values 8, a latent of 24 + 4.
_MLA = Layer(_LATENT + _MLP, "latent", 4, 1, 28, 0, rank=24)
_STATE = Layer((("in_proj", 64, HIDDEN, "column", 0), ("out_proj", HIDDEN, 64, "row", 0)), "state", state=96)
MODELS: dict[str, tuple[list[Layer], bool]] = {
    "dense": ([_DENSE] * 3, False),
    "tied": ([_DENSE] * 2, True),
    "sliding": ([_SLIDING, _DENSE] * 2, False),
    "chunked": ([_CHUNKED, _CHUNKED, _DENSE], False),
    "experts": ([_MOE] * 2, False),
    "latent": ([_MLA] * 2, False),
    "sparse": ([replace(_MLA, index=8, chosen=12)] * 2, False),
    "hybrid": ([_STATE, _STATE, _DENSE], True),
    "borrowing": ([_DENSE, replace(_DENSE, borrows=True)], False),
}


def _served(name: str) -> Served:
    """The model by kinds of layers, as geometries have it."""
    layers, tied = MODELS[name]
    kinds: dict[Layer, int] = {}
    for layer in layers:
        kinds[replace(layer, borrows=False)] = kinds.get(replace(layer, borrows=False), 0) + 1
    matrices = [Matrix("embed", Role.EMBEDDING, (VOCABULARY, HIDDEN), split="column")]
    for layer, count in kinds.items():
        for leaf, n, k, split, heads in layer.matrices:
            role = Role.ROUTER if leaf == "gate" else Role.ATTENTION
            matrices.append(Matrix(f"layers.*.{leaf}", role, (n, k), count, split=split, heads=heads))
        if layer.experts:
            number, active, each = layer.experts
            matrices += [
                Matrix(f"layers.*.experts.{leaf}", Role.EXPERT, (n, k), count, number, active, split)
                for leaf, n, k, split, _ in each
            ]
    if not tied:
        matrices.append(Matrix("lm_head", Role.LM_HEAD, (VOCABULARY, HIDDEN), split="column"))
    attention = tuple(
        Attention(
            layer.keeps, count, layer.q_heads, layer.kv_heads, layer.k_dim, layer.v_dim, layer.window, layer.state,
            sum(not each.borrows for each in layers) if any(each.borrows for each in layers) else None,
            index=layer.index, chosen=layer.chosen,
        )
        for layer, count in kinds.items()
    )  # fmt: skip
    geometry = Geometry("toy", len(layers), HIDDEN, VOCABULARY, tied, tuple(matrices), attention, 40)
    groups = tuple(Group(matrix, None, 2 * matrix.parameters, BF16) for matrix in matrices)
    return Served(name, geometry, "plain", groups, 80, "config")


def _part(n: int, k: int, split: Split, heads: int, tp: int) -> Fraction:
    """Elements of a matrix that the first of the GPUs holds, counted row by row (or column by column)."""
    if split == "whole":
        return Fraction(n * k)
    side, other = (n, k) if split == "column" else (k, n)
    pieces = heads or side
    each = side // pieces
    owned = [piece for piece in range(pieces) if piece * tp // pieces == 0] if pieces >= tp else [0]
    return Fraction(len(owned) * each * other)


def _seen(layer: Layer, position: int) -> list[int]:
    """The tokens that the token at ``position`` (from 1) attends to."""
    before = range(1, position + 1)
    if layer.keeps == "state":
        return []
    if layer.keeps == "sliding":
        assert layer.window
        return [t for t in before if position - t < layer.window]
    if layer.keeps == "chunked":
        assert layer.window
        return [t for t in before if (t - 1) // layer.window == (position - 1) // layer.window]
    return list(before)[: layer.chosen]


def _heads(count: int, tp: int) -> int:
    return len([head for head in range(count) if head * tp // count == 0]) if count >= tp else 1


def _flops(layer: Layer, position: int, tp: int, prompt: bool) -> int:
    """Queries with keys, weights with values, head by head and token by token."""
    total = 0
    for _ in range(_heads(layer.q_heads, tp) if layer.q_heads else 0):
        for _ in _seen(layer, position):
            if layer.keeps == "latent":
                total += 2 * 12 + 2 * 8 if prompt else 2 * layer.k_dim + 2 * layer.rank
            else:
                total += 2 * layer.k_dim + 2 * layer.v_dim
    return total


def _kept(layer: Layer, tp: int) -> int:
    """Bytes of one token in 16 bits, and of an indexer's key in 8."""
    if layer.keeps == "latent":
        return 2 * layer.k_dim + layer.index
    return (
        sum(2 * (layer.k_dim + layer.v_dim) for _ in range(_heads(layer.kv_heads, tp)))
        if layer.kv_heads
        else 0
    )


def _every(layers: list[Layer], tied: bool) -> Iterator[tuple[Sized, int]]:
    """Every matrix that a token is multiplied with, and how often: experts as many as are active."""
    for layer in layers:
        for matrix in layer.matrices:
            yield matrix, 1
        if layer.experts:
            for matrix in layer.experts[2]:
                yield matrix, layer.experts[1]
    yield ("embed" if tied else "lm_head", VOCABULARY, HIDDEN, "column", 0), 1


def _decoded(name: str, batch: int, context: int, tp: int) -> dict[str, Any]:
    layers, tied = MODELS[name]
    weights, flops, read, written, states = Fraction(80, tp), 0, 0, 0, Fraction(0)
    for (_, n, k, split, heads), times in _every(layers, tied):
        weights += 2 * times * _part(n, k, split, heads, tp)
        flops += int(2 * times * _part(n, k, split, heads, tp)) * batch
    for _ in range(batch):
        for layer in layers:
            token = _kept(layer, tp)
            read += (token - layer.index) * len(_seen(layer, context)) + layer.index * context
            written += 0 if layer.borrows else token
            flops += _flops(layer, context, tp, prompt=False)
            states += Fraction(2 * 2 * layer.state, tp)
    gathered = 0 if tied else 2 * batch * HIDDEN / tp
    return {"weights": weights, "gathered": gathered, "cache_read": read, "cache_written": written,
            "states": states, "flops": {"bf16": flops}}  # fmt: skip


def _prompted(name: str, context: int, tp: int) -> dict[str, Any]:
    layers, tied = MODELS[name]
    once = _decoded(name, 1, context, tp)
    flops, written = 0, 0
    for (leaf, n, k, split, heads), times in _every(layers, tied):
        tokens = 1 if leaf in ("embed", "lm_head") else context
        flops += int(2 * times * _part(n, k, split, heads, tp)) * tokens
    for layer in layers:
        kept = [t for t in range(1, context + 1) if not layer.window or context - t < layer.window]
        written += 0 if layer.borrows else len(kept) * _kept(layer, tp)
        for position in range(1, context + 1):
            flops += _flops(layer, position, tp, prompt=True)
    gathered = 0 if tied else 2 * context * HIDDEN / tp
    return {"weights": once["weights"], "gathered": gathered, "cache_read": 0, "cache_written": written,
            "states": once["states"] / 2, "flops": {"bf16": flops}}  # fmt: skip


def _parts(traffic: Any) -> dict[str, Any]:
    return dict(vars(traffic))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_by_one(name: str, tp: int) -> None:
    """Every byte and every FLOP of both kinds of steps, exactly."""
    served = _served(name)
    assert streamed(served) == _decoded(name, 1, 1, 1)["weights"]
    for batch, context in product((1, 3), (1, 16, 17, 40)):
        question = Question(gpus["h100"], tp=tp, batch=batch, context=context)
        arithmetics, attention = arithmetic(served, question), attention_arithmetic(served, question)
        assert _parts(decode(served, question, arithmetics, attention)) == _decoded(name, batch, context, tp)
        assert _parts(prefill(served, question, arithmetics, attention)) == _prompted(name, context, tp)


def test_a_head_that_is_there_twice_is_read_once() -> None:
    """Files of a tied model that hold the head beside the embedding; towers and layers for drafts are not read."""
    served, question = _served("tied"), Question(gpus["h100"], context=4)
    once = decode(served, question, ["bf16"] * len(served.groups), ["bf16"])
    more = [
        Matrix("lm_head", Role.LM_HEAD, (VOCABULARY, HIDDEN), split="column"),
        Matrix("vision.proj", Role.VISION, (64, 64)), Matrix("mtp.proj", Role.MTP, (64, 64)),
    ]  # fmt: skip
    added = tuple(Group(matrix, None, 2 * matrix.parameters, BF16) for matrix in more)
    twice = decode(
        replace(served, groups=(*served.groups, *added)),
        question,
        ["bf16"] * (len(served.groups) + 3),
        ["bf16"],
    )
    assert (twice.weights, twice.flops) == (once.weights, once.flops)
    assert (once.gathered, twice.gathered) == (0, 2 * HIDDEN)


def test_a_pipeline_is_the_sum_of_its_stages() -> None:
    served = _served("dense")
    question = Question(gpus["h100"], context=40)
    alone, staged = steps(served, question), steps(served, replace(question, pp=3))
    assert (staged.decode, staged.prefill) == (alone.decode, alone.prefill)
    assert any("stages" in word for word in staged.assumptions)


def test_experts_of_a_batch() -> None:
    """The expected number of distinct experts, over every choice that a batch could make."""
    matrix = Matrix("experts", Role.EXPERT, (4, 4), experts=5, active=2)
    choices = list(combinations(range(5), 2))
    for tokens in (1, 2, 3):
        every = list(product(choices, repeat=tokens))
        mean = Fraction(sum(len({one for choice in batch for one in choice}) for batch in every), len(every))
        # A power, a difference and a product: no more than tokens + 3 roundings.
        assert abs(Fraction(expected(matrix, tokens)) - mean) <= mean * (tokens + 3) * Fraction(
            sys.float_info.epsilon
        )


def test_experts_bound_and_expectation() -> None:
    served, question = _served("experts"), Question(gpus["h100"], context=40, batch=3)
    found = steps(served, question)
    assert found.decode_expected is not None
    one = 2 * 2 * (48 * HIDDEN + HIDDEN * 48)  # bytes of one expert in both layers
    touched = 8 * (1 - (1 - 2 / 8) ** 3)
    more = found.decode_expected.traffic.weights - found.decode.traffic.weights
    assert more == pytest.approx(one * (touched - 2), rel=1e-12)
    assert [(e.experts, e.at_least, e.expected) for e in found.experts] == [(8, 2, touched)]
    # Spread over GPUs one by one, experts count by their share: the busiest GPU has no less.
    spread = steps(served, replace(question, tp=2, ep=True))
    split = steps(served, replace(question, tp=2))
    assert spread.decode.traffic == split.decode.traffic
    assert steps(_served("dense"), question).decode_expected is None


def test_crossover_by_trying() -> None:
    """The first batch at which arithmetic takes as long as bytes, batch by batch."""
    gpu = replace(gpus["h100"], bandwidth_tb_s=1.0, peaks={"bf16": 20.0})  # FLOP per byte: 20
    question = Question(gpu, context=4)
    for name in ("dense", "tied", "experts", "hybrid"):
        served = _served(name)
        words, attention = arithmetic(served, question), attention_arithmetic(served, question)

        def computes(batch: int, of: Served = served, words: Any = words, attention: Any = attention) -> bool:
            bound = floor(decode(of, question, words, attention, batch=batch, uniform=True).work, gpu)
            return (bound.compute or 0) >= (bound.memory or 0)

        first = next((batch for batch in range(1, 400) if computes(batch)), None)
        assert steps(served, question).crossover == first, name
        assert name == "hybrid" or first is not None
    # Each sequence's cache takes longer than its arithmetic: no batch is large enough.
    long = steps(_served("dense"), replace(question, context=100_000))
    assert (long.crossover, long.crossover_weights) == (
        None,
        steps(_served("dense"), question).crossover_weights,
    )


def test_crossover_of_weights_is_the_ridge() -> None:
    """With weights alone B = bytes / bandwidth ÷ (2 · parameters / peak): the ridge point in 16 bits, near enough."""
    served = _served("dense")
    found = steps(served, Question(gpus["h100"], context=8)).crossover_weights
    streamed = sum(g.nbytes for g in served.groups if g.matrix.role is not Role.EMBEDDING) + 80
    row = 2 * HIDDEN  # gathered for each sequence
    seconds = 2 * (streamed - 80) / 2 / 989e12 - row / 3.35e12
    assert found == -(-(streamed / 3.35e12) // seconds)


def test_crossover_needs_numbers() -> None:
    unknown = replace(gpus["h100"], bandwidth_tb_s=None)
    found = steps(_served("dense"), Question(unknown, context=8))
    assert found.crossover is None
    assert found.decode.bound.memory is None
    bare = steps(_served("dense"), Question(replace(gpus["h100"], peaks={}), context=8))
    assert bare.decode.bound.unknown == ("bf16",)
    assert bare.decode.seconds == bare.decode.bound.memory


def test_arithmetic_is_the_lowest_of_three_conditions() -> None:
    """The instruction, and quantized inputs; without a kernel's word the GPU's best."""
    rows = {
        ("fp8_dynamic", "h100"): "fp8", ("fp8_dynamic", "a100"): "bf16", ("fp8_block", "mi300x"): "fp8",
        ("int8", "a100"): "int8", ("int8", "b300"): "bf16", ("w4a16", "b200"): "bf16", ("w4a8", "a100"): "int8",
        ("w4afp8", "h100"): "fp8", ("nvfp4", "b200"): "nvfp4", ("nvfp4", "h100"): "bf16",
        ("nvfp4a16", "b200"): "bf16", ("mxfp4", "mi355x"): "mxfp4", ("mxfp8", "h100"): "bf16",
        ("mxfp4xfp8", "h100"): "fp8",
    }  # fmt: skip
    for (preset, gpu), word in rows.items():
        assert possible(presets[preset].linear, gpus[gpu]) == word, (preset, gpu)
    assert possible(None, gpus["h100"]) == "bf16"
    # Without BF16 units engines multiply in FP16.
    t4 = floor(Work(0, {"bf16": 65e12}), gpus["t4"])
    assert (t4.compute, t4.unknown) == (1.0, ())


def test_paths_decide_where_they_are_known() -> None:
    """An engine's own path for each group: FP8 on an H100, weights alone on an A100; a refusal bounds nothing."""
    linear = presets["fp8_dynamic"].linear
    served = _served("dense")
    groups = tuple(
        replace(group, linear=linear) if group.matrix.role is Role.ATTENTION else group
        for group in served.groups
    )
    served = replace(served, groups=groups, container="compressed-tensors")
    for gpu, word in (("h100", "fp8"), ("a100", "bf16: weight only"), ("v100", "bf16")):
        question = Question(gpus[gpu], context=8)
        rows = kernels(served, question)
        words = dict(
            zip((group.matrix.leaf for group in groups), arithmetic(served, question, rows), strict=True)
        )
        assert (words["q_proj"], words["lm_head"]) == (word, "bf16"), gpu
        assert word in steps(served, question, rows).decode.traffic.flops
    assert any(row.path.refusal for row in rows)
    # An FP8 cache is multiplied in FP8 only by a backend that does.
    question = Question(gpus["a100"], context=8, kv="fp8")
    assert attention_arithmetic(served, question) == ("bf16",)
    assert attention_arithmetic(served, replace(question, gpu=gpus["h100"])) == ("fp8",)
    real = from_config("Llama-3-8B", LLAMA3_8B)
    found = {
        gpu: steps(real, replace(question, gpu=gpus[gpu]), kernels(real, question))
        for gpu in ("a100", "h100")
    }
    assert set(found["h100"].decode.traffic.flops) == {"bf16", "fp8"}
    assert {peak_of(word) for word in found["a100"].decode.traffic.flops} == {"bf16"}


def test_cache_modes() -> None:
    """A cache in eight bits halves what is read; modes that cannot store a model's heads are refused."""
    served, question = _served("dense"), Question(gpus["h100"], context=40, batch=2)
    wide, narrow = (steps(served, replace(question, kv=kv)).decode.traffic for kv in ("auto", "fp8"))
    assert narrow.cache_read == wide.cache_read / 2
    assert set(narrow.flops) == {"bf16", "fp8"}
    asked = steps(replace(served, kv="kv8"), question).decode.traffic
    assert asked == narrow
    with pytest.raises(UsageError, match="cannot store"):
        steps(served, replace(question, kv="nvfp4"))  # heads of 8 elements


def test_gain_bounds_what_evenly_routed_experts_save() -> None:
    """Of 16 tokens' experts uniform routing touches 102 of 256 where one token's are 8: the more are read, the larger
    the share that eight bits halve, so the gain of the fewest would be beaten by real traffic."""
    question = Question(gpus["h200"], tp=8, context=32768, batch=16)
    wide = steps(from_config("model", DEEPSEEK_V3), question)
    narrow = steps(from_config("model", DEEPSEEK_V3, preset="fp8_block"), question)
    assert wide.decode_expected is not None
    assert narrow.decode_expected is not None
    even = wide.decode_expected.traffic.moved / narrow.decode_expected.traffic.moved
    fewest = wide.decode.traffic.moved / narrow.decode.traffic.moved
    assert narrow.gain == pytest.approx(even, rel=1e-12)
    assert narrow.gain > 1.2 * fewest


def test_gain_is_bytes_against_the_models_own_dtype() -> None:
    served = _served("dense")
    halved = replace(
        served, kv="kv8",
        groups=tuple(replace(g, linear=presets["fp8_dynamic"].linear, nbytes=g.nbytes // 2) for g in served.groups),
    )  # fmt: skip
    found = steps(halved, Question(gpus["h100"], context=40, batch=2))
    wide = steps(served, Question(gpus["h100"], context=40, batch=2)).decode.traffic
    assert found.gain == wide.moved / found.decode.traffic.moved
    assert found.weights_gain == wide.weights / found.decode.traffic.weights
    assert 1.9 < found.weights_gain < found.gain + 0.1 < 2.1
    # The same of formats that are no scheme of ours, such as GGUF's.
    named = replace(halved, groups=tuple(replace(g, linear=None, format="Q8_0") for g in halved.groups))
    assert steps(named, Question(gpus["h100"], context=40, batch=2)).gain == found.gain


def test_plain_data() -> None:
    import json

    found = steps(_served("experts"), Question(gpus["h100"], context=8, batch=2, tp=2))
    told = json.loads(json.dumps(found.to_json()))
    assert told["decode"]["seconds_at_least"] == found.decode.seconds
    assert told["decode"]["waits_for"] == "memory"
    assert told["tokens_per_second_at_most"] == pytest.approx(1 / told["decode"]["seconds_at_least"])
    assert told["experts"][0]["at_least"] == 2
    assert any("all-reduces" in word for word in told["assumptions"])
