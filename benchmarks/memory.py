"""Peak resident memory of narrowcast, which must not grow with the checkpoint or with its largest tensor.

    python benchmarks/memory.py [--scratch .bench] [--threads 2]

Three sources: the 2.2 GB Llama shape, one three times as large, and a small one with a fused 3-D expert
tensor of 4.3 GB. The peak is what the kernel accounts for the process, pages of mapped files included.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from contestants import narrowcast
from measure import OURS, ROOT, SCRATCH, Run, busy, clear, run, save, table, verdict

SOURCES = {
    "llama": ("2.2 GB, 3 shards", ()),
    "llama-3x": ("6.6 GB, 9 shards", ("--layers", "72", "--shards", "9")),
    "experts": ("4.9 GB, 4.3 in one tensor", ("--layers", "2", "--shards", "1", "--experts")),
}
PRESETS = ("fp8_dynamic", "nvfp4a16")


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description="peak memory of narrowcast quantize")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    print(busy(), end="")
    out = options.scratch / "out"
    found: dict[str, dict[str, Run]] = {preset: {} for preset in PRESETS}
    for name, (_, arguments) in SOURCES.items():
        source = options.scratch / name
        run([OURS, ROOT / "benchmarks" / "synthetic.py", source, *arguments], options.threads)
        for preset in PRESETS:
            clear(out)
            found[preset][name] = run(
                narrowcast(source, out, preset, options.threads).argv(), options.threads
            )
            clear(out)
    rows = [
        [preset, SOURCES[name][0], f"{result.seconds:.1f}", f"{result.peak_mb:.0f}"]
        for preset, results in found.items()
        for name, result in results.items()
    ]
    print(
        table(f"narrowcast, {options.threads} threads", ["preset", "source", "seconds", "peak MB"], rows, 2)
    )
    for preset, results in found.items():
        first = results["llama"].peak_mb
        print(verdict(f"{preset}, largest peak MB", max(r.peak_mb for r in results.values()), 700))
        for name in ("llama-3x", "experts"):
            print(verdict(f"{preset}, peak of {name} over llama", results[name].peak_mb / first, 1.1))
    peaks = {preset: {n: r.peak_mb for n, r in results.items()} for preset, results in found.items()}
    save("memory", {"threads": options.threads, "peak_mb": peaks})


if __name__ == "__main__":
    main()
