"""Documents to run models over: text, JSON lines, parquet, a dataset by name, or what ships with Python.

    corpus = read(sources)          documents with names, and a SHA-256 over all of their text
    token_ids(tokenizer, corpus)    pieces of at most ``context`` tokens, each within one document

A document is the unit of statistics: tokens of one document depend on each other. A document longer than the context
gives several pieces, which stay one document for statistics.

Without sources the text is ``pydoc_data.topics`` of the running Python: the help topics of the language reference,
sorted by name. It needs no download; its hash is printed because it changes with Python's version.

Left out: chat templates (a text is text), and packing of several documents into one piece.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.errors import InputError, UsageError

TEXT_KEYS = ("text", "content", "prompt", "document")
BUILT_IN = "python-topics"
DATASET = "dataset:"


@dataclass(frozen=True)
class Document:
    """A named text."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents in order. ``sha256`` is over their texts, each preceded by its length in bytes."""

    name: str
    documents: tuple[Document, ...]

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for document in self.documents:
            data = document.text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Piece:
    """Token ids of a part of one document: ``document`` is its index in the corpus, ``start`` the first token's place
    in the document's own token ids."""

    document: int
    name: str
    start: int
    ids: tuple[int, ...]


def read(sources: Sequence[str] = ()) -> Corpus:
    """The documents of files and datasets, or the built-in ones where there are no sources.

    A source is a file (.jsonl and .json hold objects with a text field, .parquet a text column, anything else is
    one document of UTF-8), ``dataset:NAME[:CONFIG[:SPLIT]]``, or ``python-topics``. Raises UsageError for a source
    that does not exist, InputError for one that holds no text.
    """
    chosen = list(sources) or [BUILT_IN]
    documents = [document for source in chosen for document in _read(source)]
    documents = [_encodable(document) for document in documents if document.text.strip()]
    if not documents:
        raise InputError("no text", where=", ".join(chosen), wanted="at least one document that is not empty")
    return Corpus(", ".join(chosen), tuple(documents))


def _read(source: str) -> Iterator[Document]:
    if source == BUILT_IN:
        yield from _topics()
    elif source.startswith(DATASET):
        yield from _dataset(source.removeprefix(DATASET))
    else:
        path = Path(source)
        if not path.is_file():
            wanted = f"a file, {BUILT_IN}, or {DATASET}NAME"
            raise UsageError("no such text", got=source, wanted=wanted)
        yield from _READERS.get(path.suffix.lower(), _plain)(path)


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(name, topics[name])


def _encodable(document: Document) -> Document:
    """The document, when its text has a UTF-8 form; JSON can spell half of a surrogate pair, which has none."""
    try:
        document.text.encode()
    except UnicodeEncodeError as error:
        got = f"half of a surrogate pair at character {error.start}"
        raise InputError("the text is not Unicode", where=document.name, got=got) from None
    return document


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("the text is not UTF-8", where=path, got=f"byte {error.start}") from None
    except OSError as error:
        raise InputError("the text cannot be read", where=path, got=error.strerror) from None


def _plain(path: Path) -> Iterator[Document]:
    yield Document(path.name, _content(path))


def _lines(path: Path) -> Iterator[Document]:
    for number, line in enumerate(_content(path).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                raise InputError("not JSON lines", where=f"{path}:{number}", got=said) from None
            yield Document(f"{path.name}:{number}", _text_of(row, f"{path}:{number}"))


def _json(path: Path) -> Iterator[Document]:
    try:
        rows = json.loads(_content(path))
    except (ValueError, RecursionError):
        yield from _lines(path)
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield Document(f"{path.name}:{number}", _text_of(row, f"{path}:{number}"))


def _text_of(row: Any, where: str) -> str:
    if isinstance(row, str):
        return row
    key = next((key for key in TEXT_KEYS if isinstance(row, dict) and isinstance(row.get(key), str)), None)
    if key is None:
        got = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise InputError("a row without text", where=where, got=got, wanted=f"one of {', '.join(TEXT_KEYS)}")
    return str(row[key])


def _parquet(path: Path) -> Iterator[Document]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UsageError("parquet files need pyarrow", where=path, remedy="pip install pyarrow") from None
    try:
        names = parquet.read_schema(path).names
        key = next((key for key in TEXT_KEYS if key in names), None)
        column = parquet.read_table(path, columns=[key]).column(key) if key is not None else None
    except (OSError, ValueError) as error:  # pyarrow's own errors are among them
        said = str(error).split("\n")[0]
        raise InputError("the parquet file cannot be read", where=path, got=said) from None
    if column is None:
        raise InputError("no text column", where=path, got=", ".join(names), wanted=" or ".join(TEXT_KEYS))
    if str(column.type) not in ("string", "large_string", "string_view", "null"):
        raise InputError(f"the column {key} holds {column.type}", where=path, wanted="text")
    for number, text in enumerate(column.to_pylist(), 1):
        yield Document(f"{path.name}:{number}", text or "")


def _dataset(said: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            "datasets by name need the datasets package",
            got=said,
            remedy="pip install datasets, or give a file",
        ) from None
    name, _, rest = said.partition(":")
    config, _, split = rest.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "test")
    except Exception as error:  # whatever the hub says
        raise InputError("the dataset cannot be loaded", where=said, got=str(error).split("\n")[0]) from None
    for number, row in enumerate(rows, 1):
        yield Document(f"{name}:{number}", _text_of(row, f"{said}, row {number}"))


_READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    ".jsonl": _lines, ".json": _json, ".parquet": _parquet
}  # fmt: skip


def token_ids(tokenize: Callable[[str], Sequence[int]], corpus: Corpus, context: int) -> list[Piece]:
    """Pieces of at most ``context`` tokens, document after document.

    ``tokenize`` gives a text's ids, special tokens included as the model wants them. A piece of one token says nothing
    about a next one and is left out. Raises UsageError where nothing is left.
    """
    if context < 2:
        raise UsageError("a context of tokens that predict each other", got=context, wanted="2 or more")
    found: list[Piece] = []
    for number, document in enumerate(corpus.documents):
        ids = tuple(tokenize(document.text))
        for start in range(0, len(ids), context):
            piece = ids[start : start + context]
            if len(piece) > 1:
                found.append(Piece(number, document.name, start, piece))
    if not found:
        raise UsageError("no piece of two tokens", where=corpus.name, remedy="give longer texts")
    return found
