"""The inside of the matrix-vector kernel: rows of codes times rows of numbers, a block of 64 columns at a time.

A block is four registers of sixteen float32, and so are the lanes of a sum (``kernels.reference.matvec``):

    bytes     register r holds columns 16r ... 16r + 15
    nibbles   registers hold the even and the odd columns of 32: one shift separates what a byte holds

Numbers are arranged in the same order once a call. An FP8 code becomes a number by way of fp16, whose conversion knows
subnormals and costs two instructions for sixteen. A nibble is looked up in a register of sixteen numbers: the elements
of the format, less the zero point and times the scale of the group.

Left out: products of pairs in bf16 (dot-product instructions flush subnormals and round in a way of their own).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from narrowcast.kernels.cpu import codes as one
from narrowcast.kernels.cpu.lanes import Lane, Pointer, traced
from narrowcast.kernels.cpu.matvec_look import BLOCK, REGISTER, SCALE_BITS, Look
from narrowcast.kernels.cpu.parameters import (
    E4M3_SCALE,
    E8M0_SCALE,
    FP16_SCALE,
    decoding,
)
from narrowcast.numbers.codec import decode
from narrowcast.numbers.formats import E4M3FN, Kind

AHEAD = 4096  # columns: how long before their use codes are asked for, where rows are taken one by one
_WORD = ir.IntType(32)


def _at(pointer: Pointer, index: Any) -> Pointer:
    """The pointer ``index`` elements further on, a Python or an LLVM integer."""
    if isinstance(index, int):
        index = ir.Constant(_WORD, index)
    return Pointer(pointer.builder, pointer.builder.gep(pointer.value, [index], inbounds=True), pointer.dtype)


def _one(pointer: Pointer, index: Any) -> Lane:
    """One element."""
    return Lane(pointer.builder, pointer.builder.load(_at(pointer, index).value))


def column(look: Look, place: int) -> int:
    """The column of a block that stands at a place of its registers."""
    if look.bits == 8:
        return place
    half, parity, i = place // 32, place // REGISTER % 2, place % REGISTER
    return 32 * half + 2 * i + parity


@cache
def arrange(look: Look) -> Any:
    """The function that makes four registers of float32 of a block of stored numbers, ``apart`` from each other."""

    @traced("p", "p", "u32", "u32", "u32", "u32")
    def block(out: Pointer, stored: Pointer, *places: Lane) -> None:
        for r, place in enumerate(places):
            x = _at(stored, r // 2 * 32).load(32).stored
            order = [column(look, REGISTER * r + i) % 32 for i in range(REGISTER)]
            _at(out, place.value).store(x.shuffled(order))

    return block


@cache
def scale_values(look: Look) -> Any:
    """The function that makes float32 of sixteen stored scales."""

    @traced("p", "p")
    def sixteen(values: Pointer, stored: Pointer) -> None:
        width = SCALE_BITS[look.scale] if look.scale is not None else 8
        codes = stored.load(REGISTER * width // 8).regrouped(width)
        if look.scale == E8M0_SCALE:
            values.store(one.e8m0_value(codes.words))
        elif look.scale == E4M3_SCALE:
            values.store(_half(_e4m3(codes)) * 256.0)
        elif look.scale == FP16_SCALE:
            values.store(_half(codes))
        else:
            values.store((codes.words << 16 if width == 16 else codes).float)

    return sixteen


@traced("p", "p")
def zero_values(values: Pointer, stored: Pointer) -> None:
    """Sixteen zero points, unsigned, as float32."""
    values.store(stored.load().words.number)


def _half(patterns: Lane) -> Lane:
    """fp16 patterns as float32."""
    build, count = patterns.builder, patterns.count
    halves = build.bitcast(patterns.value, ir.VectorType(ir.HalfType(), count))
    return Lane(build, build.fpext(halves, ir.VectorType(ir.FloatType(), count)))


def _signed(codes: Lane, width: int) -> Lane:
    """Bytes as signed integers of ``width`` bits."""
    return Lane(codes.builder, codes.builder.sext(codes.value, ir.VectorType(ir.IntType(width), codes.count)))


def _e4m3(codes: Lane) -> Lane:
    """fp16 patterns of 2^-8 times E4M3 codes that are no NaN: the fields lie one place further up, the bias is larger
    by 8."""
    return (_signed(codes, 16) << 7) & 0xBF80


def _bytes(look: Look, codes: Pointer, first: int, count: int) -> list[Lane]:
    """Registers of a block of bytes, unscaled."""
    stored = _at(codes, REGISTER * first).load(REGISTER * count)
    if look.flip:
        stored = stored ^ look.flip
    if look.format is not E4M3FN:
        return _parts((_signed(stored, 32)).number, count)
    return [_half(part) for part in _parts(_e4m3(stored), count)]


def _parts(lane: Lane, count: int) -> list[Lane]:
    """A vector in registers of sixteen."""
    return [lane.shuffled(list(range(REGISTER * i, REGISTER * (i + 1)))) for i in range(count)]


def _scaled(value: Lane, zero: Lane | None, scale: Lane | None) -> Lane:
    less = value if zero is None else value - zero
    return less if scale is None else less * scale


def _value(look: Look, index: Lane) -> Lane:
    """The elements of codes in the low four bits of 32."""
    if look.table:
        return _looked_up(_table(look, index), index)
    code = (index & 15) ^ look.flip
    parameters = decoding(look.format)
    if look.format.kind is Kind.INT:
        return one.decode_integer(code, *parameters[:3])
    return one.decode_float(code, *parameters)


def _table(look: Look, like: Lane) -> Lane:
    """The elements of the sixteen codes as they are stored."""
    values = decode(np.arange(16, dtype=np.uint8) ^ np.uint8(look.flip), look.format)
    kind = ir.VectorType(ir.FloatType(), REGISTER)
    return Lane(like.builder, ir.Constant(kind, [float(value) for value in values]))


def _looked_up(table: Lane, index: Lane) -> Lane:
    """Sixteen entries of a table of sixteen, by the low four bits of an index."""
    build = table.builder
    kind = ir.FunctionType(table.value.type, [table.value.type, index.value.type])
    permute = cgutils.get_or_insert_function(build.module, kind, "llvm.x86.avx512.permvar.sf.512")
    return Lane(build, build.call(permute, [table.value, index.value]))


def _joined(low: Lane, high: Lane) -> Lane:
    """Eight times one number, eight times another."""
    build = low.builder
    pair = ir.Constant(ir.VectorType(ir.FloatType(), 2), ir.Undefined)
    for i, lane in enumerate((low, high)):
        pair = build.insert_element(pair, lane.value, ir.Constant(_WORD, i))
    return Lane(build, pair).shuffled([0] * 8 + [1] * 8)


def _fused(a: Lane, b: Lane, c: Lane) -> Lane:
    """a · b + c, rounded once."""
    kind = ir.FunctionType(a.value.type, [a.value.type] * 3)
    fma = cgutils.get_or_insert_function(a.builder.module, kind, f"llvm.fma.v{a.count}f32")
    return Lane(a.builder, a.builder.call(fma, [a.value, b.value, c.value]))


def _halves(lane: Lane) -> Lane:
    """The sum of a vector, halves added until one number is left."""
    while lane.count > 1:
        half = lane.count // 2
        lane = lane.shuffled(list(range(half))) + lane.shuffled(list(range(half, lane.count)))
    return Lane(lane.builder, lane.builder.extract_element(lane.value, ir.Constant(_WORD, 0)))


def _total(look: Look, lanes: list[Lane]) -> Lane:
    """The sum of 64 lanes in the order of the definition: halves 32 apart, then 16, 8, 4, 2, 1. Even and odd columns
    meet in the last step only."""
    first, second = lanes[0] + lanes[2], lanes[1] + lanes[3]
    return _halves(first) + _halves(second) if look.bits == 4 else _halves(first + second)


# How many rows of codes are taken together, and how many registers of a block in one pass, by how many rows of numbers
# there are: sums must stay in registers, and numbers that no longer fit the first cache should serve two rows.
SHAPES = {1: (1, 4), 2: (1, 4), 4: (2, 2), 8: (2, 1)}


@cache
def dot(look: Look, count: int) -> Any:
    """The function that multiplies a few rows of codes, ``row_bytes`` apart, with ``count`` rows of numbers.

    Numbers are arranged as they are taken: [passes, blocks, count, registers of a pass, 16].

    ``blocks`` whole blocks are taken from the rows, and then one from ``last`` if ``every`` says so. Values of scales
    and zero points lie ``apart`` for each row; a block's are found after a ``shift``. sums: [rows, count].
    """
    rows, width = SHAPES[count]

    @traced("p", "p", "p", "p", "p", "p", *("u32",) * 5)
    def product(
        sums: Pointer, codes: Pointer, last: Pointer, x: Pointer, scales: Pointer, zeros: Pointer,
        row_bytes: Lane, apart: Lane, blocks: Lane, every: Lane, shift: Lane,
    ) -> None:  # fmt: skip
        build = sums.builder
        kind = ir.VectorType(ir.FloatType(), REGISTER)
        keep = [
            [[cgutils.alloca_once(build, kind) for _ in range(4)] for _ in range(count)] for _ in range(rows)
        ]
        for place in (place for row in keep for registers in row for place in registers):
            build.store(ir.Constant(kind, [0.0] * REGISTER), place)
        starts = [
            (_at(codes, (row_bytes * i).value), _at(last, BLOCK * i), _at(scales, (apart * i).value),
             _at(zeros, (apart * i).value)) for i in range(rows)
        ]  # fmt: skip
        for begin in range(0, 4, width):
            registers = range(begin, begin + width)
            with cgutils.for_range(build, every.value) as loop:
                block = Lane(build, loop.index)
                numbers = _at(x, ((every * begin + block * width) * (count * REGISTER)).value)
                whole = build.icmp_unsigned("<", loop.index, blocks.value)
                for i, (row, end, values, offsets) in enumerate(starts):
                    inside = _at(row, (block * (BLOCK * look.bits // 8)).value)
                    here = Pointer(build, build.select(whole, inside.value, end.value), codes.dtype)
                    if not begin:
                        ahead = row_bytes * rows if rows > 1 else AHEAD * look.bits // 8
                        _prefetch(_at(here, ahead.value if isinstance(ahead, Lane) else ahead))
                    weight = _weights(look, here, values, offsets, block >> shift, registers)
                    for m in range(count):
                        for r in registers:
                            total = Lane(build, build.load(keep[i][m][r]))
                            number = _at(numbers, (m * width + r - begin) * REGISTER).load()
                            more = _fused(number, weight[r], total)
                            build.store(more.value, keep[i][m][r])
        for i in range(rows):
            for m in range(count):
                found = _total(look, [Lane(build, build.load(place)) for place in keep[i][m]])
                build.store((found + 0.0).value, _at(sums, i * count + m).value)

    return product


def _weights(
    look: Look, codes: Pointer, scales: Pointer, zeros: Pointer, tile: Lane, registers: range
) -> dict[int, Lane]:
    """Some registers of a block of codes, scaled."""

    def of_block(pointer: Pointer, column: int) -> Lane:
        return _one(pointer, (tile * look.per_block + column // look.group).value)

    def scale(column: int) -> Lane | None:
        return of_block(scales, column) if look.scale is not None else None

    found: dict[int, Lane] = {}
    if look.bits == 8:
        together = min(2, len(registers))
        for first in registers[::together]:
            values = _bytes(look, codes, first, together)
            found |= {
                first + i: _scaled(v, None, scale(REGISTER * (first + i))) for i, v in enumerate(values)
            }
        return found
    for half in sorted({r // 2 for r in registers}):
        pairs = _at(codes, REGISTER * half).load().words
        zero = of_block(zeros, 32 * half) if look.asymmetric else None
        own = scale(32 * half)
        if own is not None and look.group == REGISTER:
            own = _joined(own, of_block(scales, 32 * half + REGISTER))
        table = _scaled(_table(look, pairs), zero, own) if look.table and not (own and own.count) else None
        for r in registers:
            if r // 2 == half:
                index = pairs >> 4 if r % 2 else pairs
                value = (
                    _looked_up(table, index) if table is not None else _scaled(_value(look, index), zero, own)
                )
                found[r] = value
    return found


def _prefetch(codes: Pointer) -> None:
    """Ask for codes that are needed soon; hardware stops at the end of a page."""
    build = codes.builder
    kind = ir.FunctionType(ir.VoidType(), [codes.value.type, _WORD, _WORD, _WORD])
    ask = cgutils.get_or_insert_function(build.module, kind, "llvm.prefetch.p0i8")
    build.call(ask, [codes.value, _WORD(0), _WORD(3), _WORD(1)])
