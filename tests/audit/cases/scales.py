"""Cases of the rules about scales themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from audit.asking import Ask, Case
from audit.editing import at, edit, quantized

UP = "model.layers.1.mlp.up_proj"
SCALE = f"{UP}.weight_scale"


def nan_scale(folder: Path) -> Ask:
    """The audit variant of a published tool's zero block: one byte 0x7F at row 3, column 1."""
    model = edit(quantized(folder, "nvfp4a16"), {SCALE: at((3, 1), 0x7F)})
    return Ask(model, expect={"tensor": SCALE, "at": (3, 1), "count": 1, "got": "0x7F", "severity": "error"})


def largest_scale(folder: Path) -> Ask:
    return Ask(edit(quantized(folder, "nvfp4a16"), {SCALE: at((3, 1), 0x7E)}))


def _zero_codes(old: np.ndarray) -> np.ndarray:
    new = old.copy()
    new[3, 8:16] = 0  # sixteen codes, the second block of row 3
    return new


def zero_over_codes(folder: Path) -> Ask:
    model = edit(quantized(folder, "nvfp4a16"), {SCALE: at((3, 1), 0)})
    expect = {
        "at": (3, 1), "got": "0x00", "severity": "error", "said": "1 scales are zero over codes that are not",
    }  # fmt: skip
    return Ask(model, expect=expect)


def zero_over_zeros(folder: Path) -> Ask:
    model = quantized(folder, "nvfp4a16")
    return Ask(edit(model, {SCALE: at((3, 1), 0), f"{UP}.weight_packed": _zero_codes}))


def negative_byte(folder: Path) -> Ask:
    model = edit(quantized(folder, "nvfp4a16"), {SCALE: at((0, 2), 0xB8)})
    return Ask(model, expect={"at": (0, 2), "got": "0xB8", "severity": "error"})


def negative_integer_scale(folder: Path) -> Ask:
    """Symmetric integers may have negative scales."""
    return Ask(edit(quantized(folder, "w4a16"), {SCALE: lambda old: old ^ 0x8000}))


def subnormal_fp16(folder: Path) -> Ask:
    model = quantized(folder, "w4a16", dtype="fp16")
    return Ask(edit(model, {SCALE: at((5, 0), 15 * 2.0**-24)}), expect={"at": (5, 0), "severity": "warning"})


def small_fp16(folder: Path) -> Ask:
    """Sixteen units are left: a rounding of 3 %, as E4M3's."""
    return Ask(edit(quantized(folder, "w4a16", dtype="fp16"), {SCALE: at((5, 0), 16 * 2.0**-24)}))


def value_cast(folder: Path) -> Ask:
    """What astype(uint8) makes of scales: numbers below 1 become 0."""
    model = quantized(folder, "mxfp4a16")
    cast = edit(model, {SCALE: lambda old: np.exp2(old.astype(np.float64) - 127).astype(np.uint8)})
    return Ask(cast, expect={"tensor": SCALE, "severity": "error", "got": "0x00"})


def without_bias(folder: Path) -> Ask:
    """Exponents as signed bytes, without their bias of 127."""
    model = quantized(folder, "mxfp4a16")
    return Ask(edit(model, {SCALE: lambda old: old - np.uint8(127)}), expect={"severity": "error"})


def zero_tiles(folder: Path) -> Ask:
    """Byte 0 over codes that are all zero is what libraries write."""

    def zeros(old: np.ndarray) -> np.ndarray:
        new = old.copy()
        new[::2] = 0
        return new

    return Ask(edit(quantized(folder, "mxfp4a16"), {SCALE: zeros, f"{UP}.weight_packed": zeros}))


def _blocks(every: int) -> Callable[[np.ndarray], np.ndarray]:
    """Packed codes in which every n-th block of sixteen is zero, shifted from row to row."""

    def change(old: np.ndarray) -> np.ndarray:
        blocks = old.copy().reshape(len(old), -1, 8)
        n, k = np.indices(blocks.shape[:2])
        blocks[(n + k) % every == 0] = 0
        return blocks.reshape(old.shape)

    return change


def underflowed(folder: Path) -> Ask:
    model = edit(quantized(folder, "nvfp4a16"), {f"{UP}.weight_packed": _blocks(4)})
    expect = {"tensor": f"{UP}.weight_packed", "at": (0, 0), "count": 352 * 8 // 4, "severity": "warning"}
    return Ask(model, expect=expect)


def dead_rows(folder: Path) -> Ask:
    """Rows that are zero from end to end are no underflow."""

    def change(old: np.ndarray) -> np.ndarray:
        new = old.copy()
        new[::3] = 0
        return new

    return Ask(edit(quantized(folder, "nvfp4a16"), {f"{UP}.weight_packed": change}))


CASES = {
    "NC110": Case(nan_scale, largest_scale),
    "NC111": Case(zero_over_codes, zero_over_zeros),
    "NC112": Case(negative_byte, negative_integer_scale),
    "NC113": Case(subnormal_fp16, small_fp16),
    "NC114": Case(value_cast, zero_tiles),
    "NC115": Case(underflowed, dead_rows),
}
