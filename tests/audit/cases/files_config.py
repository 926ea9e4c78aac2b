"""Cases of the rule about config.json beside the parent's."""

from __future__ import annotations

from pathlib import Path

from audit.asking import Ask, Case
from audit.editing import edit_config, parent, quantized


def other_rope(folder: Path) -> Ask:
    edit_config(parent(folder), lambda config: config.update(rope_theta=500000.0))
    model = quantized(folder, "fp8_dynamic")
    edit_config(model, lambda config: config.update(rope_theta=10000.0, rms_norm_eps=1e-6))
    return Ask(model, {"against": parent(folder)}, {
        "tensor": "config.json", "severity": "error", "facts": {"keys": ["rms_norm_eps", "rope_theta"]},
        "got": "rms_norm_eps 1e-06, rope_theta 10000.0", "wanted": "rms_norm_eps 1e-05, rope_theta 500000.0",
    })  # fmt: skip


def other_spelling(folder: Path) -> Ask:
    """What transformers 5 writes for what transformers 4 wrote."""
    edit_config(
        parent(folder), lambda config: config.update(rope_theta=5e5, rope_scaling=None, hidden_act="silu")
    )
    model = quantized(folder, "fp8_dynamic")

    def renew(config: dict) -> None:
        del config["rope_theta"], config["rope_scaling"], config["torch_dtype"]
        config.update(
            rope_parameters={"rope_theta": 500000, "rope_type": "default"}, dtype="bfloat16", head_dim=32
        )

    edit_config(model, renew)
    return Ask(model, {"against": parent(folder)})


CASES = {"NC036": Case(other_rope, other_spelling)}
