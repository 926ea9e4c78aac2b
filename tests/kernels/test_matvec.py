"""Matrix-vector products from packed codes: the compiled one gives the definition's bits, and those lie within the
derived bound of the exact sum."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from compare import every_kind_of_row, outer_of, packing_of

from narrowcast.errors import UsageError
from narrowcast.kernels import Rows, choose_matvec
from narrowcast.kernels.cpu import compile
from narrowcast.kernels.cpu.matvec import Matvec, prepare
from narrowcast.kernels.cpu.matvec_look import look_of
from narrowcast.kernels.cpu.matvec_loops import matvec_kernel
from narrowcast.kernels.reference import matvec as reference
from narrowcast.kernels.reference.gemm import bound, oracle
from narrowcast.kernels.reference.rows import REFERENCE
from narrowcast.numbers.codec import to_bf16, widen
from narrowcast.numbers.formats import BF16, FP16, FP32
from narrowcast.tensors.packing import BYTES, packing
from narrowcast.tensors.schemes import Scheme, schemes

SCHEMES = (
    "fp8_channel", "fp8_tensor", "fp8_block128", "fp8_block128_ue8m0", "mxfp8", "int8_channel", "int8_g128",
    "int8_g32", "int4_channel", "int4_g128", "int4_g64", "int4_g32", "uint4_channel", "uint4_g128", "uint4_g32",
    "mxfp4", "nvfp4", "nf4",
)  # fmt: skip
# Whole blocks, one block, ragged ends of every kind, a single row, rows that two threads share, many tiles.
SHAPES = ((5, 128), (1, 64), (3, 576), (130, 256), (7, 200), (9, 16), (4, 37), (2, 1000), (1, 1), (6, 2064))


def quantized(scheme: Scheme, n: int, k: int, seed: int = 0) -> tuple[Rows, float | None]:
    """A weight with outliers, zero rows and powers of two, of magnitudes whose products stay finite."""
    w = np.clip(every_kind_of_row(n, k, seed), -1e4, 1e4)
    w[np.abs(w) < 1e-30] = 0
    outer = outer_of(scheme, w)
    return REFERENCE.quantize(w, FP32, scheme, packing_of(scheme), outer), outer


def numbers(m: int, k: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    rng = np.random.default_rng(m * 1000 + k)
    return (rng.standard_normal((m, k)) * 10.0 ** rng.integers(-4, 4, (m, k))).astype(np.float32)


def assert_same_bits(got: Any, wanted: Any) -> None:
    assert got.dtype == wanted.dtype == np.float32
    assert got.shape == wanted.shape
    wrong = np.argwhere(got.view(np.uint32) != wanted.view(np.uint32))
    assert not len(wrong), f"{len(wrong)} of {got.size} differ, first at {wrong[0]}"


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_the_compiled_product_has_the_bits_of_the_definition(name: str, shape: tuple[int, int]) -> None:
    scheme, (n, k) = schemes[name], shape
    rows, outer = quantized(scheme, n, k, k)
    made, reason = choose_matvec(rows, scheme, packing_of(scheme), k, outer)
    assert reason == ""
    for m in (1, 2, 3, 4, 7, 8, 11):
        x = numbers(m, k)
        wanted = reference.matvec(x, rows, scheme, packing_of(scheme), outer)
        assert_same_bits(made.product(x), wanted)


@pytest.mark.parametrize("name", ["fp8_channel", "int8_channel", "nvfp4"])
def test_bf16_inputs_are_widened_exactly(name: str) -> None:
    scheme, k = schemes[name], 200
    rows, outer = quantized(scheme, 5, k)
    half = to_bf16(numbers(3, k))
    made, _ = choose_matvec(rows, scheme, packing_of(scheme), k, outer)
    wanted = reference.matvec(widen(half, BF16), rows, scheme, packing_of(scheme), outer)
    assert_same_bits(made.product(half), wanted)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_product_lies_within_the_bound_of_the_exact_sum(name: str) -> None:
    scheme, k = schemes[name], 300
    rows, outer = quantized(scheme, 6, k, 3)
    x = numbers(3, k)
    weight, factor = reference.decoded(rows, scheme, packing_of(scheme), k, outer)
    exact = oracle(x, weight) * factor.astype(np.float64)
    # Per lane ceil(k / LANES) fused steps, six halvings, the factor: far fewer than k roundings.
    steps = -(-k // reference.LANES) + 6 + 1
    allowed = bound(x, weight, steps) * np.abs(factor) + 2.0**-149
    y = choose_matvec(rows, scheme, packing_of(scheme), k, outer)[0].product(x)
    assert (np.abs(y - exact) <= allowed).all()
    decoded = REFERENCE.dequantize(rows, scheme, packing_of(scheme), k, FP32, outer)
    # The dequantized weight rounds the product of its scales once, and the element's product once more.
    np.testing.assert_allclose(weight * factor[:, None], decoded, rtol=2.0**-22, atol=2.0**-140)


def test_every_code_and_every_scale_byte_is_read_as_the_codec_reads_it() -> None:
    """Columns of an identity-like x pick single codes: y is the element times its scale, without any sum."""
    for name in ("fp8_channel", "int8_channel", "mxfp4", "nvfp4", "uint4_g32", "nf4"):
        scheme = schemes[name]
        how = packing(scheme.element.bits)
        count, k = 1 << scheme.element.bits, 64
        codes = np.resize(np.arange(count, dtype=np.uint8), (count, k))
        if scheme.element.name == "e4m3fn":
            codes[(codes & 0x7F) == 0x7F] = 0
        packed = codes if how.bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
        tiles = k // scheme.inner.tile[1] if scheme.inner.tile[1] else 1
        top = {"e8m0": 255, "e4m3fn": 127}.get(scheme.inner.format.name)
        scales: Any = np.full((count, tiles), 0x3F80, np.uint16)
        if scheme.inner.format is FP32:
            scales = np.full((count, tiles), 0.37, np.float32)
        elif top is not None:
            scales = np.resize(np.arange(top, dtype=np.uint8), (count, tiles))
        zero = np.resize(np.arange(16, dtype=np.uint8), (count, tiles)) if scheme.zero is not None else None
        outer = 1.0 if len(scheme.scales) == 2 else None
        rows = Rows(np.ascontiguousarray(packed), scales, zero)
        x = np.zeros((8, k), np.float32)
        x[np.arange(8), np.arange(8) * 9] = 1
        got = choose_matvec(rows, scheme, how, k, outer)
        assert got[1] == ""
        assert_same_bits(got[0].product(x), reference.matvec(x, rows, scheme, how, outer))


def test_without_tables_of_sixteen_the_bits_are_the_same() -> None:
    for name in ("int4_g128", "uint4_g32", "mxfp4", "nvfp4"):
        scheme, how, k = schemes[name], packing_of(schemes[name]), 300
        rows, outer = quantized(scheme, 7, k)
        look = look_of(scheme, how)
        assert not isinstance(look, str)
        plain = Matvec(rows, scheme, how, k, outer, replace(look, table=False))
        x = numbers(5, k)
        assert_same_bits(plain.product(x), reference.matvec(x, rows, scheme, how, outer))


def test_a_thread_writes_its_columns_and_no_others() -> None:
    scheme, k = schemes["int4_g32"], 96
    rows, _ = quantized(scheme, 11, k)
    made = prepare(rows, scheme, packing_of(scheme), k, None)
    assert isinstance(made, Matvec)
    x, y = numbers(4, k), np.full((4, 11), 7.0, np.float32)
    made.into(x.ctypes.data, "uint32", 4, y.ctypes.data, 3, 8)
    whole = made.product(x)
    assert np.array_equal(y[:, 3:8], whole[:, 3:8])
    assert (y[:, :3] == 7).all()
    assert (y[:, 8:] == 7).all()


def test_fused_rounds_once() -> None:
    """Against exact fractions: sums near ties, far apart, cancelling, subnormal."""
    rng = np.random.default_rng(5)
    a, b = (
        (rng.integers(-(2**24), 2**24, 3000) * 2.0 ** rng.integers(-60, 20, 3000)).astype(np.float32)
        for _ in "ab"
    )
    c = np.where(rng.random(3000) < 0.5, -(a * b), a * b) * (2.0 ** rng.integers(-30, 30, 3000)).astype(
        np.float32
    )
    c = c.astype(np.float32)
    a[:5], b[:5] = 2.0**-75, 2.0**-74  # half of the smallest subnormal: a tie, broken by what is added
    c[:5] = [0, 2.0**-149, -(2.0**-149), 2.0**-126, 1]
    got = reference.fused(a, b, c)
    for i in range(len(a)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        assert float(got[i]) == nearest(exact), i


def nearest(exact: Fraction) -> float:
    """A fraction rounded to float32, ties to even, by counting in units of the last place."""
    if not exact:
        return 0.0
    size, exponent = abs(exact), -149
    while size / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    units = round(size / Fraction(2) ** exponent)  # Python rounds fractions half to even
    return float(units * Fraction(2) ** exponent) * (1 if exact > 0 else -1)


def test_what_cannot_be_compiled_says_why_and_the_definition_answers() -> None:
    mxfp6 = schemes["mxfp6"]
    rows, _ = quantized(mxfp6, 3, 64)
    made, reason = choose_matvec(rows, mxfp6, packing_of(mxfp6), 64)
    assert reason == "no compiled product reads e2m3 in 6 bits"
    x = numbers(1, 64)
    assert_same_bits(made.product(x), reference.matvec(x, rows, mxfp6, packing_of(mxfp6)))
    fp8 = schemes["fp8_channel"]
    rows, _ = quantized(fp8, 3, 64)
    broken = Rows(rows.packed.copy(), rows.scales)
    broken.packed[1, 5] = 0xFF
    made, reason = choose_matvec(broken, fp8, BYTES, 64)
    assert reason == "a code is NaN"
    assert np.isnan(made.product(x)).tolist() == [[False, True, False]]
    endless = Rows(rows.packed, np.where(np.arange(3)[:, None] == 2, np.inf, rows.scales).astype(np.float32))
    assert choose_matvec(endless, fp8, BYTES, 64)[1] == "a scale is not finite"


def test_what_does_not_fit_is_refused() -> None:
    scheme = schemes["fp8_channel"]
    rows, _ = quantized(scheme, 3, 64)
    made = choose_matvec(rows, scheme, BYTES, 64)[0]
    for x in (np.ones((2, 63), np.float32), np.ones(64, np.float32), np.ones((2, 64), np.float16)):
        with pytest.raises(UsageError, match="this does not multiply"):
            made.product(x)
    with pytest.raises(UsageError, match="wrong length"):
        choose_matvec(rows, scheme, BYTES, 65)
    with pytest.raises(UsageError, match="do not fit"):
        choose_matvec(Rows(rows.packed, rows.scales[:2]), scheme, BYTES, 64)


def test_infinite_and_nan_inputs_behave_as_in_ieee_754() -> None:
    scheme, k = schemes["int8_channel"], 70
    rows, _ = quantized(scheme, 4, k)
    x = numbers(4, k)
    x[0, 3], x[1, 69], x[2, 0], x[3, :2] = np.inf, np.nan, -np.inf, (3e38, 3e38)
    got = choose_matvec(rows, scheme, BYTES, k)[0].product(x)
    wanted = reference.matvec(x, rows, scheme, BYTES)
    np.testing.assert_array_equal(got, wanted)
    assert np.isnan(got[1]).all()


def test_the_inner_loop_is_made_of_whole_vectors() -> None:
    """The native code multiplies and adds whole registers, and no single numbers."""
    import llvmlite.binding as llvm
    from numba import njit, types

    look = look_of(schemes["fp8_channel"], BYTES)
    assert not isinstance(look, str)
    kinds = {"S": types.uint32, "B": types.uint8, "F": types.float32}
    arguments = tuple(
        types.CPointer(kinds[letter]) if letter in kinds else types.int64
        for letter in compile._SIGNATURES["matvec"].split()
    )
    compiled = njit(types.void(*arguments), nogil=True, error_model="numpy")(matvec_kernel(look))
    text = compile._target().emit_assembly(llvm.parse_assembly(compiled.inspect_llvm(arguments)))
    fused = [line for line in text.splitlines() if "vfmadd" in line]
    width = "%zmm" if llvm.get_host_cpu_features().get("avx512f") else "%ymm"
    assert len(fused) >= 4 * (1 + 2 + 4 + 8)
    assert all(width in line for line in fused)


def test_float16_inputs_come_as_float32() -> None:
    scheme, k = schemes["mxfp4"], 64
    rows, _ = quantized(scheme, 4, k)
    x = numbers(2, k).astype(np.float16)
    made = choose_matvec(rows, scheme, packing_of(scheme), k)[0]
    wide = widen(x, FP16)
    assert_same_bits(made.product(wide), reference.matvec(wide, rows, scheme, packing_of(scheme)))
