"""The page of ``narrowcast audit``: what is wrong, worst first, each rule once.

    NC110 nonfinite-scale: A scale is NaN or infinite (32 findings)
      scales that are not finite: 1; wanted a finite positive scale
      model.layers.{0-31}.mlp.up_proj.weight_scale [3, 1]: got 0x7F
      remedy: ...

What all findings of a rule share is said once; names that differ in numbers only are folded, and three entries stand
for the rest. What was silenced and which rules did not run is counted, so that silence is never taken for health.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

from narrowcast.audit.findings import SEVERITIES, Finding
from narrowcast.audit.found import module_of
from narrowcast.audit.rules import rules
from narrowcast.audit.run import Audit
from narrowcast.jobs.matching import CACHE_SCALE, INPUT_SCALE
from narrowcast.report.names import folded
from narrowcast.report.portability import told, where, where_lines
from narrowcast.report.tables import facts, hanging, middle, percent, rate, seconds, size, terminal_width

SHOWN = 3  # entries of a rule
_FACETS = ("got", "wanted")
_PLURAL = {"error": "errors", "warning": "warnings", "info": "info"}


@dataclass(frozen=True)
class Spent:
    """What an audit took: seconds on the wall, bytes of tensors that were read, and how many of the seconds that
    took."""

    seconds: float
    nbytes: int
    reading: float = 0.0

    @property
    def rate(self) -> str:
        """Bytes with their rate; empty where none were read."""
        both = self.nbytes and self.reading
        return f"{size(self.nbytes)} read at {rate(self.nbytes / self.reading)}" if both else ""


def audit_record(found: Audit, spent: Spent) -> dict[str, Any]:
    """The audit for machines."""
    return found.to_json() | {
        "quantized_share": quantized_share(found), "seconds": round(spent.seconds, 3), "bytes_read": spent.nbytes,
    }  # fmt: skip


def audit_page(found: Audit, spent: Spent) -> list[str]:
    """Errors, warnings, info, what was not looked at, one line at the end."""
    blocks = [_head(found)]
    for severity in SEVERITIES:
        groups = by_rule(one for one in found.open_findings if one.severity == severity)
        members = sum(map(len, groups.values()))
        if severity == "info":
            lines = [line for group in groups.values() if not told(group[0]) for line in _short(group)]
            blocks += (
                [[f"{members} {_PLURAL[severity]}", *lines], where_lines(where(found))] if groups else []
            )
        else:
            for i, group in enumerate(groups.values()):
                title = [f"{members} {severity if members == 1 else _PLURAL[severity]}", ""] if i == 0 else []
                blocks.append([*title, *_block(group)])
    if not found.open_findings:
        blocks.append(hanging(f"Nothing found. {looked_at(found)}"))
    blocks += [[*_unseen(found), *_mendable(found)], hanging(_summary(found, spent))]
    return [line for block in blocks if block for line in (*block, "")][:-1]


def _head(found: Audit) -> list[str]:
    subject = found.subject
    target = [subject.engine or "", subject.gpu.name if subject.gpu else ""]
    target += [f"tensor-parallel {subject.tp}"] if subject.tp > 1 else []
    pairs = [
        ("for", ", ".join(part for part in target if part)),
        ("against", str(subject.parent.checkpoint.root) if subject.parent else ""),
        ("KV cache", cache(found)),
        ("looked at", looked_at(found) if found.open_findings else ""),
    ]
    return [f"{subject.model} ({container(found)})", *facts(pairs)]


def container(found: Audit) -> str:
    return found.subject.container or "no container reads it"


def cache(found: Audit) -> str:
    """The KV cache that the config asks for, with the scales that lie in the file; empty for a wide one without."""
    subject = found.subject
    kv = subject.contents.kv if subject.contents is not None else None
    scales = sum(one.role == CACHE_SCALE for one in subject.held.values())
    if kv is None and not scales:
        return ""
    return f"{kv or 'wide by the config'}, {scales or 'no'} scale{'s' if scales != 1 else ''} in the file"


def by_rule(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Findings by the code of their rule, in their order."""
    groups: dict[str, list[Finding]] = {}
    for one in findings:
        groups.setdefault(one.rule, []).append(one)
    return groups


def _block(group: Sequence[Finding]) -> list[str]:
    rule = rules()[group[0].rule]
    count = f" ({len(group):,} findings)" if len(group) > 1 else ""
    lines = hanging(f"{rule.code} {rule.name}: {rule.title}{count}")
    same = shared(group)
    if "said" in same:
        lines += hanging("  " + "; ".join([same["said"], *_facets(same)]))
    shown = entries(group, same, SHOWN)
    for entry in shown:
        lines += hanging(f"  {entry.text}")
    rest = len(group) - sum(entry.count for entry in shown)
    if rest:
        lines.append(f"  and {rest:,} more")
    if "said" not in same and "wanted" in same:
        lines += hanging(f"  wanted: {same['wanted']}")
    remedy = group[0].remedy
    return [*lines, *(hanging(f"  remedy: {remedy}") if remedy else [])]


