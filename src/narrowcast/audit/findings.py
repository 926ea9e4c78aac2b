"""What an audit says: one finding for each thing that is wrong, with its place, what is there, what should be there,
and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One finding. A rule gives ``said`` and what it knows; its code and severity are filled in by the run.

    ``said`` is the whole fact in one line without the tensor's name; ``tensor`` names a tensor, a module or a file,
    ``at`` the first coordinates in it, ``count`` how many elements, tiles or tensors it is about. ``repair`` names
    what ``narrowcast repair`` does about it, where it can; ``facts`` are numbers for machines.
    """

    said: str
    tensor: str | None = None
    at: tuple[int, ...] | None = None
    got: str | None = None
    wanted: str | None = None
    remedy: str | None = None
    count: int = 1
    repair: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity | None = None
    rule: str = ""
    silenced: str | None = None

    def to_json(self) -> dict[str, Any]:
        found = {key: value for key, value in vars(self).items() if value is not None and key != "facts"}
        return found | dict(self.facts)
