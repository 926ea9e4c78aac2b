"""Rules about static input scales: whether each expert has one, and whether calibration data can have made it.

    amax of an input = scale · span           span 448 (FP8), 2688 (NVFP4), 127.5 (INT8)

Without a sample only plausibility can be judged: inputs of linear layers have an amax from some hundredths (after an
activation function) to some ten thousands (before the down projection of a few layers); one scale for all layers comes
from a placeholder, not from data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.scale_pieces import codes_of, layer_and_expert
from narrowcast.audit.scale_sizes import tensor_of
from narrowcast.audit.subject import Subject

_EXPERT = re.compile(r"^(.*experts)\.(\d+)\.([\w.]+)$")
INPUTS = (".input_scale", ".input_global_scale", ".input_scale_2")
SMALL, LARGE = 1e-3, 1e5
MANY, LAYERS = 8, 3  # so many matrices of so many layers do not have one amax by chance
CALIBRATE = (
    "quantize the parent again with scales from real text (`narrowcast calibrate`, `quantize --stats`), or use a "
    "preset with dynamic inputs"
)


@rule("NC160", "error")
def missing_expert_input_scale(subject: Subject) -> Iterator[Finding]:
    """Some experts have no input scale, and others of the layer have.

    What: of a projection of a layer's experts, some have a static input scale and some do not.
    Why: calibration data never reached these experts. vLLM keeps 1.0 for FP8 and, for NVFP4, whatever was in memory,
    and where it takes one scale for all experts, that one spoils the layer.
    Fix: calibrate with more data, or with every token sent to every expert; or give them the largest scale of the
    layer's others.
    False alarm: an engine that makes input scales on the fly reads none of them.
    """
    layers: dict[tuple[str, str], dict[int, str | None]] = {}
    for module, pieces in subject.pieces.items():
        match = _EXPERT.match(module)
        if match is not None and codes_of(pieces) is not None:
            given = next((ending for ending in INPUTS if ending in pieces), None)
            layers.setdefault((match[1], match[3]), {})[int(match[2])] = given
    for (stem, projection), experts in layers.items():
        missing = sorted(expert for expert, given in experts.items() if given is None)
        given = next((ending for ending in experts.values() if ending is not None), None)
        if missing and given is not None:
            layer = layer_and_expert(f"{stem}.").get("layer")
            names = ", ".join(map(str, missing[:8])) + (
                f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            )
            yield Finding(
                f"layer {layer}: experts {names} of {len(experts)} have no input scale for {projection}",
                tensor=f"{stem}.{missing[0]}.{projection}{given}", count=len(missing),
                got=f"{len(experts) - len(missing)} of {len(experts)} experts", wanted="every expert", remedy=CALIBRATE,
                facts={"layer": layer, "experts": missing},
            )  # fmt: skip


@rule("NC161", "warning", reads="scales")
def uncalibrated_input_scale(subject: Subject) -> Iterator[Finding]:
    """Static input scales that no calibration made: exactly 1.0, or the same in every layer.

    What: a static input scale is exactly 1.0, or eight and more matrices of three and more layers all have one value.
    Why: 1.0 is what engines and libraries begin with. Inputs above 448 clip (above 2688 for NVFP4), and small ones are
    left with few codes.
    Fix: calibrate (`narrowcast calibrate`), or use dynamic inputs.
    False alarm: a scale of 1.0 by choice, with inputs that are known to lie within the format.
    """
    inputs = {name: one.input for name, one in subject.matrices.items() if one.input is not None}
    unity = [name for name, value in inputs.items() if value == 1.0]
    for name in unity:
        yield Finding(
            "the static input scale is exactly 1.0", tensor=tensor_of(subject, name, "input"), got="1",
            wanted="amax of the input / the format's largest value", remedy=CALIBRATE,
        )  # fmt: skip
    layers = {layer_and_expert(name).get("layer") for name in inputs}
    if not unity and len(set(inputs.values())) == 1 and len(inputs) >= MANY and len(layers) >= LAYERS:
        name, value = next(iter(inputs.items()))
        yield Finding(
            f"all {len(inputs)} static input scales are {value:g}", tensor=tensor_of(subject, name, "input"),
            count=len(inputs), got=f"{value:g} in {len(layers)} layers", wanted="a scale for each input",
            remedy=CALIBRATE,
        )  # fmt: skip


@rule("NC162", "warning", reads="scales")
def implausible_input_scale(subject: Subject) -> Iterator[Finding]:
    """A static input scale stands for an input that no layer has.

    What: the input scale is zero, negative, NaN or infinite (an error), or the amax that it stands for is below 0.001
    or above 100000.
    Why: with too small a scale nearly every input clips, with too large a one they all become zero. A reciprocal does
    either: 448 / 20 in the place of 20 / 448.
    Fix: store the reciprocal where it is one; else calibrate again.
    False alarm: a layer whose input is really that small or large; the scale of its neighbours tells.
    """
    for name, one in subject.matrices.items():
        coded = subject.quantized[name].coded
        scheme = coded.stored.linear.input if coded is not None else None
        if one.input is None or scheme is None:
            continue
        two = len(scheme.scales) == 2
        span = scheme.element.max * (scheme.inner.format.max if two else 1.0)
        amax = one.input * span
        broken = not (isfinite(one.input) and one.input > 0)
        if broken or not SMALL <= amax <= LARGE:
            yield Finding(
                f"the static input scale is {one.input:g}" + ("" if broken else f": inputs up to {amax:.3g}"),
                tensor=tensor_of(subject, name, "input"), got=f"{one.input:.6g}", remedy=CALIBRATE,
                wanted=f"{SMALL / span:.3g} to {LARGE / span:.3g}", severity="error" if broken else None,
                facts={"amax": amax},
            )  # fmt: skip
