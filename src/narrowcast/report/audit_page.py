"""The page of an audit for people: one HTML file with everything inside, readable on a phone and on paper.

What, where, how bad, what to do; then where it runs, then plots. It loads nothing: no font, no script, no picture from
anywhere. A dozen lines of script filter findings by what is typed; without script everything is there all the same.
Whatever comes from the checkpoint is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.audit.findings import SEVERITIES, Finding
from narrowcast.audit.portability import Where
from narrowcast.audit.run import Audit
from narrowcast.errors import NarrowcastError
from narrowcast.report import portability
from narrowcast.report.audit import (
    Spent,
    by_rule,
    cache,
    container,
    entries,
    looked_at,
    quantized_share,
    shared,
)
from narrowcast.report.drawing import Drawn
from narrowcast.report.figures import figures
from narrowcast.report.page import coded, escaped, facts, figure, whole
from narrowcast.report.page_style import AUDIT, SCRIPT, STYLE
from narrowcast.report.plan_figures import memory_figure
from narrowcast.report.rules import rows
from narrowcast.report.tables import percent, seconds
from narrowcast.serving.loading import load
from narrowcast.serving.question import Question

SHOWN = 200  # entries of a rule; the record has them all
_TITLES = {"error": "Errors", "warning": "Warnings", "info": "Good to know"}


def html_page(found: Audit, spent: Spent) -> str:
    """The whole page as text."""
    counts = found.counts()
    parts = [
        f"<h1>{escaped(found.subject.root.name or found.subject.model)}</h1>",
        f"<p class=verdict>{_verdict(counts)}</p>",
        _facts(found, spent),
        *_findings(found),
        *_where(found),
        *_plots(found),
        *_unseen(found),
    ]
    return whole(found.subject.root.name, "audit", parts, STYLE + AUDIT, SCRIPT)


def _prose(text: str) -> str:
    """Text of a rule, whose backquotes mark code."""
    parts = text.split("`")
    return "".join(escaped(part) if i % 2 == 0 else coded(part) for i, part in enumerate(parts))


def _verdict(counts: dict[str, int]) -> str:
    words = {"error": "errors", "warning": "warnings", "info": "info", "silenced": "silenced"}
    return " ".join(
        f'<span class="tally {key if counts[key] else "none"}"><b>{counts[key]:,}</b> '
        f"{word if counts[key] != 1 else word.removesuffix('s')}</span>"
        for key, word in words.items()
        if counts[key] or key in ("error", "warning")
    )


def _facts(found: Audit, spent: Spent) -> str:
    subject = found.subject
    share = quantized_share(found)
    target = [subject.engine or "", subject.gpu.name if subject.gpu else ""]
    target += [f"tensor-parallel {subject.tp}"] if subject.tp > 1 else []
    pairs = [
        ("model", coded(subject.model)),
        ("container", escaped(container(found))),
        ("quantized", f"{percent(share)} of the parameters" if share else ""),
        ("schemes", escaped(", ".join(sorted({one.scheme for one in subject.quantized.values()})))),
        ("for", escaped(", ".join(part for part in target if part))),
        ("against", coded(subject.parent.checkpoint.root) if subject.parent else ""),
        ("KV cache", escaped(cache(found))),
        ("looked at", escaped(looked_at(found))),
        ("time", ", ".join(filter(None, (seconds(spent.seconds), spent.rate)))),
    ]
    return facts(pairs)


def _findings(found: Audit) -> list[str]:
    if not found.open_findings:
        return ["<h2>Findings</h2><p>Nothing found.</p>"]
    parts = [
        '<h2>Findings</h2><input type="search" placeholder="filter: tensor, rule, word" aria-label="filter">'
    ]
    for severity in SEVERITIES:
        groups = by_rule(
            one for one in found.open_findings if one.severity == severity and not portability.told(one)
        )
        if groups:
            parts.append(f"<h3>{_TITLES[severity]}</h3>")
            parts += [_rule(code, group, severity) for code, group in groups.items()]
    return parts


def _rule(code: str, group: Sequence[Finding], severity: str) -> str:
    row, same = rows()[code], shared(group)
    shown = entries(group, same, SHOWN)
    rest = len(group) - sum(entry.count for entry in shown)
    items = [f"<li>{escaped(entry.text)}</li>" for entry in shown]
    items += [f"<li class=more>and {rest:,} more</li>"] if rest > 0 else []
    said = "; ".join(
        ([same["said"]] if "said" in same else [])
        + [f"{k} {same[k]}" for k in ("got", "wanted") if k in same]
    )
    remedies = dict.fromkeys(one.remedy for one in group if one.remedy)
    about = row.sections()
    lines = [
        f"<p>{escaped(said)}</p>" if said else "",
        f"<ul>{''.join(items)}</ul>",
        *(f"<p class=remedy>{escaped(remedy)}</p>" for remedy in [*remedies][:3]),
        *(
            f"<p class=about><b>{name}.</b> {_prose(about[name])}</p>"
            for name in ("Why", "False alarm")
            if name in about
        ),
    ]
    count = f"<span class=count>{len(group):,}</span>" if len(group) > 1 else ""
    opened = "" if severity == "info" else " open"
    brief = f"<span class=brief>{escaped(group[0].said)}</span>" if severity == "info" else ""
    return (
        f'<details class="rule {severity}"{opened}><summary><span class=badge>{code}</span> '
        f"{escaped(row.title)} {count}{brief}</summary>{''.join(lines)}</details>"
    )


def _where(found: Audit) -> list[str]:
    table = portability.where(found)
    if not table:
        return []
    body = "".join(_row(row) for row in table)
    head = "".join(f"<th>{title}</th>" for title in portability.TITLES)
    return [
        "<h2>Where it runs</h2>",
        f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>",
        *(f"<p class=about>{escaped(text)}</p>" for text in portability.reaches(table)),
    ]


def _row(row: Where) -> str:
    cells, refusal = portability.cells(row), row.path.refusal
    remedy = f"; remedy: {row.path.remedy}" if row.path.remedy else ""
    texts = [*cells[:-1], f"{refusal}{remedy}" if refusal else cells[-1]]
    return f"<tr{' class=refused' if refusal else ''}>{''.join(f'<td>{escaped(text)}</td>' for text in texts)}</tr>"


def _plots(found: Audit) -> list[str]:
    drawn = [*_room(found), *figures(found)]
    if not drawn:
        return []
    plots = "".join(figure(one) for one in drawn)
    return ["<h2>Plots</h2>", f"<div class=plots>{plots}</div>"]


def _room(found: Audit) -> list[Drawn]:
    """What fills the GPU that was asked for, where a plan of the model can be made."""
    subject = found.subject
    if subject.gpu is None:
        return []
    try:
        question = Question(subject.gpu, subject.engine or "vllm", subject.tp)
        return [memory_figure(load(subject.model), question)]
    except NarrowcastError:  # the findings say what is wrong with it
        return []


def _unseen(found: Audit) -> list[str]:
    """Silenced findings and rules that did not run, with the reasons."""
    silenced = [one for one in found.findings if one.silenced is not None]
    if not silenced and not found.skipped and not found.idle:
        return []
    lines = [
        f"<li><b>{code}</b>, {len(group):,} silenced: {escaped(group[0].silenced)}</li>"
        for code, group in by_rule(silenced).items()
    ]
    lines += [
        f"<li><b>{', '.join(sorted(one.codes)[:3])}</b> on {coded(one.tensor)} silences nothing: "
        f"{escaped(one.reason)}</li>"
        for one in found.idle
    ]
    lines += [
        f"<li><b>{rule.code}</b> did not run: {escaped(reason)}. {escaped(rule.title)}.</li>"
        for rule, reason in found.skipped
    ]
    return [f"<h2>Not looked at</h2><ul>{''.join(lines)}</ul>"]
