"""Which modules the engines skip for an entry of ``modules_to_not_convert`` or ``ignored_layers``."""

from __future__ import annotations

import re
from collections.abc import Iterable

_EXPERTS = re.compile(r"^(.*\.experts)\.")


def skipped_by(name: str, entries: Iterable[str]) -> str | None:
    """The first entry by which some engine leaves a module unquantized, or None.

    vLLM: the exact name, and for routed experts an entry that their path is part of. SGLang: also with or without
    "model.". transformers: a regular expression for the name or a path above it, or the end of the name.
    """
    experts = _EXPERTS.match(name)
    for entry in entries:
        if name in (entry, entry.removeprefix("model.")) or name.endswith(entry):
            return entry
        if experts is not None and experts[1] in entry:
            return entry
        try:
            if re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", name):
                return entry
        except re.error:
            continue
    return None
