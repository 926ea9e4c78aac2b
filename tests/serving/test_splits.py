"""Splits: case 11 of the field cases, real models against arithmetic done by hand, and toy matrices cut for real."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from configs import DEEPSEEK_V3, GPT_OSS_20B, LLAMA3_8B, LLAMA3_70B, QWEN3_8B
from test_paths import SMOLLM2

from narrowcast.hardware.gpus import gpus
from narrowcast.hardware.tensor_parallel import units
from narrowcast.model.families import geometry
from narrowcast.model.geometry import Geometry, Matrix
from narrowcast.model.roles import Role
from narrowcast.numbers.formats import BF16
from narrowcast.serving.loading import from_config
from narrowcast.serving.served import Group, Served
from narrowcast.serving.splits import SIZES, Split, splits, whole
from narrowcast.tensors.presets import LinearScheme, presets
from narrowcast.tensors.schemes import schemes

ROOT = Path(__file__).parents[2]
DEEPSEEK_V2_LITE: dict[str, Any] = {  # deepseek-ai/DeepSeek-V2-Lite
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "vocab_size": 102400, "tie_word_embeddings": False, "attention_bias": False, "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def model(*matrices: Matrix, scheme: LinearScheme | None, container: str = "compressed-tensors") -> Served:
    """A model of these matrices alone."""
    groups = tuple(Group(matrix, scheme, matrix.parameters, BF16) for matrix in matrices)
    shape = Geometry("toy", 4, 2048, 1024, True, matrices, (), 0)
    return Served("toy", shape, container, groups, 0, "config")


def named(found: tuple[Split, ...], leaf: str) -> Split:
    return next(row for row in found if row.name.endswith(leaf))


CASE_11 = {18432: (1, 2, 4, 8, 16), 2048: (1, 2, 4, 8, 16), 1536: (1, 2, 4), 320: (), 10944: ()}


@pytest.mark.parametrize("size", list(CASE_11))
def test_case_11(size: int) -> None:
    """Blocks of 128; 320 and 10944 load on one GPU alone, whose last block is cut off."""
    assert whole(size, 128) == CASE_11[size]
    blocks = presets["fp8_block"].linear
    for split, shape in (("column", (size, 2048)), ("row", (2048, size))):
        row = splits(model(Matrix("mlp.fc1", Role.MLP, shape, split=split), scheme=blocks), "vllm").rows[0]
        assert row.whole == CASE_11[size]
        assert row.loads == (CASE_11[size] or (1,))
        if not CASE_11[size]:
            side = "N" if split == "column" else "K"
            assert row.partial == f"{side} = {size} is not a multiple of 128"
        assert row.unit == 128


def test_parts_of_one_matrix_are_split_as_those_of_three() -> None:
    """Phi-3 holds q, k and v as one and gate and up as one: engines split each part by itself."""
    alone, together = (
        splits(from_config("toy", LLAMA3_70B | {"model_type": family}, preset="fp8_dynamic"), "vllm").rows
        for family in ("llama", "phi3")
    )
    for leaf, part in {
        "q_proj": "qkv_proj[0]", "k_proj": "qkv_proj[1]", "v_proj": "qkv_proj[2]", "gate_proj": "gate_up_proj[0]",
        "up_proj": "gate_up_proj[1]", "o_proj": "o_proj",
    }.items():  # fmt: skip
        one, other = named(alone, leaf), named(together, part)
        assert (one.dimension, one.unit, one.whole, one.loads, one.problems, one.notes) == (
            other.dimension, other.unit, other.whole, other.loads, other.problems, other.notes
        )  # fmt: skip


def test_case_11_takes_gate_and_up_by_themselves() -> None:
    """640 rows together are five blocks, and 320 are not a number of blocks: the file is not what the engine fuses."""
    assert whole(640, 128) == (1,)
    fused = ("gate_proj", "up_proj")
    gate, up = (
        Matrix(f"mlp.{leaf}", Role.MLP, (320, 2048), split="column", fused=fused)
        for leaf in ("gate_proj", "up_proj")
    )
    found = splits(model(gate, up, scheme=presets["fp8_block"].linear), "vllm")
    assert found.whole == ()
    assert [row.whole for row in found.rows] == [(), ()]
    assert next(iter(named(found.rows, "gate_proj").problems.items())) == (
        1, "N = 320 is not a multiple of 128, the rows of a block",
    )  # fmt: skip
    one = Matrix("mlp.gate_up_proj", Role.MLP, (640, 2048), split="column", pieces=(320, 320))
    stored = splits(model(one, scheme=presets["fp8_block"].linear), "vllm")
    assert [row.dimension for row in stored.rows] == ["N = 320", "N = 320"]
    assert stored.whole == ()


def test_what_is_said_whole_is_whole_when_it_is_cut() -> None:
    """Rows that carry the number of their block, dealt out: a size is whole where no block lies on two ranks, and none
    is shorter than the others."""
    for unit in (2, 8, 16, 32, 64, 128):
        for size in (64, 96, 128, 192, 320, 384, 576, 640, 768, 1408, 1536, 2048, 2880):
            blocks = np.arange(size) // unit
            for tp in SIZES:
                fine = size % tp == 0
                if fine:
                    ranks = [set(part.tolist()) for part in np.split(blocks, tp)]
                    owners = [block for rank in ranks for block in rank]
                    full = all((blocks == block).sum() == unit for block in set(owners))
                    fine = len(owners) == len(set(owners)) and full
                assert (tp in whole(size, unit)) is fine, (size, unit, tp)


@pytest.mark.parametrize("container", ["compressed-tensors", "gptq", "awq", "modelopt"])
@pytest.mark.parametrize("preset", ["w4a16", "fp8_block", "nvfp4", "w8a16"])
def test_units_are_what_an_encoded_matrix_is_made_of(container: str, preset: str) -> None:
    """A rank's share holds whole tiles of the scheme itself."""
    linear = presets[preset].linear
    rows, columns = linear.weight.inner.tile
    for split, tile in (("column", rows), ("row", columns)):
        found = units(container, linear, split)
        if tile > 1:
            assert tile in [unit for unit, _ in found]
        assert all(unit > 1 and what for unit, what in found)


