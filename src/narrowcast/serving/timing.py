"""What a benchmark of one model at one batch gives, whoever ran it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """``prompt`` tokens of each of ``batch`` sequences took ``prefill`` seconds; then ``tokens`` steps, one token for
    each sequence, ``step`` seconds each (medians)."""

    batch: int
    prompt: int
    tokens: int
    prefill: float
    step: float

    @property
    def context(self) -> int:
        """Tokens before the middle step."""
        return self.prompt + self.tokens // 2

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Ran:
    """Who ran it and what came of it: ``running`` is what multiplies, in words, ``notes`` what is to know of it."""

    runs_as: str
    timings: tuple[Timing, ...]
    running: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
