"""A whole checkpoint from files to files: narrowcast beside cp, llm-compressor and llama.cpp, taking turns.

    python benchmarks/checkpoint.py [--scratch .bench] [--threads 2] [--rounds 3] [--slow-rounds 1]

The source is a random Llama-shaped BF16 checkpoint of 2.2 GB in three shards. Every contestant finds it in
the page cache, starts from the shell, and ends when its files are on disk (an fsync of each is part of the
time). llm-compressor runs --slow-rounds times, since each run takes minutes. The self-check of narrowcast is
part of its wall time, and its share is shown apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from contestants import (
    Contestant,
    check_seconds,
    copy,
    llama_cpp,
    llm_compressor,
    make_gguf,
    narrowcast,
    take_turns,
)
from measure import OURS, ROOT, SCRATCH, Run, busy, run, save, spread, table, verdict

# name of ours: (limit over cp, peer and how many times faster, llama.cpp's counterpart)
TARGETS = {
    "narrowcast fp8_dynamic": (1.2, "llm-compressor FP8_DYNAMIC", 6.0, "llama.cpp Q8_0"),
    "narrowcast nvfp4a16": (1.5, "llm-compressor NVFP4A16", 12.0, "llama.cpp Q4_0"),
}


def rows(results: dict[str, list[Run]]) -> list[list[str]]:
    """Table rows: who, seconds, factor over cp, of that the self-check, peak memory in MB, runs."""
    copied = statistics.median(r.seconds for r in results["cp -r"])
    out = []
    for name, runs in results.items():
        seconds = [r.seconds for r in runs]
        checks = [check_seconds(r.output) for r in runs] if name.startswith("narrowcast") else []
        check = f"{statistics.median(checks):.2f}" if checks else ""
        factor = f"{statistics.median(seconds) / copied:.1f}"
        peak = f"{max(r.peak_mb for r in runs):.0f}"
        out.append([name, spread(seconds), factor, check, peak, str(len(runs))])
    return out


def verdicts(results: dict[str, list[Run]]) -> list[str]:
    """Each limit beside what was measured. What is compared with tools that check nothing, cp and llama.cpp,
    is the time without the self-check; the factor over llm-compressor includes it."""
    median = {name: statistics.median(r.seconds for r in runs) for name, runs in results.items()}
    lines = []
    for ours, (limit, peer, faster, counterpart) in TARGETS.items():
        if ours not in median:
            continue
        work = statistics.median(r.seconds - check_seconds(r.output) for r in results[ours])
        lines.append(verdict(f"{ours} over cp", work / median["cp -r"], limit))
        paths = [seconds for name, seconds in median.items() if name.startswith(peer)]
        if paths:
            lines.append(
                verdict(f"{ours}, times faster than {peer}", min(paths) / median[ours], faster, True)
            )
        if counterpart in median:
            lines.append(verdict(f"{ours} over {counterpart}", work / median[counterpart], 1.0))
        lines.append(verdict(f"{ours}, peak MB", max(r.peak_mb for r in results[ours]), 700))
    return lines


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description="whole checkpoints, narrowcast and its peers")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow-rounds", type=int, default=1, help="rounds that llm-compressor takes part in")
    options = parser.parse_args()
    print(busy(), end="")
    threads, source = options.threads, options.scratch / "llama"
    run([OURS, ROOT / "benchmarks" / "synthetic.py", source], threads)
    gguf = make_gguf(source, options.scratch / "llama.gguf")
    out, out_gguf = options.scratch / "out", options.scratch / "out.gguf"
    fast: list[Contestant] = [
        copy(source, out),
        narrowcast(source, out, "fp8_dynamic", threads),
        narrowcast(source, out, "nvfp4a16", threads),
        llama_cpp(gguf, out_gguf, "Q8_0", threads),
        llama_cpp(gguf, out_gguf, "Q4_0", threads),
    ]
    slow = [c for scheme in ("FP8_DYNAMIC", "NVFP4A16") for c in llm_compressor(source, out, scheme, threads)]
    results = take_turns([*fast, *slow], min(options.slow_rounds, options.rounds), threads)
    for name, runs in take_turns(fast, options.rounds - options.slow_rounds, threads).items():
        results[name] += runs
    head = ["who", "seconds (min-max)", "x cp", "check", "MB", "n"]
    print(table(f"2.2 GB BF16 checkpoint, {threads} threads", head, rows(results)))
    print("\n".join(verdicts(results)))
    runs = {name: [[r.seconds, r.peak_mb] for r in found] for name, found in results.items()}
    print(
        f"written to {save('checkpoint', {'threads': threads, 'seconds_and_peak_mb': runs})}", file=sys.stderr
    )


if __name__ == "__main__":
    main()
