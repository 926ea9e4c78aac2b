"""Bytes and FLOP of a step, counted one by one: layers, heads, tokens, experts; and what follows from them."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import pytest

from narrowcast.errors import UsageError
from narrowcast.hardware.cost import Work, floor, peak_of
from narrowcast.hardware.gpus import gpus
from narrowcast.model.geometry import Matrix
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
from serving.counted import HIDDEN, MODELS, VOCABULARY, decoded, prompted, served_as


def _parts(traffic: Any) -> dict[str, Any]:
    return dict(vars(traffic))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_by_one(name: str, tp: int) -> None:
    """Every byte and every FLOP of both kinds of steps, exactly."""
    served = served_as(name)
    assert streamed(served) == decoded(name, 1, 1, 1)["weights"]
    for batch, context in product((1, 3), (1, 16, 17, 40)):
        question = Question(gpus["h100"], tp=tp, batch=batch, context=context)
        arithmetics, attention = arithmetic(served, question), attention_arithmetic(served, question)
        assert _parts(decode(served, question, arithmetics, attention)) == decoded(name, batch, context, tp)
        assert _parts(prefill(served, question, arithmetics, attention)) == prompted(name, context, tp)


def test_a_head_that_is_there_twice_is_read_once() -> None:
    """Files of a tied model that hold the head beside the embedding; towers and layers for drafts are not read."""
    served, question = served_as("tied"), Question(gpus["h100"], context=4)
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
    served = served_as("dense")
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
    served, question = served_as("experts"), Question(gpus["h100"], context=40, batch=3)
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
    assert steps(served_as("dense"), question).decode_expected is None


def test_crossover_by_trying() -> None:
    """The first batch at which arithmetic takes as long as bytes, batch by batch."""
    gpu = replace(gpus["h100"], bandwidth_tb_s=1.0, peaks={"bf16": 20.0})  # FLOP per byte: 20
    question = Question(gpu, context=4)
    for name in ("dense", "tied", "experts", "hybrid"):
        served = served_as(name)
        words, attention = arithmetic(served, question), attention_arithmetic(served, question)

        def computes(batch: int, of: Served = served, words: Any = words, attention: Any = attention) -> bool:
            bound = floor(decode(of, question, words, attention, batch=batch, uniform=True).work, gpu)
            return (bound.compute or 0) >= (bound.memory or 0)

        first = next((batch for batch in range(1, 400) if computes(batch)), None)
        assert steps(served, question).crossover == first, name
        assert name == "hybrid" or first is not None
    # Each sequence's cache takes longer than its arithmetic: no batch is large enough.
    long = steps(served_as("dense"), replace(question, context=100_000))
    assert (long.crossover, long.crossover_weights) == (
        None,
        steps(served_as("dense"), question).crossover_weights,
    )


def test_crossover_of_weights_is_the_ridge() -> None:
    """With weights alone B = bytes / bandwidth ÷ (2 · parameters / peak): the ridge point in 16 bits, near enough."""
    served = served_as("dense")
    found = steps(served, Question(gpus["h100"], context=8)).crossover_weights
    streamed = sum(g.nbytes for g in served.groups if g.matrix.role is not Role.EMBEDDING) + 80
    row = 2 * HIDDEN  # gathered for each sequence
    seconds = 2 * (streamed - 80) / 2 / 989e12 - row / 3.35e12
    assert found == -(-(streamed / 3.35e12) // seconds)


def test_crossover_needs_numbers() -> None:
    unknown = replace(gpus["h100"], bandwidth_tb_s=None)
    found = steps(served_as("dense"), Question(unknown, context=8))
    assert found.crossover is None
    assert found.decode.bound.memory is None
    bare = steps(served_as("dense"), Question(replace(gpus["h100"], peaks={}), context=8))
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
    served = served_as("dense")
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
    served, question = served_as("dense"), Question(gpus["h100"], context=40, batch=2)
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
    served = served_as("dense")
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

    found = steps(served_as("experts"), Question(gpus["h100"], context=8, batch=2, tp=2))
    told = json.loads(json.dumps(found.to_json()))
    assert told["decode"]["seconds_at_least"] == found.decode.seconds
    assert told["decode"]["waits_for"] == "memory"
    assert told["tokens_per_second_at_most"] == pytest.approx(1 / told["decode"]["seconds_at_least"])
    assert told["experts"][0]["at_least"] == 2
    assert any("all-reduces" in word for word in told["assumptions"])
