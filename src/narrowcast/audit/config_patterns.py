"""Rules about entries and patterns in a quantization config: what each takes, against what it was meant to take.

A list of names fails both ways. An entry that matches nothing leaves layers to be built quantized that are not; one
that matches too much keeps layers by accident. Expressions are matched from the START of a name and not to its end
(``re:visual.*`` misses model.visual, ``re:.*gate`` takes gate_proj), and some readers look for names within names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from narrowcast.audit.config_said import CLASSES, Kept, Layer, method, promised, source
from narrowcast.audit.findings import Finding
from narrowcast.audit.rules import rule
from narrowcast.audit.subject import Subject
from narrowcast.containers.compressed_tensors.groups import Group, Groups
from narrowcast.errors import NarrowcastError, UsageError
from narrowcast.model.patterns import Pattern, near_misses
from narrowcast.model.roles import Role
from narrowcast.store.folder import some

# What recipes list for every model, whether it has them or not.
_USUAL = ("lm_head", "embed_tokens", "embeddings", "word_embeddings", "wte", "embed_out", "output")
# What engines build without quantization in any case, or some of them do.
_OFTEN_WIDE = frozenset({Role.EMBEDDING, Role.LM_HEAD, Role.NORM, Role.ROUTER})


def _meant(entry: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """What was probably meant by an entry that takes nothing, and the modules that this would take for sure."""
    try:
        near = near_misses(Pattern.parse(entry), names)
        fits = [name for name in names if near and Pattern.parse(near[0]).fits_name(name)]
    except UsageError:
        return [], []
    inside = entry.removesuffix(".weight").removesuffix(".bias")
    sure = entry.startswith("re:") or re.search(r"[*?\[]", entry) or any(inside in name for name in fits)
    return near, fits if sure else []


@rule("NC510", "error")
def entry_without_match(subject: Subject) -> Iterator[Finding]:
    """An entry that should keep layers unquantized matches none.

    What: A name or pattern of the ignore list takes no layer. A near miss takes some: the pattern lacks its ``.*`` in
    front, the name has a ``.weight`` behind it, or it is a glob where none is read.
    Why: The layers that were meant are built quantized, or were quantized against the intention.
    Fix: Write the suggested entry; ``narrowcast repair`` writes a list that fits the tensors.
    False alarm: An entry for modules that this model does not have. It does no harm, and is only mentioned.
    """
    layers, takes = subject.layers, promised(subject)
    names = list(layers)
    for entry, taken in subject.kept.items():
        if taken or entry.kind == "class":
            continue
        if any(name.startswith(f"{entry.text}.") for name in names):
            continue  # another rule
        near, fits = _meant(entry.text, names)
        leaf = re.sub(r"[^\w.]", "", entry.text).rpartition(".")[2]
        if not fits and leaf in _USUAL:
            continue
        plain = [name for name in fits if not layers[name].quantized and takes is not None and takes(name)]
        broken = [name for name in plain if layers[name].role not in _OFTEN_WIDE]
        meant = f"; {near[0]!r} would take {some(fits, 1)}" if fits else ""
        yield Finding(
            f"{entry.text!r} in {entry.key} matches no layer{meant}",
            severity="error" if broken else "warning" if fits else "info", tensor=entry.where,
            got=f"{entry.text!r}, which takes no layer", wanted=near[0] if near else "a name that the model has",
            remedy=f"did you mean {' or '.join(repr(n) for n in near[:3])}?" if near else None, count=max(len(fits), 1),
            repair="ignore",
        )  # fmt: skip


def _cut_short(entry: Kept, layers: dict[str, Layer]) -> list[str]:
    """Layers that an expression takes though it ends within a word of their names."""
    try:
        expression = re.compile(entry.expression)
    except re.error:
        return []
    found = []
    for name, layer in layers.items():
        match = expression.match(name)
        if match is not None and layer.linear and 0 < match.end() < len(name):
            before, after = name[match.end() - 1], name[match.end()]
            if re.match(r"\w", before) and re.match(r"\w", after):
                found.append(name)
    return found


@rule("NC511", "warning")
def pattern_without_end(subject: Subject) -> Iterator[Finding]:
    """A pattern takes more layers than it names, because it does not say where it ends.

    What: An expression such as ``re:.*gate`` also takes gate_proj: expressions are matched from the start of a name
    and need not reach its end.
    Why: Layers are kept unquantized by accident, which costs memory and speed, or codes are read as floats.
    Fix: End the expression with ``$``, or with ``\\..*`` where everything below is meant.
    False alarm: An abbreviation that was meant so.
    """
    for entry, taken in subject.kept.items():
        layers = {name: subject.layers[name] for name in taken}
        over = _cut_short(entry, layers) if entry.kind == "regex" else []
        if over:
            yield Finding(
                f"{entry.text!r} in {entry.key} has no end and also takes {some(over, 1)}", tensor=entry.where,
                got=entry.text, wanted=f"{entry.text}$", count=len(over), repair="ignore",
                remedy="end the expression with $",
            )  # fmt: skip


_LAYER = re.compile(r"layers\\?\.(\d+)(?=\\?\.|\$)")


@rule("NC512", "warning")
def pattern_for_other_layers(subject: Subject) -> Iterator[Finding]:
    """A pattern for one layer takes others, whose numbers begin alike.

    What: ``re:model.layers.1.*`` takes layers 10 to 19 as well, since the dot stands for any character.
    Why: Layers are kept unquantized by accident, or codes are read as floats.
    Fix: Write ``re:model\\.layers\\.1\\..*``.
    False alarm: None known.
    """
    for entry, taken in subject.kept.items():
        numbers = _LAYER.findall(entry.expression) if entry.kind == "regex" else []
        if len(numbers) != 1:
            continue
        other = re.compile(rf"(?:^|\.)layers\.(?!{numbers[0]}\.)\d+\.")
        over = [name for name in taken if other.search(name)]
        if over:
            yield Finding(
                f"{entry.text!r} in {entry.key} names layer {numbers[0]} and also takes {some(over, 1)}",
                tensor=entry.where, got=entry.text, wanted=f"a dot as \\. behind layers.{numbers[0]}", count=len(over),
                remedy=f"write \\.{numbers[0]}\\. in the expression", repair="ignore",
            )  # fmt: skip


@rule("NC513", "warning")
def name_within_names(subject: Subject) -> Iterator[Finding]:
    """A name takes more layers than it names, because the engine looks for names within names.

    What: ModelOpt's and AWQ's readers take every layer whose name contains the entry, so ``mlp.gate`` takes
    mlp.gate_proj.
    Why: Layers are kept unquantized by accident, or codes are read as floats.
    Fix: Choose a container with exact names (``narrowcast convert --to compressed-tensors``), or keep both.
    False alarm: A part of a name that was meant so.
    """
    if method(subject) not in ("modelopt", "awq"):
        return
    for entry, taken in subject.kept.items():
        whole = re.compile(rf"(?:^|.*\.){re.escape(entry.text)}(?:\.|$)")
        named = [name for name in taken if entry.kind == "name" and subject.layers[name].linear]
        over = [name for name in named if entry.text in name and not whole.match(name)]
        if over:
            yield Finding(
                f"{entry.text!r} in {entry.key} is a part of other names and also takes {some(over, 1)}",
                tensor=entry.where, got=entry.text, wanted="a name that is no part of another", count=len(over),
                remedy="`narrowcast convert --to compressed-tensors`, whose names are exact",
            )  # fmt: skip


@rule("NC514", "error")
def entry_for_a_parent(subject: Subject) -> Iterator[Finding]:
    """An entry names what layers are in, and its readers match layers exactly.

    What: ``model.layers.0`` stands in a list whose readers take exact names, so the layers in it are not kept.
    Why: Plain layers in it are built quantized. Where they are quantized, the entry does nothing here, and a reader
    that goes by the beginning of names would read their codes as floats.
    Fix: Write ``re:model\\.layers\\.0\\..*``, or take the entry out.
    False alarm: None known.
    """
    layers, takes = subject.layers, promised(subject)
    for entry, taken in subject.kept.items():
        below = [] if taken else [name for name in layers if name.startswith(f"{entry.text}.")]
        if not below:
            continue
        plain = [n for n in below if layers[n].linear and not layers[n].quantized and takes and takes(n)]
        yield Finding(
            f"{entry.text!r} in {entry.key} names no layer, only what {some(plain or below, 1)} is in",
            severity="error" if plain else "warning", tensor=entry.where, got=entry.text,
            wanted=f"re:{re.escape(entry.text)}\\..*", count=len(plain or below), repair="ignore",
            remedy="`narrowcast repair` writes an ignore list that fits the tensors",
        )  # fmt: skip


@rule("NC515", "error")
def broken_pattern(subject: Subject) -> Iterator[Finding]:
    """A pattern in the config is no regular expression.

    What: An entry that begins with ``re:`` cannot be compiled.
    Why: Engines compile it while they load and stop there, or take it to match nothing.
    Fix: Correct the expression.
    False alarm: None known.
    """
    entries = [(entry.text, entry.key, entry.expression) for entry in subject.kept if entry.kind == "regex"]
    entries += [(target, "targets", target[3:]) for target in _targets(subject) if target.startswith("re:")]
    for text, key, expression in entries:
        try:
            re.compile(expression)
        except re.error as error:
            yield Finding(
                f"{text!r} in {key} is no regular expression", tensor="config.json", got=str(error),
                wanted="a regular expression of Python", remedy="correct it", repair="ignore",
            )  # fmt: skip


def _targets(subject: Subject) -> list[str]:
    if method(subject) != "compressed-tensors":
        return []
    try:
        groups = Groups.of(source(subject)).groups
    except NarrowcastError:
        return []
    return [target for group in groups for target in group.targets]


@rule("NC516", "warning")
def target_without_match(subject: Subject) -> Iterator[Finding]:
    """A target of a config group matches no layer.

    What: A name or pattern among the targets of a config group takes no layer of the file.
    Why: The scheme that the group describes is not used where it was meant to be.
    Fix: Correct the target: expressions are matched from the start of the name.
    False alarm: A target for modules that a part of the model was saved without.
    """
    layers = subject.layers
    named = [t for t in _targets(subject) if t not in CLASSES and ("." in t or t.startswith("re:"))]
    for target in named:
        alone = Groups((Group((target,), None, None, None),), ())  # a target may name a fused projection
        attention = target.endswith(("Attention", "attention)$", "self_attn$"))  # of the KV cache
        if attention or any(alone.taking(name) is not None for name in layers):
            continue
        near, _ = _meant(target, list(layers))
        yield Finding(
            f"the target {target!r} matches no layer", tensor="config.json", got=target,
            wanted=near[0] if near else "a name that the model has", repair="config",
            remedy=f"did you mean {' or '.join(repr(n) for n in near[:3])}?" if near else None,
        )  # fmt: skip


@rule("NC517", "info")
def kind_kept_by_one_entry(subject: Subject) -> Iterator[Finding]:
    """One entry keeps every layer of a kind unquantized.

    What: A single entry takes all attention or all MLP layers, and layers of other kinds are quantized.
    Why: That is often meant; where it is not, a good part of the model is still wide.
    Fix: Narrow the entry and quantize again, if it was not meant.
    False alarm: Attention that was kept on purpose, as in gpt-oss.
    """
    linear = [layer for layer in subject.layers.values() if layer.linear]
    quantized = {layer.role for layer in linear if layer.quantized}
    for entry, taken in subject.kept.items():
        for role in sorted({layer.role for layer in linear} - quantized):
            kind = [layer.name for layer in linear if layer.role == role]
            if quantized and len(kind) > 1 and set(kind) <= set(taken):
                yield Finding(
                    f"{entry.text!r} in {entry.key} keeps all {len(kind)} {role} layers", tensor=entry.where,
                    got=f"{len(kind)} wide {role} layers", count=len(kind),
                    remedy="narrow the entry and quantize again, if that was not meant",
                )  # fmt: skip


@rule("NC518", "error")
def class_among_targets(subject: Subject) -> Iterator[Finding]:
    """A class name is the target of one of several config groups, which TensorRT-LLM refuses.

    What: The config has more than one group, and one targets ``Linear`` or another class.
    Why: TensorRT-LLM matches targets of several groups by name and expression only, and stops with "config_groups
    targets matched no checkpoint module"; other engines take the class.
    Fix: Name the layers or give an expression; ``narrowcast repair`` does.
    False alarm: It concerns TensorRT-LLM alone, and is only mentioned where another engine is asked for.
    """
    if method(subject) != "compressed-tensors":
        return
    try:
        groups = Groups.of(source(subject)).groups
    except NarrowcastError:
        return
    classes = [t for group in groups for t in group.targets if not t.startswith("re:") and "." not in t]
    classes = [target for target in classes if target not in subject.layers]
    if len([group for group in groups if group.weights is not None]) > 1 and classes:
        yield Finding(
            f"the target {classes[0]!r} is a class, and there are {len(groups)} config groups", tensor="config.json",
            severity=None if subject.engine == "tensorrt-llm" else "info", got=", ".join(classes), repair="config",
            wanted="names and expressions", remedy="`narrowcast repair` names the layers",
        )  # fmt: skip
