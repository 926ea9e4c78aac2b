"""The rule about config.json beside the parent's: the numbers that the model computes with, and that no tensor shows.

    same shapes, another rope_theta, epsilon or number of heads        the file loads, and computes another model

Compared are values, not spellings: what newer writers moved (rope_theta into rope_parameters, text keys into
text_config) meets where it was, keys that only one side has keep their default, and what a writer says of itself, of
dtypes and of the quantization is another rule's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.store.checkpoint import text_config
from narrowcast.store.folder import CONFIG, some

# Keys whose value enters the computation and changes no shape, or changes several so that their product stays.
COMPUTED = frozenset({
    "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "layer_norm_eps",
    "layer_norm_epsilon", "norm_eps", "norm_epsilon", "partial_rotary_factor", "rotary_dim", "rotary_pct", "alibi",
    "hidden_act", "hidden_activation", "activation_function", "sliding_window", "layer_types", "attention_bias",
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier",
    "embedding_multiplier", "residual_multiplier", "logits_scaling", "scale_emb", "scale_depth", "logit_scale",
    "num_experts_per_tok", "num_experts_per_token", "norm_topk_prob", "routed_scaling_factor", "scoring_func",
    "topk_method", "n_group", "topk_group", "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step",
    "mlp_only_layers", "clip_qkv", "swiglu_limit", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
})  # fmt: skip
_ALIKE = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}
_ROPE = ("rope_parameters", "rope_scaling")


def _told(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config computes with, by key; the rotary embedding under one spelling."""
    whole = {**config, **text_config(config)}
    found = {key: _value(whole[key]) for key in COMPUTED if whole.get(key) is not None}
    if not whole.get("use_sliding_window", True):
        found.pop("sliding_window", None)
    theta = whole.get("rope_theta")
    scaling = next((whole[key] for key in _ROPE if isinstance(whole.get(key), Mapping)), {})
    if any(isinstance(value, Mapping) for value in scaling.values()):  # by kind of layer
        return found | {"rope_parameters": dict(scaling)}
    theta = scaling.get("rope_theta", theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rest = {
        k: v for k, v in scaling.items() if k not in ("rope_theta", "rope_type", "type") and v is not None
    }
    found |= {"rope_theta": theta} if theta is not None else {}
    return found | {"rope_scaling": {"rope_type": kind, **rest} if kind != "default" else {}}


def _value(value: Any) -> Any:
    return _ALIKE.get(value, value) if isinstance(value, str) else value


@rule("NC036", "error", parent=True)
def changed_config(subject: Subject) -> Iterator[Finding]:
    """config.json computes another model than the parent's.

    What: a number that enters the computation and fits the same tensors is another than in the parent: rope_theta or
    its scaling, the epsilon of norms, heads and their size, the activation function, experts per token.
    Why: the file loads everywhere, and what it says is nearly right, wrong for long prompts only, or nonsense. No
    tensor shows it, and comparing weights finds nothing.
    Fix: copy the key from the parent's config.json; quantization changes none of them.
    False alarm: a context that was extended on purpose (rope_scaling), or a parent that was corrected since.
    """
    if subject.parent is None or subject.checkpoint.config is None or not subject.found.folder:
        return
    ours, theirs = _told(subject.checkpoint.config), _told(subject.parent.checkpoint.config or {})
    keys = sorted(key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key])
    if keys:
        yield Finding(
            f"another {some(keys, 4)} than the parent's", tensor=CONFIG, got=_some(ours, keys),
            wanted=_some(theirs, keys), count=len(keys), facts={"keys": keys},
            remedy="copy these keys from the parent's config.json",
        )  # fmt: skip


def _some(config: dict[str, Any], keys: list[str]) -> str:
    text = ", ".join(f"{key} {config[key]!r}" for key in keys[:4])
    return text if len(text) <= 120 else f"{text[:117]}..."
