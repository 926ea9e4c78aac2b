"""How to keep a layer as it is: the patterns that name it, and all that must stay with it.

Engines run fused siblings and the experts of a layer as one, so a layer is kept together with those or not at
all. A remedy that names one layer alone would be refused in its turn.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from narrowcast.containers.targets import targets
from narrowcast.model.fused import expert_stacks, fused_groups
from narrowcast.model.modules import Module
from narrowcast.model.patterns import Pattern
from narrowcast.model.roles import Role

_SHOWN = 8  # flags in one message
_FEW = 3  # names that are written out before their common path is


def bound(modules: Sequence[Module], names: Iterable[str]) -> list[str]:
    """``names`` and every module that must have the target of one of them, in the order of the modules."""
    found = set(names)
    groups = [*fused_groups(m.name for m in modules), *expert_groups(modules)]
    size = 0
    while size != len(found):
        size = len(found)
        for group in groups:
            if not found.isdisjoint(group):
                found.update(group)
    return [m.name for m in modules if m.name in found]


def expert_groups(modules: Sequence[Module]) -> list[tuple[str, ...]]:
    """The names of the routed experts of each layer."""
    return expert_stacks(m.name for m in modules if m.role is Role.EXPERT)


def keep_patterns(modules: Sequence[Module], names: Iterable[str]) -> list[str]:
    """Patterns that match the modules ``names`` and all that are bound to one of them, and nothing else."""
    kept = bound(modules, names)
    every = [module.name for module in modules]
    found = targets(kept, every)
    exact: dict[str, list[str]] = {}
    for name in found:
        exact.setdefault(_experts_path(name), []).append(name)
    patterns: list[str] = []
    for path, members in exact.items():
        if path and len(members) > _FEW and sum(n.startswith(f"{path}.") for n in every) == len(members):
            patterns.append(f"re:^{re.escape(path)}\\.")
        else:
            patterns += members
    inside = set(kept)
    return [text if _says(text, inside) else f"re:^{re.escape(text)}$" for text in patterns]


def _experts_path(name: str) -> str:
    """The path of the experts that a module is one of, or nothing."""
    path, dot, _ = name.rpartition(".experts.")
    return "" if name.startswith("re:") or not dot else f"{path}.experts"


def _says(text: str, inside: set[str]) -> bool:
    """Whether a pattern is read as it was meant: a module may be called ``Linear``, or start with ``re:``."""
    return text not in inside or Pattern.parse(text).kind == "exact"


def keep_flags(modules: Sequence[Module], names: Iterable[str]) -> str:
    """The same as flags of the command line."""
    patterns = keep_patterns(modules, names)
    flags = " ".join(f"--ignore {shlex.quote(text)}" for text in patterns[:_SHOWN])
    return flags if len(patterns) <= _SHOWN else f"{flags} and {len(patterns) - _SHOWN} more"
