"""What a row of the table of symptoms is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that it may be: ``why`` it looks like this, what to run as a ``check``, and the "
    "``remedy``."""

    title: str
    why: str
    check: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Symptom:
    """What people see; ``words`` are others by which it is found."""

    name: str
    seen: str
    words: str
    causes: tuple[Cause, ...]

    def to_json(self) -> dict[str, Any]:
        names = ("title", "why", "check", "remedy")
        causes = [{name: getattr(cause, name) for name in names} for cause in self.causes]
        return {"name": self.name, "seen": self.seen, "causes": causes}
