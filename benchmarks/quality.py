"""How far a small real model moves under every preset, every online scheme and every mode of the KV cache.

    python benchmarks/quality.py [--tokens 3072] [--workers 2] [--only NAME ...]

The model is the demo's SmolLM2-135M, off its Q4_1 grid (``demo/rescale.py``). It is calibrated on every second
document of the built-in text and judged on the others, the beginnings of as many as it takes. Every child runs beside
the parent on the same token ids, in float32, so that the gap is the quantization's alone; what BF16 arithmetic does to
the unquantized model is a row of its own. Rows of one table are ordered by KL divergence; differences between two rows
that people ask about are paired by document.

A whole run writes the tables into docs/quality.md, between its markers; with ``--only``, names of presets, online
schemes or cache modes, they are only printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from math import floor, log10
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from measure import ROOT, busy
from narrowcast._version import __version__
from narrowcast.jobs.cache_scales import CacheScales
from narrowcast.jobs.quantize import quantize
from narrowcast.jobs.stats import Range
from narrowcast.jobs.stats import read as read_stats
from narrowcast.runtime.caches import MODES, CacheFactory, KVScales
from narrowcast.runtime.lanes import Lane, together
from narrowcast.runtime.online import METHODS
from narrowcast.runtime.walk import Running
from narrowcast.statistics.bootstrap import Interval, ratio_interval
from narrowcast.studies.calibrate import calibrate
from narrowcast.studies.evaluation import Gap
from narrowcast.studies.kv_lanes import OF_E4M3, cache_lanes
from narrowcast.studies.measure import Beside
from narrowcast.studies.tokens import shared
from narrowcast.tensors.presets import ROWS
from narrowcast.texts.documents import Corpus, Piece, read

MODEL = ROOT / "demo-output" / "smollm2-bf16"
PAGE = ROOT / "docs" / "quality.md"
BEGIN, END = "<!-- Made by `python benchmarks/quality.py`; run it, do not edit. -->", "<!-- End. -->"
CONTEXT, TOKENS, SIDE_BY_SIDE = 128, 3072, 6
CONTAINER, OTHERS = "compressed-tensors", {"fp8_block_ue8m0": "fp8"}  # which has no spelling in the first
PLAIN = "not quantized, in bfloat16"
PRESETS, ONLINE, CACHES = "Presets", "Online schemes", "KV caches"
ASKED = (  # is the first nearer to the parent than the second?
    ("fp8_dynamic", "w4a16"),
    ("fp8_dynamic", "int8"),
    ("fp8_per_tensor", "fp8_dynamic"),
    ("fp8", "fp8_per_tensor"),
    ("fp8_block", "fp8_dynamic"),
    ("mxfp8", "fp8_dynamic"),
    ("w8a16", "mxfp8a16"),
    ("mxfp6a16", "mxfp8a16"),
    ("w4a16_asym", "w4a16"),
    ("nvfp4a16", "w4a16"),
    ("nvfp4a16", "mxfp4a16"),
    ("nvfp4", "mxfp4"),
    ("w4afp8", "w4a8"),
    ("online fp8_per_channel", "fp8_dynamic"),
    ("online mxfp4", "mxfp4"),
    ("online llm_int8", "int8"),
    ("cache fp8_e4m3, computed", "cache fp8_e4m3, unity"),
    ("cache fp8_head, computed", "cache fp8_e4m3, computed"),
    ("cache fp8_per_token_head", "cache fp8_e4m3, computed"),
    ("cache fp8_e4m3, unity", "cache fp8_e5m2"),
    ("cache nvfp4, computed", "cache nvfp4, unity"),
    ("cache nvfp4, unity", "cache int4_per_token_head"),
    ("cache fp8_e4m3, computed, fp8 attention", "cache fp8_e4m3, computed"),
)
PREFIX = {PRESETS: "", ONLINE: "online ", CACHES: "cache "}


@dataclass
class Entry:
    """A row: its table, its name, bits per parameter or bytes per token (None: nothing is stored so), and what was seen
    beside the parent."""

    table: str
    name: str
    size: float | None = None
    beside: Beside = field(default_factory=Beside)

    @property
    def gap(self) -> Gap:
        return self.beside.gap()


Lanes = list[tuple[Entry, Lane]]
Asked = tuple[str, str]  # a table and a name in it; of caches, a mode


def halves() -> tuple[Corpus, Corpus]:
    """The documents to calibrate on, and those to judge on: every second one, in the order of their names."""
    whole = read()
    first, second = (Corpus(whole.name, whole.documents[start::2]) for start in (0, 1))
    return first, second


def preset(name: str, stats: Path, stack: ExitStack, scratch: Path) -> Lanes:
    """The model quantized to a preset, in files."""
    calibrated = next(row.linear.calibrated for row in ROWS if row.name == name)
    container = OTHERS.get(name, CONTAINER)
    done = quantize(MODEL, scratch / name, name, container=container, stats=stats if calibrated else None)
    run = stack.enter_context(Running.open(done.out, "float32"))
    return [(Entry(PRESETS, name, done.plan.bits_per_weight), Lane(name, run))]


def online(name: str, stack: ExitStack) -> Lanes:
    """The model quantized as an engine does while it loads it."""
    run = stack.enter_context(Running.open(MODEL, "float32", name))
    return [(Entry(ONLINE, name), Lane(name, run))]


def plain(stack: ExitStack) -> Lanes:
    """The model itself, in its own dtype."""
    run = stack.enter_context(Running.open(MODEL, "bfloat16"))
    return [(Entry(PRESETS, PLAIN, 16.0), Lane(PLAIN, run))]


def caches(parent: Running, mode: str, stats: Path, stack: ExitStack) -> Lanes:
    """The model itself over caches of one mode, with unity and computed scales, and FP8 attention where it can be."""
    given = mode in OF_E4M3
    found = cache_lanes(
        parent, [mode], stats if given else None, "fp8" if given else None,
        partial(Running.open, MODEL, "float32"), stack,
    )  # fmt: skip
    lanes = [(one.name, one.run, one.cache) for one in found]
    if MODES[mode].scales == "global":
        made = CacheScales.of(read_stats(stats), "amax", mode)
        computed = KVScales(k=made.by_layer("k"), v=made.by_layer("v"))
        lanes = [(f"{mode}, unity", parent, lanes[0][2])]
        lanes.append((f"{mode}, computed", parent, CacheFactory(parent.config, mode, computed)))
    return [
        (Entry(CACHES, name), Lane(name, run, cache))
        for name, run, cache in lanes
        if not name.startswith("fp8_head, unity")  # the numbers of one scale of 1
    ]


def judged(asked: Sequence[Asked], pieces: Sequence[Piece], stats: Path) -> list[Entry]:
    """One pass of the parent and some rows beside it, by itself; what is known of each token stays with its row."""
    torch.set_num_threads(1)
    found: Lanes = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quality-")))
        parent = stack.enter_context(Running.open(MODEL, "float32"))
        for table, name in asked:
            if table == CACHES:
                found += caches(parent, name, stats, stack)
            elif table == ONLINE:
                found += online(name, stack)
            else:
                found += plain(stack) if name == PLAIN else preset(name, stats, stack, scratch)
        lanes = [Lane("parent", parent), *(lane for _, lane in found)]
        for piece, logits in zip(pieces, together(lanes, pieces), strict=True):
            targets = torch.tensor(piece.ids[1:])
            for (entry, _), rows in zip(found, logits[1:], strict=True):
                entry.beside.add(piece.document, logits[0][:-1], rows[:-1], targets)
    for entry, lane in found:
        if isinstance(lane.cache, CacheFactory):
            entry.size = lane.cache.bytes_per_token
    return [entry for entry, _ in found]


def all_judged(only: Sequence[str], pieces: Sequence[Piece], stats: Path, workers: int) -> list[Entry]:
    """Every row that is asked for, in passes of a few side by side."""
    asked = [(PRESETS, PLAIN), *((PRESETS, row.name) for row in ROWS)]
    asked += [(ONLINE, name) for name, method in METHODS.items() if not method.experts]
    asked += [(CACHES, mode) for mode in MODES]
    asked = [one for one in asked if not only or one[1] in only]
    passes = [asked[start : start + SIDE_BY_SIDE] for start in range(0, len(asked), SIDE_BY_SIDE)]
    start, entries = perf_counter(), []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(judged, some, pieces, stats) for some in passes]):
            entries += future.result()
            print(f"{len(entries)} rows after {perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return entries


def three(x: float) -> str:
    """Three significant digits, at most three behind the point."""
    digits = 2 if x == 0 else min(max(2 - floor(log10(abs(x))), 0), 3)
    return f"{x:.{digits}f}"


def cells(entry: Entry, between: str) -> list[str]:
    """Size, KL and its 99th percentile in thousandths of a nat, top-1 and the change of perplexity in percent."""
    gap = entry.gap
    p99 = next(value for p, value in gap.kl_percentiles.at if p == 99)
    size = "" if entry.size is None else f"{entry.size:.0f}" if entry.table == CACHES else f"{entry.size:.2f}"
    return [
        size,
        spread(gap.kl, 1000, three, between),
        three(1000 * p99),
        spread(gap.top1, 100, lambda x: f"{x:.1f}", between),
        spread(gap.perplexity, 100, lambda x: f"{x:.{2 if abs(x) < 10 else 0}f}", between),
    ]


def spread(interval: Interval, scale: float, spelled: Callable[[float], str], between: str) -> str:
    estimate, low, high = (spelled(scale * x) for x in (interval.estimate, interval.low, interval.high))
    return f"{estimate} ({low} to {high})" if between == "markdown" else f"{estimate} {low}..{high}"


def ordered(entries: Sequence[Entry], table: str) -> list[Entry]:
    return sorted((e for e in entries if e.table == table), key=lambda e: e.gap.kl.estimate)


@dataclass(frozen=True)
class Pair:
    """KL divergence of one row less that of another, over the same tokens."""

    first: str
    second: str
    less: Interval

    @property
    def said(self) -> str:
        if self.less.low == self.less.high == 0:
            return "the same numbers"
        if self.less.high < 0:
            return "nearer"
        return "farther" if self.less.low > 0 else "no difference shown"


def pairs(entries: Sequence[Entry]) -> list[Pair]:
    """The pairs of ASKED that were run."""
    known = {PREFIX[entry.table] + entry.name: entry.beside for entry in entries}
    found = []
    for first, second in ASKED:
        a, b = known.get(first), known.get(second)
        if a is not None and b is not None:
            sums, counts = dict.fromkeys(a.documents, 0.0), dict.fromkeys(a.documents, 0)
            for document, x, y in zip(a.documents, a.kl, b.kl, strict=True):
                sums[document] += float((x - y).sum())
                counts[document] += len(x)
            found.append(Pair(first, second, ratio_interval(list(sums.values()), list(counts.values()))))
    return found


SIZES = {PRESETS: "bits", ONLINE: "", CACHES: "bytes"}


def printed(entries: Sequence[Entry]) -> Iterator[str]:
    """The tables for a terminal of 80 columns; a name that is too long has a line of its own."""
    for table in (PRESETS, ONLINE, CACHES):
        rows = [(entry.name, cells(entry, "terminal")) for entry in ordered(entries, table)]
        if not rows:
            continue
        head = [SIZES[table], "KL/1000", "p99", "top-1 %", "perplexity %"]
        widths = [max(len(row[i]) for row in [head, *(c for _, c in rows)]) for i in range(5)]
        room = 80 - sum(widths) - 2 * len(widths)
        yield from ("", table)
        for name, row in [("", head), *rows]:
            if len(name) > room:
                yield name
                name = ""
            yield "  ".join([name.ljust(room), *(c.rjust(w) for c, w in zip(row, widths, strict=True))])
    yield ""
    for pair in pairs(entries):
        yield f"{pair.first} against {pair.second}"
        yield f"    {spread(pair.less, 1000, three, 'terminal')}   {pair.said}"


def markdown(entries: Sequence[Entry]) -> Iterator[str]:
    """The tables of the page."""
    titles = {PRESETS: "bits per parameter", ONLINE: "", CACHES: "bytes per token"}
    for table in (PRESETS, ONLINE, CACHES):
        size = [titles[table]] if titles[table] else []
        head = ["", *size, "KL, 10⁻³ nats", "KL p99", "same best token, %", "perplexity, %"]
        yield from ("", f"### {table}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}")
        for entry in ordered(entries, table):
            name = entry.name if entry.name == PLAIN else f"`{entry.name}`"
            row = [name, *cells(entry, "markdown")[0 if size else 1 :]]
            yield f"| {' | '.join(row)} |"
    yield from (
        "",
        "### Pairs",
        "",
        "| first | second | KL of the first less that of the second, 10⁻³ nats | |",
    )
    yield "|---|---|---|---|"
    for pair in pairs(entries):
        less = spread(pair.less, 1000, three, "markdown")
        yield f"| {pair.first} | {pair.second} | {less} | {pair.said} |"


def facts(corpus: Corpus, pieces: Sequence[Piece], stats: Path, command: str) -> list[str]:
    """What the numbers depend on."""
    seen = read_stats(stats)
    predicted = sum(len(piece.ids) - 1 for piece in pieces)
    documents = len({piece.document for piece in pieces})

    def most(which: str, value: Callable[[Range], float]) -> float:
        return max(value(both[which]) for both in seen.caches.values())

    amax, beyond = ([most(which, value) for which in "kv"] for value in (_amax, _beyond))
    python = platform.python_version()
    return [
        f"`{command}`: narrowcast {__version__}, torch {version('torch')}, "
        f"transformers {version('transformers')}, numpy {np.__version__}, Python {python}.",
        f"Text: {predicted} predictions in {documents} documents, every second one of {corpus.name}, in pieces of "
        f"at most {CONTEXT} tokens; SHA-256 {corpus.sha256[:16]}. Calibrated on {seen.tokens} tokens of the others.",
        f"In calibration the largest key was {amax[0]:.4g}, the largest value {amax[1]:.4g}; of the layer with most, "
        f"{beyond[0]:.2%} of the keys and {beyond[1]:.2%} of the values lay beyond 448.",
    ]


def _amax(seen: Range) -> float:
    return seen.amax


def _beyond(seen: Range) -> float:
    return seen.beyond(448.0) / seen.elements


def write_page(lines: Sequence[str]) -> None:
    """Put lines between the markers of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Calibrate, judge, print, write."""
    parser = argparse.ArgumentParser(description="KL, top-1 and perplexity of every preset and KV cache mode")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(options.workers)
    start = perf_counter()
    print(busy(), end="")
    learning, judging = halves()
    with tempfile.TemporaryDirectory(prefix="quality-") as scratch:
        source, stats = Path(scratch) / "calibration.jsonl", Path(scratch) / "stats.safetensors"
        source.write_text("".join(json.dumps({"text": d.text}) + "\n" for d in learning.documents))
        calibrate(MODEL, stats, [str(source)], tokens=options.tokens, context=CONTEXT, dtype="float32")
        with Running.open(MODEL, "float32") as run:
            pieces = shared(run, None, judging, CONTEXT, options.tokens).pieces
        entries = all_judged(options.only, pieces, stats, options.workers)
        command = f"python benchmarks/quality.py --tokens {options.tokens}"
        said = facts(judging, pieces, stats, command)
    print("\n".join([*printed(entries), "", *said, f"{perf_counter() - start:.0f} s"]))
    if not options.only:
        write_page(["\n\n".join(said), *markdown(entries)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
