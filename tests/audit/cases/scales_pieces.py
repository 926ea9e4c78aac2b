"""Cases of the rules about scales that are absent, or of another dtype or shape."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from audit.asking import Ask, Case
from audit.editing import edit, edit_config, quantized

UPSTREAM = Path(__file__).parents[2] / "containers" / "upstream"
UP = "model.layers.1.mlp.up_proj"
EXPERT = "model.layers.0.mlp.experts.1.down_proj.input_scale"


def upstream(folder: Path, name: str) -> Path:
    """A copy of a checkpoint that a library wrote."""
    shutil.copytree(UPSTREAM / name, folder / name)
    return folder / name


def without_scale(folder: Path) -> Ask:
    model = edit(quantized(folder, "fp8_dynamic"), {f"{UP}.weight_scale": None})
    expect = {"tensor": f"{UP}.weight", "severity": "error", "said": "F8_E4M3 codes without a scale"}
    return Ask(model, expect=expect)


def with_scale(folder: Path) -> Ask:
    return Ask(quantized(folder, "fp8_dynamic"))


def without_outer(folder: Path) -> Ask:
    model = edit(quantized(folder, "nvfp4a16", "modelopt"), {f"{UP}.weight_scale_2": None})
    return Ask(model, expect={"tensor": f"{UP}.weight", "said": "block scales without weight_scale_2"})


def with_outer(folder: Path) -> Ask:
    return Ask(quantized(folder, "nvfp4a16", "modelopt"))


def exponents_as_floats(folder: Path) -> Ask:
    model = quantized(folder, "mxfp8a16")
    old = {}

    def keep(array: np.ndarray) -> np.ndarray:
        old["scale"] = array
        return array

    edit(model, {f"{UP}.weight_scale": keep})
    edit(model, {f"{UP}.weight_scale": ("F8_E8M0", old["scale"])})
    return Ask(model, expect={"tensor": f"{UP}.weight_scale", "got": "F8_E8M0", "wanted": "U8"})


def exponents_as_bytes(folder: Path) -> Ask:
    return Ask(quantized(folder, "mxfp8a16"))


def transposed_grid(folder: Path) -> Ask:
    model = quantized(folder, "fp8_block", "fp8", hidden=256)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    edit(model, {name: lambda old: np.ascontiguousarray(old.T)})
    expect = {"said": "the grid of scales is transposed", "got": "[2, 3]", "severity": "error"}
    return Ask(model, expect={"tensor": name, **expect})


def straight_grid(folder: Path) -> Ask:
    return Ask(quantized(folder, "fp8_block", "fp8", hidden=256))


def expert_left_out(folder: Path) -> Ask:
    model = edit(upstream(folder, "modelopt_nvfp4_moe"), {EXPERT: None})
    said = "layer 0: experts 1 of 4 have no input scale for down_proj"
    return Ask(model, expect={"tensor": EXPERT, "said": said, "severity": "error"})


def no_expert_has_one(folder: Path) -> Ask:
    """All experts of a projection without one: inputs are scaled on the fly."""
    model = upstream(folder, "modelopt_nvfp4_moe")
    edit(model, {f"model.layers.0.mlp.experts.{e}.down_proj.input_scale": None for e in range(4)})
    return Ask(model)


def mantissas(folder: Path) -> Ask:
    model = quantized(folder, "fp8_block", "fp8")
    edit_config(model, lambda config: config["quantization_config"].update(scale_fmt="ue8m0"))
    return Ask(model, expect={"severity": "error", "at": (0, 0), "repair": "config"})


def powers(folder: Path) -> Ask:
    model = quantized(folder, "fp8_block", "fp8")
    edit_config(model, lambda config: config["quantization_config"].update(scale_fmt="ue8m0"))
    scales = [
        f"model.layers.{layer}.{path}.weight_scale_inv"
        for layer in range(2)
        for path in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                     "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]  # fmt: skip
    edit(model, dict.fromkeys(scales, lambda old: np.exp2(np.ceil(np.log2(old))).astype(np.float32)))
    return Ask(model)


CASES = {
    "NC100": Case(without_scale, with_scale),
    "NC101": Case(without_outer, with_outer),
    "NC102": Case(exponents_as_floats, exponents_as_bytes),
    "NC103": Case(transposed_grid, straight_grid),
    "NC122": Case(mantissas, powers),
    "NC160": Case(expert_left_out, no_expert_has_one),
}
