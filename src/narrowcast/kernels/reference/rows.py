"""The numpy backend: the definitions of quantize and dequantize, applied to chunks of packed rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.kernels import Rows, Scan
from narrowcast.kernels.reference.dequantize import dequantize as dequantize_tensor
from narrowcast.kernels.reference.quantize import quantize as quantize_tensor
from narrowcast.numbers.codec import widen
from narrowcast.numbers.formats import Format
from narrowcast.tensors.metrics import Errors, errors
from narrowcast.tensors.packing import Packing, pack, unpack
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.schemes import Scheme


class Reference:
    """Runs every scheme, from every source dtype, under every arithmetic."""

    name = "reference"

    def supports(self, scheme: Scheme, source: Format, packing: Packing) -> str | None:
        return None

    def scan(self, stored: NDArray[Any], source: Format) -> Scan:
        x = widen(stored, source)
        finite = np.isfinite(x)
        amax = float(np.abs(x, where=finite, out=np.zeros_like(x)).max(initial=0.0))
        if finite.all():
            return Scan(amax)
        return Scan(amax, int(np.isnan(x).sum()), int(np.isinf(x).sum()), int(np.flatnonzero(~finite)[0]))

    def quantize(
        self,
        stored: NDArray[Any],
        source: Format,
        scheme: Scheme,
        packing: Packing,
        outer: float | None = None,
    ) -> Rows:
        q = quantize_tensor(widen(stored, source), scheme, outer=_outer(outer), source=source)
        return Rows(pack(q.codes, packing), q.scales[0], q.zero)

    def check(
        self,
        stored: NDArray[Any],
        source: Format,
        scheme: Scheme,
        packing: Packing,
        rows: Rows,
        outer: float | None = None,
    ) -> Errors:
        q = qtensor(rows, scheme, packing, stored.shape[-1], outer)
        return errors(widen(stored, source), q, q.dequantize())

    def dequantize(
        self, rows: Rows, scheme: Scheme, packing: Packing, k: int, out: Format, outer: float | None = None
    ) -> NDArray[Any]:
        return dequantize_tensor(qtensor(rows, scheme, packing, k, outer), out)


def qtensor(rows: Rows, scheme: Scheme, packing: Packing, k: int, outer: float | None = None) -> QTensor:
    """The logical tensor of a packed chunk with k columns."""
    levels: tuple[NDArray[Any], ...] = (rows.scales,)
    if len(scheme.scales) == 2:
        assert outer is not None
        levels = (rows.scales, np.full((1, 1), outer, np.float32))
    return QTensor(scheme, unpack(rows.packed, packing, k), levels, rows.zero)


def _outer(outer: float | None) -> NDArray[np.float32] | None:
    return None if outer is None else np.full((1, 1), outer, np.float32)


REFERENCE = Reference()
