"""Where every tensor of a model lies in a GGUF file, and how its rows and values differ there.

    Hugging Face row r of a tensor  =  GGUF row  first + order(r)  of one tensor,  value  =  stored value - shift

- Names: llama.cpp numbers blocks and shortens parts: blk.3.attn_q.weight for model.layers.3.self_attn.q_proj.weight.
- Rotary order: for architecture ``llama`` (Llama and Mistral) q and k are rotated in neighbouring pairs, so row
  2i + h of a head there is row h · d/2 + i here.
- Norms: Gemma multiplies by 1 + weight; the file holds 1 + weight.
- Experts: one stacked tensor [E, N, K] there, one tensor each here.
- Phi-3 is fused on both sides (q, k and v; gate and up). A tied head is absent on both.

All of this acts on whole rows, so it moves blocks of any type without decoding them; only norms, which are never
quantized, change value. Each family is one row of a table, and the table serves both directions.

Left out: other architectures, vision and audio parts, LoRA adapters; each is refused by name.

Source: llama.cpp's convert_hf_to_gguf and gguf's tensor_mapping, with which the tests compare the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import CheckpointError, UsageError

Shape = tuple[int, ...]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
}  # fmt: skip
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORM = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.*.gate_proj", "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}  # fmt: skip
_FUSED = {
    "attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_HEADS = {"attn_q": "head_count", "attn_k": "head_count_kv"}
# Tensors beside the weights: rotary factors belong to the config, input scales to no weight.
ASIDE = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|.*\.input_scale")


@dataclass(frozen=True)
class Family:
    """A model family: names on both sides, the parts of a block, and what a converter does to values."""

    architecture: str
    model_type: str
    class_name: str
    parts: Mapping[str, str]
    rotary_order: bool = False
    norm_shift: float = 0.0


FAMILIES: tuple[Family, ...] = (
    Family("llama", "llama", "LlamaForCausalLM", _ATTENTION | _NORM | _MLP, rotary_order=True),
    Family("llama", "mistral", "MistralForCausalLM", _ATTENTION | _NORM | _MLP, rotary_order=True),
    Family("qwen2", "qwen2", "Qwen2ForCausalLM", _ATTENTION | _NORM | _MLP),
    Family("qwen3", "qwen3", "Qwen3ForCausalLM", _ATTENTION | _QK_NORMS | _NORM | _MLP),
    Family("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", _ATTENTION | _QK_NORMS | _NORM | _EXPERTS),
    Family("gemma", "gemma", "GemmaForCausalLM", _ATTENTION | _NORM | _MLP, norm_shift=1.0),
    Family("gemma2", "gemma2", "Gemma2ForCausalLM", _ATTENTION | _FOUR_NORMS | _MLP, norm_shift=1.0),
    Family(
        "gemma3",
        "gemma3_text",
        "Gemma3ForCausalLM",
        _ATTENTION | _QK_NORMS | _FOUR_NORMS | _MLP,
        norm_shift=1.0,
    ),
    Family("phi3", "phi3", "Phi3ForCausalLM", _FUSED | _NORM),
)


def family_of_gguf(fields: Mapping[str, Any], where: object = None) -> Family:
    """The family of a GGUF file, Llama for Mistral, which runs as one; UsageError for an architecture without a row."""
    name = fields.get("general.architecture")
    family = next((family for family in FAMILIES if family.architecture == name), None)
    experts = _count(fields, f"{name}.expert_count")
    if family is None or bool(experts) != ("ffn_gate_inp" in family.parts):
        got = f"{name} with {experts} experts" if experts else name
        raise _unknown("GGUF architecture", got, [family.architecture for family in FAMILIES], where)
    return family


def family_of_config(config: Mapping[str, Any], where: object = None) -> Family:
    """The family of a config.json; UsageError for a model type without a row."""
    name = config.get("model_type")
    for family in FAMILIES:
        if family.model_type == name:
            return family
    raise _unknown("model type", name, [family.model_type for family in FAMILIES], where)


def _unknown(what: str, name: object, known: Iterable[str], where: object) -> UsageError:
    wanted = ", ".join(dict.fromkeys(known))
    return UsageError(f"no table of GGUF names for this {what}", where=where, got=name, wanted=wanted)


def _count(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key, 0)
    return value if isinstance(value, int) else 0


@dataclass(frozen=True)
class Move:
    """One Hugging Face tensor and its place in a GGUF file: the tensor of that name, in a stack its part ``expert``;
    with ``heads`` its rows in rotary order; stored values are ``shift`` larger."""

    name: str
    gguf: str
    expert: int | None = None
    heads: int = 0
    shift: float = 0.0

    @property
    def outer(self) -> str:
        """The tensor of NVFP4's outer scales, one for each expert."""
        return self.gguf.removesuffix(".weight") + ".scale"


def moves_from_gguf(family: Family, shapes: Mapping[str, Shape], fields: Mapping[str, Any]) -> list[Move]:
    """Every tensor of a GGUF file (shapes by name, numpy order) as Hugging Face tensors, in file order.

    Raises CheckpointError for tensors that the family does not have, or lacks.
    """
    heads = _heads(family, fields)
    moves: list[Move] = []
    for name, shape in shapes.items():
        if ASIDE.fullmatch(name) or (
            name.endswith(".scale") and f"{name.removesuffix('.scale')}.weight" in shapes
        ):
            continue
        target = _hf_name(family, name)
        part = name.split(".")[-2]
        shift = family.norm_shift if part.endswith("norm") else 0.0
        if "*" not in target:
            moves.append(Move(target, name, None, heads.get(part, 0), shift))
            continue
        if len(shape) != 3:
            raise CheckpointError(
                f"tensor {name!r} is no stack of experts", got=list(shape), wanted="[E, N, K]"
            )
        moves += [Move(target.replace("*", str(expert)), name, expert) for expert in range(shape[0])]
    _check_complete(family, set(shapes), _count(fields, f"{family.architecture}.block_count"))
    return moves


