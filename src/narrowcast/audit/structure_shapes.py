"""Rules about shapes that the config gives.

    q [heads · d, hidden]   k, v [kv heads · d, hidden]   o [hidden, heads · d]   d = head_dim, else hidden / heads
    gate, up [inner, hidden]   down [hidden, inner]   norms [hidden]   norms of q and k [d]

Only for architectures whose layers are all alike (``structure_layers.PARTS``); a bias must fit its matrix anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.structure import embeddings
from narrowcast.audit.structure_layers import parts, promised
from narrowcast.audit.subject import Subject
from narrowcast.model.roles import Role
from narrowcast.store.checkpoint import text_config

_LINEAR = frozenset({Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT, Role.LM_HEAD})
_KEPT_PLAIN = ("conv", "patch_embed")  # whose weights have more axes


@rule("NC414", "error")
def other_sizes(subject: Subject) -> Iterator[Finding]:
    """A tensor's shape is not what the config says.

    What: a projection or norm of an architecture that is known has other rows or columns than hidden_size, heads,
    intermediate_size and head_dim make; a linear layer or the embedding is no matrix; or a bias does
    not fit its matrix.
    Why: engines refuse it, or load the rows that fit.
    Fix: take config and weights from the same save.
    False alarm: models that were pruned in width layer by layer and keep the architecture's name.
    """
    wanted = _wanted(subject)
    tables = set(embeddings(subject))
    for name, one in subject.held.items():
        module = name.removesuffix(".weight")
        expected = wanted.get(module)
        if expected is None and module in tables and len(one.shape) != 2:
            expected = ()
        if expected is None and name.endswith((".bias", "_bias")):
            matrix = subject.held.get(name.removesuffix(".bias"))
            expected = (matrix.shape[0],) if matrix is not None and len(matrix.shape) == 2 else None
        if expected is None and _is_flat(name, one.role, one.shape):
            expected = ()
        if expected is not None and one.shape != expected:
            yield Finding(
                "the shape is not what the config says" if expected else "the weight is no matrix",
                tensor=name, got=str(list(one.shape)), wanted=str(list(expected)) if expected else "[out, in]",
                remedy="take config.json and weights from the same save",
            )  # fmt: skip


def _is_flat(name: str, role: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight of a projection is stored with another number of axes than a matrix has."""
    plain = (
        name.endswith("_proj.weight") and ".experts" not in name and not any(k in name for k in _KEPT_PLAIN)
    )
    return plain and role in _LINEAR and len(shape) != 2


def _wanted(subject: Subject) -> dict[str, tuple[int, ...]]:
    """The shape of every module that the config fixes; nothing where the architecture or a size is not known."""
    text, known, count = text_config(subject.config), parts(subject), promised(subject)
    sizes = [text.get(key) for key in ("hidden_size", "num_attention_heads", "intermediate_size")]
    if not known or count is None or not all(type(size) is int and size > 0 for size in sizes):
        return {}
    hidden, heads, inner = (int(size) for size in sizes if size is not None)
    kv, d = text.get("num_key_value_heads") or heads, text.get("head_dim") or hidden // heads
    if type(kv) is not int or type(d) is not int or "kv_lora_rank" in text:
        return {}
    each: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * d, hidden), "self_attn.k_proj": (kv * d, hidden),
        "self_attn.v_proj": (kv * d, hidden), "self_attn.o_proj": (hidden, heads * d),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        "self_attn.qkv_proj": ((heads + 2 * kv) * d, hidden), "mlp.gate_up_proj": (2 * inner, hidden),
        "self_attn.q_norm": (d,), "self_attn.k_norm": (d,),
    }  # fmt: skip
    norms = [piece for piece in known if "norm" in piece and piece not in each]
    each |= dict.fromkeys(norms, (hidden,))
    found = {f"model.layers.{i}.{p}": s for i in range(count) for p, s in each.items() if p in known}
    return found | {"model.norm": (hidden,)}
