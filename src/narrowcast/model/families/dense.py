"""Dense decoders: one attention and one network per layer, all layers alike but for their windows.

Where a window is said, and how, by family:

    sliding_window                                 every layer: Mistral, Phi-3, StarCoder2
    sliding_window, use_sliding_window and
    max_window_layers                              layers from max_window_layers on: Qwen2, Qwen3
    sliding_window, every second layer             Gemma 2
    sliding_window_pattern p                       all but every p-th: Gemma 3 (p 6), Cohere2, OLMo 3, EXAONE 4 (p 4)
    layer_types                                    one word per layer: all of them since 2025; wins where present

Fields that may be absent, as in transformers: num_key_value_heads where the class says "as many as queries"; head_dim
where it follows from the hidden size; biases (the class's word); tie_word_embeddings (Gemma, Cohere, SmolLM3 and
StarCoder2: tied); the pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from narrowcast.model.families.blocks import Decoder, attention_kinds
from narrowcast.model.families.fields import Fields
from narrowcast.model.geometry import Geometry


def every(fields: Fields, layers: int) -> Iterable[int]:
    """All layers slide when there is a window."""
    return range(layers) if fields.has("sliding_window") else ()


def late(fields: Fields, layers: int) -> Iterable[int]:
    """Layers from max_window_layers on slide when the switch is on."""
    if not fields.flag("use_sliding_window") or not fields.has("sliding_window"):
        return ()
    return range(fields.count("max_window_layers", least=0), layers)


def alternate(fields: Fields, layers: int) -> Iterable[int]:
    """Even layers slide."""
    return range(0, layers, 2)


def six(fields: Fields, layers: int) -> Iterable[int]:
    """All layers but every sixth slide, or but every sliding_window_pattern-th."""
    return _pattern(fields, layers, 6)


def four(fields: Fields, layers: int) -> Iterable[int]:
    """All layers but every fourth slide, or but every sliding_window_pattern-th."""
    return _pattern(fields, layers, 4) if fields.has("sliding_window") else ()


def _pattern(fields: Fields, layers: int, usual: int) -> Iterable[int]:
    written = fields.value("sliding_window_pattern")
    if (
        isinstance(written, str) and written and set(written) <= {"L", "G"}
    ):  # EXAONE 4: LLLG, the last layer full
        return [i for i in range(layers - 1) if written[i % len(written)] == "L"]
    every_nth = fields.count("sliding_window_pattern", usual)
    return [i for i in range(layers) if (i + 1) % every_nth]


def nowhere(fields: Fields, layers: int) -> Iterable[int]:
    """No layer slides, whatever the config says."""
    return ()


Switch = bool | tuple[str, bool]  # always, never, or a field and what its absence means
Sliding = Callable[[Fields, int], Iterable[int]]


@dataclass(frozen=True)
class Dense:
    """What tells a dense family from Llama: ``norms`` as wide as the model in each layer (``norm_bias``: LayerNorms
    with biases), the ``norm`` of queries and keys (a pair: where that switch is on), biases of q, k and v (``bias``),
    of the output (``o``), of the network (``mlp``) and of the ``head``, the network's ``leaves``, q, k and v ``fused``
    on disk, the default of ``tied``, ``dim`` as in ``Decoder.heads``, the rule of ``sliding`` layers, tokens that these
    see ``beside`` the sliding_window, and ``further`` numbers in each layer that are nothing of these."""

    norms: int = 2
    norm: str | tuple[str, str] = ""
    norm_bias: bool = False
    last: bool = True
    bias: Switch = ("attention_bias", False)
    o: Switch = ("attention_bias", False)
    mlp: Switch = False
    head: Switch = False
    leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    fused: bool = False
    tied: bool = False
    dim: bool = False
    sliding: Sliding = nowhere
    beside: int = 0
    further: int = 0

    def __call__(self, fields: Fields) -> Geometry:
        """The geometry of a config of this family."""
        model = self.begin(fields)
        model.head_bias = on(fields, self.head)
        self.attend(model)
        self.network(model)
        model.norms(self.norms, bias=self.norm_bias, last=self.last)
        model.vectors += model.layers * self.further
        return model.geometry()

    def begin(self, fields: Fields) -> Decoder:
        """The model before its first layer."""
        return Decoder(fields, tied=self.tied)

    def attend(self, model: Decoder) -> None:
        """The attention of every layer, and what it keeps."""
        fields, heads = model.fields, model.heads(dim=self.dim)
        if self.fused:
            model.attend_fused(model.layers, heads)
        else:
            norm = norm_of(fields, self.norm)
            model.attend(model.layers, heads, qkv=on(fields, self.bias), o=on(fields, self.o), norm=norm)
        slide(model, heads, self.sliding, self.beside)

    def network(self, model: Decoder) -> None:
        """The network of every layer."""
        inner, bias = model.fields.count("intermediate_size"), on(model.fields, self.mlp)
        model.gated(model.layers, inner, leaves=self.leaves, bias=bias)


def on(fields: Fields, switch: Switch) -> bool:
    """Whether a switch is on in a config."""
    return switch if isinstance(switch, bool) else fields.flag(*switch)


def norm_of(fields: Fields, norm: str | tuple[str, str]) -> str:
    """The norm of queries and keys in a config."""
    if isinstance(norm, str):
        return norm
    return norm[1] if fields.flag(norm[0]) else ""


def slide(model: Decoder, heads: tuple[int, int, int], rule: Sliding, beside: int = 0) -> None:
    """What the layers keep; the window is needed where one of them slides."""
    kinds = attention_kinds(model.fields, model.layers, rule(model.fields, model.layers))
    window = model.fields.count("sliding_window") + beside if "sliding" in kinds else None
    model.keep(kinds, heads, window=window)


_MISTRAL = Dense(bias=False, o=False, sliding=every)
_QWEN2 = Dense(bias=True, o=False, sliding=late)
_QWEN3 = Dense(norm="head", dim=True, sliding=late)
_GLM = Dense(bias=("attention_bias", True), o=False, leaves=("gate_up_proj", "down_proj"))
_COHERE = Dense(norms=1, norm=("use_qk_norm", "whole"), tied=True)
_ERNIE: Switch = ("use_bias", False)
_BIASED: Switch = ("use_bias", True)


def internlm3(fields: Fields) -> Geometry:
    """InternLM 3: Llama, with names of its own for its biases, as transformers 5 writes them or as files have them."""
    qkv, o, mlp = (
        (fields.spelled(*names), False)
        for names in (("attention_bias", "qkv_bias"), ("attention_bias", "bias"), ("mlp_bias", "bias"))
    )
    return Dense(bias=qkv, o=o, mlp=mlp)(fields)


FAMILIES: dict[str, Callable[[Fields], Geometry]] = {
    "llama": Dense(mlp=("mlp_bias", False)),
    "granite": Dense(mlp=("mlp_bias", False)),
    "arcee": Dense(mlp=("mlp_bias", False), leaves=("up_proj", "down_proj")),
    "apertus": Dense(norm="head", leaves=("up_proj", "down_proj"), further=2),  # xIELU's two slopes
    "internlm3": internlm3,
    "nemotron": Dense(norm_bias=True, mlp=("mlp_bias", False), leaves=("up_proj", "down_proj")),
    "seed_oss": Dense(bias=("attention_bias", True), o=("attention_out_bias", False), mlp=("mlp_bias", False)),
    "smollm3": Dense(mlp=("mlp_bias", False), tied=True, sliding=late),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": _MISTRAL,
    "phi3": Dense(fused=True, leaves=("gate_up_proj", "down_proj"), sliding=every),
    "starcoder2": Dense(norm_bias=True, bias=_BIASED, o=_BIASED, mlp=_BIASED, leaves=("c_fc", "c_proj"), tied=True,
                        sliding=every),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_omni": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_vl": _QWEN3,
    "gemma": Dense(tied=True, dim=True),
    "gemma2": Dense(norms=4, tied=True, dim=True, sliding=alternate),
    "gemma3": Dense(norms=4, norm="head", tied=True, dim=True, sliding=six),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "glm4v": replace(_GLM, norms=4, bias=True),
    "ernie4_5": Dense(bias=_ERNIE, o=_ERNIE, mlp=_ERNIE, tied=True),
    "hunyuan_v1_dense": Dense(norm="head"),
    "olmo": Dense(norms=0, last=False),
    "olmo2": Dense(norm="whole"),
    "olmo3": Dense(norm="whole", sliding=four),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, sliding=four, beside=1),  # trained on [i − window, i], as vLLM's commandr.py has it
    "exaone4": Dense(bias=False, o=False, norm="head", sliding=four),
}  # fmt: skip
