"""A Hugging Face style checkpoint: weights in safetensors shards, config.json, and everything that travels
with them.

    entries = ⋃ header(shard),   index.weight_map = {name: shard that has it}   (or no index and one shard)

Opening reads headers only, and believes none of the parts alone: what the index says must be what the shards
have, both ways, and no tensor may exist twice. A checkpoint that contradicts itself is loaded by different
engines as different models, so every contradiction is a CheckpointError that names the tensor and the files.

Weights in other formats beside the shards (pickles, GGUF, ONNX, a ``consolidated`` copy) are listed apart as
``foreign_weights``: they are the old weights once more and do not belong into a converted checkpoint. All
other files are ``side_files`` and travel along byte for byte: tokenizer, templates, processor files, custom
code, subfolders.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from narrowcast.errors import CheckpointError, InputError, UsageError
from narrowcast.store.folder import CONFIG, read_object, some, survey
from narrowcast.store.safetensors import Entry, Reader

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
# What decides here how a model is read; a value of another kind would be misread or break far from its cause.
CONFIG_KINDS: dict[str, tuple[type, str]] = {
    "architectures": (list, "a list of class names"),
    "model_type": (str, "a name"),
    "text_config": (dict, "an object"),
    "quantization_config": (dict, "an object"),
    "compression_config": (dict, "an object"),
}


@dataclass
class Checkpoint:
    """An opened checkpoint; ``open`` it, use it as a context manager or ``close`` it.

    ``shards`` are absolute paths in name order; ``entries`` maps every tensor name to its Entry, shard by
    shard in file order; ``metadata`` has each shard's free-form metadata by file name. ``side_files`` and
    ``foreign_weights`` are relative to ``root``. ``tied`` lists (head, embedding) names that share one stored
    tensor. A single file opens with config None and without side files. Readers stay open until ``close``;
    all reads may come from many threads.

    Of a file that holds a whole model (GGUF), ``beside`` makes the side files that it stands for, by name, with notes
    on what cannot be made, and ``decoded`` names tensors whose dtype is not the model's choice.
    """

    root: Path
    config: dict[str, Any] | None
    config_bytes: bytes | None
    shards: tuple[Path, ...]
    entries: dict[str, Entry]
    index: dict[str, Any] | None
    metadata: dict[str, dict[str, str]]
    side_files: tuple[Path, ...]
    foreign_weights: tuple[Path, ...]
    tied: tuple[tuple[str, str], ...]
    beside: Callable[[], tuple[dict[str, bytes], list[str]]] = lambda: ({}, [])
    decoded: frozenset[str] = frozenset()
    _readers: dict[Path, Reader] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, model: str | Path) -> Checkpoint:
        """Open a directory, one .safetensors file, or a hub id (``owner/name``, needs huggingface_hub).

        Raises UsageError when there is nothing of that name, HeaderError for a bad shard, CheckpointError
        when the parts do not fit together.
        """
        path = Path(model)
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError) as error:
            raise InputError("the model cannot be opened", where=model, got=str(error)) from error
        else:
            return cls._open_folder(path) if stat.S_ISDIR(mode) else cls._open_file(path)
        from narrowcast.store.remote import fetch

        return cls._open_folder(fetch(str(model)))

    @classmethod
    def _open_file(cls, path: Path) -> Checkpoint:
        path = path.absolute()
        reader = Reader(path)
        metadata = {path.name: reader.metadata}
        entries, readers = dict(reader.entries), {path: reader}
        return cls(path.parent, None, None, (path,), entries, None, metadata, (), (), (), _readers=readers)

    @classmethod
    def _open_folder(cls, path: Path) -> Checkpoint:
        folder = survey(path.absolute())
        config_bytes, config = _read_config(folder.root)
        readers: dict[Path, Reader] = {}
        try:
            for shard in folder.shards:
                readers[shard] = Reader(shard)
            entries = _join(readers)
            if folder.index is not None:
                _check_index(folder.index["weight_map"], entries, folder.root / str(folder.index_name))
        except BaseException:
            for reader in readers.values():
                reader.close()
            raise
        return cls(
            root=folder.root,
            config=config,
            config_bytes=config_bytes,
            shards=folder.shards,
            entries=entries,
            index=folder.index,
            metadata={shard.name: reader.metadata for shard, reader in readers.items()},
            side_files=folder.side_files,
            foreign_weights=folder.foreign,
            tied=_tied(config, entries),
            _readers=readers,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all shards; arrays that were handed out stay valid."""
        for reader in self._readers.values():
            reader.close()

    def entry(self, name: str) -> Entry:
        """The entry of a tensor; UsageError with near names when there is none."""
        found = self.entries.get(name)
        if found is None:
            near = get_close_matches(name, self.entries, n=3)
            raise UsageError(
                f"no tensor {name!r} in this checkpoint",
                where=self.root,
                remedy=f"did you mean {', '.join(near)}?" if near else None,
            )
        return found

    def reader(self, path: Path) -> Reader:
        """The open reader of one of ``shards``."""
        return self._readers[path]

    def array(self, name: str) -> NDArray[Any]:
        """A read-only view of a tensor in carrier dtype and logical shape; see Reader.array."""
        return self.reader(self.entry(name).path).array(name)

    def rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        """A fresh array of rows first:last of the tensor as a matrix; see Reader.rows."""
        return self.reader(self.entry(name).path).rows(name, first, last)

    def read_into(self, name: str, buffer: Any, start: int = 0) -> None:
        """Fill a buffer with the tensor's bytes from byte ``start`` on; see Reader.read_into."""
        self.reader(self.entry(name).path).read_into(name, buffer, start)

    def read_pieces(self, name: str, buffer: NDArray[Any], start: int, stride: int) -> None:
        """Fill the rows of a buffer from byte ``start`` of the tensor on, ``stride`` bytes apart; see
        Reader.read_pieces."""
        self.reader(self.entry(name).path).read_pieces(name, buffer, start, stride)

    def release(self) -> None:
        """Give the pages touched through ``array`` back to the system, in all shards."""
        for reader in self._readers.values():
            reader.release()


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text model: the nested one where there is one."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return text_config(inner)
    return config


