"""The quantization config rebuilt from the tensors.

    readings:  the configs as they are · one of them alone · each without its lists of kept layers
    if none:   every container and preset whose spelling is what the tensors are, to the last name, dtype and shape

The first reading that the container accepts says which layers are quantized and how. The config is then written as
a conversion would write it; where only the list of kept layers was wrong, that list alone is replaced. What the data
do not say (whether inputs are quantized on the fly) is taken from a config that is there, or asked for: where more
than one container or preset fits, nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.audit.opening import module_of
from narrowcast.containers import containers
from narrowcast.containers.container import Container, Document, Group, Layers
from narrowcast.containers.contents import Source
from narrowcast.containers.detect import BESIDE, detect, open_source
from narrowcast.containers.spelling import Place, Spelling
from narrowcast.errors import NarrowcastError, UsageError
from narrowcast.jobs.coded import Logical, Opened, see
from narrowcast.jobs.describing import kept_names
from narrowcast.jobs.planning import config_text
from narrowcast.model.roles import quantization_config
from narrowcast.numbers.formats import BF16, FP16, FP32, Format
from narrowcast.repair.draft import Draft, Mended
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.folder import some
from narrowcast.store.header import Entry
from narrowcast.tensors.presets import LinearScheme, Preset, presets

KEPT = (
    "ignore",
    "ignored_layers",
    "modules_to_not_convert",
    "exclude_modules",
    "exclude",
    "llm_int8_skip_modules",
)


@dataclass(frozen=True)
class Asked:
    """What a user says of a checkpoint whose config does not: its container and preset, None for what is open."""

    container: str | None = None
    preset: str | None = None


def rebuild(draft: Draft, asked: Asked) -> Iterator[Mended]:
    """Make the configs say what the tensors are; nothing where they do, or where that has no one answer."""
    checkpoint = draft.checkpoint
    if checkpoint.config_bytes is None:
        draft.unmended.append("config.json is missing or broken: copy the parent's, then repair again")
        return
    plain = _leftover(checkpoint)
    if plain is not None:
        draft.config = config_text(checkpoint, Document(None), None)
        draft.beside |= dict.fromkeys(plain)
        yield Mended(
            "config", "nothing here is quantized: the quantization config is gone", ("config.json", *plain)
        )
        return
    try:
        opened = next(_readings(checkpoint), None) or _by_its_tensors(checkpoint, _narrowed(draft, asked))
    except UsageError as error:
        draft.unmended.append(f"the config has more than one answer: {error.got}; {error.remedy}")
        return
    if opened is None:
        draft.unmended.append("no config fits the tensors: convert or quantize the parent again")
        return
    document = document_of(opened)
    settled = _shortest(opened, document)
    if settled is None:
        draft.unmended.append(
            "the config that the tensors ask for contradicts them: quantize the parent again"
        )
        return
    draft.config, beside = settled
    draft.beside |= beside
    draft.found.opened = replace(opened, checkpoint=checkpoint)
    draft.found.layer_refusals.clear()
    yield Mended("config", f"the config says what the tensors are: {opened.contents.container}, "
                 f"{len(opened.contents.matrices)} matrices", ("config.json", *beside))  # fmt: skip


def _leftover(checkpoint: Checkpoint) -> list[str] | None:
    """The files that speak of a quantization where there is none; None where there is one, or nothing speaks of it."""
    try:
        detect(open_source(replace(checkpoint, side_files=()), {}))
    except NarrowcastError:
        return None
    beside = [str(name) for name in checkpoint.side_files if str(name) in BESIDE]
    return beside if beside or quantization_config(checkpoint.config or {}) else None


def _readings(checkpoint: Checkpoint) -> Iterator[Opened]:
    """The checkpoint by its configs, in ways that ask less and less of them; those that no container refuses."""
    config = quantization_config(checkpoint.config or {})
    try:
        source = open_source(checkpoint, config)
    except NarrowcastError:
        source = Source(checkpoint, config)
    for kept in (True, False):
        for said, beside in ((config, source.beside), (config, {}), ({}, source.beside)):
            reading = Source(checkpoint, said, dict(beside)) if kept else Source(
                checkpoint, _without_kept(said), {name: _without_kept(of) for name, of in beside.items()}
            )  # fmt: skip
            opened = _through(reading)
            if opened is not None and opened.contents.matrices:
                yield opened


def _through(source: Source) -> Opened | None:
    try:
        return see(source.checkpoint, detect(source))
    except NarrowcastError:
        return None


def _without_kept(config: Any) -> Any:
    """A config without its lists of kept layers, at any depth."""
    if isinstance(config, dict):
        return {key: [] if key in KEPT and value else _without_kept(value) for key, value in config.items()}
    return config


def document_of(opened: Opened) -> Document:
    """The config as a conversion would write it."""
    container = containers[opened.contents.container]
    assert container.document is not None
    groups: dict[tuple[LinearScheme, str], tuple[Spelling, list[str]]] = {}
    taken: set[str] = set()
    for module in opened.modules:
        entry = opened.entries[module.tensor]
        if isinstance(entry, Logical):
            taken.add(module.tensor)
            stored = entry.stored
            group = groups.setdefault((stored.linear, stored.how.format), (stored.how, []))
            group[1].extend(name for name, _ in opened.coded(module))
    listed = tuple(Group(linear, how, tuple(names)) for (linear, _), (how, names) in groups.items())
    inside = {name for group in listed for name in group.names}
    ignore = kept_names(opened.modules, taken, inside)
    embeddings = frozenset(m.name for m in opened.modules if m.kind == "Embedding" and m.tensor in taken)
    config = opened.checkpoint.config or {}
    return container.document(
        Layers(listed, (*inside, *ignore), tuple(ignore), opened.contents.kv, config, embeddings)
    )


def _shortest(opened: Opened, document: Document) -> tuple[bytes, dict[str, bytes | None]] | None:
    """The smallest change of the configs with which the checkpoint opens: the old one with the new list of kept
    layers, else the new one."""
    checkpoint = opened.checkpoint
    old = quantization_config(checkpoint.config or {})
    lists = {key: value for key, value in (document.config or {}).items() if key in KEPT}
    shared = {key: value for key, value in lists.items() if key in old}
    stale: dict[str, bytes | None] = {
        str(name): None
        for name in checkpoint.side_files
        if str(name) in BESIDE and str(name) not in document.beside
    }
    tries: list[tuple[dict[str, Any] | None, dict[str, bytes | None]]] = []
    if shared and not any(str(name) in BESIDE for name in checkpoint.side_files):
        tries.append((old | shared, {}))
    tries.append((document.config, stale | dict(document.beside)))
    for config, beside in tries:
        text = config_text(checkpoint, Document(config), None)
        if opens(checkpoint, text, beside):
            return text, beside
    return None


def opens(checkpoint: Checkpoint, config: bytes, beside: Mapping[str, bytes | None]) -> bool:
    """Whether a checkpoint with these configs is what it says."""
    try:
        parsed = json.loads(config)
        source = Source(checkpoint, quantization_config(parsed), {
            name: json.loads(content) for name, content in beside.items() if content is not None and name in BESIDE
        })  # fmt: skip
        see(checkpoint, detect(source))
    except (NarrowcastError, ValueError):
        return False
    return True


def _by_its_tensors(checkpoint: Checkpoint, asked: Asked) -> Opened | None:
    """The checkpoint by what its tensors are called and hold; UsageError where that has several answers."""
    found: dict[str, Opened] = {}
    for row in _rows(asked):
        for name in [asked.preset] if asked.preset else presets:
            opened = _as(checkpoint, row, presets[name])
            if opened is not None:
                found[f"{row.name} {name}"] = opened
    if len(found) > 1:
        raise UsageError(
            "the tensors fit several configs", got=some(list(found), 8),
            remedy="say which with --container and --preset",
        )  # fmt: skip
    return next(iter(found.values()), None)


def _narrowed(draft: Draft, asked: Asked) -> Asked:
    """What was asked, in the container that reads the other layers: one broken layer makes no other container right."""
    opened = draft.opened
    if asked.container is not None or opened is None or not opened.contents.matrices:
        return asked
    return replace(asked, container=opened.contents.container)


def _widths(preset: Preset) -> Iterator[LinearScheme]:
    """A preset's linear scheme, and those on the smaller groups that it falls back to."""
    yield preset.linear
    if preset.linear.weight.name.endswith("_g128"):
        yield from (preset.with_group(group).linear for group in (64, 32))