def moves_to_gguf(family: Family, names: Iterable[str], fields: Mapping[str, Any], tied: bool) -> list[Move]:
    """Every tensor of a Hugging Face model with its place in a GGUF file, in the order of the file: top level, then
    block by block, experts of a stack together. ``fields``: the metadata of that file. With ``tied`` the head is left
    out.

    Raises CheckpointError for tensors that the family does not have, or lacks.
    """
    heads = _heads(family, fields)
    parts = {hf: part for part, hf in family.parts.items()} | {hf: part for part, hf in _TOP.items()}
    moves = []
    for name in names:
        if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
            continue
        layer = re.fullmatch(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)", name)
        stem, suffix = (layer[2], layer[3]) if layer else (name.rpartition(".")[0], name.rpartition(".")[2])
        expert = re.search(r"(?<=experts\.)[0-9]+", stem)
        part = parts.get(stem.replace(f"experts.{expert[0]}.", "experts.*.") if expert else stem)
        if part is None or (part in _TOP) == (layer is not None) or suffix not in ("weight", "bias"):
            raise CheckpointError(
                f"tensor {name!r} has no place in a GGUF file of {family.architecture}",
                remedy="leave it out of the checkpoint if no engine needs it",
            )
        shift = family.norm_shift if part.endswith("norm") else 0.0
        gguf = f"{f'blk.{layer[1]}.' if layer else ''}{part}.{suffix}"
        moves.append(Move(name, gguf, int(expert[0]) if expert else None, heads.get(part, 0), shift))
    layers = _count(fields, f"{family.architecture}.block_count")
    _check_complete(family, {move.gguf for move in moves}, layers, tied)
    return sorted(moves, key=lambda move: _position(family, move))


def _position(family: Family, move: Move) -> tuple[int, int, str, int]:
    pieces = move.gguf.split(".")
    if pieces[0] != "blk":
        return (-1, list(_TOP).index(pieces[0]), move.gguf, 0)
    return (int(pieces[1]), list(family.parts).index(pieces[2]), move.gguf, move.expert or 0)


def _hf_name(family: Family, name: str) -> str:
    top = re.fullmatch(r"(\w+)\.(weight|bias)", name)
    if top and top[1] in _TOP:
        return f"{_TOP[top[1]]}.{top[2]}"
    block = re.fullmatch(r"blk\.([0-9]+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in family.parts:
        return f"model.layers.{int(block[1])}.{family.parts[block[2]]}.{block[3]}"
    raise CheckpointError(
        f"tensor {name!r} has no place in a {family.class_name}",
        remedy="this GGUF file is of a variant that is not supported",
    )


def _heads(family: Family, fields: Mapping[str, Any]) -> dict[str, int]:
    """Heads of q and k, where their rows are in rotary order."""
    if not family.rotary_order:
        return {}
    at = f"{family.architecture}.attention."
    count = _count(fields, at + "head_count")
    found = {part: _count(fields, at + key) or count for part, key in _HEADS.items()}
    if not count:
        raise CheckpointError(f"the metadata have no {at}head_count", wanted="the number of heads")
    return found


def _check_complete(family: Family, present: set[str], layers: int, tied: bool = True) -> None:
    if not layers:
        raise CheckpointError(
            f"the metadata have no {family.architecture}.block_count", wanted="the number of layers"
        )
    wanted = ["token_embd.weight", "output_norm.weight"] + ([] if tied else ["output.weight"])
    wanted += [f"blk.{layer}.{part}.weight" for layer in range(layers) for part in family.parts]
    missing = [name for name in wanted if name not in present]
    blocks = (re.match(r"blk\.([0-9]+)\.", name) for name in sorted(present))
    beyond = [block.string for block in blocks if block and int(block[1]) >= layers]
    if missing or beyond:
        what = f"lack {missing[0]!r}" if missing else f"have {beyond[0]!r}"
        raise CheckpointError(
            f"the tensors {what}, against {layers} layers of a {family.class_name}",
            got=f"{len(missing)} tensors missing, {len(beyond)} of layers beyond",
            remedy="download or copy the model again",
        )


def rotary_order(start: int, stop: int, rows: int, heads: int, *, to_gguf: bool = False) -> NDArray[np.intp]:
    """For rows start:stop of one side the rows of the other side that they are: ``rows`` of ``heads`` heads in all.

    From GGUF to Hugging Face order, or back. Raises CheckpointError unless heads have an even number of rows.
    """
    if rows % (2 * heads):
        raise CheckpointError("rows do not divide into heads of pairs", got=f"{rows} rows, {heads} heads")
    size = rows // heads
    head, row = np.divmod(np.arange(start, stop), size)
    half = size // 2
    within = (row % 2) * half + row // 2 if to_gguf else (row % half) * 2 + row // half
    order: NDArray[np.intp] = head * size + within
    return order
