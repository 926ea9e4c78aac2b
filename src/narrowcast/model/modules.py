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

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from narrowcast.model.roles import Kind, Role, find_function, find_place, stem
from narrowcast.store.checkpoint import text_config

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
# OpenAI's own gpt-oss files, whatever the config calls the model.
_OPENAI = Layout(
    "out_in", "interleaved", "openai/gpt-oss torch/model.py: einsum beck,bk->bec, x_glu [..., ::2]"
)
_QWEN3_VL = {
    False: Layout("in_out", "halves", "transformers 4 and the released Qwen3-VL-MoE files: x @ gate_up[e]"),
    True: Layout("out_in", "halves", "transformers 5 saves Qwen3-VL-MoE for torch's linear"),
}
# The projections along the output channels of a stack, by the last part of its name.
_PARTS: dict[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "input_linear": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
    "output_linear": ("down_proj",),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "mlp1_weight": ("gate_proj", "up_proj"),
    "mlp2_weight": ("down_proj",),
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
        direct: a Linear whose weight a kernel reads itself; ``note`` says which.
        tied: the name of the output head that reads the same tensor, or of the embedding it is read from.
        problem: why it cannot be quantized as it is stored; None when it can.
    """

    name: str
    tensor: str
    role: Role
    shape: tuple[int, ...]
    kind: Kind
    experts: int | None = None
    orientation: Orientation = "out_in"
    parts: tuple[Part, ...] = ()
    bias: str | None = None
    known: bool = True
    note: str = ""
    tied: str | None = None
    problem: str | None = None
    direct: bool = False

    @property
    def linear(self) -> bool:
        """Whether the model applies it as a linear layer that a quantized one can stand in for."""
        return self.kind == "Linear" and not self.direct

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
    Norms, biases, convolutions and the scales of an already quantized model are not modules, nor is what has
    no elements.
    """
    head = next((n for n in entries if is_output_head(n, config)), None)
    source = _Source(entries, config, head, _tied(head, config))
    found = []
    for name, entry in entries.items():
        shape = tuple(entry.shape)
        if 0 in shape:
            continue
        if len(shape) == 2 and name.endswith(".weight"):
            found.append(_matrix(name, shape, source))
        elif len(shape) in (2, 3) and _is_stack(name):
            found.append(_stack(name, shape, source))
    return found


@dataclass(frozen=True)
class _Source:
    """What is looked up about the whole checkpoint: its output head, and whether that is the embedding."""

    entries: Mapping[str, TensorLike]
    config: Mapping[str, Any]
    head: str | None
    tied: bool


def is_output_head(name: str, config: Mapping[str, Any]) -> bool:
    """Whether ``name`` is the weight of the output head that a token embedding may be tied to."""
    if not name.endswith(("lm_head.weight", "embed_out.weight", "output.weight", "head.weight")):
        return False
    row = find_function(name)
    return row is not None and row.role is Role.LM_HEAD and find_place(name, config) is None


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


def _facts(name: str, shape: tuple[int, ...], source: _Source) -> Module:
    """What a name says of any matrix."""
    row, place = find_function(name), find_place(name, source.config)
    path = stem(name) if name.endswith(".weight") else name
    tied = None
    if source.tied and place is None and is_token_embedding(name):
        tied = stem(source.head) if source.head is not None else _head_name(path)
    elif source.tied and name == source.head:
        tied = next((stem(n) for n in source.entries if is_token_embedding(n)), None)
    return Module(
        name=path,
        tensor=name,
        role=place.role if place is not None else row.role if row is not None else Role.OTHER,
        shape=shape,
        kind=row.kind if row is not None else "Linear",
        bias=next((b for b in _bias_names(path) if b in source.entries), None),
        known=row is not None or place is not None,
        note=row.note if row is not None else "no rule knows this name",
        tied=tied,
        direct=row is not None and row.direct,
    )


def _bias_names(path: str) -> tuple[str, ...]:
    """What the bias of a matrix may be called: of a linear, of a stack, of a stack in OpenAI's own files."""
    return f"{path}.bias", f"{path}_bias", f"{path.removesuffix('_weight')}_bias"


def _matrix(name: str, shape: tuple[int, ...], source: _Source) -> Module:
    facts = _facts(name, shape, source)
    leaf, family = facts.name.rsplit(".", 1)[-1], source.config.get("model_type")
    if leaf in _CONV1D_NAMES and family in _CONV1D_FAMILIES:
        return replace(facts, orientation="in_out")
    if leaf == "c_attn" and family is None:
        return replace(facts, problem="config.json names no model_type, so its orientation is not known")
    return facts


def _is_stack(name: str) -> bool:
    """Whether a tensor is a stack of experts, and not a bias, scale or block beside one."""
    row = find_function(name)
    whole = name.endswith(".weight") or stem(name) == name
    return whole and row is not None and row.role is Role.EXPERT


def _stack(name: str, shape: tuple[int, ...], source: _Source) -> Module:
    """A stack of experts with its parts, or with the problem that keeps it from being split."""
    facts = _facts(name, shape, source)
    leaf = facts.name.rsplit(".", 1)[-1]
    layout = _layout(facts.name, source.config)
    if layout is None:
        family = source.config.get("model_type")
        return replace(facts, problem=f"the layout of stacked experts of model_type {family!r} is not known")
    if len(shape) != 3 or leaf not in _PARTS:
        return replace(facts, problem=f"no rule says how to split experts called {leaf} of shape {shape}")
    facts = replace(facts, experts=shape[0], orientation=layout.orientation)
    out = facts.out_in[0]
    if out % len(_PARTS[leaf]):
        return replace(facts, problem=f"gate and up cannot be halves of {out} channels")
    problem = _contradiction(leaf, facts, source.config)
    return replace(facts, parts=_parts(_PARTS[leaf], out, layout.order), problem=problem)


def _parts(names: tuple[str, ...], out: int, order: Order) -> tuple[Part, ...]:
    count = len(names)
    if order == "interleaved":
        return tuple(Part(name, i, out, count) for i, name in enumerate(names))
    size = out // count
    return tuple(Part(name, i * size, (i + 1) * size, 1) for i, name in enumerate(names))


def _head_name(embedding: str) -> str:
    """The name of a tied head: ``language_model.lm_head`` beside ``language_model.model.embed_tokens``."""
    prefix = "language_model." if embedding.startswith("language_model.") else ""
    return f"{prefix}lm_head"


def stack_orientation(name: str, config: Mapping[str, Any]) -> Orientation:
    """How the family stores a stack of experts; out_in for a family that is not in the table."""
    layout = _layout(name, config)
    return "out_in" if layout is None else layout.orientation


def _layout(name: str, config: Mapping[str, Any]) -> Layout | None:
    """The layout of a family's stacked experts; None when the family is not known."""
    if name.endswith(("block_sparse_moe.input_linear", "block_sparse_moe.output_linear")):
        return _OUT_IN  # Granite's ParallelExperts, whatever the model is called
    if name.endswith(("mlp.mlp1_weight", "mlp.mlp2_weight")):
        return _OPENAI
    for family in (config.get("model_type"), text_config(config).get("model_type")):
        if family in ("qwen3_vl_moe", "qwen3_vl_moe_text"):
            major = re.match(r"\d+", str(config.get("transformers_version")))
            return _QWEN3_VL[major is not None and int(major[0]) >= 5]
        if family in LAYOUTS:
            return LAYOUTS[family]
    return None


def _contradiction(leaf: str, facts: Module, config: Mapping[str, Any]) -> str | None:
    """Why a stack cannot be what its family says, when the config gives the hidden size."""
    hidden = text_config(config).get("hidden_size")
    found = facts.out_in[0] if _PARTS[leaf] == ("down_proj",) else facts.out_in[1]
    if not isinstance(hidden, int) or found == hidden:
        return None
    return (
        f"the family stores stacked experts {facts.orientation}, which makes the hidden size {found}, "
        f"and config.json says {hidden}"
    )
