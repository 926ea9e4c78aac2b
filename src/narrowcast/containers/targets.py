"""Names of modules as patterns: short where that is safe, so that a config of ten thousand experts stays readable."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence


def targets(names: Sequence[str], linear_names: Sequence[str]) -> list[str]:
    """Module names as targets: one anchored pattern for names that differ in numbers only, wherever that pattern
    matches no linear module outside the group; exact names elsewhere."""
    inside = set(names)
    found: dict[str, None] = {}
    whole: dict[str, bool] = {}
    shapes: dict[str, list[str]] = {}
    for name in linear_names:
        shapes.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    for name in names:
        shape = re.sub(r"\d+", "#", name)
        if shape not in whole:
            alike = shapes.get(shape, [name])
            whole[shape] = len(alike) > 1 and inside.issuperset(alike)
        if whole[shape]:
            pattern = r"\d+".join(re.escape(part).replace(r"\-", "-") for part in shape.split("#"))
            found[f"re:^{pattern}$"] = None
        else:
            found[name] = None
    return list(found)


def patterns(names: Sequence[str], linear_names: Sequence[str]) -> Iterator[str]:
    """The same as regular expressions, exact names too."""
    for target in targets(names, linear_names):
        yield target[3:] if target.startswith("re:") else f"^{re.escape(target)}$"
