"""What one operation's output holds: its largest value and where, and what narrower formats would lose of it.

    amax              max |x| over finite values, with token and channel
    headroom          log2(max of a format / amax) binades: how often amax can double; negative: it overflows
    beyond            elements with |x| > 65504 (FP16) and > 448 (E4M3, unity scale)
    below             elements with 0 < |x| < 2^-24 (FP16) and < 2^-9 (E4M3): smaller than the smallest subnormal

Channels are the last axis, heads side by side. Two words have sources:

- massive activation: |x| > 100 and > 1000 times the median |x| of its tensor (Sun et al., arXiv 2402.17762, say it of
  hidden states). A tensor here is one piece of text.
- outlier channel: an amax at least 16 times the median channel's. With one INT8 scale for both, the median channel
  keeps 4 of the 8 bits. (LLM.int8(), arXiv 2208.07339, and SmoothQuant, arXiv 2211.10438, describe them.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, log2
from typing import Any

import torch

from narrowcast.numbers.formats import E4M3FN, FP16
from narrowcast.runtime.operations import NORM, STATISTICS, Operation

MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
OUTLIER = 16.0
KEPT = 5  # channels and massive activations that are kept by name
FORMATS = {"fp16": FP16, "e4m3": E4M3FN}
LARGEST = {name: one.max for name, one in FORMATS.items()}
SMALLEST = {name: one.smallest for name, one in FORMATS.items()}


@dataclass(frozen=True)
class Place:
    """One element: which piece, its token there, its channel, the value."""

    piece: int
    token: int
    channel: int
    value: float


@dataclass
class Counts:
    """One operation of one layer, over all pieces of text."""

    operation: Operation
    elements: int = 0
    infinite: int = 0
    nan: int = 0
    beyond: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FORMATS, 0))
    below: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FORMATS, 0))
    amax: float = 0.0
    at: Place | None = None
    why: str = ""
    channels: torch.Tensor | None = None
    massive: int = 0
    massive_at: list[Place] = field(default_factory=list)
    massive_median: float = 0.0
    outliers_known: bool = True  # whether the last axis is channels

    def headroom(self, name: str) -> float:
        """Binades between amax and the largest number of a format."""
        return log2(LARGEST[name] / self.amax) if self.amax > 0 else inf

    @property
    def outliers(self) -> list[tuple[int, float]]:
        """Outlier channels with their amax as a multiple of the median channel's, largest first."""
        if self.channels is None or not self.outliers_known or len(self.channels) < 2:
            return []
        median = float(self.channels.median())
        if median == 0:
            return []
        ratios = self.channels / median
        order = torch.argsort(ratios, descending=True)[: int((ratios >= OUTLIER).sum())]
        return [(int(i), float(ratios[i])) for i in order]

    def add(self, x: torch.Tensor, piece: int, tokens: torch.Tensor) -> int | None:
        """Count rows [T, C] float32 of these tokens; the row of a new largest value, None where there is none."""
        size = x.abs()
        finite = torch.isfinite(size)
        if not bool(finite.all()):
            self.nan += int(size.isnan().sum())
            self.infinite += int(size.isinf().sum())
            size = torch.where(finite, size, 0.0)
        self.elements += size.numel()
        peaks = size.amax(0)
        self.channels = peaks if self.channels is None else _largest(self.channels, peaks)
        channel = int(peaks.argmax())
        amax = float(peaks[channel])
        for name in FORMATS:
            if amax > LARGEST[name]:
                self.beyond[name] += int((size > LARGEST[name]).sum())
            self.below[name] += int(((size < SMALLEST[name]) & (size > 0)).sum())
        row = int(size[:, channel].argmax())
        if amax > MASSIVE:
            self._massive(x, size, piece, tokens)
        if self.at is not None and amax <= self.amax:
            return None
        self.amax = amax
        self.at = Place(piece, int(tokens[row]), channel, float(x[row, channel]))
        return row

    def _massive(self, x: torch.Tensor, size: torch.Tensor, piece: int, tokens: torch.Tensor) -> None:
        median = float(size.median())
        where = (size > MASSIVE) & (size > MASSIVE_RATIO * median)
        found = where.nonzero()
        self.massive += len(found)
        places = [Place(piece, int(tokens[r]), c, float(x[r, c])) for r, c in _top(size, found)]
        if places:
            merged = sorted([*self.massive_at, *places], key=lambda one: -abs(one.value))
            self.massive_at = merged[:KEPT]
            self.massive_median = median

    def to_json(self) -> dict[str, Any]:
        """Counts, shares and places, without texts."""
        return {
            "layer": self.operation.layer, "module": self.operation.path, "operation": self.operation.name,
            "kind": self.operation.kind, "elements": self.elements, "infinite": self.infinite, "nan": self.nan,
            "amax": self.amax, "at": self.at.__dict__ if self.at else None, "why": self.why,
            "headroom": {name: self.headroom(name) for name in FORMATS},
            "share_beyond": {name: n / max(self.elements, 1) for name, n in self.beyond.items()},
            "share_below": {name: n / max(self.elements, 1) for name, n in self.below.items()},
            "massive": self.massive, "massive_at": [one.__dict__ for one in self.massive_at],
            "outlier_channels": [{"channel": c, "ratio": r} for c, r in self.outliers[:KEPT]],
            "outlier_count": len(self.outliers),
        }  # fmt: skip


def _largest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise; key positions of scores differ in number from piece to piece."""
    if len(a) < len(b):
        a, b = b, a
    a = a.clone()
    a[: len(b)] = torch.maximum(a[: len(b)], b)
    return a


def _top(size: torch.Tensor, found: torch.Tensor) -> list[tuple[int, int]]:
    order = torch.argsort(size[found[:, 0], found[:, 1]], descending=True)[:KEPT]
    return [(int(r), int(c)) for r, c in found[order]]


def rows(x: torch.Tensor, tokens: int, kind: str) -> torch.Tensor:
    """An output of an operation of this kind as float32 [rows, channels], a row per token: heads go side by side.

    Heads stand before tokens in attention's products, and behind them in norms of heads before their transpose. With
    as many heads as tokens, the shape of a norm does not tell the two apart, but tokens lie furthest apart in memory.
    """
    heads_first = x.ndim == 4 and x.shape[2] == tokens
    if heads_first and x.shape[1] == tokens and kind in (NORM, STATISTICS):
        heads_first = x.stride(2) > x.stride(1)
    if heads_first:
        x = x[0].transpose(0, 1)
    elif x.ndim == 4:
        x = x[0]
    if x.ndim >= 3 and x.shape[0] == 1 and x.shape[1] == tokens:
        x = x[0]
    if x.ndim > 2 and x.shape[0] == tokens:
        return x.reshape(tokens, -1).float()
    return x.reshape(-1, x.shape[-1]).float()
