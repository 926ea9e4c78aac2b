"""The matrices of a checkpoint, one ``Module`` each, with what a writer needs to split stacked experts.

A module is what a recipe names: the tensor name without ``.weight``. Stacked expert tensors are 3-D and
carry no ``.weight``, so their module has the tensor's own name. With E experts, hidden size H and
intermediate size I they are stored in one of two orientations, and gate and up in one of two orders:

    out_in:  gate_up [E, 2I, H], down [E, H, I]      y = x @ W[e].T     Qwen3.5, Granite, transformers 5
    in_out:  gate_up [E, H, 2I], down [E, I, H]      y = x @ W[e]       gpt-oss, Llama 4
    halves:       gate = channels 0..I-1, up = channels I..2I-1         all but gpt-oss
    interleaved:  gate = even channels,   up = odd channels             gpt-oss

Orientation and order come from the family (``LAYOUTS``), never from the shape: with 2I = H both readings
have the same shape and only one is right. Where the config gives H and I the shape must agree with the
family, and a family that is not in the table is not split at all: ``Module.problem`` says so.

GPT-2's Conv1D stores its 2-D weights [in, out]; that too is the family's word (Starcoder 2 uses the same
names for ordinary linears).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from narrowcast.model.roles import Role, Row, find_function, find_place, stem, text_config

Orientation = Literal["out_in", "in_out"]
Order = Literal["halves", "interleaved"]


class TensorLike(Protocol):
    """The two facts of a stored tensor that this floor reads."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Layout:
    """How a family stores its stacked experts, and where that was read."""

    orientation: Orientation
    order: Order
    source: str


_OUT_IN = Layout("out_in", "halves", "transformers 5 stores converted experts for torch's linear, gate first")

# Families by model_type. transformers 5 marks the transposed ones itself (use_experts_implementation with
# is_transposed, or a bmm in the modelling file); every other family it stacks is out_in with halves.
LAYOUTS: dict[str, Layout] = {
    "gpt_oss": Layout("in_out", "interleaved", "transformers gpt_oss: x @ gate_up[e], gate [..., ::2]"),
    "llama4": Layout("in_out", "halves", "transformers llama4: bmm(x, gate_up), chunk(2)"),
    "llama4_text": Layout("in_out", "halves", "transformers llama4: bmm(x, gate_up), chunk(2)"),
    **dict.fromkeys(
        (
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_omni_moe",
            "mixtral",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "deepseek_v4",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe",
            "glm_moe_dsa",
            "ernie4_5_moe",
            "hunyuan_v1_moe",
            "minimax",
            "minimax_m2",
            "mistral4",
            "olmoe",
            "phimoe",
            "jamba",
            "lfm2_moe",
            "gemma4",
            "gemma4_text",
            "kimi_linear",
            "granitemoe",
            "granitemoeshared",
            "granitemoehybrid",
        ),
        _OUT_IN,
    ),
}
_QWEN3_VL = {
    False: Layout("in_out", "halves", "transformers 4 and the released Qwen3-VL-MoE files: x @ gate_up[e]"),
    True: Layout("out_in", "halves", "transformers 5 saves Qwen3-VL-MoE for torch's linear"),
}
# Families whose attention and MLP are transformers' Conv1D, stored [in, out].
_CONV1D_FAMILIES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
_CONV1D_NAMES = frozenset({"c_attn", "q_attn", "c_proj", "c_fc"})


@dataclass(frozen=True)
class Part:
    """A slice of the output channels of a matrix that holds several projections: ``W[start:stop:step]``."""

    name: str
    start: int
    stop: int
    step: int


@dataclass(frozen=True)
class Split:
    """One out_in matrix to be cut from a stacked tensor: expert ``expert``, output channels ``part``.

    ``matrix = W[expert]`` (transposed first when the module is in_out), then ``matrix[start:stop:step]``.
    """

    name: str
    expert: int
    part: Part


