"""The page of ``narrowcast verdict``: the verdict in words first, then what it rests on.

Scores are shown in percent and differences in points (pt, hundredths of the whole scale), which is how people quote
them; the JSON has shares.
"""

from __future__ import annotations

from math import floor, log10

from narrowcast.report.tables import facts, hanging, paragraph, table
from narrowcast.statistics.bootstrap import Interval
from narrowcast.studies.verdict import Reading, Row, Verdict
from narrowcast.studies.verdict_counters import Canary

_HOW = {
    "score": "score interval",
    "bootstrap": "bootstrap",
    "t": "t interval of few clusters",
    "none": "one cluster says nothing of others",
    "identical": "every answer is the same",
}


def verdict_page(found: Verdict) -> list[str]:
    """The headline, both scores, what the difference rests on, the tasks, and notes."""
    sides = list(zip("AB", found.paths, strict=True))
    if found.whole is None:
        total = len(found.refusals)
        said = f"invalid: nothing was compared, for {total} reason{'s' * (total > 1)}."
        return [*facts(sides, indent=0), "", *paragraph(said), *_refusals(found)]
    whole = found.whole
    lines = [*paragraph(_headline(found, whole)), ""]
    scores = [
        (f"{side}  {_percent(score)}", path)
        for (side, path), score in zip(sides, (whole.a, whole.b), strict=True)
    ]
    lines += [*facts(scores, indent=2), "", *facts(_grounds(found, whole)), *_tasks(found)]
    return [*lines, *(part for note in found.notes for part in hanging(f"note: {note}."))]


def canary_page(found: Canary) -> list[str]:
    """The headline, both counters, the interval that holds at every look and that of a single one."""
    what = found.kind
    rates = [
        (f"{side}  {_rate(c.rate)}", f"{c.events} {what} of {c.n}")
        for side, c in (("A", found.a), ("B", found.b))
    ]
    needed = (
        ""
        if found.needed is None
        else f"{found.needed} on each side, for one look, for {_points(found.effect or 0)}"
    )
    grounds = [
        ("difference", f"{_between(found.interval)}, at every look together"),
        ("p", f"{_p(found.p)}, at every look together"),
        ("one look", f"{_between(found.once)}, only if its time was set beforehand"),
        ("needed", needed),
    ]
    return [*paragraph(_canary_headline(found)), "", *facts(rates), "", *facts(grounds)]


def _canary_headline(found: Canary) -> str:
    more = "more" if found.interval.estimate > 0 else "fewer"
    shown = f"{found.reading.value}: {_points(abs(found.interval.estimate))} {more} {found.kind}, p = {_p(found.p)}"
    if found.reading in (Reading.WORSE, Reading.BETTER):
        return f"{shown}, at whatever moment one looks."
    if found.reading is Reading.NO_DIFFERENCE:
        return f"no difference shown: it lies within ±{_points(found.effect or 0)}, at whatever moment one looks."
    if found.effect is None:
        return f"{shown}. That no difference is there can only be shown of an --effect that matters."
    return f"{shown}; it may still be larger than ±{_points(found.effect)}."


def _headline(found: Verdict, whole: Row) -> str:
    reading, p = found.reading, _p(whole.p)
    if found.same:
        return "no difference shown: every answer is the same, the difference is exactly 0."
    if reading in (Reading.WORSE, Reading.BETTER):
        return f"{reading.value}: {_shown(found, whole)}{_small(found, whole)}."
    margin, size = f"±{_points(found.effect)}", _points(whole.difference, sign=True)
    if reading is Reading.NO_DIFFERENCE:
        return f"no difference shown: {size}, p = {p}, and the interval lies within {margin}."
    enough = "" if whole.needed is None else f"; {whole.needed} would see {_points(found.effect)}"
    return (
        f"undecided: {size}, p = {p}, but the interval reaches beyond {margin}. These {whole.questions} questions "
        f"could only see a change of about {_about(whole.detectable)}{enough}."
    )


def _shown(found: Verdict, whole: Row) -> str:
    tasks = found.worse_tasks
    alone = ", ".join(
        f"{row.task} (p = {_p(row.adjusted_p or 0)} among {len(found.tasks)} tasks)" for row in tasks
    )
    sign = whole.difference < 0
    if found.reading is Reading.WORSE and not (sign and whole.p <= 1 - found.confidence):
        return f"not all together, but {alone}"
    net = abs(whole.gained - whole.lost)
    turn = ("wrong", "right") if sign else ("right", "wrong")
    if not whole.binary or not net:
        return f"{_points(whole.difference, sign=True)} over {whole.questions} questions, p = {_p(whole.p)}"
    plural = "s" if net > 1 else ""
    return f"{net} more answer{plural} flipped to {turn[0]} than to {turn[1]} of {whole.questions}, p = {_p(whole.p)}"


