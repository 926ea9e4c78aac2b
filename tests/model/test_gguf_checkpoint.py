"""A GGUF file in the shape of a checkpoint: what it shows, and reads of any span of it."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from demo.source import smollm2_gguf

from model.gguf_toys import UPSTREAM
from narrowcast.containers.detect import detect, open_source
from narrowcast.containers.gguf_blocks import BLOCKS, join
from narrowcast.errors import UsageError
from narrowcast.jobs.opening import open_model
from narrowcast.model.gguf_names import rotary_order
from narrowcast.model.roles import quantization_config
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.packing import BYTES, packing, unpack

FILES = {
    "blocks": UPSTREAM / "llama/q8_0.gguf",
    "experts": UPSTREAM / "qwen3_moe/bf16.gguf",
    "norms": UPSTREAM / "gemma2/bf16.gguf",
}


@pytest.mark.parametrize("path", FILES.values(), ids=FILES)
def test_any_span_of_a_shown_tensor_is_a_span_of_the_whole(path: Path) -> None:
    rng = random.Random(1)
    with open_model(path) as checkpoint:
        for name, entry in checkpoint.entries.items():
            whole = checkpoint.array(name)
            assert (whole.dtype, whole.shape) == (entry.dtype.carrier, entry.shape)
            raw = whole.reshape(-1).view(np.uint8)
            for _ in range(6):
                start = rng.randrange(entry.nbytes)
                part = np.empty(rng.randrange(entry.nbytes - start + 1), np.uint8)
                checkpoint.read_into(name, part, start)
                assert np.array_equal(part, raw[start : start + len(part)]), name
            if len(entry.shape) == 2 and entry.shape[1] > 2:
                assert np.array_equal(checkpoint.rows(name, 1, 3), whole[1:3])
                columns = np.empty((3, 2), entry.dtype.carrier)
                stride = whole.strides[0]
                checkpoint.read_pieces(name, columns, entry.dtype.carrier.itemsize, stride)
                assert np.array_equal(columns, whole[:3, 1:3])
            with pytest.raises(UsageError, match="beyond"):
                checkpoint.read_into(name, np.empty(2, np.uint8), entry.nbytes - 1)


def test_codes_and_scales_are_those_of_the_blocks() -> None:
    """Joined again, the shown parts of every matrix are the rows of the file, rotated ones in their own order."""
    path = FILES["blocks"]
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    parts = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "down_proj": "ffn_down"}
    with open_model(path) as checkpoint:
        contents = detect(open_source(checkpoint, quantization_config(checkpoint.config or {})))
        assert (contents.container, len(contents.matrices)) == ("gguf", 14)
        for matrix in contents.matrices:
            part = parts.get(matrix.module.rpartition(".")[2])
            if part is None:
                continue
            shown = checkpoint.array(matrix.module + ".weight").view(np.uint8)
            how = BYTES if shown.shape[1] == matrix.shape[1] else packing(4)
            scales = checkpoint.array(matrix.module + ".weight_scale").view("<u2")
            rows = join(BLOCKS["Q8_0"], unpack(shown, how, matrix.shape[1]), scales)
            layer, n = matrix.module.split(".")[2], matrix.shape[0]
            if part in ("attn_q", "attn_k"):
                rows = rows[rotary_order(0, n, n, 4 if part == "attn_q" else 2, to_gguf=True)]
            assert np.array_equal(rows, stored[f"blk.{layer}.{part}.weight"])


def test_what_has_no_dtype_of_its_own() -> None:
    """Vectors and decoded matrices; a real file of Q4_1 shows nothing else."""
    with open_model(smollm2_gguf()) as checkpoint:
        assert checkpoint.decoded == checkpoint.entries.keys()
        assert {entry.dtype.name for entry in checkpoint.entries.values()} == {"F32"}
        files, notes = checkpoint.beside()
        assert set(files) == {
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "chat_template.jinja",
        }
        assert not notes
        assert checkpoint.config_bytes is not None
        assert b"quantization_config" not in checkpoint.config_bytes
    with open_model(FILES["experts"]) as checkpoint:
        wide = {name for name in checkpoint.entries if name not in checkpoint.decoded}
        assert all(len(checkpoint.entries[name].shape) == 2 for name in wide)
        assert "model.layers.0.mlp.experts.2.up_proj.weight" in wide
        assert "model.layers.0.mlp.gate.weight" in checkpoint.decoded  # a router, which is always F32 there
        assert "no tokenizer" in checkpoint.beside()[1][0]


def test_other_models_are_opened_as_ever() -> None:
    with open_model(UPSTREAM / "llama") as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
        assert checkpoint.beside() == ({}, [])
        assert not checkpoint.decoded
    with pytest.raises(UsageError, match="no such model"):
        open_model(UPSTREAM / "none.gguf")
