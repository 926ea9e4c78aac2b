"""Scalar functions for the insides of loops, in honest 32-bit arithmetic.

Numba computes every integer in 64 bits, which halves the lanes of a vectorised loop unless each single result is
cast back. ``traced`` makes a numba function of a Python function by running it once on ``Lane`` values, whose
operators emit the LLVM instruction of their own width: unsigned for integers, one rounding for floats. There are
no branches; ``select`` chooses between two computed values, as a vector unit does.

Shift counts must be below 32. Plain Python numbers become constants of the other operand's type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from narrowcast.kernels.cpu.parameters import UNIT

_TYPES = {"u8": types.uint8, "u16": types.uint16, "u32": types.uint32, "f32": types.float32}
_BITS, _FLOAT = ir.IntType(32), ir.FloatType()


class Lane:
    """One value inside a traced function: a float32, an unsigned integer, or a condition."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    @property
    def is_float(self) -> bool:
        return self.value.type == _FLOAT

    def _other(self, other: Any) -> Any:
        return other.value if isinstance(other, Lane) else ir.Constant(self.value.type, other)

    def _binary(self, name: str, other: Any) -> Lane:
        operation = f"f{name}" if self.is_float else name
        return Lane(self.builder, getattr(self.builder, operation)(self.value, self._other(other)))

    def _compare(self, sign: str, other: Any) -> Lane:
        compare = self.builder.fcmp_ordered if self.is_float else self.builder.icmp_unsigned
        return Lane(self.builder, compare(sign, self.value, self._other(other)))

    def __add__(self, other: Any) -> Lane:
        return self._binary("add", other)

    def __sub__(self, other: Any) -> Lane:
        return self._binary("sub", other)

    def __mul__(self, other: Any) -> Lane:
        return self._binary("mul", other)

    def __truediv__(self, other: Any) -> Lane:
        return self._binary("div", other)

    def __neg__(self) -> Lane:
        return Lane(self.builder, self.builder.fneg(self.value))

    def __and__(self, other: Any) -> Lane:
        return Lane(self.builder, self.builder.and_(self.value, self._other(other)))

    def __or__(self, other: Any) -> Lane:
        return Lane(self.builder, self.builder.or_(self.value, self._other(other)))

    def __xor__(self, other: Any) -> Lane:
        return Lane(self.builder, self.builder.xor(self.value, self._other(other)))

    def __lshift__(self, other: Any) -> Lane:
        return Lane(self.builder, self.builder.shl(self.value, self._other(other)))

    def __rshift__(self, other: Any) -> Lane:
        return Lane(self.builder, self.builder.lshr(self.value, self._other(other)))

    def __lt__(self, other: Any) -> Lane:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Lane:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Lane:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Lane:
        return self._compare(">=", other)

    def equals(self, other: Any) -> Lane:
        return self._compare("==", other)

    @property
    def bits(self) -> Lane:
        """The pattern of a float32."""
        return Lane(self.builder, self.builder.bitcast(self.value, _BITS))

    @property
    def float(self) -> Lane:
        """The float32 of a pattern."""
        return Lane(self.builder, self.builder.bitcast(self.value, _FLOAT))

    @property
    def size(self) -> Lane:
        """The magnitude of a float32."""
        return (self.bits & 0x7FFFFFFF).float

    @property
    def number(self) -> Lane:
        """A two's complement integer as float32, rounded to nearest even."""
        return Lane(self.builder, self.builder.sitofp(self.value, _FLOAT))

    @property
    def wide(self) -> Lane:
        """A narrower unsigned integer in 32 bits."""
        return Lane(self.builder, self.builder.zext(self.value, _BITS))

    def constant(self, value: int) -> Lane:
        """A 32-bit constant in the same function."""
        return Lane(self.builder, ir.Constant(_BITS, value))

    def select(self, yes: Any, no: Any) -> Lane:
        """``yes`` where this condition holds, else ``no``; one of them may be a Python number."""
        typed = yes if isinstance(yes, Lane) else no
        return Lane(self.builder, self.builder.select(self.value, typed._other(yes), typed._other(no)))


def smaller(a: Lane, b: Any) -> Lane:
    """The smaller of two values; b where they are not ordered."""
    return (a < b).select(a, b)


def greater(a: Lane, b: Any) -> Lane:
    """The larger of two values; b where they are not ordered."""
    return (a > b).select(a, b)


def traced(result: str, *arguments: str) -> Callable[[Callable[..., Lane]], Any]:
    """Make a numba function of a function on lanes. Types are u8, u16, u32 and f32; a result is truncated to its
    type."""

    def make(function: Callable[..., Lane]) -> Any:
        def typed(context: Any, *given: Any) -> Any:
            def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
                lane = function(*(Lane(builder, value) for value in values))
                narrow = result in ("u8", "u16")
                return builder.trunc(lane.value, ir.IntType(_TYPES[result].bitwidth)) if narrow else lane.value

            return _TYPES[result](*(_TYPES[argument] for argument in arguments)), generate

        typed.__name__, typed.__doc__ = function.__name__, function.__doc__
        parameters = ["context", *(f"argument{i}" for i in range(len(arguments)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
        typed.__signature__ = signature  # type: ignore[attr-defined]  # numba counts arguments by it
        return intrinsic(typed)

    return make


@traced("f32", "u32")
def as_float(bits: Lane) -> Lane:
    """The float32 of a pattern."""
    return bits.float


@intrinsic  # type: ignore[untyped-decorator]
def widen(context: Any, stored: Any) -> Any:
    """The float32 value of a stored element, a pattern in its carrier: a bf16 is the upper half of a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.zext(args[0], _BITS) if stored.bitwidth < 32 else args[0]
        bits = builder.shl(bits, ir.Constant(_BITS, 32 - stored.bitwidth))
        return builder.bitcast(bits, _FLOAT)

    return types.float32(stored), generate


@intrinsic  # type: ignore[untyped-decorator]
def magnitude(context: Any, stored: Any) -> Any:
    """A stored element without its sign; magnitudes order like unsigned integers."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.and_(args[0], ir.Constant(args[0].type, (1 << (stored.bitwidth - 1)) - 1))

    return stored(stored), generate


@intrinsic  # type: ignore[untyped-decorator]
def larger(context: Any, a: Any, b: Any) -> Any:
    """The larger of two stored elements read as unsigned integers."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", *args), *args)

    return a(a, a), generate


@intrinsic  # type: ignore[untyped-decorator]
def larger_signed(context: Any, a: Any, b: Any) -> Any:
    """The larger of two stored elements read as signed integers: a positive one, if there is any."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed(">", *args), *args)

    return a(a, a), generate


@intrinsic  # type: ignore[untyped-decorator]
def unit_peak(context: Any, pointer: Any) -> Any:
    """The largest magnitude of one unit of 16 stored elements."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        width = pointer.dtype.bitwidth
        vector = ir.VectorType(ir.IntType(width), UNIT)
        unit = builder.load(builder.bitcast(args[0], vector.as_pointer()), align=width // 8)
        sizes = builder.and_(unit, ir.Constant(vector, [(1 << (width - 1)) - 1] * UNIT))
        kind = ir.FunctionType(ir.IntType(width), [vector])
        name = f"llvm.vector.reduce.umax.v{UNIT}i{width}"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [sizes])

    return pointer.dtype(pointer), generate


@intrinsic  # type: ignore[untyped-decorator]
def at(context: Any, pointer: Any, index: Any) -> Any:
    """The pointer ``index`` elements further on."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]], inbounds=True)

    return pointer(pointer, types.int64), generate
