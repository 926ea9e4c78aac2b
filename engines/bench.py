"""``narrowcast bench`` with a real engine: python engines/bench.py MODEL.

MODEL, a BF16 checkpoint, and what ``engines/serve.py`` made of it (w4a16) are timed in vLLM's CPU build in one run. It
fails when vLLM does not run them, when its log names no kernel or another than planned, or when a time is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from serve import ENGINE, NARROWCAST, SCRATCH

BATCHES = (1, 4)


def problems(model: dict[str, Any], parent: dict[str, Any]) -> list[str]:
    """What is not as it was planned."""
    found = [f"{each['model']}: {note}" for each in (model, parent) for note in each["notes"]]
    if not any(words.startswith("linear kernel") for words in model["running"]):
        found.append(f"no kernel was told: {model['running']}")
    for each in (model, parent):
        rows = each["measured"]
        if [row["batch"] for row in rows] != list(BATCHES):
            found.append(f"{each['model']}: batches {[row['batch'] for row in rows]}")
        found += [f"no time: {row}" for row in rows if min(row["step"], row["prefill"], row["ratio"]) <= 0]
    return found


def main() -> int:
    words = [
        "bench",
        SCRATCH / "serve-w4a16",
        "--against",
        sys.argv[1],
        "--engine",
        "vllm",
        "--python",
        ENGINE,
    ]
    words += ["--batch", ",".join(map(str, BATCHES)), "--prompt", "32", "--tokens", "16", "--json"]
    words += ["--", "--enforce-eager"]
    ran = subprocess.run(
        [str(word) for word in (NARROWCAST, *words)], env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if ran.returncode:
        return ran.returncode
    model, parent = json.loads(ran.stdout)["models"]
    for each in (model, parent):
        for row in each["measured"]:
            print(
                f"{each['model']}, {each['runs_as']}, batch {row['batch']}: {1e3 * row['step']:.1f} ms a step, "
                f"{row['ratio']:.2f} times the least; prefill {1e3 * row['prefill']:.0f} ms"
            )
    wrong = problems(model, parent)
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
