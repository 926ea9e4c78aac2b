"""Rules about coverage: how much is quantized, and whether it is what should be.

    share of parameters = Σ quantized / Σ all         share of bytes = bytes of quantized layers / all bytes

Embeddings, heads, routers, norms and biases take few bytes and much harm, so quantizers leave them alone. Linear
layers of attention, MLP and experts are what quantization is for; where most of those are plain, something was
skipped, and stacked experts are what is skipped most. ``structure`` asks whether the model is complete,
``coverage_parent`` compares with the parent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import prod

import numpy as np

from narrowcast.audit import coverage_parent, structure, structure_layers, structure_shapes  # noqa: F401 - their rules are here too
from narrowcast.audit.findings import Finding, Severity
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.jobs.coded import Logical
from narrowcast.jobs.matching import CACHE_SCALE, INPUT_SCALE, Held
from narrowcast.model.roles import Role, classify
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import formats
from narrowcast.store.checkpoint import Checkpoint, text_config
from narrowcast.store.dtypes import DTYPES

# Linear layers that quantizers are made for.
_MEANT = frozenset({Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT})
FLOOR = 0.5  # the share of those layers below which something was skipped
_CORRECTION = re.compile(r"(e_score_correction_bias|expert_bias|moe_statics\.\w+)$")
# Containers whose reader in vLLM 0.32 builds the head as a plain one (only LinearBase gets a method there).
_PLAIN_HEADS = frozenset({"fp8", "fbgemm-fp8", "mxfp4", "torchao"})
_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_CODES = ("F8", "F6", "F4", "I8", "U8", "I16", "U16", "I32", "U32", "BOOL")


def sized(subject: Subject) -> dict[str, Held]:
    """Tensors of the model, without scales of inputs and caches."""
    small = (INPUT_SCALE, CACHE_SCALE)
    return {name: one for name, one in subject.held.items() if one.role not in small}


@rule("NC400", "info")
def quantized_share(subject: Subject) -> Iterator[Finding]:
    """How much of the model is quantized.

    What: the share of parameters and of bytes that lie in quantized layers, by scheme.
    Why: the size of the file and the speed of an engine follow from it, and a share that is lower than expected says
    that layers were skipped.
    Fix: nothing is wrong by itself; `narrowcast inspect` lists every layer.
    False alarm: it is a number, no complaint.
    """
    tensors = sized(subject)
    if not subject.quantized:
        return
    count = {name: prod(one.shape) for name, one in tensors.items()}
    size = sum(one.nbytes for one in tensors.values())
    coded = [name for name, one in tensors.items() if one.coded is not None]
    params, nbytes = sum(count[n] for n in coded), sum(tensors[n].nbytes for n in coded)
    total = max(sum(count.values()), 1)
    schemes: dict[str, int] = {}
    for name in coded:
        scheme = tensors[name].scheme.removesuffix(
            "_divisor"
        )  # how its outer scale is stored is no scheme of its own
        schemes[scheme] = schemes.get(scheme, 0) + count[name]
    said = ", ".join(
        f"{scheme} {n / total:.1%}" for scheme, n in sorted(schemes.items(), key=lambda item: -item[1])
    )
    yield Finding(
        f"{params / total:.1%} of the parameters and {nbytes / max(size, 1):.1%} of the bytes are quantized ({said})",
        count=len(coded),
        facts={"parameters": params, "total_parameters": total, "bytes": nbytes, "total_bytes": size,
               "bits_per_parameter": round(8 * size / total, 3), "schemes": schemes},
    )  # fmt: skip


@rule("NC401", "warning")
def low_coverage(subject: Subject) -> Iterator[Finding]:
    """Most of the linear layers are not quantized.

    What: less than half of the parameters in attention, MLP and experts are quantized, in a checkpoint whose config
    asks for quantization.
    Why: the model is nearly as large and slow as before. Patterns that matched nothing, and experts that are stacked
    in 3-D tensors instead of linear layers, are passed over without a word.
    Fix: `narrowcast quantize` takes stacked experts apart; check ignore lists for entries that match too much.
    False alarm: recipes that quantize one kind of layer on purpose.
    """
    meant = {n: one for n, one in sized(subject).items() if one.role in _MEANT and len(one.shape) == 2}
    if not subject.quantized or not meant:
        return
    by_role: dict[str, int] = {}
    done = total = 0
    for one in meant.values():
        size = prod(one.shape)
        total += size
        if one.coded is not None:
            done += size
        else:
            by_role[one.role] = by_role.get(one.role, 0) + size
    if done >= FLOOR * total:
        return
    role, size = max(by_role.items(), key=lambda item: item[1])
    first = next(name for name, one in meant.items() if one.coded is None and one.role == role)
    yield Finding(
        f"only {done / total:.1%} of the parameters in linear layers are quantized", tensor=first,
        got=f"{size / total:.1%} of them are plain layers of role {role}", wanted=f"at least {FLOOR:.0%}",
        remedy="narrowcast quantize PARENT OUT, which quantizes stacked experts too",
        count=sum(one.coded is None for one in meant.values()),
        facts={"share": done / total, "plain": by_role},
    )  # fmt: skip


@rule("NC402", "warning")
def skipped_experts(subject: Subject) -> Iterator[Finding]:
    """Stacked experts are plain while other layers are quantized.

    What: experts in 3-D tensors ([experts, out, in]) were left as they are.
    Why: tools that look for linear layers do not see a 3-D parameter, and in such models nearly all weights are
    there. Engines that build all experts with the config's scheme then look for scales that do not exist.
    Fix: `narrowcast quantize` quantizes stacks expert by expert.
    False alarm: a config that excludes the experts on purpose; it is an information then.
    """
    opened = subject.opened
    if opened is None or not subject.quantized:
        return
    stacks = [m for m in opened.modules if m.experts is not None]
    plain = [m for m in stacks if not isinstance(opened.entries[m.tensor], Logical)]
    if not plain:
        return
    takes = opened.contents.takes
    named = [split.name for split in plain[0].splits()] or [plain[0].name]
    meant = takes is None or any(takes(name) for name in named)
    total = sum(prod(entry.shape) for entry in opened.entries.values())
    size = sum(prod(m.shape) for m in plain)
    yield Finding(
        f"{len(plain)} of {len(stacks)} stacks of experts are plain, {size / max(total, 1):.1%} of the model",
        tensor=plain[0].tensor, got=f"{list(plain[0].shape)}", wanted="codes and scales for every expert",
        count=len(plain), severity=None if meant else "info",
        remedy="narrowcast quantize PARENT OUT, which quantizes stacked experts too",
    )  # fmt: skip


@rule("NC403", "warning")
def other_dtype(subject: Subject) -> Iterator[Finding]:
    """A plain matrix is in a dtype that the model is not in.

    What: a weight that is not quantized is stored as plain integers (an error), as fp16 where most of the model is
    bf16, or, as an information, as bf16 where most is fp16.
    Why: no engine takes integers for weights without a scale; it reads bits or numbers, both wrong. bf16 values beyond
    65504 are infinite as fp16, and tiny ones vanish.
    Fix: restore the tensor from the parent.
    False alarm: models that mix dtypes by design, with engines that keep each.
    """
    said = model_dtype(subject)
    other: dict[tuple[str, bool], list[str]] = {}
    for name, one in sized(subject).items():
        if one.dtype is None or one.role == Role.BIAS or len(one.shape) < 2 or subject.container == "gguf":
            continue
        integers = one.dtype.format not in ("bf16", "fp16", "fp32", "fp64") and one.kind in (
            "Linear",
            "Embedding",
        )
        if integers or (one.dtype.name, said) in (("F16", "BF16"), ("BF16", "F16")):
            other.setdefault((one.dtype.name, integers), []).append(name)
    for (dtype, integers), names in other.items():
        severity: Severity = "error" if integers else "warning" if dtype == "F16" else "info"
        yield Finding(
            f"{len(names)} plain matrices are {dtype}, and the model is {said}", tensor=names[0], got=dtype,
            wanted=said, count=len(names), severity=severity, remedy="restore them from the parent",
        )  # fmt: skip


def model_dtype(subject: Subject) -> str | None:
    """The dtype that most plain vectors and matrices of floats have, scales not among them; where two have as many,
    what the config says."""
    pieces = subject.contents.consumed if subject.contents is not None else frozenset()
    names = [
        entry.dtype.name for name, entry in subject.checkpoint.entries.items()
        if entry.dtype.name in _FLOATS and entry.shape and name not in pieces and "scale" not in name.rpartition(".")[2]
    ]  # fmt: skip
    counts = Counter(names).most_common(2)
    if len(counts) == 2 and counts[0][1] == counts[1][1]:
        config, text = subject.config, text_config(subject.config)
        said = (
            text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
        )
        return next((name for name, torch in _FLOATS.items() if torch == said), None)
    return counts[0][0] if counts else None


@rule("NC405", "info")
def quantized_head(subject: Subject) -> Iterator[Finding]:
    """The output head is quantized.

    What: lm_head is in codes. A warning where vLLM has no method for a quantized head in this container.
    Why: errors of the head go straight into the probabilities, and it is a small part of large models. vLLM 0.32 reads
    it in compressed-tensors, ModelOpt, GPTQ, AWQ and auto-round; in FP8, FBGEMM, MXFP4 and torchao configs it builds
    a plain head and takes the codes for numbers.
    Fix: leave the head out: `narrowcast quantize PARENT OUT --ignore lm_head`.
    False alarm: FP8 heads are nearly free of loss where the engine reads them.
    """
    for name, one in subject.quantized.items():
        if one.role == Role.LM_HEAD:
            unread = subject.container in _PLAIN_HEADS
            yield Finding(
                "the output head is quantized" + (", which vLLM does not read in this container" if unread else ""),
                tensor=name, got=one.scheme, wanted="a plain head" if unread else None,
                severity=("error" if subject.engine == "vllm" else "warning") if unread else None,
                remedy="keep it: narrowcast quantize PARENT OUT --ignore lm_head" if unread else None,
            )  # fmt: skip


@rule("NC406", "warning")
def quantized_embedding(subject: Subject) -> Iterator[Finding]:
    """An embedding table is quantized.

    What: a table that is looked up by token or position is in codes.
    Why: engines look rows up in a plain table. vLLM 0.32 decodes integer weights with group or channel scales in
    compressed-tensors and takes every other table for numbers; transformers needs the library of the container.
    Fix: leave embeddings out.
    False alarm: GGUF files, whose readers decode rows; there, and for integers in compressed-tensors, it is an
    information.
    """
    for name, one in subject.quantized.items():
        if one.role != Role.EMBEDDING:
            continue
        integers = one.scheme.startswith(("int", "uint")) and subject.container == "compressed-tensors"
        read = subject.container == "gguf" or (integers and subject.engine in (None, "vllm"))
        yield Finding(
            "an embedding table is quantized", tensor=name, got=one.scheme, wanted="a plain table",
            severity="info" if read else ("error" if subject.engine == "vllm" else None),
            remedy="quantize again from the parent without it",
        )  # fmt: skip


@rule("NC407", "warning")
def quantized_router(subject: Subject) -> Iterator[Finding]:
    """A router is quantized.

    What: the matrix that chooses experts is in codes.
    Why: which experts run is decided by small differences. A 4-bit router of 256 experts in groups of 32 chose another
    set of 8 for 55.6 % of random inputs, against 1.2 % for bf16. Engines build routers as plain layers, too.
    Fix: leave routers out; they are a millionth of the model.
    False alarm: 8-bit routers change far fewer choices; measure with `narrowcast compare`.
    """
    for name, one in subject.quantized.items():
        if one.role == Role.ROUTER:
            yield Finding(
                "the router is quantized", tensor=name, got=one.scheme, wanted="a plain layer",
                remedy="quantize again from the parent without routers",
            )  # fmt: skip


@rule("NC408", "warning")
def narrowed_norm(subject: Subject) -> Iterator[Finding]:
    """A norm or a bias is narrower than the model.

    What: the weight of a norm, or a bias, is in FP8 or integers (an error), or in fp16 while most of the model is bf16.
    Why: no engine has scales for such a vector and takes the codes for numbers. fp16 cannot hold what bf16 can: large
    norm weights overflow and small ones vanish.
    Fix: restore the tensor from the parent.
    False alarm: models that mix dtypes by design.
    """
    config = subject.config
    said = model_dtype(subject)
    for name, entry in subject.checkpoint.entries.items():
        if (
            len(entry.shape) != 1 + name.endswith("_proj_bias") or subject.container == "gguf"
        ):  # of a stack: [E, out]
            continue
        codes = entry.dtype.name.startswith(_CODES)
        if not codes and not (entry.dtype.name == "F16" and said == "BF16"):
            continue
        role = classify(name, entry.shape, config)
        if not name.endswith((".weight", "bias")) or (
            role not in (Role.NORM, Role.BIAS) and not name.endswith("bias")
        ):
            continue
        yield Finding(
            f"a vector of role {role} is {'in codes or integers without a scale' if codes else 'fp16 in a bf16 model'}",
            tensor=name, got=entry.dtype.name, wanted="BF16 or F32", severity="error" if codes else None,
            remedy="restore the tensor from the parent",
        )  # fmt: skip


@rule("NC409", "warning", reads="scales")
def coarse_correction(subject: Subject) -> Iterator[Finding]:
    """A router's correction bias lost distinct values.

    What: the bias that balances experts (e_score_correction_bias) has fewer distinct values than the parent's; without
    a parent: it is 16 bits wide, and half of its values or more are duplicates.
    Why: families keep it in fp32, because its values lie close together: near 4 the step of bf16 is 1/32. Experts that
    were told apart then tie, and other ones are chosen.
    Fix: restore the tensor in fp32 from the parent.
    False alarm: models that were never trained with it have all zeros; that is not told.
    """
    parent = subject.parent.checkpoint if subject.parent is not None else None
    for name, entry in subject.checkpoint.entries.items():
        if not _CORRECTION.search(name) or entry.dtype.format not in ("fp32", "bf16", "fp16"):
            continue
        here = _distinct(subject.checkpoint, name)
        before = _distinct(parent, name) if parent is not None and name in parent.entries else None
        count = prod(entry.shape)
        if before is None:
            wide = entry.dtype is DTYPES["F32"]
            lost = not wide and count >= 8 and 1 < here <= count // 2
        else:
            lost = here < before
        if lost:
            yield Finding(
                f"{here} distinct values for {count} experts" + (f", the parent has {before}" if before else ""),
                tensor=name, got=entry.dtype.name, wanted="F32, as the family keeps it",
                remedy="restore the tensor from the parent", count=count - here,
                facts={"distinct": here, "parent_distinct": before},
            )  # fmt: skip


def _distinct(checkpoint: Checkpoint, name: str) -> int:
    fmt = checkpoint.entries[name].dtype.format
    assert fmt is not None
    return int(np.unique(widen(np.ascontiguousarray(checkpoint.array(name)), formats[fmt])).size)
