"""The same token ids for both models, or none: tokenizers compared before anything runs.

    pieces, text = shared(child, parent, corpus, context, tokens)

Both tokenizers read the same documents, and every id must agree: a second BOS or another vocabulary shifts every
prediction, and what is then measured is the tokenizers. A checkpoint without a tokenizer takes its parent's.

Where only so many tokens are asked for, they are the beginnings of as many documents as possible, because documents
are what intervals are made of; later parts of documents follow when there are no more beginnings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from narrowcast.errors import CheckpointError, IncomparableError, UsageError
from narrowcast.runtime.walk import Running
from narrowcast.texts.documents import Corpus, Piece, token_ids

SHOWN = 8  # first token ids that a report shows
FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class Tokens:
    """Pieces of token ids and what decodes them; ``note`` says whose tokenizer it was."""

    pieces: list[Piece]
    tokenizer: Any
    note: str

    def text(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def ids(self, text: str, bare: bool = False) -> list[int]:
        """The token ids of a text, without BOS and the like where it is ``bare``."""
        return list(self.tokenizer(text, add_special_tokens=not bare, verbose=False).input_ids)

    @property
    def first(self) -> tuple[tuple[int, str], ...]:
        return tuple((i, self.text([i])) for i in self.pieces[0].ids[:SHOWN])


def tokenizer_of(run: Running) -> Any:
    """The checkpoint's own tokenizer, or None where it has none."""
    root = Path(run.root)
    if not root.is_dir() or not any((root / name).is_file() for name in FILES):
        return None
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(root, local_files_only=True)
    except Exception as error:  # whatever a damaged file makes it do
        said = f"{type(error).__name__}: {error}".split("\n")[0][:200]
        raise CheckpointError(
            "transformers cannot read the tokenizer",
            where=root,
            got=said,
            remedy="copy the tokenizer files again",
        ) from error
    found.model_max_length = 1 << 40  # texts are cut here, not there
    return found


def shared(
    child: Running, parent: Running | None, corpus: Corpus, context: int, tokens: int | None
) -> Tokens:
    """Pieces that both models read. IncomparableError where their token ids differ, UsageError without a tokenizer."""
    own = tokenizer_of(child)
    other = tokenizer_of(parent) if parent is not None and parent is not child else None
    used = own or other
    if used is None:
        raise UsageError(
            "no tokenizer", where=child.root,
            remedy="put tokenizer.json beside the weights, or name a parent that has one",
        )  # fmt: skip
    if own is not None and other is not None:
        pieces = _pieces(_checked(_ids(own), _ids(other)), corpus, context, tokens)
        note = "both models' own, same ids"
    else:
        pieces = _pieces(_ids(used), corpus, context, tokens)
        note = "the parent's; the child has none" if own is None else "the child's own"
    _fits(pieces, child, parent)
    return Tokens(pieces, used, note)


def _ids(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer(text, verbose=False).input_ids)


def _checked(
    child: Callable[[str], list[int]], parent: Callable[[str], list[int]]
) -> Callable[[str], list[int]]:
    """Ids that both give."""

    def same(text: str) -> list[int]:
        mine, theirs = child(text), parent(text)
        if mine == theirs:
            return mine
        at = next(i for i, (a, b) in enumerate(zip_longest(mine, theirs)) if a != b)
        a, b = mine[max(at - 2, 0) : at + 3], theirs[max(at - 2, 0) : at + 3]
        raise IncomparableError(
            "the models read different token ids, so their predictions cannot be compared",
            where=f"token {at} of a document that begins with {text[:40]!r}",
            got=f"child {_bos(mine)}{a}, parent {_bos(theirs)}{b}",
            remedy="give both the same tokenizer files",
        )

    return same


def _bos(ids: Sequence[int]) -> str:
    return "double BOS " if len(ids) > 1 and ids[0] == ids[1] else ""


def _pieces(
    tokenize: Callable[[str], list[int]], corpus: Corpus, context: int, tokens: int | None
) -> list[Piece]:
    """Beginnings of documents first, then their second parts, until there are ``tokens``."""
    if tokens is None:
        return token_ids(tokenize, corpus, context)
    if tokens < 2:
        raise UsageError("too few tokens to predict one from another", got=tokens, wanted="2 or more")
    by_document: list[list[Piece]] = []
    beginnings = 0
    for number, document in enumerate(corpus.documents):
        own = tokenize(document.text)
        if len(own) < 2:
            continue
        parts = token_ids({document.text: own}.__getitem__, Corpus(corpus.name, (document,)), context)
        by_document.append([Piece(number, part.name, part.start, part.ids) for part in parts])
        beginnings += len(parts[0].ids)
        if beginnings >= tokens:
            break
    chosen, left = [], tokens
    for part in (part for row in zip_longest(*by_document) for part in row if part is not None):
        ids = part.ids[:left]
        if len(ids) > 1:
            chosen.append(Piece(part.document, part.name, part.start, ids))
            left -= len(ids)
    if not chosen:
        raise UsageError("no piece of two tokens", where=corpus.name, remedy="give longer texts")
    return chosen


def _fits(pieces: Sequence[Piece], child: Running, parent: Running | None) -> None:
    """Vocabularies that are one, and hold every id."""
    sizes = [int(run.config.vocab_size) for run in (child, parent) if run is not None]
    largest = max(max(piece.ids) for piece in pieces)
    if len(set(sizes)) > 1:
        raise IncomparableError(
            "the models predict different vocabularies", where=child.root, got=f"{sizes[0]} tokens",
            wanted=f"{sizes[1]}, as the parent",
        )  # fmt: skip
    if largest >= sizes[0]:
        raise IncomparableError(
            "the tokenizer gives ids that the model does not have", where=child.root, got=largest,
            wanted=f"below {sizes[0]}",
        )  # fmt: skip
