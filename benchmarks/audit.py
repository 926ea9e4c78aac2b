"""Audits beside ``cat``, and beside a loop over the safetensors package that does the least an audit must.

    python benchmarks/audit.py [--scratch .bench] [--threads 2] [--rounds 3]

Four checkpoints of about 2 to 3 GB (BF16, FP8 blocks, NVFP4, INT4 in groups of 128) are read in full, with the files in
the page cache; speeds are bytes of files over wall time, and over CPU time, which other work on the machine disturbs
less. The peer counts the codes of every packed or FP8 tensor with ``numpy.bincount`` and takes the amax of every tensor
of floats with torch; it looks at no scale and no tile. A hundred shards with 62 000 tensors are read with ``--quick``:
headers and scales.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from convert import source
from measure import NARROWCAST, OURS, ROOT, SCRATCH, busy, run, save, spread, table, verdict, warm

PEER = ROOT / "benchmarks" / "peers" / "count_codes.py"
MADE = {"nvfp4": ("modelopt", "nvfp4a16"), "int4": ("compressed-tensors", "w4a16")}


@dataclass(frozen=True)
class Timed:
    """One run: wall and CPU seconds, peak MB."""

    seconds: float
    cpu: float
    peak_mb: float


def models(scratch: Path, threads: int) -> dict[str, Path]:
    """The checkpoints by name; finished ones are kept."""
    fp8, bf16, shards = source(scratch, threads), scratch / "llama", scratch / "audit-shards"
    found = {"bf16": bf16, "fp8-blocks": fp8}
    run([OURS, ROOT / "benchmarks" / "synthetic.py", bf16], threads)
    for name, (container, preset) in MADE.items():
        out = scratch / f"audit-{name}"
        if not (out / "config.json").is_file():
            run(
                [NARROWCAST, "convert", fp8, out, "--to", container, "--preset", preset, "--requantize"],
                threads,
            )
        found[name] = out
    run([OURS, ROOT / "benchmarks" / "shards.py", shards], threads)
    return found | {"100 shards": shards}


def timed(argv: list[str | Path], threads: int) -> Timed:
    """Run a command and take its CPU time from what the kernel accounts to children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(argv, threads)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Timed(done.seconds, cpu, done.peak_mb)


def contestants(model: Path, threads: int, quick: bool) -> dict[str, list[str | Path]]:
    """What is run on a model. The audit calls the library, which says nothing and exits 0 whatever is found."""
    ours = f"from narrowcast.audit.run import audit; audit({str(model)!r}, quick={quick}, workers={threads})"
    files = sorted(model.glob("*.safetensors"))
    rest = {} if quick else {"safetensors loop": [OURS, PEER, model, str(threads)]}
    return {
        "narrowcast": [OURS, "-c", ours],
        "cat": ["sh", "-c", 'cat "$@" > /dev/null', "cat", *files],
        **rest,
    }


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description="audits of checkpoints of 2 to 3 GB")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(busy(), end="")
    rows, verdicts, kept = [], [], {}
    for name, model in models(options.scratch, options.threads).items():
        quick = name == "100 shards"
        size = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9
        found: dict[str, list[Timed]] = {}
        for _ in range(options.rounds):
            for who, argv in contestants(model, options.threads, quick).items():
                warm(model)
                found.setdefault(who, []).append(timed(argv, options.threads))
        for who, runs in found.items():
            seconds = [r.seconds for r in runs]
            speeds = (size / statistics.median(s) for s in (seconds, [r.cpu for r in runs]))
            rows.append(
                [
                    name,
                    who,
                    spread(seconds),
                    *(f"{s:.2f}" for s in speeds),
                    f"{max(r.peak_mb for r in runs):.0f}",
                ]
            )
        ours = statistics.median(r.seconds for r in found["narrowcast"])
        if quick:
            verdicts.append(verdict(f"{name}, headers and scales, seconds", ours, 10))
        else:
            verdicts.append(verdict(f"{name}, GB/s", size / ours, 1.5, at_least=True))
            for who in ("cat", "safetensors loop"):
                other = statistics.median(r.seconds for r in found[who])
                verdicts.append(f"     {name}, {who} over narrowcast: {other / ours:.2f}")
        verdicts.append(verdict(f"{name}, peak MB", max(r.peak_mb for r in found["narrowcast"]), 500))
        kept[name] = {who: [[r.seconds, r.cpu, r.peak_mb] for r in runs] for who, runs in found.items()}
    head = ["model", "who", "seconds (min-max)", "GB/s", "GB/CPU s", "MB"]
    print(table(f"audits, {options.threads} threads, {options.rounds} rounds", head, rows, words=2))
    print("\n".join(verdicts))
    path = save("audit", {"threads": options.threads, "seconds_cpu_and_peak_mb": kept})
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
