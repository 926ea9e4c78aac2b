"""Cases of the rules about coarse grids and zero points."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from audit.asking import Ask, Case
from audit.cases.codes import CODES, MODULE, fp8, half, int8, scaled
from audit.editing import Array, at, edit, edit_config, quantized
from narrowcast.numbers.codec import decode_table, encode
from narrowcast.numbers.formats import E4M3FN


def narrowed(largest: int) -> object:
    """Integers squeezed into -largest..largest."""
    return lambda old: np.round(old.astype(np.float32) / 128 * largest).astype(np.int8)


def coarse(old: Array) -> Array:
    """The two lowest of three mantissa bits cleared, as numbers of E2M1 under a power of two have them."""
    return old & 0xFC


def integers(old: Array) -> Array:
    return encode(np.round(decode_table(E4M3FN)[old]), E4M3FN).codes


def nearly(change: object, code: int) -> object:
    """The change, and one element that does not fit in."""
    return lambda old: at((200, 100), code)(change(old))  # type: ignore[operator]


def gptq(folder: Path, preset: str) -> Path:
    return quantized(folder, preset, "gptq")


def other_version(folder: Path) -> Ask:
    """Zero points of the second version under the label of the first: field case."""
    model = edit(
        gptq(folder, "w4a16"), {f"{MODULE}.qzeros": lambda old: np.full_like(old, 0x88888888 - 2**32)}
    )
    return Ask(
        model,
        expect={"tensor": f"{MODULE}.qzeros", "said": "its zero points look like v2", "severity": "error"},
    )


def mislabelled(folder: Path) -> Ask:
    """Asymmetric weights whose version is said to be the other: nothing contradicts it but the statistics."""
    model = gptq(folder, "w4a16_asym")
    edit_config(model, lambda config: config["quantization_config"].update(checkpoint_format="gptq"))
    edit_config(model, lambda config: config.update(checkpoint_format="gptq"), "quantize_config.json")
    return Ask(model, expect={"severity": "warning"})


def offset(folder: Path) -> Ask:
    """Codes as bytes with 128 for zero, under a label that reads them as signed."""
    model = edit(
        quantized(folder, "int8"), {f"{MODULE}.weight": lambda old: old.view(np.uint8) ^ np.uint8(128)}
    )
    return Ask(model, expect={"tensor": f"{MODULE}.weight", "severity": "error"})


def even(folder: Path) -> Ask:
    """Every code as often as any other: half of them in the outer half."""
    codes = np.random.default_rng(0).integers(0, 256, (352, 128)).astype(np.uint8)
    return Ask(edit(quantized(folder, "int8"), {f"{MODULE}.weight": ("I8", codes)}))


CASES = {
    "NC330": Case(
        lambda p: int8(p, narrowed(7), said="15 of 256 values occur, from -7 to 7"), lambda p: int8(p, narrowed(9))
    ),
    "NC340": Case(
        lambda p: fp8(p, coarse, said="the lowest 2 of 3 mantissa bits are never set"),
        lambda p: fp8(p, nearly(coarse, 0x39)),
    ),
    "NC341": Case(
        lambda p: fp8(p, integers, got="integers only"), lambda p: fp8(p, nearly(integers, 0x3C))
    ),
    "NC350": Case(other_version, lambda p: Ask(gptq(p, "w4a16"))),
    "NC351": Case(mislabelled, lambda p: Ask(gptq(p, "w4a16_asym"))),
    "NC352": Case(offset, even),
    "NC360": Case(
        lambda p: fp8(p, lambda old: scaled(old, -1), count=352, tensor=f"{CODES}_scale"),
        lambda p: fp8(p, half(lambda old: scaled(old, -1))),
    ),
}  # fmt: skip
