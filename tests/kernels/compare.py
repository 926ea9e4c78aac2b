"""What the kernel tests share: inputs that reach every branch, and a comparison that says where two chunks differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.kernels import Rows
from narrowcast.kernels.cpu import CPU
from narrowcast.kernels.reference.rows import REFERENCE, qtensor
from narrowcast.numbers.codec import to_bf16
from narrowcast.numbers.formats import BF16, E8M0, FP16, FP32, Format
from narrowcast.tensors.metrics import Errors
from narrowcast.tensors.packing import BYTES, Packing, packing, unpack
from narrowcast.tensors.scaling import reduce_tiles
from narrowcast.tensors.schemes import Scheme, schemes

SOURCES = (BF16, FP16, FP32)
POWER_RULES = ("floor", "rceil", "ceil_log2", "even", "bump(1.75)", "bump(1.8125)", "bump(1.0)", "bump(2.0)")
SUPPORTED = [scheme for scheme in schemes.values() if CPU.supports(scheme, BF16, BYTES) is None]


def with_rules(scheme: Scheme) -> list[Scheme]:
    """The scheme under every rule that its scale format takes."""
    return [scheme.with_rule(rule) for rule in POWER_RULES] if scheme.inner.format is E8M0 else [scheme]


def packing_of(scheme: Scheme) -> Packing:
    """Bit-packed as containers do it: INT4 offset-binary in 32-bit words, everything else plain."""
    integer = scheme.name.startswith("int4")
    return packing(scheme.element.bits, flip=integer, word=32 if integer else 8)


def outer_of(scheme: Scheme, x: np.ndarray) -> float | None:
    """An outer scale as the job hands it over: from a matrix other than the chunk, for two-level schemes."""
    return float(np.float32(2.0**-9)) if len(scheme.scales) == 2 else None


def stored(x: np.ndarray, source: Format) -> np.ndarray:
    """float32 values as a source's carrier, finite there."""
    if source is BF16:
        bits = to_bf16(np.ascontiguousarray(x, np.float32))
        return np.where((bits & 0x7F80) == 0x7F80, bits & 0xFF7F, bits).astype(np.uint16)
    return x.clip(-65504, 65504).astype(np.float16) if source is FP16 else np.ascontiguousarray(x, np.float32)


