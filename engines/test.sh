#!/usr/bin/env bash
# Which presets vLLM's CPU build loads: engines/test.sh [MODEL] [options of engines/run.py].
# MODEL is a BF16 checkpoint directory; without one the demo's SmolLM2 is used, and made where it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
bash engines/setup.sh
# What the newest wheels call things, in which order they try kernels and which flags they take, against our rows.
bash engines/wheels.sh
.venv/bin/python -m pytest -rs tests/hardware/test_names.py tests/hardware/test_drift.py tests/serving/test_command.py
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  model=$1
  shift
else
  model=demo-output/smollm2-bf16
  mkdir -p demo-output
  .venv/bin/python -c "from pathlib import Path; from demo.source import build; build(Path('$model'))"
fi
# One of them served by `narrowcast serve`, and what runs held against what was planned.
.venv/bin/python engines/serve.py "$model"
# The same one and its parent timed by `narrowcast bench`.
.venv/bin/python engines/bench.py "$model"
exec .venv/bin/python engines/run.py "$model" "$@"
