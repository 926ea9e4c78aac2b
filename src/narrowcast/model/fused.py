"""Who must share: layers that engines load as one.

Engines concatenate some neighbours into one matrix at load time (q, k and v; gate and up) and then keep ONE
outer scale and ONE scheme for the whole. Block scales stay per block. So for NVFP4 and for per-tensor FP8 the
members of a group need one common scale,

    amax(group) = max over members of amax(member),

or an engine either refuses (TensorRT-LLM asserts equality, vLLM raises on differing schemes) or silently
takes one of the scales for all and loses accuracy (vLLM takes the largest divisor and warns).

What is fused, and by whom:

    q_proj k_proj v_proj           vLLM, SGLang, TensorRT-LLM; llm-compressor shares their global scale
    gate_proj up_proj              the same; per expert and in shared experts too
    w1 w3                          Mixtral's and MiniMax's spelling of gate and up
    q_a_proj kv_a_proj_with_mqa    DeepSeek's MLA (vLLM: fused_qkv_a_proj)
    wq_a wkv_a_with_mqa, wq_a wkv  the same in DeepSeek's own spelling, and in V4 (vLLM: fused_wqa_wkv)
    wkv wgate                      the compressor of V4 (vLLM: fused_wkv_wgate)
    wq wk wv                       Mistral's own format
    query key value                BERT and its kin in vLLM
    in_proj_qkv in_proj_z,
    in_proj_b in_proj_a            Qwen3.5's linear attention in vLLM (in_proj_qkvz, in_proj_ba)

A group is found by name only: the same parent path, whichever shards its members lie in. A member that the
model does not have (a layer that borrows its keys) is simply absent. Projections that are one tensor on disk
(qkv_proj, gate_up_proj) share their scale by being one tensor.

``expert_stacks`` is the weaker bond: engines run all experts of a layer with one kernel, so they need one
scheme (vLLM: "All MoE projections need to have same quantization scheme") but each keeps its own scales.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv_a_with_mqa", "wkv", "wgate"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)

# Containers whose layers engines fuse; the others are loaded by transformers, layer by layer.
FUSING = ("compressed-tensors", "modelopt", "quark", "auto-round", "fp8")

_SET_OF = {leaf: i for i, leaves in enumerate(SIBLINGS) for leaf in leaves}
_EXPERTS = re.compile(r"^((?:.*\.)?experts)\.(?:\d+\.)?\w+$|^(.*block_sparse_moe)\.(?:input|output)_linear$")


def fused_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Partition module names into groups that share a scale; every name is in exactly one group.

    Groups come in the order of their first member; members come in the order of ``SIBLINGS``, so a group is
    the same whatever the order of the shards.
    """
    groups: dict[tuple[str, object], list[str]] = {}
    for name in dict.fromkeys(names):
        parent, _, leaf = name.rpartition(".")
        # An unfused leaf is a group of its own; its name cannot collide with a set number.
        groups.setdefault((parent, _SET_OF.get(leaf, leaf)), []).append(name)
    return [tuple(sorted(members, key=_position)) for members in groups.values()]


def _position(name: str) -> int:
    leaf = name.rpartition(".")[2]
    return SIBLINGS[_SET_OF[leaf]].index(leaf) if leaf in _SET_OF else 0


def expert_stacks(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The routed experts of each layer, which engines run with one scheme; other names are left out."""
    stacks: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        found = _EXPERTS.match(name)
        if found:
            stacks.setdefault(found[1] or found[2], []).append(name)
    return [tuple(members) for members in stacks.values()]