@dataclass(frozen=True)
class Module:
    """One matrix of a checkpoint.

    Attributes:
        name: what a recipe matches; the tensor name without ``.weight``.
        tensor: the tensor's name in the file.
        role: what it is for.
        shape: as stored: 2-D, or 3-D with the expert axis first.
        kind: the class name that a recipe may use for it: Linear, Embedding or, for neither, "".
        experts: the number of stacked experts, None for a 2-D matrix.
        orientation: ``out_in`` is [out, in], the orientation of a torch linear.
        parts: for stacked experts the projections along the output channels, in order.
        bias: the name of its bias tensor, if there is one.
        known: False when no row of the role table fits its name.
        note: why it is not linear, or what the row was written for.
        tied: the name of the output head that reads the same tensor, or of the embedding it is read from.
        problem: why it cannot be quantized as it is stored; None when it can.
    """

    name: str
    tensor: str
    role: Role
    shape: tuple[int, ...]
    kind: Literal["Linear", "Embedding", ""]
    experts: int | None = None
    orientation: Orientation = "out_in"
    parts: tuple[Part, ...] = ()
    bias: str | None = None
    known: bool = True
    note: str = ""
    tied: str | None = None
    problem: str | None = None

    @property
    def linear(self) -> bool:
        """Whether the model applies it as a linear layer."""
        return self.kind == "Linear"

    @property
    def out_in(self) -> tuple[int, int]:
        """(output channels, input channels) of one matrix, whatever the stored orientation."""
        rows, cols = self.shape[-2:]
        return (rows, cols) if self.orientation == "out_in" else (cols, rows)

    def splits(self) -> Iterator[Split]:
        """The out_in matrices of a stacked expert tensor, named ``experts.{e}.gate_proj`` and so on."""
        if self.experts is None or self.problem is not None:
            return
        parent = self.name.rsplit(".", 1)[0]
        parent = parent if parent.endswith("experts") else f"{parent}.experts"
        for expert in range(self.experts):
            for part in self.parts:
                yield Split(f"{parent}.{expert}.{part.name}", expert, part)


def modules(entries: Mapping[str, TensorLike], config: Mapping[str, Any]) -> list[Module]:
    """One ``Module`` per weight matrix of a checkpoint, in the order of ``entries``.

    A matrix is a 2-D tensor called ``*.weight``, or a 3-D tensor whose name is that of stacked experts.
    Norms, biases, convolutions and the scales of an already quantized model are not modules.
    """
    head = next((n for n in entries if is_output_head(n, config)), None)
    tie = _tied(head, config)
    found = []
    for name, entry in entries.items():
        shape = tuple(entry.shape)
        row = find_function(name)
        whole = name.endswith(".weight") or stem(name) == name  # not the scales or blocks beside a weight
        stacked = len(shape) == 3 and whole and row is not None and row.role is Role.EXPERT
        if not stacked and not (len(shape) == 2 and name.endswith(".weight")):
            continue
        found.append(_module(name, shape, row, stacked, entries, config, head, tie))
    return found


def is_output_head(name: str, config: Mapping[str, Any]) -> bool:
    """Whether ``name`` is the weight of the output head that a token embedding may be tied to."""
    row = find_function(name)
    return (
        row is not None
        and row.role is Role.LM_HEAD
        and name.endswith(".weight")
        and find_place(name, config) is None
        and stem(name).rsplit(".", 1)[-1] in ("lm_head", "embed_out", "output", "head")
    )


def is_token_embedding(name: str) -> bool:
    """Whether ``name`` is the weight of the input token embedding of the text model."""
    return stem(name).rsplit(".", 1)[-1] in (
        "embed_tokens",
        "wte",
        "word_embeddings",
        "embed_in",
        "tok_embeddings",
        "shared",
        "embeddings",
        "tokens_embed",
    )


def _tied(head: str | None, config: Mapping[str, Any]) -> bool:
    """Whether the output head reads the token embedding.

    The config says so, or there is no head in the file while the architecture has one: transformers leaves
    a tied head out of the file.
    """
    said = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings"))
    if said is True:
        return True
    names = config.get("architectures") or []
    generative = any(
        word in str(n)
        for n in names
        for word in ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration", "PreTraining")
    )
    return head is None and (generative or not names)


