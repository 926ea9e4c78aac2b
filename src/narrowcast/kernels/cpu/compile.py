"""Compiled kernels by name and carrier: compiled on first use, kept on disk, never compiled twice in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

Kernel = Callable[..., None]
_compiling = threading.Lock()

# One letter per argument. Read-only: S stored [n, k], P packed, U parameter row, H half steps, T scale codes.
SIGNATURES = {
    "peak": "S s",
    "quantize": "S i i U U f b b i i c w c s s h h h h h p",
    "check": "S P i i U H i f b i i T P n d h h h h u p d d",
    "dequantize": "P i i i U i f b i i T P b O o h h h p",
}


def kernel(name: str, carrier: str) -> Kernel:
    """The compiled function ``name`` for stored elements of this carrier ("uint16" or "uint32")."""
    with _compiling:
        return _kernel(name, carrier)


@cache
def _kernel(name: str, carrier: str) -> Kernel:
    from numba import njit, types

    from narrowcast.kernels.cpu import check, decode, peaks, quantize

    functions = {
        "peak": peaks.peak_kernel,
        "quantize": quantize.quantize_kernel,
        "check": check.check_kernel,
        "dequantize": decode.dequantize_kernel,
    }
    stored = getattr(types, carrier)

    def array(dtype: Any, ndim: int, readonly: bool = False) -> Any:
        return types.Array(dtype, ndim, "C", readonly=readonly)

    letters = {
        "S": array(stored, 2, True), "P": array(types.uint8, 2, True), "U": array(types.uint32, 1, True),
        "H": array(types.float32, 1, True), "T": array(types.uint32, 2, True), "s": array(stored, 1),
        "i": types.int64, "f": types.float32, "b": types.boolean, "c": array(types.uint8, 2),
        "w": array(types.uint32, 2), "h": array(types.float32, 1), "p": array(types.uint8, 1),
        "n": array(types.int64, 1), "d": array(types.float64, 1), "u": array(types.uint32, 1),
        "O": array(types.float32, 2), "o": array(types.uint16, 2),
    }  # fmt: skip
    signature = types.void(*(letters[letter] for letter in SIGNATURES[name].split()))
    compiled: Kernel = njit(signature, nogil=True, error_model="numpy", cache=True)(functions[name].py_func)
    return compiled
