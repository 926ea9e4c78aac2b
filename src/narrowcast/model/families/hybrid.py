"""State-space models, and hybrids in which some layers attend and the others keep a state.

Which layers attend, by family:

    layer_types                                       a word per layer: Granite 4, Qwen3-Next, LFM2; wins
    full_attention_interval                           every n-th: Qwen3-Next and Qwen3.5 (4)
    attn_layer_period, attn_layer_offset              Jamba; expert_layer_period the same for experts
    attn_layer_indices, full_attn_idxs                listed: Bamba, LFM2
    hybrid_override_pattern, layers_block_type        Nemotron-H, whose layers are one block each: M Mamba, * attention,
                                                      - network, E experts
    linear_attn_config                                lists of layers from 1 on: Kimi Linear
    every layer does both                             Falcon-H1
    layers_block_type with hybrid                     Zamba 2: attention and network of few blocks in turn, before Mamba
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from narrowcast.model.families.blocks import Decoder
from narrowcast.model.families.experts import Latent, Mixture, stepped
from narrowcast.model.families.fields import Fields
from narrowcast.model.families.recurrent import Mamba, Mamba2, delta_net, kimi_delta, short_convolution
from narrowcast.model.geometry import Geometry, Split
from narrowcast.model.roles import Role

ATTEND = ("full_attention", "attention")  # transformers 5's word, and 4's
STATE = ("linear_attention", "mamba", "conv")
_MIXER = Mamba2()


def attending(fields: Fields, layers: int, otherwise: Callable[[int], bool] | None = None) -> int:
    """How many of the layers attend: as layer_types or layers_block_type says, else by the family's rule."""
    name = fields.spelled("layer_types", "layers_block_type")
    words = fields.words(name, layers, ATTEND + STATE)
    if words is not None:
        return sum(word in ATTEND for word in words)
    if otherwise is None:
        fields.refuse(name, f"a word of {', '.join(ATTEND + STATE)} for each of {layers} layers")
    return sum(otherwise(layer) for layer in range(layers))


def mamba(fields: Fields) -> Geometry:
    """Mamba and Falcon-Mamba: a mixer and a norm in each layer, nothing else."""
    model = Decoder(fields, tied=True, root="backbone", table="embeddings")
    Mamba().add(model, model.layers, "mixer.")
    model.norms(1)
    return model.geometry()


def mamba2(fields: Fields) -> Geometry:
    """Mamba 2, Codestral Mamba."""
    model = Decoder(fields, root="backbone", table="embeddings")
    mixer = Mamba2(
        "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias"
    )
    mixer.add(model, model.layers, "mixer.")
    model.norms(1)
    return model.geometry()


def granite_hybrid(fields: Fields) -> Geometry:
    """Granite 4: Mamba 2 or attention, experts unless there are none of them, and a shared network."""
    model = Decoder(fields)
    attends, heads = attending(fields, model.layers), model.heads()
    _MIXER.add(model, model.layers - attends, "mamba.")
    _attend(model, attends, heads, bias=fields.flag("attention_bias"))
    experts = fields.count("num_local_experts", least=0)
    if experts:
        model.routed(model.layers, experts, fields.count("num_experts_per_tok"), fields.count("intermediate_size"),
                     router="block_sparse_moe.router.layer", prefix="block_sparse_moe.",
                     leaves=("input_linear", "output_linear"))  # fmt: skip
    model.gated(model.layers, fields.count("shared_intermediate_size"), prefix="shared_mlp.",
                role=Role.SHARED_EXPERT if experts else Role.MLP, leaves=("input_linear", "output_linear"))  # fmt: skip
    model.norms(2)
    return model.geometry()


def bamba(fields: Fields) -> Geometry:
    """Bamba: Mamba 2, in the listed layers attention, and a gated network."""
    model = Decoder(fields)
    listed = fields.numbers("attn_layer_indices") or frozenset()
    attends, heads = attending(fields, model.layers, lambda layer: layer in listed), model.heads()
    _MIXER.add(model, model.layers - attends, "mamba.")
    _attend(model, attends, heads, bias=fields.flag("attention_bias"))
    model.gated(
        model.layers, fields.count("intermediate_size"), prefix="feed_forward.", bias=fields.flag("mlp_bias")
    )
    model.norms(2)
    return model.geometry()


def falcon_h1(fields: Fields) -> Geometry:
    """Falcon-H1: attention and Mamba 2 side by side in every layer."""
    model = Decoder(fields)
    _attend(model, model.layers, model.heads(), bias=fields.flag("attention_bias"))
    replace(_MIXER, norm="mamba_rms_norm", out="projectors_bias").add(model, model.layers, "mamba.")
    model.gated(
        model.layers, fields.count("intermediate_size"), prefix="feed_forward.", bias=fields.flag("mlp_bias")
    )
    model.norms(2)
    return model.geometry()


