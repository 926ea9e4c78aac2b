"""Peak resident memory of evaluating a parent and a quantized child side by side, against a layer and the model.

    python benchmarks/stream_memory.py [PARENT CHILD] [--tokens 300] [--dtype bfloat16]

Without arguments the models are the 2.2 GB Llama shape of ``memory.py`` in .bench and its fp8_dynamic form, which is
made when it is missing. Measured in a process of its own are the peak after the libraries are imported, after both
models are open with embeddings and heads in memory, and at the end of the walk; then once more with hidden states on
disk. Pages of files that the kernel maps count too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from contestants import narrowcast
from measure import SCRATCH, busy, run, save, table

WALK = """
import json, sys, torch
from time import perf_counter
from narrowcast.runtime.lanes import Lane, together
from narrowcast.runtime.walk import Running
from narrowcast.texts.documents import Piece
import transformers
torch.set_num_threads(1)
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
parent, child, tokens, dtype, spool = sys.argv[1:]
found = {"imported": peak()}
runs = [Running.open(path, dtype) for path in (parent, child)]
ids = torch.arange(int(tokens)) * 7 % runs[0].config.vocab_size
for one in runs:
    one.begin(ids[:1])
found["outer"] = peak()
layer = sum(p.numel() for p in runs[0].layers[0].parameters())
found["layer"], found["layers"] = 4 * layer / 2**20, 4 * layer * runs[0].depth / 2**20
start = perf_counter()
pieces = [Piece(n, str(n), 0, tuple(part.tolist())) for n, part in enumerate(ids.split(256))]
for row in together([Lane("parent", runs[0]), Lane("child", runs[1])], pieces, spool=spool or None):
    assert all(bool(one.isfinite().all()) for one in row)
found["peak"], found["seconds"] = peak(), perf_counter() - start
print(json.dumps(found))
"""


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description="peak memory of a walk of two models")
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    options = parser.parse_args()
    print(busy(), end="")
    parent, child = options.models or (options.scratch / "llama", options.scratch / "pair-fp8")
    if not child.exists():
        run(narrowcast(parent, child, "fp8_dynamic", 1).argv(), 1)
    rows, peaks = [], {}
    for where, spool in (("memory", ""), ("disk", str(options.scratch))):
        asked = [
            sys.executable,
            "-c",
            WALK,
            str(parent),
            str(child),
            str(options.tokens),
            options.dtype,
            spool,
        ]
        done = subprocess.run(asked, check=True, capture_output=True, text=True)
        peaks[where] = found = json.loads(done.stdout.splitlines()[-1])
        columns = ("imported", "outer", "peak", "layer", "layers")
        rows.append([where, *(f"{found[key]:.0f}" for key in columns), f"{found['seconds']:.1f}"])
    files = [
        sum(one.stat().st_size for one in path.glob("*.safetensors")) / 2**20 for path in (parent, child)
    ]
    print(f"on disk: parent {files[0]:.0f} MB, child {files[1]:.0f} MB")
    heads = [
        "hidden states",
        "imported MB",
        "outer parts MB",
        "peak MB",
        "a layer fp32",
        "all layers fp32",
        "s",
    ]
    print(table(f"{options.tokens} tokens, {options.dtype}", heads, rows, 1))
    save("stream_memory", {"tokens": options.tokens, "dtype": options.dtype, "peak_mb": peaks})


if __name__ == "__main__":
    main()
