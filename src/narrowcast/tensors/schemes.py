"""Schemes as rows: an element format plus the scale levels above it, inner to outer.

    x[i, j] ≈ (decode(code[i, j]) - zero[tile]) · Π_level scale_level[tile of (i, j)]

A tile is ``(rows, cols)`` of a matrix [N, K], 0 meaning the whole axis: (0, 0) per tensor, (1, 0) per output
channel of a weight or per token of an activation, (1, 128) per group, (128, 128) per block, (1, 32) MX,
(1, 16) NVFP4. Edge tiles may be partial; a tile never crosses a row of another tile, and leading axes
(experts) have tiles of their own. NVFP4 is nothing special: E2M1 under [E4M3 on (1, 16), FP32 on (0, 0)].

How engines compute differs in the last bit, and bits are compared, so the arithmetic is a field of the scheme.

Left out: scales of scales deeper than two levels (no engine loads them) and block floating point with a
shared exponent but no per-element exponent other than MXINT8, which is the integer case.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from narrowcast.errors import UsageError
from narrowcast.numbers.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3FN,
    E5M2,
    E8M0,
    FP32,
    INT4,
    INT8,
    MXINT8,
    NF4,
    UINT4,
    Format,
    Kind,
    formats,
)

E4M3FNUZ = formats["e4m3fnuz"]

Tile = tuple[int, int]
Shape = tuple[int, ...]


def tile_grid(shape: Shape, tile: Tile) -> Shape:
    """Number of tiles along each axis of ``shape`` [..., N, K]: leading axes one each, N and K rounded up."""
    *leading, n, k = shape
    rows, cols = tile
    return (*leading, -(-n // rows) if rows else 1, -(-k // cols) if cols else 1)


@dataclass(frozen=True)
class Scale:
    """One scale level: its stored format, its tile, the rule from amax to stored scale, and the span.

    ``span`` is the magnitude that a tile's amax is mapped onto; None means the element's largest value.
    ``divides`` marks a level whose stored value divides when decoding (compressed-tensors' global scale).
    ``floor`` is the least scale that is stored, also for an all-zero tile (0: as ``scaling`` says).
    """

    format: Format
    tile: Tile
    rule: str
    span: float | None = None
    divides: bool = False
    floor: float = 0.0

    def count(self, shape: Shape) -> int:
        """Number of scales of a tensor of this shape."""
        total = 1
        for size in tile_grid(shape, self.tile):
            total *= size
        return total


@dataclass(frozen=True)
class Arithmetic:
    """Where the bits of a quantizer come from.

    ``operation``: x / s, or x · (1 / s), or x · (span / amax) ("inverse"). ``precision``: fp32; fp64 (an oracle); or
    "source", where every intermediate is rounded to the source's dtype, as libraries do that never leave bf16.
    ``order``: with a zero point, "clamp_first" rounds clamp(x / s + z), "round_first" clamps round(x / s) + z.
    ``zero_tile``: the scale of an all-zero tile, 1.0 or the epsilon of the scale's format ("eps"; byte 0 for E8M0), or
    0, which a scale may round to as well and all of its codes then are ("zero").
    """

    operation: Literal["divide", "reciprocal", "inverse"] = "divide"
    precision: Literal["fp32", "fp64", "source"] = "fp32"
    order: Literal["clamp_first", "round_first"] = "clamp_first"
    zero_tile: Literal["one", "eps", "zero"] = "one"


OURS = Arithmetic()
ARITHMETICS: Mapping[str, Arithmetic] = {
    "narrowcast": OURS,
    "reciprocal": Arithmetic("reciprocal"),
    "fp64": Arithmetic(precision="fp64"),
    "compressed-tensors": Arithmetic(precision="source", zero_tile="eps"),
}


@dataclass(frozen=True)
class Scheme:
    """How ONE tensor is quantized. ``scales`` run inner to outer; ``zero`` is the zero point's format.

    ``load`` says who reads a weight quantized so; ``source`` where the scheme is defined.
    """

    name: str
    element: Format
    scales: tuple[Scale, ...]
    zero: Format | None = None
    arithmetic: Arithmetic = OURS
    loads: str = ""
    source: str = ""
    aliases: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.element.name))  # as of formats

    @property
    def inner(self) -> Scale:
        return self.scales[0]

    @property
    def outer(self) -> Scale | None:
        """The per-tensor level, shared by fused siblings, if there is one."""
        last = self.scales[-1]
        return last if last.tile == (0, 0) else None

    @property
    def group(self) -> int:
        """Elements of a row that share the innermost scale; 0 when a whole row does."""
        return self.inner.tile[1]

    @property
    def span(self) -> float:
        """The magnitude that a tile's amax is mapped onto by the innermost level."""
        return self.inner.span or self.element.max

    def bits_per_weight(self, shape: Shape) -> float:
        """Stored bits per element, scales and zero points included."""
        elements = 1
        for size in shape:
            elements *= size
        bits = self.element.bits * elements
        bits += sum(scale.format.bits * scale.count(shape) for scale in self.scales)
        if self.zero is not None:
            bits += self.zero.bits * self.inner.count(shape)
        return bits / elements

    def with_scale_format(self, fmt: Format) -> Scheme:
        """The same scheme with another stored format of its innermost scale (the source's 16-bit dtype)."""
        return replace(self, scales=(replace(self.inner, format=fmt), *self.scales[1:]))

    def with_rule(self, rule: str) -> Scheme:
        """The same scheme under another scale rule, applied to the innermost level."""
        return replace(self, scales=(replace(self.inner, rule=rule), *self.scales[1:]))

    def with_arithmetic(self, arithmetic: Arithmetic) -> Scheme:
        """The same scheme computed another way."""
        return replace(self, arithmetic=arithmetic)


def group_shape(tile: Tile, weight: bool) -> tuple[int, int]:
    """A tile in vLLM's GroupShape notation, where -1 is a whole axis and a weight is seen as [K, N]."""
    rows, cols = tile
    if weight and cols == 0 and rows == 1:
        return (-1, 1)
    return (rows or -1, cols or -1)


def parse_tile(text: str, weight: bool = True) -> Tile:
    """A tile from ``1x128`` or from a GroupShape such as ``(-1,1)``."""
    parts = text.strip("() ").replace("x", ",").split(",")
    try:
        rows, cols = (int(part) for part in parts)
    except ValueError:
        raise UsageError(
            "not a tile", got=text, wanted="ROWSxCOLS with 0 for a whole axis, or (-1,1)"
        ) from None
    if weight and (rows, cols) == (-1, 1):
        return (1, 0)
    return (max(rows, 0), max(cols, 0))


_CT = "compressed-tensors presets"
_MX = "OCP Microscaling Formats 1.0"
_FP8_LOADERS = "vLLM, SGLang, TensorRT-LLM, transformers"


def _fp8_rows() -> Iterator[Scheme]:
    """E4M3 under fp32 scales at every granularity, under UE8M0 for DeepGEMM-style kernels, and AMD's E4M3FNUZ."""
    tiles: dict[str, Tile] = {
        "tensor": (0, 0), "channel": (1, 0), "token": (1, 0), "group128": (1, 128), "block128": (128, 128),
    }  # fmt: skip
    for word, tile in tiles.items():
        yield Scheme(f"fp8_{word}", E4M3FN, (Scale(FP32, tile, "amax"),), None, OURS, _FP8_LOADERS, _CT)
    for word in ("group128", "block128"):
        scale = Scale(E8M0, tiles[word], "rceil")
        yield Scheme(
            f"fp8_{word}_ue8m0", E4M3FN, (scale,), None, OURS, "vLLM and SGLang on DeepGEMM", "DeepSeek V3.1"
        )
    for word in ("tensor", "channel", "block128"):
        scale = Scale(FP32, tiles[word], "amax")
        loads = "no engine's weight loader; MI300 computes in it, and engines convert E4M3FN while loading"
        yield Scheme(
            f"fp8_{word}_fnuz", E4M3FNUZ, (scale,), None, OURS, loads, "arXiv 2206.02915; AMD CDNA 3 ISA"
        )


def _int_rows() -> Iterator[Scheme]:
    """Symmetric integers on the full range (divisor 7.5 and 127.5), and asymmetric uint4 with zero points."""
    loads = "vLLM, SGLang, transformers"
    for word, tile in {"tensor": (0, 0), "channel": (1, 0), "token": (1, 0)}.items():
        yield Scheme(f"int8_{word}", INT8, (Scale(FP32, tile, "amax", 127.5),), None, OURS, loads, _CT)
    for group in (32, 64, 128):
        yield Scheme(
            f"int8_g{group}", INT8, (Scale(BF16, (1, group), "amax", 127.5),), None, OURS, loads, _CT
        )
        yield Scheme(f"int4_g{group}", INT4, (Scale(BF16, (1, group), "amax", 7.5),), None, OURS, loads, _CT)
        yield Scheme(
            f"uint4_g{group}", UINT4, (Scale(BF16, (1, group), "minmax", 15.0),), UINT4, OURS, loads, _CT
        )
    yield Scheme("int4_channel", INT4, (Scale(BF16, (1, 0), "amax", 7.5),), None, OURS, loads, _CT)
    yield Scheme("uint4_channel", UINT4, (Scale(BF16, (1, 0), "minmax", 15.0),), UINT4, OURS, loads, _CT)


def _mx_rows() -> Iterator[Scheme]:
    """One E8M0 per 32 elements; the rule says which power of two (fp4 may clip a little, the others do not)."""
    rows = [
        ("mxfp8_e4m3", E4M3FN, "rceil", "vLLM, SGLang", ("mxfp8",)),
        ("mxfp8_e5m2", E5M2, "rceil", "no engine's weight loader", ()),
        ("mxfp6_e2m3", E2M3, "rceil", "vLLM", ("mxfp6",)),
        ("mxfp6_e3m2", E3M2, "rceil", "vLLM (Quark)", ()),
        ("mxfp4", E2M1, "bump(1.75)", "vLLM, SGLang", ()),
        ("mxint8", MXINT8, "rceil", "no engine's weight loader", ()),
    ]
    for name, element, rule, loads, aliases in rows:
        yield Scheme(name, element, (Scale(E8M0, (1, 32), rule),), None, OURS, loads, _MX, aliases)


ROWS: tuple[Scheme, ...] = (
    *_fp8_rows(),
    *_int_rows(),
    *_mx_rows(),
    Scheme(
        "nvfp4", E2M1, (Scale(E4M3FN, (1, 16), "amax"), Scale(FP32, (0, 0), "pow2")), None, OURS,
        "vLLM, SGLang, TensorRT-LLM", "NVIDIA NVFP4: E4M3 per 16 under FP32 per tensor",
    ),
    Scheme("nf4_b64", NF4, (Scale(FP32, (1, 64), "amax"),), None, OURS, "bitsandbytes", "QLoRA", ("nf4",)),
)  # fmt: skip


class Schemes(Mapping[str, Scheme]):
    """The rows by name and alias, case-insensitive; unknown names are refused with the nearest ones."""

    def __init__(self, rows: tuple[Scheme, ...]) -> None:
        self._rows = {row.name: row for row in rows}
        self._all = self._rows | {alias: row for row in rows for alias in row.aliases}

    def __getitem__(self, name: str) -> Scheme:
        found = self._all.get(name.lower().replace("-", "_"))
        if found is None:
            near = difflib.get_close_matches(name.lower(), self._all, 3)
            remedy = (f"did you mean {', '.join(near)}? " if near else "") + "`narrowcast schemes` lists them"
            raise UsageError("unknown scheme", got=name, remedy=remedy)
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower().replace("-", "_") in self._all

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


schemes = Schemes(ROWS)


def integer(scheme: Scheme) -> bool:
    """Whether the elements are integers."""
    return scheme.element.kind is Kind.INT


def as_peer(scheme: Scheme, peer: str) -> Scheme:
    """The scheme with a peer library's arithmetic and rules, for reproducing its bits.

    "compressed-tensors" (0.20): every intermediate in the source's dtype, NVFP4's global scale a divisor
    2688 / amax, MX exponents bumped at half a unit of the element's mantissa, where E4M3 counts as one bit.
    """
    if peer not in ARITHMETICS:
        raise UsageError("unknown arithmetic", got=peer, wanted=", ".join(ARITHMETICS))
    changed = scheme.with_arithmetic(ARITHMETICS[peer])
    if peer != "compressed-tensors":
        return changed
    if scheme.inner.format is E8M0:
        return changed.with_rule("bump(1.9375)" if scheme.element is E2M3 else "bump(1.75)")
    if len(scheme.scales) == 2:
        divisor = replace(scheme.scales[1], rule="amax", divides=True)
        return replace(changed, scales=(scheme.inner, divisor))
    return changed.with_scale_format(BF16)