def _read_config(root: Path) -> tuple[bytes, dict[str, Any]]:
    path = root / CONFIG
    if not os.path.isfile(path):
        raise CheckpointError(
            "config.json is missing",
            where=root,
            got="safetensors weights without a config",
            wanted="the config.json of the model",
            remedy="copy it beside the weights, or give one .safetensors file to look at it alone",
        )
    return read_config(path)


def read_config(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A config's bytes and what they say; CheckpointError for no JSON object, or a value of another kind than
    ``CONFIG_KINDS`` has."""
    content, config = read_object(path)
    for key, (kind, wanted) in CONFIG_KINDS.items():
        value = config.get(key)
        names = all(isinstance(item, str) for item in value) if isinstance(value, list) else True
        if value is not None and not (isinstance(value, kind) and names):
            raise CheckpointError(
                f"config.json: {key} is not {wanted}",
                where=path,
                got=repr(value)[:60],
                wanted=f"{wanted}, or null",
                remedy="download or copy the file again",
            )
    return content, config


def _join(readers: dict[Path, Reader]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for path, reader in readers.items():
        for name, entry in reader.entries.items():
            if name in entries:
                raise CheckpointError(
                    f"tensor {name!r} is in two shards",
                    where=path.parent,
                    got=f"{entries[name].path.name} and {path.name}",
                    wanted="every tensor once",
                )
            entries[name] = entry
    return entries


def _check_index(table: dict[str, str], entries: dict[str, Entry], where: Path) -> None:
    lost = [name for name in table if name not in entries]
    if lost:
        raise CheckpointError(
            f"the index lists {len(lost)} tensors that no shard has, first {lost[0]!r}",
            where=where,
            got=f"{table[lost[0]]} without it",
            wanted=some(lost),
            remedy="shards and index come from different saves: download or save both again",
        )
    unknown = [name for name in entries if name not in table]
    if unknown:
        raise CheckpointError(
            f"the shards have {len(unknown)} tensors that the index does not list, first {unknown[0]!r}",
            where=where,
            got=f"{entries[unknown[0]].path.name} with {some(unknown)}",
            remedy="shards and index come from different saves: download or save both again",
        )
    for name, shard in table.items():
        if entries[name].path.name != shard:
            raise CheckpointError(
                f"tensor {name!r} is in another shard than the index says",
                where=where,
                got=entries[name].path.name,
                wanted=shard,
                remedy="shards and index come from different saves: download or save both again",
            )


def _tied(config: dict[str, Any], entries: dict[str, Entry]) -> tuple[tuple[str, str], ...]:
    """The output head that shares the embedding's tensor.

    Tied when the config says so, at the top or for its text part. Where it is silent the architectures' own
    default counts, and that shows in the file: a causal model without any head tensor is tied.
    """
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    said = [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]
    embeddings = [name for name in entries if name.endswith(_EMBEDDINGS)]
    heads = [name for name in entries if name in _HEADS or name.endswith(".lm_head.weight")]
    architectures = config.get("architectures")
    generates = isinstance(architectures, list) and any(
        str(name).endswith(_GENERATORS) for name in architectures
    )
    tied = all(said) and bool(said) if heads else any(said) or (generates and not said)
    if not embeddings or not tied:
        return ()
    return ((heads[0] if heads else _HEADS[0], min(embeddings, key=len)),)
