"""Cases of the rules about coverage: what is quantized, and whether it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import narrowcast
import toys
from audit.asking import Ask, Case
from audit.editing import Change, edit, edit_config, parent, quantized

ROUTER = "model.layers.0.mlp.gate"


def moe(folder: Path, family: str = "qwen3_moe", **more: Any) -> Path:
    """A plain mixture of experts, in stacks."""
    where = folder / "parent"
    return where if where.exists() else toys.moe(where, family, **more)


def fp8(folder: Path, origin: Path, **options: Any) -> Path:
    narrowcast.quantize(origin, folder / "child", "fp8_dynamic", **options)
    return folder / "child"


def with_rule(folder: Path, origin: Path, match: str, **options: Any) -> Path:
    """FP8, and one more kind of module by name."""
    text = f'default = "fp8_dynamic"\n[[rule]]\nmatch = "{match}"\npreset = "fp8_dynamic"\n'
    (folder / "recipe.toml").write_text(text)
    narrowcast.quantize(origin, folder / "child", recipe=folder / "recipe.toml", **options)
    return folder / "child"


def experts_skipped(folder: Path) -> Path:
    """Attention in FP8, the stacks of experts as they were, and a config that takes every linear layer."""
    child = fp8(folder, moe(folder), ignore=["re:.*experts.*"])
    ignore = [ROUTER, "lm_head"]
    return edit_config(child, lambda config: config["quantization_config"].update(ignore=ignore))


def skipped(folder: Path) -> Ask:
    return Ask(experts_skipped(folder), expect={"severity": "warning", "count": 2})


def low(folder: Path) -> Ask:
    return Ask(experts_skipped(folder), expect={"severity": "warning"})


def covered(folder: Path) -> Ask:
    return Ask(fp8(folder, moe(folder)))


def share(folder: Path) -> Ask:
    return Ask(experts_skipped(folder), expect={"severity": "info", "count": 4})


def plain(folder: Path) -> Ask:
    return Ask(parent(folder))


def head(folder: Path) -> Ask:
    child = with_rule(folder, parent(folder, head=True), "lm_head")
    return Ask(child, expect={"tensor": "lm_head", "severity": "info"})


def no_head(folder: Path) -> Ask:
    return Ask(quantized(folder, "fp8_dynamic", head=True))


def table(folder: Path) -> Ask:
    child = with_rule(folder, parent(folder, head=True), "model.embed_tokens")
    return Ask(child, expect={"tensor": "model.embed_tokens", "severity": "warning"})


def router(folder: Path) -> Ask:
    child = with_rule(folder, moe(folder), ROUTER)
    return Ask(child, expect={"tensor": ROUTER, "got": "fp8_channel"})


def integers(folder: Path) -> Ask:
    """The bits of a BF16 head, called integers."""
    model = edit(parent(folder, head=True), {"lm_head.weight": ("I16", np.zeros((64, 128), np.int16))})
    return Ask(model, expect={"tensor": "lm_head", "severity": "error", "count": 1})


NORM = "model.layers.1.input_layernorm.weight"


def norm(folder: Path, dtype: str, values: np.ndarray) -> Path:
    change: dict[str, Change] = {NORM: (dtype, values)}
    return edit(quantized(folder, "fp8_dynamic"), change)


def fp8_norm(folder: Path) -> Ask:
    return Ask(
        norm(folder, "F8_E4M3", np.full(128, 0x38, np.uint8)), expect={"tensor": NORM, "severity": "error"}
    )


def fp32_norm(folder: Path) -> Ask:
    return Ask(norm(folder, "F32", np.ones(128, np.float32)))


CORRECTION = "model.layers.0.mlp.gate.e_score_correction_bias"


def corrected(folder: Path, dtype: str) -> Path:
    """32 experts with a correction bias of 4 + i/128: exact in fp32, nine values in bf16, whose step there is 1/32."""
    values = (4 + np.arange(32) / 128).astype(np.float32)
    stored = values if dtype == "F32" else values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return edit(moe(folder, "deepseek_v3", experts=32), {CORRECTION: (dtype, stored)})


def coarse(folder: Path) -> Ask:
    facts = {"distinct": 9, "parent_distinct": None}
    return Ask(corrected(folder, "BF16"), expect={"tensor": CORRECTION, "count": 23, "facts": facts})


def fine(folder: Path) -> Ask:
    return Ask(corrected(folder, "F32"))


CASES = {
    "NC400": Case(share, plain), "NC401": Case(low, covered), "NC402": Case(skipped, covered),
    "NC403": Case(integers, plain),
    "NC405": Case(head, no_head), "NC406": Case(table, no_head), "NC407": Case(router, covered),
    "NC408": Case(fp8_norm, fp32_norm), "NC409": Case(coarse, fine),
}  # fmt: skip
