"""Weights that an engine quantizes while it loads them: its own names, its own scales, its own arithmetic.

    name                           weight                                input
    fp8_per_tensor                 amax/448, x · (1/s), one scale for    per token: max(amax/448, 1/(448·512)), x / s
                                   all that is fused
    fp8_per_channel                max(amax/448, 1/(448·512)), x / s     the same
    fp8_per_block                  128 x 128 of the fused matrix,        per 128: max(amax, 1e-10)/448, x / s
                                   max(amax, 1e-4)/448, x · (1/s)
    mxfp8                          2^ceil(log2(amax/448)) per 32         the same
    mxfp4                          bump at 1.75 per 32                   the same
    int8_per_channel_weight_only   experts only: amax/127 in the         per token: amax/127, x · (127/amax)
                                   weight's dtype, x / s in it
    nvfp4_per_token                experts only: 1/(2688/amax) over      the same with amax/2688 of each token
                                   E4M3 per 16
    llm_int8                       amax/127, x · (127/amax)              the same; columns with |x| ≥ 6 stay wide

The first seven are vLLM 0.32's (model_executor/layers/quantization/online, csrc/.../w8a8), the last is bitsandbytes
0.50's as transformers calls it. Attention, MLP and experts are taken; embeddings, heads, norms and routers are not.
Engines concatenate q, k and v, and gate and up, before they quantize, so one scale per tensor is shared by them and
blocks of 128 rows go on from one to the next.

A preset's name is taken too, with our own arithmetic; where both have a name, the engine's is meant.

Left out: the approximate reciprocals of NVFP4's device code (exact ones stand in), and vLLM's zero scale of a weight
that is all zeros, which decodes to the same zeros as ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch

from narrowcast.errors import UsageError
from narrowcast.jobs.matching import Held
from narrowcast.model.fused import SIBLINGS
from narrowcast.model.roles import Role
from narrowcast.numbers.formats import E2M1, E4M3FN, E8M0, FP32, INT8
from narrowcast.runtime.inputs import Inputs, operand_of
from narrowcast.runtime.product import Operand
from narrowcast.runtime.quantizing import quantized
from narrowcast.tensors.presets import EXCLUDED_ROLES, LinearScheme, presets
from narrowcast.tensors.schemes import OURS, Arithmetic, Scale, Scheme, Tile, integer

TOKEN_FLOOR = float(np.float32(1) / np.float32(448 * 512))
RECIPROCAL, INVERSE = Arithmetic("reciprocal"), Arithmetic("inverse")
ENGINE, BITSANDBYTES = "vLLM 0.32", "bitsandbytes 0.50"
OUTLIER = 6.0  # transformers' llm_int8_threshold


def _floor(amax: float) -> float:
    """The scale of a tile whose amax is raised to this one, as fp32 divides."""
    return float(np.float32(amax) / np.float32(E4M3FN.max))


def _fp8(name: str, tile: Tile, floor: float = 0.0, arithmetic: Arithmetic = OURS) -> Scheme:
    return Scheme(name, E4M3FN, (Scale(FP32, tile, "amax", floor=floor),), None, arithmetic, ENGINE)


def _int8(name: str, arithmetic: Arithmetic, source: str) -> Scheme:
    return Scheme(name, INT8, (Scale(FP32, (1, 0), "amax", 127.0),), None, arithmetic, source)


def _nvfp4(name: str, outer: Scale) -> Scheme:
    return Scheme(name, E2M1, (Scale(E4M3FN, (1, 16), "amax"), outer), None, RECIPROCAL, ENGINE)


FP8_TOKEN = _fp8("fp8_token", (1, 0), TOKEN_FLOOR)
FP8_GROUP = _fp8("fp8_group128", (1, 128), _floor(1e-10))
INT8_TOKEN = _int8("int8_token", INVERSE, ENGINE)
MXFP8 = Scheme("mxfp8", E4M3FN, (Scale(E8M0, (1, 32), "log2"),), None, OURS, ENGINE)
MXFP4 = Scheme(
    "mxfp4", E2M1, (Scale(E8M0, (1, 32), "bump(1.75)"),), None, Arithmetic(zero_tile="eps"), ENGINE
)
LLM_INT8 = _int8("int8_vectorwise", INVERSE, BITSANDBYTES)


@dataclass(frozen=True)
class Method:
    """What an online scheme does: the computation, whether fused siblings are quantized as one matrix, whether only
    experts are taken, and from where on an input column stays wide."""

    linear: LinearScheme
    fused: bool = False
    experts: bool = False
    threshold: float | None = None


METHODS: dict[str, Method] = {
    "fp8_per_tensor": Method(LinearScheme(_fp8("fp8_tensor", (0, 0), 0.0, RECIPROCAL), FP8_TOKEN), True),
    "fp8_per_channel": Method(LinearScheme(_fp8("fp8_channel", (1, 0), TOKEN_FLOOR), FP8_TOKEN)),
    "fp8_per_block": Method(
        LinearScheme(
            _fp8("fp8_block128", (128, 128), _floor(1e-4), RECIPROCAL),
            FP8_GROUP,
        ),
        True,
    ),
    "mxfp8": Method(LinearScheme(MXFP8, MXFP8)),
    "mxfp4": Method(LinearScheme(MXFP4, MXFP4)),
    "int8_per_channel_weight_only": Method(
        LinearScheme(
            _int8("int8_channel", Arithmetic(precision="source"), ENGINE),
            INT8_TOKEN,
            accumulate="int32",
        ),
        experts=True,
    ),
    "nvfp4_per_token": Method(
        LinearScheme(
            _nvfp4("nvfp4", Scale(FP32, (0, 0), "inverse", floor=1e-8 / 2688)),
            _nvfp4("nvfp4_token", Scale(FP32, (1, 0), "amax")),
        ),
        True,
        experts=True,
    ),
    "llm_int8": Method(LinearScheme(LLM_INT8, LLM_INT8, accumulate="int32"), threshold=OUTLIER),
}


@dataclass
class Online:
    """One online scheme. Raises UsageError for a name that is neither an engine's nor a preset without statistics."""

    name: str
    _made: dict[str, Operand] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.method = _method(self.name)

    @property
    def linear(self) -> LinearScheme:
        return self.method.linear

    def takes(self, one: Held) -> bool:
        """Whether the engine quantizes this matrix: a linear of attention or MLP, or one of an expert."""
        if self.method.experts:
            return one.role == Role.EXPERT
        return one.kind == "Linear" and one.role not in EXCLUDED_ROLES

    def quantize(
        self, path: str, members: Sequence[str], read: Callable[[str], torch.Tensor]
    ) -> tuple[Operand, Inputs | None]:
        """The linear called ``path``; ``members`` are the paths that are fused with it, itself included, in the
        engine's order, and ``read`` gives the values [N, K] of one. Raises UsageError where the engine refuses."""
        linear = self.linear
        if path not in self._made:
            together = list(members) if self.method.fused else [path]
            parts = [read(member) for member in together]
            self._refuse(path, parts[0].shape[1])
            whole = operand_of(
                quantized(torch.cat(parts) if len(parts) > 1 else parts[0], linear.weight), self._integers
            )
            ends = [0, *accumulate(len(part) for part in parts)]
            self._made = {member: _rows(whole, ends[i], ends[i + 1]) for i, member in enumerate(together)}
        inputs = Inputs(linear.input, threshold=self.method.threshold) if linear.input is not None else None
        return self._made.pop(path), inputs

    @property
    def _integers(self) -> bool:
        return self.linear.input is not None and integer(self.linear.input)

    def _refuse(self, path: str, k: int) -> None:
        group = self.linear.weight.group if self.linear.weight.inner.format is E8M0 else 0
        if self.name in METHODS and group and k % group:
            raise UsageError(
                f"{path} is not a whole number of groups wide, so the engine refuses it", where=self.name, got=k,
                wanted=f"a multiple of {group}",
            )  # fmt: skip


