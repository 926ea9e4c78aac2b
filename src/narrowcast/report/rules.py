"""The pages of ``narrowcast rules``, and the rows that docs/rules/ is generated from.

    source of a family ──ast──> decorator and docstring ──> Row

The table is read from the text of the rules' files and not by importing them: a rule's module needs numpy and half of
the package, which takes longer than everything that is printed here. Tests hold both tables against each other.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from narrowcast import audit
from narrowcast.audit.rules import FAMILIES, SECTIONS, spelled
from narrowcast.errors import UsageError
from narrowcast.report.tables import paragraph

_FOLDER = Path(audit.__file__).parent
_HEAD = re.compile(r'^@rule\(.*?^    """.*?"""', re.MULTILINE | re.DOTALL)  # decorator, signature, docstring
_WORD = re.compile(r"[a-z][a-z'-]*[,;:]?$")  # no name: vLLM, k_scale and config.json stay as they are
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)})\s*", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """A rule as its source spells it, see ``audit.rules.Rule``."""

    code: str
    name: str
    severity: str
    scope: str
    reads: str
    text: str

    @property
    def family(self) -> str:
        return FAMILIES[self.code[2]]

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0].removesuffix(".")

    def sections(self) -> dict[str, str]:
        """``What``, ``Why``, ``Fix`` and ``False alarm``, each as one paragraph."""
        _, *parts = _SECTION.split(self.text)
        texts = [" ".join(text.replace("``", "`").split()) for text in parts[1::2]]
        return {
            title.removesuffix(":"): _capitalized(text) for title, text in zip(parts[::2], texts, strict=True)
        }

    def to_json(self) -> dict[str, Any]:
        texts = {title.lower().replace(" ", "_"): text for title, text in self.sections().items()}
        return {
            "code": self.code, "name": self.name, "family": self.family, "severity": self.severity,
            "scope": self.scope, "reads": self.reads, "title": self.title, **texts,
        }  # fmt: skip


def _capitalized(text: str) -> str:
    """A text that begins a paragraph."""
    return text[:1].upper() + text[1:] if _WORD.match(text.partition(" ")[0]) else text


@cache
def rows() -> dict[str, Row]:
    """Every rule by code, in order."""
    found = [row for file in sorted(_FOLDER.glob("*.py")) for row in _rows_of(file.read_text())]
    return {row.code: row for row in sorted(found, key=lambda row: row.code)}


def _rows_of(source: str) -> Iterator[Row]:
    for head in _HEAD.findall(source):  # bodies, which are most of it, are not parsed
        (node,) = ast.parse(head).body
        assert isinstance(node, ast.FunctionDef)
        (mark,) = node.decorator_list
        assert isinstance(mark, ast.Call)
        code, severity = (ast.literal_eval(word) for word in mark.args)
        options = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
        scope, reads = options.get("scope", "model"), options.get("reads", "headers")
        reads += " of both" if options.get("parent") else ""
        text = inspect.cleandoc(ast.get_docstring(node) or "")
        yield Row(code, node.name.replace("_", "-"), severity, scope, reads, text)


def find(text: str) -> Row:
    """A rule by its code or its name; UsageError with near names."""
    wanted = text.strip().lower().replace("_", "-")
    names = {key: row for row in rows().values() for key in (row.code.lower(), row.name)}
    if wanted in names:
        return names[wanted]
    near = difflib.get_close_matches(wanted, names, 3)
    raise UsageError(
        "no such rule", got=text,
        remedy=f"did you mean {', '.join(map(spelled, near))}?" if near else "`narrowcast rules` lists them",
    )  # fmt: skip


def rules_page() -> list[str]:
    """Every rule in two lines, by family."""
    lines = []
    for digit, family in FAMILIES.items():
        members = [row for row in rows().values() if row.code[2] == digit]
        if members:
            lines += [f"{family} (NC{digit})"]
            for row in members:
                lines.append(f"  {row.code}  {row.name}  ({row.severity}, reads {row.reads})")
                lines += paragraph(row.title, 9)
            lines.append("")
    return [*lines, *paragraph("`narrowcast rules NC110` says more of one. Select and silence rules by code, "
                               "by the beginning of a code, or by name.")]  # fmt: skip


def rule_page(row: Row) -> list[str]:
    """One rule: what it looks for, why that matters, what to do, when it is a false alarm."""
    lines = [
        f"{row.code} {row.name} ({row.severity}, {row.family}, reads {row.reads})",
        "",
        *paragraph(row.title),
    ]
    for title, text in row.sections().items():
        lines += ["", title, *paragraph(text, 2)]
    return lines
