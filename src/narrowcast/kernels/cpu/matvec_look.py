"""What a matrix-vector kernel is made for. Nothing here needs numba, so that a stored kernel is found without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import llvmlite.binding as llvm

from narrowcast.kernels.cpu.parameters import (
    BF16_SCALE,
    E4M3_SCALE,
    E8M0_SCALE,
    FP16_SCALE,
    FP32_SCALE,
    SCALE_KINDS,
)
from narrowcast.numbers.formats import E4M3FN, INT8, Format, Kind, formats
from narrowcast.tensors.packing import Packing
from narrowcast.tensors.schemes import Scheme

BLOCK, REGISTER = 64, 16
SCALE_BITS = {FP32_SCALE: 32, BF16_SCALE: 16, FP16_SCALE: 16, E4M3_SCALE: 8, E8M0_SCALE: 8}


@cache
def features() -> frozenset[str]:
    """What this processor can do."""
    return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


def has_tables() -> bool:
    """Whether a register of sixteen numbers can be looked up in."""
    return "avx512f" in features()


@dataclass(frozen=True)
class Look:
    """What a kernel is made for: the element's name and bits, what its codes are XORed with; the format of the scales
    of groups (None: a row has one scale, its factor); columns that share one, 16, 32 or 64 (which stands for its
    multiples too); whether there are zero points, and tables to look nibbles up in."""

    element: str
    bits: int
    flip: int = 0
    scale: int | None = None
    group: int = BLOCK
    asymmetric: bool = False
    table: bool = field(default_factory=has_tables)

    @property
    def format(self) -> Format:
        return formats[self.element]

    @property
    def per_block(self) -> int:
        """Scales of a block."""
        return BLOCK // self.group

    def __str__(self) -> str:
        scale = "row" if self.scale is None else f"scale{self.scale}_{self.group}"
        said = {"flip": self.flip, "zeros": self.asymmetric, "untabled": not self.table}
        return "_".join([self.element, scale, *(word for word, holds in said.items() if holds)])


def look_of(scheme: Scheme, packing: Packing) -> Look | str:
    """The kernel for a weight of this scheme and packing, or the reason why there is none."""
    fmt, bits, cols = scheme.element, packing.bits, scheme.inner.tile[1]
    if not {"fma", "f16c"} <= features():
        return "this processor has no fused multiply-add, or no fp16"
    if bits != fmt.bits or not (bits == 4 or fmt in (E4M3FN, INT8)):
        return f"no compiled product reads {fmt.name} in {bits} bits"
    if fmt.kind is Kind.TABLE and not has_tables():
        return f"{fmt.name} is a table of values, and this processor cannot look up sixteen at once"
    if scheme.zero is not None and (scheme.zero.kind is not Kind.INT or scheme.zero.signed):
        return "zero points are not unsigned integers"
    if not cols:
        return Look(fmt.name, bits, packing.flip, asymmetric=scheme.zero is not None)
    if scheme.inner.format not in SCALE_KINDS:
        return f"no compiled product reads {scheme.inner.format.name} scales"
    blocks = cols // BLOCK
    if cols not in (16, 32) and (cols % BLOCK or blocks & (blocks - 1)):
        return f"groups of {cols} columns are not 16, 32, or 64 times a power of two"
    if scheme.zero is not None and (bits == 8 or cols == 16):
        return "zero points of bytes, or of groups of 16"
    kind = SCALE_KINDS[scheme.inner.format]
    return Look(fmt.name, bits, packing.flip, kind, min(cols, BLOCK), scheme.zero is not None)
