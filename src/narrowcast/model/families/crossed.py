"""Llama 3.2 Vision (mllama): every few layers look at the image instead of the text.

Cross attention keeps the keys of the image once per image, not per token: those layers keep nothing here, and a note
says so.
"""

from __future__ import annotations

from narrowcast.model.families.blocks import Decoder
from narrowcast.model.families.fields import Fields
from narrowcast.model.geometry import Attention, Geometry

FURTHER = 8  # rows of the embedding beyond the vocabulary: the image token's


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
    model.rows = model.vocabulary + FURTHER
    return model.geometry()
