"""Names, row orders and values of GGUF tensors against llama.cpp's converter, gguf's tables and transformers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from model import gguf_toys
from model.gguf_toys import UPSTREAM
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.model.gguf_model import GGUFModel, tensor_type
from narrowcast.model.gguf_names import (
    FAMILIES,
    Family,
    family_of_config,
    family_of_gguf,
    moves_from_gguf,
    moves_to_gguf,
    rotary_order,
)
from narrowcast.store.gguf import GGUFFile


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_names_are_those_of_the_gguf_package(family: Family) -> None:
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == family.architecture)
    table = gguf.get_tensor_name_map(arch, 3)
    for part, name in family.parts.items():
        assert table.get_name(f"model.layers.2.{name.replace('*.', '')}") == f"blk.2.{part}"
    assert table.get_name("model.embed_tokens") == "token_embd"
    assert table.get_name("model.norm") == "output_norm"
    always_tied = family.model_type in ("gemma", "gemma2")
    assert table.get_name("lm_head") == (None if always_tied else "output")


def test_every_family_has_a_toy() -> None:
    assert sorted(family.model_type for family in FAMILIES) == gguf_toys.FAMILIES


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "BF16") for name in gguf_toys.FAMILIES), ("llama", "Q8_0")]
)
def test_written_tensor_by_tensor_as_the_converter_writes(name: str, kind: str, tmp_path: Path) -> None:
    out = gguf_toys.write(tmp_path / "ours.gguf", gguf_toys.config(name), gguf_toys.tensors(name), kind)
    with GGUFFile(out) as ours, GGUFFile(UPSTREAM / name / f"{kind.lower()}.gguf") as theirs:
        assert ours.tensors.keys() == theirs.tensors.keys()
        for tensor in theirs.tensors.values():
            mine = ours.tensors[tensor.name]
            assert (mine.type, mine.shape) == (tensor.type, tensor.shape), tensor.name
            one, two = ours.array(tensor.name), theirs.array(tensor.name)
            if tensor.name == "rope_freqs.weight":  # torch and numpy differ in the last bits of a power
                assert np.allclose(one, two, rtol=1e-6, atol=0)
            else:
                assert np.array_equal(one, two), tensor.name


@pytest.mark.parametrize("name", gguf_toys.FAMILIES)
def test_read_back_to_what_the_converter_was_given(name: str) -> None:
    """The converter's file gives the bf16 weights bit for bit; chunks give what the whole gives."""
    state = gguf_toys.tensors(name)
    with GGUFModel.open(UPSTREAM / name / "bf16.gguf") as model:
        tied = {"lm_head.weight"} if model.config["tie_word_embeddings"] else set()
        assert model.moves.keys() | tied == state.keys() | tied
        for tensor, value in state.items():
            if tensor in tied:
                continue
            assert model.shape(tensor) == value.shape
            rows = len(value)
            whole = model.values(tensor, 0, rows)
            if model.moves[tensor].shift:  # 1 + w in fp32 loses bits of a small w
                assert np.abs(whole - value).max() <= 2.0**-24
            else:
                assert np.array_equal(whole, value), tensor
            parts = [model.values(tensor, start, min(start + 5, rows)) for start in range(0, rows, 5)]
            assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", gguf_toys.FAMILIES)
