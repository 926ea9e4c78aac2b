"""Mixtures of experts: a dense family's attention, and in most layers a router with experts instead of one network.

    which layers have experts, by family:
    first_k_dense_replace                    all from there on: DeepSeek, Kimi K2, GLM-4-MoE
    mlp_layer_types                          a word per layer: DeepSeek V3.2 and what transformers 5 writes; wins
    decoder_sparse_step, mlp_only_layers     every step-th, but not those: Qwen MoE
    interleave_moe_layer_step, moe_layers    every step-th: Llama 4
    moe_layer_start_index, _end_index, _interval   every interval-th between the two: ERNIE 4.5

    active of a layer = num_experts_per_tok routed experts, the shared ones, and the router

Experts stand under the names of files on the hub: one by one for most, as one stack for gpt-oss, Llama 4, Granite and
Qwen3-VL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from narrowcast.model.families.blocks import Decoder, attention_kinds
from narrowcast.model.families.dense import Dense, Switch, alternate, every, four, late, nowhere, on
from narrowcast.model.families.fields import Fields
from narrowcast.model.geometry import Geometry
from narrowcast.model.roles import Role

Sparse = Callable[[Fields, int], int]  # how many of the layers have experts


def all_layers(fields: Fields, layers: int) -> int:
    """Experts in every layer."""
    return layers


def after_first(fields: Fields, layers: int) -> int:
    """The first first_k_dense_replace layers have none."""
    words = fields.words("mlp_layer_types", layers, ("dense", "sparse"))
    if words is not None:
        return words.count("sparse")
    return max(0, layers - fields.count("first_k_dense_replace", least=0))


def stepped(fields: Fields, layers: int) -> int:
    """Every decoder_sparse_step-th layer, without those of mlp_only_layers."""
    step, without = fields.count("decoder_sparse_step", 1), fields.numbers("mlp_only_layers") or ()
    return sum((i + 1) % step == 0 and i not in without for i in range(layers))


def interleaved(fields: Fields, layers: int) -> int:
    """The layers of moe_layers, or every interleave_moe_layer_step-th."""
    said = fields.numbers("moe_layers")
    if said is not None:
        return sum(i < layers for i in said)
    return layers // fields.count("interleave_moe_layer_step")


def between(fields: Fields, layers: int) -> int:
    """Every moe_layer_interval-th from moe_layer_start_index to moe_layer_end_index, −1 being the last."""
    start, every = fields.count("moe_layer_start_index", least=0), fields.count("moe_layer_interval", 1)
    end = fields.count("moe_layer_end_index", -1, least=-1)
    return sum((i + 1) % every == 0 and start <= i and end in (-1, *range(i, layers)) for i in range(layers))


@dataclass(frozen=True)
class Mixture(Dense):
    """``experts``: spellings of the field with their number; ``width``: that of one; ``router`` and ``place``: where
    they stand, with the names of ``matrices``. ``shared``: where experts that every token takes stand, ``shared_width``
    the field of their width (None: n_shared_experts times that of one); ``shared_gate``: they have a gate of their own.
    ``plain``: the field of the width of a layer without experts, in ``dense_place``."""

    experts: tuple[str, ...] = ("num_local_experts", "num_experts", "n_routed_experts")
    width: str = "moe_intermediate_size"
    router: str = "mlp.gate"
    router_bias: bool = False
    place: str = "mlp.experts.*."
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    expert_bias: bool = False
    sparse: Sparse = all_layers
    shared: str = ""
    shared_width: str | None = None
    shared_leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared_gate: bool = False
    plain: str = "intermediate_size"
    dense_place: str = "mlp."

    def network(self, model: Decoder) -> None:
        """Experts in the layers that have them, one network in the others."""
        fields = model.fields
        count = fields.count(fields.spelled(*self.experts))
        active, width = fields.count("num_experts_per_tok"), fields.count(self.width)
        if active > count:
            fields.refuse("num_experts_per_tok", f"at most {count}, the experts there are")
        layers = self.sparse(fields, model.layers)
        if layers < model.layers:
            rest, inner, bias = model.layers - layers, fields.count(self.plain), on(fields, self.mlp)
            model.gated(rest, inner, prefix=self.dense_place, leaves=self.leaves, bias=bias)
        model.routed(layers, count, active, width, router=self.router, prefix=self.place, leaves=self.matrices,
                     bias=self.expert_bias, router_bias=self.router_bias)  # fmt: skip
        self.share(model, layers, width)

    def share(self, model: Decoder, layers: int, width: int) -> None:
        """The experts that every token takes, as one network."""
        if not self.shared:
            return
        fields = model.fields
        if self.shared_width is None:
            width *= fields.count("n_shared_experts", 0, least=0)
        else:
            width = fields.count(self.shared_width, least=0)
        if width:
            model.gated(layers, width, prefix=self.shared, role=Role.SHARED_EXPERT, leaves=self.shared_leaves,
                        bias=on(fields, self.mlp))  # fmt: skip
        if self.shared_gate:
            model.linear(f"{self.shared.removesuffix('.')}_gate", Role.ROUTER, (1, model.hidden), layers)


@dataclass(frozen=True)
class Latent(Mixture):
    """DeepSeek's kind: multi-head latent attention over a mixture with dense first layers. ``index``: each layer picks
    the tokens it attends to with an indexer, whose keys are kept beside the latent."""

    index: bool = False
    sparse: Sparse = after_first
    shared: str = "mlp.shared_experts."

    def attend(self, model: Decoder) -> None:
        model.latent(model.layers)
        if self.index:
            self.choose(model)

    def choose(self, model: Decoder) -> None:
        """The indexer of sparse attention: queries from the query's latent, one key for all of its heads. Layers that
        share the choice of one before them have none."""
        fields, hidden = model.fields, model.hidden
        layers = indexing(fields, model.layers)
        heads, dim, chosen = (fields.count(f"index_{name}") for name in ("n_heads", "head_dim", "topk"))
        for name, shape in (
            ("wq_b", (heads * dim, fields.count("q_lora_rank"))), ("wk", (dim, hidden)),
            ("weights_proj", (heads, hidden)),
        ):  # fmt: skip
            model.linear(f"self_attn.indexer.{name}", Role.ATTENTION, shape, layers)
        model.vectors += 2 * layers * dim
        every = model.keeps.pop()
        model.keeps.append(replace(every, layers=layers, index=dim, chosen=chosen))
        if layers < model.layers:
            model.keeps.append(replace(every, layers=model.layers - layers, chosen=chosen))


def indexing(fields: Fields, layers: int) -> int:
    """How many layers have an indexer of their own: by a word or letter for each (GLM 5), or every
    index_topk_freq-th, of which the first index_skip_topk_offset all have one; without these fields all."""
    name = fields.spelled("indexer_types", "index_topk_pattern")
    said = fields.value(name)
    if said is not None:
        known = {"full": 1, "F": 1, "shared": 0, "S": 0}
        if not isinstance(said, list | tuple | str) or len(said) != layers or not all(
            isinstance(word, str) and word in known for word in said
        ):  # fmt: skip
            fields.refuse(name, f"full or shared for each of {layers} layers")
        return sum(known[word] for word in said)
    every, offset = fields.count("index_topk_freq", 1), fields.count("index_skip_topk_offset", 2, least=0)
    return sum(max(i - offset + 1, 0) % every == 0 for i in range(layers))


@dataclass(frozen=True)
class Sinks(Mixture):
    """gpt-oss: each query head has a sink, one number; every second layer slides."""

    def attend(self, model: Decoder) -> None:
        super().attend(model)
        model.vectors += model.layers * model.fields.count("num_attention_heads")


@dataclass(frozen=True)
class Chunked(Mixture):
    """Llama 4: layers with rotary positions attend within chunks, every fourth without them to everything."""

    def attend(self, model: Decoder) -> None:
        fields, heads = model.fields, model.heads(dim=True)
        bias = on(fields, self.bias)
        model.attend(model.layers, heads, qkv=bias, o=bias)
        rotary = fields.listed("no_rope_layers") or [
            (i + 1) % fields.count("no_rope_layer_interval", 4) for i in range(model.layers)
        ]
        if len(rotary) != model.layers:
            fields.refuse("no_rope_layers", f"{model.layers} numbers, one per layer")
        chunk = fields.maybe("attention_chunk_size")
        kinds = attention_kinds(fields, model.layers, [i for i, on in enumerate(rotary) if on and chunk])
        model.keep(("chunked" if kind == "sliding" else kind for kind in kinds), heads, window=chunk)


@dataclass(frozen=True)
class Bailing(Mixture):
    """Ling and Ring: queries, keys and values in one matrix, and names of their own."""

    sparse: Sparse = after_first
    shared: str = "mlp.shared_experts."

    def begin(self, fields: Fields) -> Decoder:
        return Decoder(fields, tied=self.tied, table="word_embeddings")

    def attend(self, model: Decoder) -> None:
        fields, heads = model.fields, model.heads()
        o = fields.flag("use_bias")
        model.attend_fused(model.layers, heads, prefix="attention.", leaf="query_key_value", out="dense",
                           qkv=o or fields.flag("use_qkv_bias"), o=o)  # fmt: skip
        if fields.flag("use_qk_norm"):
            model.vectors += model.layers * 2 * heads[2]
        model.keep(["full"] * model.layers, heads)

    def share(self, model: Decoder, layers: int, width: int) -> None:
        super().share(model, layers, model.fields.count("moe_shared_expert_intermediate_size", width))


def hunyuan(fields: Fields) -> Geometry:
    """Hunyuan A13B, whose files give some numbers once for each layer; here they must all be the same."""
    alike = {}
    for name in ("num_experts", "moe_topk"):
        found = fields.value(name)
        if isinstance(found, list | tuple):
            if len(set(map(str, found))) != 1:
                fields.refuse(name, "a whole number, or a list of equal ones")
            alike[name] = found[0]
    return _HUNYUAN(
        Fields({**fields.config, **alike}, fields.family, outer=fields.outer) if alike else fields
    )


_STACK = ("gate_up_proj", "down_proj")
_W = ("w1", "w3", "w2")
_MIXTRAL = Mixture(bias=False, o=False, sliding=every, width="intermediate_size", router="block_sparse_moe.gate",
                   place="block_sparse_moe.experts.*.", matrices=_W)  # fmt: skip
_QWEN2 = Mixture(bias=("qkv_bias", True), o=False, sliding=late, sparse=stepped, shared="mlp.shared_expert.",
                 shared_width="shared_expert_intermediate_size", shared_gate=True)  # fmt: skip
_QWEN3 = Mixture(norm="head", sliding=late, sparse=stepped)
_GLM = Mixture(o=False, norm=("use_qk_norm", "head"), sparse=after_first, shared="mlp.shared_experts.")
_GRANITE = Mixture(width="intermediate_size", router="block_sparse_moe.router.layer", place="block_sparse_moe.",
                   matrices=("input_linear", "output_linear"))  # fmt: skip
_HUNYUAN = Mixture(norm="head", width="intermediate_size", router="mlp.gate.wg", shared="mlp.shared_mlp.",
                   shared_width="intermediate_size")  # fmt: skip
_OLMOE = Mixture(norm="whole", width="intermediate_size")
_DEEPSEEK = Latent()
_BIASED: Switch = ("attention_bias", True)
_ERNIE: Switch = ("use_bias", False)

FAMILIES: dict[str, Callable[[Fields], Geometry]] = {
    "mixtral": _MIXTRAL,
    "minimax_m2": replace(_MIXTRAL, norm="whole", dim=True, sliding=nowhere),
    "phimoe": replace(_MIXTRAL, norm_bias=True, bias=("attention_bias", False), o=("attention_bias", False),
                      head=("lm_head_bias", False)),
    "ernie4_5_moe": Mixture(bias=_ERNIE, o=_ERNIE, mlp=_ERNIE, head=_ERNIE, tied=True, sparse=between,
                            shared="mlp.shared_experts."),
    "exaone_moe": Mixture(bias=False, o=False, norm="head", sliding=four, sparse=after_first,
                          shared="mlp.shared_experts."),
    "hunyuan_v1_moe": hunyuan,
    "bailing_moe": Bailing(),
    "olmoe": _OLMOE,
    "flex_olmo": _OLMOE,
    "qwen2_moe": _QWEN2,
    "qwen3_moe": replace(_QWEN3, dim=True),
    "qwen3_vl_moe": replace(_QWEN3, dim=True, place="mlp.experts.", matrices=_STACK),
    "qwen3_omni_moe": replace(_QWEN3, dim=True),
    "glm4_moe": _GLM,
    "glm4v_moe": replace(_GLM, bias=_BIASED, norm=""),
    "dots1": replace(_GLM, o=("attention_bias", False), norm="head"),
    "granitemoe": _GRANITE,
    "granitemoeshared": replace(_GRANITE, shared="shared_mlp.", shared_width="shared_intermediate_size",
                                shared_leaves=("input_linear", "output_linear")),
    "gpt_oss": Sinks(bias=_BIASED, o=_BIASED, dim=True, sliding=alternate, width="intermediate_size",
                     router="mlp.router", router_bias=True, place="mlp.experts.", matrices=_STACK, expert_bias=True),
    "llama4": Chunked(width="intermediate_size", router="feed_forward.router", place="feed_forward.experts.",
                      matrices=_STACK, sparse=interleaved, shared="feed_forward.shared_expert.",
                      shared_width="intermediate_size", plain="intermediate_size_mlp", dense_place="feed_forward."),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": replace(_DEEPSEEK, index=True),
    "kimi_k2": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": replace(_DEEPSEEK, index=True),
    "mistral4": replace(_DEEPSEEK, place="mlp.experts.", matrices=_STACK),
}  # fmt: skip
