"""An audit against the parent: GB/s of child and parent together, as a whole and the pass over pairs alone.

    python benchmarks/audit_parent.py [--scratch .bench] [--threads 2] [--rounds 3]

The parent is the random Llama of 2.2 GB in BF16 that the other benchmarks use; children are FP8 per channel and
NVFP4, quantized by narrowcast. Files are in the page cache. The whole audit also reads the child's codes by itself,
every plain tensor, and all that is beside the weights; the pass over pairs is what the rules about the parent (NC7)
need. On a machine that others use, processor seconds say more than wall seconds: the table has both.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
from pathlib import Path
from typing import Any

from measure import NARROWCAST, OURS, ROOT, SCRATCH, Run, busy, clear, run, save, spread, table, verdict, warm

CHILDREN = {"pair-fp8": "fp8_dynamic", "pair-nvfp4": "nvfp4a16"}
WANTED = 0.75  # GB/s of both files, on two cores
MEMORY = 600.0  # MB
PAIRS = """
import sys, time
from narrowcast.audit.opening import open_anyway
from narrowcast.audit.passes import pair_pass
from narrowcast.audit.subject import Subject
from narrowcast.jobs.coded import open_coded
from narrowcast.jobs.opening import open_model
from narrowcast.jobs.stream import Silent, Workers
subject = Subject(sys.argv[1], open_anyway(sys.argv[1]), "parent")
with open_model(sys.argv[2]) as parent, Workers(int(sys.argv[3])) as pool:
    subject.parent = open_coded(parent)
    start, used = time.perf_counter(), time.process_time()
    list(pair_pass(subject, [], pool, Silent))
    print(time.perf_counter() - start, time.process_time() - used)
"""


def size(folder: Path) -> int:
    """Bytes of the shards."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def made(scratch: Path, threads: int) -> Path:
    """The parent; its children beside it. Finished ones are kept."""
    parent = scratch / "llama"
    run([OURS, ROOT / "benchmarks" / "synthetic.py", parent], threads)
    for name, preset in CHILDREN.items():
        if not (scratch / name / "config.json").is_file():
            clear(scratch / name)
            run([NARROWCAST, "quantize", parent, scratch / name, "--preset", preset, "--quiet"], threads)
    return parent


def processor(argv: list[str | Path], threads: int) -> tuple[Run, float]:
    """A run and the processor seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = run(argv, threads)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def whole(child: Path, parent: Path, threads: int) -> tuple[Run, float]:
    """The audit from the shell."""
    argv = [NARROWCAST, "audit", child, "--against", parent, "--workers", str(threads), "--json"]
    found, used = processor(argv, threads)
    if not json.loads(found.output)["passed"]:
        raise SystemExit(f"the audit of {child} found errors: {found.output[:2000]}")
    return found, used


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description="an audit against the parent")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(busy(), end="")
    options.scratch.mkdir(exist_ok=True)
    parent = made(options.scratch, options.threads)
    rows: list[list[str]] = []
    results: dict[str, dict[str, Any]] = {}
    for name in CHILDREN:
        child = options.scratch / name
        both = size(child) + size(parent)
        warm(parent)
        warm(child)
        audits, used, pairs = [], [], []
        for _ in range(options.rounds):
            audit, seconds = whole(child, parent, options.threads)
            audits, used = [*audits, audit], [*used, seconds]
            passed = run([OURS, "-c", PAIRS, child, parent, str(options.threads)], options.threads).output
            pairs.append([float(word) for word in passed.split()])
        wall, peak = [audit.seconds for audit in audits], max(audit.peak_mb for audit in audits)
        results[name] = {
            "gb": both / 1e9, "seconds": wall, "processor": used, "pairs": pairs, "peak_mb": peak,
        }  # fmt: skip
        rows.append([
            name, f"{both / 1e9:.2f}", spread(wall), spread(used), f"{both / min(wall) / 1e9:.2f}",
            spread([p[0] for p in pairs]), spread([p[1] for p in pairs]), f"{both / min(pairs)[0] / 1e9:.2f}",
            f"{peak:.0f}",
        ])  # fmt: skip
    head = ["child", "GB", "audit, s", "processor", "GB/s", "pairs, s", "processor", "GB/s", "peak MB"]
    print(table(f"audit --against, {options.threads} threads", head, rows))
    for name, found in results.items():
        rate = found["gb"] / min(found["seconds"])
        print(verdict(f"{name}, GB/s of the whole audit", rate, WANTED, at_least=True))
        print(verdict(f"{name}, peak MB", found["peak_mb"], MEMORY))
    print(save("audit_parent", {"threads": options.threads, "results": results}))


if __name__ == "__main__":
    main()
