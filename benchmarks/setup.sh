#!/usr/bin/env bash
# The peers' environment, .venv-peers: torch first, so that nothing pulls in another build of it, then the pinned rest.
# llama-cpp-python has no wheel on PyPI and is compiled here (10 minutes on one core; needs a C++ compiler).
set -euo pipefail
cd "$(dirname "$0")/.."
if cmp --silent benchmarks/requirements.txt .venv-peers/requirements.txt; then exit 0; fi
echo "Setting up .venv-peers, once: about 3 GB and some 15 minutes"
python3 -m venv --clear .venv-peers
pip=".venv-peers/bin/python -m pip install --quiet"
$pip "$(grep '^torch==' benchmarks/requirements.txt)"
$pip --requirement benchmarks/requirements.txt
cp benchmarks/requirements.txt .venv-peers/requirements.txt
