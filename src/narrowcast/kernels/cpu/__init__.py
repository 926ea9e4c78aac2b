"""Compiled kernels for the CPU: serial loops that release the interpreter lock and vectorise."""

import numba as _numba  # noqa: F401  the backend is chosen only where this import succeeds

from narrowcast.kernels.cpu.rows import CPU

__all__ = ["CPU"]
