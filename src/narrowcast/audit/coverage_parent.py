"""Rules about coverage that need the parent's headers: what was lost, what came in, what changed its shape or dtype.

Names are those of the unquantized model on both sides, expert by expert, so a stack and single experts meet. Layers
that the container refuses, and shards that are missing, have findings of their own and are not lost here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from narrowcast.audit.findings import Finding, Severity
from narrowcast.audit.found import module_of
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.jobs.matching import CACHE_SCALE, INPUT_SCALE, Held
from narrowcast.model.roles import Role
from narrowcast.numbers.formats import formats
from narrowcast.store.checkpoint import text_config
from narrowcast.store.folder import some

MANY = 20  # findings of one kind that are told one by one
_SMALL = (INPUT_SCALE, CACHE_SCALE, Role.ROTARY)
_PLACES = (Role.MTP, Role.VISION, Role.AUDIO)


def _names(tensors: dict[str, Held]) -> dict[str, Held]:
    return {name: one for name, one in tensors.items() if one.role not in _SMALL}


def _lost(subject: Subject) -> dict[str, Held]:
    """What the parent stores and the checkpoint neither has, ties, nor was seen to be refused for."""
    if subject.parent is None or subject.opened is None or not subject.found.whole:
        return {}
    have = {*subject.held, *(module.tied for module in subject.modules if module.tied)}
    aside = {module_of(name) for name in subject.found.set_aside}
    aliases = {module.tied for module in subject.parent.modules if module.tied} & {"lm_head"}
    found = {}
    for name, one in _names(subject.originals).items():
        stack = re.sub(r"\.\d+\.(gate|up)_proj$", ".gate_up_proj", name)
        stack = re.sub(r"\.\d+\.down_proj$", ".down_proj", stack)
        if name in have or name in aliases or aside & {module_of(name), stack}:
            continue
        found[name] = one
    return found


@rule("NC450", "error", parent=True)
def lost_tensor(subject: Subject) -> Iterator[Finding]:
    """A tensor of the parent is not in the checkpoint.

    What: a layer, norm, bias or embedding that the parent stores is stored here neither plain nor quantized.
    Why: engines stop, or initialize it; a bias that is missing becomes zero.
    Fix: copy the tensor from the parent.
    False alarm: a parent of another layout, whose names are not those of the checkpoint.
    """
    lost = {name: one for name, one in _lost(subject).items() if one.role not in _PLACES}
    yield from _grouped(
        lost, "the parent has this tensor and the checkpoint has not", "copy it from the parent"
    )


def _grouped(
    found: dict[str, Held], said: str, remedy: str | None, severity: Severity | None = None
) -> Iterator[Finding]:
    """One finding for each tensor; of very many one for each kind, names without their numbers."""
    if len(found) <= MANY:
        for name, one in found.items():
            yield Finding(
                said, tensor=name, wanted=f"{one.scheme} {list(one.shape)}", remedy=remedy, severity=severity
            )
        return
    kinds: dict[str, list[str]] = {}
    for name in found:
        kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    for kind, names in kinds.items():
        yield Finding(
            said,
            tensor=names[0],
            got=f"{len(names)} tensors {kind}",
            remedy=remedy,
            count=len(names),
            severity=severity,
        )


@rule("NC451", "error", parent=True)
def lost_tower(subject: Subject) -> Iterator[Finding]:
    """A tower or the prediction layers of the parent are not in the checkpoint.

    What: tensors of the vision or audio tower, or of multi-token prediction, that the parent has are missing.
    Why: without a tower an engine stops or answers about pictures that it does not see. Without prediction layers it
    cannot draft, which is a warning: answers stay the same.
    Fix: copy the tensors from the parent; `narrowcast quantize` keeps them.
    False alarm: a text-only model that was taken out of a larger one on purpose, with a config that says so.
    """
    lost = _lost(subject)
    for role in _PLACES:
        names = [name for name, one in lost.items() if one.role == role]
        if not names:
            continue
        total = sum(one.role == role for one in _names(subject.originals).values())
        what = "multi-token prediction" if role == Role.MTP else f"the {role} tower"
        yield Finding(
            f"{len(names)} of {total} tensors of {what} are missing", tensor=names[0], got=f"no {some(names, 3)}",
            severity="warning" if role == Role.MTP else None, count=len(names),
            remedy="quantize again with a tool that keeps them, or copy them from the parent",
        )  # fmt: skip


@rule("NC452", "warning", parent=True)
def added_tensor(subject: Subject) -> Iterator[Finding]:
    """The checkpoint has a tensor that the parent has not.

    What: a plain or quantized tensor without a counterpart; for biases of zeros it is an information, since some
    quantizers write them for all.
    Why: it is of another model, or a piece that no reader asks for; either the parent is the wrong one, or engines
    report unexpected weights and some stop.
    Fix: give the parent that the checkpoint was made from; else remove the tensor.
    False alarm: rotations and other helpers that a newer quantizer adds.
    """
    if subject.parent is None or (subject.contents is not None and subject.contents.online):
        return
    originals = subject.originals
    tied = {module.tied for module in subject.parent.modules if module.tied}
    added = {n: one for n, one in _names(subject.held).items() if n not in originals and n not in tied}
    biases = {name: one for name, one in added.items() if one.role == Role.BIAS or name.endswith("bias")}
    rest = {name: one for name, one in added.items() if name not in biases}
    said = "the checkpoint has this tensor and the parent has not"
    yield from _grouped(rest, said, "give the parent that it was made from")
    counts = {name: one for name, one in biases.items() if _any(one)}
    yield from _grouped(
        counts, f"{said}, and it is not zero", "remove it, unless it corrects a bias on purpose"
    )
    yield from _grouped({n: one for n, one in biases.items() if n not in counts}, said, None, severity="info")


def _any(one: Held) -> bool:
    """Whether a bias has an element that is not zero."""
    return bool(np.any(one.values(0, one.source.shape[0])))


@rule("NC453", "error", parent=True)
def other_shape(subject: Subject) -> Iterator[Finding]:
    """A tensor has another shape than the parent's.

    What: rows or columns differ from those of the tensor of the same name in the parent.
    Why: the parent is another model, a stack of experts was taken apart in the wrong orientation, or the data were
    padded; an engine that builds the model from its config stops.
    Fix: give the parent that the checkpoint was made from; quantize again.
    False alarm: vocabularies that were resized on purpose.
    """
    originals = subject.originals
    for name, one in _names(subject.held).items():
        original = originals.get(name)
        if original is not None and _axes(one) != _axes(original):
            yield Finding(
                "another shape than the parent's", tensor=name, got=str(list(one.shape)),
                wanted=str(list(original.shape)), remedy="give the parent that the checkpoint was made from",
            )  # fmt: skip


def _axes(one: Held) -> list[int]:
    return [size for size in one.shape if size != 1]


@rule("NC454", "warning", parent=True)
def changed_dtype(subject: Subject) -> Iterator[Finding]:
    """What is not quantized has another dtype than in the parent.

    What: plain tensors of a role were cast: fp32 to bf16, bf16 to fp16 and so on. Casts that lose nothing, and a cast
    of the whole model that its config tells, are an information.
    Why: what is not quantized should keep its bytes. Routers, correction biases and state-space parameters are in fp32
    because 16 bits change what they decide; bf16 to fp16 overflows beyond 65504 and flushes what is tiny.
    Fix: copy these tensors from the parent.
    False alarm: families whose engines cast these tensors when they load them.
    """
    originals = subject.originals
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for name, one in _names(subject.held).items():
        original = originals.get(name)
        if original is None or one.dtype is None or original.dtype is None or one.dtype == original.dtype:
            continue
        kinds.setdefault((one.role, original.scheme, one.scheme), []).append(name)
    whole = (
        _dtype(subject.config) != _dtype(subject.parent.checkpoint.config or {}) if subject.parent else False
    )
    for (role, before, now), names in kinds.items():
        told = whole and _dtype(subject.config) == {
            "bf16": "bfloat16",
            "fp16": "float16",
            "fp32": "float32",
        }.get(now)
        yield Finding(
            f"{len(names)} plain tensors of role {role} are {now}, and {before} in the parent", tensor=names[0],
            got=now, wanted=before, count=len(names), severity="info" if told or _holds(now, before) else None,
            remedy="copy them from the parent",
        )  # fmt: skip


def _dtype(config: dict[str, object]) -> str:
    text = text_config(config)
    return str(
        text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    )


def _holds(now: str, before: str) -> bool:
    """Whether every value of one format is one of another."""
    if now not in formats or before not in formats:
        return False
    a, b = formats[now], formats[before]
    return a.exponent_bits >= b.exponent_bits and a.mantissa_bits >= b.mantissa_bits
