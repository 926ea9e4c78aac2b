"""The page of ``narrowcast evaluate``: the verdict first, then what it rests on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

from narrowcast.report.tables import facts, hanging, number, percent, quantity, seconds, table
from narrowcast.report.tables import terminal_width as terminal
from narrowcast.statistics.bootstrap import Interval
from narrowcast.studies.evaluation import (
    CacheRow,
    Clipped,
    Divergence,
    Evaluation,
    Gap,
    Greedy,
    Retrieval,
    Side,
    Structured,
    Sums,
    WorstToken,
)

FEW = 10  # documents below which intervals are wide for want of documents
FAULTS = 3  # that are told in full
SUMS = 6  # rows of the table of sums
LAYERS = 8  # rows of the table of layers


def evaluate_page(found: Evaluation) -> list[str]:
    """At most 80 columns: verdict, what was run, the gap, worst predictions, layers, caches, what they write."""
    blocks = [
        hanging(found.verdict.sentence[0].upper() + found.verdict.sentence[1:] + "."),
        _faults(found.divergence),
        facts(setting(found), indent=0),
        _models(found),
        _gap(found.gap, yardstick(found.divergence)) if found.gap is not None else [],
        _worst(found.gap.worst) if found.gap is not None else [],
        _layers(found.divergence) if found.gap is not None and not found.gap.identical else [],
        _caches(found.caches),
        _greedy(found.greedy),
        _retrieval(found.retrieval),
        _structured(found.structured),
        _sums(found.sums),
        _clipped(found.clipped),
        _notes(found),
    ]
    return [line for block in blocks if block for line in (*block, "")][:-1]


def _notes(found: Evaluation) -> list[str]:
    more = found.divergence.notes if found.divergence is not None else ()
    return [line for note in (*found.notes, *more) for line in hanging(f"note: {note}")]


def setting(found: Evaluation) -> list[tuple[str, str]]:
    """What was read, and for how long."""
    text = found.text
    first = " ".join(f"{i}={token!r}" for i, token in text.first)
    documents = f"{text.documents} document{'s' * (text.documents != 1)}"
    words = f"{text.name} (sha256 {text.sha256[:12]}), {quantity(text.predicted)} predictions in {documents}"
    few = (
        "" if text.documents >= FEW else "few documents, so intervals are wide: they say how documents differ"
    )
    if text.documents == 1:
        few = "one document gives no intervals: give several files, or .jsonl with a document in each line"
    return [
        ("text", f"{words}, {text.context} tokens at a time"),
        ("", few),
        ("tokens", f"{first}; tokenizer: {text.tokenizer}"),
        ("took", seconds(found.seconds)),
    ]


def _models(found: Evaluation) -> list[str]:
    sides = [("parent", found.parent), ("child", found.child)]
    rows = [(name, *side_cells(side)) for name, side in sides if side is not None]
    return table(("", "model", "stored as", "runs in", "perplexity", "95 %"), rows, "lLllrl")


def side_cells(side: Side) -> tuple[str, ...]:
    """Where it lies, how it is stored, what it ran in, its perplexity and the interval of that."""
    stored = side.container if side.online is None else f"online {side.online}"
    plain = side.perplexity
    return side.path, stored, side.dtype, number(plain.estimate, 5), ends(plain, lambda x: number(x, 4))


def ends(interval: Interval, spell: Callable[[float], str]) -> str:
    """An interval in words."""
    if not (isfinite(interval.low) and isfinite(interval.high)):
        return "one document"
    return f"{spell(interval.low)} to {spell(interval.high)}"


def signed(x: float) -> str:
    """A relative change."""
    return f"{100 * x:+.2f} %"


def gap_rows(gap: Gap) -> list[tuple[str, Interval, Callable[[float], str], str]]:
    """Name, number, how it is spelled and what it means."""

    def share(x: float) -> str:
        return f"{100 * x:.2f} %"

    return [
        ("perplexity", gap.perplexity, signed, "+ is worse"),
        ("KL divergence", gap.kl, lambda x: number(x, 3), "nats, 0 for equal"),
        ("same best token", gap.top1, share, ""),
        ("same five best", gap.top5, share, "of the parent's 5"),
        ("true token", gap.shift, lambda x: f"{100 * x:+.2f} pt", "its probability"),
    ]


def _gap(gap: Gap, measure: str) -> list[str]:
    rows = [
        (name, spell(value.estimate), ends(value, spell), words)
        for name, value, spell, words in gap_rows(gap)
    ]
    lines = table(("child beside parent", "mean", "95 %", ""), rows, "lrlL")
    rms = f"The true token's probability moves by {100 * gap.shift_rms:.2f} points (rms)."
    return [
        *lines,
        "",
        *table(*tail_rows(gap), "lrrrrr"),
        *hanging(rms),
        *(hanging(measure) if measure else []),
    ]


def yardstick(divergence: Divergence | None) -> str:
    """How the layers' errors compare with what the format must cost; nothing where faults say it, or none was run."""
    if divergence is None or divergence.faults or divergence.excess is None:
        return ""
    most = number(divergence.excess, 3)
    return f"No layer errs by more than {most} times what its format explains; from 2 times on it is a probable bug."


