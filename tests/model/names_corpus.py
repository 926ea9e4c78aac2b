"""The corpus of tensor names in ``names.txt``, as checkpoints would give them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Tensor:
    """The two facts of a tensor that the model floor reads."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One tensor of the corpus with what is expected of it."""

    family: str
    config: dict[str, Any]
    name: str
    shape: tuple[int, ...]
    role: str
    kind: str


def _read() -> list[Case]:
    cases: list[Case] = []
    family, config = "", {}
    for line in (Path(__file__).parent / "names.txt").read_text().splitlines():
        if line.startswith("["):
            family, _, text = line[1:].partition("] ")
            config = json.loads(text)
        elif line and not line.startswith("#"):
            name, shape, role, kind = line.split()
            cases.append(Case(family, config, name, tuple(int(n) for n in shape.split("x")), role, kind))
    return cases


CASES: list[Case] = _read()


def entries(family: str) -> dict[str, Tensor]:
    """The tensors of a family, as a checkpoint would give them."""
    return {c.name: Tensor(c.name, c.shape) for c in CASES if c.family == family}


def config(family: str) -> dict[str, Any]:
    """The config.json of a family."""
    return next(c.config for c in CASES if c.family == family)
