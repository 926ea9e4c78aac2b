"""Nemotron-H and Nemotron 3: every layer is one block of one kind, with one norm before it.

    M  Mamba 2        *  attention        -  up and down, without a gate        E  experts, the same without a gate

Experts of Nemotron 3 Super work in a narrower latent: two further matrices go in and out of it once per layer.
"""

from __future__ import annotations

from collections import Counter

from narrowcast.model.families.blocks import Decoder
from narrowcast.model.families.fields import Fields
from narrowcast.model.families.recurrent import Mamba2
from narrowcast.model.geometry import Geometry
from narrowcast.model.roles import Role

KINDS = {
    "M": "state", "*": "attention", "-": "mlp", "E": "moe", "mamba": "state", "linear_attention": "state",
    "attention": "attention", "full_attention": "attention", "mlp": "mlp", "moe": "moe",
}  # fmt: skip
_UP_DOWN = ("up_proj", "down_proj")
_MIXER = Mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias",
                "use_bias", dtype="fp32")  # fmt: skip


def kinds(fields: Fields, layers: int) -> Counter[str]:
    """How many blocks of each kind, by the pattern of letters or by words."""
    name = fields.spelled("hybrid_override_pattern", "layers_block_type", "layer_types")
    value = fields.value(name)
    if not isinstance(value, str | list | tuple) or len(value) != layers or any(
        not isinstance(word, str) or word not in KINDS for word in value
    ):  # fmt: skip
        fields.refuse(name, f"a letter of M*-E, or a word, for each of {layers} layers")
    return Counter(KINDS[word] for word in value)


def nemotron_h(fields: Fields) -> Geometry:
    """Nemotron-H: a Mamba 2 hybrid of single blocks."""
    if not fields.has("num_hidden_layers"):  # transformers 5 writes the kinds alone
        words = fields.listed(fields.spelled("layers_block_type", "layer_types")) or ()
        fields = Fields(
            {**fields.config, "num_hidden_layers": len(words) or None}, fields.family, outer=fields.outer
        )
    model = Decoder(fields, root="backbone", table="embeddings")
    found = kinds(fields, model.layers)
    _MIXER.add(model, found["state"], "mixer.")
    if attends := found["attention"]:
        heads = model.heads(dim=True)
        model.attend(attends, heads, prefix="mixer.")
        model.keep(["full"] * attends, heads)
    if found["mlp"]:
        model.gated(found["mlp"], fields.count("intermediate_size"), prefix="mixer.", leaves=_UP_DOWN,
                    bias=fields.flag("mlp_bias"))  # fmt: skip
    if found["moe"]:
        _experts(model, found["moe"])
    model.norms(1)
    return model.geometry()


def _experts(model: Decoder, layers: int) -> None:
    fields, hidden, bias = model.fields, model.hidden, model.fields.flag("mlp_bias")
    experts, active = fields.count("n_routed_experts"), fields.count("num_experts_per_tok")
    inner, shared = fields.count("moe_intermediate_size"), fields.count("moe_shared_expert_intermediate_size")
    latent = fields.maybe("moe_latent_size")
    model.linear("mixer.gate", Role.ROUTER, (experts, hidden), layers)
    if latent:
        model.linear("mixer.fc1_latent_proj", Role.MLP, (latent, hidden), layers, bias=bias)
        model.linear("mixer.fc2_latent_proj", Role.MLP, (hidden, latent), layers, bias=bias)
    model.gated(layers, inner, prefix="mixer.experts.*.", role=Role.EXPERT, leaves=_UP_DOWN, experts=experts,
                active=active, width=latent)  # fmt: skip
    model.gated(
        layers, shared, prefix="mixer.shared_experts.", role=Role.SHARED_EXPERT, leaves=_UP_DOWN, bias=bias
    )
