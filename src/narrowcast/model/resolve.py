"""A recipe meets a checkpoint: for every module its target and the reason, before any byte is written.

    taken(module) = the first line that matches it and may take it, else the default

Three rules protect what must not be quantized by accident:

1. *Excluded roles.* A preset lists roles that it leaves alone (embeddings, heads, norms, routers, towers,
   MTP). A line takes a module of such a role only when it is explicit about it: an exact name, or a pattern
   all of whose matches have excluded roles. ``re:.*lm_head`` takes the head; ``re:.*`` and ``Linear`` pass
   over it, and it goes on to the next line.
2. *Tied embeddings.* When the output head reads the embedding's tensor neither is ever quantized: an engine
   looks rows up in the one and multiplies by the other, and no container says both. A line that is explicit
   about either is an error; to ``keep`` the ``lm_head`` that is not in the file is fine.
3. *Fused groups.* Layers that engines load as one, and the experts of one layer, must have one target.

A pattern that matches nothing is an error with near misses. A pattern whose matches all went to earlier lines
is legal (that is what "first match wins" means) and visible: ``Match.taken`` is 0.

What a target name means is a ``Lookup``'s business: (kind, name) to a ``Target``, or ``UsageError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from narrowcast.errors import UsageError
from narrowcast.model.fused import fused_groups
from narrowcast.model.keeping import expert_groups, keep_flags
from narrowcast.model.modules import Module
from narrowcast.model.patterns import near_misses
from narrowcast.model.recipe import Line, Recipe, TargetKind
from narrowcast.model.roles import Role
from narrowcast.tensors.presets import EXCLUDED_ROLES, presets
from narrowcast.tensors.schemes import schemes

_SHOWN = 5
_UNTAKEN = ("the source has it unquantized", "no line of the recipe takes it")  # without and with a recipe


@dataclass(frozen=True)
class Target:
    """What a module is quantized to: a preset or scheme by canonical name, perhaps with another scale rule.

    ``excluded`` are the roles that it leaves alone."""

    kind: TargetKind
    name: str
    excluded: frozenset[str]
    rule: str | None = None

    def __str__(self) -> str:
        return self.name if self.rule is None else f"{self.name} with rule {self.rule}"


# (kind, name as typed) -> Target; raises UsageError for a name that does not exist.
Lookup = Callable[[TargetKind, str], Target]


def in_tables(kind: TargetKind, name: str) -> Target:
    """The ``Lookup`` in narrowcast's own tables; a bare scheme leaves the same roles alone as a preset."""
    if kind == "preset":
        preset = presets[name]
        return Target(kind, preset.name, preset.excluded)
    return Target(kind, schemes[name].name, EXCLUDED_ROLES)


@dataclass(frozen=True)
class Assignment:
    """One module, its target (None: kept as it is) and the reason in words."""

    module: Module
    target: Target | None
    why: str


@dataclass(frozen=True)
class Match:
    """What one line matched: how many modules, the first few names, and how many of them it took."""

    line: Line
    count: int
    names: tuple[str, ...]
    taken: int


@dataclass(frozen=True)
class Resolved:
    """A recipe settled against a checkpoint.

    Attributes:
        assignments: one per module, in the order of the modules.
        matches: one per line, in the order of the recipe.
        groups: the fused groups among the module names (a stacked expert tensor is a group of its own).
        unknown: names that no row of the role table fits.
    """

    assignments: tuple[Assignment, ...]
    matches: tuple[Match, ...]
    groups: tuple[tuple[str, ...], ...]
    unknown: tuple[str, ...]

    @property
    def quantized(self) -> tuple[Assignment, ...]:
        """The assignments that have a target."""
        return tuple(a for a in self.assignments if a.target is not None)

    @property
    def kept(self) -> tuple[Assignment, ...]:
        """The assignments without a target."""
        return tuple(a for a in self.assignments if a.target is None)