def jamba(fields: Fields) -> Geometry:
    """Jamba: Mamba, every few layers attention, and every few layers experts."""
    model = Decoder(fields)
    layers, heads = model.layers, model.heads()
    attends = attending(fields, layers, _periodic(fields, "attn"))
    mixer = Mamba("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank", "mamba_conv_bias",
                  "mamba_proj_bias", norms=True)  # fmt: skip
    mixer.add(model, layers - attends, "mamba.")
    _attend(model, attends, heads)
    inner, experts = fields.count("intermediate_size"), fields.count("num_experts")
    sparse = sum(map(_periodic(fields, "expert"), range(layers))) if experts > 1 else 0
    model.gated(layers - sparse, inner, prefix="feed_forward.")
    model.routed(sparse, experts, fields.count("num_experts_per_tok"), inner, router="feed_forward.router",
                 prefix="feed_forward.experts.*.")  # fmt: skip
    model.norms(2)
    return model.geometry()


def _periodic(fields: Fields, kind: str) -> Callable[[int], bool]:
    period = fields.count(f"{kind}_layer_period")
    offset = fields.count(f"{kind}_layer_offset", least=0)
    return lambda layer: layer % period == offset


def _attend(model: Decoder, layers: int, heads: tuple[int, int, int], *, bias: bool = False) -> None:
    model.attend(layers, heads, qkv=bias, o=bias)
    model.keep(["full"] * layers, heads)


_GATE_UP_DOWN = ("w1", "w3", "w2")


