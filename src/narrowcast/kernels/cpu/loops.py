"""How numba makes the functions of this package: loops over pointers that inline into one kernel.

Indexing a pointer is a load or a store and nothing else. The numpy error model leaves divisions unchecked; fast-math
stays off, so every rounding is the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types

from narrowcast.kernels.cpu.lanes import Lane, intrinsic, traced

loop: Callable[[Any], Any] = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@traced("u32", result="f32")
def as_float(bits: Lane) -> Lane:
    """The float32 of a pattern."""
    return bits.float


@intrinsic
def value(context: Any, stored: Any) -> Any:
    """The float32 value of one stored element."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return Lane(builder, args[0]).stored.value

    return types.float32(stored), generate


@intrinsic
def magnitude(context: Any, stored: Any) -> Any:
    """A stored element without its sign, in its carrier."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.and_(args[0], ir.Constant(args[0].type, (1 << (stored.bitwidth - 1)) - 1))

    return stored(stored), generate


def _larger(compare: str) -> Any:
    def typed(context: Any, a: Any, b: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.select(getattr(builder, compare)(">", *args), *args)

        return a(a, a), generate

    return intrinsic(typed)


larger = _larger("icmp_unsigned")
larger_signed = _larger("icmp_signed")