def resolve(
    recipe: Recipe, modules: Sequence[Module], lookup: Lookup = in_tables, others: Iterable[str] = ()
) -> Resolved:
    """Settle ``recipe`` for ``modules``.

    Args:
        recipe: what to do.
        modules: the matrices of the checkpoint.
        lookup: what target names mean.
        others: module paths of the tensors that are no matrices (norms, convolutions). A line that only
            keeps some of them is fine, since they are kept anyway.

    Raises:
        UsageError: an unknown target, a pattern that matches nothing, a line that names what cannot be
            quantized, or a fused group whose members differ.
    """
    default = _target(recipe.default, "preset", recipe.default_rule, "default", lookup)
    targets = [_target(line.target, line.kind, line.rule, line.source, lookup) for line in recipe.lines]
    rest = tuple(others)
    matched = [[m for m in modules if line.pattern.matches(m)] for line in recipe.lines]
    takes = [
        _takes(line, target, hits, modules, rest)
        for line, target, hits in zip(recipe.lines, targets, matched, strict=True)
    ]
    assignments = tuple(_assign(m, recipe, targets, takes, default) for m in modules)
    _refuse_problems(assignments)
    taken = [0] * len(recipe.lines)
    for assigned in assignments:
        index = _first(assigned.module, takes)
        if index is not None:
            taken[index] += 1
    groups = fused_groups(m.name for m in modules)
    _agree(assignments, groups, "fused group differs", "engines load these as one layer with one scheme")
    _agree(
        assignments,
        expert_groups(modules),
        "experts of one layer differ",
        "engines run the experts of a layer as one",
    )
    matches = tuple(
        Match(line, len(hits), tuple(m.name for m in hits[:_SHOWN]), n)
        for line, hits, n in zip(recipe.lines, matched, taken, strict=True)
    )
    unknown = tuple(m.name for m in modules if not m.known)
    return Resolved(assignments, matches, tuple(groups), unknown)


def _target(
    name: str | None, kind: TargetKind, rule: str | None, source: str, lookup: Lookup
) -> Target | None:
    if name is None:
        return None
    try:
        found = lookup(kind, name)
    except UsageError as error:
        if error.where is not None:
            raise
        raise UsageError(
            error.problem, where=source, got=error.got, wanted=error.wanted, remedy=error.remedy
        ) from None
    return found if rule is None else Target(found.kind, found.name, found.excluded, rule)


def _takes(
    line: Line, target: Target | None, hits: list[Module], modules: Sequence[Module], others: tuple[str, ...]
) -> frozenset[str]:
    """The names of the modules that a line may take, after the three rules; raises where it may not."""
    if not hits:
        _explain_nothing(line, modules, others)
        return frozenset()
    if target is None:
        return frozenset(m.name for m in hits)
    if line.pattern.kind == "exact":
        _refuse_untakable(hits[0], line)
        return frozenset(m.name for m in hits)
    ordinary = [m for m in hits if m.linear and m.tied is None and m.role not in target.excluded]
    if ordinary:
        return frozenset(m.name for m in ordinary)
    if line.pattern.text == "Linear":
        raise UsageError(
            "Linear matches only layers that the preset leaves alone",
            where=line.source,
            got=", ".join(sorted({m.role for m in hits})),
        )
    named = [m for m in hits if m.linear or m.role is Role.EMBEDDING] or hits
    for module in named:
        _refuse_untakable(module, line)
    return frozenset(m.name for m in named)


def _refuse_untakable(module: Module, line: Line) -> None:
    """An explicit line gets what it names, or learns why it cannot."""
    if module.tied is not None:
        raise UsageError(
            f"{module.name} and {module.tied} are one tied tensor, which cannot be quantized",
            where=line.source,
            got=line.pattern.text,
            remedy="leave it out of the recipe, or untie the two and store the head as a tensor of its own",
        )
    if not module.linear and module.role is not Role.EMBEDDING:
        raise UsageError(f"{module.name} is not a linear layer", where=line.source, got=module.note)


