"""What vLLM 0.32 makes of a quantized layer that a checkpoint describes, where that is not what its file says.

A file says which scheme an input has; its scales and codes are the engine's own (csrc/.../w8a8, csrc/.../fp4):

    FP8, one stored scale       x · (1/s)                                    not x / s
    FP8 per token               s = max(amax/448, 1/(448·512)),  x / s
    FP8 per group               s = max(amax, 1e-10)/448,        x / s
    INT8 per token              s = amax/127,                    x · (127/amax)   the weight's tool may say 127.5
    INT8 around a zero point    round(x · (1/s)) + z;  of a token s = (max - min)/255, z = round(-128 - min/s)
    NVFP4                       S = E4M3(g · (amax/6)),          x · (1/(S · (1/g)));  S = 0 has codes 0
    MX                          the numbers of ours: 2^ceil(log2(amax/448)), and a bump at 1.75 for FP4

Layers that are loaded as one matrix keep one scale. Where a checkpoint has several,

    FP8 per tensor     every member is decoded in fp16 and quantized again under the largest, x · (1/s). That happens to
                       a layer by itself too, and changes it where its scale is below some 2^-15
    NVFP4              the largest stored number is kept, codes and block scales as they are; of experts the first's
    inputs             the largest stored number; of experts in FP8 that of all experts

``runtime.inputs`` and ``runtime.stored`` compute it.

Left out: the approximate reciprocals of NVFP4's device code (exact ones stand in), static scales of asymmetric inputs
that differ in a fused layer, input scales of NVFP4 experts, which depend on the kernel, and scales of UE8M0 groups
below 1e-10.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.containers.spelling import widened
from narrowcast.jobs.coded import Coded
from narrowcast.jobs.matching import Held
from narrowcast.kernels import Rows
from narrowcast.model.fused import FUSING
from narrowcast.model.roles import Role
from narrowcast.numbers.codec import decode, encode
from narrowcast.numbers.formats import E2M1, E4M3FN, FP32, INT8
from narrowcast.runtime.online import FP8_GROUP, FP8_TOKEN, INT8_TOKEN
from narrowcast.tensors.scaling import store_scale
from narrowcast.tensors.schemes import Arithmetic, Scale, Scheme

NVFP4 = Scheme(
    "nvfp4", E2M1, (Scale(E4M3FN, (1, 16), "amax"), Scale(FP32, (0, 0), "amax", divides=True)), None,
    Arithmetic("reciprocal", zero_tile="zero"), "vLLM 0.32",
)  # fmt: skip
DIVIDING = ("compressed-tensors", "auto-round")  # NVFP4's outer scales lie in the file as divisors
_EXPERT = re.compile(r"^(.*\.experts\.)\d+(\.[^.]+)$")


@cache
def as_engine(scheme: Scheme) -> Scheme:
    """The scheme of an input in the engine's arithmetic; itself where the engine has no other."""
    level = scheme.inner
    if scheme.element is E2M1 and level.format is E4M3FN and level.tile == (1, 16):
        return NVFP4
    if level.format is not FP32 or scheme.zero is not None or len(scheme.scales) > 1:
        return scheme
    if scheme.element is E4M3FN and level.tile == (0, 0):
        return scheme.with_arithmetic(Arithmetic("reciprocal"))
    known = {(E4M3FN, (1, 0)): FP8_TOKEN, (E4M3FN, (1, 128)): FP8_GROUP, (INT8, (1, 0)): INT8_TOKEN}
    return next((one for key, one in known.items() if key == (scheme.element, level.tile)), scheme)


