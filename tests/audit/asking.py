"""A case of a rule: a checkpoint, how it is audited, and what should be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ask:
    """A model to audit, with options of ``audit`` and what the first finding of the rule must hold."""

    model: Path
    options: dict[str, Any] = field(default_factory=dict)
    expect: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """How to make a checkpoint on which the rule fires, and one, as near to it as can be, on which it is silent."""

    fires: Callable[[Path], Ask]
    silent: Callable[[Path], Ask]
