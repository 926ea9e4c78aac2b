"""What we write, the compressed-tensors package reads: to exactly the values of its own arithmetic on our codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from compressed_tensors.quantization import QuantizationConfig

import toys
from cross_read import check_decode
from narrowcast.containers.compressed_tensors.spellings import pack_zero, unpack_zero
from narrowcast.containers.targets import targets
from narrowcast.jobs.quantize import plan, run

SOURCES = {
    "tied llama": lambda folder: toys.llama(folder),
    "fp16 llama with a head": lambda folder: toys.llama(folder, dtype="fp16", head=True),
    "fp32 in two shards": lambda folder: toys.llama(folder, dtype="fp32", shards=2),
    "ragged blocks": lambda folder: toys.llama(folder, hidden=192, inner=544, layers=1),
    "stacked experts out_in": lambda folder: toys.moe(folder, "qwen3_moe"),
    "stacked experts in_out": lambda folder: toys.moe(folder, "gpt_oss", hidden=64, inner=32),
}


@pytest.mark.parametrize("preset", toys.PRESETS)
@pytest.mark.parametrize("source", SOURCES)
def test_the_library_decodes_to_our_values(tmp_path: Path, source: str, preset: str) -> None:
    """Bit for bit, every matrix, through the library's own config model, matching and decompressors."""
    model = SOURCES[source](tmp_path / "model")
    settled = plan(model, tmp_path / "out", preset)
    run(settled)
    check_decode(tmp_path / "out", settled)


def test_config_is_what_the_library_serialises(tmp_path: Path) -> None:
    """Our scheme blocks are the library's presets, key for key; formats are the engines' where they differ."""
    from compressed_tensors.quantization import preset_name_to_scheme

    theirs = {
        "fp8_dynamic": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK", "int8": "W8A8", "w8a16": "W8A16", "w4a16": "W4A16",
        "w4a16_asym": "W4A16_ASYM", "w4a8": "W4A8", "w4afp8": "W4AFP8", "nvfp4a16": "NVFP4A16", "mxfp4": "MXFP4",
        "mxfp4a16": "MXFP4A16", "mxfp4xfp8": "MXFP4XFP8", "mxfp6a16": "MXFP6A16", "mxfp6a8": "MXFP6A8",
        "mxfp8": "MXFP8", "mxfp8a16": "MXFP8A16",
    }  # fmt: skip
    model = toys.llama(tmp_path / "model", inner=256)
    for ours, name in theirs.items():
        block = json.loads(plan(model, tmp_path / "out", ours).config)["quantization_config"]
        group = block["config_groups"]["group_0"]
        wanted = json.loads(preset_name_to_scheme(name, ["Linear"]).model_dump_json())
        assert {k: v for k, v in group.items() if k != "format"} == {
            k: v for k, v in wanted.items() if k != "format"
        }, ours
        assert group["format"] == block["format"]
        assert QuantizationConfig.model_validate(block).to_dict()["format"] == block["format"]


@pytest.mark.parametrize(("n", "bits"), [(8, 4), (13, 4), (5, 8), (32, 4)])
def test_zero_points_pack_along_rows(n: int, bits: int) -> None:
    """The library packs zero points along dimension 0, missing rows as zero bits."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    rng = np.random.default_rng(n)
    codes = rng.integers(0, 1 << bits, (n, 3), np.uint8)
    signed = torch.from_numpy(codes.astype(np.int16) - (1 << (bits - 1))).to(torch.int8)
    theirs = pack_to_int32(signed, bits, packed_dim=0).numpy()
    ours = pack_zero(codes, bits)
    assert np.array_equal(theirs, ours)
    assert np.array_equal(unpack_zero(ours, bits, n), codes)


def test_targets_never_match_a_stranger() -> None:
    """A pattern stands for names only where it matches no linear module outside the group."""
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(12)]
    assert targets(names, [*names, "lm_head"]) == [r"re:^model\.layers\.\d+\.mlp\.down_proj$"]
    assert targets(names[:6], names) == names[:6]
