"""Which operation may run in which dtype: each alone, measured at the logits.

    for each operation, for each narrower dtype:  run the text with that operation alone narrowed
    KL(p_float32 || p_variant) per token, the share of equal best tokens, the first value that was no number

All variants walk side by side as lanes, so that every layer is read once. Two yardsticks make numbers readable:
what the whole model in bfloat16 costs, which everybody accepts, and what linear layers in FP8 (``fp8_dynamic``) cost.

    free       no more than bfloat16 throughout
    like fp8   no more than the linear layers in FP8
    keep wide  more than that, or broken

It is one operation at a time; costs of several together add up at best. A text of a few hundred tokens tells
magnitudes apart, not neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import IncomparableError, UsageError
from narrowcast.jobs.stream import Progress, ProgressFactory, Silent
from narrowcast.runtime.operations import EAGER, ROUTER, Watch, role_of
from narrowcast.runtime.walk import Running, State
from narrowcast.studies.legal_variants import Variant, fp8_linears, variants
from narrowcast.studies.measure import kl_rows
from narrowcast.studies.tokens import Tokens, shared
from narrowcast.texts.documents import Corpus, read

FREE, LIKE_FP8, WIDE = "free", "like fp8", "keep wide"
ROWS = 8  # rows of logits that are compared at once, so that temporaries stay in a cache


@dataclass(frozen=True)
class Cell:
    """One operation in one dtype: mean and largest KL in nats, the share of equal best tokens, what broke first."""

    operation: str
    dtype: str
    kl: float
    largest: float
    top1: float
    broke: str = ""

    @property
    def exact(self) -> bool:
        return self.kl == 0 and self.largest == 0 and not self.broke

    def to_json(self) -> dict[str, Any]:
        return self.__dict__ | {"exact": self.exact}


@dataclass(frozen=True)
class Legal:
    """The table, and its two yardsticks."""

    model: Path
    corpus: Corpus
    tokens: Tokens
    bf16: Cell
    fp8: Cell
    cells: tuple[Cell, ...]

    @property
    def broke(self) -> bool:
        return any(cell.broke for cell in self.cells)

    def reading(self, cell: Cell) -> str:
        """free, like fp8 or keep wide."""
        if cell.broke or cell.kl > max(self.bf16.kl, self.fp8.kl):
            return WIDE
        return FREE if cell.kl <= self.bf16.kl else LIKE_FP8

    def to_json(self) -> dict[str, Any]:
        return {
            "model": str(self.model),
            "text": {"name": self.corpus.name, "sha256": self.corpus.sha256,
                     "tokens": sum(len(piece.ids) for piece in self.tokens.pieces)},
            "yardsticks": {"bf16": self.bf16.to_json(), "fp8_dynamic": self.fp8.to_json()},
            "table": [cell.to_json() | {"reading": self.reading(cell)} for cell in self.cells],
        }  # fmt: skip


def legal(
    model: str | Path,
    text: Sequence[str] = (),
    *,
    only: Sequence[str] = (),
    context: int = 512,
    tokens: int = 256,
    progress: ProgressFactory = Silent,
) -> Legal:
    """Measure the table. ``only`` names operations to measure alone.

    Raises UsageError for an unknown operation, and what ``Running.open``, ``read`` and ``shared`` raise.
    """
    corpus = read(text)
    with Running.open(model, "float32", None, EAGER) as run:
        chosen = shared(run, None, corpus, context, tokens)
        routed = any(role_of(module) == ROUTER for module in run.layers.modules())
        lanes = _only(variants(run.config, routed), only)
        plain, fp8 = Variant("float32", "float32"), fp8_linears()
        shown = progress((run.depth * (len(lanes) + 2) + run.depth) * len(chosen.pieces), "measuring")
        states = _walk(run, [plain, fp8, *lanes], chosen, shown)
        with Running.open(model, "bfloat16", None, EAGER) as narrow:
            rounded = _walk(narrow, [Variant("all", "bf16")], chosen, shown)
            sums = _logits(run, [plain, fp8, *lanes], states, narrow, rounded)
        shown.done()
        root, depth = run.root, run.depth
    measured = [lane for lane in lanes if lane.touched or lane.cache is not None]
    cells = [sums[id(lane)].cell(lane, depth) for lane in measured]
    bf16 = sums[0].cell(Variant("everything", "bf16"), depth)
    return Legal(root, corpus, chosen, bf16, sums[id(fp8)].cell(fp8, depth), tuple(cells))


def _only(made: list[Variant], only: Sequence[str]) -> list[Variant]:
    names = list(dict.fromkeys(lane.operation for lane in made))
    for name in only:
        if name not in names:
            raise UsageError("no such operation", got=name, wanted=", ".join(names))
    return [lane for lane in made if not only or lane.operation in only]


def _walk(run: Running, lanes: list[Variant], chosen: Tokens, shown: Progress) -> list[list[State]]:
    """Every lane's states [lane][piece] behind the last layer."""
    begun = [run.begin(torch.tensor(piece.ids)) for piece in chosen.pieces]
    states = [[State(one.ids, one.hidden, one.calls) for one in begun] for _ in lanes]
    watch = Watch(lanes[0])
    with watch, torch.inference_mode():
        for i in range(run.depth):
            layer = run.layer(i)
            watch.attach(layer, i)
            for lane, row in zip(lanes, states, strict=True):
                watch.visitor = lane
                lane.prepare(layer)
                with lane.active(layer):
                    for state in row:
                        run.step(layer, i, state, lane.cache() if lane.cache is not None else None)
                        shown.advance(1)
    return states


