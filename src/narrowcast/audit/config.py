"""Rules about the quantization config, held against the tensors: what it says is there and what is.

    said quantized, stored plain       the engine looks for scales that do not exist, or reads floats as codes
    stored quantized, said plain       the engine reads codes as floats: it loads, and speaks nonsense

Containers refuse most of this in one sentence; the rules say which entry of the config it is and what would mend it.
Entries and patterns are in ``config_patterns``, fused layers in ``config_fused``, files that contradict each other and
keys in ``config_files`` and ``config_keys``, dtypes in ``config_dtypes``, sizes in ``config_sizes``.
"""

from __future__ import annotations

from collections.abc import Iterator

from narrowcast.audit import (
    config_dtypes,
    config_files,
    config_fused,
    config_keys,
    config_patterns,
    config_sizes,
)
from narrowcast.audit.config_said import Layer, beside, method, promised, promises, source
from narrowcast.audit.findings import Finding
from narrowcast.audit.opening import Refusal, module_of
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.containers.compressed_tensors.groups import Groups
from narrowcast.errors import NarrowcastError
from narrowcast.model.roles import Role
from narrowcast.store.checkpoint import text_config

__all__ = ["config_dtypes", "config_files", "config_fused", "config_keys", "config_patterns", "config_sizes"]

_UNSAID = ("plain", None)


@rule("NC500", "error")
def quantized_and_not_said(subject: Subject) -> Iterator[Finding]:
    """Tensors are quantized, and no config says so.

    What: The file has codes and scales, and neither config.json nor a file beside it names a quantization method.
    Why: An engine reads the codes as ordinary numbers, or stops at the first scale that it does not know.
    Fix: Restore the quantization_config that came with these tensors, or let ``narrowcast repair`` rebuild it.
    False alarm: None known; OpenAI's own gpt-oss files, which need no config, are left out.
    """
    if subject.checkpoint.config is None or method(subject) or subject.quantization:
        return
    if subject.container not in _UNSAID or beside(subject):
        return
    for name, layer in subject.layers.items():
        if layer.quantized:
            yield Finding(
                "quantized, and config.json has no quantization_config", tensor=name, got="no quantization_config",
                wanted="the block that belongs to these tensors", repair="config",
                remedy="`narrowcast repair` rebuilds the block; --container and --preset say which, where several fit",
            )  # fmt: skip


@rule("NC501", "error")
def plain_and_said_quantized(subject: Subject) -> Iterator[Finding]:
    """A layer is plain floats, and the config says that it is quantized.

    What: An attention or MLP layer, or an untied head, is stored as floats, the config quantizes it, and no ignore
    entry names it.
    Why: The engine builds a quantized layer, finds no scales, and refuses or multiplies with uninitialized ones. The
    head of compressed-tensors is a Linear to transformers and none to vLLM, which leaves it wide; without --for that is
    a warning.
    Fix: Add the layer to the ignore list (``narrowcast repair`` does), or quantize it.
    False alarm: A layer that the engine's model does not build, such as a draft head of a kind that is not known here.
    """
    takes = promised(subject)
    layers = [layer for layer in subject.layers.values() if layer.linear]
    if (
        takes is None
        or not promises(subject)
        or not any(layer.quantized for layer in subject.layers.values())
    ):
        return
    heads = _heads(subject) if subject.engine in (None, "transformers") else []
    for layer in [*layers, *heads]:
        if not layer.quantized and takes(layer.name):
            yield Finding(
                "stored as plain floats, and the config quantizes it", tensor=layer.name, got="no scales",
                severity="warning" if layer in heads and subject.engine is None else None,
                wanted="codes and scales, or its name among the kept layers", repair="ignore",
                remedy="`narrowcast repair` adds it to the ignore list",
            )  # fmt: skip


@rule("NC502", "error")
def leftover_config(subject: Subject) -> Iterator[Finding]:
    """The config says that the model is quantized, and every tensor is plain.

    What: There is a quantization_config, and no tensor has codes or scales: it was left over by a dequantization or a
    merge, or the weights are those of another model.
    Why: Engines look for scales in vain and refuse, or start from uninitialized ones.
    Fix: Remove the block and the quantizer's side files; ``narrowcast repair`` does.
    False alarm: A model that shall be quantized while it is loaded: bitsandbytes and torchao can, so there it is a
    warning only.
    """
    layers = subject.layers
    if not layers or not promises(subject) or any(layer.quantized for layer in layers.values()):
        return
    by = method(subject)
    if by == "gguf":  # a name that was made for the file, whose floats are floats
        return
    yield Finding(
        f"the config names {by}, and none of {len(layers)} matrices is quantized",
        severity="warning" if by in ("bitsandbytes", "torchao") else None, got=f"quant_method {by}",
        wanted="no quantization_config beside plain tensors", repair="config",
        remedy="`narrowcast repair` removes the block, or `narrowcast quantize` makes what it promises",
    )  # fmt: skip


def _heads(subject: Subject) -> list[Layer]:
    """Heads that are stored, where a config speaks of them by their class."""
    if (
        method(subject) != "compressed-tensors"
        or text_config(subject.config).get("tie_word_embeddings") is True
    ):
        return []
    return [layer for layer in subject.layers.values() if layer.role == Role.LM_HEAD]


_WAYS = {
    "name": "names it", "regex": "matches it", "glob": "matches it", "class": "is its class",
    "part": "is a part of its name", "parent": "names what it is in",
}  # fmt: skip


