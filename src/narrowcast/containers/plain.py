"""Plain floats: a matrix as BF16, FP16 or FP32, under the name that the model's own definition gives it.

    weight = round(decode(codes) · Π scale)       one rounding, from the exact fp32 product

A cast to FP16 has a smaller range than BF16, so every value that overflows or underflows is counted by the job and
refused unless it is told to saturate.
"""

from __future__ import annotations

import numpy as np

from narrowcast.containers.container import Container, Document, Layers
from narrowcast.containers.contents import Contents, Source
from narrowcast.containers.spelling import Array, Part, Spelling
from narrowcast.errors import UsageError
from narrowcast.numbers.formats import Format
from narrowcast.tensors.packing import Packing

NAME = "plain"
_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def spell(
    out: Format, suffix: str = ".weight", orientation: str = "out_in", shape: tuple[int, ...] | None = None
) -> Spelling:
    """A float matrix [N, K] of the dtype, stored [K, N] where the model's family has it in_out; ``shape`` is
    that of a tensor
    which is no matrix."""
    dtype = _DTYPES.get(out.name)
    if dtype is None:
        raise UsageError("plain checkpoints hold floats", got=out.name, wanted=", ".join(_DTYPES))
    across = orientation == "in_out"

    def turn(chunk: Array) -> Array:
        values = chunk.view(f"<u{out.bits // 8}")
        return np.ascontiguousarray(values.T) if across else values

    part = Part(
        suffix, "codes", dtype,
        lambda n, k: shape if shape is not None else ((k, n) if across else (n, k)), across=across, encode=turn,
        decode=lambda stored, count: np.ascontiguousarray(stored.T) if across else stored,
    )  # fmt: skip
    return Spelling(NAME, out.name, None, Packing(out.name, out.bits), (part,))


def document(layers: Layers) -> Document:
    """A plain model has no quantization_config."""
    return Document(None)


def read(source: Source) -> Contents:
    """No matrix of a plain checkpoint is quantized."""
    return Contents(NAME)


CONTAINER = Container(
    name=NAME,
    title="plain BF16, FP16 or FP32",
    claims=lambda source: not source.config,
    read=read,
    document=document,
)
