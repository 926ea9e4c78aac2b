"""One to eight rows times a weight that is read as it is packed, beside torch's linear, in one run.

    python benchmarks/matvec.py [--shape 14336x4096] [--rows 1 4] [--threads 1 2] [--rounds 15]

One process for each number of threads holds every weight; contestants take turns call by call, the order reversed
every second round, and together they exceed the caches. Torch's weights lie in memory of numpy, whose pages are as
large as those of the codes. Reported: Gweights/s of the median call (slowest and fastest), the factor over torch in
bf16, and bytes of the weight read a second: the largest of these is the ceiling that the run has seen.

Python's own time in a call is measured on a weight of 64 x 64, apart; the kernel that torch chose is what oneDNN says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from measure import OURS, busy, environment, save, table, verdict

SCHEMES = (
    "fp8_channel", "fp8_tensor", "fp8_block128", "mxfp8", "int8_channel", "int8_g128", "int4_g128", "int4_g64",
    "int4_g32", "uint4_g128", "mxfp4", "nvfp4",
)  # fmt: skip
TARGETS = {
    "fp8_channel": 1.3, "int8_channel": 2.0, "int4_g128": 1.3, "mxfp4": 1.3, "nvfp4": 1.3,
}  # fmt: skip


def contestants(n: int, k: int) -> tuple[dict[str, Callable[[Any], Any]], dict[str, int]]:
    """Every contestant as a function of x, and the bytes of its weight."""
    import numpy as np
    import torch

    from narrowcast.numbers.formats import BF16
    from narrowcast.runtime.decode import PackedLinear, pack
    from narrowcast.tensors.schemes import schemes

    rng = np.random.default_rng(0)
    wide = rng.standard_normal((n, k), dtype=np.float32) * np.float32(0.02)
    bits = np.empty((n, k), np.int16)
    np.copyto(bits, torch.from_numpy(wide).bfloat16().view(torch.int16).numpy())
    bf16, fp32 = torch.from_numpy(bits).view(torch.bfloat16), torch.from_numpy(wide)
    calls: dict[str, Callable[[Any], Any]] = {
        "torch bf16": lambda x: torch.nn.functional.linear(x, bf16),
        "torch fp32": lambda x: torch.nn.functional.linear(x.float(), fp32),
    }
    sizes = {"torch bf16": 2 * n * k, "torch fp32": 4 * n * k}
    for name in SCHEMES:
        layer = PackedLinear(name, pack(bits.view(np.uint16), BF16, schemes[name]))
        calls[name], sizes[name] = layer, layer.nbytes
    return calls, sizes


def seconds(call: Callable[[Any], Any], x: Any) -> float:
    """Of one call."""
    start = time.perf_counter()
    call(x)
    return time.perf_counter() - start


def overhead(rounds: int = 300) -> dict[str, float]:
    """Microseconds of a call on a weight of 64 x 64."""
    import torch

    calls, _ = contestants(64, 64)
    x = torch.randn(1, 64).bfloat16()
    return {
        name: statistics.median(seconds(calls[name], x) for _ in range(rounds)) * 1e6
        for name in ("torch bf16", "fp8_channel", "int4_g128")
    }


def worker(n: int, k: int, rows: list[int], rounds: int) -> None:
    """Measure and print JSON."""
    import torch

    with torch.inference_mode():
        calls, sizes = contestants(n, k)
        found: dict[int, dict[str, list[float]]] = {}
        for m in rows:
            x = torch.randn(m, k).bfloat16()
            runs: dict[str, list[float]] = {name: [] for name in calls}
            for turn in range(rounds + 1):
                for name in calls if turn % 2 else reversed(calls):
                    spent = seconds(calls[name], x)
                    if turn:  # the first round loads kernels
                        runs[name].append(spent)
            found[m] = runs
        said = {"torch": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
        print(json.dumps({"seconds": found, "sizes": sizes, "overhead": overhead(), "said": said}))


def chosen_kernel(threads: int) -> str:
    """What oneDNN says that it runs for one row in bf16."""
    code = "import torch; torch.nn.functional.linear(torch.ones(1, 4096).bfloat16(), torch.ones(1024, 4096).bfloat16())"
    done = subprocess.run(
        [OURS, "-c", code], env=environment(threads, {"ONEDNN_VERBOSE": "1"}), capture_output=True, text=True
    )
    names = [
        line.split(",")[6]
        for line in done.stdout.splitlines()
        if ",primitive,exec," in line and "matmul" in line
    ]
    return f"oneDNN {names[0]}" if names else "not oneDNN (see torch.__config__.show())"


def report(threads: int, shape: tuple[int, int], found: dict[str, Any]) -> None:
    """Tables and verdicts of one number of threads."""
    weights = shape[0] * shape[1]
    for m, runs in found["seconds"].items():
        middle = {name: statistics.median(times) for name, times in runs.items()}
        rows = []
        for name, times in runs.items():
            low, high = weights / max(times) / 1e9, weights / min(times) / 1e9
            speed, rate = weights / middle[name] / 1e9, found["sizes"][name] / middle[name] / 1e9
            factor = middle["torch bf16"] / middle[name]
            bits = 8 * found["sizes"][name] / weights
            rows.append(
                [name, f"{bits:.2f}", f"{speed:.2f}", f"{low:.2f}-{high:.2f}", f"{factor:.2f}", f"{rate:.1f}"]
            )
        head = ["weight", "bits", "Gw/s", "range", "x torch bf16", "GB/s"]
        print(table(f"{shape[0]}x{shape[1]}, {m} row(s), {threads} thread(s)", head, rows))
        top = max(float(row[-1]) for row in rows)
        print(
            f"most bytes read a second by any of them: {top:.1f} GB/s; at that rate bf16 would reach {top / 2:.1f} Gw/s"
        )
        if int(m) == 1:
            print("\n".join(verdict(f"{n}, times torch bf16", middle["torch bf16"] / middle[n], t, True)
                            for n, t in TARGETS.items()))  # fmt: skip
        print(flush=True)
    calls = ", ".join(f"{name} {spent:.1f}" for name, spent in found["overhead"].items())
    print(f"microseconds of a call on 64 x 64, almost all Python's: {calls}\n")


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description="packed products beside torch's linear")
    parser.add_argument("--shape", default="14336x4096")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, min(2, os.cpu_count() or 1)])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    n, k = (int(side) for side in options.shape.split("x"))
    if options.worker:
        worker(n, k, options.rows, options.rounds)
        return
    print(busy(), end="")
    everything = {}
    for threads in dict.fromkeys(options.threads):
        argv = [
            OURS,
            __file__,
            "--worker",
            "--shape",
            options.shape,
            "--rounds",
            str(options.rounds),
            "--rows",
        ]
        argv += [str(m) for m in options.rows]
        done = subprocess.run(argv, env=environment(threads), capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        found = json.loads(done.stdout.splitlines()[-1])
        name = chosen_kernel(threads)
        print(f"torch runs {name}, {found['said']['torch']}")
        report(threads, (n, k), found)
        everything[str(threads)] = found | {"kernel": name}
    print(f"written to {save('matvec', {'shape': [n, k], 'threads': everything})}")


if __name__ == "__main__":
    main()
