"""The blocks that families are made of: embedding and head, attention, gated network, experts.

    parameters of attention      (heads + kv_heads) · dim_qk · hidden  +  (heads + kv_heads) · dim_v · hidden
    of a gated network           3 · inner · hidden
    of experts                   experts · 3 · inner · hidden  +  the router's experts · hidden

Each block adds its matrices, under the names that files on the hub carry, and its vectors; a family's row says which
blocks its layers have and how many layers there are of each. How engines split a matrix (vLLM's layers): q, k, v,
gate, up, embedding and head by rows, o and down by columns, routers not at all.

Left out: rotary tables, which are computed; correction biases of routers, which are buffers of some hundred numbers per
layer; layers that predict further tokens (MTP), which engines load for speculative decoding only and a note tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from narrowcast.model.families.fields import LAYERS, Fields
from narrowcast.model.fused import fused_groups
from narrowcast.model.geometry import Attention, Geometry, Keeps, Matrix, Split
from narrowcast.model.roles import Role

KINDS: dict[str, Keeps] = {
    "full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked",
}  # fmt: skip


class Decoder:
    """A model in the making: ``layers`` of width ``hidden``, with its embedding and its head."""

    def __init__(
        self,
        fields: Fields,
        *,
        tied: bool = False,
        root: str = "model",
        table: str = "embed_tokens",
        stack: str = "layers",
        head: str = "lm_head",
    ) -> None:
        self.fields = fields
        self.root = root
        self.stack = stack
        self.head = head
        self.table = table
        self.hidden = fields.count("hidden_size")
        self.layers = fields.count("num_hidden_layers", most=LAYERS)
        self.vocabulary = fields.count("vocab_size")
        self.tied = fields.tied(tied)
        self.matrices: list[Matrix] = []
        self.keeps: list[Attention] = []
        self.vectors = 0
        self.notes: list[str] = []
        self.head_bias = False
        self.rows = self.vocabulary  # of the embedding
        self.width = self.hidden  # of the embedding and the head

    def linear(
        self,
        name: str,
        role: Role,
        shape: tuple[int, int],
        layers: int,
        split: Split = "whole",
        *,
        heads: int = 0,
        bias: bool = False,
        experts: int = 1,
        active: int = 1,
        pieces: Sequence[int] = (),
    ) -> None:
        """One matrix of ``layers`` layers, named from the layer on."""
        if layers and experts:
            self.matrices.append(
                Matrix(
                    f"{self.root}.{self.stack}.*.{name}",
                    role,
                    shape,
                    layers,
                    experts,
                    active,
                    split,
                    heads,
                    bias=shape[0] if bias else 0,
                    pieces=tuple(pieces),
                )
            )

    def norms(self, each: int, *, bias: bool = False, last: bool = True) -> None:
        """``each`` norms as wide as the model in every layer, and the last one."""
        self.vectors += (each * self.layers + last) * self.hidden * (2 if bias else 1)

    def heads(self, *, dim: bool = False, kv: int | None = None) -> tuple[int, int, int]:
        """Query heads, key heads and the width of one. ``dim``: the family needs head_dim, which does not follow from
        the hidden size. ``kv``: key heads where the config has none (None: as many as there are query heads)."""
        fields = self.fields
        q = fields.count("num_attention_heads")
        keys = fields.count("num_key_value_heads", q if kv is None else kv)
        fields.divided("num_key_value_heads", q, keys)
        if dim or fields.has("head_dim"):
            return q, keys, fields.count("head_dim")
        return q, keys, fields.divided("num_attention_heads", self.hidden, q)

    def attend(
        self,
        layers: int,
        heads: tuple[int, int, int],
        *,
        prefix: str = "self_attn.",
        qkv: bool = False,
        o: bool = False,
        leaf: str = "o_proj",
        norm: str = "",
        gate: bool = False,
    ) -> None:
        """Query, key, value and output projections of ``layers`` layers. ``qkv`` and ``o``: their biases. ``norm``:
        norms of queries and keys, for each "head" alike or over the "whole" width. ``gate``: as many gates as queries
        in the query's matrix."""
        q, kv, dim = heads
        rows = q * dim * (2 if gate else 1)
        for name, n, h in (("q_proj", rows, q), ("k_proj", kv * dim, kv), ("v_proj", kv * dim, kv)):
            self.linear(prefix + name, Role.ATTENTION, (n, self.hidden), layers, "column", heads=h, bias=qkv)
        self.linear(prefix + leaf, Role.ATTENTION, (self.hidden, q * dim), layers, "row", heads=q, bias=o)
        self.vectors += layers * {"": 0, "head": 2 * dim, "whole": (q + kv) * dim}[norm]

    def attend_fused(
        self,
        layers: int,
        heads: tuple[int, int, int],
        *,
        prefix: str = "self_attn.",
        leaf: str = "qkv_proj",
        out: str = "o_proj",
        qkv: bool = False,
        o: bool = False,
    ) -> None:
        """The same with query, key and value in one matrix on disk."""
        q, kv, dim = heads
        pieces = (q * dim, kv * dim, kv * dim)
        self.linear(prefix + leaf, Role.ATTENTION, (sum(pieces), self.hidden), layers, "column",
                    heads=q, pieces=pieces, bias=qkv)  # fmt: skip
        self.linear(prefix + out, Role.ATTENTION, (self.hidden, q * dim), layers, "row", heads=q, bias=o)

    def gated(
        self,
        layers: int,
        inner: int,
        *,
        prefix: str = "mlp.",
        role: Role = Role.MLP,
        leaves: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
        experts: int = 1,
        active: int = 1,
        width: int | None = None,
    ) -> None:
        """gate and up, then down, from ``width`` and back to it (None: the model's). Two ``leaves``: no gate, or gate
        and up in one matrix where the first says so."""
        *ups, down = leaves
        outer = width or self.hidden
        for leaf in ups:
            pieces = (inner, inner) if leaf in ("gate_up_proj", "input_linear") else ()
            self.linear(prefix + leaf, role, (sum(pieces) or inner, outer), layers, "column", bias=bias,
                        experts=experts, active=active, pieces=pieces)  # fmt: skip
        self.linear(prefix + down, role, (outer, inner), layers, "row", bias=bias, experts=experts,
                    active=active)  # fmt: skip

    def routed(
        self,
        layers: int,
        experts: int,
        active: int,
        inner: int,
        *,
        router: str = "mlp.gate",
        prefix: str = "mlp.experts.*.",
        leaves: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
        router_bias: bool = False,
    ) -> None:
        """A router and its experts, of which a token takes ``active``."""
        self.linear(router, Role.ROUTER, (experts, self.hidden), layers, bias=router_bias)
        self.gated(
            layers,
            inner,
            prefix=prefix,
            role=Role.EXPERT,
            leaves=leaves,
            bias=bias,
            experts=experts,
            active=active,
        )

    def keep(self, kinds: Iterable[Keeps], heads: tuple[int, int, int], *, window: int | None = None) -> None:
        """What the layers keep, by kind; those that are not full keep ``window`` tokens."""
        q, kv, dim = heads
        for kind, layers in Counter(kinds).items():
            self.keeps.append(Attention(kind, layers, q, kv, dim, dim, None if kind == "full" else window))

    def state(self, layers: int, convolution: int, recurrent: int, *, dtype: str | None = None) -> None:
        """States of each sequence: elements of the convolution's and of the recurrence's, in each of the layers."""
        if not layers:
            return
        new = Attention(
            "state", layers, state=convolution + recurrent, recurrent=recurrent, recurrent_dtype=dtype
        )
        for i, old in enumerate(self.keeps):
            if replace(old, layers=layers) == new:  # the same mixer under another name
                self.keeps[i] = replace(old, layers=old.layers + layers)
                return
        self.keeps.append(new)

    def latent(self, layers: int) -> None:
        """Multi-head latent attention: keys and values come from one latent of kv_lora_rank elements and a rotary part,
        which are all that is kept; queries from one of q_lora_rank, or directly where that is null. Only the steps
        out of a latent are split: the latents are whole on every GPU."""
        fields, hidden = self.fields, self.hidden
        q, bias = fields.count("num_attention_heads"), fields.flag("attention_bias")
        rank, rope, nope, v = (
            fields.count(name)
            for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        wide, narrow = q * (nope + rope), fields.maybe("q_lora_rank")
        rows: list[tuple[str, tuple[int, int], Split, int, bool]] = [
            ("kv_a_proj_with_mqa", (rank + rope, hidden), "whole", 0, bias),
            ("kv_b_proj", (q * (nope + v), rank), "column", q, False),
            ("o_proj", (hidden, q * v), "row", q, bias),
        ]
        if narrow is None:
            rows.insert(0, ("q_proj", (wide, hidden), "column", q, False))
        else:
            rows.insert(0, ("q_b_proj", (wide, narrow), "column", q, False))
            rows.insert(0, ("q_a_proj", (narrow, hidden), "whole", 0, bias))
        for name, shape, split, heads, biased in rows:
            self.linear(f"self_attn.{name}", Role.ATTENTION, shape, layers, split, heads=heads, bias=biased)
        self.vectors += layers * (rank + (narrow or 0))
        self.keeps.append(Attention("latent", layers, q, 1, rank + rope, 0))

    def geometry(self) -> Geometry:
        """All of it, with the embedding first and the head last."""
        fields = self.fields
        matrices = [
            Matrix(f"{self.root}.{self.table}", Role.EMBEDDING, (self.rows, self.width), split="column"),
            *self.matrices,
        ]
        if self.tied:
            self.vectors += self.head_bias * self.vocabulary
        else:
            matrices.append(
                Matrix(
                    self.head,
                    Role.LM_HEAD,
                    (self.vocabulary, self.width),
                    split="column",
                    bias=self.head_bias * self.vocabulary,
                )
            )
        together = {name: group for group in fused_groups(m.name for m in matrices) for name in group}
        said = fields.spelled("num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers")
        if further := fields.count(said, 0, least=0):
            plural = "s" if further > 1 else ""
            self.notes.append(f"{further} layer{plural} for further tokens (MTP): not counted")
        dtype = fields.dtype()
        if dtype is None:
            self.notes.append("the config names no dtype: bf16 is assumed")
        return Geometry(
            fields.family, self.layers, self.hidden, self.vocabulary, self.tied,
            tuple(replace(m, fused=_leaves(together[m.name])) for m in matrices), tuple(self.keeps), self.vectors,
            fields.maybe("max_position_embeddings"), dtype or "bf16", tuple(self.notes),
        )  # fmt: skip


def _leaves(group: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.rpartition(".")[2] for name in group) if len(group) > 1 else ()


def attention_kinds(fields: Fields, layers: int, sliding: Iterable[int] = ()) -> tuple[Keeps, ...]:
    """The kind of each layer: as layer_types says, else sliding for the layers that the family's rule names."""
    said = fields.words("layer_types", layers, tuple(KINDS))
    if said is not None:
        return tuple(KINDS[word] for word in said)
    chosen = frozenset(sliding)
    return tuple("sliding" if layer in chosen else "full" for layer in range(layers))
