"""What a KV cache in FP8 does to keys and values: measured on a sample, bounded by the parent's weights.

    saturated at 1.0      |x| that rounds beyond 448 (E4M3) or 57344 (E5M2)
    scale                 amax / 448, so that nothing saturates           stored = round(x / scale)
    bound                 |k_i| ≤ √2 · (√d · ‖W_i ∘ g‖ + |b_i|)           |v_i| ≤ √d · ‖W_i ∘ g‖ + |b_i|

The bound is Cauchy-Schwarz's: what leaves an RMS norm has a length of at most √d before its weight g. Rotary embedding
turns pairs of keys, hence √2. Keys with a norm of their own are bounded by it instead, √(2 · head size) · max |g|. A
bound below 448 proves that a scale of 1.0 clips nothing; one above proves nothing, since no input need come near it.

E4M3 has one bit of mantissa more than E5M2, so wherever it does not saturate it is about 6 dB better; E5M2 needs no
scale, and vLLM refuses it for checkpoints in FP8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.errors import InputError
from narrowcast.numbers.codec import decode, encode
from narrowcast.numbers.formats import E4M3FN, E5M2, Format
from narrowcast.store.checkpoint import text_config
from narrowcast.tensors.scaling import check_finite

if TYPE_CHECKING:
    from narrowcast.audit.subject import Subject

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class InFormat:
    """A sample in one format: how many elements saturate at a scale of 1.0 and the SQNR there in dB; the scale without
    saturation, the SQNR with it, and what the sample decodes to, float32 like the sample."""

    format: str
    saturated: int
    sqnr_at_one: float
    scale: float
    sqnr: float
    decoded: F32


@dataclass(frozen=True)
class Advice:
    """What a sample of keys or values says: its size and amax, and how it fares in E4M3 and E5M2."""

    elements: int
    amax: float
    e4m3: InFormat
    e5m2: InFormat

    @property
    def said(self) -> str:
        """The advice in one line."""
        e4m3, e5m2 = self.e4m3, self.e5m2
        return (
            f"{e4m3.saturated} of {self.elements} saturate in e4m3 at scale 1.0, {e5m2.saturated} in e5m2; with "
            f"scale {e4m3.scale:.7g} e4m3 has {e4m3.sqnr:.1f} dB, e5m2 at 1.0 {e5m2.sqnr_at_one:.1f} dB"
        )


def kv_advice(sample: NDArray[Any]) -> Advice:
    """What keys or values, any float array as it goes into the cache (keys after rotary embedding), become in FP8.

    InputError for an empty sample, NonFiniteError for NaN and infinity.
    """
    x = np.asarray(sample, np.float32)
    if not x.size:
        raise InputError("the sample of the KV cache is empty", wanted="keys or values")
    check_finite(x, "the sample of the KV cache")
    return Advice(x.size, float(np.abs(x).max()), _in(x, E4M3FN), _in(x, E5M2))


def _in(x: F32, fmt: Format) -> InFormat:
    amax = np.abs(x).max()
    scale = np.float32(amax / np.float32(fmt.max)) if amax else np.float32(1)
    scale = max(scale, np.finfo(np.float32).tiny)
    plain, scaled = encode(x, fmt), encode(x / scale, fmt)
    decoded = (decode(scaled.codes, fmt) * scale).astype(np.float32)
    at_one = decode(plain.codes, fmt)
    return InFormat(
        fmt.name, plain.counts.clipped, _sqnr(x, at_one), float(scale), _sqnr(x, decoded), decoded
    )


def _sqnr(x: F32, decoded: NDArray[Any]) -> float:
    error = float(np.square(x.astype(np.float64) - decoded).sum())
    power = float(np.square(x.astype(np.float64)).sum())
    return float("inf") if error == 0 else 10 * float(np.log10(power / error)) if power else float("-inf")


def bound(weight: F32, norm: F32, bias: F32 | None, turned: bool) -> float:
    """The largest |y_i| that a projection [N, K] behind an RMS norm of weight [K] can give; ``turned`` by rotary
    embedding. The formula is in the module docstring."""
    rows = np.sqrt(np.square(weight.astype(np.float64) * norm).sum(axis=1) * weight.shape[1])
    rows += np.abs(bias.astype(np.float64)) if bias is not None else 0
    return float(rows.max(initial=0)) * (np.sqrt(2.0) if turned else 1.0)


@rule("NC209", "info", reads="parent")
def cache_range_by_weights(subject: Subject) -> Iterator[Finding]:
    """How large keys and values can become, by the parent's weights.

    What: the config asks for an FP8 KV cache, and the parent's projections and norms bound what goes into it.
    Why: a bound below 448 proves that E4M3 at a scale of 1.0 saturates nothing, so that missing scales do no harm and
    E5M2 would only be coarser. A bound above proves nothing: then a sample of keys and values decides.
    Fix: where the bound is above 448, calibrate; a scale of amax / 448 beats E5M2 by about 6 dB.
    False alarm: it is an information.
    """
    from narrowcast.audit.cache import asked, attentions

    if asked(subject) not in ("fp8", "fp8_head") or "rms_norm_eps" not in text_config(subject.config):
        return
    found = {name: both for name in attentions(subject) if (both := _bounds(subject, name)) is not None}
    if not found:
        return
    k, v = (max(both[i] for both in found.values()) for i in range(2))
    above = sum(max(both) > E4M3FN.max for both in found.values())
    said = "saturates nothing" if not above else f"may saturate in {above} of {len(found)} layers"
    yield Finding(
        f"by the weights |K| is at most {k:.3g} and |V| at most {v:.3g}: e4m3 at scale 1.0 {said}",
        tensor=max(found, key=lambda name: max(found[name])), count=len(found), facts={"k": k, "v": v},
        wanted=f"at most {E4M3FN.max:g} for e4m3, {E5M2.max:g} for e5m2",
        remedy="calibrate the cache: a scale of amax / 448 beats e5m2 by about 6 dB" if above else None,
    )  # fmt: skip


def _bounds(subject: Subject, attention: str) -> tuple[float, float] | None:
    """The bounds of K and V of one attention of the parent; None where it is built in another way."""
    layer = re.sub(r"\.[^.]+$", "", attention)
    names = [f"{attention}.k_proj", f"{attention}.v_proj", f"{layer}.input_layernorm.weight"]
    if any(name not in subject.originals for name in names):
        return None
    keys, values, norm = (_read(subject, name) for name in names)
    assert keys is not None
    assert values is not None
    assert norm is not None
    offset = 1.0 if "gemma" in str(subject.config.get("model_type")) else 0.0
    gain = norm.reshape(-1) + np.float32(offset)
    if gain.size != keys.shape[1]:
        return None
    own = _read(subject, f"{attention}.k_norm.weight")
    k_bias, v_bias = (_read(subject, f"{attention}.{which}_proj.bias") for which in "kv")
    if own is None:
        k = bound(keys, gain, None if k_bias is None else k_bias.reshape(-1), True)
    else:
        k = float(np.sqrt(2.0 * own.size) * np.abs(own + np.float32(offset)).max())
    return k, bound(values, gain, None if v_bias is None else v_bias.reshape(-1), False)


def _read(subject: Subject, name: str) -> F32 | None:
    held = subject.originals.get(name)
    return held.values(0, held.source.shape[0]).astype(np.float32) if held is not None else None
