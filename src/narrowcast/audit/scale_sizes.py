"""Rules about the size of scales: what they decode to, whether the right way round, and which part of their range.

    amax = element max · inner · outer        2688 / amax in the place of amax / 2688 is 2688² / amax: 9.6e6 for 0.75

Weights of language models have an amax between 1e-3 and some tens; AWQ moves them to some hundreds. A scale the wrong
way round gives 2688² / amax (NVFP4), 448² / amax (FP8), 127² / amax (INT8) instead, 1e4 and more for every amax below
1. So an amax above 1000 is suspicious, and one above 10000 an error; 65504, where fp16 ends, lies not far beyond.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.scale_pieces import codes_of
from narrowcast.audit.subject import Subject, Summary
from narrowcast.containers.spelling import widened
from narrowcast.model.fused import fused_groups
from narrowcast.numbers.codec import decode_table
from narrowcast.numbers.formats import E2M1, E4M3FN
from narrowcast.store.safetensors import Entry
from narrowcast.tensors.schemes import Scheme

SUSPICIOUS, IMPLAUSIBLE, TINY = 1e3, 1e4, 1e-6
LIKELY = (1e-4, 100.0)  # what the amax of weights is like
SPARE = 96.0  # of 448: below it a factor of 4 is unused, which no rule of outer scales leaves
FAINT = 0.01
_MULTIPLIER, _DIVISOR = ".weight_scale_2", ".weight_global_scale"


def short(value: float) -> str:
    """A large number in few characters: 9.6e6."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def scheme_of(subject: Subject, name: str) -> Scheme:
    """The scheme of a quantized matrix."""
    coded = subject.quantized[name].coded
    assert coded is not None
    found: Scheme = coded.how.scheme
    return found


def tensor_of(subject: Subject, name: str, piece: str) -> str:
    """The tensor in the file that holds a piece of a quantized matrix."""
    coded = subject.quantized[name].coded
    assert coded is not None
    part = coded.how.part(piece)  # type: ignore[arg-type]
    return coded.place.stem + part.suffix if part is not None else name


@rule("NC120", "error", reads="scales")
def implausible_amax(subject: Subject) -> Iterator[Finding]:
    """Scales make weights of thousands, or of nothing: most likely the reciprocal was stored.

    What: the largest decoded weight of a layer is above 10000 (error), above 1000, or below 1e-6 (warnings).
    Why: compressed-tensors divides by weight_global_scale = 2688 / amax, ModelOpt multiplies by weight_scale_2 =
    amax / 2688; under the other's name a layer is millions of times too large, and its output infinite or NaN.
    Fix: store the reciprocal, or move the tensor with `narrowcast convert` from the container that it came from.
    False alarm: a layer with real weights of thousands; `narrowcast inspect` of the parent shows its amax.
    """
    for one in subject.matrices.values():
        found = _implausible(subject, one)
        if found is not None:
            yield found
    for module, outer, scale in _two_levels(subject):
        if module in subject.matrices or not outer.name.endswith(_MULTIPLIER):
            continue  # of a layer that is read, the decoded amax is known; a divisor is read whatever it is
        value, top = _value(subject, outer), _largest(subject, scale) * E2M1.max
        if np.isfinite(value) and value * top > SUSPICIOUS:
            yield _reciprocal(outer.name, value * top, value, top / value)


def _implausible(subject: Subject, one: Summary) -> Finding | None:
    scheme = scheme_of(subject, one.name)
    two = len(scheme.scales) == 2
    outer = one.outer if two and one.outer is not None else 1.0
    reach = scheme.element.max if scheme.zero is None else 2.0**scheme.element.bits - 1
    amax = one.amax if one.amax is not None else (one.inner[1] * outer * reach if one.inner else 0.0)
    if amax == 0 or one.inner is None or not np.isfinite(amax):
        return None
    tensor = tensor_of(subject, one.name, "outer" if two or scheme.inner.tile == (0, 0) else "scales")
    if amax < TINY:
        return Finding(
            f"decoded amax {short(amax)}, implausible", tensor=tensor, got=short(amax), wanted=f"above {TINY:g}",
            severity="warning", facts={"amax": amax}, remedy="`narrowcast compare` with the parent",
        )  # fmt: skip
    if amax <= SUSPICIOUS:
        return None
    turned = amax / outer**2 if two else reach / one.inner[0]
    stored = 1 / outer if scheme.scales[-1].divides else outer if two else one.inner[1]
    return _reciprocal(tensor, amax, stored, turned)


def _reciprocal(tensor: str, amax: float, stored: float, turned: float) -> Finding:
    likely = LIKELY[0] <= turned <= LIKELY[1]
    either = ": a divisor is weight_global_scale, a multiplier weight_scale_2"
    kind = either if tensor.endswith((_MULTIPLIER, _DIVISOR)) else ""
    return Finding(
        f"decoded amax {short(amax)}, implausible" + (f"; of the reciprocal it is {turned:.3g}" if likely else ""),
        tensor=tensor, got=f"{stored:.7g}", wanted=f"{1 / stored:.7g}" if likely else f"an amax below {SUSPICIOUS:g}",
        remedy=f"store the reciprocal{kind}" if likely else "quantize the layer again from the parent",
        severity="error" if amax > IMPLAUSIBLE else "warning", facts={"amax": amax, "amax_of_reciprocal": turned},
    )  # fmt: skip


