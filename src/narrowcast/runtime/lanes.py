"""Several runs of one text side by side, layer by layer: a parent, a quantized child, the child under other caches.

    for layer i:   for each model: weights of layer i in memory
                   for each piece, for each lane: h[lane, piece] ← layer_i(h[lane, piece])

Every lane sees the same token ids. Lanes of one model share its weights, so a comparison of cache modes reads the
checkpoint once. What a study wants to know it hangs in: ``prepare`` sees a layer before its first piece (hooks go
there), ``after`` sees the lanes' states behind each layer, and the logits come last, piece by piece, never stored.

In memory are one layer of one model, the models' outer parts, and the hidden states of all pieces and lanes, or one of
them where the states are on disk (``spool``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowcast.errors import UsageError
from narrowcast.jobs.stream import ProgressFactory, Silent
from narrowcast.runtime.spool import Spool, choose
from narrowcast.runtime.walk import Running, State
from narrowcast.texts.documents import Piece


@dataclass(frozen=True)
class Lane:
    """One run of the text: a model, and what makes the KV cache of a piece (None: keys and values stay as they are).

    ``cache`` gives a transformers Cache that is empty; one is made for every layer of every piece.
    """

    name: str
    run: Running
    cache: Callable[[], Any] | None = None


Prepare = Callable[[int, Running, nn.Module], None]
After = Callable[[int, int, Sequence[State]], None]  # layer, index of the piece, one state per lane


def together(
    lanes: Sequence[Lane],
    pieces: Sequence[Piece],
    *,
    prepare: Prepare | None = None,
    after: After | None = None,
    progress: ProgressFactory = Silent,
    spool: str | Path | None = None,
    told: Callable[[str], None] = lambda sentence: None,
) -> Iterator[list[torch.Tensor]]:
    """Take all pieces through all lanes, then give each piece's logits, float32 [T, V] for each lane.

    ``spool`` is a directory to keep hidden states in; None keeps them in memory, unless they need more than a quarter
    of what is free, and then in the system's temporary directory. ``told`` hears a sentence about that where the
    states are on disk.

    Raises UsageError where the models have different depths, StorageError where ``spool`` cannot be written.
    """
    depths = {lane.run.depth for lane in lanes}
    if len(depths) != 1:
        raise UsageError("these models are not of one architecture", got=f"{sorted(depths)} layers")
    shelf, why = choose(sum(_needs(lane.run) for lane in lanes) * sum(len(p.ids) for p in pieces), spool)
    if why is not None:
        told(why)
    with closing(shelf) if shelf is not None else nullcontext():
        states = _begin(lanes, pieces, shelf)
        _through(lanes, states, prepare, after, progress)
        for row in states:
            yield [lane.run.logits(state) for lane, state in zip(lanes, row, strict=True)]


def _needs(run: Running) -> int:
    """Bytes of the hidden states of one token."""
    hidden: int = run.config.hidden_size
    return hidden * run.dtype.itemsize


def _begin(lanes: Sequence[Lane], pieces: Sequence[Piece], shelf: Spool | None) -> list[list[State]]:
    """A state for each piece and lane. The longest piece comes first: the masks of others are corners of its."""
    runs = {id(lane.run): lane.run for lane in lanes}
    states: dict[int, list[State]] = {}
    for index in sorted(range(len(pieces)), key=lambda index: -len(pieces[index].ids)):
        ids = torch.tensor(pieces[index].ids)
        begun = {key: run.begin(ids) for key, run in runs.items()}
        row = [State(one.ids, one.hidden, one.calls) for one in (begun[id(lane.run)] for lane in lanes)]
        states[index] = row if shelf is None else [state.spooled(shelf) for state in row]
    return [states[index] for index in range(len(pieces))]


def _through(
    lanes: Sequence[Lane],
    states: Sequence[Sequence[State]],
    prepare: Prepare | None,
    after: After | None,
    progress: ProgressFactory,
) -> None:
    """Every state through every layer."""
    runs = {id(lane.run): lane.run for lane in lanes}
    depth = lanes[0].run.depth
    shown = progress(depth * len(states) * len(lanes), "running")
    for i in range(depth):
        for key, run in runs.items():
            layer = run.layer(i)
            if prepare is not None:
                prepare(i, run, layer)
            for row in states:
                for lane, state in zip(lanes, row, strict=True):
                    if id(lane.run) == key:
                        run.step(layer, i, state, lane.cache() if lane.cache is not None else None)
                        shown.advance(1)
            del layer  # before the next one is read
        if after is not None:
            for index, row in enumerate(states):
                after(i, index, row)
    shown.done()
