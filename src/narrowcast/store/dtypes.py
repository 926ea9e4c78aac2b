"""The element types of a safetensors file: one row each, and the byte arithmetic that follows from the bits.

A file knows a dtype by name (``BF16``, ``F8_E4M3``, ``F4``). Three other worlds know the same bits by other
names, and this table is the only place where they meet: the number format that says what a code means
(``bf16``, ``e4m3fn``, ``e2m1``), the numpy dtype that carries one stored element, and the torch dtype.

    bytes(dtype, shape) = bits(dtype) · ∏ shape / 8

Sizes count in bits because F4 and F6 elements are smaller than a byte; a tensor whose bits do not fill whole
bytes cannot be stored. Numpy has no bf16 and no fp8, so those travel as bit patterns in uint16 and uint8;
sub-byte dtypes travel as packed bytes, and what lies where inside such a byte is left to the packing tables.

The rows and their order are those of the safetensors library, 0.8 (``Dtype`` in ``tensor.rs``). Order is
rank: its writer puts higher ranks first in the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from narrowcast.errors import UsageError


@dataclass(frozen=True, slots=True)
class DType:
    """One safetensors dtype.

    ``carrier`` is the numpy dtype of a stored element (of a packed byte where ``bits < 8``); ``format`` names
    the number format, or is None for integers wider than 8 bits, booleans and complex numbers; ``torch`` is
    the attribute of the torch module, or None where torch has no such dtype. ``rank`` orders dtypes in a
    file.
    """

    name: str
    bits: int
    carrier: np.dtype[np.generic]
    format: str | None
    torch: str | None
    rank: int

    @property
    def packed(self) -> bool:
        """Whether several elements share a byte, so that an array of this dtype is 1-D bytes."""
        return self.bits < 8


_ROWS: tuple[tuple[str, int, str, str | None, str | None], ...] = (
    ("BOOL", 8, "bool", None, "bool"),
    ("F4", 4, "u1", "e2m1", "float4_e2m1fn_x2"),
    ("F6_E2M3", 6, "u1", "e2m3", None),
    ("F6_E3M2", 6, "u1", "e3m2", None),
    ("U8", 8, "u1", "uint8", "uint8"),
    ("I8", 8, "i1", "int8", "int8"),
    ("F8_E5M2", 8, "u1", "e5m2", "float8_e5m2"),
    ("F8_E4M3", 8, "u1", "e4m3fn", "float8_e4m3fn"),
    ("F8_E8M0", 8, "u1", "e8m0", "float8_e8m0fnu"),
    ("F8_E4M3FNUZ", 8, "u1", "e4m3fnuz", "float8_e4m3fnuz"),
    ("F8_E5M2FNUZ", 8, "u1", "e5m2fnuz", "float8_e5m2fnuz"),
    ("I16", 16, "<i2", None, "int16"),
    ("U16", 16, "<u2", None, "uint16"),
    ("F16", 16, "<f2", "fp16", "float16"),
    ("BF16", 16, "<u2", "bf16", "bfloat16"),
    ("I32", 32, "<i4", None, "int32"),
    ("U32", 32, "<u4", None, "uint32"),
    ("F32", 32, "<f4", "fp32", "float32"),
    ("C64", 64, "<c8", None, "complex64"),
    ("F64", 64, "<f8", "fp64", "float64"),
    ("I64", 64, "<i8", None, "int64"),
    ("U64", 64, "<u8", None, "uint64"),
)

DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        name: DType(name, bits, np.dtype(carrier), format_name, torch_name, rank)
        for rank, (name, bits, carrier, format_name, torch_name) in enumerate(_ROWS)
    }
)


def nbytes(dtype: DType, shape: Sequence[int]) -> int:
    """Bytes that a tensor of this dtype and logical shape takes in a file.

    Raises UsageError when the elements do not fill whole bytes (three F4 elements are 12 bits).
    """
    bits = dtype.bits * math.prod(shape)
    if bits % 8:
        raise UsageError(
            f"a {dtype.name} tensor of shape {list(shape)} does not fill whole bytes",
            got=f"{bits} bits",
            wanted="a multiple of 8 bits",
            remedy=f"pad it to a multiple of {8 // math.gcd(8, dtype.bits)} elements",
        )
    return bits // 8
