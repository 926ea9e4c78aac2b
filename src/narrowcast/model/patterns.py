"""What a recipe line matches: an exact module name, ``re:`` and a regular expression, or a class name.

    lm_head                        exactly this module
    re:.*\\.self_attn\\..*           Python's re.match: anchored at the START of the name, not at its end
    Linear                         every linear module; Embedding: every embedding

These are the rules of compressed-tensors and vLLM, so that a pattern means the same here and there. There is
no glob and no substring match: both match too much in silence (``gate`` would take ``gate_proj``). A pattern
that matches nothing is an error, and the error offers the names that were probably meant.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from narrowcast.errors import UsageError
from narrowcast.model.modules import Module

CLASSES = ("Linear", "Embedding")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHOWN = 3


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern: its text as written, and how it matches."""

    text: str
    kind: Literal["exact", "regex", "class"]
    regex: re.Pattern[str] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(cls, text: str, where: str | None = None) -> Pattern:
        """Read a pattern; raises ``UsageError`` if it is empty or no regular expression."""
        if not text or text == "re:":
            raise UsageError("an empty pattern", where=where, remedy="write a module name, re:..., or Linear")
        if text.startswith("re:"):
            try:
                return cls(text, "regex", re.compile(text[3:]))
            except (re.error, OverflowError, RecursionError) as error:
                raise UsageError(
                    f"the pattern {text!r} is not a regular expression", where=where, got=error
                ) from None
        return cls(text, "class" if text in CLASSES else "exact")

    def fits_name(self, name: str) -> bool:
        """Whether it matches a module of this name; a class name matches no name."""
        if self.regex is not None:
            return self.regex.match(name) is not None
        return self.kind == "exact" and self.text == name

    def matches(self, module: Module) -> bool:
        """Whether it matches ``module``, by name or by class."""
        return self.text == module.kind if self.kind == "class" else self.fits_name(module.name)


def near_misses(pattern: Pattern, names: Sequence[str]) -> list[str]:
    """What was probably meant by a pattern that matches nothing: patterns or names, the best first.

    >>> near_misses(Pattern.parse("re:visual.*"), ["model.visual.blocks.0.attn.qkv", "lm_head"])
    ['re:.*visual.*']
    """
    text = pattern.text
    if pattern.regex is not None:
        if any(pattern.regex.search(name) for name in names):
            return [f"re:.*{text[3:]}"]
        return _closest(re.sub(r"[\\^$]|\.\*|\(\?:|[()]", "", text[3:]), names)
    if any(text.lower() == known.lower() for known in CLASSES):
        return [known for known in CLASSES if known.lower() == text.lower()]
    if any(c in text for c in "*?[") and any(fnmatch.fnmatchcase(name, text) for name in names):
        return ["re:" + re.escape(text).replace(r"\*", ".*").replace(r"\?", ".") + "$"]
    if text.endswith(".weight") and text.removesuffix(".weight") in names:
        return [text.removesuffix(".weight")]
    if any(name.startswith(f"{text}.") for name in names):
        return [f"re:{re.escape(text)}\\."]
    if any(text in name for name in names):
        inside = f"re:.*{re.escape(text)}"
        return [inside, *_closest(text, names)]
    return _closest(text, names)


def _closest(text: str, names: Sequence[str]) -> list[str]:
    # One name of each layer and expert is enough, and keeps the search short on models with many experts.
    distinct = {_NUMBER.sub("0", name): name for name in reversed(names)}
    by_leaf = [n for n in distinct.values() if n.rsplit(".", 1)[-1] == text.rsplit(".", 1)[-1]]
    close = difflib.get_close_matches(text, list(distinct.values()), n=_SHOWN, cutoff=0.5)
    return list(dict.fromkeys([*close, *by_leaf]))[:_SHOWN]
