"""Cases of the rules about a matrix beside its parent's."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

import narrowcast
import toys
from audit.asking import Ask, Case
from audit.editing import Array, at, edit, parent, quantized
from narrowcast.numbers.codec import to_bf16, widen
from narrowcast.numbers.formats import BF16

UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"


def against(model: Path, folder: Path, **expect: object) -> Ask:
    return Ask(model, {"against": folder / "parent"}, expect)


def changed(
    folder: Path, changes: dict[str, object], preset: str, name: str = "child", **more: object
) -> Path:
    """The parent with some tensors changed, quantized: what a faulty tool would have written."""
    other = edit(toys.llama(folder / f"{name}-source"), changes)
    narrowcast.quantize(other, folder / name, preset, container="compressed-tensors", **more)
    parent(folder)
    return folder / name


def values(change):
    """A change of bf16 patterns that is a change of their values."""
    return lambda old: to_bf16(np.ascontiguousarray(change(widen(old, BF16)), np.float32))


def healthy(preset: str):
    return lambda folder: against(quantized(folder, preset), folder)


def other_shape(folder: Path) -> Ask:
    model = changed(folder, {f"{UP}.weight": lambda old: np.ascontiguousarray(old.T)}, "fp8_dynamic")
    return against(model, folder, tensor=UP, got="[128, 352]", wanted="[352, 128]", severity="error")


def nibbles(old: Array) -> Array:
    return (old >> 4) | (old << 4)


def swapped(folder: Path) -> Ask:
    model = edit(quantized(folder, "nvfp4a16"), {f"{UP}.weight_packed": nibbles})
    return against(model, folder, tensor=UP, severity="error")


def noisy(decibels: float):
    """Noise of so many dB below the weight."""

    def change(old: Array) -> Array:
        rng = np.random.default_rng(5)
        noise = rng.standard_normal(old.shape) * np.sqrt(np.square(old).mean()) * 10 ** (-decibels / 20)
        return old + noise

    return values(change)


def nine_below(folder: Path) -> Ask:
    """FP8 keeps 31.6 dB; noise at 23.1 dB more leaves 22.5 dB, 9 below."""
    return against(
        changed(folder, {f"{UP}.weight": noisy(23.1)}, "fp8_dynamic"), folder, tensor=UP, severity="warning"
    )


def three_below(folder: Path) -> Ask:
    """As much as GPTQ costs."""
    return against(changed(folder, {f"{UP}.weight": noisy(31.6)}, "fp8_dynamic"), folder)


def nan_code(folder: Path) -> Ask:
    model = edit(quantized(folder, "fp8_dynamic"), {f"{UP}.weight": at((3, 5), 0x7F)})
    return against(model, folder, tensor=UP, count=1)


def on_the_grid(folder: Path) -> Ask:
    """The parent is the decoded child; scales of 2^k, so that decoded values are bf16."""
    source = toys.llama(folder / "first")
    narrowcast.quantize(source, folder / "child", "mxfp4", container="compressed-tensors")
    narrowcast.convert(folder / "child", folder / "parent", "plain")
    return against(folder / "child", folder, severity="info")


def outlier(folder: Path, size: float, preset: str) -> Ask:
    """Field case 17: one outlier of 3e38 under a per-tensor scale flushes all others."""

    def change(old: Array) -> Array:
        new = old.copy()
        new[0, 0] = size
        return new

    edit(parent(folder), {f"{DOWN}.weight": values(change)})  # gate and up would share its scale
    return against(quantized(folder, preset), folder)


def flushed(folder: Path) -> Ask:
    ask = outlier(folder, 3e38, "fp8_per_tensor")
    return Ask(ask.model, ask.options, {"tensor": DOWN, "count": 352 * 128 - 1, "severity": "error"})


def big_one(folder: Path) -> Ask:
    return outlier(folder, 3.0, "fp8_per_tensor")


def zero_row(folder: Path) -> Ask:
    model = edit(quantized(folder, "nvfp4a16"), {f"{UP}.weight_packed": at((7,), 0)})
    return against(model, folder, tensor=UP, at=(7, 0), count=8)


def zero_before(folder: Path) -> Ask:
    """The row is zero in the parent as well."""
    edit(parent(folder), {f"{UP}.weight": at((7,), 0)})
    return against(quantized(folder, "nvfp4a16"), folder)


def flipped(folder: Path) -> Ask:
    """One FP8 code that was small is the largest one."""
    model = edit(quantized(folder, "fp8_dynamic"), {f"{UP}.weight": at((9, 11), 0x7E)})
    return against(model, folder, tensor=UP, at=(9, 11), count=1)


def moved(folder: Path) -> Ask:
    """Codes that went up or down by one at random: as stochastic rounding leaves them."""
    rng = np.random.default_rng(2)

    def step(old: Array) -> Array:
        codes = np.stack([old & 15, old >> 4])
        codes = np.clip(codes + rng.integers(0, 2, codes.shape) * (rng.random(codes.shape) < 0.3), 0, 15)
        return (codes[0] | codes[1] << 4).astype(np.uint8)

    def words(old: Array) -> Array:
        return step(old.view(np.uint8)).view(old.dtype)

    return against(edit(quantized(folder, "w4a16"), {f"{UP}.weight_packed": words}), folder, tensor=UP)


def clipped(folder: Path) -> Ask:
    """The parent's largest weights are cut to a third before they are quantized, as with a scale that is too small."""
    model = quantized(folder, "int8")
    scale = f"{UP}.weight_scale"

    def third(old: Array) -> Array:
        return (
            (widen(old, BF16) / 3).astype(ml_dtypes.bfloat16).view(np.uint16)
            if old.dtype == np.uint16
            else old / 3
        )

    def codes(old: Array) -> Array:
        return (
            np.clip(np.rint(old.view(np.int8).astype(np.float32) * 3), -127, 127)
            .astype(np.int8)
            .view(old.dtype)
        )

    return against(edit(model, {scale: third, f"{UP}.weight": codes}), folder, tensor=UP, severity="warning")


CASES = {
    "NC700": Case(other_shape, healthy("fp8_dynamic")),
    "NC710": Case(swapped, healthy("nvfp4a16")),
    "NC711": Case(nine_below, three_below),
    "NC712": Case(nan_code, healthy("fp8_dynamic")),
    "NC713": Case(on_the_grid, healthy("mxfp4")),
    "NC720": Case(clipped, healthy("int8")),
    "NC721": Case(flushed, big_one),
    "NC722": Case(zero_row, zero_before),
    "NC723": Case(flipped, healthy("fp8_dynamic")),
    "NC724": Case(moved, healthy("w4a16")),
}
