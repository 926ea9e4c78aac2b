"""Kernels: the same four operations on a chunk of rows, by backend, every backend bitwise equal to the first.

    scan(stored, source)                              amax and non-finite values of a chunk
    quantize(stored, source, scheme, packing, outer)  packed codes, stored scales, zero points
    check(stored, source, scheme, packing, rows, outer)   the chunk against its quantization: Errors
    dequantize(rows, scheme, packing, outer, k, out)  packed codes back to fp32, bf16 or fp16

``stored`` is the source's own carrier (bf16 as uint16, float16, float32), shape [n, K], C-contiguous; a chunk
begins on a tile boundary. ``choose`` names the backend with its reason: a fallback is never silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from narrowcast.numbers.formats import Format
from narrowcast.tensors.metrics import Errors
from narrowcast.tensors.packing import Packing
from narrowcast.tensors.schemes import Scheme, Tile

if TYPE_CHECKING:
    from narrowcast.kernels.reference.pair import Measure


@dataclass(frozen=True)
class Scan:
    """amax over the finite elements of a chunk, how many are NaN or infinite, and the first such flat index."""

    amax: float
    nan: int = 0
    inf: int = 0
    first: int = -1


@dataclass(frozen=True)
class Rows:
    """A quantized chunk of n rows: packed codes [n, row_bytes], innermost scales as stored [tiles, tiles]
    (float32 for fp32, else codes of the scale's format), and zero-point codes of the same shape."""

    packed: NDArray[np.uint8]
    scales: NDArray[Any]
    zero: NDArray[np.uint8] | None = None


class Backend(Protocol):
    """One implementation of the four operations; ``outer`` is the stored outer scale as a float, or None."""

    name: str

    def supports(self, scheme: Scheme, source: Format, packing: Packing) -> str | None:
        """None when the backend can run this, else the reason why not."""

    def scan(self, stored: NDArray[Any], source: Format) -> Scan: ...

    def quantize(
        self,
        stored: NDArray[Any],
        source: Format,
        scheme: Scheme,
        packing: Packing,
        outer: float | None = None,
    ) -> Rows: ...

    def check(
        self,
        stored: NDArray[Any],
        source: Format,
        scheme: Scheme,
        packing: Packing,
        rows: Rows,
        outer: float | None = None,
    ) -> Errors: ...

    def dequantize(
        self, rows: Rows, scheme: Scheme, packing: Packing, k: int, out: Format, outer: float | None = None
    ) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Choice:
    """A backend and, when it is not the fastest one, the reason."""

    backend: Backend
    reason: str = ""


def choose(scheme: Scheme, source: Format, packing: Packing, wanted: str = "auto") -> Choice:
    """The compiled backend where it applies, else the numpy reference with the reason."""
    from narrowcast.kernels.reference.rows import REFERENCE

    if wanted == "reference":
        return Choice(REFERENCE, "asked for")
    try:
        from narrowcast.kernels.cpu import CPU
    except ImportError as error:
        return Choice(REFERENCE, f"numba is not available ({error}); install narrowcast[fast]")
    reason = CPU.supports(scheme, source, packing)
    return Choice(REFERENCE, reason) if reason else Choice(CPU)


Survey = Callable[
    [NDArray[np.uint8], Packing, int, Tile, NDArray[np.uint8]], tuple[NDArray[np.int64], NDArray[np.uint8]]
]


def choose_survey(packing: Packing) -> Survey:
    """What counts codes of this packing, see ``kernels.reference.survey``: compiled where it can be."""
    try:
        from narrowcast.kernels.cpu.survey import WIDTHS, survey
    except ImportError:
        WIDTHS = ()
    if packing.bits in WIDTHS:
        return survey
    from narrowcast.kernels.reference.survey import survey as reference

    return reference


Pairs = Callable[[NDArray[np.uint8], NDArray[np.uint8], int], NDArray[np.int64]]


def choose_pairs() -> Pairs:
    """What counts pairs of bytes, see ``kernels.reference.survey``: compiled where it can be."""
    try:
        from narrowcast.kernels.cpu.survey import pairs
    except ImportError:
        from narrowcast.kernels.reference.survey import pairs
    return pairs


def choose_pair(scheme: Scheme, source: Format, packing: Packing) -> Measure:
    """What measures a chunk beside its original, see ``kernels.reference.pair``: compiled where it can be."""
    if choose(scheme, source, packing).backend.name == "cpu":
        from narrowcast.kernels.cpu.pair import measure as compiled

        return compiled
    from narrowcast.kernels.reference.pair import measure

    return measure


class Multiplies(Protocol):
    """A weight [N, K] that is read as it is packed: product(x [M, K], float32 or bf16 as uint16) → float32 [M, N]."""

    def product(self, x: NDArray[Any]) -> NDArray[np.float32]: ...


def choose_matvec(
    rows: Rows, scheme: Scheme, packing: Packing, k: int, outer: float | None = None
) -> tuple[Multiplies, str]:
    """What multiplies a few rows of numbers with a packed weight, see ``kernels.reference.matvec``, and why that is
    the definition where it is not compiled."""
    from narrowcast.kernels.reference import matvec as reference

    try:
        from narrowcast.kernels.cpu.matvec import prepare
    except ImportError as error:
        reason = f"numba is not available ({error}); install narrowcast[fast]"
    else:
        made = prepare(rows, scheme, packing, k, outer)
        if not isinstance(made, str):
            return made, ""
        reason = made
    return reference.Matvec(rows, scheme, packing, outer), reason
