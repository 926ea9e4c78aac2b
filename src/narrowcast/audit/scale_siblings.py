"""Rules about layers that engines load as one, and that must share a scale: q, k, v; gate, up; w1, w3; MLA's pairs.

    NVFP4        one outer scale is kept for all, block scales and codes as they are: members decode wrong by the ratio
    FP8 tensor   weights are decoded and quantized again under the largest scale: 2 to 4 dB, or none for powers of two
    inputs       one static scale is kept for all

Which one: vLLM takes the largest stored number, which is the largest scale where it multiplies and the smallest where
it divides; of experts the first projection's. TensorRT-LLM asserts that they are equal.

Source: vLLM 0.32 (compressed_tensors_w4a4_nvfp4.py, modelopt.py, w8a8_utils.py requantize_with_max_scale). The loss of
quantizing FP8 twice was computed for normal weights: 31.6 dB once, 27.7 to 29.3 dB twice for ratios from 1.1 to 1000.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.scale_inputs import INPUTS
from narrowcast.audit.scale_pieces import codes_of
from narrowcast.audit.scale_sizes import scheme_of, tensor_of
from narrowcast.audit.subject import Subject, Summary
from narrowcast.model.fused import FUSING, fused_groups
from narrowcast.numbers.formats import E4M3FN

SAME = 1.01  # an error of a hundredth, far below that of four bits
FAR = 4096.0  # an amax of 448 / 4096: the weights of most layers are then subnormal, below 2^-6
Siblings = tuple[tuple[str, ...], Mapping[str, float]]


def _groups(
    subject: Subject, fits: Callable[[str, Summary], bool], scale: Callable[[Summary], float | None]
) -> Iterator[Siblings]:
    """Groups that an engine fuses and whose members differ in a scale, with each member's."""
    if subject.container not in FUSING or subject.engine == "transformers":
        return
    values = {
        name: value
        for name, one in subject.matrices.items()
        if (value := scale(one)) is not None and 0 < value < float("inf") and fits(name, one)
    }
    for group in fused_groups(values):
        found = {name: values[name] for name in group}
        if len(set(found.values())) > 1:
            yield group, found


def _finding(
    subject: Subject, siblings: Siblings, piece: str, said: str = "fused siblings differ, ratio {ratio:.4g}"
) -> Finding:
    group, values = siblings
    least = min(group, key=lambda name: values[name])
    leaves = [name.rpartition(".")[2] for name in group]
    tensor = tensor_of(subject, least, piece)
    divides = tensor.endswith("weight_global_scale")  # told as the file has it
    stored = [1 / values[name] if divides else values[name] for name in group]
    got = ", ".join(f"{leaf} {value:.6g}" for leaf, value in zip(leaves, stored, strict=True))
    ratio = max(values.values()) / values[least]
    return Finding(
        said.format(ratio=ratio), tensor=tensor, got=got, count=len(group),
        wanted=f"one scale for {', '.join(leaves)}", facts={"ratio": ratio, "siblings": list(group)},
    )  # fmt: skip


def _with(finding: Finding, **changes: object) -> Finding:
    return Finding(**(vars(finding) | changes))  # type: ignore[arg-type]


@rule("NC150", "error", reads="scales")
def fused_outer_scales(subject: Subject) -> Iterator[Finding]:
    """Fused siblings have different outer scales, and engines keep one.

    What: q, k and v, or gate and up, or another group that is loaded as one matrix, have different NVFP4 outer scales.
    Why: vLLM keeps the largest stored number and warns once, so every other member decodes wrong by the ratio;
    TensorRT-LLM stops. A ratio below 1.01 is a warning.
    Fix: `narrowcast repair` gives them one outer scale and moves the ratio into the block scales; codes stay.
    False alarm: an engine that runs every projection by itself, such as transformers (`--for transformers`).
    """

    def two(name: str, one: Summary) -> bool:
        return len(scheme_of(subject, name).scales) == 2

    for siblings in _groups(subject, two, lambda one: one.outer):
        found = _finding(subject, siblings, "outer")
        near = found.facts["ratio"] < SAME and subject.engine != "tensorrt-llm"
        yield _with(
            found, severity="warning" if near else None, repair="fused_outer",
            remedy="`narrowcast repair` gives them one outer scale; codes stay as they are",
        )  # fmt: skip


@rule("NC151", "info", reads="scales")
def fused_tensor_scales(subject: Subject) -> Iterator[Finding]:
    """Fused FP8 siblings have different scales, and engines quantize them again.

    What: members of a group that is loaded as one matrix have different FP8 scales per tensor.
    Why: vLLM and TensorRT-LLM decode each member and quantize it again under the largest scale. That costs 2 to 4 dB of
    some 31, whatever the ratio, and nothing where it is a power of two; beyond 4096, weights underflow (a warning).
    Fix: quantize again with one scale for the group: `narrowcast quantize` shares it.
    False alarm: it is a small loss that most FP8 checkpoints of this kind have.
    """

    def tensor(name: str, one: Summary) -> bool:
        scheme = scheme_of(subject, name)
        return scheme.inner.tile == (0, 0) and scheme.element is E4M3FN

    for siblings in _groups(subject, tensor, lambda one: one.outer):
        found = _finding(subject, siblings, "outer")
        yield _with(
            found, severity="warning" if found.facts["ratio"] > FAR else None,
            said=f"{found.said}: engines quantize again and lose 2 to 4 dB, unless it is a power of two",
            remedy="quantize again with one scale for the group",
        )  # fmt: skip


@rule("NC152", "warning", reads="scales")
def fused_input_scales(subject: Subject) -> Iterator[Finding]:
    """Fused siblings have different static input scales, though they have one input.

    What: members of a group that is loaded as one matrix have different input scales, or only some have one (an error).
    Why: they read the same input, so calibration should have found one amax; engines keep one scale for all. Where it
    divides (compressed-tensors' NVFP4) vLLM keeps the smallest amax, and larger inputs clip; TensorRT-LLM stops for
    NVFP4. For FP8 the largest is kept and nothing clips: an information.
    Fix: calibrate again, or give all members the scale of the largest amax.
    False alarm: none known for NVFP4.
    """
    for siblings in _groups(subject, lambda name, one: True, lambda one: one.input):
        coded = subject.quantized[siblings[0][0]].coded
        assert coded is not None
        scheme = coded.stored.linear.input
        two = scheme is not None and len(scheme.scales) == 2
        severity = "info" if not two else "error" if subject.engine == "tensorrt-llm" else None
        yield _with(
            _finding(subject, siblings, "input", "input scales of fused siblings differ, ratio {ratio:.4g}"),
            severity=severity, remedy="give all of them the scale of the largest amax, or calibrate again",
        )  # fmt: skip
    yield from _without_input(subject)


def _without_input(subject: Subject) -> Iterator[Finding]:
    """Siblings without an input scale beside one that has it; the engine's parameter stays as it was allocated."""
    if subject.container not in FUSING or subject.engine == "transformers":
        return
    pieces = {
        name: of
        for name, of in subject.pieces.items()
        if codes_of(of) is not None and ".experts." not in name
    }
    for group in fused_groups(pieces):
        endings = [next((e for e in INPUTS if e in pieces[name]), None) for name in group]
        given = next((ending for ending in endings if ending is not None), None)
        for name, ending in zip(group, endings, strict=True):
            if given is not None and ending is None:
                yield Finding(
                    "the input scale is missing that its fused sibling has", tensor=f"{name}{given}", severity="error",
                    got="no input scale", wanted="one for each member of the group",
                    remedy="give it the sibling's: they read the same input; or calibrate again",
                )  # fmt: skip
