"""The page of ``narrowcast trace``: what FP16 cannot hold, or how near it comes, and where; then every operation."""

from __future__ import annotations

from math import isfinite, log2
from typing import TYPE_CHECKING

from narrowcast.report.tables import facts, number, paragraph, percent, table

if TYPE_CHECKING:
    from narrowcast.studies.trace import Trace
    from narrowcast.studies.trace_chain import Step
    from narrowcast.studies.trace_counts import Counts, Place

BARS = "▁▂▃▄▅▆▇█"
SHOWN = 5


def trace_page(found: Trace) -> list[str]:
    """Verdict and cause, the chain of a run that broke, operations by kind, the residual stream, outliers."""
    lines = [str(found.model), "", *_verdict(found), ""]
    lines += facts(
        [
            ("ran in", found.dtype),
            ("text", f"{found.corpus.name}, {found.tokens} tokens, SHA-256 {found.corpus.sha256[:12]}"),
            ("begins", _beginning(found)),
            *(("note", note) for note in found.notes),
        ]
    )
    lines += ["", *_kinds(found), "", *_stream(found), *_massive(found), *_outliers(found)]
    return [*lines, "", *paragraph("--json has every operation of every layer.")]


def _verdict(found: Trace) -> list[str]:
    if found.chain is not None:
        return _broke(found)
    worst = found.overflow or found.nearest
    room = worst.headroom("fp16")
    if found.overflow is not None:
        head = (
            f"FP16 would overflow first at {_element(found, worst)}: {_amax(worst)}, {2**-room:.3g} times what it "
            "holds."
        )
    else:
        head = (
            f"Nothing here is beyond FP16's 65504. Nearest is {_element(found, worst)}: {_amax(worst)}, "
            f"{_binades(room)} of headroom."
        )
    cause = found.cause(worst)
    made = f" It was made by {found.where(cause.operation)}." if cause is not worst else ""
    lines = [*paragraph(head + made), *(paragraph(f"Why: {cause.why}.", 2) if cause.why else [])]
    if found.overflow is not None:
        peak = found.nearest
        count = sum(one.beyond["fp16"] > 0 for one in found.judged)
        lines += paragraph(
            f"{count} operation{'s' * (count > 1)} hold values beyond 65504; the largest is {_amax(peak)} at "
            f"{found.where(peak.operation)}.", 2,
        )  # fmt: skip
    return lines


def _element(found: Trace, one: Counts) -> str:
    assert one.at is not None
    return f"{found.where(one.operation)}, channel {one.at.channel}, {_token(found, one.at)}"


def _token(found: Trace, place: Place) -> str:
    piece = found.pieces[place.piece]
    return f"token {found.position(place)} {found.text(place)!r} of {piece.name}"


def _amax(one: Counts) -> str:
    return number(one.amax, 5)


def _binades(room: float) -> str:
    return f"{room:.1f} binades (a factor of {2**room:.2g})" if isfinite(room) else "all zero"


def _beginning(found: Trace) -> str:
    piece = found.pieces[0]
    ids = piece.ids[:6]
    return f"{', '.join(map(str, ids))} = {''.join(found.decode(i) for i in ids)!r}"


def _broke(found: Trace) -> list[str]:
    """The first value that is no number, and what came of it."""
    chain = found.chain
    assert chain is not None
    first = chain.first
    what = "NaN" if first.value != first.value else "infinite"
    head = (
        f"{found.where(chain.step.operation)} became {what} first: channel {first.channel}, token "
        f"{found.position(first)} {found.text(first)!r} of {found.pieces[first.piece].name}."
    )
    lines = paragraph(head)
    if first.why:
        lines += paragraph(f"Why: {first.why}; the largest that came in was {number(first.came_in, 4)}.", 2)
    if chain.growth is not None:
        small, large = chain.growth
        lines += paragraph(
            f"Before it, the residual stream grew most from {found.where(small.operation)} "
            f"({number(small.amax, 4)}) to {found.where(large.operation)} ({number(large.amax, 4)}).", 2,
        )  # fmt: skip
    lines += paragraph(
        f"{chain.bad_tokens} of {found.tokens} tokens end with NaN or infinity in their logits.", 2
    )
    rows = [(found.where(step.operation), f"at most {number(step.amax, 4)}", "") for step in chain.before]
    rows += [(found.where(s.operation), _picture(s), str(s.tokens)) for s in (chain.step, *chain.after)]
    return [*lines, "", *table(("operation", "the token's row", "tokens lost"), rows, "Llr")]


