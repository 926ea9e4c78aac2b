"""Open a checkpoint that may be broken, as far as it can be opened, and remember everything that was in the way.

    strict first:  what every other job does; where it raises, the same steps one by one, each refusal noted
    files:         see ``salvage``; a layer that lost a piece with its file is left out whole
    container:     a layer that its container refuses is set aside, and the rest is read again
    config:        where the configs contradict each other, one of them alone

So one missing scale is one finding, and everything else is still looked at. What was set aside is never counted as
healthy: each refusal is a finding of its own, unless another rule says the same more precisely.

The same fault in very many layers must not cost one reading each. After a few of a kind (modules whose names differ
in numbers only), all that look like the last one, piece by piece with dtype and shape, are set aside together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from narrowcast.audit.found import Found, Refusal, by_module, module_of
from narrowcast.audit.salvage import salvage
from narrowcast.containers.contents import Contents, Source
from narrowcast.containers.detect import detect, open_source
from narrowcast.containers.kinds import refuse_other_kinds
from narrowcast.errors import CheckpointError, NarrowcastError
from narrowcast.jobs.coded import REFUSALS, Opened, open_coded, see
from narrowcast.jobs.opening import open_model
from narrowcast.model.roles import quantization_config
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.folder import CONFIG, INDEX, INDEX_ENDING, listed

ROUNDS = 200  # refusals after which the rest of a checkpoint is not read
PATIENCE = 8  # refusals of one kind that are told apart
TENSORS = 50_000  # readings times tensors that are spent on telling them apart


def open_anyway(model: str | Path) -> Found:
    """Open a model whatever is wrong with it; NarrowcastError only where there is no model at all."""
    try:
        checkpoint = open_model(model)
    except NarrowcastError as error:
        found = salvage(Path(model), error)
    else:
        folder = Path(model).is_dir() or not Path(model).exists()  # the latter: a directory that was fetched
        found = Found(checkpoint, folder=folder, index=checkpoint.index)
        if folder:
            found.files = tuple(listed(checkpoint.root))
            names = [f.name for f in found.files if str(f).endswith(INDEX_ENDING)]
            found.index_name = INDEX if INDEX in names else next(iter(names), None)
    try:
        found.opened = open_coded(_usable(found))
    except CheckpointError:
        found.opened = _see(found)
    return found


def _usable(found: Found) -> Checkpoint:
    """The checkpoint without the layers that lost a piece with its file."""
    lost = {module_of(name) for name in found.lost}
    if not lost:
        return found.checkpoint
    return _without(found.checkpoint, {name for name in found.checkpoint.entries if module_of(name) in lost})


def _see(found: Found) -> Opened | None:
    """The model through its container, without the layers that the container refuses."""
    checkpoint = _usable(found)
    if not checkpoint.entries:
        return None
    for config, alone in _readings(checkpoint):
        reading = _Reading(checkpoint, config, alone)
        contents = reading.contents()
        if contents is not None:
            found.layer_refusals += reading.refusals
            return _opened(_without(checkpoint, reading.aside), contents, found)
        stopped = Refusal(reading.refusals[-1].error)
        if not any(str(r.error) == str(stopped.error) for r in found.layer_refusals):
            found.layer_refusals.append(stopped)
    return None


def _readings(checkpoint: Checkpoint) -> Iterator[tuple[dict[str, Any], bool]]:
    """Ways to read the configs: all of them, config.json alone, the files beside it alone, none."""
    config = quantization_config(checkpoint.config or {})
    yield config, False
    yield config, True
    yield {}, False
    yield {}, True


@dataclass
class _Reading:
    """One way to read a checkpoint: what is set aside for it, and why."""

    checkpoint: Checkpoint
    config: dict[str, Any]
    alone: bool
    aside: set[str] = field(default_factory=set)
    refusals: list[Refusal] = field(default_factory=list)

    def contents(self) -> Contents | None:
        """What a container finds once everything that it refuses is out of its way; None where a refusal names no
        tensor that is still there."""
        modules = by_module(self.checkpoint.entries)
        patience = min(PATIENCE, max(1, TENSORS // len(self.checkpoint.entries)))
        kinds: dict[str, int] = {}
        for _ in range(ROUNDS):
            rest = _without(self.checkpoint, self.aside)
            try:
                return detect(self._source(rest))
            except CheckpointError as error:
                module, names = _named(error, modules, self.aside)
                kind = re.sub(r"\d+", "#", str(module))
                kinds[kind] = kinds.get(kind, 0) + 1
                if module is not None and kinds[kind] > patience:
                    names = _alike(kind, names, modules, self.checkpoint) - self.aside
                self.refusals.append(Refusal(error, module, tuple(sorted(names))))
                if not names:
                    return None
                self.aside |= names
        return None

    def _source(self, rest: Checkpoint) -> Source:
        if self.alone:
            refuse_other_kinds(self.config, rest.root / CONFIG)
            return Source(rest, dict(self.config))
        return open_source(rest, self.config)


def _opened(rest: Checkpoint, contents: Contents, found: Found) -> Opened | None:
    try:
        opened = see(rest, contents)
    except CheckpointError as error:
        found.layer_refusals.append(Refusal(error))
        return None
    for refuse in REFUSALS:
        try:
            refuse(opened)
        except CheckpointError as error:
            found.layer_refusals.append(Refusal(error))
    return opened


def _without(checkpoint: Checkpoint, aside: set[str]) -> Checkpoint:
    if not aside:
        return checkpoint
    return replace(checkpoint, entries={n: e for n, e in checkpoint.entries.items() if n not in aside})


def _named(
    error: NarrowcastError, modules: dict[str, set[str]], aside: set[str]
) -> tuple[str | None, set[str]]:
    """The module that a refusal speaks of, and its tensors: the first name in it that the checkpoint still has."""
    for word in re.findall(r"[\w.]+\w", f"{error.problem} {error.got or ''}"):
        module = module_of(word)
        names = (modules.get(word) or modules.get(module) or set()) - aside
        if names and ("." in word or word in names):
            return (word if word in modules else module), names
    return None, set()


def _alike(kind: str, names: set[str], modules: dict[str, set[str]], checkpoint: Checkpoint) -> set[str]:
    """Tensors of modules that differ from a refused one in their numbers only and have the same pieces."""

    def pieces(members: set[str]) -> list[tuple[str, str, tuple[int, ...]]]:
        entries = (checkpoint.entries[name] for name in members)
        return sorted((e.name[len(module_of(e.name)) :], e.dtype.name, e.shape) for e in entries)

    wanted = pieces(names)
    alike = [
        members for module, members in modules.items()
        if re.sub(r"\d+", "#", module) == kind and pieces(members) == wanted
    ]  # fmt: skip
    return names.union(*alike)


__all__ = ["Found", "Refusal", "module_of", "open_anyway"]
