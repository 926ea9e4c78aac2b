"""Gemma 3n and Gemma 4: layers that borrow keys, inputs of each layer, and in Gemma 4 heads that differ by kind.

    keys        layers after num_hidden_layers − num_kv_shared_layers borrow those of an earlier layer of their kind
    inputs      each layer reads hidden_size_per_layer_input elements of a second table of embeddings, which is only
                gathered from: an embedding that is not streamed, whether or not the head is tied to the first one
    Gemma 3n    four streams (AltUp) and a low-rank side path (LAuReL)
    Gemma 4     full layers have heads of global_head_dim and num_global_key_value_heads, and with attention_k_eq_v no
                matrix of values, whose place the keys take; larger models have experts beside the network

Keys and values of layers that borrow them are in some files, unused; they are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from narrowcast.model.families.blocks import Decoder, attention_kinds
from narrowcast.model.families.fields import Fields
from narrowcast.model.geometry import Attention, Geometry, Keeps, Matrix, Split
from narrowcast.model.roles import Role

Heads = tuple[int, int, int]


def gemma3n(fields: Fields) -> Geometry:
    """The text model of Gemma 3n."""
    model = Decoder(fields, tied=True)
    heads = model.heads(dim=True)
    _attend(model, attention_kinds(fields, model.layers, _but_every(5, model.layers)), heads, heads)
    for inner, count in Counter(_widths(fields, model.layers)).items():
        model.gated(count, inner)
    streams, rank, hidden = fields.count("altup_num_inputs"), fields.count("laurel_rank"), model.hidden
    rows: list[tuple[str, tuple[int, int], Split]] = [
        ("altup.correction_coefs", (streams, streams), "whole"),
        ("altup.prediction_coefs", (streams**2, streams), "whole"),
        ("altup.modality_router", (streams, hidden), "whole"),
        ("laurel.linear_left", (rank, hidden), "column"),
        ("laurel.linear_right", (hidden, rank), "row"),
    ]
    for name, shape, split in rows:
        model.linear(name, Role.OTHER, shape, model.layers, split)
    for name in ("altup_projections.*", "altup_unembed_projections.*"):
        model.matrices.append(
            Matrix(f"{model.root}.{name}", Role.OTHER, (hidden, hidden), streams - 1, split="column")
        )
    _inputs(model)
    model.norms(4)
    model.vectors += 3 * model.layers * hidden  # scale and norm of AltUp, norm of LAuReL
    return model.geometry()


def gemma4(fields: Fields) -> Geometry:
    """The text model of Gemma 4."""
    model = Decoder(fields, tied=True)
    layers, inner, heads = model.layers, fields.count("intermediate_size"), model.heads(dim=True)
    kinds = (*attention_kinds(fields, layers, _but_every(6, layers))[:-1], "full")  # the last layer always is
    same = fields.flag("attention_k_eq_v")
    own = _attend(model, kinds, heads, _full_heads(fields, heads, kinds.index("full")), values=not same)
    double = layers - own if fields.flag("use_double_wide_mlp") else 0
    model.gated(layers - double, inner)
    model.gated(double, 2 * inner)
    if fields.flag("enable_moe_block"):
        experts = fields.count("num_experts")
        active = fields.count(fields.spelled("top_k_experts", "num_experts_per_tok"))
        model.routed(layers, experts, active, fields.count("moe_intermediate_size"), router="router.proj",
                     prefix="experts.", leaves=("gate_up_proj", "down_proj"))  # fmt: skip
        model.vectors += layers * (
            4 * model.hidden + experts
        )  # three norms, the router's scale and the experts'
    if fields.value("hidden_size_per_layer_input"):
        _inputs(model)
    model.norms(4)
    return model.geometry()


def _but_every(nth: int, layers: int) -> list[int]:
    return [i for i in range(layers) if (i + 1) % nth]


def _full_heads(fields: Fields, heads: Heads, layer: int) -> Heads:
    """Heads of the full layers of Gemma 4, of which ``layer`` is one: files of transformers 5 say them per layer."""
    said, (q, kv, _) = fields.value("per_layer_config"), heads
    if said is None:
        same = fields.flag("attention_k_eq_v")
        kv = fields.count("num_global_key_value_heads", kv) if same else kv
        return q, kv, fields.count("global_head_dim")
    entry = said.get(str(layer)) if isinstance(said, Mapping) else None
    if not isinstance(entry, Mapping):
        fields.refuse("per_layer_config", f"an object with head_dim for layer {layer}")
    inner = Fields(entry, fields.family)
    return q, inner.count("num_key_value_heads", kv), inner.count("head_dim")


def _attend(model: Decoder, kinds: Sequence[Keeps], heads: Heads, full: Heads, *, values: bool = True) -> int:
    """Attention of every layer by kind, with ``full`` heads in full layers; how many layers have keys of their own.
    ``values``: full layers have a matrix of values."""
    fields, hidden, layers = model.fields, model.hidden, model.layers
    own = layers - fields.count("num_kv_shared_layers", 0, least=0)
    if own < 1:
        fields.refuse("num_kv_shared_layers", f"fewer than {layers}, the layers there are")
    window, keeping = fields.count("sliding_window"), Counter(kinds[:own])
    for kind, count in Counter(kinds).items():
        q, kv, dim = full if kind == "full" else heads
        keeps = keeping[kind]
        rows = [("q_proj", q, count), ("k_proj", kv, keeps)]
        rows += [("v_proj", kv, keeps)] if values or kind != "full" else []
        for leaf, n, times in rows:
            model.linear(f"self_attn.{leaf}", Role.ATTENTION, (n * dim, hidden), times, "column", heads=n)
        model.linear("self_attn.o_proj", Role.ATTENTION, (hidden, q * dim), count, "row", heads=q)
        model.vectors += (count + keeps) * dim
        model.keeps.append(
            Attention(kind, count, q, kv, dim, dim, None if kind == "full" else window, kept=keeps)
        )
    return own


def _widths(fields: Fields, layers: int) -> list[int]:
    """The width of each layer's network: one number for all of them, or a list."""
    value = fields.value("intermediate_size")
    if not isinstance(value, list | tuple):
        return [fields.count("intermediate_size")] * layers
    if len(value) != layers or any(type(item) is not int or item < 1 for item in value):
        fields.refuse("intermediate_size", f"a whole number, or {layers} of them")
    return list(value)


def _inputs(model: Decoder) -> None:
    """What each layer reads for itself, with the table that it comes from."""
    fields, layers, hidden = model.fields, model.layers, model.hidden
    each, rows = fields.count("hidden_size_per_layer_input"), fields.count("vocab_size_per_layer_input")
    model.linear("per_layer_input_gate", Role.OTHER, (each, hidden), layers)
    model.linear("per_layer_projection", Role.OTHER, (hidden, each), layers)
    for name, role, shape in (
        ("embed_tokens_per_layer", Role.EMBEDDING, (rows, layers * each)),
        ("per_layer_model_projection", Role.OTHER, (layers * each, hidden)),
    ):
        model.matrices.append(Matrix(f"{model.root}.{name}", role, shape, split="column"))
    model.vectors += layers * hidden + each  # a norm of each layer, and one of the inputs


FAMILIES: Mapping[str, Callable[[Fields], Geometry]] = {"gemma3n": gemma3n, "gemma4": gemma4}
