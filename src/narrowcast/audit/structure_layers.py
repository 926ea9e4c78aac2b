"""Rules about repeated parts: is every layer there, is every layer complete, is every expert there.

    stack        names  prefix.i.piece,  i = 0 .. num_hidden_layers − 1
    layer i      pieces(i) = {piece}, numbers of experts folded
    odd one      pieces(i) ⊂ pieces(j) for very many j, and very few layers are like i

Families alternate kinds of layers (dense and sparse, full and linear attention, shared keys), so a layer is odd only
where it is one of very few that lack something which very many have. For architectures of which every layer is alike
the pieces are known (``PARTS``), and a lack in all layers is seen too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.structure import embeddings
from narrowcast.audit.subject import Subject
from narrowcast.model.roles import Role, find_function, find_place
from narrowcast.store.checkpoint import text_config
from narrowcast.store.folder import some

FEW = 10  # of so many layers that have a piece, one may lack it and be called odd
_MEMBER = re.compile(r"^((?:.*?\.)?(?:layers|layer|h|blocks|block))\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^(.*(?<!shared_)experts)\.(\d+)\.(.+)$")
_STACK = re.compile(
    r"(?<!shared_)experts\.(gate_up_proj|gate_proj|up_proj|down_proj)(_blocks|_scales|_bias|_scale)?$"
)
_CACHE = re.compile(r"(^|\.|_)([qkv]|kv|prob_output)(_proj\.output)?_scale$|rot\w*emb|inv_freq")
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_PREDICT = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")

# Projections that none of the families has without a third one, and what may stand for it.
_TOGETHER: tuple[tuple[frozenset[str], str, frozenset[str]], ...] = (
    (frozenset({"q_proj", "v_proj"}), "k_proj", frozenset()),
    (frozenset({"k_proj", "v_proj"}), "q_proj", frozenset({"q_a_proj", "q_b_proj", "qkv_proj"})),
    (frozenset({"gate_proj"}), "up_proj", frozenset({"gate_up_proj"})),
    (frozenset({"w1", "w2"}), "w3", frozenset({"w13"})),
    (frozenset({"gate_proj", "up_proj"}), "down_proj", frozenset()),
    (frozenset({"gate_up_proj"}), "down_proj", frozenset()),
    (frozenset({"down_proj"}), "up_proj", frozenset({"gate_up_proj"})),
    (
        frozenset({"q_proj", "k_proj", "v_proj"}),
        "o_proj",
        frozenset({"out_proj", "dense", "proj", "wo", "o"}),
    ),
)

_QKVO = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
_NORMS = ("input_layernorm", "post_attention_layernorm")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_QK_NORM = ("self_attn.q_norm", "self_attn.k_norm")
_SANDWICH = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_LLAMA = (*_QKVO, *_NORMS, *_GATED)
# What every layer has below model.layers.i, by architecture (transformers 5.24, modeling files of the families).
PARTS: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": (*_LLAMA, *(f"self_attn.{name}_proj.bias" for name in "qkv")),
    "Qwen3ForCausalLM": (*_LLAMA, *_QK_NORM),
    "GemmaForCausalLM": _LLAMA,
    "Gemma2ForCausalLM": (*_LLAMA, *_SANDWICH),
    "Gemma3ForCausalLM": (*_LLAMA, *_SANDWICH, *_QK_NORM),
    "Phi3ForCausalLM": ("self_attn.qkv_proj", "self_attn.o_proj", *_NORMS, "mlp.gate_up_proj", "mlp.down_proj"),
    "MixtralForCausalLM": (*_QKVO, *_NORMS),
    "Qwen3MoeForCausalLM": (*_QKVO, *_NORMS, *_QK_NORM),
    "GptOssForCausalLM": (
        *_QKVO, *(f"{name}.bias" for name in _QKVO), *_NORMS, "self_attn.sinks", "mlp.router", "mlp.router.bias",
    ),
    "DeepseekV3ForCausalLM": (
        *_NORMS, "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj", "self_attn.o_proj",
    ),
}  # fmt: skip


def stacks(subject: Subject) -> dict[str, dict[int, set[str]]]:
    """Pieces of every layer by stack: the path before the layer's number, the number, the rest of the names with
    numbers of experts folded."""
    found: dict[str, dict[int, set[str]]] = {}
    for name in subject.found.modules:
        member = _MEMBER.match(name)
        if member is not None and not _CACHE.search(name):
            piece = re.sub(r"\d+", "#", member[3])
            found.setdefault(member[1], {}).setdefault(int(member[2]), set()).add(piece)
    return found


def main_stack(subject: Subject) -> str | None:
    """The one stack of the text model; None where there is none, or more than one of some size."""
    found = stacks(subject)
    plain = [prefix for prefix in found if find_place(f"{prefix}.0.x", subject.config) is None]
    size = {prefix: sum(map(len, found[prefix].values())) for prefix in plain}
    first = max(plain, key=lambda prefix: size[prefix], default=None)
    rest = sum(size.values()) - size.get(str(first), 0)
    return first if first is not None and FEW * rest <= size[first] else None


def promised(subject: Subject) -> int | None:
    """How many layers the config says the text model has."""
    text = text_config(subject.config)
    if subject.config.get("is_encoder_decoder"):
        return None
    return next((text[key] for key in _COUNTS if isinstance(text.get(key), int)), None)


@rule("NC420", "error")
def missing_layer(subject: Subject) -> Iterator[Finding]:
    """The number of layers is not what the config says.

    What: num_hidden_layers promises layers of which no tensor is there; or tensors belong to layers beyond it, and
    that is a warning.
    Why: a missing layer stops an engine, or is filled with random numbers. Layers too many are never run: a config
    of a smaller model makes another model of the same weights.
    Fix: take config and shards from the same save.
    False alarm: families that count their layers in another way.
    """
    count, prefix = promised(subject), main_stack(subject)
    if count is None or prefix is None or not subject.found.whole:
        return
    have = stacks(subject)[prefix]
    absent = [i for i in range(count) if i not in have]
    if absent:
        yield Finding(
            f"{len(absent)} of {count} layers have no tensor", tensor=f"{prefix}.{absent[0]}",
            got=f"no layer {some([str(i) for i in absent])}", wanted=f"layers 0 to {count - 1}", count=len(absent),
            remedy="take config.json and shards from the same save",
        )  # fmt: skip
    text = text_config(subject.config)
    more = sum(text[key] for key in _PREDICT if isinstance(text.get(key), int))
    beyond = sorted(i for i in have if i >= count + more)
    if beyond:
        yield Finding(
            f"{len(beyond)} layers lie beyond the {count} that the config says", tensor=f"{prefix}.{beyond[0]}",
            got=f"layers up to {beyond[-1]}", wanted=f"layers 0 to {count - 1}", severity="warning", count=len(beyond),
            remedy="take config.json and shards from the same save",
        )  # fmt: skip


@rule("NC421", "error")
def odd_layer(subject: Subject) -> Iterator[Finding]:
    """A layer lacks what nearly all of its kind have.

    What: in one stack of layers, one layer or very few lack a tensor that at least ten times as many have, and are
    equal to those in everything else.
    Why: a tensor that one layer lacks was lost: engines stop, or initialize it with random numbers. For norms and
    biases, which families do leave out in a first or last layer, it is a warning.
    Fix: copy the tensor from the parent.
    False alarm: families whose first or last layer is built without the tensor.
    """
    if not subject.found.whole:
        return
    known = parts(subject)
    for prefix, layers in stacks(subject).items():
        kinds = Counter(frozenset(pieces) for pieces in layers.values())
        for i, pieces in sorted(layers.items()):
            lack = _lack(frozenset(pieces), kinds)
            for piece in sorted(lack - set(known if prefix == "model.layers" else ())):
                soft = piece.endswith("bias") or "norm" in piece.rsplit(".", 1)[-1]
                yield Finding(
                    "the layer lacks a tensor that the others have", tensor=f"{prefix}.{i}.{piece}",
                    wanted=f"{piece}, as in the other layers", severity="warning" if soft else None,
                    remedy="copy it from the parent",
                )  # fmt: skip


def _lack(pieces: frozenset[str], kinds: Counter[frozenset[str]]) -> frozenset[str]:
    """What a layer lacks against the most frequent kind of layers that have everything it has; nothing where there is
    no such kind, or where layers like it are not few."""
    whole = [kind for kind in kinds if pieces < kind]
    if not whole:
        return frozenset()
    best = max(whole, key=lambda kind: (kinds[kind], -len(kind)))
    few = kinds[pieces] * FEW <= kinds[best] or (kinds[pieces] == 1 and kinds.total() == 1 + kinds[best])
    return best - pieces if few and 2 * len(pieces) > len(best) else frozenset()


def parts(subject: Subject) -> tuple[str, ...]:
    """The pieces that every layer of the model must have; nothing where that is not known."""
    names = subject.config.get("architectures")
    known = PARTS.get(str(names[0])) if isinstance(names, list) and names else None
    return known if known is not None and "block_configs" not in subject.config else ()


@rule("NC422", "error")
def missing_part(subject: Subject) -> Iterator[Finding]:
    """A layer lacks a part that its architecture always has.

    What: a projection, a norm, a router's bias, or the embedding or last norm of the model, by the list of parts that
    every layer of this architecture has, has no tensor of any spelling; or all have one prefix too many.
    Why: engines stop, or fill the part with random numbers.
    Fix: copy the tensor from the parent.
    False alarm: models that were pruned and keep the architecture's name.
    """
    known, count = parts(subject), promised(subject)
    have = stacks(subject).get("model.layers")
    if not known or count is None or not subject.found.whole:
        return
    if have is None:
        yield from _elsewhere(subject, set(known))
        return
    names = subject.found.modules
    wanted = ["model.embed_tokens", "model.norm"]
    wanted += [f"model.layers.{i}.{piece}" for i in sorted(have) if i < count for piece in known]
    for name in wanted:
        if name not in names:
            yield Finding(
                "a part that this architecture always has is missing", tensor=name, got="no tensor of this module",
                remedy="copy it from the parent",
            )  # fmt: skip


def _elsewhere(subject: Subject, known: set[str]) -> Iterator[Finding]:
    """Layers that have every part, under a path that the architecture does not know."""
    for path, layers in stacks(subject).items():
        if path.endswith(".layers") and all(known <= pieces for pieces in layers.values()):
            first = f"{path}.{min(layers)}"
            yield Finding(
                "the layers have another path than this architecture looks for", tensor=first, got=path,
                wanted="model.layers", count=len(layers),
                remedy="rename the tensors, or take the config of the model that they were saved from",
            )  # fmt: skip


@rule("NC423", "error")
def other_expert_count(subject: Subject) -> Iterator[Finding]:
    """The number of experts is not what the config says.

    What: a layer's experts, one by one or in a stack, or the rows of its router, are more or fewer than the config
    says.
    Why: an engine stops, or leaves experts as they were initialized, to which the router still sends tokens.
    Fix: take config and shards from the same save; after pruning, write the new number.
    False alarm: families that prune experts layer by layer, or count shared experts among them.
    """
    text = text_config(subject.config)
    key = next((k for k in _EXPERTS if isinstance(text.get(k), int) and text[k] > 0), None)
    if key is None or not subject.found.whole:
        return
    count = text[key]
    for path, have in _experts(subject).items():
        absent = [i for i in range(count) if i not in have]
        beyond = [i for i in have if i >= count]
        if absent or beyond:
            said = (
                f"{len(absent)} of {count} experts are missing"
                if absent
                else f"{len(beyond)} experts too many"
            )
            yield Finding(
                said, tensor=f"{path}.{(absent or beyond)[0]}", got=f"{len(have)} experts", wanted=f"{key} {count}",
                count=len(absent or beyond), remedy="take config.json and shards from the same save",
            )  # fmt: skip
    for name, entry in subject.checkpoint.entries.items():
        router = name.endswith((".gate.weight", ".router.weight")) and _routes(name) and len(entry.shape) == 2
        if router and "zero_expert_num" in text:
            continue
        if (_STACK.search(name) or router) and entry.shape and entry.shape[0] != count:
            yield Finding(
                f"the {'router' if router else 'stack'} is of another number of experts", tensor=name,
                got=f"{entry.shape[0]} experts", wanted=f"{key} {count}",
                remedy="take config.json and shards from the same save",
            )  # fmt: skip


def _routes(name: str) -> bool:
    row = find_function(name)
    return row is not None and row.role is Role.ROUTER


def _experts(subject: Subject) -> dict[str, dict[int, set[str]]]:
    """Pieces of every expert by the path of the experts."""
    found: dict[str, dict[int, set[str]]] = {}
    for name in subject.found.modules:
        member = _EXPERT.match(name)
        if member is not None:
            found.setdefault(member[1], {}).setdefault(int(member[2]), set()).add(member[3])
    return found


@rule("NC424", "error")
def odd_expert(subject: Subject) -> Iterator[Finding]:
    """An expert lacks what the other experts of its layer have.

    What: a projection of one expert has no tensor, and most experts of the layer have it.
    Why: engines stop, or run the expert with random or zero weights for the tokens that choose it.
    Fix: copy the tensor from the parent.
    False alarm: none known.
    """
    if not subject.found.whole:
        return
    for path, experts in _experts(subject).items():
        pieces = Counter(piece for have in experts.values() for piece in have)
        for i, have in sorted(experts.items()):
            for piece in sorted(
                piece for piece, n in pieces.items() if 2 * n > len(experts) and piece not in have
            ):
                yield Finding(
                    "the expert lacks a tensor that the others have", tensor=f"{path}.{i}.{piece}",
                    wanted=f"{piece}, as in the other experts", remedy="copy it from the parent",
                )  # fmt: skip


@rule("NC425", "error")
def lone_sibling(subject: Subject) -> Iterator[Finding]:
    """A projection is there without the ones that it works with.

    What: q and v without k, k and v without any q, those without o, gate without up, gate and up without down or the
    reverse, or experts without a router, in the same layer.
    Why: nothing can be computed from the rest; engines stop, or fill the gap with random numbers.
    Fix: copy the tensor from the parent.
    False alarm: none known; layers that share keys or values with others lack k and v together, or v alone.
    """
    if (
        not subject.found.whole or promised(subject) is None or not embeddings(subject)
    ):  # an excerpt of a model
        return
    blocks: dict[str, set[str]] = {}
    for name in subject.found.modules:
        parent, _, leaf = name.rpartition(".")
        blocks.setdefault(parent, set()).add(leaf)
    for parent, leaves in blocks.items():
        for have, lack, instead in _TOGETHER:
            if have <= leaves and lack not in leaves and not instead & leaves:
                yield Finding(
                    f"{' and '.join(sorted(have))} are there without {lack}" if len(have) > 1
                    else f"{min(have)} is there without {lack}",
                    tensor=f"{parent}.{lack}", got="no tensor of this module", remedy="copy it from the parent",
                )  # fmt: skip
    routed = [name for name in subject.found.modules if _routes(f"{name}.weight")]
    blocks_of = {path.removesuffix("experts") for path in blocks if path.endswith(".experts")}
    blocks_of |= {path.removesuffix("experts") for path in _experts(subject)}
    for block in sorted(blocks_of):
        if not any(name.startswith(block) for name in routed):
            yield Finding(
                "experts are there without a router", tensor=f"{block}experts", got="no router beside them",
                remedy="copy it from the parent",
            )  # fmt: skip
