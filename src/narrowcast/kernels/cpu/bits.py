"""The few 32-bit operations that compiled loops are made of.

Numba widens every integer to 64 bits, which halves the lanes; wrapping each result in ``u32`` lets LLVM narrow
the whole chain again. ``widen``, ``magnitude`` and ``ordered`` are typed by the carrier: bf16 as uint16, float32
as uint32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

u8, u16, u32, i32, i64 = np.uint8, np.uint16, np.uint32, np.int32, np.int64
f32, f64 = np.float32, np.float64

# nogil and the numpy error model (no division checks) for everything; fast-math for nothing.
inlined = njit(nogil=True, error_model="numpy")


@intrinsic  # type: ignore[untyped-decorator]
def as_bits(context: Any, x: Any) -> Any:
    """The bit pattern of a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def as_float(context: Any, bits: Any) -> Any:
    """The float32 of a bit pattern."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def as_bits64(context: Any, x: Any) -> Any:
    """The bit pattern of a float64."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.uint64(types.float64), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen(context: Any, stored: Any) -> Any:
    """The float32 value of a stored element: a bf16 is the upper half of a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.zext(args[0], ir.IntType(32))
        if stored.bitwidth == 16:
            bits = builder.shl(bits, ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(stored), generate


@intrinsic  # type: ignore[untyped-decorator]
def magnitude(context: Any, stored: Any) -> Any:
    """The stored element without its sign, in the carrier's own width; magnitudes order like unsigned integers."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.and_(args[0], ir.Constant(args[0].type, (1 << (stored.bitwidth - 1)) - 1))

    return stored(stored), generate


@intrinsic  # type: ignore[untyped-decorator]
def larger(context: Any, a: Any, b: Any) -> Any:
    """The larger of two unsigned carriers."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", args[0], args[1]), args[0], args[1])

    return a(a, a), generate


@intrinsic  # type: ignore[untyped-decorator]
def larger_signed(context: Any, a: Any, b: Any) -> Any:
    """The larger of two carriers read as signed integers: the largest positive float, if there is one."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed(">", args[0], args[1]), args[0], args[1])

    return a(a, a), generate
