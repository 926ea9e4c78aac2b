"""Every row of spec/seeds.csv: a claim of the field's texts with its right value, tested here or where ELSEWHERE says.

Rows that speak of models, machines and engines are tested by the code that knows them. Of rows 29, 30, 37, 48 and 49
the sum is here; serving/test_side_by_side.py and serving/test_memory.py find the same numbers in whole models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.codec import decode, decode_table, encode, round_values
from narrowcast.numbers.formats import BF16, E2M1, E4M3FN, E5M2, E8M0, FP16, FP32, INT8, formats
from narrowcast.tensors.schemes import Scheme, schemes
from reference.fractions_oracle import number, rows

ELSEWHERE = {
    range(38, 42): ("serving/test_side_by_side.py", "test_decode_floors_of_llama_3_8b"),
    range(42, 43): ("serving/test_side_by_side.py", "test_parameters_of_llama_3_8b"),
    range(43, 44): ("model/test_geometry.py", "test_seeds_on_llama_3_8b"),
    range(44, 46): ("serving/test_memory.py", "test_llama_3_8b_on_an_l4"),
    range(46, 47): ("hardware/test_gpus.py", "test_ridge_points"),
    range(47, 48): ("serving/test_side_by_side.py", "test_gain_of_fp8_with_a_wide_head"),
    range(55, 56): ("hardware/test_gpus.py", "test_the_published_table"),
    range(56, 57): ("serving/test_command.py", "test_the_old_name_of_fp8_is_replaced_and_said"),
}
Row = dict[str, str]
ROW_OF_SEVEN = np.array([[0.02, -0.5, 1.3, 7.9, -0.004, 3.1, 400]], np.float32)
SEEDS: dict[int, Callable[[Row], None]] = {}


def seed(*ids: int) -> Callable[[Callable[[Row], None]], Callable[[Row], None]]:
    def register(check: Callable[[Row], None]) -> Callable[[Row], None]:
        SEEDS.update(dict.fromkeys(ids, check))
        return check

    return register


def spelled(values: str) -> list[Fraction]:
    """Numbers between semicolons, without what stands in brackets."""
    return [number(part.split(" (")[0].strip()) for part in values.split(";")]


@pytest.mark.parametrize("row", rows("seeds.csv"), ids=lambda row: row["id"])
def test_seed(row: Row) -> None:
    key = int(row["id"])
    if key in SEEDS:
        SEEDS[key](row)
    else:
        assert any(key in group for group in ELSEWHERE), f"seed {key} is neither tested nor listed"


@pytest.mark.parametrize(("file", "test"), ELSEWHERE.values())
def test_what_is_listed_elsewhere_is_there(file: str, test: str) -> None:
    text = (Path(__file__).parents[1] / file).read_text()
    assert f"\ndef {test}(" in text


def test_nothing_listed_elsewhere_is_tested_here() -> None:
    assert not any(key in group for key in SEEDS for group in ELSEWHERE)
    assert len(SEEDS) + sum(len(group) for group in ELSEWHERE) == len(rows("seeds.csv"))


@seed(*range(1, 9))
def largest(row: Row) -> None:
    wanted = float(row["expected"])
    tolerance = float(row["tolerance"].split()[0]) if "relative" in row["tolerance"] else 0.0
    assert abs(formats[row["inputs"]].max - wanted) <= tolerance * wanted


@seed(9, 10)
def smallest(row: Row) -> None:
    assert formats[row["inputs"]].min == float(row["expected"])


@seed(11, 13)
def smallest_normal(row: Row) -> None:
    assert formats[row["inputs"]].smallest_normal == number(row["expected"])


@seed(12)
def smallest_subnormal(row: Row) -> None:
    assert formats[row["inputs"]].smallest_subnormal == number(row["expected"])


@seed(14)
def epsilon(row: Row) -> None:
    assert BF16.epsilon == number(row["expected"])
    for e in range(2, 8):
        assert formats[f"e{e}m3"].epsilon == 2.0**-3


@seed(15)
def unit_roundoff(row: Row) -> None:
    assert BF16.unit_roundoff == number(row["expected"])


@seed(16)
def extended_range(row: Row) -> None:
    assert [formats[name].max for name in row["inputs"].split("; ")] == spelled(row["expected"])
    assert E4M3FN.max == 1.75 * 2**8


@seed(17)
def magnitudes(row: Row) -> None:
    table = decode_table(E2M1)
    assert sorted(table[table >= 0][:8].tolist()) == [float(v) for v in row["expected"].split()]


@seed(18)
def codes(row: Row) -> None:
    assert 1 << E2M1.bits == int(row["expected"]) == len(decode_table(E2M1))


@seed(19)
def tf32(row: Row) -> None:
    assert formats["tf32"].bits == int(row["expected"])
    assert not formats["tf32"].storable


@seed(20)
def one_byte(row: Row) -> None:
    code = int(row["claim"].split()[-1], 2)
    wanted = spelled(row["expected"])
    assert [formats[name].value(code) for name in row["inputs"].split("; ")] == wanted


@seed(21)
def spacing(row: Row) -> None:
    wanted = [float(v) for v in spelled(row["expected"])]
    assert [E4M3FN.spacing(4.0), E4M3FN.spacing(8.0)] == wanted
    assert [E4M3FN.spacing(7.99), E4M3FN.spacing(15.99)] == wanted


@seed(22)
def exact_in_both(row: Row) -> None:
    x = np.array([1.375])
    assert decode(encode(x, E4M3FN).codes, E4M3FN)[0] == 1.375
    assert decode(encode(x * 8, INT8).codes, INT8)[0] / 8 == 1.375
    assert (x * 4 % 1).any(), "a scale of 1/4 is not enough"
    assert INT8.max / 8 == float(row["expected"])


@seed(23)
def per_binade(row: Row) -> None:
    values = decode_table(E4M3FN)
    count, share = row["expected"].split("; ")
    for low in 2.0 ** np.arange(-6, 8):
        assert ((values >= low) & (values < 2 * low)).sum() == int(count)
        assert E4M3FN.spacing(low) / low == float(share.removesuffix(" %")) / 100


@seed(24)
def seventy_thousand(row: Row) -> None:
    x = np.array([70000.0])
    assert row["expected"] == "70144; inf (special) or 65504 (saturate)"
    assert decode(encode(x, BF16).codes, BF16)[0] == 70144
    assert decode(encode(x, FP16, overflow="special").codes, FP16)[0] == np.inf
    assert decode(encode(x, FP16).codes, FP16)[0] == 65504


@seed(25)
def small_values(row: Row) -> None:
    x = np.array([0.0005, 0.001, 2.0**-10])
    got = decode(encode(x, E4M3FN).codes, E4M3FN)
    assert got.tolist() == [float(v) for v in spelled(row["expected"])]
    assert abs(got[1] - 0.001) / 0.001 == pytest.approx(0.953, abs=5e-4)


@seed(26)
def largest_lands_on_the_largest(row: Row) -> None:
    amax = float(row["inputs"].split()[1])
    x = np.array([[amax, 1.0, -3.0]], np.float32)
    for way in ("narrowcast", "reciprocal"):
        q = quantize(x, with_arithmetic("fp8_channel", way))
        assert q.scales[0][0, 0] == np.float32(0.05)
        assert decode(q.codes, E4M3FN)[0, 0] == 448


def with_arithmetic(scheme: str, name: str) -> Scheme:
    from narrowcast.tensors.schemes import ARITHMETICS

    return schemes[scheme].with_arithmetic(ARITHMETICS[name])


@seed(27)
def row_in_fp8(row: Row) -> None:
    for name in ("fp8_channel", "fp8_tensor"):
        got = quantize(ROW_OF_SEVEN, schemes[name]).dequantize()[0]
        assert [float(f"{v:.4f}") for v in got] == [float(v) for v in row["expected"].split()]


@seed(28)
def row_in_int8(row: Row) -> None:
    scheme = schemes["int8_channel"]
    narrow = replace(scheme, scales=(replace(scheme.inner, span=127.0),))
    got = quantize(ROW_OF_SEVEN, narrow).dequantize()[0]
    assert [f"{v + 0.0:.2f}" for v in got] == [f"{float(v):.2f}" for v in row["expected"].split()]


@seed(29)
def streamed_bits(row: Row) -> None:
    scheme = schemes["int4_g128"].with_scale_format(FP16)
    bits = scheme.bits_per_weight((4096, 4096))
    assert (bits, round(bits / 8, 4)) == (4.125, 0.5156)
    assert row["expected"] == "4.125 bits, 0.5156 bytes"


@seed(30)
def bits_per_weight(row: Row) -> None:
    shape = (4096, 4096)
    got = [schemes[name].bits_per_weight(shape) for name in ("mxfp4", "mxfp8", "nvfp4")]
    got[2] -= 32 / 4096**2  # without the tensor scale
    assert got == [float(v) for v in spelled(row["expected"])]


@seed(31)
def which_scales_hold_ten(row: Row) -> None:
    held = {fmt.name: decode(encode(np.array([10.0]), fmt).codes, fmt)[0] == 10 for fmt in (E8M0, E4M3FN)}
    assert held == {"e8m0": False, "e4m3fn": True}
    assert E4M3FN.value(int(encode(np.array([10.0]), E4M3FN).codes[0])) == Fraction(5, 4) * 8


@seed(32)
def scale_encoding_error(row: Row) -> None:
    """The vendor's input is unpublished; the direction holds for any spread of scales within E4M3's range."""
    scales = np.exp2(np.random.default_rng(32).uniform(-4, 4, 4096))
    error = {f.name: float(np.square(round_values(scales, f) - scales).mean()) for f in (E8M0, E4M3FN)}
    assert error["e8m0"] > 4 * error["e4m3fn"]


@seed(33)
def serial_sum(row: Row) -> None:
    for fmt, wanted in ((BF16, 256), (FP32, 4096)):
        total = np.zeros(1)
        for _ in range(4096):
            total = round_values(total + 1, fmt)
        assert total[0] == wanted


@seed(34)
def serial_bound(row: Row) -> None:
    """|ŝ - s| ≤ γ_{n-1} Σ|x| for a serial sum in bf16, with u the unit roundoff of the format."""
    n, u = 100, BF16.unit_roundoff
    assert u is not None
    gamma = (n - 1) * u / (1 - (n - 1) * u)
    for case in range(20):
        x = round_values(np.random.default_rng(case).standard_normal(n), BF16)
        total = np.zeros(1)
        for value in x:
            total = round_values(total + value, BF16)
        assert abs(total[0] - x.sum()) <= gamma * np.abs(x).sum()


@seed(35)
def unity_scale_cache(row: Row) -> None:
    x = np.array([448.0, 449.0, 1e4, 2.0**-10, -(2.0**-11), np.nextafter(2.0**-10, 1)])
    got = decode(encode(x, E4M3FN).codes, E4M3FN)
    assert got.tolist() == [448, 448, 448, 0, 0, 2.0**-9]


@seed(36)
def wide_cache(row: Row) -> None:
    assert E5M2.max == float(row["expected"])


@seed(37)
def scale_counts(row: Row) -> None:
    for n, k in ((4096, 14336), (576, 1536), (1, 1), (130, 129), (128, 128)):
        wide, high = (k + 127) // 128, (n + 127) // 128
        wanted = {"fp8_tensor": 1, "fp8_channel": n, "fp8_group128": n * wide, "fp8_block128": high * wide}
        for name, count in wanted.items():
            assert schemes[name].inner.count((n, k)) == count
            if n * k < 1e6:
                assert quantize(np.ones((n, k), np.float32), schemes[name]).scales[0].size == count


@seed(48)
def ratios(row: Row) -> None:
    bits = schemes["nvfp4"].bits_per_weight((4096, 4096))
    assert [round(wide / bits, 2) for wide in (16, 8)] == [float(v) for v in spelled(row["expected"])]


@seed(49)
def large_model(row: Row) -> None:
    """671e9 parameters as 128x128 blocks: one byte each and four per block."""
    extra = schemes["fp8_block128"].bits_per_weight((1 << 20, 1 << 20)) / 8 - 1
    assert 671 * extra == pytest.approx(0.16, abs=0.005)


@seed(50)
def deepseek_tiles(row: Row) -> None:
    assert schemes["fp8_group128"].inner.tile == (1, 128)
    assert schemes["fp8_block128"].inner.tile == (128, 128)


@seed(51)
def mx_overhead(row: Row) -> None:
    extra = schemes["mxfp8"].bits_per_weight((4096, 4096)) - 8
    assert extra == 0.25
    assert extra / 8 == pytest.approx(0.031, abs=5e-4)


@seed(52)
def range_ratio(row: Row) -> None:
    assert (E5M2.max / E5M2.smallest) / (E4M3FN.max / E4M3FN.smallest) == 2**14
    assert E5M2.smallest_normal is not None
    assert E4M3FN.smallest_normal is not None
    assert (E5M2.max / E5M2.smallest_normal) / (E4M3FN.max / E4M3FN.smallest_normal) == 2**15


@seed(53)
def reserved_codes(row: Row) -> None:
    """An all-ones exponent costs E4M3 2·2^3 of its 256 codes; E4M3FN gives back all but two."""
    ieee, fn = (int((~np.isfinite(decode_table(formats[name]))).sum()) for name in ("e4m3_ieee", "e4m3fn"))
    assert (ieee, fn) == (16, 2)
    assert f"{ieee / 256:.2%}" == row["expected"].replace(" %", "%")


@seed(54)
def per_token_overhead(row: Row) -> None:
    extra = schemes["fp8_token"].bits_per_weight((17, 4096)) / 8 - 1
    assert extra == 4 / 4096
    assert extra == pytest.approx(0.001, abs=5e-5)


@seed(57)
def one_infinity_in_a_norm(row: Row) -> None:
    x = np.array([1.0, -2.0, np.inf, 4.0])
    with np.errstate(invalid="ignore"):
        normed = x / np.sqrt(np.mean(x * x))
        spread = np.ones((3, 4)) @ normed
    assert normed[[0, 1, 3]].tolist() == [0, 0, 0]
    assert np.isnan(normed[2])
    assert np.isnan(spread).all()
