"""Rules about the dtype that config.json says: what is stored, and what a float16 model can hold.

    fp16    5 bits of exponent    largest 65504         bf16    8 bits    largest 3.4e38

bf16 was made for the range of fp32; a model that was trained in it may need that range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.numbers.formats import FP16
from narrowcast.store.checkpoint import text_config

_NAMES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
_STORED = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}


def said_dtype(subject: Subject) -> str | None:
    """The dtype of config.json, or of its text part; None where it says none that is known."""
    for part in (subject.config, text_config(subject.config)):
        said = part.get("dtype") or part.get("torch_dtype")
        if said is not None:
            return _NAMES.get(str(said).removeprefix("torch."))
    return None


def _in_fp16(subject: Subject) -> str | None:
    """Why the model is going to run in fp16, or None."""
    if said_dtype(subject) == "fp16":
        return "config.json says float16"
    if subject.gpu is not None and subject.gpu.vendor == "nvidia" and "bf16" not in subject.gpu.formats:
        return f"{subject.gpu.name} has no bf16"
    return None


@rule("NC550", "warning")
def family_that_overflows(subject: Subject) -> Iterator[Finding]:
    """The model runs in float16, and its family overflows there.

    What: config.json says float16, or the GPU has no bf16, and models of this family are known to leave the range of
    fp16, which ends at 65504.
    Why: Hidden states become infinite, then NaN: the text is one token repeated, often exclamation marks.
    Fix: Say bfloat16 in config.json, or run with --dtype bfloat16; on GPUs without it, float32.
    False alarm: A model of the family whose activations stay small.
    """
    from narrowcast.hardware.overflow import fp16_families

    why = _in_fp16(subject)
    families = [subject.config.get("model_type"), text_config(subject.config).get("model_type")]
    family = next((str(name) for name in families if name in fp16_families), None)
    if why is None or family is None:
        return
    row = fp16_families[family]
    refused = f"; {', '.join(row.refused_by)} refuses it" if row.refused_by else ""
    yield Finding(
        f"{why}, and {family} overflows in it{refused}", tensor="config.json", got="float16",
        severity="error" if subject.engine in row.refused_by else None, wanted=f"bfloat16: {row.reason}",
        remedy="set dtype to bfloat16 in config.json, or run with --dtype bfloat16", facts={"source": row.source},
    )  # fmt: skip


@rule("NC551", "error", reads="codes")
def beyond_float16(subject: Subject) -> Iterator[Finding]:
    """A tensor has values beyond the range of float16, and the model runs in it.

    What: A weight, a norm or a buffer holds magnitudes above 65504, and config.json says float16, or the GPU has no
    bf16.
    Why: They become infinite when the model is loaded, and NaN soon after.
    Fix: Say bfloat16 in config.json, or run with --dtype bfloat16.
    False alarm: A buffer that the engine keeps in fp32.
    """
    why = _in_fp16(subject)
    if why is None:
        return
    found = {name: scan.amax for name, scan in subject.floats.items()}
    found |= {name: one.amax for name, one in subject.matrices.items() if one.amax is not None}
    for name, amax in found.items():
        if amax > FP16.max:
            yield Finding(
                f"amax {amax:.6g} is beyond float16, and {why}", tensor=name, got=f"{amax:.6g}",
                wanted=f"at most {FP16.max:g}",
                remedy="set dtype to bfloat16 in config.json, or run with --dtype bfloat16",
            )  # fmt: skip


@rule("NC552", "warning")
def dtype_beside_the_config(subject: Subject) -> Iterator[Finding]:
    """config.json says another dtype than most of the unquantized weights have.

    What: By bytes, most plain matrices are stored in one dtype and config.json names another.
    Why: Engines convert what they load: bf16 to float16 loses range, float16 to bf16 three bits of every weight, and
    float32 doubles the memory.
    Fix: Say in config.json what is stored.
    False alarm: A model that is meant to run in another dtype than it is stored in. float32, and float16 beside integer
    weights, are only mentioned.
    """
    said, entries = said_dtype(subject), subject.checkpoint.entries
    sizes: Counter[str] = Counter()
    for name, layer in subject.layers.items():
        entry = entries.get(f"{name}.weight") or entries.get(name)
        if not layer.quantized and entry is not None and entry.dtype.name in _STORED:
            sizes[_STORED[entry.dtype.name]] += entry.nbytes
    if said is None or not sizes:
        return
    stored, size = sizes.most_common(1)[0]
    # Kernels for integers were made for fp16, and their quantizers say so beside weights that stay bf16.
    usual = said == "fp16" and subject.container in ("awq", "gptq", "auto-round")
    if stored != said and 2 * size > sum(sizes.values()):
        yield Finding(
            f"config.json says {said}, and {size / sum(sizes.values()):.0%} of the plain weights are {stored}",
            severity="info" if usual or "fp32" in (said, stored) else None, tensor="config.json", got=said,
            wanted=stored,
            remedy=f"set dtype to {stored} in config.json, if that is what it was trained in",
        )  # fmt: skip
