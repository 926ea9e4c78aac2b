"""Tokens a second of SmolLM2 from packed weights beside transformers in bf16: one run, taking turns.

    python benchmarks/decode.py [MODEL] [--tokens 128] [--rounds 3] [--threads 2]

Batch 1, greedy, always the same number of tokens. Beside the ratio of tokens stands the ratio of bytes that a token
reads of the weights: linears as they are stored, norms, and the output head (tied to the embedding, of which a token
reads one row). "+ head" quantizes the head too; without it, it stays in bf16 and is a large part of a small model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import OURS, ROOT, busy, environment, save, spread, table

MODEL = ROOT / "demo-output" / "smollm2-bf16"
CONTESTANTS = {
    "fp8": ("fp8_channel", False),
    "int8": ("int8_channel", False),
    "fp8 + head": ("fp8_channel", True),
    "int8 + head": ("int8_channel", True),
    "int4 g32": ("int4_g32", False),
}
PROMPT = "The history of the printing press begins"


def bytes_read(model: Any) -> int:
    """Bytes of weights that a token reads."""
    from narrowcast.runtime.decode import PackedLinear

    embedding = model.get_input_embeddings().weight
    total, seen = 0, set()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            total += module.nbytes
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (parameter is embedding and "lm_head" not in name) or parameter.data_ptr() in seen:
            continue
        seen.add(parameter.data_ptr())
        total += parameter.numel() * parameter.element_size()
    return total


def worker(path: Path, tokens: int, rounds: int, only: list[str]) -> None:
    """Measure and print JSON."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from narrowcast.runtime.decode import packed

    models = {"transformers bf16": AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()}
    for name in only:
        scheme, head = CONTESTANTS[name]
        models[name] = packed(path, scheme, "bfloat16", head)[0]
    ids = AutoTokenizer.from_pretrained(path)(PROMPT, return_tensors="pt")
    how = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    found: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for model in models.values():
            model.generate(**ids, **how | {"max_new_tokens": 4, "min_new_tokens": 4})
        for turn in range(rounds):
            for name in models if turn % 2 == 0 else reversed(models):
                start = time.perf_counter()
                made = models[name].generate(**ids, **how)
                found[name].append(tokens / (time.perf_counter() - start))
                assert made.shape[1] == ids["input_ids"].shape[1] + tokens
    sizes = {name: bytes_read(model) for name, model in models.items()}
    print(json.dumps({"tokens_per_second": found, "bytes": sizes}))


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description="decoding from packed weights beside transformers in bf16")
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.model, options.tokens, options.rounds, options.only)
        return
    print(busy(), end="")
    argv = [OURS, __file__, options.model, "--worker", "--tokens", options.tokens, "--rounds", options.rounds]
    argv += ["--only", *options.only]
    done = subprocess.run(
        [str(part) for part in argv], env=environment(options.threads), capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    speeds, sizes = found["tokens_per_second"], found["bytes"]
    base = "transformers bf16"
    middle = {name: statistics.median(runs) for name, runs in speeds.items()}
    rows = [
        [name, spread(runs, 1), f"{middle[name] / middle[base]:.2f}", f"{sizes[name] / 1e6:.1f}",
         f"{sizes[base] / sizes[name]:.2f}", f"{sizes[name] * middle[name] / 1e9:.2f}"]
        for name, runs in speeds.items()
    ]  # fmt: skip
    head = ["weights", "tokens/s", "x bf16", "MB a token", "bytes x", "GB/s"]
    print(table(f"{options.tokens} tokens, batch 1, {options.threads} thread(s)", head, rows))
    print(
        "bytes x: how many times fewer bytes of weights a token reads, which is what tokens can gain from them\n"
    )
    print(f"written to {save('decode', {'threads': options.threads, **found})}")


if __name__ == "__main__":
    main()
