"""ggml itself, where llama-cpp-python is installed beside the tests: its C quantizers and decoders by ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-peers/bin/python"
SKIP = "needs .venv-peers with llama-cpp-python (make .venv-peers/.installed)"


@cache
def library() -> ctypes.CDLL:
    """libggml-base; skips the test when it is not there."""
    found = sorted(ROOT.glob(".venv-peers/lib/python3*/site-packages/llama_cpp/lib/libggml-base.so"))
    if not found:
        pytest.skip(SKIP)
    return ctypes.CDLL(str(found[0]))


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def quantize(name: str, x: NDArray[np.float32], size: int) -> NDArray[np.uint8]:
    """Rows [n, size] by quantize_row_<name>_ref."""
    rule = getattr(library(), f"quantize_row_{name.lower()}_ref")
    rule.restype = None
    out = np.empty((len(x), size), np.uint8)
    x = np.ascontiguousarray(x, np.float32)
    for i in range(len(x)):
        rule(_pointer(x[i]), _pointer(out[i]), ctypes.c_int64(x.shape[1]))
    return out


def dequantize(name: str, rows: NDArray[np.uint8], k: int) -> NDArray[np.float32]:
    """Rows [n, k] by dequantize_row_<name>."""
    rule = getattr(library(), f"dequantize_row_{name}")
    rule.restype = None
    out = np.empty((len(rows), k), np.float32)
    for i in range(len(rows)):
        rule(_pointer(np.ascontiguousarray(rows[i])), _pointer(out[i]), ctypes.c_int64(k))
    return out
