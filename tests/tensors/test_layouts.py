"""Hardware layouts against what other projects make of the same bytes, typed offsets, loops, and properties.

``golden/layouts.npz`` holds outputs of torchao, vLLM and SGLang; ``golden/layouts.py`` made it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.errors import InputError, UsageError
from narrowcast.tensors.layouts import ROWS, Layout, by_row, by_tile, layout, layouts, layouts_of
from narrowcast.tensors.schemes import schemes, tile_grid

GOLDEN = np.load(Path(__file__).parent / "golden" / "layouts.npz")
CASES = sorted(key.removesuffix("/in") for key in GOLDEN if key.endswith("/in"))
NAMES = {
    "sf": "sf_128x4",
    "nvfp4": "sf_128x4",
    "mxfp8": "sf_128x4",
    "ue8m0": "deepgemm_ue8m0",
    "kv": "nvfp4_kv_linear",
}


def drawn(how: Layout, *shape: int) -> np.ndarray[Any, Any]:
    """Elements that are never zero, so that padding shows."""
    return np.random.default_rng(len(shape)).integers(1, 255, shape).astype(how.element)


@pytest.mark.parametrize("case", CASES)
def test_other_projects_make_the_same_bytes(case: str) -> None:
    how = layout(NAMES[case.split("/")[1]])
    linear, wanted = GOLDEN[f"{case}/in"], GOLDEN[f"{case}/out"]
    stored = how.swizzle(linear)
    assert stored.dtype == wanted.dtype
    assert stored.tobytes() == wanted.tobytes()
    if wanted.ndim > 1:  # torchao and vLLM's MXFP8 return theirs flat
        assert stored.shape == wanted.shape
    assert np.array_equal(how.unswizzle(stored, linear.shape[-how.axes :]), linear)


@pytest.mark.parametrize(
    ("m", "k", "offset"), [(5, 2, 82), (5, 5, 593), (0, 0, 0), (32, 0, 4), (127, 7, 1023)]
)
def test_offsets_that_nvidia_prints(m: int, k: int, offset: int) -> None:
    """The first two stand in nvmath-python 1.0's get_block_scale_offset for an NVFP4 matrix of 128x128; the last is
    the last byte of the second tile."""
    assert layout("sf_128x4").offsets((128, 8))[m, k] == offset


def test_v_scales_by_the_permutation_in_the_kernels_comment() -> None:
    """vLLM describes its swizzle of V as [T/4, 4, 4, S/4] permuted to (0, 2, 3, 1); K stays linear."""
    pages, heads, tokens, head = 2, 3, 8, 128
    data, s = head // 2, head // 16
    rows = drawn(layouts["nvfp4_kv"], pages, 2, heads, tokens, data + s)
    page = layouts["nvfp4_kv"].swizzle(rows).reshape(pages, 2, -1)
    region = heads * tokens * data
    assert np.array_equal(page[:, :, :region].reshape(pages, 2, heads, tokens, data), rows[..., :data])
    scales = page[:, :, region:].reshape(pages, 2, heads, tokens, s)
    assert np.array_equal(scales[:, 0], rows[:, 0, ..., data:])
    v = rows[:, 1, ..., data:].reshape(pages, heads, tokens // 4, 4, 4, s // 4)
    assert np.array_equal(scales[:, 1], v.transpose(0, 1, 2, 4, 5, 3).reshape(pages, heads, tokens, s))


def test_packed_ue8m0_by_loops() -> None:
    """A word holds four scales of one row, the first in its lowest byte; words of one column are neighbours."""
    linear = drawn(layouts["deepgemm_ue8m0"], 6, 5)
    words = [[sum(int(linear[m, 4 * c + j]) << 8 * j for j in range(4) if 4 * c + j < 5) if m < 6 else 0
              for m in range(8)] for c in range(2)]  # fmt: skip
    assert layouts["deepgemm_ue8m0"].swizzle(linear).view(np.uint32).tolist() == words


def test_fp32_scales_are_transposed_at_a_stride_of_16_bytes() -> None:
    linear = drawn(layouts["deepgemm_fp32"], 6, 3)
    stored = layouts["deepgemm_fp32"].swizzle(linear)
    assert stored.shape == (3, 8)
    assert np.array_equal(stored[:, :6], linear.T)
    assert not stored[:, 6:].any()


def unit(how: Layout, a: int, b: int, c: int) -> tuple[int, ...]:
    """A ragged shape that the layout holds."""
    if how.axes == 2:
        return (a, b)
    return (2, b, a % 40 + 1, (64 if how.name == "nvfp4_kv" else 16) * c // 16 * 9)


@pytest.mark.parametrize("how", ROWS, ids=lambda how: how.name)
@settings(max_examples=30, deadline=None)
@given(
    a=st.integers(1, 300),
    b=st.integers(1, 9),
    c=st.integers(1, 2),
    lead=st.sampled_from([(), (1,), (2,), (2, 2)]),
)
def test_exact_inverse_and_padding_zero(how: Layout, a: int, b: int, c: int, lead: tuple[int, ...]) -> None:
    shape = unit(how, a, b, c)
    linear = drawn(how, *lead, *shape)
    stored = how.swizzle(linear)
    assert stored.shape == (*lead, *how.stored(shape))
    assert np.array_equal(how.unswizzle(stored, shape), linear)
    assert np.count_nonzero(stored.view(how.element)) == linear.size
    assert how.offsets(shape).min() >= 0
    offsets = np.broadcast_to(how.offsets(shape), shape)
    assert len(np.unique(offsets)) == offsets.size
    noisy = stored.view(how.element).copy()
    noisy[noisy == 0] = 77
    assert np.array_equal(how.unswizzle(noisy.view(how.word), shape), linear), "padding is not looked at"


def test_blocks_are_spread_over_their_rows_and_back() -> None:
    """DeepGEMM packs one row of scales per row of the matrix, a partial last block cut short."""
    scheme = schemes["fp8_block128_ue8m0"]
    blocks = np.arange(1, 1 + 3 * 5, dtype=np.uint8).reshape(3, 5)
    assert blocks.shape == tile_grid((300, 640), scheme.inner.tile)
    rows = by_row(blocks, scheme.inner.tile, 300)
    assert rows.shape == (300, 5)
    assert all(np.array_equal(rows[m], blocks[m // 128]) for m in range(300))
    assert np.array_equal(by_tile(rows, scheme.inner.tile), blocks)
    rows[299, 0] ^= 1
    with pytest.raises(InputError, match="different scales"):
        by_tile(rows, scheme.inner.tile)
    whole = by_row(np.array([[3.0]], np.float32), (0, 0), 4)
    assert whole.tolist() == [[3.0]] * 4
    assert by_tile(whole, (0, 0)).tolist() == [[3.0]]


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        ("nvfp4", ["sf_128x4"]),
        ("mxfp4", ["sf_128x4", "deepgemm_ue8m0"]),
        ("mxfp8", ["sf_128x4", "deepgemm_ue8m0"]),
        ("mxfp6", ["sf_128x4"]),
        ("mxint8", []),
        ("fp8_group128", ["deepgemm_fp32"]),
        ("fp8_block128", []),
        ("fp8_group128_ue8m0", ["deepgemm_ue8m0"]),
        ("fp8_block128_ue8m0", ["deepgemm_ue8m0"]),
        ("fp8_channel", []),
        ("int4_g128", []),
    ],
)
def test_which_schemes_have_which_layouts(scheme: str, names: list[str]) -> None:
    assert [how.name for how in layouts_of(schemes[scheme])] == names


@pytest.mark.parametrize(
    ("name", "linear"),
    [
        ("sf_128x4", np.ones((4, 4), np.float32)),
        ("sf_128x4", np.ones(4, np.uint8)),
        ("deepgemm_fp32", np.ones((4, 4), np.uint8)),
        ("nvfp4_kv", np.ones((2, 1, 4, 18), np.uint8)),  # a head of 32: two scales cannot take four places
        ("nvfp4_kv", np.ones((2, 1, 4, 20), np.uint8)),
        ("nvfp4_kv_linear", np.ones((3, 1, 4, 18), np.uint8)),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(name: str, linear: np.ndarray[Any, Any]) -> None:
    with pytest.raises(InputError):
        layouts[name].swizzle(linear)


def test_a_stored_array_of_another_shape_is_refused() -> None:
    stored = layouts["sf_128x4"].swizzle(np.ones((5, 3), np.uint8))
    for other in (stored[:64], stored.view(np.int8), stored.ravel()):
        with pytest.raises(InputError, match="not an array of this layout"):
            layouts["sf_128x4"].unswizzle(other, (5, 3))
    with pytest.raises(UsageError, match="unknown layout"):
        layout("marlin")


@pytest.mark.parametrize(("m", "columns", "k"), [(0, 1, 0), (129, 9, 8), (300, 5, 2), (33, 4, 3)])
@pytest.mark.parametrize("name", ["sf_128x4", "deepgemm_ue8m0", "deepgemm_fp32"])
def test_the_formula_in_the_row_is_what_it_does(name: str, m: int, columns: int, k: int) -> None:
    rows, how = 301, layouts[name]
    terms, _, named = how.formula.partition(";")[0].partition(" ")[2].partition(", ")
    constant, _, value = named.partition(" = ")
    scope = {"m": m, "k": k, "rows": rows, "columns": columns}
    scope[constant] = eval(value.replace("/", "//"), {}, scope)
    assert how.offsets((rows, columns))[m, k] == eval(terms.replace("/", "//"), {}, scope)


def test_every_row_says_where_it_is_defined() -> None:
    assert all(how.source and how.pads and how.formula for how in ROWS)
    assert len(layouts) == len(ROWS)


def test_the_page_about_layouts_says_the_same() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "layouts.md").read_text().split())
    assert all(f"- `{how.name}`: {how.formula}." in page for how in ROWS)
