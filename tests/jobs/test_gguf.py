"""Whole models through GGUF files: into one, out of one, and around, with every code and value compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from demo.source import smollm2_gguf
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import toys
from model import gguf_toys
from model.gguf_toys import UPSTREAM
from narrowcast.errors import InputError, NarrowcastError, UsageError
from narrowcast.jobs.coded import Logical, open_coded
from narrowcast.jobs.compare import compare
from narrowcast.jobs.convert import convert
from narrowcast.jobs.gguf import write_gguf
from narrowcast.jobs.opening import open_model
from narrowcast.jobs.quantize import quantize
from narrowcast.model.gguf_model import GGUFModel
from narrowcast.model.gguf_tokenizer import tokenizer_files
from narrowcast.store.gguf import GGUFFile
from narrowcast.store.safetensors import Reader


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, bytes]:
    """A small real tokenizer: the first 63 tokens and one pair of them."""
    with GGUFFile(smollm2_gguf()) as file:
        fields = dict(file.fields)
    at = "tokenizer.ggml."
    tokens = fields[at + "tokens"][:63]
    fields |= {
        at + "tokens": [*tokens, tokens[40] + tokens[41]],
        at + "merges": [f"{tokens[40]} {tokens[41]}"],
    }
    return tokenizer_files(fields | {at + "token_type": fields[at + "token_type"][:64]})


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, vocabulary: dict[str, bytes]) -> Callable[[str], Path]:
    """A family's toy with a tokenizer."""

    def made(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family) / family
        shutil.copytree(UPSTREAM / family, folder)
        for path in folder.glob("*.gguf"):
            path.unlink()
        for name, content in vocabulary.items():
            (folder / name).write_bytes(content)
        return folder

    return made


