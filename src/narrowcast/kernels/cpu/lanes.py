"""The insides of loops: functions of sixteen numbers at a time, traced straight into LLVM vector instructions.

Numba computes every integer in 64 bits and leaves it to LLVM to find the vectors; both cost speed and compile
time. ``traced`` makes a numba function of a Python function by running it once on ``Lane`` values, whose operators
emit one instruction each: 32-bit unsigned for integers, one rounding for floats, on one number or on sixteen alike.
There are no branches; ``select`` chooses between two computed values, as a vector unit does.

Shift counts must be below 32. Python numbers become constants, and single values spread, to the other operand's type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from narrowcast.kernels.cpu.parameters import UNIT

intrinsic: Callable[[Any], Any] = extending.intrinsic
_WORD, _FLOAT, _DOUBLE = ir.IntType(32), ir.FloatType(), ir.DoubleType()
_SCALARS = {"u8": types.uint8, "u16": types.uint16, "u32": types.uint32, "f32": types.float32}


def _shaped(element: Any, count: int) -> Any:
    return ir.VectorType(element, count) if count else element


class Lane:
    """A value inside a traced function: one number or condition (``count`` 0), or a vector of ``count``."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value
        self.count = value.type.count if isinstance(value.type, ir.VectorType) else 0
        self.element = value.type.element if self.count else value.type

    @property
    def is_float(self) -> bool:
        return self.element in (_FLOAT, _DOUBLE)

    def _make(self, value: Any) -> Lane:
        return Lane(self.builder, value)

    def _spread(self, count: int) -> Any:
        """The LLVM value, repeated ``count`` times if it is a single one."""
        if self.count or not count:
            return self.value
        one = self.builder.insert_element(
            ir.Constant(ir.VectorType(self.element, count), ir.Undefined), self.value, ir.Constant(_WORD, 0)
        )
        mask = ir.Constant(ir.VectorType(_WORD, count), [0] * count)
        return self.builder.shuffle_vector(one, one, mask)

    def _constant(self, number: Any) -> Any:
        if self.count:
            return ir.Constant(ir.VectorType(self.element, self.count), [number] * self.count)
        return ir.Constant(self.element, number)

    def _pair(self, other: Any) -> tuple[Any, Any]:
        if not isinstance(other, Lane):
            return self.value, self._constant(other)
        count = self.count or other.count
        return self._spread(count), other._spread(count)

    def _arithmetic(self, name: str, other: Any, swapped: bool = False) -> Lane:
        operation = getattr(self.builder, f"f{name}" if self.is_float else name)
        pair = self._pair(other)
        return self._make(operation(*(pair[::-1] if swapped else pair)))

    def _logic(self, name: str, other: Any, swapped: bool = False) -> Lane:
        pair = self._pair(other)
        return self._make(getattr(self.builder, name)(*(pair[::-1] if swapped else pair)))

    def _compare(self, sign: str, other: Any) -> Lane:
        compare = self.builder.fcmp_ordered if self.is_float else self.builder.icmp_unsigned
        return self._make(compare(sign, *self._pair(other)))

    def __add__(self, other: Any) -> Lane:
        return self._arithmetic("add", other)

    def __sub__(self, other: Any) -> Lane:
        return self._arithmetic("sub", other)

    def __rsub__(self, other: Any) -> Lane:
        return self._arithmetic("sub", other, swapped=True)

    def __mul__(self, other: Any) -> Lane:
        return self._arithmetic("mul", other)

    def __truediv__(self, other: Any) -> Lane:
        return self._arithmetic("div", other)

    def __neg__(self) -> Lane:
        return self._make(self.builder.fneg(self.value))

    def __and__(self, other: Any) -> Lane:
        return self._logic("and_", other)

    def __or__(self, other: Any) -> Lane:
        return self._logic("or_", other)

    def __xor__(self, other: Any) -> Lane:
        return self._logic("xor", other)

    def __lshift__(self, other: Any) -> Lane:
        return self._logic("shl", other)

    def __rlshift__(self, other: Any) -> Lane:
        return self._logic("shl", other, swapped=True)

    def __rshift__(self, other: Any) -> Lane:
        return self._logic("lshr", other)

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

    def select(self, yes: Any, no: Any) -> Lane:
        """``yes`` where this condition holds, else ``no``; one of them may be a Python number."""
        typed = yes if isinstance(yes, Lane) else no
        count = max(lane.count for lane in (self, yes, no) if isinstance(lane, Lane))
        typed = self._make(typed._spread(count))
        chosen = (v._spread(count) if isinstance(v, Lane) else typed._constant(v) for v in (yes, no))
        return self._make(self.builder.select(self.value if not self.count else self._spread(count), *chosen))

    @property
    def holding(self) -> Any:
        """How many elements a condition holds for, as an LLVM integer of as many bits."""
        return self.builder.ctpop(self.builder.bitcast(self.value, ir.IntType(self.count)))

    @property
    def bits(self) -> Lane:
        """The pattern of a float32."""
        return self._make(self.builder.bitcast(self.value, _shaped(_WORD, self.count)))

    @property
    def float(self) -> Lane:
        """The float32 of a pattern."""
        return self._make(self.builder.bitcast(self.value, _shaped(_FLOAT, self.count)))

    @property
    def double(self) -> Lane:
        """A float32 as float64."""
        return self._make(self.builder.fpext(self.value, _shaped(_DOUBLE, self.count)))

    @property
    def size(self) -> Lane:
        """The magnitude of a float32."""
        return (self.bits & 0x7FFFFFFF).float

    @property
    def number(self) -> Lane:
        """A two's complement integer as float32, rounded to nearest even."""
        return self._make(self.builder.sitofp(self.value, _shaped(_FLOAT, self.count)))

    @property
    def words(self) -> Lane:
        """Narrower unsigned integers in 32 bits."""
        return self._make(self.builder.zext(self.value, _shaped(_WORD, self.count)))

    @property
    def stored(self) -> Lane:
        """The float32 values of stored elements in their carrier: a bf16 is the upper half of a float32."""
        return self.float if self.element == _WORD else (self.words << 16).float

    def narrowed(self, width: int) -> Lane:
        """The low ``width`` bits of integers."""
        if self.element.width <= width:
            return self
        return self._make(self.builder.trunc(self.value, _shaped(ir.IntType(width), self.count)))

    def regrouped(self, width: int) -> Lane:
        """The same bits as integers of ``width`` bits."""
        count = self.count * self.element.width // width
        return self._make(self.builder.bitcast(self.value, ir.VectorType(ir.IntType(width), count)))

    def shuffled(self, order: list[int]) -> Lane:
        """Elements in another order; an index of ``count`` or more gives 0."""
        zeros = ir.Constant(self.value.type, [0] * self.count)
        mask = ir.Constant(ir.VectorType(_WORD, len(order)), order)
        return self._make(self.builder.shuffle_vector(self.value, zeros, mask))

    def greatest(self, signed: bool = False) -> Lane:
        """The largest of a vector of integers."""
        name = f"llvm.vector.reduce.{'s' if signed else 'u'}max.v{self.count}i{self.element.width}"
        kind = ir.FunctionType(self.element, [self.value.type])
        reduce = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self._make(self.builder.call(reduce, [self.value]))


