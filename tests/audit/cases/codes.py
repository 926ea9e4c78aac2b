"""Cases of the rules about codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from audit.asking import Ask, Case
from audit.editing import Array, at, edit, quantized
from narrowcast.numbers.codec import decode_table, encode
from narrowcast.numbers.formats import E4M3FN

MODULE = "model.layers.1.mlp.up_proj"
CODES = f"{MODULE}.weight"


def fp8(folder: Path, change: Callable[[Array], Array], **expect: object) -> Ask:
    """Codes of a matrix [352, 128] under one scale for each row."""
    found = {"tensor": CODES, **expect} if expect else {}
    return Ask(edit(quantized(folder, "fp8_dynamic"), {CODES: change}), expect=found)


def int8(folder: Path, change: Callable[[Array], Array], **expect: object) -> Ask:
    """Integers of a matrix [352, 128] under one scale for each row."""
    return Ask(edit(quantized(folder, "int8"), {CODES: change}), expect=expect)


def scaled(old: Array, exponents: int) -> Array:
    """E4M3 codes of numbers times a power of two, cut at the top and at zero."""
    values = decode_table(E4M3FN)[old] * 2.0**exponents
    return encode(np.clip(values, -448, 448).astype(np.float32), E4M3FN).codes


def half(change: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A change of every other row."""

    def changed(old: Array) -> Array:
        new = old.copy()
        new[::2] = change(old[::2])
        return new

    return changed


def one_left(change: Callable[[Array], Array], code: int) -> Callable[[Array], Array]:
    """A change of all elements but the last, which becomes ``code``."""
    return lambda old: at((-1, -1), code)(change(old))


def sparse(share: float) -> Callable[[Array], Array]:
    """The first ``share`` of every row is zero."""

    def changed(old: Array) -> Array:
        new = old.copy()
        new[:, : round(share * old.shape[1])] = 0
        return new

    return changed


def none(old: Array) -> Array:
    return np.zeros_like(old)


def ones(old: Array) -> Array:
    return np.full_like(old, 0x38)


CASES = {
    "NC301": Case(
        lambda p: fp8(p, at((5, 7), 0xFF), at=(5, 7), got="0xFF", count=1, severity="error"),
        lambda p: fp8(p, at((5, 7), 0xFE)),
    ),
    "NC310": Case(
        lambda p: fp8(p, lambda old: scaled(old, 2), severity="warning"),
        lambda p: fp8(p, half(lambda old: scaled(old, -1))),
    ),
    "NC320": Case(lambda p: fp8(p, none, count=352 * 128), lambda p: fp8(p, one_left(none, 0x38))),
    "NC321": Case(lambda p: fp8(p, ones, count=352 * 128), lambda p: fp8(p, one_left(ones, 0x39))),
    "NC324": Case(
        lambda p: fp8(p, sparse(0.95), facts={"share": 122 / 128}), lambda p: fp8(p, sparse(0.75))
    ),
}  # fmt: skip
