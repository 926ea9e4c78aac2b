"""Cases of the rules about the size of scales, fused siblings and inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from audit.asking import Ask, Case
from audit.cases.scales_pieces import upstream
from audit.editing import edit, quantized

UP = "model.layers.1.mlp.up_proj"
GATE = "model.layers.1.mlp.gate_proj"
Q, K, V = (f"model.layers.1.self_attn.{which}_proj" for which in "qkv")
OUTER = "weight_global_scale"


def _over(old: np.ndarray) -> np.ndarray:
    return (1 / old).astype(old.dtype)


def reciprocal_scale(folder: Path) -> Ask:
    """FP8 scales of rows, stored as 448 / amax."""
    scale = f"{UP}.weight_scale"
    model = edit(quantized(folder, "fp8_dynamic"), {scale: _over})
    return Ask(model, expect={"tensor": scale, "severity": "error"})


def large_weights(folder: Path) -> Ask:
    """An amax of some hundreds, as AWQ makes."""
    scale = f"{UP}.weight_scale"
    model = quantized(folder, "fp8_dynamic")
    return Ask(edit(model, {scale: lambda old: old * np.float32(900 / (448 * old.max()))}))


def infinite_divisor(folder: Path) -> Ask:
    model = edit(quantized(folder, "nvfp4a16"), {f"{UP}.{OUTER}": ("F32", np.array([np.inf], np.float32))})
    return Ask(model, expect={"tensor": f"{UP}.{OUTER}", "said": "the outer scale is inf"})


def finite_divisor(folder: Path) -> Ask:
    return Ask(quantized(folder, "nvfp4a16"))


def _shifted(binades: int) -> dict[str, object]:
    """gate and up with block scales that many binades lower under an outer scale as much larger: the same numbers,
    as long as no block scale becomes subnormal."""
    changes: dict[str, object] = {}
    for module in (UP, GATE):
        changes[f"{module}.weight_scale"] = lambda old: old - np.uint8(8 * binades)
        changes[f"{module}.{OUTER}"] = lambda old: old / np.float32(2**binades)
    return changes


def low_block_scales(folder: Path) -> Ask:
    return Ask(edit(quantized(folder, "nvfp4a16"), _shifted(3)), expect={"severity": "info", "count": 2})  # type: ignore[arg-type]


def one_binade_lower(folder: Path) -> Ask:
    return Ask(edit(quantized(folder, "nvfp4a16"), _shifted(1)))  # type: ignore[arg-type]


def siblings_differ(folder: Path) -> Ask:
    model = edit(quantized(folder, "nvfp4a16"), {f"{UP}.{OUTER}": lambda old: old * np.float32(4)})
    expect = {"severity": "error", "said": "fused siblings differ, ratio 4", "repair": "fused_outer"}
    return Ask(model, expect=expect)


def siblings_alike(folder: Path) -> Ask:
    """Two modules that are no siblings may differ."""
    down = f"model.layers.1.mlp.down_proj.{OUTER}"
    return Ask(edit(quantized(folder, "nvfp4a16"), {down: lambda old: old * np.float32(4)}))


def fp8_siblings(folder: Path) -> Ask:
    model = upstream(folder, "native_fp8_per_tensor_static")
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    return Ask(edit(model, {scale: lambda old: old * np.float32(3)}), expect={"severity": "info"})


def fp8_alike(folder: Path) -> Ask:
    return Ask(upstream(folder, "modelopt_fp8_kv"))


def _input(module: str, factor: float) -> dict[str, object]:
    return {f"model.layers.0.{module}.input_scale": lambda old: (old * np.float32(factor)).astype(np.float32)}


def inputs_differ(folder: Path) -> Ask:
    model = edit(upstream(folder, "modelopt_nvfp4"), _input("mlp.up_proj", 2))  # type: ignore[arg-type]
    expect = {"severity": "warning", "said": "input scales of fused siblings differ, ratio 2"}
    return Ask(model, expect=expect)


def inputs_alike(folder: Path) -> Ask:
    return Ask(edit(upstream(folder, "modelopt_nvfp4"), _input("mlp.down_proj", 2)))  # type: ignore[arg-type]


def unity_input(folder: Path) -> Ask:
    one = ("F32", np.array(1.0, np.float32))
    model = edit(upstream(folder, "modelopt_fp8_kv"), {"model.layers.0.mlp.down_proj.input_scale": one})
    return Ask(model, expect={"said": "the static input scale is exactly 1.0", "severity": "warning"})


def near_unity_input(folder: Path) -> Ask:
    near = ("F32", np.array(np.nextafter(np.float32(1), np.float32(2)), np.float32))
    return Ask(edit(upstream(folder, "modelopt_fp8_kv"), {"model.layers.0.mlp.down_proj.input_scale": near}))


def reciprocal_input(folder: Path) -> Ask:
    """2688 / 10 in the place of 10 / 2688."""
    other = ("F32", np.array(268.8, np.float32))
    model = edit(upstream(folder, "modelopt_nvfp4"), {"model.layers.0.mlp.down_proj.input_scale": other})
    return Ask(model, expect={"severity": "warning", "tensor": "model.layers.0.mlp.down_proj.input_scale"})


def loud_input(folder: Path) -> Ask:
    """An input up to 50000, as some down projections have."""
    loud = ("F32", np.array(50000 / 2688, np.float32))
    return Ask(edit(upstream(folder, "modelopt_nvfp4"), {"model.layers.0.mlp.down_proj.input_scale": loud}))


CASES = {
    "NC120": Case(reciprocal_scale, large_weights),
    "NC121": Case(infinite_divisor, finite_divisor),
    "NC123": Case(low_block_scales, one_binade_lower),
    "NC150": Case(siblings_differ, siblings_alike),
    "NC151": Case(fp8_siblings, fp8_alike),
    "NC152": Case(inputs_differ, inputs_alike),
    "NC161": Case(unity_input, near_unity_input),
    "NC162": Case(reciprocal_input, loud_input),
}