class Pointer:
    """An array inside a traced function."""

    def __init__(self, builder: Any, value: Any, dtype: Any) -> None:
        self.builder, self.value, self.dtype = builder, value, dtype

    def _vector(self, count: int) -> Any:
        return self.builder.bitcast(self.value, ir.VectorType(self.value.type.pointee, count).as_pointer())

    def load(self, count: int = UNIT) -> Lane:
        """Its first ``count`` elements."""
        return Lane(self.builder, self.builder.load(self._vector(count), align=self.dtype.bitwidth // 8))

    def store(self, lane: Lane) -> None:
        """Write a vector to its beginning, integers cut to its width."""
        value = (lane if lane.is_float else lane.narrowed(self.dtype.bitwidth)).value
        self.builder.store(value, self._vector(lane.count), align=self.dtype.bitwidth // 8)


def smaller(a: Lane, b: Any) -> Lane:
    """The smaller of two values; b where they are not ordered."""
    return (a < b).select(a, b)


def greater(a: Lane, b: Any) -> Lane:
    """The larger of two values; b where they are not ordered."""
    return (a > b).select(a, b)


def traced(*letters: str, result: str | None = None) -> Callable[[Callable[..., Lane | None]], Any]:
    """Make a numba function of a function on lanes and pointers.

    Arguments are "p", a pointer of any type, or u8, u16, u32 and f32. ``result`` is one of the latter, "p" for the
    element type of the first pointer, or None.
    """

    def make(function: Callable[..., Lane | None]) -> Any:
        def typed(context: Any, *given: Any) -> Any:
            arguments = [
                g if letter == "p" else _SCALARS[letter] for letter, g in zip(letters, given, strict=True)
            ]
            returns = types.void if result is None else given[0].dtype if result == "p" else _SCALARS[result]

            def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
                lanes = (
                    Pointer(builder, value, kind.dtype) if letter == "p" else Lane(builder, value)
                    for letter, kind, value in zip(letters, arguments, values, strict=True)
                )  # fmt: skip
                lane = function(*lanes)
                if lane is None:
                    return _context.get_dummy_value()
                return lane.value if lane.is_float else lane.narrowed(returns.bitwidth).value

            return returns(*arguments), generate

        parameters = ["context", *(f"argument{i}" for i in range(len(letters)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
        typed.__name__, typed.__doc__ = function.__name__, function.__doc__
        typed.__signature__ = signature  # type: ignore[attr-defined]  # numba counts arguments by it
        return intrinsic(typed)

    return make


@intrinsic
def at(context: Any, pointer: Any, index: Any) -> Any:
    """The pointer ``index`` elements further on."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]], inbounds=True)

    return pointer(pointer, types.int64), generate
