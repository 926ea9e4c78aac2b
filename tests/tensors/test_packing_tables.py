"""Packing against compressed-tensors' packers and an integer bit stream, and every round trip."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp6.helpers import pack_fp6_to_uint8, unpack_fp6_from_uint8
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from narrowcast.errors import UsageError
from narrowcast.numbers.codec import decode
from narrowcast.numbers.formats import E2M1, E2M3
from narrowcast.tensors.packing import BYTES, Packing, pack, packing, unpack

quick = settings(max_examples=60, deadline=None, derandomize=True)
packings = st.builds(
    lambda bits, flip, word: packing(bits, flip=flip, word=word),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([8, 32]),
)
shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 70))


def random_codes(shape: tuple[int, ...], bits: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 1 << bits, shape).astype(np.uint8)


def stream_of(row: NDArray[np.uint8], how: Packing) -> bytes:
    """One row as a little-endian integer: code i at bit i·b, signs flipped, padded to whole words."""
    word = sum((int(code) ^ how.flip) << (i * how.bits) for i, code in enumerate(row))
    bits = -(-len(row) * how.bits // how.word) * how.word
    return word.to_bytes(bits // 8, "little")


@quick
@given(packings, shapes, st.integers(0, 2**32 - 1))
def test_a_row_is_one_little_endian_bit_stream(how: Packing, shape: tuple[int, ...], seed: int) -> None:
    codes = random_codes(shape, how.bits, seed)
    packed = pack(codes, how)
    assert packed.dtype == np.uint8
    assert packed.shape == (*shape[:-1], how.row_bytes(shape[-1]))
    assert packed.flags.c_contiguous
    for index in np.ndindex(*shape[:-1]):
        assert packed[index].tobytes() == stream_of(codes[index], how)


@quick
@given(packings, shapes, st.integers(0, 2**32 - 1))
def test_round_trip(how: Packing, shape: tuple[int, ...], seed: int) -> None:
    codes = random_codes(shape, how.bits, seed)
    again = unpack(pack(codes, how), how, shape[-1])
    assert again.dtype == np.uint8
    assert np.array_equal(again, codes)


@pytest.mark.parametrize("k", [1, 7, 8, 31, 32, 33, 40, 64, 130])
@pytest.mark.parametrize("bits", range(1, 9))
def test_int32_words_of_compressed_tensors(bits: int, k: int) -> None:
    """q + 2^(b-1), dense across words, zero bits at the end: 2-D and stacked, along rows and along columns."""
    codes = random_codes((2, 6, k), bits, bits)
    how = packing(bits, flip=True, word=32)
    signed = (codes.astype(np.int16) ^ how.flip) - how.flip  # two's complement of that width
    value = torch.from_numpy(signed.astype(np.int8))
    theirs = pack_to_int32(value, bits)
    assert theirs.numpy().tobytes() == pack(codes, how).tobytes()
    back = unpack_from_int32(torch.from_numpy(pack(codes, how)).view(torch.int32), bits, value.shape)
    assert torch.equal(back, value)
    down = pack_to_int32(value[0], bits, packed_dim=0)
    ours = pack(np.ascontiguousarray(codes[0].T), how).view(np.int32).T
    assert np.array_equal(down.numpy(), ours)


@pytest.mark.parametrize(
    ("values", "bits", "wanted"),
    [
        ([-4, -1, 2, -3, 0, 3, -2, 1] * 5, 3, "98c3ab98c3ab98c3ab98c3ab98c3ab00"),
        ([-8, -3, 2, 7, -4, 1, 6, -5, 0, 5], 4, "50fa943ed8000000"),
        ([-32, 5, -22, 15, -12, 25, -2, -29, 8, -19], 6, "40a9bc54ee0d6803"),
    ],
)
def test_words_that_values_straddle(values: list[int], bits: int, wanted: str) -> None:
    codes = np.array([values], np.int8).view(np.uint8) & np.uint8((1 << bits) - 1)
    assert pack(codes, packing(bits, flip=True, word=32)).tobytes().hex() == wanted


def test_fp4_and_fp6_of_compressed_tensors() -> None:
    """Every code in every place; their packers take values, whose codes ours are."""
    codes4 = np.stack([np.arange(16), np.arange(16)[::-1]]).astype(np.uint8)
    values4 = torch.from_numpy(decode(codes4, E2M1).copy()).to(torch.bfloat16)
    assert pack_fp4_to_uint8(values4).numpy().tobytes() == pack(codes4, packing(4)).tobytes()
    back4 = unpack_fp4_from_uint8(torch.from_numpy(pack(codes4, packing(4))), 2, 16)
    assert torch.equal(back4.view(torch.int16), values4.view(torch.int16))
    codes6 = np.stack([np.arange(64), np.arange(64)[::-1]]).astype(np.uint8)
    values6 = torch.from_numpy(decode(codes6, E2M3).copy())
    assert pack_fp6_to_uint8(values6).numpy().tobytes() == pack(codes6, packing(6)).tobytes()
    back6 = unpack_fp6_from_uint8(torch.from_numpy(pack(codes6, packing(6))), 2, 64, torch.float32)
    assert torch.equal(back6.view(torch.int32), values6.view(torch.int32))


def test_fp6_is_four_codes_in_three_bytes() -> None:
    c = [0b100001, 0b000010, 0b111100, 0b010101]
    word = c[0] | c[1] << 6 | c[2] << 12 | c[3] << 18
    assert pack(np.array([c], np.uint8), packing(6)).tobytes() == word.to_bytes(3, "little")


def test_bytes_need_no_packing() -> None:
    codes = random_codes((3, 5), 8)
    assert np.array_equal(pack(codes, BYTES), codes)
    assert np.array_equal(unpack(codes, BYTES, 5), codes)
    assert (BYTES.flip, BYTES.word, BYTES.row_bytes(5)) == (0, 8, 5)


@pytest.mark.parametrize(("bits", "word", "k", "size", "whole"), [
    (4, 8, 7, 4, False), (4, 8, 8, 4, True), (6, 8, 4, 3, True), (6, 8, 2, 2, False), (4, 32, 9, 8, False),
    (3, 32, 40, 16, True), (1, 8, 16, 2, True), (8, 32, 5, 8, True), (2, 8, 3, 1, False),
])  # fmt: skip
def test_row_bytes_and_whole_bytes(bits: int, word: int, k: int, size: int, whole: bool) -> None:
    how = packing(bits, word=word)
    assert (how.row_bytes(k), how.whole(k)) == (size, whole)


def test_padding_is_zero_bits_even_under_an_offset() -> None:
    codes = np.full((1, 9), 8, np.uint8)  # -8, stored as 0
    assert pack(codes, packing(4, flip=True, word=32)).tobytes() == bytes(8)
    assert (
        pack(np.zeros((1, 9), np.uint8), packing(4, flip=True, word=32)).tobytes().hex() == "8888888808000000"
    )


def test_what_cannot_be_packed_is_refused() -> None:
    for bits, word in ((0, 8), (9, 8), (4, 16)):
        with pytest.raises(UsageError, match="no such packing"):
            packing(bits, word=word)
    with pytest.raises(UsageError, match="wrong length"):
        unpack(np.zeros((2, 3), np.uint8), packing(4), 8)