def test_smollm2() -> None:
    """Nine query heads and three key heads: one GPU or three."""
    found = splits(from_config("m", SMOLLM2), "vllm", sizes=(1, 2, 3, 4, 8, 9))
    assert found.tp == (1, 3)
    assert named(found.rows, "k_proj").loads == (1, 3, 9)  # nine: each key head is on three ranks
    assert named(found.rows, "gate_proj").problems[9] == "N = 1536 is not a multiple of 9"
    assert found.first[2].endswith("q_proj: 9 heads are not a multiple of 2")
    assert any("each is on several of them" in note for note in named(found.rows, "k_proj").notes)
    assert named(found.rows, "k_proj").problems[2] == "3 key heads are neither a multiple nor a divisor of 2"
    groups = splits(from_config("m", SMOLLM2, preset="w4a16"), "vllm", sizes=(1, 3, 9))
    # down_proj has 12 groups of 128, which nine do not divide.
    assert named(groups.rows, "down_proj").loads == (1, 3)
    assert groups.tp == (1, 3)


def test_qwen3_8b() -> None:
    """32 heads of 128, eight key heads, 12288 = 96 blocks of 128."""
    found = splits(from_config("m", QWEN3_8B, preset="fp8_block"), "vllm")
    assert found.tp == found.whole == (1, 2, 4, 8, 16, 32)
    assert named(found.rows, "down_proj").whole == (1, 2, 4, 8, 16, 32)  # 96 / 32 = 3
    assert "8 heads: on 16, 32 ranks each is on several of them" in named(found.rows, "v_proj").notes[0]
    sixty_four = splits(from_config("m", QWEN3_8B), "vllm", sizes=(64,))
    assert sixty_four.first[64].endswith("q_proj: 32 heads are not a multiple of 64")


def test_llama_70b_on_eight() -> None:
    for preset in ("fp8_dynamic", "fp8_block", "w4a16", "nvfp4"):
        found = splits(from_config("m", LLAMA3_70B, preset=preset), "vllm", gpus["h100"])
        assert 8 in found.tp
        assert 8 in found.whole


