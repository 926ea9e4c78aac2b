"""The compiled survey is the reference's, bit for bit; the reference is what a loop over elements finds."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.audit.matrix import ranks
from narrowcast.errors import InputError
from narrowcast.kernels import choose_pairs, choose_survey
from narrowcast.kernels.cpu import survey as compiled
from narrowcast.kernels.reference.survey import pairs, survey, tile_maxima
from narrowcast.numbers.formats import Kind, formats
from narrowcast.tensors.packing import BYTES, pack, packing, unpack
from narrowcast.tensors.schemes import Tile

NARROW = [fmt for fmt in formats.values() if fmt.bits <= 8]
TILES = ((1, 16), (1, 32), (1, 128), (128, 128), (1, 0), (0, 0), (3, 8), (2, 5), (0, 32), (4, 0))


def assert_same(packed: np.ndarray, how: object, k: int, tile: Tile, table: np.ndarray) -> None:
    got, wanted = choose_survey(how)(packed, how, k, tile, table), survey(packed, how, k, tile, table)  # type: ignore[arg-type]
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("fmt", NARROW, ids=lambda fmt: fmt.name)
def test_every_format_and_tile(fmt: object, tile: Tile) -> None:
    bits = fmt.bits  # type: ignore[attr-defined]
    rng = np.random.default_rng(3)
    for how in {packing(bits), packing(bits, word=32), packing(bits, flip=True, word=32), BYTES}:
        for n, k in ((1, 1), (5, 64), (130, 384), (7, 200), (3, 33)):
            packed = pack(rng.integers(0, 1 << bits, (n, k), dtype=np.uint8), how)
            assert_same(packed, how, k, tile, ranks(fmt))  # type: ignore[arg-type]


@given(
    data=st.data(), bits=st.sampled_from((2, 3, 4, 6, 8)), flip=st.booleans(), word=st.sampled_from((8, 32))
)
@settings(max_examples=150, deadline=None)
def test_any_bytes(data: st.DataObject, bits: int, flip: bool, word: int) -> None:
    how = packing(bits, flip=flip, word=word)
    n, k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 300))
    tile = data.draw(st.sampled_from(TILES))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << data.draw(st.integers(0, bits)), (n, k), dtype=np.uint8)
    packed = pack(codes, how)
    packed |= (
        pack(np.zeros((n, k), np.uint8), how) & 0
    )  # as a container would hand it over: writable, contiguous
    table = rng.integers(0, 256, 1 << bits, dtype=np.uint8)
    named = [ranks(fmt) for fmt in NARROW if fmt.bits == bits]
    assert_same(packed, how, k, tile, data.draw(st.sampled_from([table, *named])))


def test_padding_is_not_counted() -> None:
    """Bytes beyond the row may hold anything."""
    how, table = packing(4, flip=True, word=32), ranks(formats["int4"])
    packed = pack(np.zeros((3, 10), np.uint8), how)
    packed[:, 5:] = 0x77
    assert_same(packed, how, 10, (1, 0), table)
    assert choose_survey(how)(packed, how, 10, (1, 0), table)[0].tolist() == [30] + [0] * 15


def test_reference_is_a_loop_over_elements() -> None:
    rng, fmt = np.random.default_rng(1), formats["e5m2"]
    codes = rng.integers(0, 256, (5, 40), dtype=np.uint8)
    codes[0, :16] = 0x7D  # a tile of NaN has rank 0
    counts, peaks = survey(codes, BYTES, 40, (2, 16), ranks(fmt))
    assert [int((codes == c).sum()) for c in range(256)] == counts.tolist()
    magnitudes = sorted({abs(float(v)) for c in range(256) if not isinstance(v := fmt.value(c), str)})
    for i in range(3):
        for j in range(3):
            part = codes[2 * i : 2 * i + 2, 16 * j : 16 * j + 16].reshape(-1)
            finite = [abs(float(v)) for c in part if not isinstance(v := fmt.value(int(c)), str)]
            assert magnitudes[peaks[i, j]] == max(finite, default=0.0)


@given(st.integers(0, 2**32 - 1), st.integers(1, 256), st.integers(0, 5), st.integers(0, 70))
@settings(max_examples=30, deadline=None)
def test_pairs(seed: int, rows: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, rows, (n, k), np.uint8), rng.integers(0, 256, (n, k), np.uint8)
    wanted = np.zeros((rows, 256), np.int64)
    np.add.at(wanted, (first, second), 1)
    for found in (choose_pairs()(first, second, rows), pairs(first, second, rows)):
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 6, 8, 64, 96, 128, 0])
@pytest.mark.parametrize("rows", [1, 2, 3, 0])
def test_tile_maxima(rows: int, columns: int) -> None:
    codes = np.random.default_rng(2).integers(0, 256, (6, 384), dtype=np.uint8)
    found = tile_maxima(codes, (rows, columns))
    r, c = rows or 6, columns or 384
    for i, j in np.ndindex(found.shape):
        assert found[i, j] == codes[i * r : (i + 1) * r, j * c : (j + 1) * c].max()
    assert found.shape == (-(-6 // r), -(-384 // c))


def test_keys_order_every_format_but_tables() -> None:
    """What the compiled survey cannot order is known: a change here costs speed in silence."""
    without = {fmt.name for fmt in NARROW if compiled.key_of(ranks(fmt).tobytes(), fmt.bits) is None}
    assert without == {fmt.name for fmt in NARROW if fmt.kind is Kind.TABLE} | {
        "e8m0"
    }  # which no element has


@pytest.mark.parametrize("run", [survey, compiled.survey])
def test_refuses_a_byte_that_is_no_code(run: object) -> None:
    with pytest.raises(InputError, match="no code of the format"):
        run(np.full((2, 64), 16, np.uint8), BYTES, 64, (1, 32), ranks(formats["int4"]))  # type: ignore[operator]


def test_chosen_by_width_and_light() -> None:
    """Other widths are the reference's, and choosing imports no numba."""
    assert choose_survey(packing(6)) is survey
    assert choose_survey(packing(4)) is choose_survey(BYTES) is compiled.survey
    code = (
        "import sys; from narrowcast.kernels import choose_survey; from narrowcast.tensors.packing import BYTES;"
        "choose_survey(BYTES); sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unpacked_and_packed_agree() -> None:
    """The same codes counted in nibbles and in bytes."""
    how, table = packing(4), ranks(formats["e2m1"])
    packed = np.random.default_rng(5).integers(0, 256, (33, 96), dtype=np.uint8)
    wide = choose_survey(BYTES)(unpack(packed, how, 192), BYTES, 192, (1, 16), table)
    near = choose_survey(how)(packed, how, 192, (1, 16), table)
    for a, b in zip(wide, near, strict=True):
        np.testing.assert_array_equal(a, b)
