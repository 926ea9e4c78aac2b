"""Blocks against the gguf package, ggml's C code, golden bytes and the definitions of the formats."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from containers import gguf_peer
from narrowcast.containers.gguf_blocks import BLOCKS, WRITTEN, block_type, dequantize, join, quantize, split
from narrowcast.errors import InputError, NonFiniteError, RangeError, UsageError
from narrowcast.numbers.formats import FP16
from narrowcast.store.gguf import GGML_TYPES
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.schemes import schemes

GOLDEN = [
    line.split(",")
    for line in (Path(__file__).parent / "gguf_golden.csv").read_text().splitlines()
    if not line.startswith("#")
]


def golden_input() -> NDArray[np.float32]:
    n, k = np.ogrid[:4, :64]
    x = (((n * 64 + k) * 37) % 101 - 50) / 32
    x[3] = 0
    return x.astype(np.float32)


def inputs(seed: int = 0, n: int = 400, k: int = 128) -> NDArray[np.float32]:
    """Rows of normals at many magnitudes, of values on coarse grids (ties), of powers of two and their neighbours, of a
    few zeros and outliers."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, k)).astype(np.float32) * np.exp2(
        rng.integers(-20, 3, (n, 1)).astype(np.float32)
    )
    rows[1::5] = np.round(rows[1::5] * 8 / np.abs(rows[1::5]).max(axis=1, keepdims=True) * 4) / 16
    powers = np.exp2(rng.integers(-12, 4, (len(rows[2::5]), k))).astype(np.float32)
    rows[2::5] = np.nextafter(powers, np.where(rng.random(powers.shape) < 0.5, np.float32(0), np.float32(99)))
    rows[3::5] = powers[: len(rows[3::5])] * rng.choice([-1, 1], powers.shape)[: len(rows[3::5])]
    rows[4::5][rng.random(rows[4::5].shape) < 0.5] *= 0
    rows[0] = -0.0
    return rows


@pytest.mark.parametrize(("name", "row", "golden"), GOLDEN)
def test_golden_bytes(name: str, row: str, golden: str) -> None:
    assert quantize(GGML_TYPES[name], golden_input())[int(row)].tobytes().hex() == golden


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "NVFP4"])
def test_quantizes_as_the_package(name: str) -> None:
    x = inputs()[1:]  # on minus zeros alone the package's Q4_0 has d = +0 where ggml has -0
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name])
    assert np.array_equal(quantize(GGML_TYPES[name], x), np.ascontiguousarray(theirs).view(np.uint8))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "MXFP4", "NVFP4"])
def test_quantizes_as_ggml(name: str) -> None:
    x, kind = inputs(1), GGML_TYPES[name]
    ours = quantize(kind, x)
    theirs = gguf_peer.quantize(name, x, kind.row_bytes(x.shape[1]))
    assert np.array_equal(ours, theirs), f"{(ours != theirs).any(axis=1).sum()} rows of {len(x)} differ"


def test_mxfp4_exponents_as_ggml_at_every_power_of_two() -> None:
    """floor(log2f(amax)) rounds up just below some powers of two; the three neighbours of each."""
    powers = np.exp2(np.arange(-124, 127, dtype=np.float64)).astype(np.float32)
    around = np.concatenate(
        [powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))]
    )
    below = powers * np.float32(1 - 2**-22)
    x = np.zeros((4 * len(powers), 32), np.float32)
    x[:, 0] = np.concatenate([around, below])
    assert np.array_equal(quantize(GGML_TYPES["MXFP4"], x), gguf_peer.quantize("MXFP4", x, 17))


def test_ue4m3_scales_as_ggml_on_every_rounding() -> None:
    """Block maxima whose sixth lies on and beside every midpoint of UE4M3, up to its end."""
    grid = np.arange(0x7F, dtype=np.uint8)
    values = np.float32(gguf.quants.NVFP4.ue4m3_to_fp32(grid)) * 2
    middle = (values[1:].astype(np.float64) + values[:-1]) / 2
    points = np.concatenate([values, middle]).astype(np.float32)
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(999))]
    )
    x = np.zeros((len(points), 64), np.float32)
    x[:, 5] = np.minimum(points * 6, 2688)
    x[:, 20] = -x[:, 5] / 3
    ours = quantize(GGML_TYPES["NVFP4"], x)
    assert np.array_equal(ours, gguf_peer.quantize("NVFP4", x, 36))
    by_package = gguf.quants.NVFP4.fp32_to_ue4m3(np.abs(x).reshape(len(x), 4, 16).max(axis=2) / np.float32(6))
    assert np.array_equal(ours[:, :4], by_package)


