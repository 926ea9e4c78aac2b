"""Hardware layouts: where scale factors and KV pages lie when a kernel reads them.

Checkpoints hold linear arrays; loaders and cache writers rearrange them. A layout is an index map from the
linear array to the stored one:

    swizzle     stored = 0; stored[offset(i)] = linear[i]
    unswizzle   linear[i] = stored[offset(i)]

Offsets are distinct, so the two are exact inverses, and what no element maps to is padding, zero. The formula
of each layout stands in its row, in C's integer arithmetic: m is a row and k a column of the linear array.

Left out: token-major (NHD) KV pages, of which the linear one is ``nvfp4_kv_linear`` with heads and tokens
exchanged; layouts of weights, which belong to single kernels (Marlin, CUTLASS mixed input) and change with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import InputError, UsageError
from narrowcast.numbers.formats import E2M1, E4M3FN, E8M0, FP32, Kind
from narrowcast.tensors.schemes import Scheme, Shape, Tile

Offsets = NDArray[np.intp]


@dataclass(frozen=True)
class Layout:
    """One hardware layout of arrays whose last ``axes`` axes form a unit; leading axes (experts, pages) stay.

    ``offsets`` maps the unit's shape to the position of each of its elements, ``stored`` to the shape that is
    kept, in ``word``s; ``element`` is the dtype of the linear array. ``formula`` says the offsets in words,
    ``pads`` what is filled with zeros, ``fits`` which schemes keep their block scales so on the hardware,
    ``source`` where the layout is defined.
    """

    name: str
    formula: str
    pads: str
    offsets: Callable[[Shape], Offsets]
    stored: Callable[[Shape], Shape]
    source: str
    fits: Callable[[Scheme], bool] = lambda scheme: False
    axes: int = 2
    element: str = "u1"
    word: str = "u1"

    def swizzle(self, linear: NDArray[Any]) -> NDArray[Any]:
        """Linear array [..., unit] to a new stored array [..., *stored(unit)], padding zero.

        InputError where the dtype or the shape is none that the layout holds.
        """
        if linear.dtype != np.dtype(self.element) or linear.ndim < self.axes:
            got = f"{linear.dtype} of shape {linear.shape}"
            wanted = f"{np.dtype(self.element)} of {self.axes} axes or more"
            raise InputError("not an array of this layout", where=self.name, got=got, wanted=wanted)
        lead, unit = linear.shape[: -self.axes], linear.shape[-self.axes :]
        offsets = self.offsets(unit).ravel()
        flat = np.zeros((*lead, self._size(unit)), self.element)
        flat[..., offsets] = linear.reshape(*lead, -1)
        return flat.view(self.word).reshape(*lead, *self.stored(unit))

    def unswizzle(self, stored: NDArray[Any], unit: Shape) -> NDArray[Any]:
        """The inverse: a stored array to the linear one [..., *unit]; what lies in the padding is not looked at.

        InputError where ``stored`` does not have the shape and dtype that ``swizzle`` gives for ``unit``.
        """
        offsets = self.offsets(unit)
        wanted = self.stored(unit)
        lead = stored.shape[: stored.ndim - len(wanted)]
        if stored.dtype != np.dtype(self.word) or stored.shape != (*lead, *wanted):
            got = f"{stored.dtype} of shape {stored.shape}"
            asked = f"{np.dtype(self.word)} of shape (..., {', '.join(map(str, wanted))}) for {unit}"
            raise InputError("not an array of this layout", where=self.name, got=got, wanted=asked)
        flat = np.ascontiguousarray(stored).reshape(*lead, -1).view(self.element)
        linear: NDArray[Any] = flat[..., offsets]
        return linear

    def _size(self, unit: Shape) -> int:
        """Elements of a stored unit, padding included."""
        words = int(np.prod(self.stored(unit), dtype=np.int64))
        return words * np.dtype(self.word).itemsize // np.dtype(self.element).itemsize


def by_row(scales: NDArray[Any], tile: Tile, n: int) -> NDArray[Any]:
    """Scales [..., tiles, C] of a matrix of n rows as one row of scales per row of the matrix, [..., n, C].

    DeepGEMM does this to 128x128 block scales before it packs them; a last, partial block is cut short.
    """
    return np.repeat(scales, tile[0] or n, axis=-2)[..., :n, :]


def by_tile(scales: NDArray[Any], tile: Tile) -> NDArray[Any]:
    """The inverse of ``by_row``; InputError where the rows of one tile differ."""
    n = scales.shape[-2]
    kept: NDArray[Any] = scales[..., :: tile[0] or n, :]
    differs = (by_row(kept, tile, n) != scales).any(axis=-1)
    if differs.any():
        first = tuple(int(i) for i in np.argwhere(differs)[0])
        raise InputError(
            "rows of one tile have different scales", where=f"row {first}", wanted=f"tiles {tile}"
        )
    return kept


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _sf_128x4(unit: Shape) -> Offsets:
    m, k = np.ogrid[: unit[0], : unit[1]]
    tile = m // 128 * (_up(unit[1], 4) // 4) + k // 4
    offsets: Offsets = tile * 512 + m % 32 * 16 + m // 32 % 4 * 4 + k % 4
    return offsets


def _packed_ue8m0(unit: Shape) -> Offsets:
    m, k = np.ogrid[: unit[0], : unit[1]]
    offsets: Offsets = (k // 4 * _up(unit[0], 4) + m) * 4 + k % 4
    return offsets


def _transposed_fp32(unit: Shape) -> Offsets:
    m, k = np.ogrid[: unit[0], : unit[1]]
    offsets: Offsets = k * _up(unit[0], 4) + m
    return offsets


def _head(unit: Shape) -> int:
    """Head size D of rows [2, heads, tokens, D/2 + D/16]: packed E2M1 codes, then E4M3 scales."""
    two, _, _, row = unit
    if two != 2 or row % 9:
        wanted = "(2 for K and V, heads, tokens, D/2 + D/16 bytes) with D a multiple of 16"
        raise InputError("not rows of an NVFP4 KV page", got=unit, wanted=wanted)
    return row // 9 * 16


def _kv_page(unit: Shape, *, swizzled: bool) -> Offsets:
    """[K data | K scales | V data | V scales], each region head-major, the scales of V swizzled if asked."""
    head = _head(unit)
    data, s_count = head // 2, head // 16
    if swizzled and s_count % 4:
        wanted = "a multiple of 64: four groups of scales take the places of four tokens"
        raise InputError("this head size cannot be swizzled", got=head, wanted=wanted)
    _, heads, tokens, row = unit
    room = _up(tokens, 4) if swizzled else tokens
    side, h, t, i = np.ogrid[:2, :heads, :tokens, :row]
    s = i - data
    quarter = max(s_count // 4, 1)
    moves = (side == 1) & swizzled
    at_row = np.where(moves, t // 4 * 4 + s // quarter, t)
    at_column = np.where(moves, s % quarter * 4 + t % 4, s)
    in_scales = heads * room * data + (h * room + at_row) * s_count + at_column
    offsets: Offsets = side * (heads * room * row) + np.where(s < 0, (h * room + t) * data + i, in_scales)
    return offsets


def _kv_bytes(unit: Shape, *, swizzled: bool) -> Shape:
    _head(unit)
    _, heads, tokens, row = unit
    return (2 * heads * (_up(tokens, 4) if swizzled else tokens) * row,)


def _block_scaled(scheme: Scheme) -> bool:
    """NVFP4, and the MX formats that tensor cores multiply."""
    level = scheme.inner
    nvfp4 = level.format is E4M3FN and level.tile == (1, 16)
    return nvfp4 or (level.format is E8M0 and level.tile == (1, 32) and scheme.element.kind is Kind.FLOAT)


def _deepgemm_ue8m0(scheme: Scheme) -> bool:
    return (
        scheme.inner.format is E8M0
        and scheme.inner.tile in ((1, 32), (1, 128), (128, 128))
        and scheme.element in (E4M3FN, E2M1)
    )


def _deepgemm_fp32(scheme: Scheme) -> bool:
    return scheme.inner.format is FP32 and scheme.inner.tile == (1, 128) and scheme.element is E4M3FN


_DEEPGEMM = "DeepGEMM 0274ad7, csrc/jit_kernels/impls/smxx_layout.hpp"
_VLLM_KV = "vLLM 5d11149, csrc/nvfp4_kv_cache_kernels.cu"

ROWS: tuple[Layout, ...] = (
    Layout(
        "sf_128x4",
        "byte (m / 128 * C4 + k / 4) * 512 + m % 32 * 16 + m / 32 % 4 * 4 + k % 4, C4 = (columns + 3) / 4",
        "rows to 128, columns to 4", _sf_128x4, lambda unit: (_up(unit[0], 128), _up(unit[1], 4)),
        "cuBLAS, 1-D block scaling factors layout; CUTLASS, FlashInfer and vLLM read the same", _block_scaled,
    ),
    Layout(
        "deepgemm_ue8m0",
        "byte (k / 4 * M4 + m) * 4 + k % 4, M4 = (rows + 3) / 4 * 4; four bytes are one little-endian int32",
        "rows to 4 (16 bytes for TMA), columns to 4", _packed_ue8m0,
        lambda unit: (_up(unit[1], 4) // 4, _up(unit[0], 4)),
        f"{_DEEPGEMM}, get_mn_major_tma_aligned_packed_ue8m0_tensor", _deepgemm_ue8m0, word="<i4",
    ),
    Layout(
        "deepgemm_fp32", "float k * M4 + m, M4 = (rows + 3) / 4 * 4", "rows to 4 (16 bytes for TMA)",
        _transposed_fp32, lambda unit: (unit[1], _up(unit[0], 4)),
        f"{_DEEPGEMM}, get_mn_major_tma_aligned_tensor", _deepgemm_fp32, element="<f4", word="<f4",
    ),
    Layout(
        "nvfp4_kv",
        "[K data | K scales | V data | V scales], each [heads, tokens, bytes]; scale s of token t, of S = D / 16, at "
        "row t / 4 * 4 + s / (S / 4), column s % (S / 4) * 4 + t % 4 for V, at row t, column s for K",
        "tokens to 4", partial(_kv_page, swizzled=True), partial(_kv_bytes, swizzled=True),
        f"{_VLLM_KV}: the pages that TensorRT-LLM's attention reads on SM100", axes=4,
    ),
    Layout(
        "nvfp4_kv_linear",
        "[K data | K scales | V data | V scales], each [heads, tokens, bytes]", "nothing",
        partial(_kv_page, swizzled=False), partial(_kv_bytes, swizzled=False),
        "vLLM 0.32, v1/attention/backends/flashinfer.py: the pages of FlashInfer FA2 (SM8x, SM90, SM12x)", axes=4,
    ),
)  # fmt: skip

layouts: Mapping[str, Layout] = {row.name: row for row in ROWS}


def layout(name: str) -> Layout:
    """The layout of this name; UsageError lists them."""
    if name not in layouts:
        raise UsageError("unknown layout", got=name, wanted=", ".join(layouts))
    return layouts[name]


def layouts_of(scheme: Scheme) -> tuple[Layout, ...]:
    """Every layout in which a kernel may want the innermost scales of this scheme."""
    return tuple(row for row in ROWS if row.fits(scheme))
