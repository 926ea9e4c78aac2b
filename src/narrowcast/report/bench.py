"""The page of ``narrowcast bench``: the machine, then each model's steps beside their floors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowcast.report.tables import duration, facts, hanging, paragraph, rate, size, table

if TYPE_CHECKING:
    from narrowcast.serving.bench import Bench, Contestant, Measured


def bench_page(found: Bench) -> list[str]:
    """What the machine can do, what each model did, and how they compare."""
    lines = [*_headline(found), ""]
    products = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in found.rates.items())
    machine = [
        ("machine", f"{found.gpu.name}, {found.threads} thread{'s' * (found.threads > 1)}"),
        ("products", products),
    ]
    lines += [*facts(machine), ""]
    for each in found.contestants:
        lines += hanging(f"{each.served.name} ({each.ran.runs_as}, {size(each.served.nbytes)} of weights)")
        lines += facts(_about(each))
        for note in each.ran.notes:
            lines += hanging(f"  {note}")
        lines += [*_table(each), ""]
    if len(found.contestants) > 1:
        lines += [*_compared(*found.contestants), ""]
    lines += paragraph(
        "At least: the bytes that a step must move over the bandwidth, or its arithmetic at the rate of products, "
        "whichever is longer. Steps are medians of steps, one token for each sequence; a prefill is that of the whole "
        "batch."
    )
    return [*lines, *_below(found)]


def _below(found: Bench) -> list[str]:
    """Why something seems faster than it can be."""
    rows = [row for each in found.contestants for row in each.measured]
    ratios = [ratio for row in rows for ratio in (row.ratio, row.prefill_ratio) if ratio is not None]
    if not ratios or min(ratios) >= 1:
        return []
    if found.contestants[0].bandwidth is None:
        return paragraph(
            "A ratio below 1: the bound is of the GPU's published numbers, and weights that stay in its cache from one "
            "step to the next do not count against its memory."
        )
    return paragraph(
        "A ratio below 1: the bound is of what numpy and torch reached on this machine just before. A compiled kernel "
        "may read somewhat faster, part of a small model may stay in a cache, and other work may have been there "
        "then and not later."
    )


def _headline(found: Bench) -> list[str]:
    if len(found.contestants) < 2:
        return [str(found.contestants[0].served.name)]
    model, parent = found.contestants
    gains = [
        f"{_gain(ours, theirs):.2f} times the tokens at batch {ours.timing.batch}"
        for ours, theirs in _pairs(model, parent)
    ]
    return paragraph(f"{model.served.name} against {parent.served.name}: {', '.join(gains)}.")


def _pairs(model: Contestant, parent: Contestant) -> list[tuple[Measured, Measured]]:
    """What both measured, by batch."""
    theirs = {row.timing.batch: row for row in parent.measured}
    return [(row, theirs[row.timing.batch]) for row in model.measured if row.timing.batch in theirs]


def _gain(ours: Measured, theirs: Measured) -> float:
    return theirs.timing.step / ours.timing.step


def _compared(model: Contestant, parent: Contestant) -> list[str]:
    """Both beside each other, by batch, with what the bytes alone would give."""
    titles = (
        "batch",
        "step",
        "parent's",
        "times faster",
        "fewer bytes",
        "prefill",
        "parent's",
        "times faster",
    )
    rows = [
        (
            str(ours.timing.batch), duration(ours.timing.step), duration(theirs.timing.step),
            f"{_gain(ours, theirs):.2f}",
            f"{theirs.decode.traffic.moved / ours.decode.traffic.moved:.2f}",
            duration(ours.timing.prefill), duration(theirs.timing.prefill),
            f"{theirs.timing.prefill / ours.timing.prefill:.2f}",
        )
        for ours, theirs in _pairs(model, parent)
    ]  # fmt: skip
    return [
        *table(titles, rows, "rrrrrrrr"), "",
        *paragraph("Fewer bytes is what a step can gain where bytes are the limit."),
    ]  # fmt: skip


def _about(each: Contestant) -> list[tuple[str, str]]:
    found = [("running", "; ".join(each.ran.running))]
    return found if each.bandwidth is None else [*found, ("bandwidth", _bandwidth(each))]


def _bandwidth(each: Contestant) -> str:
    assert each.bandwidth is not None
    how = "reading" if each.bandwidth.read >= each.bandwidth.copy else "copying"
    return f"{rate(each.bandwidth.best)} {how} {size(each.bandwidth.footprint)}"


def _table(each: Contestant) -> list[str]:
    decode = ("batch", "step", "at least", "ratio", "tokens/s", "bytes", "bytes/s")
    prefill = ("batch", "prefill", "at least", "ratio", "tokens/s")
    return [
        *table(decode, [_decode(row) for row in each.measured], "rrrrrrr", indent=2), "",
        *table(prefill, [_prefill(row) for row in each.measured], "rrrrr", indent=2),
    ]  # fmt: skip


def _decode(row: Measured) -> tuple[str, ...]:
    timing, moved = row.timing, row.decode.traffic.moved
    return (
        str(timing.batch), duration(timing.step), duration(row.decode.seconds), _times(row.ratio),
        f"{row.tokens_per_second:.1f}", size(moved), rate(moved / timing.step),
    )  # fmt: skip


def _prefill(row: Measured) -> tuple[str, ...]:
    timing = row.timing
    return (
        str(timing.batch), duration(timing.prefill), duration(row.prefill.seconds), _times(row.prefill_ratio),
        f"{timing.batch * timing.prompt / timing.prefill:.1f}",
    )  # fmt: skip


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
