"""All benchmarks, one after the other: python -m benchmarks (``make bench``). Each is a script of its own."""

import subprocess
import sys
from pathlib import Path

SCRIPTS = ("kernels", "smollm2", "checkpoint", "memory")

if __name__ == "__main__":
    here = Path(__file__).parent
    failed = [
        name
        for name in SCRIPTS
        if subprocess.run([sys.executable, here / f"{name}.py"], check=False).returncode
    ]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
