"""The page of ``narrowcast bench``: the machine, then each model's steps beside their floors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowcast.report.tables import facts, paragraph, rate, size, table

if TYPE_CHECKING:
    from narrowcast.serving.bench import Bench, Contestant, Measured


def bench_page(found: Bench) -> list[str]:
    """What the machine can do, what each model did, and how they compare."""
    lines = [*_headline(found), ""]
    product = "" if found.rate is None else f"{found.rate / 1e9:.0f} GFLOP/s in bf16 products"
    lines += [
        *facts([("machine", f"{found.gpu.name}, {found.threads} threads"), ("arithmetic", product)]),
        "",
    ]
    for each in found.contestants:
        lines += [f"{each.served.name} ({each.runs_as}, {size(each.served.nbytes)} of weights)"]
        if each.bandwidth is not None:
            lines += facts([("bandwidth", _bandwidth(each))])
        lines += [*_table(each), ""]
    lines += paragraph(
        "At least: the bytes that a step must move over the measured bandwidth, or its arithmetic at the measured rate, "
        "whichever is longer. Steps are medians of steps, one token for each sequence; a prefill is that of the whole "
        "batch."
    )
    return lines


def _headline(found: Bench) -> list[str]:
    if len(found.contestants) < 2:
        return [str(found.contestants[0].served.name)]
    model, parent = found.contestants
    said = [
        f"{ours.timing.batch}: {theirs.timing.step / ours.timing.step:.2f} times the tokens"
        for ours, theirs in zip(model.measured, parent.measured, strict=True)
    ]
    first, second = model.measured[0], parent.measured[0]
    fewer = second.decode.traffic.moved / first.decode.traffic.moved
    return paragraph(
        f"{model.served.name} against {parent.served.name}, by batch: {'; '.join(said)}. It reads {fewer:.2f} times "
        f"fewer bytes a step at batch {first.timing.batch}, which is what it can gain where bytes are the limit."
    )


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
        str(timing.batch), _time(timing.step), _time(row.decode.seconds), _times(row.ratio),
        f"{row.tokens_per_second:.1f}", size(moved), rate(moved / timing.step),
    )  # fmt: skip


def _prefill(row: Measured) -> tuple[str, ...]:
    timing = row.timing
    return (
        str(timing.batch), _time(timing.prefill), _time(row.prefill.seconds), _times(row.prefill_ratio),
        f"{timing.batch * timing.prompt / timing.prefill:.1f}",
    )  # fmt: skip


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.0995 else f"{1e3 * seconds:.0f} ms"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