def _picture(step: Step) -> str:
    """What a token's row holds."""
    parts = [(step.infinite, "inf"), (step.nan, "NaN"), (step.zero, "zero")]
    said = [f"{n} {word}" for n, word in parts if n]
    if not step.infinite and not step.nan and step.zero < step.channels:
        return "finite"
    return f"{', '.join(said)} of {step.channels}"


def _kinds(found: Trace) -> list[str]:
    """One line per operation of a layer, its largest over all layers; the least headroom first is for the verdict."""
    rows = []
    for name, group in found.kinds:
        top = max(group, key=lambda one: one.amax)
        layer = top.operation.layer
        total = sum(one.elements for one in group)
        rows.append(
            (
                name, str(layer) if 0 <= layer < found.depth else "-", number(top.amax, 4),
                _room(top.headroom("fp16")), _room(top.headroom("e4m3")),
                _share(sum(one.beyond["e4m3"] for one in group), total),
                _share(sum(one.below["fp16"] for one in group), total),
                _share(sum(one.below["e4m3"] for one in group), total),
            )
        )  # fmt: skip
    titles = ("operation", "layer", "amax", "fp16", "e4m3", ">448", "<2^-24", "<2^-9")
    note = (
        "layer: where amax is. fp16, e4m3: headroom in binades, E4M3 with scale 1. Then shares of elements beyond "
        "E4M3, and below the smallest subnormal of FP16 and of E4M3."
    )
    return [*table(titles, rows, "Lrrrrrrr"), "", *paragraph(note)]


def _room(room: float) -> str:
    return f"{room:.1f}" if isfinite(room) else "-"


def _share(count: int, total: int) -> str:
    return percent(count / total, 2) if count else "0"


def _stream(found: Trace) -> list[str]:
    """The residual stream's amax, one bar per layer, on a logarithmic scale."""
    levels = [log2(max(one.amax, 2.0**-20)) for one in found.stream]
    low, high = min(levels), max(levels)
    span = max(high - low, 1e-9)
    bars = "".join(BARS[min(int(8 * (level - low) / span), 7)] for level in levels)
    text = f"from {number(2.0**low, 3)} to {number(2.0**high, 4)}"
    return facts([("residual stream", f"amax by layer, embedding first, {text} (log scale)"), ("", bars)], 0)


def _massive(found: Trace) -> list[str]:
    """Massive activations of the residual stream, each channel and token once."""
    seen: dict[tuple[int, int, int], tuple[Place, list[int]]] = {}
    for one in found.stream:
        for place in one.massive_at:
            key = (place.piece, place.token, place.channel)
            known = seen.setdefault(key, (place, []))
            known[1].append(one.operation.layer)
            if abs(place.value) > abs(known[0].value):
                seen[key] = (place, known[1])
    if not seen:
        return ["", "no massive activations (above 100 and 1000 times the median)"]
    largest = sorted(seen.values(), key=lambda pair: -abs(pair[0].value))[:SHOWN]
    rows = [
        (
            number(place.value, 4), str(place.channel), f"{found.position(place)} {found.text(place)!r}",
            found.pieces[place.piece].name, f"{min(layers)} to {max(layers)}",
        )
        for place, layers in largest
    ]  # fmt: skip
    title = "massive activations of the residual stream (above 100 and 1000 times the median):"
    return [
        "",
        *paragraph(title),
        *table(("value", "channel", "token", "text", "layers"), rows, "rrlLl", indent=2),
    ]


def _outliers(found: Trace) -> list[str]:
    """Channels whose amax is far above the median channel's, by operation."""
    rows = []
    for name, group in found.kinds:
        marked = [one for one in group if one.outliers]
        if not marked:
            continue
        top = max(marked, key=lambda one: one.outliers[0][1])
        channel, ratio = top.outliers[0]
        rows.append(
            (name, f"{len(marked)} of {len(group)}", str(channel), f"{ratio:.0f}", found.where(top.operation))
        )
    if not rows:
        return ["", "no outlier channels (amax 16 times the median channel's)"]
    rows = sorted(rows, key=lambda row: -float(row[3]))[:SHOWN]
    title = "outlier channels (amax at least 16 times the median channel's):"
    return ["", title, *table(("operation", "layers", "channel", "times", "worst"), rows, "Lrrrl", indent=2)]
