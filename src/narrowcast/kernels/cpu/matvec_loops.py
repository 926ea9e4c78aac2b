"""The matrix-vector kernel: packed rows times one to eight rows of numbers, each packed row read once."""

from __future__ import annotations

from typing import Any

from narrowcast.kernels.cpu import matvec_lanes as lanes
from narrowcast.kernels.cpu.decode import copy_last
from narrowcast.kernels.cpu.lanes import at
from narrowcast.kernels.cpu.loops import loop
from narrowcast.kernels.cpu.matvec_look import BLOCK, REGISTER, SCALE_BITS, Look


def matvec_kernel(look: Look) -> Any:
    """The function that writes columns first:stop of y [m, n] from x [m, k], m at most 8, and codes [n, k].

    Scratch: ``numbers`` float32 [1, 2, 4 or 8 for m, K up to whole blocks]; ``values`` and ``offsets`` of the scales
    and zero points of two rows, float32 [2, room]; ``last`` two blocks of codes; ``sums`` 16 float32; ``end`` a block
    of x.
    """
    bits, has_scales, has_zeros = look.bits, look.scale is not None, look.asymmetric
    scale_bytes = SCALE_BITS[look.scale] // 8 if look.scale is not None else 0
    block_bytes = BLOCK * bits // 8
    arrange, scale_values, zero_values = lanes.arrange(look), lanes.scale_values(look), lanes.zero_values
    one, two, four, eight = (lanes.dot(look, count) for count in (1, 2, 4, 8))

    @loop
    def arrange_rows(
        x: Any, m: int, count: int, width: int, k: int, padded: int, numbers: Any, end: Any
    ) -> None:
        step = (
            count * width * REGISTER
        )  # from a block to the next; registers of other passes lie behind all blocks
        jump = padded // BLOCK * step
        whole = k // BLOCK * BLOCK
        for j in range(count * padded):
            numbers[j] = 0
        for i in range(m):
            base = i * width * REGISTER
            b = base + 1 // width * jump + 1 % width * REGISTER
            c = base + 2 // width * jump + 2 % width * REGISTER
            d = base + 3 // width * jump + 3 % width * REGISTER
            for j in range(0, whole, BLOCK):
                arrange(at(numbers, j // BLOCK * step), at(x, i * k + j), base, b, c, d)
            if whole < k:
                for j in range(BLOCK):
                    end[j] = x[i * k + whole + j] if whole + j < k else 0
                arrange(at(numbers, whole // BLOCK * step), end, base, b, c, d)

    @loop
    def load_row(scales: Any, zeros: Any, tiles: int, r: int, values: Any, offsets: Any) -> None:
        for t in range(0, tiles, REGISTER):
            if has_scales:
                scale_values(at(values, t), at(scales, (r * tiles + t) * scale_bytes))
            if has_zeros:
                zero_values(at(offsets, t), at(zeros, r * tiles + t))

    @loop
    def clear(tiles: int, room: int, values: Any, offsets: Any, last: Any) -> None:
        for i in range(2):
            for t in range(tiles, room):
                values[i * room + t], offsets[i * room + t] = 0, 0
            for j in range(BLOCK):
                last[i * BLOCK + j] = 0

    def matvec(
        x: Any, m: int, k: int, codes: Any, row_bytes: int, n: int, first: int, stop: int, tile_rows: int, tiles: int,
        shift: int, scales: Any, zeros: Any, factor: Any, y: Any, numbers: Any, values: Any, offsets: Any, room: int,
        last: Any, sums: Any, end: Any,
    ) -> None:  # fmt: skip
        blocks, rest = k // BLOCK, k % BLOCK
        every = blocks + (rest > 0)
        padded = every * BLOCK
        count = 1 if m == 1 else 2 if m == 2 else 4 if m <= 4 else 8
        arrange_rows(x, m, count, 4 if count <= 2 else 8 // count, k, padded, numbers, end)
        clear(tiles, room, values, offsets, last)
        height = 1 if count <= 2 else 2
        for i in range(first, stop, height):
            rows = min(height, stop - i)
            row = at(codes, i * row_bytes)
            for r in range(rows):
                load_row(
                    scales, zeros, tiles, (i + r) // tile_rows, at(values, r * room), at(offsets, r * room)
                )
                if rest:
                    copy_last(at(row, r * row_bytes + blocks * block_bytes), rest * bits, at(last, r * BLOCK))
            # Where no second row is left, the first one is taken twice.
            step, apart = (row_bytes, room) if rows == height else (0, 0)
            if count == 1:
                one(sums, row, last, numbers, values, offsets, step, apart, blocks, every, shift)
            elif count == 2:
                two(sums, row, last, numbers, values, offsets, step, apart, blocks, every, shift)
            elif count == 4:
                four(sums, row, last, numbers, values, offsets, step, apart, blocks, every, shift)
            else:
                eight(sums, row, last, numbers, values, offsets, step, apart, blocks, every, shift)
            for r in range(rows):
                for j in range(m):
                    y[j * n + i + r] = sums[r * count + j] * factor[i + r]

    return matvec