def _module(
    name: str,
    shape: tuple[int, ...],
    row: Row | None,
    stacked: bool,
    entries: Mapping[str, TensorLike],
    config: Mapping[str, Any],
    head: str | None,
    tie: bool,
) -> Module:
    place = find_place(name, config)
    path = stem(name) if name.endswith(".weight") else name
    role = place.role if place is not None else row.role if row is not None else Role.OTHER
    kind = _kind(row)
    tied = None
    if tie and place is None and is_token_embedding(name):
        tied = stem(head) if head is not None else _head_name(path)
    elif tie and name == head:
        tied = next((stem(n) for n in entries if is_token_embedding(n)), None)
    bias = next((b for b in (f"{path}.bias", f"{path}_bias") if b in entries), None)
    note = row.note if row is not None else "no rule knows this name"
    known = row is not None or place is not None
    if stacked:
        orientation, parts, problem = _stacked(name, shape, config)
        return Module(
            path, name, role, shape, kind, shape[0], orientation, parts, bias, known, note, tied, problem
        )
    orientation, problem = _conv1d(path, config)
    return Module(path, name, role, shape, kind, None, orientation, (), bias, known, note, tied, problem)


def _kind(row: Row | None) -> Literal["Linear", "Embedding", ""]:
    if row is not None and row.role is Role.EMBEDDING:
        return "Embedding"
    return "Linear" if row is None or row.linear else ""


def _head_name(embedding: str) -> str:
    """The name of a tied head: ``language_model.lm_head`` beside ``language_model.model.embed_tokens``."""
    prefix = "language_model." if embedding.startswith("language_model.") else ""
    return f"{prefix}lm_head"


def _conv1d(path: str, config: Mapping[str, Any]) -> tuple[Orientation, str | None]:
    if path.rsplit(".", 1)[-1] not in _CONV1D_NAMES:
        return "out_in", None
    family = config.get("model_type")
    if family in _CONV1D_FAMILIES:
        return "in_out", None
    if family is None and path.rsplit(".", 1)[-1] == "c_attn":
        return "out_in", "config.json names no model_type, so the orientation of c_attn is not known"
    return "out_in", None


def _layout(name: str, config: Mapping[str, Any]) -> Layout | None:
    """The layout of a family's stacked experts; None when the family is not known."""
    if "block_sparse_moe." in name and stem(name).endswith("_linear"):
        return _OUT_IN  # Granite's ParallelExperts, whatever the model is called
    for family in (config.get("model_type"), text_config(config).get("model_type")):
        if family in ("qwen3_vl_moe", "qwen3_vl_moe_text"):
            version = str(config.get("transformers_version") or "4")
            return _QWEN3_VL[int(version.split(".")[0]) >= 5]
        if family in LAYOUTS:
            return LAYOUTS[family]
    return None


def _stacked(
    name: str, shape: tuple[int, ...], config: Mapping[str, Any]
) -> tuple[Orientation, tuple[Part, ...], str | None]:
    layout = _layout(name, config)
    family = config.get("model_type")
    if layout is None:
        return "out_in", (), f"the layout of stacked experts of model_type {family!r} is not known"
    out, inner = shape[1:] if layout.orientation == "out_in" else (shape[2], shape[1])
    leaf = stem(name).rsplit(".", 1)[-1]
    problem = _contradiction(leaf, out, inner, layout, config)
    if leaf in ("gate_up_proj", "input_linear"):
        if out % 2:
            return layout.orientation, (), f"gate and up cannot be halves of {out} channels"
        if layout.order == "interleaved":
            return layout.orientation, (Part("gate_proj", 0, out, 2), Part("up_proj", 1, out, 2)), problem
        half = out // 2
        return layout.orientation, (Part("gate_proj", 0, half, 1), Part("up_proj", half, out, 1)), problem
    plain = "down_proj" if leaf == "output_linear" else leaf
    return layout.orientation, (Part(plain, 0, out, 1),), problem


def _contradiction(leaf: str, out: int, inner: int, layout: Layout, config: Mapping[str, Any]) -> str | None:
    """Why a stacked tensor cannot be what its family says, when the config gives the hidden size."""
    hidden = text_config(config).get("hidden_size")
    if not isinstance(hidden, int):
        return None
    found = out if leaf in ("down_proj", "output_linear") else inner
    if found == hidden:
        return None
    return (
        f"the family stores stacked experts {layout.orientation}, which makes the hidden size {found}, "
        f"and config.json says {hidden}"
    )