def _two_levels(subject: Subject) -> Iterator[tuple[str, Entry, Entry]]:
    """Modules of packed codes with block scales in E4M3 and one scale above them: name, outer scale, block scales."""
    for module, pieces in subject.pieces.items():
        scale = pieces.get(".weight_scale")
        outer = pieces.get(_MULTIPLIER) or pieces.get(_DIVISOR)
        packed = codes_of(pieces) is not None and scale is not None and scale.dtype.name == "F8_E4M3"
        if (
            packed
            and scale is not None
            and outer is not None
            and outer.dtype.format in ("fp32", "bf16", "fp16")
        ):
            yield module, outer, scale


def _value(subject: Subject, entry: Entry) -> float:
    values = widened(subject.checkpoint.array(entry.name).reshape(-1), entry.dtype.name)
    return float(values[0]) if values.size else float("nan")


def _largest(subject: Subject, scale: Entry) -> float:
    counts = np.bincount(subject.checkpoint.array(scale.name).reshape(-1), minlength=256)
    table = decode_table(E4M3FN)
    return float(table[(counts > 0) & np.isfinite(table)].max(initial=0))


@rule("NC121", "error", reads="scales")
def broken_outer_scale(subject: Subject) -> Iterator[Finding]:
    """The outer scale of a layer is zero, negative, NaN or infinite.

    What: weight_scale_2 or weight_global_scale is no positive finite number.
    Why: it stands above every block: the whole layer becomes zero, NaN or infinite, and its fused siblings with it,
    since engines take the largest of their scales.
    Fix: quantize the layer again from the parent; 2688 / amax overflows to infinity where it is computed in fp16.
    False alarm: none known.
    """
    for _, outer, _ in _two_levels(subject):
        value = _value(subject, outer)
        if not (np.isfinite(value) and value > 0):
            yield Finding(
                f"the outer scale is {value:g}", tensor=outer.name, got=f"{value:g}", wanted="a positive finite number",
                remedy="quantize the layer again from the parent",
            )  # fmt: skip


@rule("NC122", "error", reads="scales")
def not_powers_of_two(subject: Subject) -> Iterator[Finding]:
    """Scales are no powers of two where the config promises that they are.

    What: the config says scale_fmt ue8m0, and float scales have mantissas.
    Why: vLLM enables DeepGEMM's E8M0 path for such a file, which keeps the exponent of a scale only, so that scales
    would be off by up to a factor of two, or rounds and quantizes the weights once more.
    Fix: remove scale_fmt from the config where the scales are right (`narrowcast repair`); else quantize with UE8M0.
    False alarm: none known.
    """
    if subject.quantization.get("scale_fmt") != "ue8m0":
        return
    for pieces in subject.pieces.values():
        entry = next(
            (pieces[e] for e in (".weight_scale_inv", ".weight_scale", "_scale_inv") if e in pieces), None
        )
        if entry is None or entry.dtype.format not in ("fp32", "bf16", "fp16") or codes_of(pieces) is None:
            continue
        values = widened(subject.checkpoint.array(entry.name), entry.dtype.name)
        other = np.isfinite(values) & (values > 0) & (np.frexp(values)[0] != 0.5)
        if other.any() and values.ndim:
            at = tuple(int(i) for i in np.argwhere(other)[0])
            yield Finding(
                f"{int(other.sum())} of {values.size} scales are no powers of two", tensor=entry.name, at=at,
                got=f"{values[at]:.9g}", wanted="powers of two, as scale_fmt ue8m0 says", count=int(other.sum()),
                remedy="remove scale_fmt from the config, if the scales are right", repair="config",
            )  # fmt: skip


@rule("NC123", "info", reads="scales")
def bottom_of_range(subject: Subject) -> Iterator[Finding]:
    """Block scales use only the bottom of their E4M3 range.

    What: the largest block scale of a layer and its fused siblings is below 96 of 448; a warning where more than one in
    a hundred is subnormal, with three bits or fewer.
    Why: the outer scale is too large, by 6 where it is amax / 448 instead of amax / (6 · 448). E4M3 is exact to 6 %
    from 2^-6 on; what an outer scale wastes above is missing below, where small blocks are rounded coarsely or lost.
    Fix: quantize again with an outer scale of amax / 2688.
    False alarm: an outer scale that is shared beyond the siblings, as by all experts of a layer; then nothing is lost
    while no block scale is subnormal.
    """
    two = {
        name: one for name, one in subject.matrices.items()
        if one.inner is not None and len(scheme_of(subject, name).scales) == 2
        and scheme_of(subject, name).inner.format is E4M3FN
    }  # fmt: skip
    for group in fused_groups(two):
        members = [two[name] for name in group]
        largest = max(one.inner[1] for one in members if one.inner is not None)
        faint = max(members, key=lambda one: one.faint)
        if largest < SPARE:
            yield Finding(
                f"the largest block scale is {largest:g} of 448; {faint.faint:.1%} of blocks have subnormal ones",
                tensor=tensor_of(subject, faint.name, "scales"), got=f"{largest:g}", wanted=f"{SPARE:g} to 448",
                severity="warning" if faint.faint > FAINT else "info", count=len(group),
                remedy="quantize again with an outer scale of amax / 2688",
                facts={"largest": largest, "subnormal": faint.faint},
            )  # fmt: skip
