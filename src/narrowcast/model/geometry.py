"""How large a model is and what it keeps, from its config alone: matrices, attention layers, states.

    parameters         Σ layers · experts · N · K  +  vectors
    active             the same with the experts that one token takes
    streamed           what a decode step reads: active, without the embedding, of which it gathers one row
                       (a tied embedding is read as the output head)
    kept per token     Σ layers · heads · (dim of K + dim of V)                    full attention
                       Σ layers · (rank of the latent + rotary part)               multi-head latent attention
    kept per sequence  the same · min(context, window); states of recurrent layers whatever the context

A family is one row of ``families``: a function from config.json to a ``Geometry``. Nothing is guessed: a field that a
family needs and the config lacks is named, and so is a family without a row.

Left out: vision and audio towers, whose weights a text step does not read and whose configs have no common shape; a
note says that they are not counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from narrowcast.model.roles import Role

Split = Literal["column", "row", "whole"]
Keeps = Literal["full", "sliding", "chunked", "latent", "state"]

# Last parts of names, where no family says more.
_NAMED: tuple[tuple[Split, re.Pattern[str]], ...] = (
    ("row", re.compile(r"(o|out|down|c)_proj|w2|wo|wo_b|fc2|fc_out|dense|dense_4h_to_h|output_linear")),
    ("whole", re.compile(r"(q_a|weights)_proj|kv_a_proj_with_mqa|wq_a|wkv_a_with_mqa|wkv|wgate")),
    (
        "column",
        re.compile(
            r"(q|k|v|qkv|gate|up|gate_up|q_b|kv_b)_proj|w[13qkv]|w(q|kv)_b|fc1|fc_in|c_attn|c_fc|query_key_value"
            r"|dense_h_to_4h|input_linear|embed_tokens|wte|lm_head|output|embed_out"
        ),
    ),
)


def split_of(name: str) -> Split | None:
    """How engines split a module among tensor-parallel ranks, by the last part of its name; None where that says
    nothing. An indexer of sparse attention is on every rank."""
    if ".indexer." in name:
        return "whole"
    leaf = name.rpartition(".")[2]
    return next((split for split, pattern in _NAMED if pattern.fullmatch(leaf)), None)


@dataclass(frozen=True)
class Matrix:
    """One weight matrix [N, K] and how often it is there: in ``layers`` layers, in each for ``experts`` experts, of
    which a token takes ``active``.

    ``name`` is the module's, numbers replaced by ``*``. ``split`` is the side that tensor parallelism divides: N
    (column), K (row), or neither (whole: every rank holds it). ``heads`` are pieces that the split keeps whole (0:
    none), ``fused`` the leaf names that engines load with it as one layer. ``bias`` counts elements beside the N · K.
    ``pieces``: rows of each part of a matrix that files hold as one and that is split part by part (qkv_proj).
    """

    name: str
    role: Role
    shape: tuple[int, int]
    layers: int = 1
    experts: int = 1
    active: int = 1
    split: Split = "whole"
    heads: int = 0
    fused: tuple[str, ...] = ()
    bias: int = 0
    pieces: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Parameters in the file, of all layers and experts."""
        n, k = self.shape
        return self.layers * self.experts * (n * k + self.bias)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets."""
        return self.parameters // self.experts * self.active

    @property
    def leaf(self) -> str:
        """The last part of the name: ``q_proj``."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Attention:
    """Layers that keep alike: ``layers`` of them, each with ``q_heads`` queries over ``kv_heads`` keys of ``k_dim`` and
    values of ``v_dim`` elements.

    latent: one head, ``k_dim`` the rank of the latent and its rotary part, ``v_dim`` 0 (the value is read from the
    latent); ``index`` further elements for each token, the key of an indexer that picks the tokens to attend to, at
    most ``chosen`` (None: all), which engines keep in a form of its own. state: no keys, but ``state`` elements for
    each sequence, in the model's dtype but for ``recurrent`` of them in ``recurrent_dtype`` (None: the model's too).
    ``kept`` of the layers keep keys of their own, the others borrow them (None: all). ``window`` tokens are kept at
    most.
    """

    kind: Keeps
    layers: int
    q_heads: int = 0
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    window: int | None = None
    state: int = 0
    kept: int | None = None
    recurrent: int = 0
    recurrent_dtype: str | None = None
    index: int = 0
    chosen: int | None = None

    @property
    def keeping(self) -> int:
        """Layers that keep keys of their own."""
        return self.layers if self.kept is None else self.kept

    def tokens(self, context: int) -> int:
        """Tokens that a layer keeps of a context."""
        if self.kind == "state":
            return 0
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class Geometry:
    """A model in numbers. ``tied``: the head is the embedding's matrix, which is listed once, as the embedding.
    ``vectors`` counts norms, convolutions, sinks and other parameters beside matrices; ``positions`` is the longest
    context that the config claims, ``dtype`` the config's own word in our spelling, and ``notes`` say what is not
    counted. The first of ``matrices`` is the embedding."""

    family: str
    layers: int
    hidden: int
    vocabulary: int
    tied: bool
    matrices: tuple[Matrix, ...]
    attention: tuple[Attention, ...]
    vectors: int
    positions: int | None = None
    dtype: str = "bf16"
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """All parameters of the text model."""
        return self.vectors + sum(matrix.parameters for matrix in self.matrices)

    @property
    def active(self) -> int:
        """Parameters that one token meets, the embedding's one row aside."""
        return self.vectors + sum(m.active_parameters for m in self.matrices if self.streams(m))

    def streams(self, matrix: Matrix) -> bool:
        """Whether a step multiplies with the matrix; of an embedding it gathers a row, unless it is the head too."""
        return matrix.role is not Role.EMBEDDING or (self.tied and matrix == self.matrices[0])

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 of a dense model."""
        return max((matrix.experts for matrix in self.matrices if matrix.role is Role.EXPERT), default=0)

    def kept_elements(self) -> int:
        """Elements of K and V that one further token adds, windows not yet full."""
        return sum(a.keeping * a.kv_heads * (a.k_dim + a.v_dim) for a in self.attention)