def _explain_nothing(line: Line, modules: Sequence[Module], others: tuple[str, ...]) -> None:
    """A pattern without matches: fine if it keeps what is kept anyway, else an error with near misses."""
    tied = [m for m in modules if m.tied is not None and line.pattern.fits_name(m.tied)]
    if tied and line.target is not None:
        _refuse_untakable(tied[0], line)
    if tied or (line.target is None and any(line.pattern.fits_name(name) for name in others)):
        return
    names = [*(m.name for m in modules), *(m.tied for m in modules if m.tied is not None)]
    if any(line.pattern.fits_name(name) for name in others):
        raise UsageError(
            f"the pattern {line.pattern.text!r} matches only tensors that are no matrices", where=line.source
        )
    close = near_misses(line.pattern, names)
    raise UsageError(
        f"the pattern {line.pattern.text!r} matches no module",
        where=line.source,
        wanted=", ".join(close) if close else "a module name of this checkpoint",
        remedy="patterns are exact names, re: with a regular expression anchored at the start, or Linear",
    )


def _first(module: Module, takes: Sequence[frozenset[str]]) -> int | None:
    return next((i for i, names in enumerate(takes) if module.name in names), None)


def _assign(
    module: Module,
    recipe: Recipe,
    targets: Sequence[Target | None],
    takes: Sequence[frozenset[str]],
    default: Target | None,
) -> Assignment:
    index = _first(module, takes)
    if index is not None:
        target, line = targets[index], recipe.lines[index]
        why = f"{line.pattern.text} ({line.source})" if line.source else line.pattern.text
    else:
        target, why = default, "default"
    if index is None:
        passed = _passed_over(module, recipe, targets)
        passed = passed if passed or default is None else _protected(module, default)
        if passed is not None or default is None:
            return Assignment(module, None, passed or _UNTAKEN[bool(recipe.lines)])
    if target is None:
        return Assignment(module, None, f"kept by {why}")
    return Assignment(module, target, why)


def _refuse_problems(assignments: Sequence[Assignment]) -> None:
    wrong = [a.module for a in assignments if a.target is not None and a.module.problem is not None]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UsageError(
            f"{wrong[0].name} cannot be quantized as it is stored",
            where=wrong[0].tensor + more,
            got=wrong[0].problem,
            remedy=f"keep it: {keep_flags([a.module for a in assignments], [m.name for m in wrong])}",
        )


def _passed_over(module: Module, recipe: Recipe, targets: Sequence[Target | None]) -> str | None:
    """Why the first line that matches a module did not take it; None when no line matches."""
    for line, target in zip(recipe.lines, targets, strict=True):
        if target is not None and line.pattern.matches(module):
            return _protected(module, target) or f"{line.pattern.text} is not explicit about it"
    return None


def _protected(module: Module, target: Target) -> str | None:
    """The rule that keeps a module from what is not explicitly about it."""
    if module.tied is not None:
        return f"tied to {module.tied}"
    if module.role in target.excluded:
        return f"{target.name} leaves the role {module.role} alone"
    if not module.linear:
        return f"not a linear layer: {module.note}"
    return None


def _agree(
    assignments: Sequence[Assignment], groups: Iterable[tuple[str, ...]], problem: str, reason: str
) -> None:
    by_name = {a.module.name: a for a in assignments}
    for group in groups:
        first, *rest = (by_name[name] for name in group)
        for other in rest:
            if other.target != first.target:
                raise UsageError(
                    problem,
                    where=f"{first.module.name} and {other.module.name}",
                    got=f"{_spoken(first)} and {_spoken(other)}",
                    wanted=f"one target: {reason}",
                    remedy="name all of them in the same line of the recipe, or keep all of them: "
                    + keep_flags([a.module for a in assignments], [first.module.name]),
                )


def _spoken(assignment: Assignment) -> str:
    what = "kept" if assignment.target is None else str(assignment.target)
    return f"{what} [{assignment.why}]"