def test_deepseek_v2_lite() -> None:
    """10944 rows are 85.5 blocks and 1408 eleven: FP8 in blocks keeps whole nowhere, and experts only on one rank."""
    served = from_config("m", DEEPSEEK_V2_LITE, preset="fp8_block")
    found = splits(served, "vllm")
    assert named(found.rows, "layers.*.mlp.gate_proj").whole == ()
    assert next(iter(named(found.rows, "layers.*.mlp.gate_proj").problems.items())) == (
        1, "N = 10944 is not a multiple of 128, the rows of a block",
    )  # fmt: skip
    assert named(found.rows, "experts.*.gate_proj").whole == (1,)
    assert named(found.rows, "shared_experts.gate_proj").whole == (1, 2)  # 2816 = 22 blocks
    assert found.ep == (1, 2, 4, 8, 16, 32)
    assert found.tp == ()
    spread = splits(served, "vllm", ep=True)
    assert not any("experts.*." in row.name for row in spread.rows)
    # Scales per channel ask for nothing but equal parts: 1408 = 2^7 * 11 and 10944 = 2^6 * 171.
    channels = splits(from_config("m", DEEPSEEK_V2_LITE, preset="fp8_dynamic"), "vllm")
    assert channels.tp == (1, 2, 4, 8, 16)
    assert channels.first[32].endswith("q_proj: 16 heads are not a multiple of 32")
    assert any("latent cache is on every rank" in note for note in channels.notes)


def test_deepseek_v3_in_its_own_container() -> None:
    """18432 and 2048 in blocks of 128: 16 ranks, not 32."""
    found = splits(from_config("m", DEEPSEEK_V3, preset="fp8_block", container="fp8"), "vllm")
    assert found.tp == (1, 2, 4, 8, 16)
    assert "N / 32 = 576 is not a multiple of 128" in found.first[32]
    assert named(found.rows, "experts.*.down_proj").whole == (1, 2, 4, 8, 16)


def gpt_oss() -> Served:
    shape = geometry(GPT_OSS_20B)
    linear = LinearScheme(schemes["mxfp4"])
    groups = tuple(
        Group(matrix, linear if matrix.role is Role.EXPERT else None, matrix.parameters)
        for matrix in shape.matrices
    )
    return Served("gpt-oss-20b", shape, "mxfp4", groups, 0, "config")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_gpt_oss(engine: str) -> None:
    """2880 columns are 90 groups of 32: two ranks have 45 each, four do not come out even, and both engines load it."""
    found = splits(gpt_oss(), engine)
    down = named(found.rows, "down_proj")
    assert (down.unit, down.whole) == (32, (1, 2))
    assert down.loads == found.tp == SIZES
    assert "90 groups on 4 ranks: 23 on each, 21 on the last" in down.notes
    assert "90 groups on 32 ranks: 3 on each, 0 on the last" in down.notes
    assert found.whole == (1, 2)


