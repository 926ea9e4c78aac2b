"""Every scheme against a quantizer of plain loops, on ragged shapes, experts, and tiles that are hard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from narrowcast.kernels.reference.quantize import quantize
from narrowcast.tensors.scaling import POWER_RULES, power_of_two_codes, reduce_tiles, spread
from narrowcast.tensors.schemes import Scheme, schemes, tile_grid
from reference.fractions_oracle import LAYOUTS
from reference.loops import over_tiles, power_of_two, quantize_by_loops, tile_of

RAGGED = ((3, 70), (2, 3, 33), (1, 1), (130, 2), (1, 300))
TILES = ((0, 0), (1, 0), (0, 1), (1, 32), (1, 128), (2, 2), (128, 128), (3, 0), (0, 7), (1, 1), (5, 16))


def hard_weight(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Values over many binades with exact ties, powers of two, signed zeros, a zero row and a zero tile."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, (*shape[:-1], 1)))
    x[..., ::5] = np.round(x[..., ::5] * 4) / 4
    x[..., ::7] = np.exp2(np.round(np.log2(np.abs(x[..., ::7]) + 1e-9)))
    x[..., 3::11] = -0.0
    if shape[-2] > 2:
        x[..., 1, :] = 0
    if shape[-1] > 64:
        x[..., 0, 32:64] = 0
    return np.asarray(x, np.float32)


def same_as_loops(x: NDArray[np.float32], scheme: Scheme) -> None:
    q, wanted = quantize(x, scheme), quantize_by_loops(x, scheme)
    for at, scale in wanted["scales"].items():
        assert q.scales[0][at] == scale, f"scale of tile {at}: {q.scales[0][at]} wanted {scale}"
        if q.zero is not None:
            assert q.zero[at] == wanted["zeros"][at], f"zero point of tile {at}"
    if len(q.scales) == 2:
        for at, outer in wanted["outers"].items():
            assert q.scales[1][at] == outer
    wrong = np.argwhere(q.codes != wanted["codes"])
    assert not len(wrong), f"{len(wrong)} codes, first at {wrong[0]}: {q.codes[tuple(wrong[0])]:08b}"
    decoded = q.dequantize()
    assert np.array_equal(decoded, wanted["decoded"])
    assert np.array_equal(np.signbit(decoded), np.signbit(wanted["decoded"]))


@pytest.mark.parametrize("name", schemes)
def test_every_scheme(name: str) -> None:
    for seed, shape in enumerate(RAGGED):
        same_as_loops(hard_weight(shape, seed), schemes[name])


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxint8"])
@pytest.mark.parametrize("rule", [*POWER_RULES[:-1], "bump(1.75)", "bump(1.8125)", "bump(1)", "bump(2)"])
def test_every_power_of_two_rule(name: str, rule: str) -> None:
    same_as_loops(hard_weight((2, 70), 3), schemes[name].with_rule(rule))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxint8"])
@pytest.mark.parametrize("rule", [*POWER_RULES[:-1], "bump(1.75)", "bump(1.8125)"])
def test_thresholds_of_the_power_of_two_rules(name: str, rule: str) -> None:
    """Maxima on, one unit below and one unit above every threshold, in three binades and at the format's ends."""
    scheme = schemes[name].with_rule(rule)
    element = LAYOUTS[scheme.element.name]
    top = float(element.highest)
    marks = [1.0, 1.5, 1.75, 1.8125, 1.875, 1.9375, 1.96875, 1.9921875, top / 2.0**scheme.element.emax]
    exact = np.array([mark * 2.0**e for mark in marks for e in (-126, 0, 5, 127)], np.float32)
    for side in (np.float32(0), np.float32(np.inf)):
        exact = np.unique(np.concatenate([exact, np.nextafter(exact, side)]))
    exact = exact[np.isfinite(exact) & (exact > 0)]
    got = power_of_two_codes(exact, rule, scheme.element)
    assert got.tolist() == [power_of_two(float(amax), rule, element) for amax in exact]


@pytest.mark.slow
@pytest.mark.parametrize("name", schemes)
def test_every_scheme_on_more_weights(name: str) -> None:
    for seed in range(4):
        same_as_loops(hard_weight((3, 4, 200), seed), schemes[name])
        same_as_loops(hard_weight((140, 40), seed), schemes[name])


@pytest.mark.parametrize("shape", RAGGED)
@pytest.mark.parametrize("tile", TILES)
def test_tile_algebra(shape: tuple[int, ...], tile: tuple[int, int]) -> None:
    """reduce, grid and spread against index arithmetic, partial edge tiles and leading axes included."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for ufunc, fold in ((np.maximum, max), (np.minimum, min)):
        wanted = over_tiles(x, tile, fold)
        reduced = reduce_tiles(x, tile, ufunc)
        assert reduced.shape == tile_grid(shape, tile)
        assert reduced.size == len(wanted)
        assert all(reduced[at] == value for at, value in wanted.items())
    numbers = np.arange(reduced.size).reshape(reduced.shape)
    spread_out = np.broadcast_to(spread(numbers, tile, shape), shape)
    for index in np.ndindex(shape):
        assert spread_out[index] == numbers[tile_of(index, shape, tile)]


def test_a_slice_of_rows_is_the_quantization_of_the_rows() -> None:
    """QTensor.rows at tile boundaries, for every scheme, leading axes included."""
    x = hard_weight((2, 300, 70), 5)
    for scheme in schemes.values():
        q = quantize(x, scheme)
        height = scheme.inner.tile[0] or 1
        for start, stop in ((0, 128), (128, 300), (256, 257), (0, 300)):
            part = q.rows(start, stop)
            assert np.array_equal(part.dequantize(), q.dequantize()[:, start:stop]), (scheme.name, start)
            assert part.bits_per_weight > scheme.element.bits
            if scheme.inner.tile[0] and scheme.outer is None:
                assert part.scales[0].shape[-2] == -(-(stop - start) // height)


def leading(x: Any, i: int) -> Any:
    return x[i]


def test_experts_are_quantized_apart() -> None:
    """Leading axes have tiles, outer scales and zero points of their own."""
    x = hard_weight((4, 9, 66), 6) * np.float32([1, 100, 1e-3, 7]).reshape(4, 1, 1)
    for scheme in schemes.values():
        together = quantize(x, scheme)
        for i in range(4):
            alone = quantize(x[i], scheme)
            assert np.array_equal(together.codes[i], alone.codes), scheme.name
            for whole, single in zip(together.scales, alone.scales, strict=True):
                assert np.array_equal(leading(whole, i), single), scheme.name
