"""A directory that ``Checkpoint.open`` refuses, opened file by file.

    index readable:   its shards are the model; others are noted, and read only where none of its shards is there
    none, or broken:  model.safetensors, else the largest family name-00001-of-00003, else every file
    config:           keys that appear twice count as the last one, as engines read them; keys of a wrong kind are
                      left out

What is missing, damaged or twice there is noted by kind, so that rules can say what it is; a refusal is kept as it is
only where no kind fits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from narrowcast.audit.found import Found, Refusal
from narrowcast.errors import CheckpointError, InputError, NarrowcastError
from narrowcast.store.checkpoint import CONFIG_KINDS, Checkpoint
from narrowcast.store.folder import CONFIG, FAMILY, INDEX, INDEX_ENDING, SECOND_COPY, below, is_foreign
from narrowcast.store.safetensors import Entry, Reader

WEIGHTS = ".safetensors"
ONE_FILE = "model.safetensors"


def salvage(path: Path, error: NarrowcastError) -> Found:
    """The directory as far as it can be read; raises ``error`` where it holds no weights at all."""
    if not path.is_dir():
        raise error
    root = path.absolute()
    found = Found(Checkpoint(root, None, None, (), {}, None, {}, (), (), ()), folder=True)
    found.files, found.links = walk(root, found.file_refusals)
    top = [file.name for file in (*found.files, *found.links) if len(file.parts) == 1]
    weights = sorted(name for name in top if name.endswith(WEIGHTS))
    if not weights:
        raise error
    config, content = _config(root, found)
    _index(root, top, found)
    shards = _shards(weights, found)
    readers: dict[Path, Reader] = {}
    for name in shards:
        try:
            readers[root / name] = Reader(root / name)
        except NarrowcastError as wrong:
            found.damaged += (name,)
            if not wrong.problem.startswith("not a safetensors file"):  # else a rule says what it is
                found.file_refusals.append(Refusal(wrong))
    entries = _entries(readers, found)
    rest = [
        file
        for file in found.files
        if root / file not in readers and str(file) not in (CONFIG, found.index_name)
    ]
    found.checkpoint = Checkpoint(
        root, config, content, tuple(readers), entries, found.index,
        {shard.name: reader.metadata for shard, reader in readers.items()},
        tuple(file for file in rest if not is_foreign(file)), tuple(file for file in rest if is_foreign(file)), (),
        _readers=readers,
    )  # fmt: skip
    if not _explained(found):
        found.file_refusals.append(Refusal(error))
    return found


def _explained(found: Found) -> bool:
    """Whether some kind of damage was noted that the strict refusal may have been about."""
    table, entries = found.indexed, found.checkpoint.entries
    off = bool(table) and (
        table.keys() != entries.keys() or any(entries[n].path.name != s for n, s in table.items())
    )
    kinds = (found.links, found.absent, found.unnamed, found.damaged, found.file_refusals, found.doubled)
    return off or any(kinds) or not _config_is_sound(found)


def _config_is_sound(found: Found) -> bool:
    content = found.checkpoint.config_bytes
    return content is not None and found.checkpoint.config is not None and parsed(content)[1] is None


def walk(root: Path, refusals: list[Refusal]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Files below a directory, relative and sorted, and what is there and is no file; hidden folders left out."""
    files: list[Path] = []
    others: list[Path] = []

    def note(error: OSError) -> None:
        refusals.append(
            Refusal(InputError("a folder cannot be read", where=error.filename, got=error.strerror))
        )

    for file in below(root, note):
        (files if file.is_file() else others).append(file.relative_to(root))
    return tuple(sorted(files)), tuple(sorted(others))


