"""Several runs of one text side by side, layer by layer: a parent, a quantized child, the child under other caches.

    for layer i:   for each model: weights of layer i in memory
                   for each piece, for each lane: h[lane, piece] ← layer_i(h[lane, piece])

Every lane sees the same token ids. Lanes of one model share its weights, so a comparison of cache modes reads the
checkpoint once. What a study wants to know it hangs in: ``prepare`` sees a layer before its first piece (hooks go
there), ``after`` sees the lanes' states behind each layer, and the logits come last, piece by piece, never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from narrowcast.errors import UsageError
from narrowcast.jobs.stream import ProgressFactory, Silent
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
) -> Iterator[list[torch.Tensor]]:
    """Take all pieces through all lanes, then give each piece's logits, float32 [T, V] for each lane.

    Raises UsageError where the models have different depths.
    """
    depths = {lane.run.depth for lane in lanes}
    if len(depths) != 1:
        raise UsageError("these models are not of one architecture", got=f"{sorted(depths)} layers")
    runs = {id(lane.run): lane.run for lane in lanes}
    states: list[list[State]] = []
    for piece in pieces:
        ids = torch.tensor(piece.ids)
        begun = {key: run.begin(ids) for key, run in runs.items()}
        states.append([_own(begun[id(lane.run)]) for lane in lanes])
    depth = depths.pop()
    shown = progress(depth * len(pieces) * len(lanes), "running")
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
        if after is not None:
            for index, row in enumerate(states):
                after(i, index, row)
    shown.done()
    for row in states:
        yield [lane.run.logits(state) for lane, state in zip(lanes, row, strict=True)]


def _own(state: State) -> State:
    """The same beginning for another lane."""
    return State(state.ids, state.hidden, state.calls)
