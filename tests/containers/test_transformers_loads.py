"""transformers loads what we write, on CPU, and computes with the values that we decode."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import toys
from cross_read import ours_as_the_library_decodes

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from narrowcast.jobs.quantize import plan, run


@pytest.mark.parametrize("preset", ["fp8_dynamic", "int8", "w4a16", "nvfp4a16"])
def test_transformers_decompresses_to_our_weights(tmp_path: Path, preset: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    model = toys.llama(tmp_path / "model", hidden=128, inner=256, layers=1)
    settled = plan(model, tmp_path / "out", preset)
    run(settled)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    state = loaded.state_dict()
    for module, values in ours_as_the_library_decodes(tmp_path / "out", settled):
        theirs = state[f"{module}.weight"]
        assert torch.equal(theirs, torch.from_numpy(values).to(theirs.dtype)), module
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.isfinite(loaded(ids).logits).all()
