"""The few 32-bit and pointer operations that compiled loops are made of.

Kernels take plain pointers: indexing one is a load or a store and nothing else, which is what lets LLVM vectorise.
Numba widens every integer to 64 bits, which would halve the lanes; wrapping each result in ``u32`` lets LLVM
narrow the whole chain again. ``widen``, ``magnitude`` and ``larger`` take their width from the carrier: bf16
as uint16, float32 as uint32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from narrowcast.kernels.cpu.parameters import UNIT

u8, u16, u32, i32, i64 = np.uint8, np.uint16, np.uint32, np.int32, np.int64
f32, f64 = np.float32, np.float64

# The numpy error model leaves divisions unchecked. Fast-math stays off: every rounding is the reference's.
inlined = njit(error_model="numpy", forceinline=True)


def _unary(result: Any, emit: Callable[[Any, Any, Any], Any]) -> Any:
    """An intrinsic of one argument: ``result`` is a type or a function of the argument's type."""

    def typed(context: Any, x: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return emit(builder, args[0], x)

        return (result(x) if callable(result) and not isinstance(result, types.Type) else result)(x), generate

    return intrinsic(typed)


def _widened(builder: Any, value: Any, kind: Any) -> Any:
    bits = builder.zext(value, ir.IntType(32))
    if kind.bitwidth == 16:
        bits = builder.shl(bits, ir.Constant(ir.IntType(32), 16))
    return builder.bitcast(bits, ir.FloatType())


def _without_sign(builder: Any, value: Any, kind: Any) -> Any:
    return builder.and_(value, ir.Constant(value.type, (1 << (kind.bitwidth - 1)) - 1))


as_bits = _unary(types.uint32, lambda builder, x, _: builder.bitcast(x, ir.IntType(32)))
as_float = _unary(types.float32, lambda builder, x, _: builder.bitcast(x, ir.FloatType()))
widen = _unary(types.float32, _widened)  # the float32 value of a stored element
magnitude = _unary(lambda kind: kind, _without_sign)  # in the carrier's width; orders like an unsigned integer


def _larger(compare: str) -> Any:
    def typed(context: Any, a: Any, b: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.select(getattr(builder, compare)(">", *args), *args)

        return a(a, a), generate

    return intrinsic(typed)


larger = _larger("icmp_unsigned")
larger_signed = _larger("icmp_signed")  # carriers read as signed: the largest positive float, if there is one


@intrinsic  # type: ignore[untyped-decorator]
def unit_peak(context: Any, pointer: Any) -> Any:
    """The largest magnitude of one unit of 16 stored elements, in the carrier."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        element = ir.IntType(pointer.dtype.bitwidth)
        vector = ir.VectorType(element, UNIT)
        unit = builder.load(builder.bitcast(args[0], vector.as_pointer()), align=pointer.dtype.bitwidth // 8)
        mask = ir.Constant(vector, [(1 << (pointer.dtype.bitwidth - 1)) - 1] * UNIT)
        name = f"llvm.vector.reduce.umax.v{UNIT}i{pointer.dtype.bitwidth}"
        reduce = cgutils.get_or_insert_function(builder.module, ir.FunctionType(element, [vector]), name)
        return builder.call(reduce, [builder.and_(unit, mask)])

    return pointer.dtype(pointer), generate


@intrinsic  # type: ignore[untyped-decorator]
def at(context: Any, pointer: Any, index: Any) -> Any:
    """The pointer ``index`` elements further on."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]], inbounds=True)

    return pointer(pointer, types.int64), generate
