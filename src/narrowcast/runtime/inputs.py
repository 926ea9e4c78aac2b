"""Inputs of linear layers, quantized on the fly or with a stored scale, as operands of a product.

    dynamic    scales from the rows themselves: per token, per tensor, per group, MX, NVFP4 under one outer scale or one
               for each token
    static     one stored scale for all, with a zero point where inputs are asymmetric; what they cannot hold is
               clipped, and counted. Of NVFP4 the stored scale is the outer one
    outliers   LLM.int8: columns where any |x| reaches the threshold stay as they are, the rest is INT8 per token
               (arXiv 2208.07339)

Codes and scales are those of ``kernels.reference.quantize``, bit for bit; around a zero point they are those of vLLM
(``engine``). NaN and infinity are no error here, as they
are none in an engine: a row that holds one comes out as NaN.

Where a container multiplies an input by a factor for each column, or keeps columns in another order, that happens
first: q( x[:, order] · factors ), in the dtype of x, and the weight's codes stay as they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from narrowcast.numbers.formats import E4M3FN, E8M0, INT8, Format, Kind
from narrowcast.runtime.product import Columns, Operand
from narrowcast.runtime.quantizing import decoded, elements, peak, quantized
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.schemes import Scheme, integer

if TYPE_CHECKING:
    from narrowcast.runtime.linear import Seen

SMALLEST_NORMAL = 2.0**-126  # of bf16, as of float32


@dataclass(frozen=True, eq=False)
class Inputs:
    """How a layer's input is quantized. ``static`` is its stored scale (of NVFP4: the outer one) as ``scheme`` has it,
    a multiplier or a divisor, with ``zero`` its zero point; ``order`` int64 [K] and ``factors`` float32 [K] come
    before; ``threshold`` keeps outlier columns wide."""

    scheme: Scheme
    static: float | None = None
    zero: int = 0
    order: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    threshold: float | None = None

    @property
    def shared(self) -> tuple[object, ...] | None:
        """What makes two layers' inputs the same operand, None where only one layer's own tensors say it."""
        if self.order is not None or self.factors is not None:
            return None
        return self.scheme, self.static, self.zero, self.threshold

    def operand(self, x: torch.Tensor, seen: Seen) -> Operand:
        """Rows [M, K] of any float dtype as an operand; ``seen`` counts."""
        if self.order is not None:
            x = x[:, self.order]
        if self.factors is not None:
            x = x * self.factors.to(x.dtype)
        seen.elements += x.numel()
        if not x.numel():
            return Operand(x.float())
        largest = peak(x)
        if np.isfinite(largest):
            return self._finite(x, largest, seen)
        finite = torch.isfinite(x).all(dim=-1, keepdim=True)
        kept = torch.where(finite, x, 0.0)
        made = self._finite(kept, peak(kept), seen)
        bad = torch.where(finite, 1.0, torch.nan)
        return replace(made, scale=bad if made.scale is None else made.scale * bad)

    def _finite(self, x: torch.Tensor, largest: float, seen: Seen) -> Operand:
        if self.threshold is not None and largest >= self.threshold:
            return _with_outliers(x, self.scheme, self.threshold)
        if self.scheme.zero is not None and self.scheme.element is INT8:
            return self._asymmetric(x, seen)
        if self.static is not None and largest > self.reach:
            seen.clipped += int((x.float().abs() > self.reach).sum())
        return operand_of(quantized(x, self.scheme, self.static))

    def _asymmetric(self, x: torch.Tensor, seen: Seen) -> Operand:
        """INT8 around a zero point: (code - zero) · scale."""
        x = x.float()
        if self.static is None:
            low, high = x.aminmax(dim=1, keepdim=True)
            scale = (high - low) / 255
            scale[scale == 0] = 1  # a row of one number: an engine divides by zero
            zero = (-128 - low / scale).round()
        else:
            scale, zero = torch.full((1, 1), self.static), torch.full((len(x), 1), float(self.zero))
        rounded = (x * (1 / scale)).round() + zero
        if self.static is not None:
            seen.clipped += int(((rounded < -128) | (rounded > 127)).sum())
        return Operand(rounded.clamp_(-128, 127).to(torch.int8), scale, zero=zero.to(torch.int32))

    @property
    def reach(self) -> float:
        """The largest magnitude that the static scale holds."""
        assert self.static is not None
        level, scale = self.scheme.scales[-1], np.float32(self.static)
        inner = self.scheme.inner.format.max if len(self.scheme.scales) == 2 else 1.0
        return float((1 / scale if level.divides else scale) * np.float32(self.scheme.element.max * inner))


def _with_outliers(x: torch.Tensor, scheme: Scheme, threshold: float) -> Operand:
    """Columns where any |x| reaches the threshold wide; the rest in codes, whose scales do not see outliers."""
    outliers = x.abs() >= threshold
    places = outliers.any(dim=0).nonzero().reshape(-1)
    # A token's scale sees what lies below the threshold in outlier columns too: only its codes are taken out there.
    made = operand_of(quantized(torch.where(outliers, 0.0, x), scheme))
    rest = made.matrix.index_fill(1, places, 0)
    return replace(made, matrix=rest, outliers=Columns(places, x[:, places].float()))


def operand_of(q: QTensor, groups: bool = False) -> Operand:
    """A quantized matrix [rows, K] as an operand: codes with their row's scale aside, or codes times scales.

    ``groups`` keeps symmetric integer codes apart from scales that change along k, for inputs of INT8.
    """
    scheme, outer = q.scheme, None
    if len(q.scales) == 2:
        outer = torch.from_numpy(q.scale_values(1))
        outer = 1 / outer if scheme.scales[1].divides else outer  # as engines fold a divisor
    rows, cols = scheme.inner.tile
    by_row = (rows, cols) in ((0, 0), (1, 0))
    if (by_row or (groups and rows == 1)) and integer(scheme) and scheme.element.bias == 0 and outer is None:
        codes = _signed(q)
        if codes is not None:
            scale = torch.from_numpy(q.scale_values(0))
            return Operand(codes, scale, group=0 if by_row else cols)
    if by_row:
        scale = torch.from_numpy(q.scale_values(0))
        return Operand(elements(q), scale if outer is None else scale * outer, _eight_bits(scheme.element))
    inner = (
        q
        if outer is None
        else QTensor(replace(scheme, scales=scheme.scales[:1]), q.codes, q.scales[:1], q.zero)
    )
    if _folds(scheme):
        matrix = decoded(inner)
        return Operand(matrix, outer, _all_normal(inner, matrix))
    return Operand(decoded(q))


def _signed(q: QTensor) -> torch.Tensor | None:
    """Integer codes less their zero points as int8, where they fit."""
    if q.scheme.element is INT8 and q.zero is None:
        return torch.from_numpy(q.codes).view(torch.int8)
    if q.scheme.element.bits <= 4 or (q.scheme.element.signed and q.zero is None):
        return elements(q).to(torch.int8)
    return None


def _eight_bits(element: Format) -> bool:
    """Whether elements, less a zero point where they have one, are bf16 numbers: at most eight significant bits, no
    subnormals. Tables of values are not looked at."""
    if element.kind is Kind.TABLE or element.bits > 8:
        return False
    return element.kind is Kind.INT or (element.mantissa_bits < 8 and element.smallest >= SMALLEST_NORMAL)


def _folds(scheme: Scheme) -> bool:
    """Whether an element times its inner scale has at most eight significant bits: a power of two moves the point, and
    E4M3 (four bits) times E2M1 (two) has six."""
    if scheme.zero is not None or not _eight_bits(scheme.element):
        return False
    return scheme.inner.format is E8M0 or (scheme.inner.format is E4M3FN and scheme.element.bits <= 4)


def _all_normal(q: QTensor, matrix: torch.Tensor) -> bool:
    """Whether no product is subnormal, infinite or NaN: E8M0 reaches from 2^-127 to 2^127, elements beyond it."""
    if q.scheme.inner.format is not E8M0:
        return True
    element, codes = q.scheme.element, q.scales[0]
    low = int(np.floor(np.log2(element.smallest)))
    if (
        int(codes.min()) - 127 + low >= -126
        and int(codes.max()) - 127 + int(np.ceil(np.log2(element.max))) <= 127
    ):
        return True
    size = matrix.abs()
    return bool(torch.isfinite(size).all() and not ((size > 0) & (size < SMALLEST_NORMAL)).any())