def every_kind_of_row(rows: int, k: int, seed: int = 7) -> np.ndarray:
    """float32 [rows, k]: normal, Laplace, Student-t, outliers, zeros, zero tiles, tiny, huge, mixed, powers of two."""
    rng = np.random.default_rng(seed)
    makers = [
        lambda: rng.standard_normal(k) * 0.02,
        lambda: rng.laplace(size=k) * 3,
        lambda: rng.standard_t(2, k),
        lambda: np.where(rng.random(k) < 0.01, 1e4, 1e-2) * rng.standard_normal(k),
        lambda: np.zeros(k),
        lambda: np.where(np.arange(k) // 16 % 2, rng.standard_normal(k), -0.0),
        lambda: rng.standard_normal(k) * 1e-39,
        lambda: rng.choice([-3e38, 3e38, 1e38, 0.0], k),
        lambda: rng.standard_normal(k) * 10.0 ** rng.integers(-38, 38, k),
        lambda: np.ldexp(rng.choice([-1.0, 1.0, 1.5, 1.75, 7.0], k), rng.integers(-8, 8, k)),
        lambda: np.abs(rng.standard_normal(k)),
        lambda: -np.abs(rng.standard_normal(k)),
        lambda: np.full(k, 1e-45),
    ]
    with np.errstate(over="ignore"):
        return (
            np.stack([makers[(i + seed) % len(makers)]() for i in range(rows)])
            .clip(-3.3e38, 3.3e38)
            .astype(np.float32)
        )


def assert_same(got: Rows, wanted: Rows, scheme: Scheme, how: Packing, k: int, outer: float | None) -> None:
    """Packed codes, stored scales and zero points equal bit for bit, else a report of where they are not."""
    assert got.scales.dtype == wanted.scales.dtype
    assert (got.zero is None) == (wanted.zero is None)
    scales = _bits(got.scales) == _bits(wanted.scales)
    assert scales.all(), _report_scales(got.scales, wanted.scales, scales, scheme)
    if got.zero is not None and wanted.zero is not None:
        np.testing.assert_array_equal(got.zero, wanted.zero)
    if not np.array_equal(got.packed, wanted.packed):
        raise AssertionError(_report_codes(got, wanted, scheme, how, k, outer))


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _report_scales(got: np.ndarray, wanted: np.ndarray, same: np.ndarray, scheme: Scheme) -> str:
    at = tuple(int(i) for i in np.argwhere(~same)[0])
    width = got.dtype.itemsize * 8
    a, b = int(_bits(got)[at]), int(_bits(wanted)[at])
    return f"{scheme.name}: {(~same).sum()} scales differ, first at {at}: {a:0{width}b} is not {b:0{width}b}"


def _report_codes(got: Rows, wanted: Rows, scheme: Scheme, how: Packing, k: int, outer: float | None) -> str:
    a, b = unpack(got.packed, how, k), unpack(wanted.packed, how, k)
    wrong = a != b
    if not wrong.any():
        return f"{scheme.name}: codes agree, padding does not"
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    bits = scheme.element.bits
    values = [float(qtensor(rows, scheme, how, k, outer).dequantize()[at]) for rows in (got, wanted)]
    per_tile = reduce_tiles(wrong.astype(np.int64), scheme.inner.tile, np.add)
    worst = tuple(int(i) for i in np.unravel_index(per_tile.argmax(), per_tile.shape))
    return (
        f"{scheme.name}: {wrong.sum()} of {wrong.size} codes differ, first at {at}: {a[at]:0{bits}b} "
        f"({values[0]!r}) is not {b[at]:0{bits}b} ({values[1]!r}); worst tile {worst} with {per_tile.max()}"
    )


def assert_equal_errors(got: Errors, wanted: Errors) -> None:
    """Counts equal; energies within the error of summing n nonnegative float64 in two orders, 2γ_n."""
    counts = [(e.elements, e.clipped, e.underflowed, e.beyond) for e in (got, wanted)]
    assert counts[0] == counts[1], "elements, clipped, underflowed, beyond"
    n, unit = wanted.elements, 2.0**-53
    bound = 2 * n * unit / (1 - n * unit)
    for a, b in ((got.signal, wanted.signal), (got.noise, wanted.noise)):
        same = a == b or (np.isnan(a) and np.isnan(b))
        assert same or abs(a - b) <= bound * b, (a, b)


def compare_all(x: Any, source: Format, scheme: Scheme, how: Packing, outer: float | None) -> None:
    """Quantize, check and dequantize with both backends."""
    assert CPU.supports(scheme, source, how) is None
    k = x.shape[1]
    with np.errstate(all="ignore"):
        wanted = REFERENCE.quantize(x, source, scheme, how, outer)
        assert_same(CPU.quantize(x, source, scheme, how, outer), wanted, scheme, how, k, outer)
        assert_equal_errors(
            CPU.check(x, source, scheme, how, wanted, outer),
            REFERENCE.check(x, source, scheme, how, wanted, outer),
        )
        for out in SOURCES:
            got = CPU.dequantize(wanted, scheme, how, k, out, outer)
            assert_same_values(got, REFERENCE.dequantize(wanted, scheme, how, k, out, outer))


def assert_same_values(got: np.ndarray, wanted: np.ndarray) -> None:
    """Equal dtype and bits."""
    assert got.dtype == wanted.dtype
    wrong = _bits(got) != _bits(wanted)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(f"{wrong.sum()} values differ, first at {at}: {got[at]!r} is not {wanted[at]!r}")
