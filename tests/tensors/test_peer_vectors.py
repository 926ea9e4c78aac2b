"""Small vectors from the tests of other projects: scale exponents, paddings, packings, element rounding.

Sources: compressed-tensors (git ac8e2ba) test_mxfp4_utils, test_fp4_utils, test_fp4_quant, block padding; Quark's
packer; torchao (git 36027d8) _mxfp8_test_utils, test_mx_tensor, test_kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
from compressed_tensors.quantization.utils.helpers import calculate_block_padding

from narrowcast.errors import NonFiniteError
from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.codec import decode, encode, to_bf16
from narrowcast.numbers.formats import BF16, E2M1, E4M3FN
from narrowcast.tensors.packing import pack, packing
from narrowcast.tensors.scaling import power_of_two_codes
from narrowcast.tensors.schemes import schemes, tile_grid

ROUND_TO_POWER_2 = {
    (5.687891, -8.291567, -1.540329, -0.315635, 0.965272): (4, -8, -1, -0.25, 1),
    (-6.944130, 0.073246, -0.451778, 8.571118, -9.856593): (-4, 0.0625, -0.5, 8, -8),
    (-0.040571, -0.708509, 2.485657, -4.003352, -0.995600): (-0.03125, -0.5, 2, -4, -1),
    (0.224199, 5.032586, -1.309816, -0.621958, 7.290238): (0.25, 4, -1, -0.5, 8),
    (-9.848001, -0.290731, 1.501562, 0.379829, -5.312081): (-8, -0.25, 1, 0.25, -4),
}
RCEIL = {
    "00000001": 0, "00400000": 0, "00400001": 1, "007FFFFF": 1, "00800000": 1, "1F800000": 63, "1F800001": 64,
    "3F7FFFFF": 127, "3F800000": 127, "3F800001": 128, "5F800000": 191, "5F800001": 192, "7F000000": 254,
}  # fmt: skip
SUBNORMAL_BLOCK = (
    6142315, 5096174, 3345704, 6178415, 5728750, 419002, 1716691, 4335089, 5785800, 6234845, 1697524, 33075, 3975816,
    3714822, 5411407, 3040844, 7400945, 4474166, 7257182, 1273750, 5872176, 4694081, 2096530, 6273621, 67028, 7585260,
    4532315, 4599275, 6133942, 4542483, 5992199, 6862780,
)  # fmt: skip
SUBNORMAL_CODES = (
    60, 58, 53, 60, 59, 29, 45, 56, 59, 60, 45, 4, 55, 54, 58, 52, 62, 57, 62, 42, 59, 57, 48, 60, 8, 62, 57, 57, 60,
    57, 59, 61,
)  # fmt: skip
NORMAL_BLOCK = (
    8388608, 1063716449, 1064039365, 1063568877, 1051091338, 1062185569, 1034449408, 1060813641, 1054893736,
    1034907680, 1036660744, 1023639888, 1058536559, 1050896496, 1049237634, 1064950601, 1051852994, 1059794063,
    1054011102, 1062023602, 1059467900, 1062276774, 1059155029, 1053287574, 1064378711, 1055768540, 1045266076,
    1059575077, 1054928758, 1040468200, 1058061961, 1053066436,
)  # fmt: skip
NORMAL_CODES = (
    0, 118, 119, 118, 106, 117, 91, 116, 110, 91, 93, 80, 113, 106, 105, 120, 107, 115, 109, 117, 114, 117, 114, 108,
    119, 111, 101, 114, 110, 96, 113, 108,
)  # fmt: skip


def test_round_to_power_of_two_is_the_bump_rule() -> None:
    """The vectors are bf16; the library rounds to the power of two first and takes 2 off the exponent later."""
    for values, wanted in ROUND_TO_POWER_2.items():
        x = np.abs(decode(to_bf16(np.array(values, np.float32)), BF16))
        byte = power_of_two_codes(x, "bump(1.75)", E2M1).astype(int)
        assert np.exp2(byte - 127.0 + 2).tolist() == np.abs(wanted).tolist()


@pytest.mark.parametrize(
    ("values", "wanted"),
    [((-0.5, -6), 0xF9), ((-0.5, -1.5), 0xB9), ((-1, 6), 0x7A), ((0, -0.0), 0x80), ((0.5, -6.0), 0xF1)],
)
def test_fp4_pairs(values: tuple[float, float], wanted: int) -> None:
    assert pack(encode(np.array([values]), E2M1).codes, packing(4)).tolist() == [[wanted]]


def test_fp4_row_of_the_library() -> None:
    row = np.array([[-0.5, -6, -0.5, -1.5, -1, 6, 0, -0.0]])
    assert pack(encode(row, E2M1).codes, packing(4)).tobytes().hex() == "f9b97a80"


def test_quark_packs_low_nibble_first() -> None:
    assert pack(np.array([[1, 2, 3, 4]], np.uint8), packing(4)).tolist() == [[0x21, 0x43]]


def test_e2m1_rounding() -> None:
    ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}
    others = {0.3: 0.5, 0.6: 0.5, 0.9: 1, 1.3: 1.5, 1.8: 2, 2.7: 3, 4.5: 4, 7: 6}
    x = np.array([*ties, *others])
    wanted = [*ties.values(), *others.values()]
    assert decode(encode(x, E2M1).codes, E2M1).tolist() == wanted
    assert decode(encode(-x, E2M1).codes, E2M1).tolist() == [-v for v in wanted]


def test_e2m1_codes_of_torchao() -> None:
    wanted = {0.25: 0, 0.4: 1, 0.6: 1, 1.25: 2, 1.6: 3, 2.5: 4, 2.9: 5, 3.1: 5, 5.0: 6}
    x = np.array(list(wanted))
    assert encode(x, E2M1).codes.tolist() == list(wanted.values())
    assert encode(-x, E2M1).codes.tolist() == [code | 8 for code in wanted.values()]


@pytest.mark.parametrize(
    ("shape", "padding"),
    [
        ((10944, 2048), (64, 0)),
        ((100, 200), (28, 56)),
        ((300, 256), (84, 0)),
        ((256, 300), (0, 84)),
        ((100, 100), (28, 28)),
    ],
)
def test_partial_blocks(shape: tuple[int, int], padding: tuple[int, int]) -> None:
    """The library pads where a tile grid rounds up."""
    assert calculate_block_padding(shape, (128, 128)) == padding
    grid = tile_grid(shape, (128, 128))
    assert tuple(128 * tiles - size for tiles, size in zip(grid, shape, strict=True)) == padding


def test_rceil_bytes() -> None:
    """The table encodes v = amax / 448; here the mantissa of amax itself is compared, so 448·v is given exactly."""
    v = np.array([int(word, 16) for word in RCEIL], np.uint32).view(np.float32).astype(np.float64)
    assert power_of_two_codes(448 * v, "rceil", E4M3FN).tolist() == list(RCEIL.values())


def test_where_our_rceil_leaves_the_table() -> None:
    """Zero has scale 1 (byte 127; as the peers, byte 0); beyond 2^127 the scale is clamped and the values clip,
    where the table stores NaN; infinity and NaN are refused before any scale is made."""
    v = np.array([0x00000000, 0x7F000001, 0x7F7FFFFF], np.uint32).view(np.float32).astype(np.float64)
    assert power_of_two_codes(448 * v, "rceil", E4M3FN).tolist() == [127, 254, 254]
    assert power_of_two_codes(448 * v, "rceil", E4M3FN, "eps").tolist() == [0, 254, 254]
    for value in (np.inf, np.nan):
        with pytest.raises(NonFiniteError):
            quantize(np.full((1, 32), value, np.float32), schemes["mxfp8"])


def test_dividing_first_differs_only_where_the_quotient_is_subnormal() -> None:
    """fp32 amax / 448 rounds. Among normals it cannot hide an excess: one unit of amax is more than half a unit of
    the quotient, since the mantissa 1.75 is below 2. A subnormal quotient has fewer bits and hides it, so there the
    division gives byte 0 where amax is already above 448·2^-127 and clips by less than one part in 2^23."""
    boundary = np.ldexp(np.float32(448), np.arange(-126, 119))
    above = np.nextafter(boundary, np.float32(np.inf), dtype=np.float32)
    exact = power_of_two_codes(above, "rceil", E4M3FN)
    quotient = (above / np.float32(448)).astype(np.float64)
    first = np.ceil(np.log2(quotient)).astype(int) + 127
    assert np.array_equal(exact, first)
    edge = np.nextafter(np.ldexp(np.float32(448), -127), np.float32(1))
    assert power_of_two_codes(edge, "rceil", E4M3FN) == 1
    assert edge / np.float32(448) == np.float32(2.0**-127), "the excess is gone"


@pytest.mark.parametrize(
    ("bits", "byte", "codes"), [(SUBNORMAL_BLOCK, 0, SUBNORMAL_CODES), (NORMAL_BLOCK, 119, NORMAL_CODES)]
)
def test_mxfp8_blocks(bits: tuple[int, ...], byte: int, codes: tuple[int, ...]) -> None:
    q = quantize(np.array([bits], np.uint32).view(np.float32), schemes["mxfp8"].with_rule("rceil"))
    assert q.scales[0].tolist() == [[byte]]
    assert q.codes.tolist() == [list(codes)]


def test_mxfp8_zero_block_decodes_to_zero() -> None:
    q = quantize(np.zeros((1, 32), np.float32), schemes["mxfp8"])
    assert q.codes.tolist() == [[0] * 32]
    assert not q.dequantize().any()