def _small(found: Verdict, whole: Row) -> str:
    if 0 < abs(whole.difference) < found.effect and not found.worse_tasks:
        return f"; by less than the {_points(found.effect)} that matter"
    return ""


def _grounds(found: Verdict, whole: Row) -> list[tuple[str, str]]:
    how = _HOW[whole.interval.method]
    by = f", {whole.clusters} clusters" if whole.clusters is not None else ""
    unit = ("right to wrong", "wrong to right") if whole.binary else ("lower", "higher")
    tests = (
        f"{_p(whole.p)} exact McNemar, {_p(whole.mid_p)} mid-p"
        if whole.mid_p is not None
        else f"{_p(whole.p)} sign flips"
    )
    grounds = [
        ("metric", whole.metric),
        ("difference", f"{_between(whole.interval)} ({how}{by})"),
        ("bootstrap", _between(whole.bootstrap) if whole.interval.method == "score" else ""),
        (
            "flips",
            f"{whole.lost} {unit[0]}, {whole.gained} {unit[1]}: {_percent(whole.flips)} of {whole.questions}",
        ),
        ("p", f"{tests}{by}"),
    ]
    if found.same:
        return grounds
    assumed = f"if {_about(min(1.0, 3 / whole.questions))} flip, as may be"
    rate = "at this rate of flips" if whole.flips else assumed
    needed = "" if whole.needed is None else f"{whole.needed} questions to see {_points(found.effect)} {rate}"
    could = f"{_about(whole.detectable)} (80 % power); unpaired {_about(whole.unpaired)} (half width)"
    return [*grounds, ("could see", could), ("needed", needed)]


def _tasks(found: Verdict) -> list[str]:
    if not found.tasks:
        return []
    rows = [
        (
            row.task,
            str(row.questions),
            _percent(row.a),
            _percent(row.b),
            f"{100 * row.difference:+.2f}",
            f"{100 * row.interval.low:+.1f} {100 * row.interval.high:+.1f}",
            f"{row.lost}/{row.gained}",
            _p(row.p),
            _p(1.0 if row.adjusted_p is None else row.adjusted_p),
        )
        for row in sorted(found.tasks, key=lambda row: (row.p, row.task))
    ]
    titles = ("task", "n", "A", "B", "pt", "between", "flips", "p", "Holm")
    said = f"{len(rows)} tasks are {len(rows)} comparisons: read Holm's p, which allows for that."
    return ["", *table(titles, rows, "Lrrrrrrrr", indent=2), "", *paragraph(said, indent=2)]


def _refusals(found: Verdict) -> list[str]:
    lines: list[str] = []
    for refusal in found.refusals:
        lines += [
            "",
            *hanging(f"  {refusal.said}: {refusal.count} in all"),
            *hanging(f"    first: {refusal.first}"),
        ]
        lines += hanging(f"    remedy: {refusal.remedy}")
    return lines


def _between(interval: Interval) -> str:
    low, high = (f"{100 * end:+.{_digits(interval)}f}" for end in (interval.low, interval.high))
    size = f"{100 * interval.estimate:+.{_digits(interval)}f} pt"
    return f"{size}, {100 * interval.confidence:g} %: {low} to {high}"


def _digits(interval: Interval) -> int:
    """Decimals that show the interval's width in two digits, at least two."""
    width = 100 * (interval.high - interval.low)
    return 2 if width <= 0 else max(2, min(8, 1 - floor(log10(width))))


def _points(share: float, sign: bool = False) -> str:
    text = f"{100 * share:{'+' if sign else ''}.3g}"
    return f"{text} pt"


def _about(share: float) -> str:
    return f"{100 * share:.2g} pt"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _rate(share: float) -> str:
    return f"{100 * share:.4g} %"


def _p(value: float) -> str:
    """Two digits, three from 0.1 on: 8.6e-6, 0.0048, 0.896."""
    if value >= 0.1:
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if value >= 0.001:
        return f"{value:.2g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value else "below 1e-300"
