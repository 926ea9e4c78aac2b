"""Conversions of a 3 GB FP8-block checkpoint, beside ``cp -r`` of source and result, and beside transformers.

    python benchmarks/convert.py [--scratch .bench] [--threads 2] [--rounds 3] [--slow-rounds 1]

The source is a random Llama-shaped checkpoint of 6.1 GB in BF16, quantized by narrowcast to native FP8 blocks
of 128 (3.2
GB in nine shards). It becomes BF16, and NVFP4 in ModelOpt's spelling, in one pass. A tool that had nothing to
compute would
still read the source and write the result; ``cp -r`` of both is that much work twice over, so half its speed is the
limit. transformers decodes the same source on its own path, --slow-rounds times. The self-check of narrowcast
is part of its
wall time, and the time without it is shown apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from contestants import SCRIPTS, check_seconds
from measure import (
    NARROWCAST,
    OURS,
    PEERS,
    ROOT,
    SCRATCH,
    Run,
    busy,
    clear,
    durable,
    run,
    save,
    spread,
    table,
    verdict,
    warm,
)

TARGETS = {
    "plain": ("--to", "plain"),
    "nvfp4a16": ("--to", "modelopt", "--preset", "nvfp4a16", "--requantize"),
}


def source(scratch: Path, threads: int) -> Path:
    """The FP8 checkpoint; a finished one is kept."""
    out = scratch / "fp8-blocks"
    if not (out / "config.json").is_file():
        parent = scratch / "llama-6gb"
        run([OURS, ROOT / "benchmarks" / "synthetic.py", parent, "--layers", "66", "--shards", "9"], threads)
        clear(out)
        run(
            [NARROWCAST, "quantize", parent, out, "--preset", "fp8_block", "--container", "fp8", "--quiet"],
            threads,
        )
        clear(parent)
    return out


def convert(model: Path, out: Path, options: tuple[str, ...], threads: int) -> Run:
    """One conversion on warm files, to disk."""
    clear(out)
    warm(model)
    return durable(
        [NARROWCAST, "convert", model, out, *options, "--workers", str(threads), "--json"], out, threads
    )


def copy(model: Path, result: Path, out: Path, threads: int) -> Run:
    """``cp -r`` of source and result on warm files, to disk."""
    clear(out)
    out.mkdir()
    warm(model)
    warm(result)
    copied = durable(["cp", "-r", model, result, out], out, threads)
    clear(out)
    return copied


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description="conversions of a 3 GB FP8 checkpoint")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow-rounds", type=int, default=1, help="rounds that transformers takes part in")
    options = parser.parse_args()
    print(busy(), end="")
    model, out, copied = (
        source(options.scratch, options.threads),
        options.scratch / "out",
        options.scratch / "copied",
    )
    found: dict[str, list[Run]] = {}
    for _ in range(options.rounds):
        for name, words in TARGETS.items():
            found.setdefault(f"narrowcast {name}", []).append(convert(model, out, words, options.threads))
            found.setdefault(f"cp -r, {name}", []).append(copy(model, out, copied, options.threads))
    for _ in range(options.slow_rounds):
        clear(out)
        warm(model)
        argv = [PEERS, SCRIPTS / "dequantize.py", model, out]
        found.setdefault("transformers plain", []).append(durable(argv, out, options.threads))
    clear(out)
    median = {name: statistics.median(r.seconds for r in runs) for name, runs in found.items()}
    rows = []
    for name, runs in found.items():
        ours = name.startswith("narrowcast")
        checks = [check_seconds(r.output) for r in runs] if ours else []
        check = f"{statistics.median(checks):.2f}" if checks else ""
        peak = f"{max(r.peak_mb for r in runs):.0f}"
        rows.append([name, spread([r.seconds for r in runs]), check, peak, str(len(runs))])
    head = ["who", "seconds (min-max)", "check", "MB", "n"]
    print(table(f"3.2 GB of FP8 blocks, {options.threads} threads", head, rows))
    for name in TARGETS:
        runs = found[f"narrowcast {name}"]
        work = statistics.median(r.seconds - check_seconds(r.output) for r in runs)
        base = median[f"cp -r, {name}"]
        print(verdict(f"{name}, self-check included, over cp -r", median[f"narrowcast {name}"] / base, 2.0))
        print(verdict(f"{name}, without the self-check, over cp -r", work / base, 2.0))
        print(verdict(f"{name}, peak MB", max(r.peak_mb for r in runs), 700))
    if "transformers plain" in median:
        print(
            f"transformers over narrowcast, plain: {median['transformers plain'] / median['narrowcast plain']:.2f}"
        )
    runs_of = {name: [[r.seconds, r.peak_mb] for r in runs] for name, runs in found.items()}
    path = save("convert", {"threads": options.threads, "seconds_and_peak_mb": runs_of})
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
