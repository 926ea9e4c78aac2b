"""Which token ids both models read: scripts without spaces, tokenizers that are damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from narrowcast.errors import CheckpointError
from narrowcast.runtime.walk import Running
from narrowcast.studies.tokens import shared
from narrowcast.texts.documents import Corpus, Document
from studies import calibrated_toys as toys


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.llama(tmp_path_factory.mktemp("tokens") / "model")


def test_a_text_without_spaces_is_a_text(model: Path) -> None:
    """Chinese, Japanese and Thai are written so; what counts is tokens, not words."""
    corpus = Corpus("made", (Document("one", "w1-w2-w3"), Document("token", "w4"), Document("two", "w5 w6")))
    with Running.open(model) as run:
        pieces = shared(run, None, corpus, 16, 100).pieces
    assert [(piece.document, len(piece.ids)) for piece in pieces] == [(0, 5), (2, 2)]


@pytest.mark.parametrize("content", ["{", "[]", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_named(model: Path, tmp_path: Path, content: str) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    (damaged / "tokenizer.json").write_text(content)
    corpus = Corpus("made", (Document("one", "w1 w2"),))
    with (
        Running.open(damaged) as run,
        pytest.raises(CheckpointError, match="cannot read the tokenizer") as caught,
    ):
        shared(run, None, corpus, 16, 100)
    assert str(damaged) in str(caught.value)
