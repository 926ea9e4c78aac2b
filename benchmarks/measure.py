"""How the benchmarks measure: wall seconds, peak memory, warm files, and tables of 80 columns.

A command runs as a child whose resources the kernel accounts for (``wait4``): ``ru_maxrss`` is the largest
resident set it or a child of its own ever had, mapped file pages included. A child starts as a copy of its
parent, so the driver itself must stay small: it imports no numpy and holds no tensor.

Left out: CPU frequency control and outlier rejection. Medians with the smallest and the largest run are
printed, and contestants alternate in order, so that drift falls on all of them alike.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = ROOT / ".bench"
OURS = ROOT / ".venv" / "bin" / "python"
PEERS = ROOT / ".venv-peers" / "bin" / "python"
NARROWCAST = ROOT / ".venv" / "bin" / "narrowcast"


@dataclass(frozen=True)
class Run:
    """One finished command: wall seconds, peak resident MB (10^6 bytes), what it printed on stdout, and the seconds
    that processors worked for it."""

    seconds: float
    peak_mb: float
    output: str
    processor: float = 0.0


class CommandFailed(Exception):
    """A contestant did not do its job; the message ends with what it printed last."""


def environment(threads: int, extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a contestant: ``threads`` for every library, its own choice of BLAS kernel, byte code kept
    from one run to the next, no network."""
    taken = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONDONTWRITEBYTECODE")
    env = {k: v for k, v in os.environ.items() if k not in taken}
    count = str(threads)
    limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), count)
    return {**env, **limits, "HF_HUB_OFFLINE": "1", **(extra or {})}


def run(argv: Sequence[str | Path], threads: int, extra: dict[str, str] | None = None) -> Run:
    """Run one command to its end. Raises CommandFailed with its last lines when it exits other than 0."""
    SCRATCH.mkdir(exist_ok=True)
    out, err = SCRATCH / "stdout.txt", SCRATCH / "stderr.txt"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        start = time.perf_counter()
        child = subprocess.Popen(
            [str(a) for a in argv], stdout=stdout, stderr=stderr, env=environment(threads, extra)
        )
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    output = out.read_text(errors="replace")
    if child.returncode != 0:
        tail = "\n".join((output + err.read_text(errors="replace")).splitlines()[-12:])
        raise CommandFailed(f"exit {child.returncode}: {' '.join(map(str, argv))}\n{tail}")
    return Run(seconds, usage.ru_maxrss * 1024 / 1e6, output, usage.ru_utime + usage.ru_stime)


def durable(argv: Sequence[str | Path], out: Path, threads: int, extra: dict[str, str] | None = None) -> Run:
    """``run``, then force every file under ``out`` to disk; the seconds include both, for every
    contestant."""
    result = run(argv, threads, extra)
    start = time.perf_counter()
    for path in [out] if out.is_file() else sorted(p for p in out.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return Run(result.seconds + time.perf_counter() - start, result.peak_mb, result.output, result.processor)


def clear(out: Path) -> None:
    """Remove what an earlier run wrote, or left half done, and let the disk come to rest."""
    for path in (out, out.with_name(f"{out.name}.partial")):
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
    os.sync()


def warm(source: Path) -> None:
    """Read every file of ``source`` once, so that all contestants find it in the page cache."""
    for path in [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file()):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``median (min-max)`` of some runs."""
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(values) > 1 else middle


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Columns as wide as their widest cell, the first ``words`` of them to the left, the others to the
    right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([title, line(head), "  ".join("-" * w for w in widths), *map(line, rows), ""])


def verdict(claim: str, value: float, limit: float, at_least: bool = False) -> str:
    """One line that says whether a measured value keeps its limit."""
    kept = value >= limit if at_least else value <= limit
    return f"{'met ' if kept else 'NOT '} {claim}: {value:.2f}, wanted {'>=' if at_least else '<='} {limit:g}"


def machine() -> dict[str, str | int | None]:
    """What the numbers depend on: processor, cores, and the memory in GB."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"cpu": names[0] if names else "unknown", "cores": os.cpu_count(), "memory_gb": round(pages / 1e9)}


def busy() -> str:
    """A warning for the head of a table when other work shares the cores, else nothing."""
    load = os.getloadavg()[0]
    return f"load average {load:.1f} before the run: other work shares the cores\n" if load > 0.5 else ""


def save(name: str, result: dict[str, object]) -> Path:
    """Write ``result`` with the machine and the date to .bench/NAME.json and return the path."""
    SCRATCH.mkdir(exist_ok=True)
    path = SCRATCH / f"{name}.json"
    stamp = {"schema": 1, "date": time.strftime("%Y-%m-%d"), "machine": machine()}
    path.write_text(json.dumps({**stamp, **result}, indent=2) + "\n")
    return path
