"""Rotary position scaling, between config.json and a GGUF file.

A config names a rule; a GGUF file has metadata for some rules and tensors of factors for others:

    linear, yarn    rope.scaling.type, .factor, .original_context_length and yarn's own constants
    llama3          rope_freqs: what each frequency is divided by, from 1 (fast) to ``factor`` (slow)
    longrope        rope_factors_long and rope_factors_short, Phi-3's lists as they are

llama3, for a frequency f of wavelength w = 2π / f and original context c:

    1 where w < c / high,   factor where w > c / low
    1 / ((1 - s) / factor + s) between, with s = (c / w - low) / (high - low)

Going back, the largest factor is ``factor``; low, high and c are the ones that every Llama 3 uses, if the tensor is
what they give, and otherwise the file is refused: factors alone do not say what rule made them.

Left out: dynamic scaling, which llama.cpp does not have.

Source: transformers modeling_rope_utils; llama.cpp's convert_hf_to_gguf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import CheckpointError, UsageError

F32 = NDArray[np.float32]
FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {
    "rope.scaling.yarn_ext_factor": "extrapolation_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


@dataclass
class Rope:
    """Rotary settings of a model: base, scaling as config.json spells it (None: none), the base of sliding layers."""

    theta: float
    scaling: dict[str, Any] | None = None
    local_theta: float | None = None


def rope_of_config(config: Mapping[str, Any], default: float) -> Rope:
    """The rotary settings of a config.json, in its old spelling or in that of transformers 5."""
    new = _object(config, "rope_parameters")
    full = _object(new, "full_attention") or new
    local = _object(new, "sliding_attention").get("rope_theta", config.get("rope_local_base_freq"))
    scaling = dict(full or _object(config, "rope_scaling"))
    theta = real(scaling.pop("rope_theta", config.get("rope_theta", default)), "rope_theta")
    scaling.pop("partial_rotary_factor", None)
    rule = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    found = None if rule == "default" else {"rope_type": rule, **scaling}
    return Rope(theta, found, None if local is None else real(local, "rope_local_base_freq"))


def rope_fields(rope: Rope, head_dim: int, context: int) -> tuple[dict[str, Any], dict[str, F32]]:
    """Metadata (keys without the architecture) and tensors for a GGUF file. UsageError for a rule it cannot say."""
    fields: dict[str, Any] = {"rope.freq_base": rope.theta}
    if rope.local_theta is not None:
        fields["rope.freq_base_swa"] = rope.local_theta
    scaling = rope.scaling or {}
    rule = scaling.get("rope_type")
    if rule is None:
        return fields, {}
    if rule in ("linear", "yarn"):
        fields |= {"rope.scaling.type": rule, "rope.scaling.factor": _get(scaling, "factor")}
        if rule == "yarn":
            original = int(scaling.get("original_max_position_embeddings") or context)
            fields["rope.scaling.original_context_length"] = original
            fields |= {
                key: float(scaling[name]) for key, name in _YARN.items() if scaling.get(name) is not None
            }
        return fields, {}
    if rule == "llama3":
        return fields, {FREQS: llama3_factors(rope.theta, head_dim, scaling)}
    if rule in ("longrope", "su"):
        return fields, {LONG: _list(scaling, "long_factor"), SHORT: _list(scaling, "short_factor")}
    raise UsageError(
        "llama.cpp has no rotary scaling of this kind", got=rule, wanted="linear, yarn, llama3 or longrope"
    )


def rope_of_gguf(
    fields: Mapping[str, Any], at: str, tensors: Mapping[str, F32], head_dim: int, default: float
) -> Rope:
    """The rotary settings of a GGUF file; ``at`` is the architecture with a dot, ``tensors`` its rope tensors.

    Raises CheckpointError for factors that no rule gives.
    """
    theta = real(fields.get(at + "rope.freq_base", default), at + "rope.freq_base")
    local = fields.get(at + "rope.freq_base_swa")
    rope = Rope(theta, None, None if local is None else real(local, at + "rope.freq_base_swa"))
    rule = fields.get(at + "rope.scaling.type", "none")
    original = fields.get(at + "rope.scaling.original_context_length")
    if LONG in tensors and SHORT in tensors:
        long, short = (_decimals(tensors[name]) for name in (LONG, SHORT))
        rope.scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    elif FREQS in tensors:
        rope.scaling = _llama3_scaling(tensors[FREQS], theta, head_dim)
    elif rule in ("linear", "yarn"):
        rope.scaling = {"rope_type": rule, "factor": fields.get(at + "rope.scaling.factor", 1.0)}
        if rule == "yarn":
            rope.scaling |= {"original_max_position_embeddings": original} if original else {}
            rope.scaling |= {name: fields[at + key] for key, name in _YARN.items() if at + key in fields}
    elif rule != "none":
        raise CheckpointError("the rotary scaling of the GGUF file is unknown or incomplete", got=rule)
    return rope


def llama3_factors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> F32:
    """What the llama3 rule divides each of head_dim / 2 frequencies by: float32, by the equation above."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelength = np.float32(2 * math.pi) * np.float32(theta) ** exponents
    factor = np.float32(_get(scaling, "factor"))
    low, high = (np.float32(_get(scaling, f"{word}_freq_factor")) for word in ("low", "high"))
    context = np.float32(_get(scaling, "original_max_position_embeddings"))
    smooth = (context / wavelength - low) / (high - low)
    with np.errstate(divide="ignore"):
        between = 1 / ((1 - smooth) / factor + smooth)
    fast, slow = wavelength < context / high, wavelength > context / low
    return np.where(fast, np.float32(1), np.where(slow, factor, between)).astype(np.float32)


def _llama3_scaling(factors: F32, theta: float, head_dim: int) -> dict[str, Any] | None:
    largest = float(factors.max())
    if largest == 1.0 and float(factors.min()) == 1.0:
        return None
    scaling = {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    wanted = llama3_factors(theta, head_dim, scaling)
    # A power in fp32 is off by a few of its last bits; other settings differ by whole percents.
    if factors.shape != wanted.shape or not np.allclose(factors, wanted, rtol=1e-4, atol=0):
        raise CheckpointError(
            f"the factors in {FREQS} are not those of Llama 3's rule",
            got=f"{len(factors)} factors from {float(factors.min()):g} to {largest:g}",
            wanted=f"low 1, high 4, original context 8192 over {len(wanted)} frequencies",
            remedy="take config.json from the model that the GGUF was made of",
        )
    return scaling


def _decimals(values: F32) -> list[float]:
    """The shortest decimals that are these fp32."""
    return [float(str(value)) for value in values]


def real(value: Any, what: str) -> float:
    """A number, whole or not; CheckpointError for anything else."""
    if type(value) not in (int, float):
        raise CheckpointError(f"{what} is no number", got=repr(value)[:60])
    return float(value)


def _get(scaling: Mapping[str, Any], key: str) -> float:
    return real(scaling.get(key), f"{key} of the rotary scaling")


def _list(scaling: Mapping[str, Any], key: str) -> F32:
    values = scaling.get(key)
    if not isinstance(values, list):
        raise CheckpointError(f"{key} of the rotary scaling is no list", got=repr(values)[:60])
    return np.array([real(value, key) for value in values], np.float32)


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{key} of the config is no object", got=repr(value)[:60])
    return value
