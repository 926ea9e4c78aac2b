"""How infinities and NaN were made in a run, step by step: what went in, what grew, what each next operation did.

A step is one operation on one piece of text. The chain starts at the first operation that made a value that is no
number, follows the token it happened to, and keeps every later step at which the picture changes:

    down_proj   inf        a sum beyond 65504
    residual    inf
    norm        inf² = inf, mean inf, rsqrt(inf) = 0; inf · 0 = NaN in that channel, 0 in all others
    q_proj      NaN        in every channel, because NaN · w = NaN
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from narrowcast.runtime import operations as op
from narrowcast.runtime.operations import Operation

BEFORE, AFTER = 4, 12  # steps of a chain that are shown


@dataclass(frozen=True)
class Step:
    """What an operation gave for one piece: the largest finite value; tokens with infinity or NaN; and of the token
    that is followed, how many of its channels are infinite, NaN and zero."""

    operation: Operation
    amax: float
    tokens: int
    infinite: int = 0
    nan: int = 0
    zero: int = 0
    channels: int = 0

    @property
    def picture(self) -> tuple[bool, bool, int]:
        return self.infinite > 0, self.nan > 0, self.tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.operation.layer, "module": self.operation.path, "operation": self.operation.name,
            "amax": self.amax, "tokens": self.tokens, "infinite": self.infinite, "nan": self.nan, "zero": self.zero,
            "channels": self.channels,
        }  # fmt: skip


@dataclass(frozen=True)
class First:
    """The first element that is no number."""

    piece: int
    token: int
    channel: int
    value: float
    index: int  # of its step among the piece's steps
    came_in: float
    why: str


@dataclass
class Follow:
    """The steps of one piece."""

    steps: list[Step] = field(default_factory=list)
    first: First | None = None


@dataclass(frozen=True)
class Chain:
    """Where it began, what stood before, what followed, and how much of the logits is no number."""

    first: First
    step: Step
    before: tuple[Step, ...]
    growth: tuple[Step, Step] | None
    after: tuple[Step, ...]
    bad_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "first": self.first.__dict__ | self.step.to_json(),
            "before": [step.to_json() for step in self.before],
            "growth": [step.to_json() for step in self.growth or ()],
            "after": [step.to_json() for step in self.after],
            "tokens_without_logits": self.bad_tokens,
        }


def step_of(operation: Operation, x: torch.Tensor, bad: torch.Tensor, amax: float, token: int | None) -> Step:
    """Rows [T, C], which of their rows hold infinity or NaN, and the token that is followed."""
    count = int(bad.sum())
    if token is None or token >= len(x):
        return Step(operation, amax, count)
    row = x[token]
    return Step(
        operation,
        amax,
        count,
        int(row.isinf().sum()),
        int(row.isnan().sum()),
        int((row == 0).sum()),
        len(row),
    )


def chain(follows: list[Follow]) -> Chain | None:
    """The chain of the piece whose first bad operation comes earliest; None where all is finite."""
    bad = [one for one in follows if one.first is not None]
    if not bad:
        return None
    chosen = min(bad, key=_order)
    first, steps = chosen.first, chosen.steps
    assert first is not None
    at = steps[first.index]
    plain = [step for step in steps[: first.index] if step.operation.kind not in (op.STATISTICS, op.ROTARY)]
    return Chain(
        first, at, tuple(plain[-BEFORE:]), _growth(steps[: first.index]), _after(steps[first.index :]),
        sum(one.steps[-1].tokens for one in follows),
    )  # fmt: skip


def _order(follow: Follow) -> tuple[int, int]:
    assert follow.first is not None
    return follow.steps[follow.first.index].operation.layer, follow.first.index


def _growth(steps: list[Step]) -> tuple[Step, Step] | None:
    """Two neighbours in the residual stream between which it grew most."""
    stream = [step for step in steps if step.operation.kind in (op.EMBEDDING, op.RESIDUAL) and step.amax > 0]
    return max(pairwise(stream), key=lambda pair: pair[1].amax / pair[0].amax, default=None)


def _after(steps: list[Step]) -> tuple[Step, ...]:
    """Every step until the token's row is all NaN, then those at which more tokens are lost."""
    kept = [steps[0]]
    whole = False
    for step in steps[1:]:
        if not step.channels or step.operation.kind == op.ROTARY:
            continue
        if not whole or step.picture != kept[-1].picture:
            kept.append(step)
        whole = whole or step.nan == step.channels
    last = [] if kept[-1] is steps[-1] else [steps[-1]]
    return (*kept[1 : AFTER + 1], *last)
