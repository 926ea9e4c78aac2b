"""Quantizing one bf16 weight in memory, narrowcast beside its peers, taking turns call by call.

    python benchmarks/kernels.py [--rows 4096] [--columns 14336] [--threads 1 2] [--rounds 5]

Two workers hold the weight, one per environment. For every row of the table each contestant runs once per
round, the order reversed every second round; a contestant leaves a row when it has used its seconds.
Reported: Gelements/s of the median run (slowest and fastest), the factor over the fastest peer, and the share
of memcpy: bytes read once plus bytes written, over the time, against numpy's copy of the same weight by as
many threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from measure import OURS, PEERS, ROOT, SCRATCH, busy, environment, save, table, verdict
from synthetic import pool

HERE = ROOT / "benchmarks"
# The threads of torch spin for a while after a call; whoever comes next must not pay for it.
REST = 0.2
# Bytes a perfect kernel moves per element: the source once, the codes and the scales once.
BYTES = {
    "fp8_channel": 3.0,
    "int8_channel": 3.0,
    "int4_g128": 2.5 + 2 / 128,
    "mxfp8": 3.0 + 1 / 32,
    "nvfp4": 2.5 + 1 / 16,
    "mxfp4": 2.5 + 1 / 32,
    "fp8_decode": 3.0,
    "memcpy": 4.0,
}
OURS_NAMES = ("narrowcast", "numpy")
# Row: (how many times a peer, which one; None is the fastest).
TARGETS: dict[str, tuple[float, str | None]] = {
    "fp8_channel": (2, None),
    "int8_channel": (2, None),
    "int4_g128": (2, None),
    "mxfp8": (2, None),
    "nvfp4": (25, None),
    "mxfp4": (25, None),
    "fp8_decode": (5, "torch"),
}
BUDGET = 8.0  # seconds a contestant may use in one row


class Worker:
    """A child process that times one call per request."""

    def __init__(self, python: Path, script: Path, arguments: Sequence[object], threads: int) -> None:
        env = environment(threads, {"PYTHONPATH": str(HERE / "peers"), "PYTHONWARNINGS": "ignore"})
        self.errors = SCRATCH / f"{script.parent.name}-{script.stem}.txt"
        self.child = subprocess.Popen(
            [python, script, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors.open("w"), env=env, text=True,
        )  # fmt: skip
        self.rows: dict[str, list[str]] = self.answer()

    def answer(self) -> dict[str, Any]:
        """The next object the worker writes; whatever else libraries print is skipped."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            if line.startswith('{"'):
                return dict(json.loads(line))
        raise SystemExit("\n".join(self.errors.read_text().splitlines()[-12:]))

    def ask(self, row: str, contestant: str) -> dict[str, Any]:
        """Seconds of one call, or its error."""
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"row": row, "contestant": contestant}) + "\n")
        self.child.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """Let the worker end."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()


def measure_row(row: str, workers: Sequence[Worker], rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of every contestant of one row, in turns; an error ends a contestant's part."""
    left = [(worker, name) for worker in workers for name in worker.rows.get(row, [])]
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "cpu": []} for _, name in left}
    for turn in range(rounds):
        for worker, name in left if turn % 2 == 0 else reversed(left):
            time.sleep(REST)
            answer = worker.ask(row, name)
            if "error" in answer:
                found[name]["error"] = answer["error"]
            else:
                found[name]["seconds"].append(answer["seconds"])
                found[name]["cpu"].append(answer["cpu"])
        left = [
            (w, n) for w, n in left if "error" not in found[n] and sum(found[n]["seconds"]) < BUDGET
        ]  # fmt: skip
    return found


def lines(results: dict[str, dict[str, dict[str, Any]]], elements: int) -> list[list[str]]:
    """Table rows: what, who, Gelements/s, factor over the fastest peer, share of memcpy, runs."""
    copy = statistics.median(results["memcpy"]["numpy"]["seconds"])
    out = []
    for row, contestants in results.items():
        done = {n: statistics.median(c["seconds"]) for n, c in contestants.items() if c["seconds"]}
        fastest = min((s for n, s in done.items() if n not in OURS_NAMES), default=None)
        for name, seconds in sorted(done.items(), key=lambda item: item[1]):
            runs = contestants[name]["seconds"]
            low, high = elements / max(runs) / 1e9, elements / min(runs) / 1e9
            share = BYTES[row] / seconds / (BYTES["memcpy"] / copy)
            factor = f"{fastest / seconds:.1f}" if fastest and name in OURS_NAMES else ""
            speed = f"{elements / seconds / 1e9:.3f}"
            cells = [speed, f"{low:.3f}-{high:.3f}", factor, f"{share:.1%}", str(len(runs))]
            out.append([row, name, *cells])
        out += [[row, n, "fails", "", "", "", ""] for n, c in contestants.items() if "error" in c]
    return out


def verdicts(results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Each limit beside what was measured: against the fastest peer, and where that one is compiled by
    torch, also against the fastest library as it is called."""
    found = []
    for row, (times, peer) in TARGETS.items():
        done = {n: statistics.median(c["seconds"]) for n, c in results.get(row, {}).items() if c["seconds"]}
        ours = done.pop("narrowcast", None)
        if not done or not ours:
            continue
        plain = [n for n in done if "compile" not in n]
        names = [peer] if peer else [min(done, key=done.__getitem__), min(plain, key=done.__getitem__)]
        for name in dict.fromkeys(names):
            found.append(verdict(f"{row}, times {name}", done[name] / ours, times, True))
    return found


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description="kernels of narrowcast and its peers on one weight")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=14336)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, min(2, os.cpu_count() or 1)])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(BYTES), help="rows of the table")
    options = parser.parse_args()
    print(busy(), end="")
    shape = (options.rows, options.columns)
    elements = options.rows * options.columns
    path = SCRATCH / "weight.bf16"
    SCRATCH.mkdir(exist_ok=True)
    np.resize(pool(), elements).tofile(path)
    everything = {}
    for threads in options.threads:
        peers = Worker(PEERS, HERE / "peers" / "one_weight.py", [path, *shape], threads)
        workers = [Worker(OURS, HERE / "kernels_ours.py", [path, *shape, threads], threads), peers]
        names = [row for row in BYTES if row in options.only or row == "memcpy"]
        results = {row: measure_row(row, workers, options.rounds) for row in names}
        for worker in workers:
            worker.close()
        copied = elements * BYTES["memcpy"] / statistics.median(results["memcpy"]["numpy"]["seconds"]) / 1e9
        title = f"{shape[0]}x{shape[1]} bf16, {threads} thread(s); memcpy {copied:.1f} GB/s read plus write"
        head = ["row", "who", "Gel/s", "range", "x peer", "memcpy", "runs"]
        print(table(title, head, lines(results, elements), 2), flush=True)
        print("\n".join([*verdicts(results), ""]), flush=True)
        everything[str(threads)] = {"memcpy_gb_s": copied, "rows": results}
    print(f"written to {save('kernels', {'shape': shape, 'threads': everything})}")


if __name__ == "__main__":
    main()
