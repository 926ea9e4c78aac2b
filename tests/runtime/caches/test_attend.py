"""FP8 attention against exact weights, against decoded attention within its bound, and scale by scale."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from narrowcast.errors import UsageError
from narrowcast.runtime.attend import P_SCALES, Attention, by_kv_head
from narrowcast.runtime.caches import CacheFactory, KVScales

CONFIG = LlamaConfig(
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=32,
)
MODULE = torch.nn.Identity()


def cached(
    k: torch.Tensor, v: torch.Tensor, scales: KVScales, mode: str = "fp8_e4m3"
) -> tuple[torch.Tensor, ...]:
    return CacheFactory(CONFIG, mode, scales)().update(k, v, 0)


@pytest.mark.parametrize("p_scale", P_SCALES.values())
def test_weights_far_below_one_are_kept_by_the_scale_of_probabilities(p_scale: float) -> None:
    """Scores 0 and -12 ln 2 give weights 1 and 2^-12, the second below half of E4M3's smallest number, 2^-9."""
    k = torch.zeros(1, 2, 2, 16)
    k[:, :, 1, 0] = -1.0
    v = torch.zeros(1, 2, 2, 16)
    v[:, :, 1, 3] = 448.0
    keys, values = cached(k, v, KVScales())
    out, _ = Attention(p_scale)(
        MODULE, torch.full((1, 4, 1, 16), 1.0), keys, values, None, scaling=12 * math.log(2)
    )
    weight = 2.0**-12
    assert float(out[0, 0, 0, 3]) == pytest.approx(448 * weight / (1 + weight), rel=2.0**-4)
    lost, _ = Attention(1.0)(
        MODULE, torch.full((1, 4, 1, 16), 1.0), keys, values, None, scaling=12 * math.log(2)
    )
    assert float(lost.abs().max()) == 0.0


@pytest.mark.parametrize("p_scale", P_SCALES.values())
def test_one_key_gives_back_its_value(p_scale: float) -> None:
    v = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(0))
    keys, values = cached(torch.ones(1, 2, 1, 16), v, KVScales(v={0: np.float32([0.01])}))
    out, _ = Attention(p_scale)(MODULE, torch.ones(1, 4, 1, 16), keys, values, None)
    want = values.repeat_interleave(2, 1).transpose(1, 2)
    assert (
        float(((out - want) / want).abs().max()) <= 4 * 2.0**-24
    )  # p, its quotient, the scale, one division


@pytest.mark.parametrize("mode", ["fp8_e4m3", "fp8_head"])
@pytest.mark.parametrize("p_scale", P_SCALES.values())
def test_what_fp8_adds_to_decoded_attention_is_the_rounding_of_probabilities(
    p_scale: float, mode: str
) -> None:
    """Σ (2^-4 Pⱼ + 2^-10/p) |vⱼ| / l, with queries that E4M3 holds, so that they add nothing."""
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(1, 2, 40, 16, generator=generator) for _ in range(2))
    v[..., 3] *= 20
    two = np.float32([0.01, 0.03])
    scales = KVScales(
        {0: two if mode == "fp8_head" else two[:1]}, {0: two if mode == "fp8_head" else two[1:]}
    )
    keys, values = cached(k, v, scales, mode)
    group = keys.kept.q_scale.repeat_interleave(4 // keys.kept.q_scale.numel()).reshape(-1, 1, 1)
    q = torch.randint(-8, 8, (1, 4, 40, 16), generator=generator) * 8.0 * group
    mask = torch.full((40, 40), torch.finfo(torch.float32).min).triu(1)[None, None]
    out, _ = Attention(p_scale)(MODULE, q, keys, values, mask)
    wide_k, wide_v = keys.double().repeat_interleave(2, 1), values.double().repeat_interleave(2, 1)
    weights = (q.double() @ wide_k.transpose(-1, -2) / 4 + mask.double()).softmax(-1)
    largest = weights.amax(-1, keepdim=True)  # P = weight / largest weight, l = 1 / largest weight
    rounded = torch.maximum(2.0**-4 * weights, 2.0**-10 / p_scale * largest) @ wide_v.abs()
    scores = float((q.double() @ wide_k.transpose(-1, -2) / 4).abs().max())
    sums = 2 * (16 + 40 + 8) * 2.0**-24 * (1 + scores) * (weights @ wide_v.abs())
    error = (out.transpose(1, 2).double() - weights @ wide_v).abs()
    assert bool((error <= rounded + sums).all())
    assert float((error / rounded).max()) > 0.2


def test_queries_saturate_at_their_own_scale() -> None:
    k = torch.zeros(1, 2, 2, 16)
    k[:, :, 0, 0] = 1.0
    v = torch.zeros(1, 2, 2, 16)
    v[:, :, 0] = 1.0
    q = torch.zeros(1, 4, 1, 16)
    q[..., 0] = 1000.0
    attention = Attention(256.0)
    for q_scale, score in ((1.0, 448.0), (4.0, 1000.0 + 24)):  # 250 rounds to 256
        keys, values = cached(k, v, KVScales(q={0: np.float32([q_scale])}))
        out, _ = attention(MODULE, q, keys, values, None, scaling=2.0**-9)
        assert float(out[0, 0, 0, 0]) == pytest.approx(1 / (1 + math.exp(-score / 512)), rel=2.0**-4)


def test_query_scales_of_query_heads_are_their_groups_maximum() -> None:
    assert by_kv_head(torch.tensor([1.0, 3.0, 2.0, 0.5]), 4, 2).tolist() == [3.0, 2.0]
    assert by_kv_head(torch.tensor([1.0, 3.0]), 4, 2).tolist() == [1.0, 3.0]
    assert by_kv_head(torch.tensor([2.0]), 4, 2).tolist() == [2.0]
    with pytest.raises(UsageError, match="3 scales"):
        by_kv_head(torch.ones(3), 4, 2)
