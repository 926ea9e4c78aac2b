"""A quantized matrix beside its original."""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.audit.subject import Subject
from narrowcast.jobs.matching import Held


@dataclass
class Pair:
    """A quantized matrix and the parent's tensor of the same name."""

    child: Held
    original: Held

    @property
    def name(self) -> str:
        return self.child.name


def look_at_pair(child: Held, original: Held, subject: Subject) -> Pair:
    """Read both once."""
    return Pair(child, original)