def tail_rows(gap: Gap) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles and rows of percentiles: of the divergence, and of the true token's probability in both directions."""
    kl, shift = gap.kl_percentiles, gap.shift_percentiles
    titles = ("", *(f"{percent:g} %" for percent, _ in kl.at), "most")
    low, high = dict(shift.at[: len(shift.at) // 2 + 1]), dict(shift.at)
    points = [high[percent] for percent, _ in kl.at]
    lost = [low.get(round(100 - percent, 3), high[50.0]) for percent, _ in kl.at]
    rows = [
        ("KL divergence", *(number(value, 3) for _, value in kl.at), number(kl.largest, 3)),
        ("true token up", *(f"{100 * x:+.2f} pt" for x in points), f"{100 * shift.largest:+.1f} pt"),
        ("true token down", *(f"{100 * x:+.2f} pt" for x in lost), f"{100 * shift.least:+.1f} pt"),
    ]
    return titles, rows


def _worst(worst: Sequence[WorstToken]) -> list[str]:
    """Two lines for each: what both say comes next, and the text before it."""
    if not worst:
        return []
    lines = ["worst predictions (KL, then the text before)"]
    for one in worst:
        sides = (("parent", one.parent, one.p_parent), ("child", one.child, one.p_child))
        said = "; ".join(f"{name} {word!r} {percent(p, 2)}" for name, (word, p), _ in sides)
        true = f"true {one.token!r} {percent(one.p_parent, 2)} -> {percent(one.p_child, 2)}"
        lines += hanging(f"  {number(one.kl, 3)}  {said}; {true}")
        before = " ".join(one.before.split())
        lines.append(
            f"      {one.document}: ...{before[-(terminal() - 14 - len(one.document)) :]}"[: terminal()]
        )
    return lines


def _layers(divergence: Divergence | None) -> list[str]:
    """The first, the last and evenly spaced layers between, and those with faults."""
    if divergence is None or not divergence.layers:
        return []
    layers, n = divergence.layers, len(divergence.layers)
    shown = sorted({round(i * (n - 1) / max(min(LAYERS, n) - 1, 1)) for i in range(min(LAYERS, n))})
    rows = []
    for layer in (layers[i] for i in shown):
        local = "-" if layer.local is None else percent(layer.local)
        expected = "-" if layer.expected is None else percent(layer.expected)
        rows.append(
            (
                str(layer.layer), f"{layer.cosine:.5f}", f"{layer.least_cosine:.4f}", percent(layer.relative), local,
                expected,
            )
        )  # fmt: skip
    titles = ("behind layer", "cosine", "least", "error so far", "this layer's", "its format's")
    return table(titles, rows, "rrrrrr")


def _faults(divergence: Divergence | None) -> list[str]:
    if divergence is None or not divergence.faults:
        return []
    lines, left = [], len(divergence.faults) - FAULTS
    for fault in divergence.faults[:FAULTS]:
        lines += hanging(f"PROBABLE BUG in {fault.where}: {fault.said}.")
        lines += hanging(f"  remedy: {fault.remedy}")
    return lines + ([f"  and in {left} more places"] if left > 0 else [])


CACHES = ("KV cache", "B/token", "KL alone", "to parent", "perplexity", "clipped", "same best")


def cache_cells(row: CacheRow) -> tuple[str, ...]:
    """One row under the titles CACHES."""
    if row.alone is None:
        return row.mode, quantity(row.bytes_per_token), "NaN", "-", "-", percent(row.clipped), "-"
    alone, gap = row.alone, row.gap
    both = number(gap.kl.estimate, 3) if gap is not None else "-"
    return (
        row.mode, quantity(row.bytes_per_token), number(alone.kl.estimate, 3), both,
        signed(alone.perplexity.estimate), percent(row.clipped), percent(alone.top1.estimate),
    )  # fmt: skip


def _caches(rows: Sequence[CacheRow]) -> list[str]:
    """In fewer columns than the record and the HTML page have, so that names of modes are whole."""
    if not rows:
        return []
    cells = [cache_cells(row)[:-1] for row in rows]
    cells = [(mode.replace("attention", "attn"), *numbers) for mode, *numbers in cells]
    titles = ("KV cache", "B/token", "alone", "parent", "perplexity", "clipped")
    said = "alone: KL beside the child with a wide cache, as is the change of perplexity; parent: KL beside the parent."
    return [*table(titles, cells, "Lrrrrr"), *hanging(said)]


def _greedy(greedy: Greedy | None) -> list[str]:
    if greedy is None:
        return []
    total = len(greedy.rows)
    said = f"Greedy text: {greedy.matching} of {total} continuations of {greedy.tokens} tokens are the same"
    parted = [row for row in greedy.rows if row.first is not None]
    if not parted:
        return hanging(f"{said}.")
    lines = hanging(
        f"{said}; the others part after {greedy.median_first:g} tokens (median). The first that part:"
    )
    for row in parted[:2]:
        tokens = f"{row.first} token{'s' * (row.first != 1)}"
        lines += hanging(
            f"  {row.document}, after {tokens}, where the parent's best led by {row.margin:.2g} nats:"
        )
        for name, text in (("parent", row.parent), ("child", row.child)):
            shown = " ".join(text.split())
            lines.append(f"    {name:<7} {shown}"[: terminal()])
    return lines


def _retrieval(found: Retrieval | None) -> list[str]:
    if found is None:
        return []
    lengths = sorted({cell.length for cell in found.cells})
    depths = sorted({cell.depth for cell in found.cells})
    by_place = {(cell.length, cell.depth): cell for cell in found.cells}
    rows = []
    for depth in depths:
        cells = [by_place[length, depth] for length in lengths]
        counts = [f"{'-' if c.parent is None else c.parent} / {c.child} of {c.tasks}" for c in cells]
        rows.append((f"{depth:.0%} deep", *counts))
    titles = ("retrieval: parent / child", *(f"{length} tokens" for length in lengths))
    return [*table(titles, rows, "l" + "r" * len(lengths)), *hanging(f"{found.says}.")]


def _structured(found: Structured | None) -> list[str]:
    if found is None:
        return []
    rows = [
        ("JSON", _of(found.parent_json), str(found.child_json)),
        ("fits the schema", _of(found.parent_valid), str(found.child_valid)),
    ]
    titles = (f"of {found.prompts} outputs", "parent", "child")
    return [*table(titles, rows, "lrr"), *hanging(f"{found.says}.")]


def _sums(sums: Sequence[Sums]) -> list[str]:
    """The linears whose sums err most, and why others were not summed."""
    rows = sorted((one for one in sums if one.error is not None), key=lambda one: -(one.error or 0.0))[:SUMS]
    cells = [
        (one.name, str(one.k), *(_small(x) for x in (one.noise, one.error, one.likely, one.worst)))
        for one in rows
    ]
    head = ("linear", "terms", "noise", "error", "unbiased", "bound")
    lines = table(head, cells, "Lrrrrr") if cells else []
    if rows:
        names = sorted({one.how for one in rows})
        lines = hanging(f"sums as {', '.join(names)} would form them, worst first of {len(sums)}") + lines
        lines += hanging(
            "noise: rms error, of the outputs' own rms; error: the largest, of its Σ|x||w|; unbiased: what it stays "
            "below where rounding favours no side; bound: what no input exceeds."
        )
    reasons = sorted({one.said for one in sums if one.said})
    return lines + [line for reason in reasons for line in hanging(f"note: {reason}")]


def _small(x: float | None) -> str:
    return "" if x is None else f"{x:.1e}" if isfinite(x) else "none"


def _clipped(rows: Sequence[Clipped]) -> list[str]:
    if not rows:
        return []
    told = ", ".join(f"{one.name} {percent(one.share)}" for one in rows[:FAULTS])
    more = f", and {len(rows) - FAULTS} more" if len(rows) > FAULTS else ""
    return hanging(
        f"stored input scales clip in {len(rows)} linears: {told}{more}; calibrate on text like this"
    )


def _of(count: int | None) -> str:
    return "-" if count is None else str(count)
