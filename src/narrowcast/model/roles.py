"""What a tensor is: a role by name, from one table that covers today's families.

A checkpoint is a flat list of names, and names are the only thing that says what a matrix is for: a 64x64
matrix may be a query projection, a router or a position table. So a role is decided by NAME, never by shape:

    role(name) = place(name), else function(name), else "other"

*Place* comes first: everything under a vision or audio tower or in a multi-token-prediction (MTP) layer
belongs to that place, whatever it computes there. *Function* is read from the last parts of the name. Both
are tables of rows; the first row that matches wins, and each row says which families it was written for.

Being linear is a separate fact from the role: a linear is a matrix that the model applies as ``x @ W.T + b``,
which is what engines replace by a quantized kernel. A router is one, and stays wide because of its role; a
Mamba ``x_proj`` has the class Linear, but the scan kernel reads its weight directly, so it is never quantized.

Left out: reading the model's code. Names that no row knows are reported as unknown (``Module.known``), not
guessed; an unknown ``.weight`` matrix counts as linear because the class Linear is by far the most common.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any, Literal

from narrowcast.store.checkpoint import text_config


class Role(StrEnum):
    """What a tensor is for. A role compares equal to its name, so sets of plain strings work."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    NORM = "norm"
    ROUTER = "router"
    BIAS = "bias"
    ROTARY = "rotary"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    SSM = "ssm"
    VISION = "vision"
    AUDIO = "audio"
    MTP = "mtp"
    OTHER = "other"


# The class of a module's matrix, as recipes and engines name it; "" is a parameter of its own kind.
Kind = Literal["Linear", "Embedding", ""]


@dataclass(frozen=True)
class Row:
    """One rule: a pattern on the module path, the role, the class of its matrices, and why.

    ``direct`` marks a Linear whose weight a kernel reads itself, so that no quantized one can replace it.
    """

    pattern: str
    role: Role
    kind: Kind
    note: str
    direct: bool = False


# Places: a part of the path, anywhere. The row's note names the families.
PLACES: tuple[Row, ...] = (
    Row(
        r"mtp(_\w+)?|nextn_predict_layers|eh_proj|shared_head",
        Role.MTP,
        "Linear",
        "multi-token prediction: Qwen3-Next and MiMo name it mtp; DeepSeek V3 and GLM-4 append layers",
    ),
    Row(
        r"audio_\w+|embed_audio|speech_\w+|sound_\w+",
        Role.AUDIO,
        "Linear",
        "audio towers and projectors: Qwen2-Audio, Qwen-Omni, Gemma 3n, Phi-4",
    ),
    Row(
        r"vision_\w+|visual|visual_\w+|vit|img_processor|image_\w+|img_projection\w*|embed_vision|"
        r"multi_modal_projector|mm_projector|patch_merger|connector|aligner",
        Role.VISION,
        "Linear",
        "vision towers and their projectors: LLaVA, Qwen-VL, Gemma 3, Llama 4, Mistral 3, Phi-4, SmolVLM",
    ),
)

_ATTN = r"(?:self_attn|self_attention|attention|attn|cross_attn|encoder_attn|crossattention)"
_MAMBA = r"(?:mixer|mamba|linear_attn|conv|short_conv)"

