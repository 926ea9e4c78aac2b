"""What people see when a quantized model is wrong, and how it is found: by name or by words.

Causes stand in the order in which looking is cheap and finding is likely. Facts are of the engines' sources, of
reports in their issue trackers, and of what formats can and cannot hold.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from narrowcast.doctor.symptom_loading import LOADING
from narrowcast.doctor.symptom_rows import Cause, Symptom
from narrowcast.doctor.symptom_text import TEXT
from narrowcast.errors import UsageError

__all__ = ["Cause", "Symptom", "find", "symptoms"]

symptoms: Mapping[str, Symptom] = MappingProxyType({row.name: row for row in (*TEXT, *LOADING)})

_WORD = re.compile(r"[a-z0-9]+(?:\.[0-9]+)*")  # 1.0 is one word
# What people paste is seldom a word.
_PASTED = (
    (re.compile(r"!{2,}|^\s*!\s*$"), " exclamation "),
    (re.compile(r"\?{2,}|^\s*\?\s*$"), " question "),
)
_IDLE = frozenset(
    _WORD.findall(
        "a an and are as at but for i in is it its my of on only or the then this to with model output"
    )
)


def find(text: str) -> Symptom:
    """The symptom of that name, or the one that shares most words with ``text``.

    Raises UsageError, with the nearest names, when none does or several do equally well.
    """
    name = text.strip().lower().replace(" ", "-").replace("_", "-")
    if name in symptoms:
        return symptoms[name]
    asked = _words(text)
    scores = {row.name: _score(asked, row) for row in symptoms.values()}
    best = max(scores.values())
    fitting = [name for name, score in scores.items() if score == best]
    if best == 0:
        near = difflib.get_close_matches(name, symptoms, 3, 0.4)
        raise UsageError(
            "no symptom is known by these words",
            got=text,
            wanted=", ".join(near) if near else None,
            remedy="`narrowcast doctor --symptom` lists them",
        )
    if len(fitting) > 1:
        raise UsageError(
            "several symptoms fit",
            got=text,
            wanted="; ".join(f"{name} ({symptoms[name].seen})" for name in fitting),
            remedy="ask for one of these names, or with more words",
        )
    return symptoms[fitting[0]]


def _words(text: str) -> frozenset[str]:
    lowered = text.lower()
    for pattern, word in _PASTED:
        lowered = pattern.sub(word, lowered)
    return frozenset(_WORD.findall(lowered)) - _IDLE


def _score(asked: frozenset[str], row: Symptom) -> float:
    """Words in common; a word of the name counts twice, a misspelt one half."""
    names, known = _words(row.name), _words(row.words) | _words(row.seen)
    return sum(_counts(asked, names, known))


def _counts(asked: frozenset[str], names: frozenset[str], known: frozenset[str]) -> Iterator[float]:
    for word in asked:
        if word in names:
            yield 2
        elif word in known:
            yield 1
        elif len(word) > 3 and difflib.get_close_matches(word, names | known, 1, 0.8):
            yield 0.5