def _rows(asked: Asked) -> Iterable[Container]:
    rows = [containers[asked.container]] if asked.container else [containers[name] for name in containers]
    return [
        row for row in rows if row.document is not None and row.spelling is not None and row.name != "plain"
    ]


def _as(checkpoint: Checkpoint, row: Container, preset: Preset) -> Opened | None:
    """The checkpoint as this container would hold it under this preset, if it is that to the last tensor."""
    assert row.document is not None
    for dtype in (BF16, FP16, FP32):
        groups = _groups(checkpoint, row, preset, dtype)
        names = [name for group in groups for name in group.names]
        kept = [module_of(name) for name in checkpoint.entries if name.endswith(".weight")]
        ignore = tuple(name for name in kept if name not in names)
        config = checkpoint.config or {}
        try:
            document = (
                row.document(Layers(groups, (*names, *ignore), ignore, None, config)) if names else None
            )
        except NarrowcastError:
            continue
        if document is None:
            continue
        beside = {name: json.loads(content) for name, content in document.beside.items() if name in BESIDE}
        opened = _through(Source(checkpoint, document.config or {}, beside))
        if opened is not None and {stored.module for stored in opened.contents.matrices} == set(names):
            return opened
    return None


def _groups(checkpoint: Checkpoint, row: Container, preset: Preset, dtype: Format) -> tuple[Group, ...]:
    """The modules that are what the spelling of a preset says, by the width of their groups."""
    assert row.spelling is not None
    taken: set[str] = set()
    found = []
    for linear in _widths(preset):
        try:
            how = row.spelling(linear, dtype)
        except UsageError:
            return ()
        fits = (name for name, shape in _modules(checkpoint, how) if _fits(checkpoint, how, name, shape))
        names = tuple(name for name in fits if name not in taken)
        taken.update(names)
        if names:
            found.append(Group(linear, how, names))
    return tuple(found)


