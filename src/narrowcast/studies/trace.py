"""Look at every operation of a model on a text: how large its values are, what FP16 and E4M3 would lose of them, and
where a run made infinity or NaN.

    for every operation of every layer:   amax, where it is and why, headroom, shares beyond and below (trace_counts)
    the first operation that FP16 cannot hold, in the order of computation; else the nearest to it
    a run that breaks:                    the chain from the first value that is no number (trace_chain)

The model runs layer by layer (``runtime.walk``), attention as separate products, so that scores are seen. What stays
in fp32 in every engine, the inside of norms, is counted but not held against FP16.

Left out: scores of masked pairs are counted with the others, because eager attention computes them; a fused attention
kernel keeps q·k in fp32 and computes fewer of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowcast.jobs.stream import ProgressFactory, Silent
from narrowcast.runtime import operations as op
from narrowcast.runtime.lanes import Lane, together
from narrowcast.runtime.operations import EAGER, Operation, Watch
from narrowcast.runtime.walk import Running
from narrowcast.studies.tokens import shared
from narrowcast.studies.trace_chain import Chain, First, Follow, chain, step_of
from narrowcast.studies.trace_counts import LARGEST, Counts, Place, rows
from narrowcast.studies.trace_why import explain
from narrowcast.texts.documents import Corpus, Piece, read

CONTEXT, TOKENS = 512, 512
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")
NOT_CHANNELS = (op.SCORES, op.SOFTMAX)  # their last axis is keys


def _angles(operation: Operation) -> bool:
    """Outside the layers, what has no other name: the angles of rotary embedding, which grow with the position."""
    return operation.kind == op.OTHER and not operation.layered


@dataclass
class Trace:
    """What was seen. ``counts`` come in the order of computation; ``chain`` is there where a value was no number."""

    model: Path
    dtype: str
    corpus: Corpus
    pieces: list[Piece]
    depth: int
    layers: str
    counts: list[Counts]
    chain: Chain | None
    decode: Callable[[int], str] = field(repr=False, default=str)
    notes: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def judged(self) -> list[Counts]:
        """Operations that a 16-bit run keeps in 16 bits."""
        return [one for one in self.counts if one.operation.kind != op.STATISTICS]

    @property
    def overflow(self) -> Counts | None:
        """The first operation with a value beyond FP16."""
        return next((one for one in self.judged if one.amax > LARGEST["fp16"]), None)

    @property
    def nearest(self) -> Counts:
        """The operation with the least headroom in FP16."""
        return min(self.judged, key=lambda one: one.headroom("fp16"))

    def cause(self, one: Counts) -> Counts:
        """The operation that made a large value: the first of this token whose amax is half of it, of the linears and
        products before, where the value itself is only carried on."""
        assert one.at is not None
        for before in self.judged:
            if before is one:
                break
            if before.at is None or (before.at.piece, before.at.token) != (one.at.piece, one.at.token):
                continue
            if before.amax * 2 >= one.amax and before.operation.kind in (op.LINEAR, op.PRODUCT):
                return before
        return one

    @property
    def kinds(self) -> list[tuple[str, list[Counts]]]:
        """Operations of one name over all layers, in the order of a layer."""
        found: dict[str, list[Counts]] = {}
        for one in self.judged:
            found.setdefault(one.operation.name, []).append(one)
        return list(found.items())

    @property
    def stream(self) -> list[Counts]:
        """The residual stream: the embedding, and behind each layer."""
        last = {
            one.operation.layer: one
            for one in self.counts
            if one.operation.kind in (op.EMBEDDING, op.RESIDUAL)
        }
        return [last[layer] for layer in sorted(last)]

    def where(self, operation: Operation) -> str:
        """An operation's name with its layer: layers.3.mlp.down_proj, layers.3.self_attn scores."""
        if operation.layer < 0 or operation.layer >= self.depth:
            return operation.name if operation.kind in (op.EMBEDDING, op.LOGITS) else operation.inside
        name = f"{self.layers.rpartition('.')[2]}.{operation.layer}"
        return f"{name}{'.' if operation.path else ' '}{operation.inside}"

    def text(self, place: Place | First) -> str:
        """The text of the token at a place."""
        return self.decode(self.pieces[place.piece].ids[place.token])

    def position(self, place: Place | First) -> int:
        """The token's place in its document."""
        return self.pieces[place.piece].start + place.token

    def to_json(self) -> dict[str, Any]:
        def told(one: Counts) -> dict[str, Any]:
            more: dict[str, Any] = {"where": self.where(one.operation)}
            if one.at is not None:
                piece = self.pieces[one.at.piece]
                more |= {
                    "document": piece.name,
                    "token": self.position(one.at),
                    "token_text": self.text(one.at),
                }
            return more | one.to_json()

        worst = self.overflow or self.nearest
        return {
            "model": str(self.model), "dtype": self.dtype,
            "text": {"name": self.corpus.name, "sha256": self.corpus.sha256, "tokens": self.tokens,
                     "pieces": [{"document": piece.name, "start": piece.start, "tokens": len(piece.ids),
                                 "first_ids": piece.ids[:8]} for piece in self.pieces]},
            "notes": self.notes,
            "overflows_fp16": self.overflow is not None, "nearest": told(worst), "made_by": told(self.cause(worst)),
            "chain": self._chain(), "operations": [told(one) for one in self.counts],
        }  # fmt: skip

    def _chain(self) -> dict[str, Any] | None:
        if self.chain is None:
            return None
        first = self.chain.first
        return self.chain.to_json() | {
            "where": self.where(self.chain.step.operation), "document": self.pieces[first.piece].name,
            "token": self.position(first), "token_text": self.text(first),
        }  # fmt: skip


