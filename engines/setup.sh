#!/usr/bin/env bash
# vLLM's CPU build in .venv-engine, about 3.5 GB: torch first, so that nothing pulls in another build of it, then what
# vLLM needs for text (torchaudio, torchvision and torchcodec are left out), then the wheel without its dependencies.
set -euo pipefail
cd "$(dirname "$0")/.."
if cmp --silent engines/requirements.txt .venv-engine/requirements.txt; then exit 0; fi
echo "Setting up .venv-engine, once: about 3.5 GB"
python3 -m venv --clear .venv-engine
pip=".venv-engine/bin/python -m pip install --quiet"
$pip "$(grep '^torch==' engines/requirements.txt)"
$pip --no-deps --requirement engines/requirements.txt
.venv-engine/bin/python -c "import vllm; print('vllm', vllm.__version__)"
cp engines/requirements.txt .venv-engine/requirements.txt
