"""The pages of ``narrowcast calibrate`` and ``calibrate-kv``: what was seen, and what the scales are worth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from narrowcast.jobs.stats import STARVED, Range
from narrowcast.report.tables import facts, hanging, number, percent, quantity, seconds, table

if TYPE_CHECKING:
    from narrowcast.audit.findings import Finding
    from narrowcast.studies.calibrate import Calibrated
    from narrowcast.studies.calibrate_kv import KVCalibration

SHOWN = 5
TITLES = {"k": "keys", "v": "values", "q": "queries"}


def calibrate_page(done: Calibrated) -> list[str]:
    """How much text ran, the ranges by kind of layer, experts that saw too little, and what to do with the file."""
    stats = done.stats
    lines = [f"{stats.model} to {done.out}", ""]
    titles: tuple[str, ...] = (
        "inputs of", "linears", "median amax", "largest", "in layer", "its p99.9", "its ema",
    )  # fmt: skip
    lines += [*table(titles, _by_leaf(stats.inputs), "Lrrrrrr", indent=2), ""]
    rows = [_cache_row(which, stats.caches) for which in TITLES]
    titles = ("cache", "layers", "median amax", "largest", "in layer", "beyond 448")
    lines += [*table(titles, [row for row in rows if row], "lrrrrr", indent=2), ""]
    texts = [f"{text.tokens:,} tokens of {text.name}, sha256 {text.sha256[:12]}" for text in stats.texts]
    told = [("text", "; ".join(texts)), ("ran in", stats.dtype)]
    told += [("first ids", ", ".join(map(str, done.first)))] if done.first else []
    told += [("model", f"fingerprint {stats.fingerprint[:12]}"), ("time", seconds(done.seconds))]
    lines += facts(told)
    for path, few in stats.starved.items():
        names = ", ".join(map(str, few[:8])) + (f" and {len(few) - 8} more" if len(few) > 8 else "")
        lines += hanging(
            f"note: {path}: {len(few)} of {len(stats.experts[path])} experts saw fewer than {STARVED} tokens "
            f"({names}); their inputs go by the largest range of the layer's experts. More text reaches more."
        )
    lines += [line for note in done.notes for line in hanging(f"note: {note}")]
    return [*lines, "", *hanging(f"narrowcast quantize MODEL OUT --preset fp8+kv8 --stats {done.out}")]


def _by_leaf(inputs: dict[str, Range]) -> list[tuple[str, ...]]:
    """One row for each kind of linear: all q_proj, all experts' down_proj."""
    kinds: dict[str, list[str]] = {}
    for name in inputs:
        leaf = name.rpartition(".")[2]
        kinds.setdefault(f"experts' {leaf}" if ".experts." in name else leaf, []).append(name)
    return [(kind, *_spread({name: inputs[name] for name in names})) for kind, names in kinds.items()]


def _spread(found: dict[str, Range]) -> tuple[str, ...]:
    worst = max(found, key=lambda name: found[name].amax)
    seen = found[worst]
    middle = float(np.median([one.amax for one in found.values()]))
    return (
        str(len(found)), number(middle, 4), number(seen.amax, 4), _layer(worst), number(seen.at("p99.9"), 4),
        number(seen.at("ema"), 4),
    )  # fmt: skip


def _layer(name: str) -> str:
    """The number of a layer, or the whole name where there is none."""
    match = re.search(r"\.(\d+)\.", f"{name}.")
    return match[1] if match else name


def _cache_row(which: str, caches: dict[str, dict[str, Range]]) -> tuple[str, ...]:
    found = {path: both[which] for path, both in caches.items() if which in both}
    if not found:
        return ()
    count = sum(seen.elements for seen in found.values())
    beyond = sum(seen.beyond(448.0) for seen in found.values())
    return (TITLES[which], *_spread(found)[:4], _share(beyond, count))


def _share(part: int, whole: int) -> str:
    return "none" if not part else f"{percent(part / whole)} ({quantity(part)})"


def calibrate_kv_page(found: KVCalibration, out: str | Path, left: Sequence[Finding]) -> list[str]:
    """The scales of the layers with the largest keys, what unity would clip, and the measured divergences."""
    scales = found.scales
    each = "each head" if scales.kv == "fp8_head" else "each layer"
    source = f"{scales.model}, its parent" if found.kin else scales.model
    lines = [f"{found.model} to {out}", ""]
    lines += hanging(
        f"{scales.kv}: one scale for keys and one for values of {each}, {scales.stat} / 448, from {source}"
    )
    lines += ["", *_layers(found)]
    if found.measured:
        lines += ["", *_measured(found)]
    for one in left:
        if one.severity != "info":
            lines += hanging(f"{one.severity}: {one.rule} {one.said}")
    return lines


def _layers(found: KVCalibration) -> list[str]:
    rows = sorted(found.layers, key=lambda row: -max(row["k_scale"]))
    shown = [
        (
            row["attention"],
            *(text for which in "kv" for text in (
                number(row.get(f"{which}_amax"), 4),
                percent(row[f"{which}_beyond_448"]) if f"{which}_beyond_448" in row else "-",
                number(max(row[f"{which}_scale"]), 4),
            )),
        )
        for row in rows[:SHOWN]
    ]  # fmt: skip
    titles = (f"largest keys of {len(rows)}", "|K| amax", "> 448", "K scale", "|V| amax", "> 448", "V scale")
    lines = table(titles, shown, "Lrrrrrr", indent=2)
    if found.stats is not None:
        for which in "kv":
            seen = [both[which] for both in found.stats.caches.values() if which in both]
            beyond, count = sum(one.beyond(448.0) for one in seen), sum(one.elements for one in seen)
            lines += hanging(
                f"  beyond 448, so clipped at a scale of 1.0: {_share(beyond, count)} of the {TITLES[which]}"
            )
    return lines


def _measured(found: KVCalibration) -> list[str]:
    rows = [
        (
            one.name, number(one.gap.kl.estimate, 3), _interval(one.gap.kl.low, one.gap.kl.high),
            percent(one.gap.top1.estimate), percent(one.keys_clipped), percent(one.values_clipped),
        )
        for one in found.measured
    ]  # fmt: skip
    titles = ("scales", "KL", "95 % interval", "same best", "K clipped", "V clipped")
    lines = table(titles, rows, "lrrrrr", indent=2)
    whose = {
        True: ", in documents that the scales were not made from",
        False: ", a text that the scales were made from",
        None: "",
    }[found.fresh]
    text = found.text
    of = f" of {text.name}, sha256 {text.sha256[:12]}" if text is not None else ""
    lines += hanging(f"  nats per token beside a wide cache, over {found.tokens} predictions{of}{whose}")
    said = found.conclusion
    return [*lines, *(["", *hanging(f"{said[0].upper()}{said[1:]}.")] if said else [])]


def _interval(low: float, high: float) -> str:
    return (
        f"{number(low, 3)} to {number(high, 3)}" if isfinite(low) and isfinite(high) else "too few documents"
    )