class Recorder:
    """Counts every operation's output, and follows what is no number."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.counts: dict[tuple[int, str, str], Counts] = {}
        self.follows = [Follow() for _ in pieces]
        self.watch = Watch(self)

    def input(self, operation: Operation, value: torch.Tensor) -> torch.Tensor:
        return value

    def output(
        self, operation: Operation, inputs: tuple[torch.Tensor, ...], value: torch.Tensor
    ) -> torch.Tensor:
        piece = self.watch.piece
        tokens = len(self.pieces[piece].ids)
        if value.ndim < 2 or value.numel() == 0:
            return value
        x = rows(value, tokens, operation.kind)
        numbers = operation.rows if operation.rows is not None else torch.arange(len(x))
        if len(numbers) != len(x):
            return value
        path = _NUMBER.sub("", operation.path)  # experts count together
        key = (operation.layer, path, operation.name)
        if key not in self.counts:
            self.counts[key] = Counts(
                Operation(operation.layer, path, operation.kind, operation.name, operation.module),
                outliers_known=operation.kind not in NOT_CHANNELS and not _angles(operation),
            )
        counts = self.counts[key]
        row = counts.add(x, piece, numbers)
        if row is not None and counts.at is not None:
            counts.why = explain(operation, inputs, tokens, row, counts.at.channel)
        self._follow(operation, inputs, x, numbers, piece)
        return value

    def _follow(
        self,
        operation: Operation,
        inputs: tuple[torch.Tensor, ...],
        x: torch.Tensor,
        numbers: torch.Tensor,
        piece: int,
    ) -> None:
        follow = self.follows[piece]
        finite = torch.isfinite(x)
        bad = ~finite.all(dim=1)
        amax = float(torch.where(finite, x.abs(), 0.0).amax())
        if follow.first is None and bool(bad.any()):
            row = int(bad.int().argmax())
            channel = int((~finite[row]).int().argmax())
            tokens = len(self.pieces[piece].ids)
            came_in = max((float(part.float().abs().amax()) for part in inputs if part.numel()), default=inf)
            why = explain(operation, inputs, tokens, row, channel)
            value = float(x[row, channel])
            follow.first = First(piece, int(numbers[row]), channel, value, len(follow.steps), came_in, why)
        token = follow.first.token if follow.first is not None else None
        if operation.rows is not None and token is not None:
            own = (numbers == token).nonzero()
            token = int(own[0]) if len(own) else None
        follow.steps.append(step_of(operation, x, bad, amax, token))


def trace(
    model: str | Path,
    text: Sequence[str] = (),
    *,
    dtype: str = "float32",
    online: str | None = None,
    context: int = CONTEXT,
    tokens: int = TOKENS,
    spool: str | Path | None = None,
    progress: ProgressFactory = Silent,
) -> Trace:
    """Run a model in ``dtype`` over ``tokens`` tokens of text, at most ``context`` at once, and count everything.
    ``spool`` is a directory that keeps hidden states, see ``lanes.together``.

    Raises UsageError and InputError as ``Running.open``, ``read`` and ``shared`` do.
    """
    with Running.open(model, dtype, online, EAGER) as run:
        corpus = read(text)
        chosen = shared(run, None, corpus, context, tokens)
        pieces = chosen.pieces
        recorder = Recorder(pieces)
        watch = recorder.watch

        def prepare(i: int, running: Running, layer: nn.Module) -> None:
            watch.attach(layer, i)
            if i == 0:
                watch.attach(running.model, running.depth, without=running.path)

        with watch, torch.inference_mode():
            lanes = [Lane("trace", run)]
            for _ in together(
                lanes, pieces, prepare=prepare, progress=progress, spool=spool, told=run.notes.append
            ):
                pass
        found = list(recorder.counts.values())
        found.sort(key=lambda one: one.operation.layer)  # the order within a layer is that of computation
        return Trace(
            run.root, dtype, corpus, pieces, run.depth, run.path, found, chain(recorder.follows),
            lambda token: chosen.text([token]), list(run.notes),
        )  # fmt: skip
