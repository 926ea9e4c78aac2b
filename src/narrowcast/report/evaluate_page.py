"""The page of an evaluation for people: one HTML file with everything inside, readable on a phone and on paper.

The verdict, probable bugs and every number with its interval first; then predictions, layers, caches and texts that the
numbers come from. What was not measured has no section. There is no script. Tokens show their blanks and line ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from math import isfinite
from pathlib import PurePath

from narrowcast.report.drawing import Drawn
from narrowcast.report.evaluate import (
    CACHES,
    cache_cells,
    ends,
    gap_rows,
    setting,
    side_cells,
    tail_rows,
    yardstick,
)
from narrowcast.report.evaluate_figures import figures
from narrowcast.report.evaluate_style import EVALUATION
from narrowcast.report.page import coded, escaped, facts, figure, whole
from narrowcast.report.page_style import STYLE
from narrowcast.report.tables import number, percent
from narrowcast.statistics.bootstrap import Interval
from narrowcast.studies.evaluation import (
    Asked,
    CacheRow,
    Continuation,
    Divergence,
    Evaluation,
    Gap,
    Greedy,
    Retrieval,
    RetrievalCell,
    Structured,
    WorstToken,
)

BLANKS = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})
_MEANINGS = {
    "perplexity": ("change of perplexity", "the child's beside the parent's; more is worse"),
    "KL divergence": ("KL divergence", "KL(parent || child) of next tokens, in nats; 0 for equal"),
    "same best token": ("same best token", "predictions whose most likely token is the parent's"),
    "same five best": ("same five best", "of the parent's five most likely tokens"),
    "true token": ("true token", "change of the probability of what followed"),
}
_EQUAL = {"same best token": 1.0, "same five best": 1.0}  # what equal models have; the others have 0


def html_page(found: Evaluation) -> str:
    """The whole page as text."""
    drawn = figures(found)
    parts = [
        f"<h1>{_title(found)}</h1>",
        f"<p class='says {_tone(found)}'>{escaped(_sentence(found.verdict.sentence))}</p>",
        *_faults(found.divergence),
        *_accuracy(found),
        facts(
            [(name, escaped(value)) for name, value in setting(found)]
            + [("note", escaped(note)) for note in _notes(found)]
        ),
        *_predictions(found.gap, drawn["gap"]),
        *_layers(found.divergence, drawn["layers"]),
        *_caches(found.caches, drawn["caches"]),
        *_greedy(found.greedy),
        *_retrieval(found.retrieval),
        *_structured(found.structured),
    ]
    return whole(_name(found.child.path), "evaluate", parts, STYLE + EVALUATION)


def _name(path: str) -> str:
    """The last part of a path, or all of what has none."""
    return PurePath(path).name or path


def _title(found: Evaluation) -> str:
    child = escaped(_name(found.child.path))
    if found.child.online is not None:
        child = f"{child} <small>in {escaped(found.child.online)}</small>"
    return (
        child
        if found.parent is None
        else f"{child} <small>beside {escaped(_name(found.parent.path))}</small>"
    )


def _tone(found: Evaluation) -> str:
    """The colour of the verdict: what the exit code says, and good news."""
    good = "good" if found.verdict.says in ("fine", "identical") else "open"
    return {0: good, 4: "undecided"}.get(found.code, "bad")


def _sentence(said: str) -> str:
    return f"{said[:1].upper()}{said[1:]}{'' if said.endswith('.') else '.'}"


def _notes(found: Evaluation) -> list[str]:
    return [*found.notes, *(found.divergence.notes if found.divergence is not None else ())]


def _faults(divergence: Divergence | None) -> list[str]:
    """A card for each probable bug; all but the first folded."""
    faults = divergence.faults if divergence is not None else ()
    return [
        f'<details class="rule error"{" open" if i == 0 else ""}><summary><span class=badge>probable bug</span> '
        f"{escaped(_sentence(fault.where).removesuffix('.'))}</summary><p>{escaped(_sentence(fault.said))}</p>"
        f"<p class=remedy>{escaped(fault.remedy)}</p></details>"
        for i, fault in enumerate(faults)
    ]


def _accuracy(found: Evaluation) -> list[str]:
    """Who was run, and every number with its interval drawn beside it."""
    rows = []
    for role, side in (("parent", found.parent), ("child", found.child)):
        if side is None:
            continue
        path, stored, dtype, perplexity, interval = side_cells(side)
        about = f"{role}: {coded(path)}, {escaped(stored)}, run in {escaped(dtype)}"
        rows.append(_numbers(f"perplexity of the {role}", about, perplexity, interval))
    if found.gap is not None:
        asked = {"KL divergence": found.asked.max_kl, "same best token": found.asked.min_top1}
        for name, value, spell, _ in gap_rows(found.gap):
            limit = asked.get(name)
            shown, meaning = _MEANINGS[name]
            about = escaped(meaning) + (f"; <b>{_limit(name, found.asked)}</b>" if limit is not None else "")
            drawn = _strip(value, _EQUAL.get(name, 0.0), limit)
            rows.append(_numbers(shown, about, spell(value.estimate), ends(value, spell), drawn))
    confidence = f"{100 * found.child.perplexity.confidence:g} %"
    head = f"<th></th><th class=n>mean</th><th class=n>{confidence} interval</th><th></th>"
    table = f"<table class=numbers><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    said = yardstick(found.divergence)
    return [table, *([f"<p>{escaped(said)}</p>"] if said else [])]


def _numbers(name: str, about: str, mean: str, interval: str, drawn: str = "") -> str:
    return (
        f"<tr><td><b>{escaped(name)}</b><span class=about>{about}</span></td><td class='n mean'>{escaped(mean)}</td>"
        f"<td class=n>{escaped(interval)}</td><td class=strip>{drawn}</td></tr>"
    )


def _limit(name: str, asked: Asked) -> str:
    return (
        f"at most {number(asked.max_kl)} was asked for"
        if name == "KL divergence"
        else f"at least {percent(asked.min_top1 or 0)} was asked for"
    )


def _strip(value: Interval, equal: float, limit: float | None) -> str:
    """The interval as a bar around its mean, what equal models have as a line, the limit as a dashed one;
    nothing where all of these are one point."""
    points = [value.estimate, equal, *([limit] if limit is not None else [])]
    bounded = isfinite(value.low) and isfinite(value.high)
    points += [value.low, value.high] if bounded else []
    low, wide = min(points), max(points) - min(points)
    if not wide:
        return ""

    def at(x: float) -> str:
        return f"{6 + 148 * (x - low) / wide:.1f}"

    shapes = [f'<path d="M{at(equal)} 2V22" class=equal />']
    if bounded:
        shapes.append(f'<path d="M{at(value.low)} 12H{at(value.high)}" class=range />')
    shapes.append(f'<circle cx="{at(value.estimate)}" cy="12" r="4.5" />')
    if limit is not None:
        shapes.append(f'<path d="M{at(limit)} 2V22" class=limit />')
    return f'<svg viewBox="0 0 160 24" aria-hidden="true">{"".join(shapes)}</svg>'


def _plots(drawn: Sequence[Drawn]) -> str:
    return f"<div class=plots>{''.join(figure(one) for one in drawn)}</div>" if drawn else ""


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], style: str = "") -> str:
    """A table of names and numbers; titles stay with their cells where a phone shows a row as a card."""
    head = "".join(f"<th{' class=n' if i else ''}>{escaped(title)}</th>" for i, title in enumerate(titles))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{" class=n" if i else ""} data-title="{escaped(title)}">{escaped(cell)}</td>'
            for i, (title, cell) in enumerate(zip(titles, row, strict=True))
        )
        + "</tr>"
        for row in rows
    )
    return f'<table class="{style or "plain"}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _predictions(gap: Gap | None, drawn: Sequence[Drawn]) -> list[str]:
    if gap is None or gap.identical:
        return []
    titles, rows = tail_rows(gap)
    rms = f"The true token's probability moves by {100 * gap.shift_rms:.2f} points (rms)."
    words = (
        f"<div><p>Percentiles over predictions. {rms}</p><div class=wide>{_table(titles, rows)}</div></div>"
    )
    return [
        "<h2>Predictions</h2>",
        f"<div class=beside>{''.join(figure(one) for one in drawn)}{words}</div>",
        *_worst(gap.worst),
    ]


def _worst(worst: Sequence[WorstToken]) -> list[str]:
    if not worst:
        return []
    rows = "".join(
        f"<tr><td class=n>{number(one.kl, 3)}</td>"
        f"<td><div class=before>…{_flowing(one.before)}<b>{_token(one.token)}</b></div>"
        f"<span class=about>{escaped(one.document)}, token {one.place:,}</span></td>"
        f"<td>{_said('parent', *one.parent)}{_said('child', *one.child)}"
        f"<span class=side>true <span>{_share(one.p_parent)} → {_share(one.p_child)}</span></span></td></tr>"
        for one in worst
    )
    head = "<th class=n>KL</th><th>text, and the token that followed</th><th>most likely</th>"
    return [
        "<h3>Worst predictions</h3>",
        f"<table class=worst><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>",
    ]


def _said(role: str, token: str, probability: float) -> str:
    return f"<span class=side>{role} <span>{_token(token)} {_share(probability)}</span></span>"


def _share(probability: float) -> str:
    """A probability, with as many digits as tell it from certain."""
    if probability < 1e-6:
        return escaped("<0.0001 %")
    return escaped(percent(probability, 2) if probability < 0.995 else f"{100 * probability:.1f} %")


def _token(token: str) -> str:
    """A token by itself: blanks are seen, and its direction turns nothing around."""
    return f"<bdi><code class=token>{escaped(token.translate(BLANKS)) or '(empty)'}</code></bdi>"


def _flowing(said: str) -> str:
    """Running text of a model: line ends as blanks, its direction kept inside."""
    words = " ".join(said.split())
    return f"<bdi>{escaped(words + (' ' if said[-1:].isspace() else ''))}</bdi>"


def _layers(divergence: Divergence | None, drawn: Sequence[Drawn]) -> list[str]:
    if divergence is None or not drawn:
        return []
    rows = [
        (
            str(row.layer), f"{row.cosine:.5f}", f"{row.least_cosine:.4f}", percent(row.relative),
            "-" if row.local is None else percent(row.local), "-" if row.expected is None else percent(row.expected),
        )
        for row in divergence.layers
    ]  # fmt: skip
    titles = ("behind layer", "cosine", "worst token's", "error so far", "this layer's", "its format's")
    return [
        "<h2>Layers</h2>",
        _plots(drawn),
        f"<details class=more><summary>every layer</summary>{_table(titles, rows, 'cards')}</details>",
    ]


def _caches(rows: Sequence[CacheRow], drawn: Sequence[Drawn]) -> list[str]:
    if not rows:
        return []
    said = (
        "<p>“KL alone”, “perplexity” and “same best” are beside the child with a wide cache, “to parent” is KL beside "
        "the parent; “clipped” is the share of keys and values that the scales could not hold.</p>"
    )
    table = _table(CACHES, [cache_cells(row) for row in rows], "cards")
    plots = "".join(figure(one) for one in drawn)
    return ["<h2>KV caches</h2>", f"<div class=beside>{plots}<div>{said}</div></div>", table]


def _greedy(greedy: Greedy | None) -> list[str]:
    if greedy is None:
        return []
    said = f"{greedy.matching} of {len(greedy.rows)} continuations of {greedy.tokens} tokens are the same"
    if greedy.median_first is not None:
        said += f"; the others part after {greedy.median_first:g} tokens (median)"
    key = "What both write is faint." if greedy.matching < len(greedy.rows) else ""
    rows = sorted(greedy.rows, key=lambda row: row.first is None)
    return ["<h2>Greedy text</h2>", f"<p>{escaped(said)}. {key}</p>", *map(_continuation, rows)]


def _continuation(row: Continuation) -> str:
    """Both texts side by side, what they have in common faint."""
    where = f"{row.document}: the same"
    if row.first is not None:
        where = f"{row.document}: part after {row.first} token{'s' * (row.first != 1)}"
    if row.margin is not None:
        where += f", where the parent led by {row.margin:.2g} nats"
    parent, child = (" ".join(said.split()) for said in (row.parent, row.child))
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(parent, child, strict=False)))
    sides = "".join(
        f"<div><b>{role}</b> <bdi><span class=same>{escaped(said[:common])}</span>{escaped(said[common:])}</bdi></div>"
        for role, said in (("parent", parent), ("child", child))
    )
    return (
        f"<div class=pair><p class=about>{escaped(where)}</p><p class=prompt>{_flowing(row.prompt)}</p>"
        f"<div class=sides>{sides}</div></div>"
    )


def _retrieval(found: Retrieval | None) -> list[str]:
    if found is None:
        return []
    lengths = sorted({cell.length for cell in found.cells})
    cells = {(cell.depth, cell.length): cell for cell in found.cells}
    head = "".join(f"<th>{length:,} tokens</th>" for length in lengths)
    body = "".join(
        f"<tr><th>{depth:.0%} deep</th>{''.join(_cell(cells.get((depth, length))) for length in lengths)}</tr>"
        for depth in sorted({cell.depth for cell in found.cells})
    )
    both = any(cell.parent is not None for cell in found.cells)
    key = "parent / child, of " if both else "child, of "
    lost = " Red edges: fewer than the parent." if both else ""
    return [
        "<h2>Retrieval</h2>",
        f"<p>A fact hidden in filler, asked for at the end, with {found.choices} answers to choose from. "
        f"{escaped(_sentence(found.says))}{lost}</p>",
        f"<table class=grid><thead><tr><th>{key}tasks solved</th>{head}</tr></thead><tbody>{body}</tbody></table>",
    ]


def _cell(cell: RetrievalCell | None) -> str:
    if cell is None:
        return "<td>-</td>"
    parent = "" if cell.parent is None else f"{cell.parent} / "
    share = round(100 * cell.child / max(cell.tasks, 1))
    lost = " class=lost" if cell.parent is not None and cell.child < cell.parent else ""
    return f'<td{lost} style="--share:{share}%">{parent}{cell.child} <small>of {cell.tasks}</small></td>'


def _structured(found: Structured | None) -> list[str]:
    if found is None:
        return []
    rows = [
        (name, *(("-" if parent is None else str(parent)), str(child)))
        for name, parent, child in (
            ("JSON", found.parent_json, found.child_json),
            ("fits the schema", found.parent_valid, found.child_valid),
        )
    ]
    table = _table((f"of {found.prompts} outputs", "parent", "child"), rows)
    return [
        "<h2>Structured output</h2>",
        f"<p>{escaped(_sentence(found.says))}</p>",
        f"<div class=beside>{table}<div><p class=about>The child's first output</p>"
        f"{_preformatted(found.example)}</div></div>",
    ]


def _preformatted(said: str) -> str:
    """Text with its lines."""
    lines = [escaped(line.replace("\t", "    ")) for line in said.splitlines()]
    return f"<pre><bdi>{chr(10).join(lines)}</bdi></pre>"
