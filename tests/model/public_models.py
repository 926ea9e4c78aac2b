"""Reads public_models.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Public:
    """A published model: ``parameters`` as published, where that was ``seen``, of which ``beside`` are outside the text
    model and ``buffers`` no parameters; ``active`` in billions with ``rounding``, ``embedding`` counted or not; ``kv``
    bytes per token at two bytes per element."""

    name: str
    source: str
    parameters: int
    kv: int
    config: dict[str, Any]
    seen: str
    beside: int = 0
    buffers: int = 0
    active: float | None = None
    rounding: float = 0.05
    embedding: bool = False
    kv_source: str = ""


def public_models() -> list[Public]:
    text = (Path(__file__).parent / "public_models.toml").read_text()
    return [Public(name, **row) for name, row in tomllib.loads(text).items()]
