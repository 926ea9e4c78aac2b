"""How numba makes the functions of this package: loops over pointers that inline into one kernel.

Indexing a pointer is a load or a store and nothing else, which is what lets LLVM vectorise. The numpy error
model leaves divisions unchecked; fast-math stays off, so every rounding is the reference's.
"""

from __future__ import annotations

from numba import njit

loop = njit(error_model="numpy", forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