def lfm2(fields: Fields) -> Geometry:
    """LFM2: short convolutions, some layers attention, and a gated network whose width is rounded."""
    model = _lfm2(fields)
    inner = fields.count(fields.spelled("block_ff_dim", "intermediate_size"))
    if fields.flag("block_auto_adjust_ff_dim", True):
        factor, multiple = fields.value("block_ffn_dim_multiplier"), fields.count("block_multiple_of")
        if type(factor) not in (int, float) or not 0 < factor < 100:
            fields.refuse("block_ffn_dim_multiplier", "a number above zero")
        inner = -(-int(factor * int(2 * inner / 3)) // multiple) * multiple
    model.gated(model.layers, inner, prefix="feed_forward.", leaves=_GATE_UP_DOWN)
    return model.geometry()


def lfm2_moe(fields: Fields) -> Geometry:
    """LFM2 with experts after the first num_dense_layers layers."""
    model = _lfm2(fields)
    dense = min(fields.count("num_dense_layers", least=0), model.layers)
    model.gated(dense, fields.count("intermediate_size"), prefix="feed_forward.", leaves=_GATE_UP_DOWN)
    model.routed(model.layers - dense, fields.count("num_experts"), fields.count("num_experts_per_tok"),
                 fields.count("moe_intermediate_size"), router="feed_forward.gate", prefix="feed_forward.experts.*.",
                 leaves=_GATE_UP_DOWN)  # fmt: skip
    return model.geometry()


def _lfm2(fields: Fields) -> Decoder:
    name = fields.spelled("tie_word_embeddings", "tie_embedding")
    model = Decoder(fields, tied=fields.flag(name, True))
    listed = fields.numbers("full_attn_idxs")
    rule = None if listed is None else listed.__contains__
    attends, heads = attending(fields, model.layers, rule), model.heads()
    short_convolution(model, model.layers - attends)
    model.attend(attends, heads, leaf="out_proj", norm="head")
    model.keep(["full"] * attends, heads)
    model.norms(2)
    return model


@dataclass(frozen=True)
class Delta(Mixture):
    """Qwen3-Next and Qwen3.5: three of four layers are gated delta nets, the fourth attends with a gate."""

    dim: bool = True
    leaves_of_state: tuple[tuple[str, str], ...] = (("in_proj_qkvz", "qkvz"), ("in_proj_ba", "ba"))
    mixture: bool = True

    def attend(self, model: Decoder) -> None:
        fields, heads = model.fields, model.heads(dim=True)
        every = fields.count("full_attention_interval", 4)
        attends = attending(fields, model.layers, lambda layer: (layer + 1) % every == 0)
        bias = fields.flag("attention_bias")
        model.attend(attends, heads, qkv=bias, o=bias, norm="head", gate=True)
        model.keep(["full"] * attends, heads)
        delta_net(model, model.layers - attends, self.leaves_of_state)

    def network(self, model: Decoder) -> None:
        if self.mixture:
            super().network(model)
        else:
            model.gated(model.layers, model.fields.count("intermediate_size"))


@dataclass(frozen=True)
class Kimi(Latent):
    """Kimi Linear: three of four layers keep a state, the fourth a latent."""

    def attend(self, model: Decoder) -> None:
        fields = model.fields
        for name in ("mla_use_output_gate", "use_full_rank_gate", "routed_expert_hidden_size"):  # Kimi K3
            if fields.value(name):
                fields.refuse(name, "absent or false")
        said, listed = fields.value("linear_attn_config"), frozenset[int]()
        names, inner = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"), fields
        if isinstance(said, Mapping):
            names, inner = ("num_heads", "head_dim", "short_conv_kernel_size"), Fields(said, fields.family)
            if not all(map(inner.has, names)):
                fields.refuse("linear_attn_config", f"an object with {', '.join(names)}")
            listed = inner.numbers("full_attn_layers") or listed
        attends = attending(fields, model.layers, (lambda layer: layer + 1 in listed) if listed else None)
        model.latent(attends)
        heads, dim, kernel = (inner.count(name) for name in names)
        kimi_delta(model, model.layers - attends, heads, dim, kernel)


def zamba2(fields: Fields) -> Geometry:
    """Zamba 2: Mamba 2 in every layer; before it, in hybrid ones, attention and network over the stream and the
    embedding side by side, of which there are num_mem_blocks that all hybrid layers share, with adapters of their
    own."""
    model = Decoder(fields, tied=True)
    words = fields.words("layers_block_type", model.layers, (*STATE, "hybrid"))
    if words is None:
        fields.refuse("layers_block_type", f"mamba or hybrid for each of {model.layers} layers")
    hybrids = words.count("hybrid")
    mixer = Mamba2(
        "n_mamba_heads", "mamba_headdim", "mamba_ngroups", conv_bias="use_conv_bias", bias="add_bias_linear"
    )
    mixer.add(model, model.layers - hybrids, "mamba.")
    mixer.add(model, hybrids, "mamba_decoder.mamba.")
    model.norms(1)
    if hybrids:
        _shared_blocks(model, hybrids)
    return model.geometry()


def _shared_blocks(model: Decoder, hybrids: int) -> None:
    fields, hidden = model.fields, model.hidden
    blocks, rank = min(fields.count("num_mem_blocks", 1), hybrids), fields.count("adapter_rank", 128)
    q, wide, inner = (
        fields.count("num_attention_heads"),
        2 * hidden,
        fields.count("intermediate_size", 4 * hidden),
    )
    kv, dim = fields.count("num_key_value_heads", q), fields.divided("num_attention_heads", wide, q)
    place = "shared_transformer."
    rows: list[tuple[str, Role, tuple[int, int], int, Split]] = [
        ("linear", Role.OTHER, (hidden, hidden), hybrids, "whole"),
        *((f"{place}self_attn.{part}_proj", Role.ATTENTION, (n * dim, wide), blocks, "column")
          for part, n in zip("qkv", (q, kv, kv), strict=True)),
        (f"{place}self_attn.o_proj", Role.ATTENTION, (hidden, q * dim), blocks, "row"),
        (f"{place}feed_forward.gate_up_proj", Role.MLP, (2 * inner, hidden), blocks, "column"),
        (f"{place}feed_forward.down_proj", Role.MLP, (hidden, inner), blocks, "row"),
    ]  # fmt: skip
    adapted = [("feed_forward.gate_up_proj", hidden, 2 * inner)]
    if fields.flag("use_shared_attention_adapter"):
        adapted += [(f"self_attn.linear_{part}", wide, wide) for part in "qkv"]
    for name, k, n in adapted:
        for shape in ((rank, k), (n, rank)):
            rows.append((f"{place}{name}_adapter_list.*.*", Role.OTHER, shape, hybrids, "column"))
    for name, role, shape, layers, split in rows:
        pieces = (inner, inner) if name.endswith("gate_up_proj") else ()
        bias = role is Role.MLP and fields.flag("add_bias_linear")
        model.linear(name, role, shape, layers, split, pieces=pieces, bias=bias)
    model.vectors += blocks * (wide + hidden)
    model.keep(["full"] * hybrids, (q, kv, dim))
    model.notes.append(
        f"{hybrids} layers share the weights of {blocks}, which are counted once but read by each"
    )


_NEXT = Delta(sparse=stepped, shared="mlp.shared_expert.", shared_width="shared_expert_intermediate_size",
              shared_gate=True)  # fmt: skip
_APART = (("in_proj_qkv", "qkv"), ("in_proj_z", "z"), ("in_proj_b", "b"), ("in_proj_a", "a"))

FAMILIES: Mapping[str, Callable[[Fields], Geometry]] = {
    "mamba": mamba,
    "falcon_mamba": mamba,
    "mamba2": mamba2,
    "granitemoehybrid": granite_hybrid,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "jamba": jamba,
    "zamba2": zamba2,
    "kimi_linear": Kimi(router="block_sparse_moe.gate", place="block_sparse_moe.experts.*.", matrices=_GATE_UP_DOWN,
                        shared="block_sparse_moe.shared_experts."),
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "qwen3_next": _NEXT,
    "qwen3_5": replace(_NEXT, mixture=False, leaves_of_state=_APART),
    "qwen3_5_moe": replace(_NEXT, leaves_of_state=_APART, place="mlp.experts.", matrices=("gate_up_proj", "down_proj")),
}  # fmt: skip
