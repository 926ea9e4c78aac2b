"""One model in eight formats on one GPU: what each weighs, streams, and takes at least.

    all        every matrix in the format, the head and the embedding too: what the format could give
    linears    what presets write: embedding, head, routers and norms stay in the model's dtype

The same step of the same batch at the same context for all; the cache is as it was asked for, and ``weights`` gives the
bound without it. Lower bounds, as everywhere in ``steps``. ``gain`` is what bytes allow a decode step to be faster than
with BF16 weights at this context, ``weights_gain`` where the cache is still empty; measured gains lie below it. Of
experts both count those that uniform routing touches, the most, since a gain is a bound from above.

The arithmetic of matrices is the lowest that the GPU's instructions allow, that of attention the engine's, which is the
same for all. Left out: whether the engine has a kernel for the matrices that uses it, which ``steps`` with the engine's
paths takes into account for the model as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from narrowcast.hardware.cost import Work, column, floor
from narrowcast.hardware.gpus import GPU
from narrowcast.numbers.formats import BF16, formats
from narrowcast.serving.loading import fitting
from narrowcast.serving.question import Question
from narrowcast.serving.served import Group, Served
from narrowcast.serving.steps import attention_arithmetic, possible
from narrowcast.serving.traffic import cache_mode, decode, multiplied, prefill
from narrowcast.tensors.presets import LinearScheme, Preset, presets

Covers = Literal["all", "linears"]
# Names as people write them, to dtypes and presets.
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "FP32": "fp32", "BF16": "bf16", "FP8": "fp8_dynamic", "MXFP8": "mxfp8", "INT8": "int8",
        "INT4 g128": "w4a16", "NVFP4": "nvfp4", "MXFP4": "mxfp4",
    }
)  # fmt: skip
_WIDE = ("FP32", "BF16")


@dataclass(frozen=True)
class FormatRow:
    """One format. ``weights`` are bytes of the whole model, ``streamed`` those of one decode step on one GPU, ``bits``
    the mean of the matrices in the format. ``decode`` and ``prefill`` are lower bounds in seconds with the cache,
    ``decode_weights`` without it; None where the GPU's numbers are not known. ``arithmetic`` is that of the matrices in
    the format, ``how`` the same in words: native, weight-only, or as stored."""

    name: str
    covers: Covers
    weights: int
    streamed: float
    bits: float
    decode_weights: float | None
    decode: float | None
    tokens_per_second: float | None
    prefill: float | None
    gain: float
    weights_gain: float
    arithmetic: str
    how: str


@dataclass(frozen=True)
class SideBySide:
    """The rows, those of ``all`` first, and what they share."""

    gpu: str
    batch: int
    context: int
    cache: str
    cache_bytes: float
    rows: tuple[FormatRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data: bytes, seconds, and tokens a second for each sequence."""
        return asdict(self)


def side_by_side(served: Served, question: Question) -> SideBySide:
    """``served`` in eight formats, whatever it is in now. Errors as ``steps``."""
    rows = tuple(_rows(served, question))
    traffic = decode(
        served, question, ["bf16"] * len(served.groups), ["bf16"] * len(served.geometry.attention)
    )
    return SideBySide(
        question.gpu.name, question.batch, question.context, cache_mode(served, question).name,
        traffic.cache_read + traffic.cache_written + traffic.states, rows,
    )  # fmt: skip


def _rows(served: Served, question: Question) -> Iterator[FormatRow]:
    covers: tuple[Covers, ...] = ("all", "linears")
    for cover in covers:
        wide = in_format(served, "BF16", cover)
        for name in FORMATS:
            changed = in_format(served, name, cover)
            if cover == "all" or name not in _WIDE:
                yield _row(changed, wide, name, cover, question)


def in_format(served: Served, name: str, cover: Covers = "linears") -> Served:
    """The model with its matrices in the format of that name."""
    if name in _WIDE:
        return replace(
            served, groups=tuple(group.held_in(None, formats[FORMATS[name]]) for group in served.groups)
        )
    preset = presets[FORMATS[name]]
    return replace(
        served, groups=tuple(group.held_in(_linear(group, preset, cover), BF16) for group in served.groups)
    )


def _linear(group: Group, preset: Preset, cover: Covers) -> LinearScheme | None:
    if cover == "all":
        return preset.linear
    return None if group.matrix.role in preset.excluded else fitting(preset, group.matrix.shape[1])


def _row(served: Served, wide: Served, name: str, cover: Covers, question: Question) -> FormatRow:
    gpu = question.gpu
    arithmetics = [possible(group.linear, gpu, group.dtype.name) for group in served.groups]
    attention = attention_arithmetic(served, question, engine=True)
    step = decode(served, question, arithmetics, attention)
    whole = attention_arithmetic(served, question, engine=True, prompt=True)
    prompt = prefill(served, question, arithmetics, whole)
    before, now = (
        decode(each, question, ["bf16"] * len(each.groups), attention, uniform=True)
        for each in (wide, served)
    )
    seconds = floor(step.work, gpu).seconds
    inside = [group for group in served.groups if (group.linear is not None or name in _WIDE)]
    counted = [group for group in inside if multiplied(group, served)] or inside
    used = possible(counted[0].linear, gpu, counted[0].dtype.name)
    return FormatRow(
        name, cover, served.nbytes, step.weights + step.gathered,
        8 * sum(group.nbytes for group in counted) / sum(group.matrix.parameters for group in counted),
        floor(Work(step.weights + step.gathered, {}), gpu).memory, seconds, 1 / seconds if seconds else None,
        floor(prompt.work, gpu).seconds, before.moved / now.moved,
        (before.weights + before.gathered) / (now.weights + now.gathered), _word(used, gpu),
        _how(counted[0], used, gpu),
    )  # fmt: skip


def _how(group: Group, used: str, gpu: GPU) -> str:
    if group.linear is None:
        return "as stored"
    return "native" if used != "bf16" else f"weight-only, multiplied in {_word(used, gpu)}"


def _word(used: str, gpu: GPU) -> str:
    return column(gpu, used) if used == "bf16" else used
