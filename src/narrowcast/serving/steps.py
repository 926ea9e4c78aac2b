"""Lower bounds of a step: how fast decoding and reading a prompt can be at most, and what they wait for.

    seconds(decode)   ≥  max( bytes / bandwidth,  Σ FLOP / peak )       for each of ``batch`` sequences one token
    seconds(prefill)  ≥  the same of one prompt of ``context`` tokens
    crossover         the smallest batch at which a step's arithmetic takes as long as its bytes
                      weights alone   B = bytes / bandwidth  ÷  (2 · active / peak)
                      with the cache  none, where each sequence's own bytes take longer than its arithmetic
    gain              bytes of the same step with weights and cache in the model's own dtype, over the bytes now; under
                      uniform routing, which touches the most experts and so leaves the most to be saved

No engine is faster than a bound; how much slower it is, is the engine's, and nothing here guesses at it. Two numbers
beside the bounds are estimates and say so: ``expected`` counts the experts that uniform routing touches instead of the
fewest, and ``estimate`` takes the share of the peak that large products reached in measurements.

A peak that no kernel reaches bounds nothing: the arithmetic is that of the engine's path for each group. Without paths,
and where an engine refuses, it is the best that the GPU's instructions allow for the scheme (``possible``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.hardware.cost import Floor, column, floor, ridges
from narrowcast.hardware.engines.row import UNKNOWN
from narrowcast.hardware.gpu import COLUMNS
from narrowcast.hardware.gpus import GPU
from narrowcast.model.roles import Role
from narrowcast.numbers.formats import formats
from narrowcast.serving.paths import Kernels, attends
from narrowcast.serving.question import Question
from narrowcast.serving.served import Served
from narrowcast.serving.traffic import Traffic, cache_mode, decode, expected, prefill
from narrowcast.tensors.presets import LinearScheme

LARGEST = 1 << 24  # batch that is looked at for a crossover


@dataclass(frozen=True)
class Step:
    """One step of ``tokens`` new tokens on each GPU. ``bound`` is the least; ``estimate`` None where no measured share
    of a peak is known."""

    tokens: int
    traffic: Traffic
    bound: Floor
    estimate: Floor | None = None

    @property
    def seconds(self) -> float | None:
        """The lower bound; None where neither bandwidth nor peaks are known."""
        return self.bound.seconds

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return sum(self.traffic.flops.values()) / self.traffic.moved

    def to_json(self) -> dict[str, Any]:
        traffic = self.traffic
        return {
            "tokens": self.tokens,
            "seconds_at_least": self.seconds,
            "waits_for": self.bound.bound,
            "seconds_of_bytes": self.bound.memory,
            "seconds_of_arithmetic": self.bound.compute,
            "peaks_not_known": list(self.bound.unknown),
            "seconds_estimated": self.estimate.seconds if self.estimate is not None else None,
            "bytes": {
                "weights": traffic.weights, "embedding_rows": traffic.gathered, "cache_read": traffic.cache_read,
                "cache_written": traffic.cache_written, "states": traffic.states,
            },
            "flop": dict(traffic.flops),
        }  # fmt: skip


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer in a decode step: how many there are, and how many are touched."""

    name: str
    experts: int
    at_least: int
    expected: float


@dataclass(frozen=True)
class Steps:
    """The bounds of one question. ``decode_expected`` and ``prefill_expected`` are the same steps under uniform
    routing, None for dense models. ``crossover_weights`` leaves the cache out; a crossover is None where there is none,
    or where a peak or the bandwidth is not known."""

    decode: Step
    prefill: Step
    decode_expected: Step | None
    prefill_expected: Step | None
    experts: tuple[Experts, ...]
    crossover_weights: int | None
    crossover: int | None
    ridges: dict[str, float]
    gain: float
    weights_gain: float
    assumptions: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float | None:
        """At most, for each sequence."""
        return 1 / self.decode.seconds if self.decode.seconds else None

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds, bytes and FLOP of each GPU."""
        return {
            "decode": self.decode.to_json(),
            "decode_expected": self.decode_expected.to_json() if self.decode_expected else None,
            "prefill": self.prefill.to_json(),
            "prefill_expected": self.prefill_expected.to_json() if self.prefill_expected else None,
            "tokens_per_second_at_most": self.tokens_per_second,
            "experts": [vars(each) for each in self.experts],
            "crossover_batch_of_weights": self.crossover_weights,
            "crossover_batch": self.crossover,
            "ridges": self.ridges,
            "byte_gain": self.gain,
            "byte_gain_of_weights": self.weights_gain,
            "assumptions": list(self.assumptions),
        }


def steps(served: Served, question: Question, kernels: Iterable[Kernels] | None = None) -> Steps:
    """The lower bounds for ``served`` under ``question``. ``kernels`` are the engine's paths by groups; None takes the
    best that the GPU allows, which bounds every engine. UsageError for a cache mode that is not known or cannot store
    the model's heads."""
    arithmetics = arithmetic(served, question, kernels)
    engine = kernels is not None
    attention = attention_arithmetic(served, question, engine=engine)
    prompt = attention_arithmetic(served, question, engine=engine, prompt=True)

    def one(batch: int, uniform: bool = False) -> Traffic:
        return decode(served, question, arithmetics, attention, batch=batch, uniform=uniform)

    def whole(uniform: bool = False) -> Traffic:
        return prefill(served, question, arithmetics, prompt, uniform=uniform)

    gpu, batch = question.gpu, question.batch
    routed = any(group.matrix.experts > group.matrix.active for group in served.groups)
    bare = replace(served, geometry=replace(served.geometry, attention=()))
    wide = decode(unquantized(served), replace(question, kv="auto"), arithmetics, attention, uniform=True)
    now, even = one(batch), one(batch, True)
    return Steps(
        _step(now, gpu, batch), _step(whole(), gpu, question.context),
        _step(even, gpu, batch) if routed else None,
        _step(whole(True), gpu, question.context) if routed else None,
        _experts(served, batch),
        crossover(lambda batch: decode(bare, question, arithmetics, (), batch=batch, uniform=True), gpu),
        crossover(lambda batch: one(batch, True), gpu),
        ridges(gpu), wide.moved / even.moved, wide.weights / even.weights,
        _assumptions(served, question, routed),
    )  # fmt: skip