def _modules(checkpoint: Checkpoint, how: Spelling) -> Iterator[tuple[str, tuple[int, int]]]:
    """Modules that have a tensor of codes by this spelling, with the shape [N, K] that follows from it."""
    part = how.part("codes")
    assert part is not None
    for name, entry in checkpoint.entries.items():
        if name.endswith(part.suffix) and entry.dtype.name == part.dtype and len(entry.shape) == 2:
            shape = _shape(entry, how)
            if shape is not None:
                yield name.removesuffix(part.suffix), shape


def _shape(entry: Entry, how: Spelling) -> tuple[int, int] | None:
    """The matrix whose codes have this stored shape: packed along either axis by the element's width."""
    part, bits = how.part("codes"), how.scheme.element.bits
    assert part is not None
    per = entry.dtype.bits // bits if entry.dtype.bits % bits == 0 else 1
    a, b = entry.shape
    for shape in ((a, b * per), (b, a * per), (b * per, a), (a * per, b), (a, b * entry.dtype.bits // bits)):
        try:
            if tuple(part.shape(*shape)) == tuple(entry.shape):
                return shape
        except (ZeroDivisionError, ValueError):
            continue
    return None


def _fits(checkpoint: Checkpoint, how: Spelling, name: str, shape: tuple[int, int]) -> bool:
    """Whether all tensors of a module are there as the spelling has them."""
    for part, spec in zip(how.parts, how.specs(Place(name, shape[0]), shape[1]), strict=True):
        entry = checkpoint.entries.get(spec.name)
        if entry is None:
            if not part.optional:
                return False
        elif entry.dtype != spec.dtype or [s for s in entry.shape if s != 1] != [
            s for s in spec.shape if s != 1
        ]:
            return False
    return True
