"""The page of ``narrowcast repair``: what was mended and what it cost, what was not, and what is still wrong."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from narrowcast.audit.findings import SEVERITIES, Finding
from narrowcast.repair.draft import Mended
from narrowcast.repair.run import Repaired
from narrowcast.report.tables import hanging

SHOWN = 3  # tensors of one kind of change


def repair_page(done: Repaired) -> list[str]:
    """What a repair did, or would do."""
    where = f" to {done.out}" if done.out is not None else ""
    lines = [f"{done.model}{where}", ""]
    for repair, changes in _by_repair(done.mended).items():
        lines += [part for text in _changes(repair, changes) for part in hanging(text)]
    lines = lines if done.mended or done.unmended else lines[:1]
    lines += [part for text in done.unmended for part in hanging(f"not mended: {text}")]
    lines += [
        part for name in done.left_out for part in hanging(f"not copied: {name}: weights in another format")
    ]
    lines += ["", *_left(done)] if done.left else []
    return [*lines, *hanging(_end(done))]


def _by_repair(mended: Sequence[Mended]) -> dict[str, list[Mended]]:
    found: dict[str, list[Mended]] = {}
    for one in mended:
        found.setdefault(one.repair, []).append(one)
    return found


def _changes(repair: str, changes: Sequence[Mended]) -> list[str]:
    few = [f"  {repair}: {', '.join(one.tensors[:SHOWN])}: {one.said}" for one in changes[:SHOWN]]
    if len(changes) <= SHOWN:
        return few
    rest = changes[SHOWN:]
    lost = [one.sqnr for one in rest if isfinite(one.sqnr)]
    cost = (
        f", at worst {min(lost):.1f} dB"
        if lost
        else ", no decoded value changes"
        if repair == "fused_outer"
        else ""
    )
    return [*few, f"  {repair}: and {len(rest):,} more{cost}"]


def _left(done: Repaired) -> list[str]:
    counts = {s: sum(one.severity == s for one in done.left) for s in SEVERITIES}
    named = ", ".join(
        f"{counts[s]:,} {s}{'s' if counts[s] != 1 and s != 'info' else ''}" for s in SEVERITIES if counts[s]
    )
    title = "an audit of the result finds" if done.out is not None else "an audit finds"
    serious = [one for one in done.left if one.severity == "error"]
    rules: dict[str, list[Finding]] = {}
    for one in serious:
        rules.setdefault(one.rule, []).append(one)
    lines = [f"{title} {named}"]
    for code, found in rules.items():
        first = found[0]
        more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
        remedy = f"; {first.remedy}" if first.remedy else ""
        lines += hanging(f"  {code} {first.tensor or ''}{more}: {first.said}{remedy}")
    return lines


def _end(done: Repaired) -> str:
    if done.out is not None:
        return f"Look at it whole: narrowcast audit {done.out}"
    if done.mended:
        return "Nothing was written."
    if done.unmended:
        return "Nothing was written."
    return "Nothing here has one right answer that a repair could write; nothing was written."