def arithmetic(
    served: Served, question: Question, kernels: Iterable[Kernels] | None = None
) -> tuple[str, ...]:
    """The arithmetic of each of the model's groups."""
    running = {
        group: each.path.arithmetic
        for each in kernels or ()
        if each.path.refusal is None and each.path.arithmetic != UNKNOWN
        for group in each.groups
    }
    gpu = question.gpu
    return tuple(
        running.get(group) or possible(group.linear, gpu, group.dtype.name) for group in served.groups
    )


def possible(linear: LinearScheme | None, gpu: GPU, dtype: str = "bf16") -> str:
    """The fastest arithmetic that the GPU's instructions have for such a layer: in the precision of its inputs, where
    the GPU has that and is not slower in it (INT8 of SM 10.3), and else in 16 bits, as where inputs stay wide."""
    found = _lowest(linear, gpu, dtype)
    low, wide = (gpu.peak(column(gpu, name)) for name in (found, "bf16"))
    return "bf16" if linear is not None and low is not None and wide is not None and low < wide else found


def _lowest(linear: LinearScheme | None, gpu: GPU, dtype: str) -> str:
    if linear is None:
        return dtype
    scheme = linear.input
    if scheme is None:
        return "bf16"
    element, block = scheme.element.name, scheme.name.partition("_")[0]
    if block in ("nvfp4", "mxfp4", "mxfp6", "mxfp8"):
        return block if block in gpu.formats else "bf16"
    if element in COLUMNS["fp8"]:
        return "fp8" if gpu.multiplies("fp8") else "bf16"
    return element if element in gpu.formats else "bf16"


def attention_arithmetic(
    served: Served, question: Question, *, engine: bool = False, prompt: bool = False
) -> tuple[str, ...]:
    """The arithmetic of queries with keys and values in each kind of layer, in a decode step or for a ``prompt``: the
    engine's, or else 16 bits, and FP8 where the cache is in it and the GPU has it."""
    mode = cache_mode(served, question).name
    own = "fp8" if mode.startswith("fp8") and question.gpu.multiplies("fp8") else "bf16"
    if not engine:
        return (own,) * len(served.geometry.attention)
    words = [
        (each.path.prefill if prompt else each.path.arithmetic) if each.path.refusal is None else UNKNOWN
        for each in attends(served, question)
    ]
    return tuple(own if word == UNKNOWN else word for word in words)


def crossover(at: Callable[[int], Traffic], gpu: GPU) -> int | None:
    """The smallest batch whose arithmetic takes at least as long as its bytes; None where there is none. Bytes grow
    ever slower with the batch (experts are touched again) and arithmetic in proportion, so they cross once at most."""

    def computes(batch: int) -> bool | None:
        bound = floor(at(batch).work, gpu)
        if bound.memory is None or bound.compute is None:
            return None
        return bound.compute >= bound.memory

    high = 1
    while not (found := computes(high)):
        if found is None or high >= LARGEST:
            return None
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if computes(middle) else (middle, high)
    return high


def unquantized(served: Served) -> Served:
    """The same model with the cache and every weight that is stored in less in its own dtype."""
    bits = formats[served.geometry.dtype].bits
    groups = tuple(
        replace(group, linear=None, nbytes=group.matrix.parameters * bits // 8)
        if group.bits < bits
        else group
        for group in served.groups
    )
    return replace(served, groups=groups, kv=None)


def _step(traffic: Traffic, gpu: GPU, tokens: int) -> Step:
    measured = any(gpu.achievable(column(gpu, name)) for name in traffic.flops)
    estimate = floor(traffic.work, gpu, achievable=True) if measured else None
    return Step(tokens, traffic, floor(traffic.work, gpu), estimate)


def _experts(served: Served, tokens: int) -> tuple[Experts, ...]:
    found = {
        (matrix.experts, matrix.active, matrix.name.rpartition(".")[0]): matrix
        for matrix in (group.matrix for group in served.groups)
        if matrix.role is Role.EXPERT and matrix.experts > 1
    }
    return tuple(
        Experts(name, experts, active, expected(matrix, tokens))
        for (experts, active, name), matrix in found.items()
    )


def _assumptions(served: Served, question: Question, routed: bool) -> tuple[str, ...]:
    """What the numbers rest on, in words."""
    said = [
        "a step streams every weight once and gathers embedding rows; launches and activations are not counted"
    ]
    if routed:
        said.append("experts: at least those of one token; the expected number assumes uniform routing")
    if question.tp > 1:
        each = question.batch * served.geometry.hidden * 2
        said.append(
            f"communication is not counted: about {2 * served.geometry.layers} all-reduces of {each} bytes in a "
            "decode step"
        )
    if question.pp > 1:
        said.append("a step passes all pipeline stages, one after the other")
    return tuple(said)
