"""What evaluations measured, brought to the presets that they are about.

An evaluation is what ``narrowcast evaluate --json`` wrote. Whose it is, in this order: the preset that is named with it
(``w4a16=FILE``), the online scheme that was run, the kind of scheme that most parameters of the child have, the longest
name of a preset in the child's path. Where none of these says it, it is refused rather than guessed. Its parent must be
the model that is planned: where it lies at its path, the geometries are compared, and else the plan says so.

Left out: judging. An evaluation that was given limits has a verdict, and that verdict is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from narrowcast.errors import InputError, NarrowcastError, UsageError
from narrowcast.hardware.kinds import input_kind, weight_kind
from narrowcast.serving.loading import load
from narrowcast.serving.served import Served
from narrowcast.store.folder import read_object
from narrowcast.tensors.presets import LinearScheme, presets

_TOLD = ("identical", "fine", "worse", "undecided", "probable bug", "measured")
_DOWN = ("worse", "probable bug")


@dataclass(frozen=True)
class Quality:
    """What one evaluation found: the verdict's word and sentence, KL(parent || child) in nats per token with its
    interval over documents, the relative change of perplexity, the share of same best tokens. None: not measured."""

    preset: str
    says: str
    sentence: str
    kl: float | None
    kl_low: float | None
    kl_high: float | None
    perplexity: float | None
    top1: float | None
    parent: str
    source: str

    @property
    def worse(self) -> bool:
        """Whether it is worse than was asked for, or something is wrong with the file."""
        return self.says in _DOWN

    def to_json(self) -> dict[str, Any]:
        """Plain numbers under stable keys."""
        return asdict(self)


def qualities(evaluations: Sequence[str | Path]) -> dict[str, Quality]:
    """Evaluations by preset. UsageError for one that belongs to no preset, or a second one of the same preset;
    InputError for a file that holds none."""
    found: dict[str, Quality] = {}
    for given in evaluations:
        one = _quality(given)
        if one.preset in found:
            raise UsageError(
                f"two evaluations of {one.preset}", got=f"{found[one.preset].source}, {one.source}",
                wanted="one for each preset",
            )  # fmt: skip
        found[one.preset] = one
    return found


def unchecked(found: Mapping[str, Quality], served: Served) -> Iterator[str]:
    """A sentence for each evaluation whose parent is not at hand to be compared with the model that is planned.
    UsageError for one whose parent is another model."""
    for one in found.values():
        try:
            parent = load(one.parent).geometry if one.parent else None
        except NarrowcastError:
            parent = None
        if parent is None:
            yield f"{one.source} was measured on {one.parent or 'a model without a path'}, taken to be this model."
            continue
        theirs, ours = ((g.family, g.layers, g.hidden, g.parameters) for g in (parent, served.geometry))
        if theirs != ours:
            raise UsageError(
                "the evaluation is of another model", where=one.source, got=f"{one.parent}: {_said(*theirs)}",
                wanted=f"{served.name}: {_said(*ours)}",
            )  # fmt: skip


def _said(family: str, layers: int, hidden: int, parameters: int) -> str:
    return f"{family} of {layers} layers, width {hidden}, {parameters} parameters"


def _quality(given: str | Path) -> Quality:
    name, _, rest = str(given).partition("=")
    named = presets[name].name if rest and name in presets else None
    path = Path(rest if named else given)
    if not path.is_file():
        raise UsageError(
            "there is no such evaluation", got=path, wanted="FILE, or PRESET=FILE with a preset's name",
            remedy="narrowcast evaluate ... --json > FILE",
        )  # fmt: skip
    facts = read_object(path)[1]
    verdict, child, gap = (_part(facts, key) for key in ("verdict", "child", "gap"))
    says = verdict.get("says")
    if facts.get("verb") != "evaluate" or says not in _TOLD or not child:
        raise InputError(
            "this is no evaluation", where=path, got=f"verb {facts.get('verb')!r}",
            wanted="what narrowcast evaluate --json writes",
        )  # fmt: skip
    if not gap:
        raise InputError(
            "the evaluation has no parent to compare with",
            where=path,
            remedy="narrowcast evaluate ... --against PARENT",
        )
    kl = _part(gap, "kl")
    return Quality(
        named or _whose(child, path), str(says), str(verdict.get("sentence", "")), _number(kl, "estimate"),
        _number(kl, "low"), _number(kl, "high"), _number(_part(gap, "perplexity"), "estimate"),
        _number(_part(gap, "top1"), "estimate"), str(_part(facts, "parent").get("path", "")), str(path),
    )  # fmt: skip


def _part(facts: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = facts.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(facts: Mapping[str, Any], key: str) -> float | None:
    """A finite number; JSON spells the others as strings."""
    value = facts.get(key)
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def _whose(child: Mapping[str, Any], file: Path) -> str:
    online, path = child.get("online"), str(child.get("path", ""))
    if isinstance(online, str) and online in presets:
        return presets[online].name
    found = _by_scheme(path) or _by_name(path)
    if found is None:
        raise UsageError(
            "which preset is this the evaluation of?", where=file, got=online or path,
            remedy=f"say it: --evaluations PRESET={file}",
        )  # fmt: skip
    return found


def _by_scheme(path: str) -> str | None:
    """The preset whose layer most parameters of a checkpoint have, where it still lies there."""
    try:
        groups = load(path).groups
    except NarrowcastError:
        return None
    weight: dict[tuple[str, str], int] = {}
    for group in groups:
        if group.linear is not None:
            weight[_kinds(group.linear)] = weight.get(_kinds(group.linear), 0) + group.matrix.parameters
    if not weight:
        return None
    most = max(weight, key=weight.__getitem__)
    return next((name for name, preset in presets.items() if _kinds(preset.linear) == most), None)


def _kinds(linear: LinearScheme) -> tuple[str, str]:
    return weight_kind(linear.weight), input_kind(linear)


def _by_name(path: str) -> str | None:
    """The longest name or alias of a preset that stands in the last part of a path between separators."""
    words = re.sub(r"[^a-z0-9]+", "_", Path(path).name.lower()).strip("_")
    names = {alias: name for name, preset in presets.items() for alias in (name, *preset.aliases)}
    for alias in sorted(names, key=len, reverse=True):
        if f"_{alias}_" in f"_{words}_":
            return names[alias]
    return None
