"""Fused groups are a partition found by name alone; experts of a layer are one stack."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from model.names_corpus import config, entries
from narrowcast.model.fused import SIBLINGS, expert_stacks, fused_groups
from narrowcast.model.modules import modules

LEAVES = sorted({leaf for leaves in SIBLINGS for leaf in leaves} | {"o_proj", "down_proj", "w2", "mlp.gate"})
PARENTS = ["", "model.layers.0.self_attn.", "model.layers.1.self_attn.", "m.experts.0.", "m.experts.10."]
NAMES = st.sets(st.builds(str.__add__, st.sampled_from(PARENTS), st.sampled_from(LEAVES)))


@given(NAMES)
def test_partition(names: set[str]) -> None:
    """Every name once; one parent per group; members of one row, or alone; no row in two groups."""
    groups = fused_groups(names)
    assert sorted(n for g in groups for n in g) == sorted(names)
    rows = []
    for group in groups:
        (parent,) = {n.rpartition(".")[0] for n in group}
        leaves = {n.rpartition(".")[2] for n in group}
        row = next((i for i, row in enumerate(SIBLINGS) if leaves <= set(row)), None)
        assert row is not None or len(group) == 1
        rows.append((parent, row if row is not None else leaves.pop()))
    assert len(rows) == len(set(rows))


@given(NAMES, st.randoms(use_true_random=False))
def test_order_of_the_shards_does_not_matter(names: set[str], order: random.Random) -> None:
    shuffled = sorted(names)
    order.shuffle(shuffled)
    assert set(fused_groups(shuffled)) == set(fused_groups(sorted(names)))


def test_no_leaf_is_in_two_rows() -> None:
    leaves = [leaf for row in SIBLINGS for leaf in row]
    assert len(leaves) == len(set(leaves))


def groups_of(family: str) -> set[tuple[str, ...]]:
    return set(fused_groups(m.name for m in modules(entries(family), config(family))))


def test_llama() -> None:
    layer = "model.layers.0"
    found = groups_of("smollm2-135m")
    assert tuple(f"{layer}.self_attn.{p}_proj" for p in "qkv") in found
    assert (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj") in found
    assert (f"{layer}.mlp.down_proj",) in found
    assert (f"{layer}.self_attn.o_proj",) in found


def test_deepseek_v3() -> None:
    attention = "model.layers.0.self_attn"
    found = groups_of("deepseek-v3")
    assert (f"{attention}.q_a_proj", f"{attention}.kv_a_proj_with_mqa") in found
    assert (f"{attention}.q_b_proj",) in found
    assert ("model.layers.3.mlp.experts.255.up_proj",) in found


def test_mixtral_pairs_w1_with_w3_of_the_same_expert() -> None:
    parent = "model.layers.0.block_sparse_moe.experts"
    assert (f"{parent}.0.w1", f"{parent}.0.w3") in groups_of("mixtral-8x7b")
    assert fused_groups([f"{parent}.0.w1", f"{parent}.1.w3"]) == [(f"{parent}.0.w1",), (f"{parent}.1.w3",)]


def test_other_families() -> None:
    bert = "encoder.layer.0.attention.self"
    assert (f"{bert}.query", f"{bert}.key", f"{bert}.value") in groups_of("all-minilm-l6-v2")
    gdn = "model.language_model.layers.0.linear_attn"
    assert (f"{gdn}.in_proj_qkv", f"{gdn}.in_proj_z") in groups_of("qwen3.5-moe")
    assert ("layers.0.attn.wq_a", "layers.0.attn.wkv") in groups_of("deepseek-v4")
    compressor = "layers.2.attn.compressor"
    assert (f"{compressor}.wkv", f"{compressor}.wgate") in groups_of("deepseek-v4")
    assert ("layers.0.attention.wq", "layers.0.attention.wk") in groups_of("mistral-native")


def test_a_missing_sibling_is_simply_absent() -> None:
    assert fused_groups(["a.q_proj", "a.o_proj", "a.v_proj"]) == [("a.q_proj", "a.v_proj"), ("a.o_proj",)]


def test_splits_of_a_stack_group_per_expert() -> None:
    family = "gpt-oss-20b-bf16"
    names = [s.name for m in modules(entries(family), config(family)) for s in m.splits()]
    parent = "model.layers.0.mlp.experts"
    assert len(names) == 32 * 3
    found = fused_groups(names)
    assert len(found) == 32 * 2
    assert (f"{parent}.7.gate_proj", f"{parent}.7.up_proj") in found


def test_expert_stacks() -> None:
    names = [
        "model.layers.0.mlp.experts.0.gate_proj",
        "model.layers.0.mlp.experts.1.down_proj",
        "model.layers.1.mlp.experts.0.gate_proj",
        "model.layers.0.mlp.shared_experts.gate_proj",
        "model.layers.2.block_sparse_moe.input_linear",
        "model.layers.2.block_sparse_moe.output_linear",
        "model.layers.3.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.gate",
    ]
    assert expert_stacks(names) == [(names[0], names[1]), (names[2],), (names[4], names[5]), (names[6],)]
