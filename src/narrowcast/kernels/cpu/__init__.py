"""Compiled kernels for the CPU: serial loops that release the interpreter lock and vectorise.

Importing this package compiles nothing and does not import numba, but raises ImportError where numba is absent.
"""

from importlib.util import find_spec

if find_spec("numba") is None:
    raise ImportError("numba is not installed")

from narrowcast.kernels.cpu.rows import CPU

__all__ = ["CPU"]
