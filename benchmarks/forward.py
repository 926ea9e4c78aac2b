"""What quantized execution costs: a forward of SmolLM2 under narrowcast's linears beside transformers' plain one.

    python benchmarks/forward.py [--model DIR] [--threads 2] [--tokens 512] [--rounds 5]

Both run in one process, in float32, on the same token ids, alternating in order; medians of the rounds. The plain
forward is transformers' own class with its own linears. Ours is ``Running`` with all its weights in memory, which is
what evaluating costs once a layer is read. Wanted: weight-only at most 1.1 times, W8A8 FP8 at most 1.5 times.

Below, the BLAS of this torch and which oneDNN kernels the products ran in, counted from its own verbose lines.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# A name, the online scheme that stands for it (None: the BF16 parent under our linears), and the ratio wanted.
CASES: tuple[tuple[str, str | None, float | None], ...] = (
    ("weights wide", None, 1.1),
    ("w4a16", "w4a16", 1.1),
    ("fp8_dynamic", "fp8_dynamic", 1.5),
    ("fp8_per_tensor", "fp8_per_tensor", 1.5),
    ("fp8_per_block", "fp8_per_block", 1.5),
    ("mxfp8", "mxfp8", None),
    ("int8", "int8", None),
    ("llm_int8", "llm_int8", None),
)


def alternating(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round; the order turns round from one to the next."""
    names, times = list(calls), {name: [] for name in calls}
    for name in names:
        calls[name]()
    for r in range(rounds):
        for name in names if r % 2 == 0 else reversed(names):
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
    return times


def kernels(model: Path, online: str | None, tokens: int) -> str:
    """Which oneDNN kernels a forward's products ran in, from a child whose oneDNN tells."""
    argv = [sys.executable, __file__, "--model", model, "--tokens", tokens, "--once", online or "-"]
    env = {**os.environ, "ONEDNN_VERBOSE": "1", "DNNL_VERBOSE": "1"}
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, env=env, check=False)
    found: Counter[str] = Counter()
    for line in done.stdout.splitlines():
        parts = line.split(",")
        if (
            "exec" in parts
            and len(parts) > 7
            and parts[parts.index("exec") + 2] in ("matmul", "inner_product")
        ):
            at = parts.index("exec")
            found[f"{parts[at + 3]} {'fpmath bf16' if 'fpmath:bf16' in line else ''}".strip()] += 1
    return ", ".join(f"{name} x{count}" for name, count in found.most_common(3)) or "none of oneDNN's (BLAS)"


def resident(model: Path, online: str | None) -> Any:
    from narrowcast.runtime.walk import Running

    return Running.open(model, "float32", online).resident()


def main() -> int:
    parser = argparse.ArgumentParser(
        description="forwards of quantized models beside transformers' plain one"
    )
    parser.add_argument("--model", type=Path, default=ROOT / "demo-output" / "smollm2-bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    ids = (torch.arange(options.tokens) * 37 % 40000)[None]

    def forward(model: Any) -> Any:
        with torch.no_grad():
            return model(ids, use_cache=False, logits_to_keep=1).logits

    if options.once:
        forward(resident(options.model, None if options.once == "-" else options.once))
        return 0
    plain = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {options.threads} threads")
    blas = [
        line.strip(" -") for line in torch.__config__.show().splitlines() if "MKL" in line or "BLAS" in line
    ]
    print("\n".join(line[:100] for line in blas[:2]))
    print(f"{options.tokens} tokens, medians of {options.rounds} rounds\n")
    print(f"{'':16} {'plain s':>8} {'ours s':>8} {'ratio':>6} {'wanted':>6}  products run in")
    missed = []
    for name, online, wanted in CASES:
        ours = resident(options.model, online)
        times = alternating(
            {"plain": lambda: forward(plain), "ours": lambda m=ours: forward(m)}, options.rounds
        )
        ratio = statistics.median(o / p for o, p in zip(times["ours"], times["plain"], strict=True))
        seconds = [statistics.median(times[key]) for key in ("plain", "ours")]
        ran = kernels(options.model, online, options.tokens)
        print(
            f"{name:16} {seconds[0]:8.3f} {seconds[1]:8.3f} {ratio:6.2f} {wanted or '':>6}  {ran}", flush=True
        )
        if wanted is not None and ratio > wanted:
            missed.append(name)
    if missed:
        print(f"\nmissed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
