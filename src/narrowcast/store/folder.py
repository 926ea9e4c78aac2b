"""Which file of a checkpoint directory is what: shards, index, side files, weights in foreign formats.

Weights at the top of the directory are the checkpoint. An index, where there is one, decides which files are
its shards; without one there may be a single file, or one complete family ``name-00001-of-00003``. Two copies
of the weights side by side are told apart by name only where the name is a convention (``consolidated``,
``adapter_model``); any other extra file is refused, because engines disagree on which of the two they load.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.errors import CheckpointError, InputError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
INDEX_ENDING = ".safetensors.index.json"
FAMILY = re.compile(r"(?P<stem>.+)-(?P<part>\d+)-of-(?P<parts>\d+)\.safetensors$")
SECOND_COPY = re.compile(r"(consolidated|adapter_model).*\.safetensors(\.index\.json)?$")
# Weights of other frameworks, by the names their writers give them; an unknown .bin or .pt stays a side file.
_FOREIGN = re.compile(
    r"((pytorch_model|model|flax_model|consolidated|adapter_model|diffusion_pytorch_model|openvino_\w*|checkpoint)"
    r".*\.(bin|pt|pth|ckpt|bin\.index\.json|msgpack\.index\.json)"
    r"|.*\.(gguf|ggml|onnx|onnx_data|h5|msgpack|ot|tflite|nemo|pte)"
    r"|.*\.(safetensors\.tmp|incomplete|narrowcast-tmp))$"  # what a killed writer or download left
)
_SENTENCE_MODULE = re.compile(
    r"\d+_\w+$"
)  # sentence-transformers keeps small layers of the model in such folders


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory's files by use, in name order; ``shards`` are absolute, the others relative to ``root``."""

    root: Path
    shards: tuple[Path, ...]
    index_name: str | None
    index: dict[str, Any] | None
    side_files: tuple[Path, ...]
    foreign: tuple[Path, ...]


def survey(root: Path) -> Folder:
    """List and sort the files of a checkpoint directory; CheckpointError when there are no usable weights."""
    files = listed(root)
    top = [file.name for file in files if len(file.parts) == 1]
    weights = [name for name in top if name.endswith(".safetensors")]
    if not weights:
        raise _no_weights(root, files)
    index_name = _choose_index(root, top)
    index = read_object(root / index_name)[1] if index_name else None
    first_copy = [name for name in weights if not SECOND_COPY.match(name)] or weights
    if index is not None and index_name is not None:
        shards = _indexed(root, index_name, index, first_copy)
    else:
        shards = _unindexed(root, first_copy)
    taken = {CONFIG, index_name, *shards}
    rest = [file for file in files if str(file) not in taken]
    foreign = tuple(file for file in rest if is_foreign(file))
    side = tuple(file for file in rest if not is_foreign(file))
    return Folder(root, tuple(root / name for name in shards), index_name, index, side, foreign)


def read_object(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A file's bytes and the JSON object in them; CheckpointError when it is none or has a key twice, or when it is a
    pipe or device, whose reading might never end."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
        return found

    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path.name} is not a regular file", where=path, wanted="a file of JSON")
    try:
        content = path.read_bytes()
        parsed = json.loads(content, object_pairs_hook=unique)
        if not isinstance(parsed, dict):
            raise ValueError(f"its top level is a {type(parsed).__name__}")
    except OSError as error:
        raise _unreadable(error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} is not a JSON object",
            where=path,
            got=str(error),
            remedy="download or copy the file again",
        ) from None
    return content, parsed


def below(root: Path, onerror: Callable[[OSError], object]) -> Iterator[Path]:
    """Whatever is below root and no folder; links to folders are followed, each folder once, hidden ones left out."""
    seen = {os.path.realpath(root)}
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=onerror):
        keep = []
        for name in sorted(subfolders):
            real = os.path.realpath(os.path.join(folder, name))
            if not name.startswith(".") and real not in seen:
                seen.add(real)
                keep.append(name)
        subfolders[:] = keep
        yield from (Path(folder, name) for name in names)


def listed(root: Path) -> list[Path]:
    """Every file below root, relative and sorted, symlinks followed, hidden folders left out."""

    def refuse(error: OSError) -> None:  # os.walk would leave the folder out without a word
        raise _unreadable(error)

    files = list(below(root, refuse))
    for file in files:
        if not os.path.exists(file):
            raise CheckpointError(
                f"{file.name} is a symlink to nothing",
                where=file,
                got=os.readlink(file),
                remedy="finish the download, or remove the link",
            )
        if not os.path.isfile(file):  # reading a pipe waits for ever, reading a device never ends
            raise CheckpointError(
                f"{file.name} is neither a file nor a directory",
                where=file,
                wanted="regular files, or links to them",
                remedy="move it out of the model's directory",
            )
    return sorted(file.relative_to(root) for file in files)


