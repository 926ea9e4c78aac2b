"""Weights moved off the 4-bit grid they came from, without changing what the model computes.

The source is a Q4_1 file: its weights sit on 16 levels per 32, and a 4-bit format with groups may find
them again almost exactly. Errors measured on such weights flatter 4-bit formats. A Llama layer has
channels whose scale is free, because what multiplies one tensor divides the next (d > 0, one factor per
channel):

    input_layernorm          g*d      q, k, v columns      W/d      norm(x)*g*d  @ (W/d)^T  = norm(x)*g @ W^T
    v rows                   W*d      o columns            W/d      attention mixes positions, not channels
    post_attention_layernorm g*d      gate, up columns     W/d
    up rows                  W*d      down columns         W/d      silu(gate) * up is linear in up

With grouped heads one key-value head serves several query heads, so its factors repeat in the columns of
o. Every linear weight of a layer gets its own factor per column, so the 32 weights of a group no longer
share a step. The factors are log-uniform on [1/2, 2] and with probability one not powers of two, which
would leave every column on a grid of its own that a floating-point format could still meet.

What this shows, on every run of the demo and in its tests:

- In exact arithmetic the logits are the same. In float64 all of them agree to some 1e-13 where the
  largest is 30 (``demo.forward``); fp32 weights, rounded once by this multiplication, move them by some
  1e-5.
- Q4_1 meets the source without any error, and its BF16 rounding with 57 dB. After the rescaling it
  reaches 21 dB, where normally distributed weights give 22; the error, in steps, has the mean square of a
  uniform one.

Left out: factors between q and k (they must respect the rotary pairs) and rotations of the residual
stream (they would change the embedding, and with it the norms); neither is needed to leave the grid. The
wider spread inside a group makes these weights a little harder to quantize than the original ones, for
every format alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Factors = list[dict[str, npt.NDArray[np.float32]]]

SPREAD = 2.0
# tensor: (factors its rows are multiplied by, factors its columns are divided by)
PLACES: dict[str, tuple[str | None, str | None]] = {
    "input_layernorm": ("attention_in", None),
    "self_attn.q_proj": (None, "attention_in"),
    "self_attn.k_proj": (None, "attention_in"),
    "self_attn.v_proj": ("value", "attention_in"),
    "self_attn.o_proj": (None, "value_per_query_head"),
    "post_attention_layernorm": ("mlp_in", None),
    "mlp.gate_proj": (None, "mlp_in"),
    "mlp.up_proj": ("up", "mlp_in"),
    "mlp.down_proj": (None, "up"),
}
LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def factors(config: Mapping[str, Any], seed: int) -> Factors:
    """Per layer, the named factors in fp32: log-uniform on [1/SPREAD, SPREAD], the same for the same seed."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    queries_per_kv = config["num_attention_heads"] // kv_heads
    random = np.random.default_rng(seed)

    def draw(size: int) -> npt.NDArray[np.float32]:
        return np.exp2(random.uniform(-1.0, 1.0, size) * np.log2(SPREAD)).astype(np.float32)

    layers = []
    for _ in range(config["num_hidden_layers"]):
        value = draw(kv_heads * head_dim)
        repeated = np.repeat(value.reshape(kv_heads, 1, head_dim), queries_per_kv, axis=1).reshape(-1)
        layers.append(
            {
                "attention_in": draw(hidden),
                "value": value,
                "value_per_query_head": repeated,
                "mlp_in": draw(hidden),
                "up": draw(inner),
            }
        )
    return layers


def rescaled(name: str, weight: npt.NDArray[Any], layers: Factors) -> npt.NDArray[Any]:
    """``weight`` ``(out, in)`` or ``(size,)``, rows multiplied and columns divided, in its own float dtype.

    Tensors outside the layers come back as they are.
    """
    match = LAYER_TENSOR.fullmatch(name)
    if match is None:
        return weight
    layer = layers[int(match[1])]
    rows, columns = PLACES[match[2]]
    if rows is not None:
        weight = weight * layer[rows].reshape(-1, *[1] * (weight.ndim - 1)).astype(weight.dtype)
    if columns is not None:
        weight = weight / layer[columns].astype(weight.dtype)
    return weight
