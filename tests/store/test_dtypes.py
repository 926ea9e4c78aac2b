"""The dtype table against torch, numpy and the safetensors package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import serialize

from narrowcast.errors import UsageError
from narrowcast.store.dtypes import DTYPES, nbytes
from store.raw_files import package_spec


def test_every_dtype_of_the_issue_is_there() -> None:
    spelled = (
        "BOOL U8 I8 U16 I16 F16 BF16 U32 I32 F32 U64 I64 F64 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ "
        "F4 F6_E2M3 F6_E3M2 C64"
    )
    assert set(DTYPES) == set(spelled.split())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_carrier_and_torch_agree_with_the_bits(dtype) -> None:
    assert dtype.carrier.itemsize * 8 == max(dtype.bits, 8)
    if dtype.torch is not None:
        elements_per_item = 2 if dtype.name == "F4" else 1
        assert getattr(torch, dtype.torch).itemsize * 8 == dtype.bits * elements_per_item


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.torch], ids=lambda dtype: dtype.name)
def test_the_package_spells_the_torch_dtype_the_same(dtype) -> None:
    memory = np.zeros(16 * 8, np.uint8)
    text = serialize({"x": package_spec(dtype, (2, 8), memory)})
    assert f'"dtype":"{dtype.name}","shape":[2,8]'.encode() in text


def test_rank_is_the_package_s_order() -> None:
    memory = np.zeros(64, np.uint8)
    named = [dtype for dtype in DTYPES.values() if dtype.torch]
    specs = {dtype.name: package_spec(dtype, (1, 2), memory) for dtype in named}
    text = serialize(specs).decode("latin1")
    by_place = sorted(named, key=lambda dtype: text.index(f'"{dtype.name}":'))
    assert by_place == sorted(named, key=lambda dtype: -dtype.rank)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("BF16", (3, 5), 30),
        ("F32", (), 4),
        ("C64", (2,), 16),
        ("BOOL", (3,), 3),
        ("F4", (2, 3), 3),
        ("F6_E3M2", (4,), 3),
        ("F6_E2M3", (2, 32), 48),
        ("U64", (7, 0, 9), 0),
    ],
)
def test_nbytes(name, shape, expected) -> None:
    assert nbytes(DTYPES[name], shape) == expected


@pytest.mark.parametrize(
    ("name", "shape", "bits"), [("F4", (3,), 12), ("F6_E2M3", (2, 3), 36), ("F4", (), 4)]
)
def test_half_bytes_are_refused(name, shape, bits) -> None:
    with pytest.raises(UsageError, match=f"got: {bits} bits"):
        nbytes(DTYPES[name], shape)


def test_format_names_exist_in_the_number_formats() -> None:
    from narrowcast.numbers.formats import formats

    for dtype in DTYPES.values():
        if dtype.format is not None:
            assert formats[dtype.format].bits == dtype.bits