def shared(group: Sequence[Finding]) -> dict[str, str]:
    """What all of several findings have in common: said, got, wanted. ``got`` only where the words are the same."""
    found: dict[str, str] = {}
    if len(group) == 1:
        return found
    for name in ("said", *_FACETS):
        values = {getattr(one, name) for one in group}
        if len(values) == 1 and (value := values.pop()) is not None:
            found[name] = value
    return found if "said" in found else {key: found[key] for key in found if key == "wanted"}


def _facets(values: dict[str, str]) -> list[str]:
    return [f"{name} {values[name]}" for name in _FACETS if name in values]


@dataclass(frozen=True)
class Entry:
    """Some findings of a rule in one line: ``name`` folds the tensors of ``count`` findings."""

    name: str
    text: str
    count: int


def entries(group: Sequence[Finding], same: dict[str, str], most: int) -> list[Entry]:
    """Findings that say the same of tensors whose names fold, as one entry each, ``most`` of them; nothing of what is
    in ``same``."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for one in group:
        alike.setdefault((one.said, one.at, one.got, one.wanted), []).append(one.tensor or "")
    found = (entry for words, names in alike.items() for entry in _alike(*words, names, same) if entry.text)
    return list(islice(found, most))


def _alike(
    said: str,
    at: tuple[int, ...] | None,
    got: str | None,
    wanted: str | None,
    names: Sequence[str],
    same: dict[str, str],
) -> Iterator[Entry]:
    own = {"said": said, "got": got, "wanted": wanted}
    own = {key: text for key, text in own.items() if text is not None and (key, text) not in same.items()}
    words = "; ".join([*([own["said"]] if "said" in own else []), *_facets(own)])
    place = f" {list(at)}" if at is not None else ""
    doubles = len(names) - len(set(names))
    for name, count in folded(names):
        times = f" ({count:,})" if count > 1 else ""
        short = middle(name, terminal_width() - len(place) - len(times) - 5)
        lead = f"{short}{place}{times}" if name and not words.startswith(name) else ""
        yield Entry(name, ": ".join(part for part in (lead, words) if part), count + doubles)
        doubles = 0


def _short(group: Sequence[Finding]) -> list[str]:
    """A rule in a line."""
    first, rule = group[0], rules()[group[0].rule]
    more = f" and {len(group) - 1:,} more" if len(group) > 1 else ""
    place = f" ({first.tensor}{more})" if first.tensor else more
    return hanging(f"  {rule.code} {rule.name}: {first.said}{place}")


def looked_at(found: Audit) -> str:
    """How much of the checkpoint was seen, and how deep."""
    subject = found.subject
    depth = {"headers": "headers", "scales": "headers and scales", "codes": "headers, scales and codes"}
    deep = depth.get(subject.depth, "headers, scales, codes and the parent")
    quantized, plain = len(subject.quantized), len(subject.held) - len(subject.quantized)
    aside = len({module_of(name) for name in subject.found.set_aside})
    layers = (
        "1 layer that contradicts itself" if aside == 1 else f"{aside:,} layers that contradict themselves"
    )
    rest = f"; set aside: {layers}" if aside else ""
    return f"{len(found.ran)} rules on {deep} of {quantized:,} quantized and {plain:,} plain tensors{rest}."


def quantized_share(found: Audit) -> float | None:
    """The share of parameters that are quantized; None where there are none to be seen."""
    sizes = [
        (one.coded is not None, prod(one.shape))
        for one in found.subject.held.values()
        if one.role not in (INPUT_SCALE, CACHE_SCALE)
    ]
    total = sum(count for _, count in sizes)
    return sum(count for quantized, count in sizes if quantized) / total if total else None


def _unseen(found: Audit) -> list[str]:
    """Silenced findings and rules that did not run, with the reason for each."""
    silenced: dict[tuple[str, str], int] = {}
    for one in found.findings:
        if one.silenced is not None:
            silenced[one.rule, one.silenced] = silenced.get((one.rule, one.silenced), 0) + 1
    skipped: dict[str, int] = {}
    for _, reason in found.skipped:
        skipped[reason] = skipped.get(reason, 0) + 1
    quiet = "; ".join(f"{count:,} of {code} ({reason})" for (code, reason), count in silenced.items())
    unrun = "; ".join(f"{count} rules ({reason})" for reason, count in skipped.items())
    lines = hanging(f"silenced: {quiet}") if quiet else []
    for one in found.idle:
        lines += hanging(
            f"silences nothing: {', '.join(sorted(one.codes)[:3])} on {one.tensor} ({one.reason})"
        )
    return [*lines, *(hanging(f"not run: {unrun}") if unrun else [])]


def _mendable(found: Audit) -> list[str]:
    count = sum(one.repair is not None for one in found.open_findings)
    return [f"`narrowcast repair MODEL OUT` is for {count:,} of these (--dry-run first)."] if count else []


def _summary(found: Audit, spent: Spent) -> str:
    counts = found.counts()
    parts = [f"{counts[s]:,} {s if counts[s] == 1 else _PLURAL[s]}" for s in SEVERITIES]
    share = quantized_share(found)
    spelled = container(found) + (f", {percent(share)} of the parameters quantized" if share else "")
    return f"{', '.join(parts)}; {spelled}; {', '.join(filter(None, (seconds(spent.seconds), spent.rate)))}"
