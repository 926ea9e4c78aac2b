"""Decoders from GPT-2 to Phi-2: biases, norms with a mean, networks without a gate, and names of their own.

    positions   GPT-2, StarCoder 1 and OPT learn a table of them, of which a step gathers a row (OPT: two rows more than
                there are positions); ALiBi (BLOOM, MPT) and rotary ones have none
    key heads   as many as queries, but: Falcon 7B and StarCoder 1 have one (multi_query), Falcon 40B num_kv_heads
    inner       4 · hidden where the config says nothing (MPT: expansion_ratio · hidden)

InternLM 2 is here for its names: its layers are Llama's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from narrowcast.model.families.blocks import Decoder
from narrowcast.model.families.dense import Dense, norm_of, on, slide
from narrowcast.model.families.fields import Fields
from narrowcast.model.geometry import Geometry, Matrix
from narrowcast.model.roles import Role


@dataclass(frozen=True)
class Early(Dense):
    """Where modules stand: ``root``, its ``stack`` of layers, the embedding's ``table``, the head's name ``top``,
    ``place`` and ``net`` before those of attention and network; ``qkv`` the fused matrix ("": three) and ``out``.
    ``positions``: the learned table and its rows beside max_position_embeddings. ``kv``: key heads, where the config
    does not say them as num_key_value_heads. ``times``: the width of the network over the model's where the config has
    none (0: it must)."""

    root: str = "transformer"
    stack: str = "h"
    table: str = "wte"
    top: str = "lm_head"
    place: str = "attn."
    net: str = "mlp."
    qkv: str = ""
    out: str = "out_proj"
    positions: tuple[str, int] | None = None
    kv: int | None = None
    times: int = 4
    norm_bias: bool = True

    def begin(self, fields: Fields) -> Decoder:
        model = Decoder(
            fields, tied=self.tied, root=self.root, table=self.table, stack=self.stack, head=self.top
        )
        if self.positions:
            leaf, further = self.positions
            rows = fields.count("max_position_embeddings") + further
            shape = (rows, model.hidden)
            model.matrices.append(Matrix(f"{self.root}.{leaf}", Role.EMBEDDING, shape))
        return model

    def attend(self, model: Decoder) -> None:
        fields, heads = model.fields, model.heads(kv=self.kv)
        qkv, o = on(fields, self.bias), on(fields, self.o)
        if self.qkv:
            model.attend_fused(
                model.layers, heads, prefix=self.place, leaf=self.qkv, out=self.out, qkv=qkv, o=o
            )
        else:
            norm = norm_of(fields, self.norm)
            model.attend(model.layers, heads, prefix=self.place, leaf=self.out, qkv=qkv, o=o, norm=norm)
        slide(model, heads, self.sliding)

    def network(self, model: Decoder) -> None:
        fields = model.fields
        inner = fields.count("intermediate_size", self.times * model.hidden or None)
        model.gated(model.layers, inner, prefix=self.net, leaves=self.leaves, bias=on(fields, self.mlp))


@dataclass(frozen=True)
class Narrow(Early):
    """OPT, whose embedding is as wide as word_embed_proj_dim says."""

    def begin(self, fields: Fields) -> Decoder:
        model = super().begin(fields)
        model.width = fields.count("word_embed_proj_dim", model.hidden)
        if model.width != model.hidden:
            narrow, wide = model.width, model.hidden
            for leaf, shape in (("project_out", (narrow, wide)), ("project_in", (wide, narrow))):
                model.matrices.append(Matrix(f"{self.root}.{leaf}", Role.OTHER, shape))
        return model


_FC = ("c_fc", "c_proj")
_H = ("dense_h_to_4h", "dense_4h_to_h")
_GPT2 = Early(
    qkv="c_attn", out="c_proj", bias=True, o=True, mlp=True, leaves=_FC, tied=True, positions=("wpe", 0)
)
_BLOOM = Early(table="word_embeddings", place="self_attention.", qkv="query_key_value", out="dense", bias=True, o=True,
               mlp=True, leaves=_H, tied=True)  # fmt: skip
_OPT = Narrow(root="model.decoder", stack="layers", table="embed_tokens", place="self_attn.", net="", mlp=True,
             leaves=("fc1", "fc2"), tied=True, positions=("embed_positions", 2), times=0)  # fmt: skip
_MPT = Early(stack="blocks", qkv="Wqkv", net="ffn.", leaves=("up_proj", "down_proj"), tied=True, bias=False, o=False,
             norm_bias=False)  # fmt: skip
_PHI = Early(root="model", stack="layers", table="embed_tokens", place="self_attn.", out="dense", norms=1, bias=True,
             o=True, mlp=True, head=True, leaves=("fc1", "fc2"), times=0)  # fmt: skip
_STABLELM = Dense(norm=("qk_layernorm", "whole"), norm_bias=True, bias=("use_qkv_bias", False), o=False)


def bigcode(fields: Fields) -> Geometry:
    """StarCoder 1: GPT-2 with one key head."""
    return replace(_GPT2, kv=1 if fields.flag("multi_query", True) else None)(fields)


def bloom(fields: Fields) -> Geometry:
    """BLOOM: a norm after the embedding too."""
    found = _BLOOM(fields)
    return replace(found, vectors=found.vectors + 2 * found.hidden)


def falcon(fields: Fields) -> Geometry:
    """Falcon: one norm for attention and network side by side, two in the newer layers or one after the other."""
    new = fields.flag("new_decoder_architecture")
    norms = 2
    if fields.flag("parallel_attn", True):
        norms = 2 if fields.count("num_ln_in_parallel_attn", 2 if new else 1) == 2 else 1
    kv = fields.maybe("num_kv_heads") if new else 1 if fields.flag("multi_query", True) else None
    bias = ("bias", False)
    return replace(_BLOOM, norms=norms, kv=kv, bias=bias, o=bias, mlp=bias)(fields)


def opt(fields: Fields) -> Geometry:
    """OPT; the 350M model has a narrower embedding and no last norm."""
    last = fields.flag("do_layer_norm_before", True) and not fields.flag("_remove_final_layer_norm")
    bias, affine = ("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    return replace(_OPT, bias=bias, o=bias, mlp=bias, norms=2 if affine else 0, last=last and affine)(fields)


def mpt(fields: Fields) -> Geometry:
    """MPT: no biases, and ALiBi for positions; what its code could do beside that is refused."""
    attention = fields.value("attn_config")
    inner = Fields(attention if isinstance(attention, Mapping) else {}, fields.family)
    if not fields.flag("no_bias", True):
        fields.refuse("no_bias", "true")
    if attention is not None and not inner.flag("alibi", True):
        fields.refuse("attn_config", "an object with alibi true")
    return replace(_MPT, times=fields.count("expansion_ratio", 4))(fields)


def phi(fields: Fields) -> Geometry:
    """Phi 1 to 2: attention and network side by side after one norm."""
    found = replace(_PHI, norm="head")(fields) if fields.flag("qk_layernorm") else _PHI(fields)
    if not fields.flag("qk_layernorm"):
        return found
    return replace(
        found, vectors=found.vectors + 2 * found.layers * found.attention[0].k_dim
    )  # biases of the two


def stablelm(fields: Fields) -> Geometry:
    """StableLM 1.6B to 12B: where attention and network stand side by side, they share their norm."""
    return replace(_STABLELM, norms=1 if fields.flag("use_parallel_residual") else 2)(fields)


_SWITCHED = ("attention_bias", True)
FAMILIES: Mapping[str, Callable[[Fields], Geometry]] = {
    "gpt2": _GPT2,
    "gpt_bigcode": bigcode,
    "gptj": Early(norms=1, bias=False, o=False, mlp=True, head=True, leaves=("fc_in", "fc_out")),
    "gpt_neox": Early(root="gpt_neox", stack="layers", table="embed_in", top="embed_out", place="attention.",
                      qkv="query_key_value", out="dense", bias=_SWITCHED, o=_SWITCHED, mlp=True, leaves=_H, times=0),
    "bloom": bloom,
    "falcon": falcon,
    "opt": opt,
    "mpt": mpt,
    "phi": phi,
    "stablelm": stablelm,
    "internlm2": Early(stack="layers", root="model", table="tok_embeddings", top="output", place="attention.",
                       net="feed_forward.", qkv="wqkv", out="wo", bias=("bias", False), o=("bias", False),
                       leaves=("w1", "w3", "w2"), norm_bias=False, times=0),
}  # fmt: skip
