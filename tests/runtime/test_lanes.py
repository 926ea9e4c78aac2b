"""Runs side by side: the same logits as alone, in memory and with hidden states on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from narrowcast.errors import StorageError, UsageError
from narrowcast.runtime import spool as spools
from narrowcast.runtime.lanes import Lane, together
from narrowcast.runtime.spool import Spool, choose
from narrowcast.runtime.walk import Running
from narrowcast.texts.documents import Piece
from runtime.families import saved, tokens, walked


def pieces(*counts: int) -> list[Piece]:
    return [Piece(n, f"document {n}", 0, tuple(tokens(count).tolist())) for n, count in enumerate(counts)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_logits_on_disk(tmp_path: Path, dtype: str) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with Running.open(saved("gemma2", tmp_path / "model"), dtype) as run:
        texts = pieces(9, 40, 24)
        lanes = [Lane("one", run), Lane("two", run)]
        told: list[str] = []
        got = list(together(lanes, texts, spool=shelf, told=told.append))
        for row, piece in zip(got, texts, strict=True):
            alone = walked(run, torch.tensor(piece.ids))
            assert all(torch.equal(one, alone) for one in row)
        assert told == [f"hidden states (0.00 GB) are kept on disk in {shelf}"]
    assert list(shelf.iterdir()) == []


def test_nothing_is_left_behind_an_error(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()

    def fails(*_: object) -> None:
        assert list(shelf.iterdir()) == []  # the file has no name from the beginning
        raise RuntimeError("a study failed")

    model = saved("llama", tmp_path / "model")
    with Running.open(model, "float32") as run, pytest.raises(RuntimeError, match="a study failed"):
        list(together([Lane("one", run)], pieces(9), spool=shelf, after=fails))
    assert list(shelf.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """NaN with their payloads, infinities, subnormals and negative zero."""
    words = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    bits = torch.randint(-(2**15), 2**15, (1, 7, 33), generator=torch.Generator().manual_seed(0)).to(words)
    bits[0, 0, :3] = torch.tensor([-1, 1, -(2 ** (8 * dtype.itemsize - 1))], dtype=torch.int64).to(words)
    spool = Spool.open(tmp_path)
    spool.put("a", torch.zeros(1, 2, 3))
    spool.put("b", bits.view(dtype))
    spool.put("a", torch.ones(1, 2, 3))
    assert torch.equal(spool.get("b").view(words), bits)
    assert spool.get("b").dtype == dtype
    assert torch.equal(spool.get("a"), torch.ones(1, 2, 3))
    spool.close()


def test_states_go_to_disk_when_they_are_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "free_memory", lambda: 4000)
    assert choose(1000, None) == (None, None)
    shelf, why = choose(1001, None)
    assert shelf is not None
    assert "more than a quarter of the 0.0 GB" in str(why)
    shelf.close()


def test_free_memory_is_told() -> None:
    free = spools.free_memory()
    if Path("/proc/meminfo").exists():
        assert free


def test_a_directory_that_takes_no_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be kept there"):
        Spool.open(tmp_path / "missing")


def test_models_of_other_depths(tmp_path: Path) -> None:
    with (
        Running.open(saved("llama", tmp_path / "a"), "float32") as a,
        Running.open(saved("llama", tmp_path / "b"), "float32") as b,
    ):
        b.layers = b.layers[:2]
        with pytest.raises(UsageError, match="not of one architecture"):
            list(together([Lane("a", a), Lane("b", b)], pieces(4)))
