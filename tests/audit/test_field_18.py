"""Rows that are no multiple of the block: scales of blocks that ran across rows are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import toys
from audit.editing import edit
from narrowcast.audit.run import audit

LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("width", [72, 127])
def test_blocks_across_rows(tmp_path: Path, width: int) -> None:
    """64 rows in MXFP8 whose codes were cut into blocks of 32 without regard for rows: 64 · width / 32 scales."""
    shapes = {f"{LAYER}.weight": (64, width), "model.embed_tokens.weight": (64, width)}
    config = toys.llama_config(width, 64, 1)
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "mxfp8-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "format": "mxfp8-quantized", "weights": {
            "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
            "scale_dtype": "torch.uint8"}}},
    }  # fmt: skip
    model = toys.write(tmp_path / "model", toys.weights(shapes), config)
    scales = np.full((64 * width // 32, 1), 127, np.uint8)
    codes = np.full((64, width), 0x38, np.uint8)
    edit(model, {f"{LAYER}.weight": ("F8_E4M3", codes), f"{LAYER}.weight_scale": ("U8", scales)})
    done = audit(model)
    errors = [one for one in done.findings if one.severity == "error" and one.tensor and LAYER in one.tensor]
    assert errors
    assert not done.passed
