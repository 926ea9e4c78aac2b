"""Who gets which scheme: ordered lines of pattern and target. ``resolve`` settles them against a checkpoint.

A recipe is a list of lines; a line is a pattern (see ``patterns``) and what to do with the modules that it
matches: quantize with a preset, quantize with a scheme, or keep. The first line that takes a module decides;
modules that no line takes get the default, which may be to keep. As TOML:

    default = "fp8_dynamic"            # a preset for everything no rule takes; without it, keep

    [[rule]]                           # rules are read from the top, first match wins
    match = "lm_head"                  # one pattern or a list of them
    keep = true

    [[rule]]
    match = ['re:.*\\.mlp\\.experts\\..*', 're:.*\\.shared_expert\\..*']
    preset = "nvfp4a16"                # or: scheme = "..."
    rule = "amax"                      # optional: another scale rule than the preset's

Regular expressions read best in TOML's single quotes, where a backslash is a backslash. ``--ignore P`` is the
line (P, keep); with ``--targets P`` the preset is a line for P and the default is to keep.

Left out on purpose: conditions, variables, includes. A recipe is read by people who must know what it does.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from narrowcast.errors import UsageError
from narrowcast.model.patterns import Pattern

TargetKind = Literal["preset", "scheme"]

_TOP_KEYS = ("default", "rule")
_RULE_KEYS = ("match", "preset", "scheme", "keep", "rule")


@dataclass(frozen=True)
class Line:
    """One pattern and what to do with its modules.

    Attributes:
        pattern: what it matches.
        target: the name of a preset or scheme; None keeps the module as it is.
        kind: whether ``target`` names a preset or a scheme.
        rule: a scale rule that replaces the target's own, or None.
        source: where the line was written, for messages.
    """

    pattern: Pattern
    target: str | None
    kind: TargetKind = "preset"
    rule: str | None = None
    source: str = ""


@dataclass(frozen=True)
class Recipe:
    """Ordered lines and the preset for modules that no line takes (None keeps them)."""

    lines: tuple[Line, ...]
    default: str | None = None
    default_rule: str | None = None

    @classmethod
    def from_preset(
        cls, name: str, ignore: Iterable[str] = (), targets: Iterable[str] = (), rule: str | None = None
    ) -> Recipe:
        """One preset for everything, or only for ``targets``, except ``ignore``."""
        lines = [Line(Pattern.parse(p, "--ignore"), None, source=f"--ignore {p}") for p in ignore]
        only = [Line(Pattern.parse(p, "--targets"), name, "preset", rule, f"--targets {p}") for p in targets]
        return cls((*lines, *only), None if only else name, None if only else rule)

    @classmethod
    def from_toml(cls, text: str, path: str = "recipe.toml") -> Recipe:
        """Read the TOML form; ``path`` is only for messages. Raises ``UsageError`` with the line."""
        try:
            table = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise UsageError("the recipe is not TOML", where=path, got=error) from None
        _only(table, _TOP_KEYS, path)
        default = table.get("default")
        if default is not None and not isinstance(default, str):
            raise UsageError("default must be the name of a preset", where=path, got=repr(default))
        rules = table.get("rule", [])
        if not isinstance(rules, list) or not all(isinstance(r, dict) for r in rules):
            raise UsageError("rules are written as [[rule]] tables", where=path, got=repr(rules)[:60])
        starts = [
            i for i, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)
        ]
        lines: list[Line] = []
        for index, rule in enumerate(rules):
            place = f"line {starts[index]}" if len(starts) == len(rules) else f"rule {index + 1}"
            lines += _rule_lines(rule, f"{path}, {place}")
        if not lines and default is None:
            raise UsageError("the recipe has neither rules nor a default", where=path)
        return cls(tuple(lines), default)

    @classmethod
    def from_llmcompressor(cls, text: str, path: str = "recipe.yaml") -> Recipe:
        """Read an llm-compressor recipe; see ``llmcompressor`` for what maps and what is refused."""
        from narrowcast.model.llmcompressor import read

        return read(text, path)


def _rule_lines(rule: Mapping[str, Any], where: str) -> list[Line]:
    _only(rule, _RULE_KEYS, where)
    match = rule.get("match")
    patterns = [match] if isinstance(match, str) else match
    if not isinstance(patterns, list) or not patterns or not all(isinstance(p, str) for p in patterns):
        raise UsageError("a rule needs match: a pattern or a list of patterns", where=where, got=repr(match))
    chosen = [key for key in ("preset", "scheme", "keep") if key in rule]
    if len(chosen) != 1:
        raise UsageError(
            "a rule says exactly one of preset, scheme and keep",
            where=where,
            got=" and ".join(chosen) or "none of them",
        )
    key = chosen[0]
    target, scale_rule = rule[key], rule.get("rule")
    if key == "keep":
        if target is not True:
            raise UsageError("keep can only be true", where=where, got=repr(target))
        if scale_rule is not None:
            raise UsageError("a rule that keeps has no scale rule", where=where, got=f"rule = {scale_rule!r}")
        return [Line(Pattern.parse(p, where), None, source=where) for p in patterns]
    if not isinstance(target, str) or not isinstance(scale_rule, str | None):
        raise UsageError(f"{key} and rule are names in quotes", where=where, got=repr((target, scale_rule)))
    kind: TargetKind = "preset" if key == "preset" else "scheme"
    return [Line(Pattern.parse(p, where), target, kind, scale_rule, where) for p in patterns]


def _only(table: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    """Refuse keys that nobody reads, with the key that was probably meant."""
    for key in table:
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, n=1)
            meant = f"did you mean {close[0]}?" if close else None
            raise UsageError(
                f"the recipe has an unknown key {key!r}",
                where=where,
                wanted=", ".join(allowed),
                remedy=meant,
            )