# Functions: the last parts of the module path (the tensor name without .weight, .bias and the like).
FUNCTIONS: tuple[Row, ...] = (
    Row(
        r"\w*rot\w*emb\w*(\.\w+)*|inv_freq|rope\.freqs",
        Role.ROTARY,
        "",
        "rotary tables, which older files of Llama, GPT-NeoX and Mistral carry",
    ),
    Row(
        r"(?i:\w*norm\w*|\w*layrnorm)|ln_\w+|\w+_ln",
        Role.NORM,
        "",
        "RMSNorm and LayerNorm of every family; CLIP spells pre_layrnorm",
    ),
    Row(
        r"(gate|router|shared_expert_gate)(\.\w+)?|moe_statics\.\w+|e_score_correction\w*|"
        r"expert_bias|tid2eid",
        Role.ROUTER,
        "Linear",
        "routers: mlp.gate of DeepSeek and Qwen, block_sparse_moe.gate of Mixtral, router of gpt-oss and "
        "Llama 4, router.layer of Granite and DBRX, gate.wg of Hunyuan",
    ),
    Row(
        r"experts\.\d+\.\w+|experts\.(gate_up_proj|down_proj|gate_proj|up_proj)|"
        r"block_sparse_moe\.(input_linear|output_linear)|mlp\.mlp[12]_weight",
        Role.EXPERT,
        "Linear",
        "routed experts, one by one (Mixtral w1 w2 w3, Qwen and DeepSeek gate up down) or stacked in 3-D "
        "(gpt-oss, Llama 4, Qwen3-VL, Granite)",
    ),
    Row(
        r"experts\.\w+(\.\w+)?",
        Role.EXPERT,
        "Linear",
        "experts stacked in a way of their own, which cannot be split here: DBRX along the rows, Aria",
    ),
    Row(
        r"(shared_experts?|shared_mlp)\.\w+",
        Role.SHARED_EXPERT,
        "Linear",
        "shared experts: DeepSeek, Qwen2-MoE, Llama 4, Granite, Hunyuan",
    ),
    Row(
        r"lm_head(\.\w+)?|embed_out|^output|^(model\.)?head|^(language_model\.)?score|"
        r"cls\.(predictions(\.\w+)*|seq_relationship)|vocab_(projector|transform)|"
        r"(pre_)?classifier(\.\w+)*|qa_outputs",
        Role.LM_HEAD,
        "Linear",
        "output heads: lm_head, embed_out of GPT-NeoX, output of Mistral's own format, BERT's and "
        "classifiers' heads",
    ),
    Row(
        r"project_(in|out)|per_layer_\w+|embedding_hidden_mapping_in|pooler\.dense",
        Role.OTHER,
        "Linear",
        "OPT-350m's projections around the embedding, Gemma 3n's per-layer inputs, BERT's pooler",
    ),
    Row(
        r"\w*embed(ding)?s?(_\w+)?|wte|wpe|^(model\.)?shared|relative_attention_bias",
        Role.EMBEDDING,
        "Embedding",
        "tables that are looked up: token, position, type and patch embeddings of every family",
    ),
    Row(
        _MAMBA + r"\.(in_proj\w*|out_proj)",
        Role.SSM,
        "Linear",
        "projections of state-space and convolution mixers: Mamba, Jamba, Falcon-H1, Qwen3-Next, LFM2",
    ),
    Row(
        _MAMBA + r"\.(x_proj|dt_proj)",
        Role.SSM,
        "Linear",
        "Mamba's scan kernel reads these weights itself",
        direct=True,
    ),
    Row(
        _MAMBA + r"\.(A_log|D|dt_bias|conv)|\w*conv\w*",
        Role.SSM,
        "",
        "states and convolutions of Mamba, Jamba, Qwen3-Next, LFM2; convolutions of audio encoders",
    ),
    Row(
        r"indexer\.weights_proj",
        Role.ATTENTION,
        "Linear",
        "a row for each head of DeepSeek V3.2's indexer, which engines hold unquantized",
        direct=True,
    ),
    Row(
        r"DenseReluDense\.(wi|wi_0|wi_1|wo)|mlp\.(Wi|Wo|c_proj|dense|fc)|(?<!attention\.)output\.dense|"
        r"intermediate\.dense|gate_proj|up_proj|down_proj|gate_up_proj|fc1|fc2|fc11|fc12|fc_in|fc_out|c_fc|"
        r"dense_h_to_4h|dense_4h_to_h|linear_fc[12]|lin[12]|w[123]",
        Role.MLP,
        "Linear",
        "feed-forward: gated (Llama), fused (Phi-3), plain (OPT, GPT-2, BERT, Falcon, T5), Mistral w1 w2 w3",
    ),
    Row(
        r"(q|k|v|o|out|qkv|kv|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|c_attn|q_attn|"
        r"query_key_value|query|key|value|[Ww]qkv|qkv|w[qkvo]|w[qo]_[ab]|wkv(_[ab])?(_with_mqa)?|wgate|"
        r"[qkv]_lin|out_lin|(SelfAttention|EncDecAttention)\.[qkvo]|attention\.output\.dense|indexer\.\w+|"
        + _ATTN
        + r"\.(dense|c_proj|proj|Wo)",
        Role.ATTENTION,
        "Linear",
        "attention: Llama q k v o, Phi-3 and Falcon fused, DeepSeek's MLA, GPT-2 c_attn, BERT query",
    ),
    Row(
        r"sinks|attn_sink|layer_scalar|\w*hc_\w+|mm_input_projection_weight|ape",
        Role.OTHER,
        "",
        "small parameters: gpt-oss sinks, Gemma's layer scalars, DeepSeek V4's hyper-connections",
    ),
)

