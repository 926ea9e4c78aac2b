#!/usr/bin/env bash
# The newest wheels of vLLM and SGLang, of which tests read the lists (tests/engine_sources.py): about 400 MB are
# downloaded when a version is new, 10 MB of source are kept under .bench/wheels, and nothing is installed or run.
set -euo pipefail
cd "$(dirname "$0")/.."
pip=".venv/bin/python -m pip"
keep() {
  local engine=$1 version
  shift
  version=$($pip index versions "$engine" --only-binary :all: 2>/dev/null | sed -n 's/^[^ ]* (\(.*\))$/\1/p')
  if [ -z "$version" ]; then
    echo "$engine: no package index answers; the lists of tests/hardware/engine_names.json stand" >&2
    return 0
  fi
  local folder=.bench/wheels/$engine-$version
  if [ "$(cat "$folder/parts" 2>/dev/null)" = "$*" ]; then return 0; fi
  echo "Downloading $engine $version"
  local scratch
  scratch=$(mktemp -d .bench/wheels.XXXXXX)
  $pip download --quiet --no-deps --only-binary :all: --dest "$scratch" "$engine==$version"
  .venv/bin/python - "$scratch" "$@" <<'PY'
import sys
from pathlib import Path
from zipfile import ZipFile

scratch, parts = Path(sys.argv[1]), sys.argv[2:]
wheel = ZipFile(next(scratch.glob("*.whl")))
for name in wheel.namelist():
    if name.endswith(".py") and name.startswith(tuple(parts)):
        wheel.extract(name, scratch / "source")
PY
  echo "$*" > "$scratch/source/parts"
  rm -rf "$folder"
  mv "$scratch/source" "$folder"
  rm -r "$scratch"
}
mkdir -p .bench/wheels
keep vllm vllm/config vllm/model_executor/kernels/linear vllm/model_executor/layers/quantization \
  vllm/model_executor/layers/fused_moe/oracle vllm/model_executor/layers/attention vllm/v1/attention/backends \
  vllm/model_executor/model_loader vllm/platforms vllm/engine vllm/entrypoints vllm/envs.py
keep sglang sglang/srt/arg_groups sglang/srt/layers/quantization sglang/srt/mem_cache/kv_cache_dtype.py
