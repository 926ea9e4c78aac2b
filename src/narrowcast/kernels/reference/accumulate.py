"""Sums of products as tensor cores form them, bit for bit: a fused dot product of L terms at a time.

    E = max(exponent of c, exponents of the products)
    s = trunc(c / q) + Σ trunc(x_k · w_k / q),   q = 2^(E - F)         exact integers: no order within a group
    c ← truncate(s · q) to R fraction bits

The exponent of a product is the sum of its factors' exponents, before normalization; a subnormal factor has the
exponent of the smallest normal number. F and R are what the hardware keeps: 13 and 13 for FP8 on Hopper and Ada, so a
sum loses what lies 14 binades below its largest term; 25 and 23 (a float32) for FP8 on Blackwell.

``promote``: every so many elements the sum is added to a float32 accumulator, rounded to nearest, and starts again
(DeepSeek-V3 and DeepGEMM do so every 128 on Hopper; NVIDIA calls the other way fast accumulation).

Block-scaled: MXFP8 adds the scales' exponents to those of the products; MXFP4 and NVFP4 sum 16 products exactly,
multiply by the scales' significands, and align to the scales' exponents with F = 35.

Sources: Xie et al., MMA-Sim (arXiv 2511.10909), Khattak and Mikaitis (arXiv 2512.07004): models that agree with the
GPUs bit for bit. Bounds: Higham and Mary, SIAM J. Sci. Comput. 41 (2019), A2815.

Left out: float16 results, TF32, AMD's matrix cores, and what a GPU does with a sum beyond float32 (here infinity).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, sqrt

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.kernels.reference.gemm import F32, F64, UNIT, gemm, oracle
from narrowcast.numbers.codec import round_values
from narrowcast.numbers.formats import BF16, Format

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Core:
    """A tensor core's accumulator: ``group`` products at a time, ``fraction`` bits kept when they are aligned,
    ``result`` fraction bits of the running sum, promotion to float32 every ``promote`` elements (None: never).
    ``exact`` products are summed without loss before they are scaled (FP4), 1 where there are no such."""

    name: str
    group: int
    fraction: int
    result: int
    promote: int | None = None
    exact: int = 1

    @property
    def step(self) -> float:
        """What one fused sum errs by at most, relative to Σ|x|·|w| so far: each aligned term (and c) loses less than
        one unit 2^-F of the largest, and the truncated result 2^-R of itself."""
        terms = self.group // self.exact + 1
        return terms * 2.0**-self.fraction + 2.0**-self.result

    def steps(self, k: int) -> int:
        """How many fused sums K elements pass through before they are promoted or done."""
        return -(-min(k, self.promote or k) // self.group)

    def worst(self, k: int) -> float:
        """No sum of K products errs by more than this times Σ|x|·|w|."""
        found = worst_case(self.steps(k), self.step)
        return (
            found if self.promote is None else found + (1 + found) * worst_case(-(-k // self.promote), UNIT)
        )

    def likely(self, k: int) -> float:
        """What it would err by, almost surely, if it rounded its running sum to R bits without bias; it truncates."""
        return probable(self.steps(k), 2.0**-self.result)


# Operand kinds: "fp8", "fp16" (and bf16), "mx" (FP8 under E8M0), "fp4" (MXFP4 and NVFP4).
CORES: Mapping[str, Mapping[str, Core]] = {
    "ada": {"fp8": Core("Ada FP8 mma", 16, 13, 13), "fp16": Core("Ada BF16 mma", 8, 24, 23)},
    "hopper": {"fp8": Core("Hopper FP8 wgmma", 32, 13, 13), "fp16": Core("Hopper BF16 wgmma", 16, 25, 23)},
    "blackwell": {
        "fp8": Core("Blackwell FP8 tcgen05", 32, 25, 23), "fp16": Core("Blackwell BF16 tcgen05", 16, 25, 23),
        "mx": Core("Blackwell MXFP8 tcgen05", 32, 25, 23), "fp4": Core("Blackwell FP4 tcgen05", 64, 35, 23, exact=16),
    },
}  # fmt: skip
PROMOTED = 128
ODDS = 1e-3  # of more than the probable error
PLAIN = ("exact", "fp32", "fp32_pairwise", "bf16")
NAMES = (*PLAIN, *CORES, *(f"{name}_promoted" for name in ("ada", "hopper")))


def core(name: str, kind: str) -> Core:
    """The accumulator of a GPU family for a kind of operands; ``NAME_promoted`` promotes every 128 elements.

    Raises UsageError for a name or a pair that does not exist.
    """
    family, _, promoted = name.partition("_")
    if name not in NAMES or family not in CORES:
        raise UsageError("unknown accumulator", got=name, wanted=", ".join(NAMES))
    if kind not in CORES[family]:
        raise UsageError(
            f"{family} has no tensor core for these operands", got=kind, wanted=", ".join(CORES[family])
        )
    found = CORES[family][kind]
    return replace(found, promote=PROMOTED) if promoted and kind == "fp8" else found


def plain_sum(x: F32, w: F32, name: str) -> F64:
    """x [M, K] · w [N, K]ᵀ under an accumulator without hardware, as float64 [M, N] that hold its result.

    exact: no order, rounded once to float64. fp32: k = 0, 1, ... fp32_pairwise: halves, and halves of halves, down to
    one product. bf16: serial, each sum rounded to bf16 (ones stall at 256).
    """
    if name == "exact":
        return oracle(x, w)
    if name == "fp32":
        return gemm(x, w).astype(np.float64)
    if name == "fp32_pairwise":
        return _pairwise(x[:, None, :] * w[None, :, :]).astype(np.float64)
    if name == "bf16":
        acc = np.zeros((len(x), len(w)))
        for k in range(x.shape[1]):
            acc = round_values(acc + x[:, k, None].astype(np.float64) * w[None, :, k], BF16)
        return acc
    raise UsageError("unknown accumulator", got=name, wanted=", ".join(NAMES))


def _pairwise(products: F32) -> F32:
    count = products.shape[-1]
    if count == 1:
        found: F32 = products[..., 0]
        return found
    half = count // 2
    return _pairwise(products[..., :half]) + _pairwise(products[..., half:])


@dataclass(frozen=True)
class BlockScales:
    """Scales of both operands, float32 [M, K/block] and [N, K/block], and the exponent of the smallest normal number of
    their format (E8M0: -127, E4M3: -6)."""

    x: F32
    w: F32
    block: int
    smallest: int


def tensor_core(x: F32, w: F32, how: Core, smallest: int, scales: BlockScales | None = None) -> F32:
    """x [M, K] · w [N, K]ᵀ as ``how`` sums it, float32 [M, N].

    ``smallest`` is the exponent of the smallest normal number of the elements' format (E4M3: -6). NaN and infinity
    come out as IEEE 754 sums them. Raises UsageError where blocks and groups do not fit.
    """
    k = x.shape[1]
    if scales is not None and (scales.block % how.exact or how.group % scales.block):
        raise UsageError(
            "scale blocks and the tensor core's groups do not fit", got=scales.block, wanted=how.group
        )
    total = np.zeros((len(x), len(w)), np.float32)
    c = np.zeros((len(x), len(w)), np.float64)
    with np.errstate(all="ignore"):
        for first in range(0, k, how.group):
            part = slice(first, min(first + how.group, k))
            values, exponents = _terms(x[:, part], w[:, part], how, smallest, scales, first)
            c = _fused(values, exponents, c, how)
            if how.promote is not None and part.stop % how.promote == 0:
                total, c = total + c.astype(np.float32), np.zeros_like(c)
        if how.promote is None:
            return c.astype(np.float32)
        return total + c.astype(np.float32)


def _terms(
    x: F32, w: F32, how: Core, smallest: int, scales: BlockScales | None, first: int
) -> tuple[F64, I64]:
    """The terms of one fused sum, exact [M, N, terms], and the exponents that they are aligned by."""
    products = x[:, None, :].astype(np.float64) * w[None, :, :]
    edges = np.arange(0, x.shape[1], how.exact)
    if how.exact > 1:
        products = np.add.reduceat(products, edges, axis=-1)
        exponents = np.zeros(products.shape, np.int64)
    else:
        exponents = _exponent(x, smallest)[:, None, :] + _exponent(w, smallest)[None, :, :]
    if scales is None:
        return products, exponents
    at = (first + edges) // scales.block
    a, b = scales.x[:, None, at], scales.w[None, :, at]
    exponents = exponents + _exponent(a, scales.smallest) + _exponent(b, scales.smallest)
    return products * (a.astype(np.float64) * b), exponents


def _exponent(values: NDArray[np.floating], smallest: int) -> I64:
    """floor(log2 |v|), not below ``smallest``; far below everything for zero."""
    _, exponent = np.frexp(values)
    found: I64 = np.where(values == 0, -(1 << 20), np.maximum(exponent.astype(np.int64) - 1, smallest))
    return found


def _fused(values: F64, exponents: I64, c: F64, how: Core) -> F64:
    """One fused dot-add: aligned to the largest exponent, truncated, summed exactly, truncated once more."""
    exponents = np.where(values == 0, -(1 << 20), exponents)
    top = np.maximum(exponents.max(axis=-1), _exponent(c, -126))
    top = np.where(top < -(1 << 19), 0, top)  # nothing but zeros
    shift = how.fraction - top
    aligned = np.trunc(np.ldexp(values, shift[..., None])).sum(axis=-1) + np.trunc(np.ldexp(c, shift))
    total = np.ldexp(aligned, -shift)
    plain = values.sum(axis=-1) + c
    return np.where(np.isfinite(plain), _truncated(total, how.result), plain)


def _truncated(values: F64, bits: int) -> F64:
    """Toward zero to ``bits`` fraction bits, with float32's exponents; infinite beyond float32."""
    _, exponent = np.frexp(values)
    quantum = np.maximum(exponent - 1, -126) - bits
    cut = np.ldexp(np.trunc(np.ldexp(values, -quantum)), quantum)
    return np.where(np.abs(cut) >= 2.0**128, np.copysign(np.inf, cut), cut)


def element_exponent(element: Format) -> int:
    """The exponent of the smallest normal number of a format."""
    return 1 - element.bias


def worst_case(n: int, unit: float) -> float:
    """γ_n = n·u / (1 - n·u), the relative error that n roundings cannot exceed; infinite where n·u ≥ 1."""
    return n * unit / (1 - n * unit) if n * unit < 1 else float("inf")


def probable(n: int, unit: float) -> float:
    """exp(λ·√n·u + n·u² / (1 - u)) - 1: what n independent roundings of mean zero exceed with ``ODDS`` at most, where
    2n·exp(-λ²(1 - u)² / 2) = ODDS. Truncation has no mean of zero: its errors add up, and may exceed this."""
    scale = sqrt(2 * np.log(2 * n / ODDS)) / (1 - unit)
    return exp(scale * sqrt(n) * unit + n * unit**2 / (1 - unit)) - 1
