"""A small real model from the shell to the finished, self-checked checkpoint: start-up is most of the time
here.

    python benchmarks/smollm2.py [MODEL] [--threads 2] [--rounds 5]

MODEL is the BF16 directory that the demo makes. "cold" has an empty kernel cache, so that every kernel is
compiled; "warm" is any later run. llm-compressor runs once per scheme and path; llama.cpp starts from a GGUF
of the same tensors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from pathlib import Path

from contestants import copy, llama_cpp, llm_compressor, make_gguf, narrowcast, take_turns
from measure import ROOT, SCRATCH, Run, busy, clear, durable, save, spread, table, verdict

PRESETS = ("fp8_dynamic", "nvfp4a16")


def cold(model: Path, out: Path, preset: str, threads: int) -> Run:
    """One run with an empty kernel cache."""
    cache = SCRATCH / "cold-cache"
    shutil.rmtree(cache, ignore_errors=True)
    clear(out)
    result = durable(
        narrowcast(model, out, preset, threads).argv(), out, threads, {"NUMBA_CACHE_DIR": str(cache)}
    )
    clear(out)
    shutil.rmtree(cache, ignore_errors=True)
    return result


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description="SmolLM2 from the shell to the finished checkpoint")
    parser.add_argument("model", type=Path, nargs="?", default=ROOT / "demo-output" / "smollm2-bf16")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(busy(), end="")
    model, threads = options.model, options.threads
    SCRATCH.mkdir(exist_ok=True)
    out, out_gguf = SCRATCH / "out", SCRATCH / "out.gguf"
    gguf = make_gguf(model, SCRATCH / "smollm2.gguf")
    first = {f"narrowcast {preset}, cold": [cold(model, out, preset, threads)] for preset in PRESETS}
    fast = [
        copy(model, out),
        *[narrowcast(model, out, preset, threads) for preset in PRESETS],
        *[llama_cpp(gguf, out_gguf, kind, threads) for kind in ("Q8_0", "Q4_0")],
    ]
    slow = [c for scheme in ("FP8_DYNAMIC", "NVFP4A16") for c in llm_compressor(model, out, scheme, threads)]
    results = {**take_turns(fast, options.rounds, threads), **take_turns(slow, 1, threads), **first}
    rows = [
        [name, spread([r.seconds for r in runs]), f"{max(r.peak_mb for r in runs):.0f}", str(len(runs))]
        for name, runs in results.items()
    ]
    print(table(f"SmolLM2-135M, {threads} threads", ["who", "seconds (min-max)", "peak MB", "runs"], rows))
    for preset in PRESETS:
        seconds = statistics.median(r.seconds for r in results[f"narrowcast {preset}"])
        print(verdict(f"{preset}, warm, seconds from shell to checked", seconds, 2.0))
    save("smollm2", {"threads": threads, "seconds": {n: [r.seconds for r in f] for n, f in results.items()}})


if __name__ == "__main__":
    main()
