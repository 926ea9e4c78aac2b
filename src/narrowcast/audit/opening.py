"""Open a checkpoint that may be broken, as far as it can be opened, and remember everything that was in the way.

    strict first:  what every other job does; where it raises, the same steps one by one, each refusal noted
    files:         a shard that cannot be read is left out, a second copy of a tensor too
    container:     a layer that its container refuses is set aside, and the rest is read again
    config:        where the configs contradict each other, one of them alone

So one missing scale is one finding, and everything else is still looked at. What was set aside is never counted as
healthy: each refusal is a finding of its own, unless another rule says the same more precisely.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from narrowcast.containers.contents import Contents
from narrowcast.containers.detect import detect, open_source
from narrowcast.errors import CheckpointError, InputError, NarrowcastError
from narrowcast.jobs.coded import REFUSALS, Opened, open_coded, see
from narrowcast.jobs.opening import open_model
from narrowcast.model.roles import quantization_config
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.store.folder import CONFIG, listed, read_object
from narrowcast.store.safetensors import Entry, Reader

_PIECE = re.compile(
    r"(\.|_)(weight(_scale(_inv|_2)?|_packed|_global_scale|_zero_point|_scales|_shape|_g_idx|_qdata)?|qweight|qzeros"
    r"|scales|g_idx|SCB|scale(_inv)?|input_scale|input_global_scale|activation_scale|pre_quant_scale|blocks"
    r"|weight\.[\w.]+)$"
)
ROUNDS = 200  # refusals after which the rest of a checkpoint is not read


@dataclass(frozen=True)
class Refusal:
    """What a strict reader said, and the module that was set aside for it (None: the refusal names none)."""

    error: NarrowcastError
    module: str | None = None
    tensors: tuple[str, ...] = ()


@dataclass
class Found:
    """A checkpoint as far as it opens. ``opened`` is None where no container reads it; ``files`` are all files below
    the folder, relative, and ``indexed`` the weight_map of the index, as it is."""

    checkpoint: Checkpoint
    opened: Opened | None
    files: tuple[Path, ...]
    file_refusals: list[Refusal] = field(default_factory=list)
    layer_refusals: list[Refusal] = field(default_factory=list)
    doubled: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def set_aside(self) -> set[str]:
        return {name for refusal in self.layer_refusals for name in refusal.tensors}


def open_anyway(model: str | Path) -> Found:
    """Open a model whatever is wrong with it; NarrowcastError only where there is no model at all."""
    try:
        checkpoint = open_model(model)
    except NarrowcastError as error:
        found = _pieces(Path(model), error)
    else:
        found = Found(
            checkpoint, None, tuple(listed(checkpoint.root)) if checkpoint.config is not None else ()
        )
    try:
        found.opened = open_coded(found.checkpoint)
    except CheckpointError:
        found.opened = _see(found)
    return found


def _pieces(path: Path, error: NarrowcastError) -> Found:
    """A folder that ``Checkpoint.open`` refuses, shard by shard."""
    if not path.is_dir():
        raise error
    root = path.absolute()
    files = tuple(listed(root))
    shards = [root / file for file in files if len(file.parts) == 1 and file.name.endswith(".safetensors")]
    if not shards:
        raise error
    found = Found(Checkpoint(root, None, None, (), {}, None, {}, (), (), ()), None, files, [Refusal(error)])
    readers: dict[Path, Reader] = {}
    entries: dict[str, Entry] = {}
    for shard in shards:
        try:
            readers[shard] = Reader(shard)
        except InputError as wrong:
            if str(wrong) != str(error):
                found.file_refusals.append(Refusal(wrong))
            continue
        for name, entry in readers[shard].entries.items():
            if name in entries:
                found.doubled[name] = (entries[name].path.name, shard.name)
            entries.setdefault(name, entry)
    config, content = _config(root, found)
    side = tuple(file for file in files if root / file not in readers and str(file) != CONFIG)
    found.checkpoint = Checkpoint(
        root, config, content, tuple(readers), entries, None,
        {shard.name: reader.metadata for shard, reader in readers.items()}, side, (), (), _readers=readers,
    )  # fmt: skip
    return found


def _config(root: Path, found: Found) -> tuple[dict[str, Any] | None, bytes | None]:
    if not (root / CONFIG).is_file():
        return None, None
    try:
        content, config = read_object(root / CONFIG)
    except InputError as wrong:
        if str(wrong) != str(found.file_refusals[0].error):
            found.file_refusals.append(Refusal(wrong))
        return None, None
    return config, content


def _see(found: Found) -> Opened | None:
    """The model through its container, without the layers that the container refuses."""
    for config, left_out in _readings(found.checkpoint):
        refusals: list[Refusal] = []
        contents = _contents(found.checkpoint, config, left_out, refusals)
        if contents is not None:
            found.layer_refusals += refusals
            rest = _without(found.checkpoint, {name for r in refusals for name in r.tensors})
            return _opened(rest, contents, found)
        if refusals and not any(str(r.error) == str(refusals[-1].error) for r in found.layer_refusals):
            found.layer_refusals.append(Refusal(refusals[-1].error))  # what stopped this reading
    return None


def _readings(checkpoint: Checkpoint) -> Iterator[tuple[dict[str, Any], bool]]:
    """Ways to read the configs: all of them, config.json alone, the files beside it alone, none."""
    config = quantization_config(checkpoint.config or {})
    yield config, False
    yield config, True
    yield {}, False
    yield {}, True


def _contents(
    checkpoint: Checkpoint, config: dict[str, Any], alone: bool, refusals: list[Refusal]
) -> Contents | None:
    """What a container finds once everything that it refuses is out of its way; None where a refusal names no
    tensor."""
    aside: set[str] = set()
    seen: set[str] = set()
    for _ in range(ROUNDS):
        rest = _without(checkpoint, aside)
        try:
            source = open_source(rest, config)
            return detect(replace(source, beside={}) if alone else source)
        except CheckpointError as error:
            module, names = _named(error, rest.entries)
            alike = re.sub(r"\d+", "#", str(module))
            if module is not None and alike in seen:  # the same in many layers: all of them at once
                names |= _alike(alike, names, rest.entries)
            seen.add(alike)
            refusals.append(Refusal(error, module, tuple(sorted(names))))
            if not names:
                return None
            aside |= names
    return None


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


def _named(error: NarrowcastError, entries: dict[str, Entry]) -> tuple[str | None, set[str]]:
    """The module that a refusal speaks of, and its tensors: the first name in it that the checkpoint has."""
    text = f"{error.problem} {error.got or ''}"
    for word in re.findall(r"[\w.]+\w", text):
        if word in entries:
            word = module_of(word)
        elif "." not in word:
            continue
        names = {name for name in entries if module_of(name) == word}
        if names:
            return word, names
    return None, set()


def _alike(shape: str, names: set[str], entries: dict[str, Entry]) -> set[str]:
    """Tensors of modules that differ from a refused one in their numbers only and have the same pieces."""
    endings = {name[len(module_of(name)) :] for name in names}
    groups: dict[str, set[str]] = {}
    for name in entries:
        module = module_of(name)
        if re.sub(r"\d+", "#", module) == shape:
            groups.setdefault(module, set()).add(name)
    alike = [g for module, g in groups.items() if {name[len(module) :] for name in g} == endings]
    return {name for group in alike for name in group}


def module_of(tensor: str) -> str:
    """The module that a tensor is a piece of, by its name."""
    return _PIECE.sub("", tensor)


__all__ = ["Found", "Refusal", "module_of", "open_anyway"]