def test_gpt_oss_is_shared_out_as_vllm_does() -> None:
    """The formula of models/gpt_oss.py, which gives each rank whole groups and the last one the rest."""
    for tp in SIZES:
        blocks = 2880 // 32
        per_rank = -(-blocks // tp) * 32
        sizes = [min((rank + 1) * per_rank, 2880) - min(rank * per_rank, 2880) for rank in range(tp)]
        assert sum(sizes) == 2880
        if 90 % tp:
            note = next(
                note
                for note in named(splits(gpt_oss(), "vllm").rows, "down_proj").notes
                if f"on {tp} ranks" in note
            )
            assert note == f"90 groups on {tp} ranks: {sizes[0] // 32} on each, {sizes[-1] // 32} on the last"


BAMBA_9B: dict[str, Any] = {  # ibm-ai-platform/Bamba-9B-v2
    "model_type": "bamba", "hidden_size": 4096, "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27],
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1,
    "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "max_position_embeddings": 262144, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_groups_of_a_mixer() -> None:
    """mamba_mixer2.py:316: ranks divide the heads, and the groups, or there is one group, which is copied."""
    one = splits(from_config("m", BAMBA_9B), "vllm")
    assert one.tp == (1, 2, 4, 8, 16, 32)
    four = splits(from_config("m", BAMBA_9B | {"mamba_n_groups": 4}), "vllm")
    assert four.tp == (1, 2, 4)
    assert four.first[8] == "model.layers.*.mamba.in_proj[2]: 4 groups are not a multiple of 8"
    heads = splits(
        from_config("m", BAMBA_9B | {"mamba_n_heads": 120, "mamba_d_head": 64, "mamba_expand": 2}), "vllm"
    )
    assert heads.tp == (1, 2, 4, 8)
    assert "120 heads are not a multiple of 16" in heads.first[16]


def test_experts_spread_evenly_or_not() -> None:
    """vLLM gives some ranks one expert more; SGLang asks for a multiple."""
    config = DEEPSEEK_V2_LITE | {"n_routed_experts": 60}
    served = from_config("m", config)
    assert splits(served, "sglang").ep == (1, 2, 4)
    found = splits(served, "vllm")
    assert found.ep == SIZES
    assert any("60 experts are not a multiple of 8, 16, 32" in note for note in found.notes)
    assert splits(from_config("m", LLAMA3_8B), "vllm").ep == ()


def _engine_pp() -> Any:
    """vLLM's own function, cut out of its source."""
    found = sorted(ROOT.glob(".venv-engine/lib/python3*/site-packages/vllm/distributed/utils.py"))
    if not found:
        pytest.skip("vLLM's source is not here: engines/setup.sh installs its CPU build")
    tree = ast.parse(found[0].read_text())
    node = next(
        each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "get_pp_indices"
    )

    class Environment:
        VLLM_PP_LAYER_PARTITION = None

    class Log:
        def info(self, *_: object) -> None:
            """Nobody reads it."""

    space: dict[str, Any] = {"envs": Environment, "logger": Log()}
    exec(compile(ast.Module([node], []), "vllm", "exec"), space)
    return space["get_pp_indices"]


def test_stages_are_vllms() -> None:
    """For 1 to 130 layers the numbers that its own function gives."""
    indices = _engine_pp()
    for layers in (1, 5, 24, 27, 30, 32, 36, 61, 80, 126, 130):
        shape = Geometry("toy", layers, 64, 64, True, (), (), 0)
        found = splits(Served("toy", shape, "plain", (), 0, "config"), "vllm", sizes=tuple(range(1, 33))).pp
        for stages, counts in found.items():
            ends = [indices(layers, rank, stages) for rank in range(stages)]
            assert counts == tuple(end - start for start, end in ends), (layers, stages)
        assert max(found) == min(layers, 32)


def test_stages_of_sglang() -> None:
    """Its function adds one layer to each of the last stages (distributed/utils.py:140)."""
    shape = Geometry("toy", 61, 64, 64, True, (), (), 0)
    served = Served("toy", shape, "plain", (), 0, "config")
    assert splits(served, "sglang").pp[8] == (7, 7, 7, 8, 8, 8, 8, 8)
    assert splits(served, "vllm").pp[8] == (7, 7, 8, 8, 8, 8, 8, 7)


def test_kernels_that_change_are_told() -> None:
    """Gate and up of 14144 rows are 221 tiles of 128 together, which Machete takes whole and not by halves."""
    config = LLAMA3_8B | {"intermediate_size": 14144}
    found = splits(from_config("m", config, preset="w4a16"), "vllm", gpus["h100"], sizes=(1, 2))
    assert named(found.rows, "up_proj").notes == ("on 2 ranks Marlin instead of Machete, for 14144x4096",)
    assert named(found.rows, "o_proj").notes == ()
    unasked = splits(from_config("m", config, preset="w4a16"), "vllm", sizes=(1, 2))
    assert named(unasked.rows, "up_proj").notes == ()


def test_padded_vocabulary_divides() -> None:
    found = splits(from_config("m", LLAMA3_8B | {"vocab_size": 32001}), "vllm")
    row = named(found.rows, "embed_tokens")
    assert row.loads == SIZES
    assert "32001 becomes 32064" in row.notes[0]


def test_answers_are_plain_data() -> None:
    for config in (SMOLLM2, DEEPSEEK_V2_LITE, QWEN3_8B):
        found = splits(from_config("m", config, preset="fp8_block"), "vllm", gpus["h100"])
        again = json.loads(json.dumps(found.to_json()))
        assert again["tp"] == list(found.tp)
        assert len(again["rows"]) == len(found.rows)
