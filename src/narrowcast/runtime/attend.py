"""Attention in FP8: queries, keys, probabilities and values are FP8 codes, everything between them is fp32.

    Q8 = cast(q · (1 / q_scale))                              saturating, as static activations are
    S  = (Q8 · K8ᵀ) · (softmax scale · q_scale · k_scale)     soft cap, then the mask
    P  = exp(S - max S);   l = Σ P                            the sum of what was not rounded yet
    O  = (cast(P · p) · V8) · (v_scale / (p · l))

P lies in [0, 1] and is spread over the codes by p, which no backend leaves at 1:

    "fp8"         p = 256   FlashAttention-3 (softmax.h, offset 8 of the exponent), vLLM's Triton backend
    "fp8_p448"    p = 448   FlashInfer on Hopper (variants.cuh, the largest number of the format)

Scales are those of the layer's cache, for a tensor or for each head of K and V; a layer without a q_scale takes its
k_scale, vLLM's default. The cache holds E4M3 codes (``fp8_e4m3``, ``fp8_head``); layers that it keeps wide attend in
fp32 without rounding. Sums run in fp32 in BLAS. Tensor cores keep fewer bits of an FP8 sum; backends take keys in tiles
and the maximum so far instead of the row's, which shifts where P is rounded but not how coarsely. Both are left out.

Beside it stands the usual way, for which nothing is needed here: the cache decodes to the run's dtype, and
transformers' own attention reads that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from narrowcast.errors import UsageError
from narrowcast.runtime.caches.fp8 import Fp8, saturated
from narrowcast.runtime.caches.layer import Kept

E4M3 = torch.float8_e4m3fn
P_SCALES = {"fp8": 256.0, "fp8_p448": 448.0}


def attend_in(model: Any, attention: str) -> None:
    """Let a transformers model attend by a name of ``P_SCALES`` or one of transformers' own.

    Raises UsageError for an unknown name, and for a model whose attention cannot be exchanged.
    """
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        wanted = f"{', '.join(P_SCALES)}, or what transformers has for it"
        raise UsageError("this model cannot attend so", got=attention, wanted=wanted) from error
    if attention != model.config._attn_implementation:
        raise UsageError(
            "this model's attention cannot be exchanged", where=type(model).__name__, got=attention
        )


@dataclass(frozen=True)
class Attention:
    """An attention function as transformers calls it, with probabilities spread by ``p_scale``."""

    p_scale: float

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Query [batch, heads, T, D], key and value [batch, heads of K and V, S, D] as a cache gave them back, mask
        added to scores; ``s_aux`` are sinks, a score for each head that takes part in the sum alone.

        Returns [batch, T, heads, D] in the query's dtype. Raises UsageError for keys that came from no cache or hold
        no E4M3 codes throughout.
        """
        given = _operands(query, key, value)
        heads = key.shape[1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = given.q.unflatten(1, (heads, -1)) @ given.k[:, :, None].transpose(-1, -2)
        scores = scores * (scale * given.qk_scale).reshape(-1, 1, 1, 1)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if attention_mask is not None:
            scores = scores + attention_mask[:, :, None].float()
        top = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        weights = torch.exp(scores - top)
        total = weights.sum(dim=-1, keepdim=True)
        if s_aux is not None:
            total = total + torch.exp(s_aux.float().reshape(1, heads, -1, 1, 1) - top)
        if given.coded:
            weights, total = saturated(weights * self.p_scale, E4M3).float(), total * self.p_scale
        out = weights @ given.v[:, :, None] * (given.v_scale.reshape(-1, 1, 1, 1) / total)
        return out.flatten(1, 2).transpose(1, 2).contiguous().to(query.dtype), None


@dataclass(frozen=True)
class _Operands:
    """Float32 matrices, and what their products are still to be multiplied by, float32 [1] or [heads of K and V]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    qk_scale: torch.Tensor
    v_scale: torch.Tensor
    coded: bool


def _operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Operands:
    """Codes and scales, or the numbers themselves of a layer that is kept wide."""
    kept, kept_v = _kept(key, "keys"), _kept(value, "values")
    if kept is None or kept_v is None:
        one = torch.ones(1)
        return _Operands(query.float(), key.float(), value.float(), one, one, False)
    (k_codec, k_rows, q_scale), (v_codec, v_rows, _) = kept, kept_v
    heads, kv_heads = query.shape[1], key.shape[1]
    q_scale = by_kv_head(q_scale, heads, kv_heads)
    by_head = q_scale.repeat_interleave(heads // kv_heads) if q_scale.numel() > 1 else q_scale
    q = saturated(query.float() * (1.0 / by_head.reshape(-1, 1, 1)), E4M3).float()
    k, v = k_codec.codes(k_rows), v_codec.codes(v_rows)
    return _Operands(q, k, v, q_scale * k_codec.scale, v_codec.scale, True)


def _kept(x: torch.Tensor, what: str) -> tuple[Fp8, torch.Tensor, torch.Tensor] | None:
    """Codec, rows and query scale behind what a cache gave back; None for a layer that is kept wide."""
    kept: Kept | None = getattr(x, "kept", None)
    remedy = "use an fp8_e4m3 or fp8_head cache that keeps no first or last tokens wide"
    if kept is None:
        # Multi-head latent attention keeps something else than the keys that it attends to.
        problem = f"attention in FP8 reads codes, and these {what} do not come straight from a cache"
        raise UsageError(problem, remedy=remedy)
    if kept.codec is None:
        return None
    if not isinstance(kept.codec, Fp8) or kept.codec.number != E4M3 or kept.wide or kept.rows is None:
        raise UsageError(f"attention in FP8 reads E4M3 codes, and these {what} hold others", remedy=remedy)
    return kept.codec, kept.rows, kept.q_scale


def by_kv_head(q_scale: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """A query scale for each head of K and V: of [heads] the maximum of each group, as vLLM loads them.

    Raises UsageError for any other number of scales but one.
    """
    if q_scale.numel() == heads:
        return q_scale.reshape(kv_heads, -1).amax(dim=-1)
    if q_scale.numel() not in (1, kv_heads):
        wanted = f"1, {kv_heads} or {heads}"
        raise UsageError("query scales do not fit the layer", got=f"{q_scale.numel()} scales", wanted=wanted)
    return q_scale


for _name, _p_scale in P_SCALES.items():
    AttentionInterface.register(_name, Attention(_p_scale))
    AttentionMaskInterface.register(_name, eager_mask)
