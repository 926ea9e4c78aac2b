"""Families whose layers are of a kind of their own: Llama 3.2 Vision (mllama) and Gemma 3n.

    mllama     every few layers look at the image instead of the text: cross attention, whose keys are the image's
    Gemma 3n   layers after num_hidden_layers − num_kv_shared_layers borrow the keys of an earlier layer of their kind,
               and each layer reads a row of its own from a second table of embeddings

A table that is only gathered from is an embedding and not streamed, whether or not the head is tied to the first one.
Keys of the image are kept once per image, not per token: those layers keep nothing here, and a note says so. Keys and
values of layers that borrow them are in some files of Gemma 3n, unused; they are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from narrowcast.model.families.blocks import Decoder, attention_kinds
from narrowcast.model.families.dense import six
from narrowcast.model.families.fields import Fields
from narrowcast.model.geometry import Attention, Geometry, Matrix
from narrowcast.model.roles import Role

_FURTHER = 8  # rows of mllama's embedding beyond the vocabulary: the image token's


def mllama(fields: Fields) -> Geometry:
    """The text model of Llama 3.2 Vision; num_hidden_layers counts the layers of cross attention too."""
    model = Decoder(fields)
    crossing = fields.numbers("cross_attention_layers")
    if crossing is None or any(layer >= model.layers for layer in crossing):
        fields.refuse("cross_attention_layers", f"a list of layers below {model.layers}")
    heads, cross = model.heads(), len(crossing)
    model.attend(model.layers - cross, heads)
    model.keep(["full"] * (model.layers - cross), heads)
    if cross:
        model.attend(cross, heads, prefix="cross_attn.", norm="head")
        q, kv, dim = heads
        model.keeps.append(Attention("full", cross, q, kv, dim, dim, kept=0))
        model.vectors += 2 * cross  # the gates of attention and network
        model.notes.append(f"{cross} layers of cross attention keep keys of the image, which are not counted")
    model.gated(model.layers, fields.count("intermediate_size"))
    model.norms(2)
    model.rows = model.vocabulary + _FURTHER
    return model.geometry()


def gemma3n(fields: Fields) -> Geometry:
    """The text model of Gemma 3n: four streams (AltUp), a low-rank side path (LAuReL), inputs per layer."""
    model = Decoder(fields, tied=True)
    layers, hidden, heads = model.layers, model.hidden, model.heads(dim=True)
    kinds = attention_kinds(fields, layers, six(fields, layers))
    own = layers - fields.count("num_kv_shared_layers", 0, least=0)
    if own < 1:
        fields.refuse("num_kv_shared_layers", f"fewer than {layers}, the layers there are")
    q, kv, dim = heads
    keeping, window = Counter(kinds[:own]), fields.count("sliding_window")
    for kind, count in Counter(kinds).items():
        model.keeps.append(
            Attention(kind, count, q, kv, dim, dim, None if kind == "full" else window, kept=keeping[kind])
        )
    model.linear("self_attn.q_proj", Role.ATTENTION, (q * dim, hidden), layers, "column", heads=q)
    for leaf in ("k_proj", "v_proj"):
        model.linear(f"self_attn.{leaf}", Role.ATTENTION, (kv * dim, hidden), own, "column", heads=kv)
    model.linear("self_attn.o_proj", Role.ATTENTION, (hidden, q * dim), layers, "row", heads=q)
    for inner, count in Counter(_widths(fields, layers)).items():
        model.gated(count, inner)
    _beside(model)
    model.norms(4)
    model.vectors += (layers + own) * dim
    return model.geometry()


def _widths(fields: Fields, layers: int) -> list[int]:
    """The width of each layer's network: one number for all of them, or a list."""
    value = fields.value("intermediate_size")
    if not isinstance(value, list | tuple):
        return [fields.count("intermediate_size")] * layers
    if len(value) != layers or any(type(item) is not int or item < 1 for item in value):
        fields.refuse("intermediate_size", f"a whole number, or {layers} of them")
    return list(value)


def _beside(model: Decoder) -> None:
    """What Gemma 3n has beside attention and network: AltUp, LAuReL, and the inputs per layer with their table."""
    fields, layers, hidden = model.fields, model.layers, model.hidden
    streams, rank = fields.count("altup_num_inputs"), fields.count("laurel_rank")
    each, rows = fields.count("hidden_size_per_layer_input"), fields.count("vocab_size_per_layer_input")
    for name, shape in (
        ("altup.correction_coefs", (streams, streams)), ("altup.prediction_coefs", (streams**2, streams)),
        ("altup.modality_router", (streams, hidden)), ("laurel.linear_left", (rank, hidden)),
        ("laurel.linear_right", (hidden, rank)), ("per_layer_input_gate", (each, hidden)),
        ("per_layer_projection", (hidden, each)),
    ):  # fmt: skip
        model.linear(name, Role.OTHER, shape, layers)
    for name, role, shape, times in (
        ("embed_tokens_per_layer", Role.EMBEDDING, (rows, layers * each), 1),
        ("per_layer_model_projection", Role.OTHER, (layers * each, hidden), 1),
        ("altup_projections.*", Role.OTHER, (hidden, hidden), streams - 1),
        ("altup_unembed_projections.*", Role.OTHER, (hidden, hidden), streams - 1),
    ):
        model.matrices.append(Matrix(f"{model.root}.{name}", role, shape, times))
    # scale and norm of AltUp, norm of LAuReL and of the layer's input; the norm of the inputs per layer
    model.vectors += layers * 4 * hidden + each


FAMILIES: Mapping[str, Callable[[Fields], Geometry]] = {"mllama": mllama, "gemma3n": gemma3n}
