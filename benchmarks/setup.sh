#!/usr/bin/env bash
# The peers' environment, .venv-peers: torch first, so that nothing pulls in another build of it, then the pinned rest.
# llama-cpp-python has no wheel on PyPI and is compiled here (about 10 minutes on one core; needs cmake and a C++ compiler).
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv .venv-peers
pip=".venv-peers/bin/python -m pip install --quiet"
torch=$(grep '^torch==' benchmarks/requirements.txt)
$pip "$torch"
$pip --requirement benchmarks/requirements.txt
.venv-peers/bin/python -c "import llmcompressor, modelopt.torch.quantization, torchao, llama_cpp, torch; print('torch', torch.__version__)"
