"""GGUF as a container: the matrices of a GGUF file as codes and scales, the way every other container shows its own.

A block of GGUF holds codes and scales side by side, so its file has no tensor for either. An open GGUF file shows
them apart (model/gguf_checkpoint), and this row reads what is shown:

    .weight            codes: int8 [N, K], or nibbles packed low first [N, K / 2]
    .weight_scale      one for each block of 32 (NVFP4: 16): F16, E8M0 or E4M3
    .weight_scale_2    NVFP4's outer scale, 1 where the file has none

Types that are no scheme (Q4_1, K-quants and the rest) are shown as the numbers they decode to. Writing is a job of
its own (jobs/gguf): one file of its own form, with the vocabulary inside.
"""

from __future__ import annotations

from narrowcast.containers.container import Container
from narrowcast.containers.contents import Contents, Source, Stored
from narrowcast.containers.gguf_blocks import BLOCKS, BlockType
from narrowcast.containers.spelling import Spelling, code_part, scale_part, value_part
from narrowcast.store.dtypes import DTYPES
from narrowcast.store.gguf import is_gguf
from narrowcast.tensors.packing import BYTES, packing
from narrowcast.tensors.presets import LinearScheme

NAME = "gguf"
CODES, SCALES, OUTER = ".weight", ".weight_scale", ".weight_scale_2"


def spell(row: BlockType) -> Spelling:
    """How a matrix of this type is shown."""
    bits = row.scheme.element.bits
    how = BYTES if bits == 8 else packing(bits)
    scale = next(name for name, dtype in DTYPES.items() if dtype.format == row.scheme.inner.format.name)
    parts = [code_part(CODES, "I8" if bits == 8 else "U8", how), scale_part(SCALES, scale, row.scheme)]
    if row.scheme.outer is not None:
        parts.append(value_part(OUTER, "outer"))
    return Spelling(NAME, row.type.name, row.scheme, how, tuple(parts), (1, row.type.block))


SPELLINGS = {name: spell(row) for name, row in BLOCKS.items()}


def claims(source: Source) -> bool:
    """Whether the checkpoint is an open GGUF file, whose config no config.json can say."""
    return source.config.get("quant_method") == NAME and is_gguf(source.checkpoint.root)


def read(source: Source) -> Contents:
    """Every matrix whose codes are shown."""
    found = []
    for name, kind in source.config["types"].items():
        how = SPELLINGS[kind]
        n = source.entries[name + CODES].shape[0]
        k = source.entries[name + CODES].shape[1] * 8 // how.scheme.element.bits
        found.append(Stored(name, (n, k), how, LinearScheme(how.scheme)))
    notes = []
    if "Q4_0" in source.config["types"].values():
        notes.append(
            "scales of Q4_0 carry signs, which are kept: values are exact, but not every kernel expects them"
        )
    return Contents(NAME, tuple(found), notes=tuple(notes))


CONTAINER = Container(name=NAME, title="GGUF", claims=claims, read=read)