# What is cut from a tensor name to get the module it belongs to: parameters and the pieces that quantized
# checkpoints add beside them.
_PARAMETER = re.compile(
    r"\.(weight\w*|bias|input_\w*scale|input_zero_point|qweight|qzeros|scales|g_idx|[qkv]_scale)$"
    r"|(?<=_proj)_(bias|blocks|scales|scale_inv|scale)$"
)
# The pieces that only a quantized layer has, as GPTQ, AWQ, compressed-tensors, FP8 blocks, ModelOpt,
# bitsandbytes, quanto and gpt-oss name them.
_PIECE = re.compile(
    r"\.(qweight|qzeros|g_idx|SCB|weight_(packed|shape|scales?|scale_inv|scale_2|global_scale|zero_point)"
    r"|weight\.(\w*absmax|\w*quant_map|quant_state\.\w+|_data|_scale))$"
    r"|(?<=_proj)_(blocks|scales|scale_inv|scale)$"
)
_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def stem(name: str) -> str:
    """The module path of a tensor name: ``a.q_proj.weight`` and ``a.q_proj.bias`` both give ``a.q_proj``."""
    return _PARAMETER.sub("", name)


@cache
def _compiled(anywhere: bool) -> tuple[tuple[Row, re.Pattern[str]], ...]:
    # A pattern starts the path or follows a dot; a place may stand anywhere, a function ends the path.
    rows, end = (PLACES, r"(?:\.|$)") if anywhere else (FUNCTIONS, "$")
    return tuple((row, re.compile(rf"(?:^|.*\.)(?:{row.pattern}){end}")) for row in rows)


@cache
def _first(path: str, anywhere: bool) -> Row | None:
    return next((row for row, pattern in _compiled(anywhere) if pattern.match(path)), None)


@lru_cache(1 << 17)  # the same name is asked for by roles, fused groups and rules
def find_function(name: str) -> Row | None:
    """The first row of ``FUNCTIONS`` that fits the module path of ``name``; None when it is unknown."""
    # Layer and expert numbers never decide a function, and folding them makes the cache small.
    return _first(_NUMBER.sub("0", stem(name)), False)


def find_place(name: str, config: Mapping[str, Any]) -> Row | None:
    """The first row of ``PLACES`` that fits ``name``; layers past ``num_hidden_layers`` are MTP layers.

    DeepSeek V3 and GLM-4-MoE append their ``num_nextn_predict_layers`` MTP layers to ``model.layers``.
    """
    layer = _LAYER.match(name)
    text = text_config(config)
    hidden = text.get("num_hidden_layers")
    if layer and isinstance(hidden, int) and text.get("num_nextn_predict_layers") and int(layer[1]) >= hidden:
        return PLACES[0]
    return _first(_NUMBER.sub("0", name), True)


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config of a config.json (at its top or in its text part), or an empty one."""
    for part in (config, text_config(config)):
        found = part.get("quantization_config") or part.get("compression_config")
        if isinstance(found, dict):
            return found
    return {}


def is_quantized_piece(name: str) -> bool:
    """Whether a tensor of this name belongs to a layer that is quantized already."""
    return _PIECE.search(name) is not None


def classify(name: str, shape: Sequence[int], config: Mapping[str, Any]) -> Role:
    """The role of the tensor ``name``; ``shape`` is not looked at except to tell a bias from its matrix.

    >>> classify("model.layers.0.mlp.gate.weight", (8, 64), {})
    <Role.ROUTER: 'router'>
    """
    place = find_place(name, config)
    if place is not None:
        return place.role
    row = find_function(name)
    is_bias = name.endswith((".bias", "_proj_bias")) and len(shape) <= 2
    if is_bias and (row is None or (row.kind == "Linear" and row.role is not Role.ROUTER)):
        return Role.BIAS
    return row.role if row is not None else Role.OTHER
