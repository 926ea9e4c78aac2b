"""The compiled matrix-vector product, see ``kernels.reference.matvec``: same bits, codes read where they lie.

A ``Matvec`` holds a weight's packed codes as they came, its scales and zero points as stored (copied once, with room
for a register behind them), and one float32 factor a row. A call allocates nothing as large as the weight.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.kernels import Rows
from narrowcast.kernels.cpu.compile import Kernel, kernel
from narrowcast.kernels.cpu.matvec_look import BLOCK, REGISTER, Look, look_of
from narrowcast.kernels.reference.matvec import factors
from narrowcast.numbers.formats import E4M3FN
from narrowcast.tensors.packing import Packing
from narrowcast.tensors.scaling import load_scale
from narrowcast.tensors.schemes import Scheme, tile_grid

CARRIERS = {np.dtype(np.float32): "uint32", np.dtype(np.uint16): "uint16"}
MOST = 8  # rows of numbers at a time
_local = threading.local()


class Matvec:
    """A weight [N, K] to multiply with: ``product(x)`` for x [M, K]."""

    def __init__(
        self, rows: Rows, scheme: Scheme, packing: Packing, k: int, outer: float | None, look: Look
    ) -> None:
        self.n, self.k = len(rows.packed), k
        self._kernels: dict[str, Kernel] = {}
        self.look, self.codes = look, np.ascontiguousarray(rows.packed)
        grid = tile_grid((self.n, k), scheme.inner.tile)
        self.scales = _with_room(rows.scales if look.scale is not None else None)
        self.zeros = _with_room(rows.zero)
        self.factor = np.ascontiguousarray(factors(rows, scheme, self.n, outer))
        height, cols = scheme.inner.tile
        shift = (cols // BLOCK).bit_length() - 1 if cols >= BLOCK else 0 if cols else 31
        self._width = -(-k // BLOCK) * BLOCK
        self._before = (self.codes.ctypes.data, self.codes.shape[1], self.n)
        self._after = (
            height or self.n, grid[1], shift, self.scales.ctypes.data, self.zeros.ctypes.data, self.factor.ctypes.data,
        )  # fmt: skip
        # Tiles in whole blocks, filled a register at a time.
        self._room = max(grid[1], self._width // REGISTER) + REGISTER

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of the weight."""
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes + self.factor.nbytes

    def product(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """x [M, K], float32 or bf16 as uint16, times the weight: float32 [M, N], on this thread."""
        if x.ndim != 2 or x.shape[1] != self.k or x.dtype not in CARRIERS:
            raise UsageError(
                "this does not multiply", got=f"{x.dtype} {x.shape}", wanted=f"[M, {self.k}] in fp32 or bf16"
            )
        x = np.ascontiguousarray(x)
        y = np.empty((len(x), self.n), np.float32)
        carrier, size = CARRIERS[x.dtype], x.dtype.itemsize * self.k
        for i in range(0, len(x), MOST):
            m = min(MOST, len(x) - i)
            self.into(x.ctypes.data + i * size, carrier, m, y.ctypes.data + 4 * i * self.n, 0, self.n)
        return y

    def into(self, x: int, carrier: str, m: int, y: int, first: int, stop: int) -> None:
        """Columns first:stop of y [m, N] float32 from x [m, K], C-contiguous at these addresses, m at most MOST."""
        numbers = _scratch(MOST * self._width + 4 * self._room + 3 * BLOCK)
        values = numbers + 4 * MOST * self._width
        offsets = values + 8 * self._room
        last = offsets + 8 * self._room
        run = self._kernels.get(carrier)
        if run is None:
            run = self._kernels[carrier] = kernel("matvec", carrier, look=self.look)
        run(
            x, m, self.k, *self._before, first, stop, *self._after, y, numbers, values, offsets, self._room, last,
            last + 2 * BLOCK, last + 4 * BLOCK,
        )  # fmt: skip


def prepare(rows: Rows, scheme: Scheme, packing: Packing, k: int, outer: float | None) -> Matvec | str:
    """The weight to multiply with, or the reason why only the reference can."""
    look = look_of(scheme, packing)
    if isinstance(look, str):
        return look
    grid = tile_grid((len(rows.packed), k), scheme.inner.tile)
    for name, part in (("scales", rows.scales), ("zero points", rows.zero)):
        if part is not None and part.shape != grid:
            raise UsageError(f"{name} do not fit the codes", where=scheme.name, got=part.shape, wanted=grid)
    if rows.packed.shape[1] != packing.row_bytes(k):
        raise UsageError(
            "packed rows have the wrong length", where=scheme.name, got=rows.packed.shape, wanted=k
        )
    if not np.isfinite(load_scale(rows.scales, scheme.inner.format)).all():
        return "a scale is not finite"
    if look.format is E4M3FN and any(((row & 0x7F) == 0x7F).any() for row in rows.packed):
        return "a code is NaN"
    return Matvec(rows, scheme, packing, k, outer, look)


def _with_room(stored: NDArray[Any] | None) -> NDArray[np.uint8]:
    """A copy as bytes, with zeros for a register behind it."""
    if stored is None:
        return np.zeros(0, np.uint8)
    flat = np.ascontiguousarray(stored).view(np.uint8).ravel()
    return np.concatenate([flat, np.zeros(REGISTER * stored.itemsize, np.uint8)])


def _scratch(count: int) -> int:
    """The address of ``count`` float32 of this thread, zeroed once."""
    if getattr(_local, "size", 0) < count:
        _local.room = np.zeros(count + count // 2, np.float32)
        _local.size, _local.address = _local.room.size, _local.room.ctypes.data
    return int(_local.address)
