"""What one command answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ran:
    """Exit code and both streams of one command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The answer, parsed by a reader that knows no NaN and no Infinity."""

        def refuse(word: str) -> Any:
            raise AssertionError(f"{word} is not JSON")

        answer: dict[str, Any] = json.loads(self.out, parse_constant=refuse)
        return answer

    @property
    def lines(self) -> list[list[str]]:
        """The words of every line of the page."""
        return [line.split() for line in self.out.splitlines()]


Cli = Callable[..., Ran]
