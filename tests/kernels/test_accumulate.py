"""Sums as tensor cores form them: the published models' results, an exact derivation in fractions, and known stalls."""

from __future__ import annotations

import json
from fractions import Fraction
from math import floor, log2
from pathlib import Path

import numpy as np
import pytest

from narrowcast.errors import UsageError
from narrowcast.kernels.reference.accumulate import (
    CORES,
    BlockScales,
    core,
    element_exponent,
    plain_sum,
    probable,
    tensor_core,
    worst_case,
)
from narrowcast.numbers.codec import decode, encode
from narrowcast.numbers.formats import E4M3FN, formats

# Made by running MMA-Sim (microsoft/MMA-Sim, MIT): its nv_fused_dot_add and nv_fused_dot_add_with_block_scale, which
# its authors checked bit for bit against the GPUs, chained over K with their group sizes.
VECTORS = json.loads((Path(__file__).parent / "tensor_cores.json").read_text())


def _values(row: dict, key: str) -> np.ndarray:
    fmt = formats[row["element"]]
    codes = np.array([row[key]], np.uint16 if fmt.bits == 16 else np.uint8)
    return decode(codes, fmt)


@pytest.mark.parametrize("row", VECTORS, ids=lambda r: f"{r['core']}-{r['kind']}-{r['element']}")
def test_as_the_published_model(row: dict) -> None:
    x, w = _values(row, "x"), _values(row, "w")
    scales = None
    if "sx" in row:
        fmt = formats[row.get("scale", "e8m0")]
        sx, sw = (decode(np.array([row[key]], np.uint8), fmt) for key in ("sx", "sw"))
        smallest = -127 if fmt.name == "e8m0" else element_exponent(fmt)
        scales = BlockScales(sx, sw, x.shape[1] // sx.shape[1], smallest)
    how = core(row["core"], row["kind"])
    found = tensor_core(x, w, how, element_exponent(formats[row["element"]]), scales)
    assert found.view(np.uint32)[0, 0] == row["y"]


def _exponent(value: Fraction, smallest: int) -> int:
    value = abs(value)
    e = floor(log2(value))
    while Fraction(2) ** e > value:
        e -= 1
    while Fraction(2) ** (e + 1) <= value:
        e += 1
    return max(e, smallest)


def _by_fractions(x: list[Fraction], w: list[Fraction], group: int, fraction: int, result: int) -> Fraction:
    """The equation of the module, in exact numbers."""
    c = Fraction(0)
    for first in range(0, len(x), group):
        terms = [
            (a * b, _exponent(a, -6) + _exponent(b, -6))
            for a, b in zip(x[first : first + group], w[first : first + group], strict=True)
            if a and b
        ]
        if c:
            terms.append((c, _exponent(c, -126)))
        if not terms:
            continue
        q = Fraction(2) ** (max(e for _, e in terms) - fraction)
        total = sum((int(value / q) * q for value, _ in terms), Fraction(0))  # int() goes toward zero
        if total:
            step = Fraction(2) ** (_exponent(total, -126) - result)
            total = int(total / step) * step
        c = total
    return c


@pytest.mark.parametrize("name", ["ada", "hopper", "blackwell"])
def test_as_fractions_derive_it(name: str) -> None:
    random = np.random.default_rng(5)
    how = CORES[name]["fp8"]
    for trial in range(6):
        wide = random.standard_normal((2, 96)) * 2.0 ** random.integers(-trial * 2, 6, (2, 96))
        x, w = (decode(encode(row, E4M3FN).codes, E4M3FN)[None] for row in wide)
        wanted = _by_fractions(
            [Fraction(float(v)) for v in x[0]],
            [Fraction(float(v)) for v in w[0]],
            how.group,
            how.fraction,
            how.result,
        )
        assert float(tensor_core(x, w, how, -6)[0, 0]) == float(wanted)


def test_ones_stall_at_256_in_bf16() -> None:
    ones = np.ones((1, 4096), np.float32)
    assert plain_sum(ones, ones, "bf16")[0, 0] == 256
    assert plain_sum(ones, ones, "fp32")[0, 0] == 4096


def test_hopper_loses_what_lies_fourteen_binades_down() -> None:
    """One large term, then small ones: 13 fraction bits below 2^8 end at 2^-5, so products of 2^-6 vanish; promoted
    every 128 elements only those beside the large term do."""
    x = np.full((1, 4096), 2.0**-3, np.float32)
    w = np.full((1, 4096), 2.0**-3, np.float32)
    x[0, 0], w[0, 0] = 16.0, 16.0
    assert tensor_core(x, w, core("hopper", "fp8"), -6)[0, 0] == 256
    assert tensor_core(x, w, core("hopper_promoted", "fp8"), -6)[0, 0] == 256 + (4096 - 128) / 64
    assert tensor_core(x, w, core("blackwell", "fp8"), -6)[0, 0] == 256 + 4095 / 64


def test_pairwise_and_serial_differ_and_exact_does_not_care() -> None:
    random = np.random.default_rng(1)
    x, w = random.standard_normal((2, 3, 777)).astype(np.float32)
    order = random.permutation(777)
    assert (plain_sum(x, w, "exact") == plain_sum(x[:, order], w[:, order], "exact")).all()
    exact, allowed = plain_sum(x, w, "exact"), plain_sum(abs(x), abs(w), "exact")
    # a product, and one sum for each of ceil(log2 777) = 10 levels
    assert (abs(plain_sum(x, w, "fp32_pairwise") - exact) <= worst_case(11, 2.0**-24) * allowed).all()
    assert (plain_sum(x, w, "fp32_pairwise") != plain_sum(x, w, "fp32")).any()


def test_nan_and_infinity_come_through() -> None:
    x = np.ones((1, 64), np.float32)
    x[0, 3] = np.nan
    assert np.isnan(tensor_core(x, np.ones((1, 64), np.float32), core("hopper", "fp8"), -6)[0, 0])
    x[0, 3] = np.inf
    assert np.isposinf(tensor_core(x, np.ones((1, 64), np.float32), core("hopper", "fp8"), -6)[0, 0])


def test_bounds() -> None:
    assert worst_case(128, 2.0**-13) == pytest.approx((128 / 8192) / (1 - 128 / 8192))
    assert worst_case(8192, 2.0**-13) == float("inf")
    assert probable(4096, 2.0**-24) < worst_case(4096, 2.0**-24)


@pytest.mark.parametrize("name", ["ada", "hopper", "hopper_promoted", "blackwell"])
def test_errors_stay_within_their_bound(name: str) -> None:
    random = np.random.default_rng(2)
    how = core(name, "fp8")
    for spread in (0, 3, 6):
        wide = np.abs(random.standard_normal((6, 1024))) * 2.0 ** random.integers(
            -spread, spread + 1, (6, 1024)
        )
        values = decode(encode(wide, E4M3FN).codes, E4M3FN)  # of one sign: truncation errs most
        x, w = values[:3], values[3:]
        exact = plain_sum(x, w, "exact")
        error = exact - tensor_core(x, w, how, -6)
        assert (error <= how.worst(1024) * exact).all()
        assert (error >= -1024 / 128 * 2.0**-24 * exact).all()  # truncation only loses; promotion rounds


def test_names_that_do_not_exist_are_refused() -> None:
    for name, kind in [("volta", "fp8"), ("fp32", "fp8"), ("hopper", "fp4")]:
        with pytest.raises(UsageError):
            core(name, kind)
