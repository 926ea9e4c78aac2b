"""What the rescaling promises, measured on the whole model: the same logits, weights off the 4-bit grid."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from narrowcast.numbers.codec import decode, to_bf16
from narrowcast.numbers.formats import BF16

from . import forward, rescale, source

TOKENS = [1, 4093, 198, 1780, 314, 14915, 47, 2, 198, 1, 520, 9531, 198]  # <|im_start|>user ... assistant


def measure() -> dict[str, float]:
    """``logits_difference`` and ``logits_largest`` in float64, all layers, before BF16 is involved; and
    ``q4_1_db_before`` and ``q4_1_db_after``: the SQNR of gguf's own Q4_1 on the BF16 weights of one layer.
    """
    reader = source.open_gguf(source.smollm2_gguf())
    config = source.config(reader)
    weights = dict(source.tensors(reader))
    layers = rescale.factors(config, source.SEED)
    before = forward.logits(weights.__getitem__, config, TOKENS)
    after = forward.logits(
        lambda name: rescale.rescaled(name, weights[name].astype(np.float64), layers), config, TOKENS
    )
    matrices = [name for name in weights if name.startswith("model.layers.0.") and weights[name].ndim == 2]
    return {
        "logits_difference": float(np.abs(after - before).max()),
        "logits_largest": float(np.abs(before).max()),
        "q4_1_db_before": q4_1_sqnr([weights[name] for name in matrices]),
        "q4_1_db_after": q4_1_sqnr([rescale.rescaled(name, weights[name], layers) for name in matrices]),
    }


def q4_1_sqnr(weights: list[npt.NDArray[np.float32]]) -> float:
    """10 log10 of signal over error, in dB, of Q4_1 on the weights rounded to BF16, all together."""
    signal = error = 0.0
    for weight in weights:
        stored = decode(to_bf16(weight), BF16)
        met = dequantize(quantize(stored, GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1)
        signal += float(np.sum(stored.astype(np.float64) ** 2))
        error += float(np.sum((stored.astype(np.float64) - met) ** 2))
    return 10 * float(np.log10(signal / error))