def stored(name: str, n: int = 64, k: int = 256) -> NDArray[np.uint8]:
    """Random bytes of a type, but for scales that no writer makes."""
    rng, row = np.random.default_rng(len(name)), BLOCKS[name]
    rows = rng.integers(0, 256, (n, k // row.type.block, row.type.nbytes), np.uint8)
    if row.scheme.inner.format is FP16:
        rows[..., 1] &= 0xBB  # no infinity and no NaN; negative ones are ggml's own
    else:
        rows[..., : row.scale_bytes] = rng.integers(
            0, 0x7F, (n, k // row.type.block, row.scale_bytes), np.uint8
        )
    return rows.reshape(n, -1)


@pytest.mark.parametrize("name", BLOCKS)
def test_split_and_join_keep_every_bit(name: str) -> None:
    row, rows = BLOCKS[name], stored(name)
    codes, scales = split(row, rows)
    assert codes.shape == (64, 256)
    assert np.array_equal(join(row, codes, scales), rows)


@pytest.mark.parametrize("name", BLOCKS)
def test_split_gives_the_scheme_that_it_names(name: str) -> None:
    """The scheme's own decoding of codes and scales is what the package decodes."""
    row, rows = BLOCKS[name], stored(name)
    codes, scales = split(row, rows)
    levels = (scales, np.ones((1, 1), np.float32)) if row.groups > 1 else (scales,)
    values = QTensor(row.scheme, codes, levels).dequantize()
    theirs = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    assert np.array_equal(values, theirs)
    assert np.array_equal(dequantize(row.type, rows), theirs)
    assert np.array_equal(theirs, gguf_peer.dequantize(name.lower(), rows, 256))


def test_halves_of_a_block() -> None:
    """Byte j holds element j and element 16 + j; of NVFP4, 8 + j of the same 16."""
    codes = (np.arange(64, dtype=np.uint8) % 16)[None]
    mx = join(BLOCKS["MXFP4"], codes, np.full((1, 2), 127, np.uint8))[0]
    assert mx[1:17].tolist() == [(i << 4) | i for i in range(16)]
    nv = join(BLOCKS["NVFP4"], codes, np.full((1, 4), 0x38, np.uint8))[0]
    assert nv[4:12].tolist() == [((i + 8) << 4) | i for i in range(8)]
    q4 = join(BLOCKS["Q4_0"], codes, np.zeros((1, 2), np.uint16))[0]
    assert q4[2:18].tolist() == [((i << 4) | i) ^ 0x88 for i in range(16)]


def test_schemes_that_a_block_holds() -> None:
    assert block_type(schemes["mxfp4"]) is BLOCKS["MXFP4"]
    assert block_type(schemes["nvfp4"]) is BLOCKS["NVFP4"]
    assert block_type(schemes["int8_g32"].with_scale_format(FP16)) is BLOCKS["Q8_0"]
    assert block_type(schemes["int4_g32"].with_scale_format(FP16)) is BLOCKS["Q4_0"]
    for name in ("int8_g32", "int4_g128", "uint4_g32", "mxfp8", "fp8_block128", "nf4"):
        assert block_type(schemes[name]) is None


def test_scales_that_mean_two_things_are_refused() -> None:
    codes = np.zeros((1, 64), np.uint8)
    for name, byte in (("MXFP4", 255), ("NVFP4", 0x7F), ("NVFP4", 0xFF), ("NVFP4", 0x81)):
        scales = np.full((1, 64 // BLOCKS[name].group), byte, np.uint8)
        with pytest.raises(InputError, match=f"0x{byte:02x}"):
            join(BLOCKS[name], codes, scales)
        rows = join(BLOCKS[name], codes, scales * 0)
        rows[:, 0] = byte
        with pytest.raises(InputError, match="different things"):
            split(BLOCKS[name], rows)
    minus = np.full((1, 4), 0x80, np.uint8)  # minus zero only loses its sign
    assert not join(BLOCKS["NVFP4"], codes, minus).any()


def test_what_no_block_can_hold_is_refused() -> None:
    one = np.ones((1, 64), np.float32)
    with pytest.raises(UsageError, match="llama-quantize"):
        quantize(GGML_TYPES["Q4_K"], np.ones((1, 256), np.float32))
    with pytest.raises(UsageError, match="whole blocks of NVFP4"):
        quantize(GGML_TYPES["NVFP4"], one[:, :32])
    for value, error in ((np.nan, NonFiniteError), (np.inf, NonFiniteError)):
        with pytest.raises(error):
            quantize(GGML_TYPES["Q8_0"], one * np.float32(value))
    for name, value in (
        ("F16", 65520),
        ("Q8_0", 8.4e6),
        ("Q4_0", 6e5),
        ("Q4_1", 1e6),
        ("NVFP4", 2690),
        ("Q4_1", 3e38),
    ):
        x = one * np.float32(value)
        x[0, 1] = -value
        with pytest.raises(RangeError, match="beyond"):
            quantize(GGML_TYPES[name], x)


def test_tiny_values_become_zero_without_a_warning() -> None:
    x = np.full((1, 64), 1e-44, np.float32)
    with np.errstate(all="raise", under="ignore"):
        for name in WRITTEN:
            values = dequantize(GGML_TYPES[name], quantize(GGML_TYPES[name], x))
            assert np.abs(values - x).max() <= np.float32(1e-44), name


@pytest.mark.parametrize("name", [n for n in GGML_TYPES if n not in ("Q8_1", "Q8_K", "Q1_0")])
def test_every_type_decodes_as_the_package(name: str) -> None:
    kind, k = GGML_TYPES[name], 512
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 60, (8, kind.row_bytes(k)), np.uint8)  # no infinities in any fp16 scale
    if kind.dtype in ("I8", "I16", "I32", "I64", "F64"):
        wanted = rows.view(f"<{'f' if kind.dtype == 'F64' else 'i'}{kind.nbytes}").astype(np.float32)
    else:
        wanted = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    ours = dequantize(kind, rows)
    assert ours.dtype == np.float32
    assert np.array_equal(ours, wanted, equal_nan=True)


def test_types_without_a_decoder_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.zeros((1, 256), np.uint8)
    for name in ("Q8_1", "Q8_K", "Q1_0"):
        with pytest.raises(UsageError, match="nothing here decodes"):
            dequantize(GGML_TYPES[name], np.zeros((1, GGML_TYPES[name].nbytes), np.uint8))
    real = builtins.__import__

    def without_gguf(name: str, *rest: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(UsageError, match=r"pip install 'narrowcast\[gguf\]'"):
        dequantize(GGML_TYPES["Q4_K"], rows[:, :144])