@dataclass
class _Sums:
    """Divergences of one lane, token by token."""

    count: int = 0
    kl: float = 0.0
    largest: float = 0.0
    same: int = 0

    def add(self, wide: torch.Tensor, logs: torch.Tensor, narrow: torch.Tensor) -> None:
        """Logits float32 [T, V] of both, ``logs`` the log-probabilities of the first."""
        for start in range(0, len(wide), ROWS):
            part = slice(start, start + ROWS)
            a, b = wide[part], narrow[part]
            self.count += len(a)
            if torch.equal(a, b):
                self.same += len(a)
                continue
            rows = kl_rows(logs[part], torch.log_softmax(b, 1))
            self.kl += float(rows.sum())
            self.largest = (
                max(self.largest, float(rows.max())) if not bool(rows.isnan().any()) else float("nan")
            )
            self.same += int(((a.argmax(1) == b.argmax(1)) & ~b.isnan().any(1)).sum())

    def cell(self, lane: Variant, depth: int) -> Cell:
        broke = lane.broke
        where = "logits" if isnan(self.kl) else ""
        if broke is not None:
            where = f"layer {broke.layer} {broke.inside}" if 0 <= broke.layer < depth else broke.inside
        return Cell(
            lane.operation, lane.dtype, self.kl / self.count, self.largest, self.same / self.count, where
        )


def _logits(
    run: Running, lanes: list[Variant], states: list[list[State]], narrow: Running, rounded: list[list[State]]
) -> dict[int, _Sums]:
    """Divergences from the first lane; under 0 those of the model in bfloat16."""
    sums: dict[int, _Sums] = {id(lane): _Sums() for lane in lanes} | {0: _Sums()}
    watch = Watch(lanes[0])
    watch.attach(run.model, run.depth, without=run.path)
    with watch, torch.inference_mode():
        for piece in range(len(states[0])):
            watch.visitor = lanes[0]
            wide = run.logits(states[0][piece])
            if not bool(torch.isfinite(wide).all()):
                raise IncomparableError(
                    "invalid: the model's logits are not finite in float32, so nothing can be measured against them",
                    where=run.root, remedy="`narrowcast trace` names the operation that made the first infinity",
                )  # fmt: skip
            logs = torch.log_softmax(wide, 1)
            for lane, row in zip(lanes, states, strict=True):
                watch.visitor = lane
                sums[id(lane)].add(wide, logs, wide if lane is lanes[0] else run.logits(row[piece]))
            sums[0].add(wide, logs, narrow.logits(rounded[0][piece]))
    return sums