def loaded(one: Held, coded: Coded, together: Sequence[Held]) -> tuple[Rows, float | None, bool]:
    """All rows of a matrix and its outer scale as the engine has them, and whether that is another scale than the
    file's. ``together`` are the matrices of one fused layer in the engine's order, this one among them."""
    rows, outer = coded.rows(one.checkpoint, 0, coded.shape[0]), coded.outer(one.checkpoint)
    scheme = coded.how.scheme
    if outer is None or not _fuses(coded):
        return rows, outer, False
    found = [other.coded.outer(other.checkpoint) for other in together if other.coded is not None]
    outers = [value for value in found if value is not None] or [outer]
    if len(scheme.scales) == 2:
        largest = (
            scheme.scales[1].divides or coded.how.container not in DIVIDING
        )  # of the numbers in the file
        kept = outers[0] if one.role == Role.EXPERT else (max if largest else min)(outers)
        return rows, kept, kept != outer
    kept = max(outers)
    if scheme.element is not E4M3FN or coded.stored.linear.input is None:
        return rows, outer, False
    codes = requantized(outer, kept)[rows.packed]
    scale = store_scale(np.full(rows.scales.shape, kept, np.float32), scheme.inner.format)
    return Rows(codes, scale, rows.zero), kept, kept != outer


def differing(together: Sequence[Held]) -> bool:
    """Whether matrices that are loaded as one have several outer scales or scales of inputs."""
    coded = [(one, one.coded) for one in together if one.coded is not None and _fuses(one.coded)]
    outers = {found.outer(one.checkpoint) for one, found in coded}
    inputs = {_input(one, found, False) for one, found in coded if _has_input(one)}
    return len(outers) > 1 or len(inputs) > 1


def requantized(own: float, kept: float) -> NDArray[np.uint8]:
    """E4M3 codes [256] that codes under one scale become under another: decoded in fp16, x · (1/s), clamped."""
    codes = np.arange(256, dtype=np.uint8)
    values = decode(codes, E4M3FN)
    with np.errstate(over="ignore", invalid="ignore"):
        half = (values.astype(np.float16).astype(np.float32) * np.float32(np.float16(own))).astype(np.float16)
        y = half.astype(np.float32) * (np.float32(1) / np.float32(kept))
    bad = np.isnan(values)
    made = encode(np.clip(np.where(bad, np.float32(0), y), -E4M3FN.max, E4M3FN.max), E4M3FN).codes
    return np.where(bad, codes, made).astype(np.uint8)


def static_input(one: Held, coded: Coded, together: Sequence[Held]) -> float:
    """The stored scale of an input as the engine keeps it: a multiplier, of NVFP4 the divisor. UsageError where the
    file has none."""
    linear = coded.stored.linear
    two = linear.input is not None and len(linear.input.scales) == 2
    own = _input(one, coded, two)
    if not _fuses(coded) or coded.how.part("input_zero") is not None or (two and one.role == Role.EXPERT):
        return own
    stored = [own, *(_input(other, other.coded, two) for other in together if _has_input(other))]
    # Where the file multiplies, its largest number is the least divisor.
    return min(stored) if two and coded.how.container not in DIVIDING else max(stored)


def experts(path: str, names: Iterable[str]) -> list[str]:
    """The same projection of every expert of a layer, of those that are there."""
    match = _EXPERT.match(path)
    return [
        name
        for name in names
        if match and (found := _EXPERT.match(name)) and found.groups() == match.groups()
    ]


def _fuses(coded: Coded) -> bool:
    return coded.how.container in FUSING


def _has_input(one: Held) -> bool:
    coded = one.coded
    part = coded.how.part("input") if coded is not None else None
    return coded is not None and part is not None and coded.place.stem + part.suffix in one.checkpoint.entries


def _input(one: Held, coded: Any, divides: bool) -> float:
    if divides and coded.how.container in DIVIDING:
        part, stored = coded.how.as_stored(one.checkpoint, coded.place, "input")
        return float(widened(stored, part.dtype).reshape(-1)[0])
    value = coded.how.static(one.checkpoint, coded.place, coded.shape, "input").reshape(-1)[0]
    return float(np.float32(1) / np.float32(value)) if divides else float(value)