@pytest.fixture
def llama(tmp_path: Path, vocabulary: dict[str, bytes]) -> Path:
    """A Llama whose widths suit groups of 128."""
    folder = toys.llama(tmp_path / "llama", hidden=128, inner=256, layers=2, vocab=64, head=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    for name, content in vocabulary.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("family", gguf_toys.FAMILIES)
def test_plain_models_go_there_and_back(family: str, toy: Callable[[str], Path], tmp_path: Path) -> None:
    """bf16 weights, norms shifted and not, come back bit for bit; the written file is the converter's."""
    source, middle, back = toy(family), tmp_path / "toy.gguf", tmp_path / "back"
    write_gguf(source, middle)
    with GGUFFile(middle) as ours, GGUFFile(UPSTREAM / family / "bf16.gguf") as theirs:
        for tensor in theirs.tensors:
            if tensor != "rope_freqs.weight":
                assert np.array_equal(ours.array(tensor), theirs.array(tensor)), tensor
    convert(middle, back, "plain")
    with Reader(source / "model.safetensors") as one, Reader(back / "model.safetensors") as two:
        names = one.entries.keys() - ({"lm_head.weight"} if "lm_head.weight" not in two.entries else set())
        assert two.entries.keys() == names
        for name in names:
            assert np.array_equal(one.array(name), two.array(name)), name
    config = json.loads((back / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "bfloat16"
    AutoModelForCausalLM.from_pretrained(back)
    assert len(AutoTokenizer.from_pretrained(back)) == 64


@pytest.mark.parametrize("preset", ["mxfp4a16", "nvfp4a16"])
def test_codes_move_bit_for_bit(preset: str, llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "q", preset)
    written = write_gguf(tmp_path / "q", tmp_path / "q.gguf")
    kind = preset[:5].upper()
    assert {key[1:]: count for key, count in written.matrices.items()} == {
        (kind, "moved"): 14,
        ("BF16", "as it is"): 2,
    }
    assert not written.errors.noise
    again = convert(tmp_path / "q.gguf", tmp_path / "again", "compressed-tensors")
    assert not again.total.beyond
    assert compare(tmp_path / "q", tmp_path / "again").passed
    assert_decoded_by_the_package(tmp_path / "q.gguf", tmp_path / "q")
    with Reader(tmp_path / "q/model.safetensors") as one, Reader(tmp_path / "again/model.safetensors") as two:
        for name in one.entries:
            assert np.array_equal(one.array(name), two.array(name)), name


def assert_decoded_by_the_package(path: Path, original: Path) -> None:
    """Every matrix of a file as gguf decodes it, times its outer scale, is the original's exact value."""
    reader = gguf.GGUFReader(path)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    with GGUFModel.open(path) as model, open_model(original) as checkpoint:
        opened = open_coded(checkpoint)
        for name, move in model.moves.items():
            entry = opened.entries[name]
            if not isinstance(entry, Logical) or move.heads:  # the order of rotated rows is the names' test
                continue
            ((_, coded),) = opened.coded(next(m for m in opened.modules if m.tensor == name))
            tensor = theirs[move.gguf]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if move.outer in theirs:
                values = values * theirs[move.outer].data[0]
            assert np.array_equal(values, coded.read(checkpoint, np.dtype("<f4"), 0, coded.shape[0]))


def test_wide_groups_are_cut_into_blocks(llama: Path, tmp_path: Path) -> None:
    """int4 under one bf16 scale for 128 columns: the same codes under four fp16 scales."""
    quantize(llama, tmp_path / "q", "w4a16")
    written = write_gguf(tmp_path / "q", tmp_path / "q.gguf")
    assert {key[1:]: count for key, count in written.matrices.items()} == {
        ("Q4_0", "moved"): 14,
        ("BF16", "as it is"): 2,
    }
    assert compare(tmp_path / "q", tmp_path / "q.gguf").passed
    written = write_gguf(tmp_path / "q", tmp_path / "q8.gguf", kind="q8_0")  # four bits fit into eight
    assert {key[1:]: count for key, count in written.matrices.items()} == {
        ("Q8_0", "moved"): 14,
        ("Q8_0", "rounded"): 2,
    }
    layers = compare(tmp_path / "q", tmp_path / "q8.gguf", only=r"re:model\.layers\..*")
    assert layers.passed


def test_scales_that_fp16_cannot_hold_are_refused_or_rounded(llama: Path, tmp_path: Path) -> None:
    """Tiny weights: bf16 scales of 1e-9 are below fp16's smallest number."""
    with Reader(llama / "model.safetensors") as reader:
        state = {name: np.array(reader.array(name)).view(ml_dtypes.bfloat16) for name in reader.entries}
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = (state[name].astype(np.float32) * 1e-7).astype(ml_dtypes.bfloat16)
    save_file(state, llama / "model.safetensors", {"format": "pt"})
    quantize(llama, tmp_path / "q", "w4a16")
    with pytest.raises(UsageError, match="1 matrices have values") as error:
        write_gguf(tmp_path / "q", tmp_path / "q.gguf")
    assert name in str(error.value)
    assert "fp16" in str(error.value)
    assert not list(tmp_path.glob("q.gguf*"))
    written = write_gguf(tmp_path / "q", tmp_path / "q.gguf", requantize=True)
    assert any(f"first {name}" in note for note in written.notes)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "mxfp4", "nvfp4", "f16", "f32"])
def test_every_type_is_written_by_ggmls_rule(kind: str, llama: Path, tmp_path: Path) -> None:
    written = write_gguf(llama, tmp_path / "a.gguf", kind=kind, workers=2)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    kinds = {
        tensor.tensor_type.name
        for tensor in reader.tensors
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1
    }
    assert kinds == {kind.upper()}
    assert reader.fields["general.file_type"].contents() == getattr(gguf.LlamaFileType, FILE_TYPES[kind])
    with Reader(llama / "model.safetensors") as source:
        values = (np.array(source.array("model.layers.1.mlp.down_proj.weight")).astype(np.uint32) << 16).view(
            np.float32
        )
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight")
    if (
        kind != "nvfp4"
    ):  # which the package does not quantize to; ggml itself is compared with in test_gguf_blocks
        wanted = gguf.quants.quantize(values, tensor.tensor_type)
        assert np.array_equal(
            np.ascontiguousarray(tensor.data).view(np.uint8), np.ascontiguousarray(wanted).view(np.uint8)
        )
    assert bool(written.errors.noise) == (kind != "f32")


FILE_TYPES = {
    "f32": "ALL_F32", "f16": "MOSTLY_F16", "q4_0": "MOSTLY_Q4_0", "q4_1": "MOSTLY_Q4_1", "q8_0": "MOSTLY_Q8_0",
    "mxfp4": "MOSTLY_MXFP4_MOE", "nvfp4": "MOSTLY_NVFP4",
}  # fmt: skip


def test_any_number_of_workers_writes_the_same_file(llama: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        (tmp_path / str(workers)).mkdir()
        write_gguf(llama, tmp_path / str(workers) / "m.gguf", kind="q8_0", workers=workers)
    assert (tmp_path / "1/m.gguf").read_bytes() == (tmp_path / "3/m.gguf").read_bytes()


def test_blocks_become_another_scheme_only_when_asked(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "q8.gguf", kind="q8_0")
    for job in (
        lambda **more: convert(
            tmp_path / "q8.gguf", tmp_path / "fp8", "compressed-tensors", preset="fp8_dynamic", **more
        ),
        lambda **more: write_gguf(tmp_path / "q8.gguf", tmp_path / "q4.gguf", kind="q4_0", **more),
    ):
        with pytest.raises(UsageError, match="second rounding"):
            job()
        job(requantize=True)
    assert any(
        "second time" in note
        for note in write_gguf(
            tmp_path / "q8.gguf", tmp_path / "q4b.gguf", kind="q4_0", requantize=True
        ).notes
    )
    write_gguf(tmp_path / "q8.gguf", tmp_path / "bf16.gguf", kind="f32")  # decoding is no rounding
    assert compare(tmp_path / "q8.gguf", tmp_path / "bf16.gguf").passed


def test_types_that_only_decode(tmp_path: Path, llama: Path) -> None:
    """Q4_1 is no scheme here: plain takes its values, a preset only when told to, and nothing is copied as fp32."""
    write_gguf(llama, tmp_path / "q4_1.gguf", kind="q4_1")
    with pytest.raises(UsageError, match="only decodes"):
        convert(tmp_path / "q4_1.gguf", tmp_path / "no", "compressed-tensors", preset="fp8_dynamic")
    convert(
        tmp_path / "q4_1.gguf", tmp_path / "fp8", "compressed-tensors", preset="fp8_dynamic", requantize=True
    )
    convert(tmp_path / "q4_1.gguf", tmp_path / "wide", "plain", dtype="fp32")
    assert compare(tmp_path / "q4_1.gguf", tmp_path / "wide").passed
    convert(tmp_path / "q4_1.gguf", tmp_path / "bf16", "plain")
    for out in ("fp8", "bf16"):
        with Reader(tmp_path / out / "model.safetensors") as reader:
            assert {entry.dtype.name for entry in reader.entries.values()} <= {"BF16", "F8_E4M3", "F32"}
            assert reader.entries["model.embed_tokens.weight"].dtype.name == "BF16"
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
    with GGUFModel.open(tmp_path / "q4_1.gguf") as model:
        value = model.values("model.layers.0.self_attn.q_proj.weight", 0, 128)
    assert np.array_equal(original.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy(), value)


def test_what_cannot_be_written(llama: Path, tmp_path: Path, toy: Callable[[str], Path]) -> None:
    def refused(
        words: str,
        source: Path = llama,
        out: str = "x.gguf",
        error: type[NarrowcastError] = UsageError,
        **more: Any,
    ) -> None:
        with pytest.raises(error, match=words):
            write_gguf(source, tmp_path / out, **more)
        assert not list(tmp_path.glob("x.gguf*"))

    refused("ends in .gguf", out="x.bin")
    refused("no GGUF type to write", kind="q4_k")
    refused("directory does not exist", out="no/x.gguf", error=InputError)
    quantize(llama, tmp_path / "fp8", "fp8_dynamic")
    refused("no GGUF type holds", tmp_path / "fp8")
    refused("second rounding", tmp_path / "fp8", kind="q8_0")
    write_gguf(tmp_path / "fp8", tmp_path / "y.gguf", kind="bf16")
    with pytest.raises(UsageError, match="exists"):
        write_gguf(llama, tmp_path / "y.gguf")
    mixtral = toys.moe(tmp_path / "gpt", "gpt_oss")
    refused("no table of GGUF names", mixtral)
    (llama / "tokenizer.json").unlink()
    refused(r"tokenizer\.json is missing", error=InputError)


def test_damage_in_the_source_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    path = llama / "model.safetensors"
    raw = bytearray(path.read_bytes())
    with Reader(path) as reader:
        at = reader.entries["model.layers.1.mlp.up_proj.weight"].offset
    raw[at : at + 2] = b"\xc0\x7f"  # NaN
    path.write_bytes(raw)
    with pytest.raises(NarrowcastError, match="NaN"):
        write_gguf(llama, tmp_path / "x.gguf", kind="q8_0")
    assert not list(tmp_path.glob("x.gguf*"))
