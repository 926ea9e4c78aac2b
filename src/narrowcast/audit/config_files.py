"""Rules about configs in more than one place: they must say the same, since each engine reads another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from narrowcast.audit.config_said import beside, method, source
from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.containers.contents import Source
from narrowcast.containers.modelopt.config import BESIDE as MODELOPT
from narrowcast.containers.modelopt.config import Labels, labels
from narrowcast.errors import NarrowcastError
from narrowcast.store.checkpoint import text_config
from narrowcast.store.folder import some

_FIELDS = {
    "algorithm": "the algorithm", "kv": "the KV cache", "exclude": "what is left out", "layers": "the layers",
    "group": "the group size",
}  # fmt: skip


def _labels(subject: Subject) -> tuple[Labels, Labels] | None:
    """What hf_quant_config.json and config.json say, where both speak of ModelOpt and can be read."""
    said = source(subject)
    if MODELOPT not in said.beside or not said.config or method(subject) != "modelopt":
        return None
    try:
        file = labels(Source(subject.checkpoint, {}, {MODELOPT: said.beside[MODELOPT]}))
        return file, labels(Source(subject.checkpoint, said.config))
    except NarrowcastError:
        return None


@rule("NC530", "error")
def modelopt_configs_disagree(subject: Subject) -> Iterator[Finding]:
    """hf_quant_config.json and config.json say different things.

    What: The algorithm, the KV cache, the group size, the excluded or the named layers differ between ModelOpt's file
    and the block in config.json.
    Why: TensorRT-LLM believes the file and vLLM the block, so that one of them loads the model wrongly.
    Fix: Correct the one that the tensors do not follow; ``narrowcast repair`` writes both from the tensors.
    False alarm: None known.
    """
    both = _labels(subject)
    for key, what in _FIELDS.items() if both is not None else ():
        assert both is not None
        file, block = getattr(both[0], key), getattr(both[1], key)
        if key == "group" and None in (file, block):
            continue
        if key == "exclude":
            file, block = sorted(set(file) - set(block)), sorted(set(block) - set(file))
        if file != block:
            yield Finding(
                f"{MODELOPT} and config.json disagree about {what}", tensor=MODELOPT, got=f"{_words(file)} in the file",
                wanted=f"{_words(block)} as in config.json", repair="config",
                remedy="`narrowcast repair` writes both from the tensors",
            )  # fmt: skip


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{name} {algorithm}" for name, (algorithm, _) in sorted(value.items())]
    return (
        some([str(one) for one in value], 3) if isinstance(value, (list, tuple)) else str(value or "")
    ) or "nothing"


# One name for what quantizers call differently.
_ALIASES = {"w_bit": "bits", "q_group_size": "group_size"}
_COMPARED = (
    "bits", "group_size", "sym", "desc_act", "zero_point", "checkpoint_format", "data_type",
    "packing_format", "act_bits",
)  # fmt: skip


def _method_of(block: Mapping[str, Any], name: str) -> str:
    """The method that a file beside config.json is of; empty where it does not show."""
    if name == MODELOPT:
        return "modelopt"
    said = str(block.get("quant_method") or "").lower().replace("_", "-")
    return said or ("awq" if "w_bit" in block else "gptq" if "bits" in block and "desc_act" in block else "")


@rule("NC531", "error")
def stray_quantizer_file(subject: Subject) -> Iterator[Finding]:
    """A quantizer's file beside config.json is of another quantization.

    What: quantize_config.json, quant_config.json, quantization_config.json or hf_quant_config.json names another method
    or other bits, groups or kinds of zero points than config.json: it is left over from another version of the model.
    Why: Engines look into these files where config.json is silent, TensorRT-LLM even before it.
    Fix: Remove or correct the file; ``narrowcast repair`` does.
    False alarm: A file that no engine of yours reads; of another method it is a warning only, unless it is ModelOpt's.
    """
    block, by = subject.quantization, method(subject)
    if not block:
        return
    for name, file in beside(subject).items():
        theirs = _method_of(file, name)
        if theirs and by and theirs != by:
            yield Finding(
                f"{name} is of {theirs}, and config.json says {by}", tensor=name, repair="config",
                severity=None if name == MODELOPT else "warning", got=theirs, wanted=by,
                remedy=f"remove {name}; `narrowcast repair` does",
            )  # fmt: skip
            continue
        ours, said = (
            {_ALIASES.get(k, k): v for k, v in part.items() if v is not None} for part in (block, file)
        )
        differ = [key for key in _COMPARED if key in ours and key in said and ours[key] != said[key]]
        if differ:
            yield Finding(
                f"{name} and config.json disagree about {', '.join(differ)}", tensor=name, repair="config",
                got=", ".join(f"{key} {said[key]}" for key in differ),
                wanted=", ".join(f"{key} {ours[key]} as in config.json" for key in differ),
                remedy="`narrowcast repair` writes what the tensors follow",
            )  # fmt: skip


@rule("NC532", "error")
def two_blocks(subject: Subject) -> Iterator[Finding]:
    """config.json has two quantization blocks that differ.

    What: There is a block at the top and one in the text model's part, or a quantization_config beside an old
    compression_config, and they do not say the same.
    Why: Engines read one of them, each another.
    Fix: Remove the one that the tensors do not follow; ``narrowcast repair`` does.
    False alarm: None known.
    """
    config, text = subject.config, text_config(subject.config)
    parts = {"": config} if text is config else {"": config, "the text model's ": text}
    found = [
        (f"{where}{key}", block) for where, part in parts.items()
        for key in ("quantization_config", "compression_config") if isinstance(block := part.get(key), Mapping)
    ]  # fmt: skip
    for (first, one), (second, other) in pairwise(found):
        differ = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
        if differ:
            yield Finding(
                f"{first} and {second} disagree about {some(differ, 4)}", tensor="config.json", repair="config",
                got=f"two blocks that differ in {len(differ)} keys", wanted="one block, or two that are equal",
                remedy="`narrowcast repair` keeps the one that the tensors follow",
            )  # fmt: skip