def _unreadable(error: OSError) -> InputError:
    return InputError("a part of the checkpoint cannot be read", where=error.filename, got=error.strerror)


def is_foreign(file: Path) -> bool:
    """Whether a file of a checkpoint directory holds weights in another format, or a second copy of them."""
    if len(file.parts) > 1 and file.name.endswith((".safetensors", INDEX_ENDING)):
        return not _SENTENCE_MODULE.match(file.parts[0])
    return bool(_FOREIGN.match(file.name) or file.name.endswith((".safetensors", INDEX_ENDING)))


def _no_weights(root: Path, files: list[Path]) -> CheckpointError:
    if not files:
        return CheckpointError(
            "the directory is empty", where=root, wanted="safetensors shards and a config.json"
        )
    foreign = [str(file) for file in files if is_foreign(file)]
    endings = " ".join(foreign)
    below = [file.parent for file in files if len(file.parts) > 1 and file.name.endswith(".safetensors")]
    if below:
        remedy = f"give the directory that holds them, such as {root / below[0]}"
    elif ".gguf" in endings:
        remedy = "give the original safetensors checkpoint; a GGUF holds weights that are quantized already"
    elif foreign:
        remedy = "save the model as safetensors first (transformers: from_pretrained, then save_pretrained)"
    else:
        remedy = "give the directory that holds the *.safetensors files"
    found = foreign or [str(file) for file in files]
    return CheckpointError(
        "no safetensors weights in this directory",
        where=root,
        got=some(found),
        wanted="*.safetensors",
        remedy=remedy,
    )


def _choose_index(root: Path, top: list[str]) -> str | None:
    found = [name for name in top if name.endswith(INDEX_ENDING)]
    if INDEX in found or not found:
        return INDEX if found else None
    first_copy = [name for name in found if not SECOND_COPY.match(name)]
    if len(first_copy) > 1:
        raise CheckpointError(
            "several indexes and none of the usual name", where=root, got=some(first_copy), wanted=INDEX
        )
    if first_copy:
        return first_copy[0]
    only_copies = all(SECOND_COPY.match(name) for name in top if name.endswith(".safetensors"))
    return found[0] if only_copies else None


def _indexed(root: Path, index_name: str, index: dict[str, Any], weights: list[str]) -> list[str]:
    where = root / index_name
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(
            "the index has no weight_map", where=where, got=type(table).__name__, wanted="an object"
        )
    for tensor, shard in table.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"the index places tensor {tensor!r} in something that is no shard of this directory",
                where=where,
                got=repr(shard),
                wanted="the name of a .safetensors file beside the index",
            )
    shards = sorted(set(table.values()))
    missing = [name for name in shards if not (root / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(shards)} shards are missing",
            where=root,
            got=some(missing),
            remedy="finish the download of these files",
        )
    strays = sorted(set(weights) - set(shards))
    if strays:
        raise CheckpointError(
            "a safetensors file holds tensors that the index does not know",
            where=where,
            got=some(strays),
            wanted=f"only the shards of the index: {some(shards)}",
            remedy="remove the file, or the index when it belongs to an older save",
        )
    return shards


def _unindexed(root: Path, weights: list[str]) -> list[str]:
    members = [FAMILY.match(name) for name in weights]
    if len(weights) == 1 and members[0] is None:
        return weights
    stems = {(member["stem"], int(member["parts"])) if member else None for member in members}
    family = next(iter(stems))
    if len(stems) > 1 or family is None:
        raise CheckpointError(
            "several weight files and no index that says which belong to the model",
            where=root,
            got=some(weights),
            wanted=INDEX,
            remedy="restore the index, or move the files that do not belong to the model away",
        )
    have = {int(member["part"]) for member in members if member}
    missing = [str(part) for part in range(1, family[1] + 1) if part not in have]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {family[1]} shards are missing, and the index too",
            where=root,
            got=f"parts {some(missing)} of {family[1]}",
            remedy="finish the download",
        )
    return weights


def some(names: list[str], most: int = 5) -> str:
    """The first names of a list and how many more there are, for messages."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
