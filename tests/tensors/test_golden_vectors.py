"""Golden vectors of compressed-tensors 0.20.1, reproduced to the byte with its arithmetic and rules.

The input is w[i, j] = ((64·i + j)·37 mod 101 - 50) / 32 in bf16, 4 x 64, with row 3 all zero; groups of 128 are run
with 32. The file was written by the library itself, and the library of the test environment must agree with it.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from narrowcast.kernels.reference.dequantize import dequantize
from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.codec import to_bf16
from narrowcast.numbers.formats import BF16, FP16, FP32, Format
from narrowcast.tensors.schemes import Scheme, as_peer, schemes
from reference.compressed_tensors_peer import (
    WEIGHT_SCHEMES,
    as_state,
    compress,
    decompress,
    observe,
    peer_scheme,
    raw,
    to_torch,
)

FILE = Path(__file__).parent / "golden" / "compressed_tensors_0_20_1.csv"
PRESETS = [preset for preset in WEIGHT_SCHEMES if preset != "FP8_BLOCK"]  # the input is smaller than a block
SOURCES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}


def golden_input() -> NDArray[np.float32]:
    w = ((np.arange(256) * 37 % 101 - 50) / 32).astype(np.float32).reshape(4, 64)
    w[3] = 0
    return w


def golden(preset: str) -> dict[str, dict[str, str]]:
    with FILE.open(newline="") as file:
        return {row["part"]: row for row in csv.DictReader(file) if row["preset"] == preset}


def small_groups(name: str) -> str:
    return name.replace("_g128", "_g32")


def peer_of(preset: str, source: Format = BF16) -> Scheme:
    """Our scheme under the library's arithmetic, its 16- or 32-bit scales in the source's dtype."""
    scheme = as_peer(schemes[small_groups(WEIGHT_SCHEMES[preset])], "compressed-tensors")
    return scheme.with_scale_format(source) if scheme.inner.format is BF16 else scheme


def library_scheme(preset: str):  # type: ignore[no-untyped-def]
    return peer_scheme(preset, 32 if "_g128" in WEIGHT_SCHEMES[preset] else None)


@pytest.mark.parametrize("preset", PRESETS)
def test_golden_bytes(preset: str) -> None:
    q = quantize(golden_input(), peer_of(preset), source=BF16)
    state = as_state(q, library_scheme(preset))
    wanted = golden(preset)
    assert set(state) == set(wanted)
    for part, row in wanted.items():
        shape = "x".join(str(size) for size in state[part].shape)
        assert str(state[part].dtype) == f"torch.{row['dtype']}", part
        assert shape == row["shape"], part
        assert raw(state[part]) == row["hex"], part


@pytest.mark.parametrize("preset", PRESETS)
def test_the_installed_library_writes_the_golden_bytes(preset: str) -> None:
    state = compress(to_torch(golden_input(), BF16), library_scheme(preset))
    assert {part: raw(tensor) for part, tensor in state.items()} == {
        part: row["hex"] for part, row in golden(preset).items()
    }


def test_minus_128_is_used_and_zero_rows_are_zero() -> None:
    row = bytes.fromhex(golden("W8A8")["weight"]["hex"])
    assert row[0] == 0x80
    for preset in PRESETS:
        q = quantize(golden_input(), peer_of(preset), source=BF16)
        assert not q.dequantize()[3].any(), preset


def random_weight(seed: int, deviation: float) -> NDArray[np.float64]:
    """Rows over twelve binades, columns off centre, a zero tile and a zero row."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((48, 256)) * deviation * np.exp2(rng.integers(-6, 6, (48, 1)))
    w += deviation * rng.standard_normal((48, 1)) / 4
    w[5], w[7, 32:64] = 0, 0
    return np.asarray(w)


@pytest.mark.parametrize("deviation", [0.02, 1.0, 1e-4, 1e-37])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("preset", WEIGHT_SCHEMES)
def test_random_weights_to_the_bit(preset: str, source: str, deviation: float) -> None:
    """Scales, zero points, codes and packing on weights of three dtypes and three sizes."""
    fmt = SOURCES[source]
    w = to_torch(random_weight(len(preset), deviation).astype(np.float32), fmt)
    q = quantize(w.float().numpy(), peer_of(preset, fmt), source=fmt)
    ours, theirs = as_state(q, library_scheme(preset)), compress(w, library_scheme(preset))
    assert set(ours) == set(theirs)
    for part, tensor in theirs.items():
        assert ours[part].dtype == tensor.dtype, part
        assert raw(ours[part]) == raw(tensor), f"{part} differs"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("preset", WEIGHT_SCHEMES)
def test_what_the_library_reads_is_our_decode_as_the_library(preset: str, source: str) -> None:
    """Our own defaults, written as the library's file, decode there to exactly ``as_="compressed-tensors"``."""
    fmt = SOURCES[source]
    golden_ = to_torch(golden_input(), fmt)
    weights = [to_torch(random_weight(3, 0.02).astype(np.float32), fmt)]
    weights += [] if preset == "FP8_BLOCK" else [golden_]
    for w in weights:
        scheme = schemes[small_groups(WEIGHT_SCHEMES[preset])]
        scheme = scheme.with_scale_format(fmt) if scheme.inner.format is BF16 else scheme
        q = quantize(w.float().numpy(), scheme, source=fmt)
        library = library_scheme(preset)
        read = decompress(as_state(q, library), library)
        if read.dtype is torch.bfloat16:
            ours = torch.from_numpy(dequantize(q, BF16, as_="compressed-tensors").view(np.int16))
            assert torch.equal(read.view(torch.int16), ours)
        else:
            assert np.array_equal(read.float().numpy(), dequantize(q, as_="compressed-tensors"))


@pytest.mark.parametrize("preset", WEIGHT_SCHEMES)
def test_the_exact_decode_differs_from_the_library_by_one_rounding(preset: str) -> None:
    """Both round the same product; the library once more where it works in bf16."""
    scheme = schemes[small_groups(WEIGHT_SCHEMES[preset])]
    q = quantize(random_weight(9, 0.02).astype(np.float32), scheme)
    exact, peer = dequantize(q), dequantize(q, as_="compressed-tensors")
    if scheme.inner.format is FP32:
        assert np.array_equal(exact, peer)
    elif len(q.scales) == 1:
        assert np.array_equal(to_bf16(exact), to_bf16(peer))
    else:
        assert np.array_equal(exact, peer), "a power-of-two outer scale divides exactly"


def test_observed_scales_have_the_layout_that_the_schemes_say() -> None:
    w = to_torch(random_weight(1, 0.02).astype(np.float32), BF16)
    for preset, name in WEIGHT_SCHEMES.items():
        scale = observe(w, library_scheme(preset))["weight_scale"]
        q = quantize(w.float().numpy(), schemes[small_groups(name)], source=BF16)
        assert scale.numel() == q.scales[0].size
