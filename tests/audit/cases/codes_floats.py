"""Cases of the rules about numbers of unquantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from audit.asking import Ask, Case
from audit.editing import Array, at, edit, parent

NORM, WEIGHT = "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"


def plain(folder: Path, name: str, change: Callable[[Array], Array], **expect: object) -> Ask:
    return Ask(edit(parent(folder), {name: change}), expect=expect)


def bf16(value: float) -> int:
    return int(np.array(value, ml_dtypes.bfloat16).view(np.uint16))


def filled(value: float) -> Callable[[Array], Array]:
    return lambda old: np.full_like(old, bf16(value))


def but_last(value: float) -> Callable[[Array], Array]:
    return lambda old: at((-1, -1), bf16(1.0))(np.full_like(old, bf16(value)))


CASES = {
    "NC302": Case(
        lambda p: plain(p, NORM, at((9,), 0x7FC0), tensor=NORM, at=(9,), count=1, severity="error"),
        lambda p: plain(p, NORM, at((9,), 0x7F7F)),
    ),
    "NC303": Case(
        lambda p: plain(p, WEIGHT, at((2, 3), bf16(3e38)), tensor=WEIGHT, at=(2, 3)),
        lambda p: plain(p, WEIGHT, at((2, 3), bf16(2.0**63))),
    ),
    "NC322": Case(
        lambda p: plain(p, WEIGHT, filled(0.0), tensor=WEIGHT, count=352 * 128),
        lambda p: plain(p, NORM, filled(0.0)),
    ),
    "NC323": Case(
        lambda p: plain(p, WEIGHT, filled(0.5), tensor=WEIGHT, count=352 * 128),
        lambda p: plain(p, WEIGHT, but_last(0.5)),
    ),
}
