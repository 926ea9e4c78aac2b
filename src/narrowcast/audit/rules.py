"""The table of rules, and which of them run.

    @rule("NC101", "error", scope="matrix", reads="scales")
    def zero_scale(matrix): '''What ... Why ... Fix ... False alarm ...'''; yield Finding(...)

A rule's name is its function's, with dashes. Codes never change their meaning and are never used again. Rules are
selected and silenced by code or by its beginning (``NC1`` is all of scales), as linters do it; what is silenced keeps
its reason and is counted.
"""

from __future__ import annotations

import difflib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from narrowcast.audit.findings import Finding, Severity
from narrowcast.errors import InputError, UsageError

Scope = Literal["model", "matrix", "tensor", "pair"]
Reads = Literal["headers", "scales", "codes", "parent"]  # how deep a rule looks; each implies those before it
DEPTHS: tuple[Reads, ...] = get_args(Reads)
FAMILIES = {
    "0": "files", "1": "scales", "2": "cache", "3": "codes", "4": "coverage", "5": "config", "6": "portability",
    "7": "parent",
}  # fmt: skip
SECTIONS = ("What:", "Why:", "Fix:", "False alarm:")
_CODE = re.compile(r"NC\d{3}$")
_table: dict[str, Rule] = {}


@dataclass(frozen=True)
class Rule:
    """One rule; its title and its sections are read from its docstring."""

    code: str
    severity: Severity
    scope: Scope
    reads: Reads
    check: Callable[[Any], Iterable[Finding]]
    parent: bool = False

    @property
    def needs_parent(self) -> bool:
        """Whether there is nothing to check without the parent, of which some rules read headers only."""
        return self.parent or self.reads == "parent"

    @property
    def name(self) -> str:
        return self.check.__name__.replace("_", "-")

    @property
    def family(self) -> str:
        return FAMILIES[self.code[2]]

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0].removesuffix(".")

    @property
    def text(self) -> str:
        return inspect.cleandoc(self.check.__doc__ or "")


def rule(
    code: str, severity: Severity, *, scope: Scope = "model", reads: Reads = "headers", parent: bool = False
) -> Callable[[Callable[[Any], Iterable[Finding]]], Callable[[Any], Iterable[Finding]]]:
    """Put a check into the table. ``severity`` is what its findings have that name none themselves;
    ``parent`` marks a rule about the parent that reads less than all of it."""

    def add(check: Callable[[Any], Iterable[Finding]]) -> Callable[[Any], Iterable[Finding]]:
        if not _CODE.match(code) or code[2] not in FAMILIES or code in _table:
            raise ValueError(f"{code}: a code is NC, the digit of its family, two more, and used once")
        _table[code] = Rule(code, severity, scope, reads, check, parent)
        return check

    return add


@cache
def rules() -> dict[str, Rule]:
    """Every rule by code, in order."""
    for family in FAMILIES.values():
        import_module(f"narrowcast.audit.{family}")
    return dict(sorted(_table.items()))


def spelled(name: str) -> str:
    """A code in upper case, as it is written; a name as it is."""
    return name.upper() if _CODE.match(name.upper()) else name


def find_rule(text: str) -> Rule:
    """A rule by its code or its name; UsageError with near names."""
    wanted = text.strip().lower().replace("_", "-")
    for one in rules().values():
        if wanted in (one.code.lower(), one.name):
            return one
    near = difflib.get_close_matches(
        wanted, [n for one in rules().values() for n in (one.code.lower(), one.name)], 3
    )
    raise UsageError(
        "no such rule", got=text,
        remedy=f"did you mean {', '.join(map(spelled, near))}?" if near else "`narrowcast rules` lists them",
    )  # fmt: skip


def chosen(select: Sequence[str], everything: bool = True) -> list[Rule]:
    """The rules whose codes begin with one of ``select``, or whose name it is; all for an empty list."""
    if not select and everything:
        return list(rules().values())
    found: dict[str, Rule] = {}
    for text in select:
        fits = [one for one in rules().values() if one.code.startswith(text.upper())] if text else []
        for one in fits or [find_rule(text)]:
            found[one.code] = one
    return [found[code] for code in sorted(found)]


@dataclass(frozen=True)
class Silence:
    """Findings that are known and accepted: of which rules, on which tensors (None: all), and why."""

    codes: frozenset[str]
    tensor: str | None
    reason: str

    def covers(self, finding: Finding) -> bool:
        if finding.rule not in self.codes:
            return False
        return self.tensor is None or (finding.tensor is not None and _fits(self.tensor, finding.tensor))


def _fits(pattern: str, name: str) -> bool:
    return re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern == name


def silence(text: str) -> Silence:
    """What ``--ignore`` says: ``NC402``, or ``NC402=why``."""
    code, _, reason = text.partition("=")
    return Silence(frozenset(one.code for one in chosen([code.strip()])), None, reason.strip() or "--ignore")


def read_settings(path: Path) -> tuple[list[str], list[Silence]]:
    """The selection and the silences of a TOML file; each silence must say why.

    select = ["NC1", "NC3"]

    [[silence]]
    rule = "NC402"
    tensor = "re:lm_head"      # left out: every tensor
    reason = "the head is meant to be FP8"
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError("the settings of the audit cannot be read", where=path, got=error) from None
    other = sorted(set(content) - {"select", "silence"})
    select, silences = content.get("select", []), content.get("silence", [])
    if other or not isinstance(select, list) or not isinstance(silences, list):
        raise InputError(
            "the settings of the audit say something else", where=path, got=", ".join(other) or "no lists",
            wanted="select = [...] and [[silence]] tables",
        )  # fmt: skip
    return [str(code) for code in select], [_silence_of(table, path) for table in silences]


def _silence_of(table: Any, path: Path) -> Silence:
    keys = set(table) if isinstance(table, dict) else set()
    texts = all(isinstance(table[key], str) and table[key].strip() for key in keys)
    if not {"rule", "reason"} <= keys or keys - {"rule", "reason", "tensor"} or not texts:
        raise InputError(
            "a silence is not complete", where=path, got=table,
            wanted="rule, reason and, where it is about some tensors only, tensor",
        )  # fmt: skip
    tensor = table.get("tensor")
    if tensor is not None and tensor.startswith("re:"):
        try:
            re.compile(tensor[3:])
        except re.error as error:
            raise InputError("a silence's pattern is no regular expression", where=path, got=error) from None
    return Silence(frozenset(one.code for one in chosen([table["rule"]])), tensor, table["reason"])
