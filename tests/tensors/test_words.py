"""Words that run along rows, against what the format's definitions say bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from narrowcast.errors import UsageError
from narrowcast.tensors.packing import pack, packing, unpack
from narrowcast.tensors.words import (
    AWQ_ORDER,
    BITS,
    awq_codes,
    awq_words,
    lie,
    lowered,
    raised,
    stand,
    zero_codes,
    zero_words,
)


def field(words: list[int], bits: int, i: int) -> int:
    """Field i of a stream of words, bit by bit."""
    found = 0
    for b in range(bits):
        at = i * bits + b
        found |= ((words[at // 32] & 0xFFFFFFFF) >> (at % 32) & 1) << b
    return found


@pytest.mark.parametrize("bits", BITS)
def test_codes_stand_in_columns(bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (5, 64), np.uint8)
    how = packing(bits, word=32)
    words = stand(pack(codes, how))
    assert words.shape == (64 * bits // 32, 5)
    assert words.dtype == np.int32
    for n in range(5):
        column = [int(word) for word in words[:, n]]
        assert [field(column, bits, k) for k in range(64)] == codes[n].tolist()
    assert np.array_equal(unpack(lie(words), how, 64), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [8, 32, 40, 96])
def test_zero_points_lie_along_rows(bits: int, n: int) -> None:
    rng = np.random.default_rng(n)
    zero = rng.integers(0, 1 << bits, (n, 3), np.uint8)
    words = zero_words(zero, bits)
    assert words.shape == (3, -(-n * bits // 32))
    for g in range(3):
        row = [int(word) for word in words[g]]
        assert [field(row, bits, i) for i in range(n)] == zero[:, g].tolist()
    assert np.array_equal(zero_codes(words, bits, n), zero)


def test_three_bits_straddle_as_their_packer_writes_them() -> None:
    """Code 10 has two bits in the first word and one in the second, code 21 one and two."""
    zero = np.zeros((32, 1), np.uint8)
    zero[10, 0], zero[21, 0] = 0b101, 0b110
    words = zero_words(zero, 3).view(np.uint32)[0]
    assert [hex(word) for word in words] == ["0x40000000", "0x1", "0x3"]


@pytest.mark.parametrize("bits", BITS)
def test_version_one_counts_one_less(bits: int) -> None:
    """Fields that are not full rise by one each; full ones wrap, and carry except where they straddle."""
    top = (1 << bits) - 1
    rng = np.random.default_rng(bits)
    stored = rng.integers(0, top, (32, 4), np.uint8)
    assert np.array_equal(zero_codes(raised(zero_words(stored, bits), bits), bits, 32), stored + 1)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_borrowed_zero_points_come_back(bits: int) -> None:
    """A writer's subtraction over whole words, done here with Python's integers, is undone exactly."""
    rng = np.random.default_rng(bits)
    zero = rng.integers(0, 1 << bits, (64, 3), np.uint8)
    ones = sum(1 << at for at in range(0, 32, bits))
    plain = zero_words(zero, bits).view(np.uint32)
    written = np.array([[(int(w) - ones) % 2**32 for w in row] for row in plain], np.uint32).view(np.int32)
    assert np.array_equal(zero_codes(raised(written, bits), bits, 64), zero)
    assert np.array_equal(lowered(zero_words(zero, bits), bits), written)


def test_three_bit_zero_points_wrap_one_by_one() -> None:
    zero = np.arange(32, dtype=np.uint8).reshape(32, 1) % 8
    written = zero_words((zero + np.uint8(7)) % np.uint8(8), 3)
    assert np.array_equal(zero_codes(raised(written, 3), 3, 32), zero)
    assert np.array_equal(lowered(zero_words(zero, 3), 3), written)


def test_awq_interleaves_channels() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (24, 7), np.uint8)
    words = awq_words(codes)
    assert words.shape == (7, 3)
    for x in range(7):
        for c in range(3):
            for i, channel in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                assert (int(words[x, c]) >> (4 * i)) & 15 == codes[8 * c + channel, x]
    assert np.array_equal(awq_codes(words), codes)
    assert sorted(AWQ_ORDER) == list(range(8))


def test_what_does_not_fill_words_is_refused() -> None:
    with pytest.raises(UsageError, match="eight rows"):
        awq_words(np.zeros((7, 4), np.uint8))
    with pytest.raises(UsageError, match="32-bit words"):
        stand(np.zeros((2, 6), np.uint8))