def parsed(content: bytes) -> tuple[Any, str | None]:
    """JSON as engines read it, where keys that appear twice count as the last one, and what is wrong with it: None,
    or one line. The value is None where the bytes are no JSON."""
    twice: list[str] = []

    def last(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice.extend(key for key in found if keys.count(key) > 1)
        return found

    try:
        value = json.loads(content, object_pairs_hook=last)
    except (ValueError, RecursionError) as error:
        return None, str(error)
    if twice:
        return value, f"the key {twice[0]!r} appears twice"
    return value, None


def _config(root: Path, found: Found) -> tuple[dict[str, Any] | None, bytes | None]:
    try:
        content = (root / CONFIG).read_bytes()
    except OSError as error:
        if (root / CONFIG).is_file():
            found.file_refusals.append(
                Refusal(InputError("config.json cannot be read", where=root / CONFIG, got=error.strerror))
            )
        return None, None
    value, _ = parsed(content)
    if not isinstance(value, dict):
        return None, content
    sound = dict(value)
    for key, (kind, wanted) in CONFIG_KINDS.items():
        item = value.get(key)
        names = all(isinstance(name, str) for name in item) if isinstance(item, list) else True
        if item is not None and not (isinstance(item, kind) and names):
            del sound[key]
            unsound = CheckpointError(
                f"config.json: {key} is not {wanted}", where=root / CONFIG, got=repr(item)[:60],
                wanted=f"{wanted}, or null", remedy="download or copy the file again",
            )  # fmt: skip
            found.file_refusals.append(Refusal(unsound))
    return sound, content


def _index(root: Path, top: list[str], found: Found) -> None:
    """Read the index, where one has the usual name or is the only one of the first copy."""
    names = [name for name in top if name.endswith(INDEX_ENDING)]
    first = [name for name in names if not SECOND_COPY.match(name)]
    if INDEX not in names and len(first) != 1:
        return
    found.index_name = INDEX if INDEX in names else first[0]
    where = root / found.index_name
    try:
        value, problem = parsed(where.read_bytes())
    except OSError as error:
        value, problem = None, str(error.strerror)
    table = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(table, dict) or not table:
        problem = problem or ("no weight_map" if isinstance(value, dict) else None)
        unsound = CheckpointError(
            "the index cannot be used", where=where, got=problem or type(value).__name__,
            wanted="a JSON object with a weight_map",
            remedy="`narrowcast repair` writes it anew where every shard is there",
        )  # fmt: skip
        found.file_refusals.append(Refusal(unsound, repair="index"))
        return
    wrong = {
        name: shard for name, shard in table.items()
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(WEIGHTS)
    }  # fmt: skip
    if wrong:
        name, shard = next(iter(wrong.items()))
        unsound = CheckpointError(
            f"the index places {len(wrong)} tensors in something that is no shard here, first {name!r}",
            where=where, got=repr(shard)[:80], wanted="the name of a .safetensors file beside the index",
        )  # fmt: skip
        found.file_refusals.append(Refusal(unsound, repair="index"))
    sound = {name: shard for name, shard in table.items() if name not in wrong}
    found.index = {**value, "weight_map": sound} if sound else None


def _shards(weights: list[str], found: Found) -> list[str]:
    """The files that are the model; notes what is absent and what nothing names."""
    first = [name for name in weights if not SECOND_COPY.match(name)] or weights
    links = {str(link) for link in found.links}
    if found.indexed:
        named = sorted(set(found.indexed.values()))
        there = [name for name in named if name in weights and name not in links]
        found.absent = tuple(name for name in named if name not in there)
        found.unnamed = tuple(name for name in first if name not in named)
        return there or [name for name in first if name not in links]
    if ONE_FILE in first and ONE_FILE not in links:  # what transformers takes before it looks for an index
        found.unnamed = tuple(name for name in first if name != ONE_FILE)
        return [ONE_FILE]
    families: dict[tuple[str, int], list[str]] = {}
    for name in first:
        member = FAMILY.match(name)
        if member is not None:
            families.setdefault((member["stem"], int(member["parts"])), []).append(name)
    if families:
        (stem, parts), members = max(families.items(), key=lambda item: len(item[1]))
        have = {int(match["part"]) for name in members if name not in links and (match := FAMILY.match(name))}
        found.absent = tuple(
            f"{stem}-{i:05d}-of-{parts:05d}{WEIGHTS}" for i in range(1, parts + 1) if i not in have
        )
        found.unnamed = tuple(name for name in first if name not in members)
        return [name for name in members if name not in links]
    found.unnamed = tuple(first[1:] if len(first) > 1 else ())
    found.absent = tuple(name for name in first if name in links)
    return [name for name in first if name not in links]


def _entries(readers: dict[Path, Reader], found: Found) -> dict[str, Entry]:
    """Every tensor once: of two copies the one where the index has it, else the first."""
    entries: dict[str, Entry] = {}
    for shard, reader in readers.items():
        for name, entry in reader.entries.items():
            held = entries.get(name)
            if held is None:
                entries[name] = entry
                continue
            found.doubled[name] = (held.path.name, shard.name)
            if found.indexed.get(name) == shard.name:
                entries[name] = entry
    return entries