def siblings(path: str) -> list[str]:
    """The names of the linears that engines load as one matrix with this one, itself included, in their order."""
    parent, dot, leaf = path.rpartition(".")
    leaves = next((group for group in SIBLINGS if leaf in group), (leaf,))
    return [f"{parent}{dot}{one}" for one in leaves]


def _rows(whole: Operand, start: int, stop: int) -> Operand:
    """Some rows of an operand, without holding on to the others."""
    if (start, stop) == (0, len(whole.matrix)):
        return whole
    scale = whole.scale if whole.scale is None or len(whole.scale) == 1 else whole.scale[start:stop]
    return replace(whole, matrix=whole.matrix[start:stop].clone(), scale=scale)


def _method(name: str) -> Method:
    spelled = name.lower().replace("-", "_")
    if spelled in METHODS:
        return METHODS[spelled]
    if spelled not in presets:
        near = difflib.get_close_matches(spelled, [*METHODS, *presets], 3)
        raise UsageError(
            "unknown online scheme", got=name, wanted=", ".join(METHODS),
            remedy=f"did you mean {', '.join(near)}?" if near else "or the name of a preset, see `narrowcast presets`",
        )  # fmt: skip
    preset = presets[spelled]
    if preset.linear.calibrated:
        raise UsageError(
            "an online scheme has no statistics, and this preset needs them", got=name,
            remedy=f"use {preset.nearest}" if preset.nearest else "quantize with --stats and run the result",
        )  # fmt: skip
    return Method(
        preset.linear,
        fused=len(preset.linear.weight.scales) == 2 or preset.linear.weight.inner.tile == (0, 0),
    )