@rule("NC503", "error")
def quantized_and_kept(subject: Subject) -> Iterator[Finding]:
    """A layer is quantized, and the config keeps it unquantized.

    What: An entry of the ignore list takes a layer that has codes and scales: by its name, by a pattern, by a part of
    its name or by the name of what it is in.
    Why: The engine builds an unquantized layer and reads the codes as floats: it serves nonsense or refuses.
    Fix: Take the entry out or narrow it; ``narrowcast repair`` writes a list that fits the tensors.
    False alarm: An entry that one engine matches by parts of names and yours exactly; another engine still breaks.
    """
    if subject.quantization.get("quantized_layers"):
        return  # ModelOpt's list of layers goes before what is excluded
    by = {name: entry for entry, names in reversed(subject.kept.items()) for name in names}
    for name, layer in subject.layers.items():
        entry = by.get(name)
        if entry is None or not layer.quantized:
            continue
        way: str = entry.kind
        if way == "name" and name.startswith(f"{entry.text}."):
            way = "parent"
        elif way == "name" and not name.endswith(entry.text):
            way = "part"
        yield Finding(
            f"quantized, and {entry.key} keeps it: {entry.text!r} {_WAYS[way]}", tensor=name,
            got=f"{entry.text!r} in {entry.key} of {entry.where}", wanted="entries that take no quantized layer",
            remedy="`narrowcast repair` writes an ignore list that fits the tensors", repair="ignore",
        )  # fmt: skip


@rule("NC504", "error")
def quantized_and_untargeted(subject: Subject) -> Iterator[Finding]:
    """A layer is quantized, and no config group targets it.

    What: A layer of a compressed-tensors checkpoint has codes and scales, and no group's targets match its name.
    Why: The engine builds an unquantized layer and reads the codes as floats, or refuses the scales.
    Fix: Correct the targets: patterns are matched from the start of the name, so ``re:mlp`` must be ``re:.*mlp``.
    False alarm: None known.
    """
    if method(subject) != "compressed-tensors":
        return
    try:
        groups = Groups.of(source(subject))
    except NarrowcastError:
        return
    targets = [target for group in groups.groups for target in group.targets]
    for name, layer in subject.layers.items():
        group = groups.taking(name) if layer.quantized else None
        if layer.quantized and (group is None or group.weights is None) and groups.ignoring(name) is None:
            yield Finding(
                "quantized, and no config group targets it", tensor=name, got=f"targets {', '.join(targets[:3])}",
                wanted="a target that matches its name", repair="config",
                remedy="`narrowcast repair` rebuilds the groups from the tensors",
            )  # fmt: skip


def _refused(subject: Subject, *parts: str) -> Iterator[tuple[str, Refusal]]:
    """Modules that were set aside for a refusal whose text has one of ``parts``."""
    for refusal in subject.found.layer_refusals:
        if refusal.module is not None and any(part in refusal.error.problem for part in parts):
            for module in dict.fromkeys(module_of(tensor) for tensor in refusal.tensors):
                yield module, refusal


@rule("NC505", "error")
def format_of_another_kind(subject: Subject) -> Iterator[Finding]:
    """The config's format is not the one that the tensors are in.

    What: ``format`` of compressed-tensors, or of a config group, names another layout than the tensors have, such as
    pack-quantized for FP8.
    Why: The engine chooses its loader by this word, so it looks for tensors that do not exist.
    Fix: Correct the word; with several layouts the config's own is mixed-precision and each group has its own.
    False alarm: None known.
    """
    for module, refusal in _refused(subject, "is not in the format that the config names"):
        yield Finding(
            "the config names another format than its tensors are in", tensor=module, got=str(refusal.error.got),
            wanted=str(refusal.error.wanted), repair="config",
            remedy="`narrowcast repair` rebuilds the block from the tensors",
        )  # fmt: skip


@rule("NC506", "error")
def scheme_of_another_kind(subject: Subject) -> Iterator[Finding]:
    """The config's bits, granularity or block size are not those of the tensors.

    What: A layer's scales have the grid of another group or block size, or its codes another width, than the config
    says.
    Why: Engines shape their parameters by the config, so loading fails, or scales land on the wrong elements.
    Fix: Restore the config that belongs to these tensors; ``narrowcast repair`` rebuilds it where they leave no doubt.
    Where it fits most layers, the few others lack a tensor, such as zero points or an outer scale.
    False alarm: None known.
    """
    parts = (
        "its config group says something else", "its label says something else", "its scales are not those of",
        "do not have the width that the config says", "the config names no block",
    )  # fmt: skip
    refused = list(_refused(subject, *parts))
    few = len(refused) < len(subject.quantized)  # the config fits most layers, so these lack something
    for module, refusal in refused:
        yield Finding(
            "the config describes another scheme than its tensors have", tensor=module, got=str(refusal.error.got),
            wanted=str(refusal.error.wanted), repair=None if few else "config",
            remedy=f"the config fits {len(subject.quantized)} other layers: copy this one's tensors again, or quantize "
            "it again from the parent" if few else "`narrowcast repair` rebuilds the block from the tensors",
        )  # fmt: skip


@rule("NC507", "error")
def inputs_of_another_kind(subject: Subject) -> Iterator[Finding]:
    """The config's input scheme and the stored input scales contradict each other.

    What: The config says static inputs and a layer has no input scale, or it says dynamic ones and the layer has one.
    Why: A static scale that is missing stays at its initial value and clips or flushes all inputs; one that is not
    expected stops the loading, or is dropped and the model computes otherwise than it was calibrated.
    Fix: Say dynamic where there are no scales; or export again with the calibration.
    False alarm: Readers that make inputs dynamic where a scale is missing; others do not.
    """
    for module, refusal in _refused(subject, "config and tensors disagree about its input"):
        yield Finding(
            "config and tensors disagree about its input scale", tensor=module, got=str(refusal.error.got),
            wanted=str(refusal.error.wanted), repair="config",
            remedy="`narrowcast repair` makes the config say what the tensors are",
        )  # fmt: skip