def test_transformers_reads_the_same_model(name: str, tmp_path: Path) -> None:
    """transformers' own GGUF loader, where it knows the family, against our config and weights."""
    with GGUFModel.open(UPSTREAM / name / "bf16.gguf") as model:
        ours = {
            tensor: torch.from_numpy(model.values(tensor, 0, model.shape(tensor)[0]))
            for tensor in model.moves
        }
        settings = model.config
    if name == "gemma":
        pytest.skip("transformers 5.24 has no GGUF reader for the first Gemma")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    theirs = load_gguf_checkpoint(UPSTREAM / name / "bf16.gguf", return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    mine = stacked(ours)
    assert mine.keys() == theirs.keys()
    for tensor, value in theirs.items():
        assert torch.equal(value, mine[tensor]), tensor


def stacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as transformers 5 holds them: gate above up, one tensor of all."""
    found = {name: value for name, value in state.items() if ".experts." not in name}
    for at in {name.split(".experts.")[0] for name in state if ".experts." in name}:
        experts = {name.split(".")[5] for name in state if name.startswith(f"{at}.experts.")}

        def stack(part: str, at: str = at, count: int = len(experts)) -> torch.Tensor:
            return torch.stack(
                [state[f"{at}.experts.{expert}.{part}_proj.weight"] for expert in range(count)]
            )

        found[f"{at}.experts.gate_up_proj"] = torch.cat([stack("gate"), stack("up")], dim=1)
        found[f"{at}.experts.down_proj"] = stack("down")
    return found


def test_rotary_order_is_a_permutation_and_its_inverse() -> None:
    there, back = rotary_order(0, 48, 48, 3), rotary_order(0, 48, 48, 3, to_gguf=True)
    assert np.array_equal(there[back], np.arange(48))
    assert there[:16].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert np.array_equal(rotary_order(5, 20, 48, 3), there[5:20])
    with pytest.raises(CheckpointError, match="do not divide"):
        rotary_order(0, 9, 9, 3)


def test_types_that_stay_wide() -> None:
    shapes = {
        "blk.0.attn_q.weight": (64, 64),
        "token_embd.weight": (9, 64),
        "blk.0.ffn_gate_inp.weight": (4, 64),
    }
    kinds = {
        kind: [tensor_type(name, shape, kind).name for name, shape in shapes.items()]
        for kind in ("Q4_0", "F16")
    }
    assert kinds == {"Q4_0": ["Q4_0", "Q8_0", "F32"], "F16": ["F16", "F16", "F32"]}
    assert tensor_type("blk.0.attn_q.bias", (64,), "Q4_0").name == "F32"
    assert tensor_type("blk.0.attn_q_norm.weight", (64,), "Q4_0").name == "F32"
    assert tensor_type("blk.0.ffn_up.weight", (64, 96), "NVFP4").name == "Q8_0"
    assert tensor_type("blk.0.ffn_up.weight", (64, 40), "NVFP4", "F16").name == "F16"


def test_what_has_no_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no table of GGUF names"):
        family_of_config({"model_type": "mamba"})
    with pytest.raises(UsageError, match="llama with 8 experts"):
        family_of_gguf({"general.architecture": "llama", "llama.expert_count": 8})
    llama = family_of_config({"model_type": "llama"})
    fields = {"llama.block_count": 1, "llama.attention.head_count": 2}
    good = {f"blk.0.{part}.weight": (4, 4) for part in llama.parts}
    good |= {"token_embd.weight": (4, 4), "output_norm.weight": (4,)}
    moves = moves_from_gguf(llama, good, fields)
    assert len(moves) == len(good)
    for more, words in (
        ({"blk.0.attn_extra.weight": (4,)}, "no place in a LlamaForCausalLM"),
        ({"blk.x.attn_q.weight": (4,)}, "no place"),
        ({"blk.1.attn_q.weight": (4, 4)}, "have 'blk.1"),
    ):
        with pytest.raises(CheckpointError, match=words):
            moves_from_gguf(llama, good | more, fields)
    with pytest.raises(CheckpointError, match=r"lack 'blk\.0\.attn_v\.weight'"):
        moves_from_gguf(llama, {k: v for k, v in good.items() if "attn_v" not in k}, fields)
    with pytest.raises(CheckpointError, match="block_count"):
        moves_from_gguf(llama, good, {"llama.attention.head_count": 2})
    with pytest.raises(CheckpointError, match="head_count"):
        moves_from_gguf(llama, good, {"llama.block_count": 1})
    names = [move.name for move in moves]
    for name in ("model.layers.0.self_attn.q_proj.weight_scale", "model.vision.weight", "lm_head.lora_a"):
        with pytest.raises(CheckpointError, match="no place in a GGUF file"):
            moves_to_gguf(llama, [*names, name], fields, tied=True)
    with pytest.raises(CheckpointError, match=r"lack 'output\.weight'"):
        moves_to_gguf(llama, names, fields, tied=False)
    assert len(moves_to_gguf(llama, [*names, "lm_head.weight"], fields, tied=True)) == len(good)
