"""Schemes and presets as rows: counted bytes, tiles, notations, names, copies; and what is refused."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

from narrowcast.errors import InputError, UsageError
from narrowcast.kernels.reference.quantize import quantize
from narrowcast.numbers.formats import E4M3FN, E8M0, FP32, formats
from narrowcast.tensors.packing import pack, packing
from narrowcast.tensors.presets import EXCLUDED_ROLES, KV_SUFFIXES, presets
from narrowcast.tensors.qtensor import QTensor
from narrowcast.tensors.schemes import (
    ARITHMETICS,
    Scale,
    as_peer,
    group_shape,
    integer,
    parse_tile,
    schemes,
)

SHAPES = ((64, 256), (576, 1536), (3, 130, 72), (5, 33))


def stored_bits(q: QTensor) -> int:
    """Bits of the packed codes, scales and zero points of a tensor, counted one array at a time."""
    scheme = q.scheme
    bits = pack(q.codes, packing(scheme.element.bits)).size * 8
    bits += sum(
        scale.format.bits * stored.size for scale, stored in zip(scheme.scales, q.scales, strict=True)
    )
    if q.zero is not None and scheme.zero is not None:
        bits += scheme.zero.bits * q.zero.size
    return bits


@pytest.mark.parametrize("name", schemes)
def test_bits_per_weight_are_the_bits_that_are_stored(name: str) -> None:
    """Exactly, wherever the codes of a row fill whole bytes."""
    scheme = schemes[name]
    for shape in SHAPES:
        q = quantize(np.ones(shape, np.float32), scheme)
        if packing(scheme.element.bits).whole(shape[-1]):
            assert q.bits_per_weight * q.codes.size == pytest.approx(stored_bits(q), abs=1e-6)
        for level, stored in zip(scheme.scales, q.scales, strict=True):
            assert level.count(shape) == stored.size


def test_known_bits_per_weight() -> None:
    shape = (4096, 4096)
    wanted = {
        "mxfp4": 4.25, "mxfp6": 6.25, "mxfp8": 8.25, "mxint8": 8.25, "nvfp4": 4.5 + 32 / 4096**2,
        "int4_g128": 4.125, "int4_g32": 4.5, "uint4_g128": 4 + 20 / 128, "uint4_g32": 4 + 20 / 32,
        "fp8_channel": 8 + 32 / 4096, "fp8_block128": 8 + 32 / 128**2, "fp8_tensor": 8 + 32 / 4096**2,
        "nf4": 4.5, "fp8_group128": 8.25, "fp8_group128_ue8m0": 8 + 8 / 128,
    }  # fmt: skip
    for name, bits in wanted.items():
        assert schemes[name].bits_per_weight(shape) == pytest.approx(bits, rel=1e-12), name


def test_rows_are_complete_and_names_unique() -> None:
    names = [name for row in schemes.values() for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))
    for scheme in schemes.values():
        assert scheme.loads
        assert scheme.source
        assert scheme.inner is scheme.scales[0]
        assert scheme.arithmetic is ARITHMETICS["narrowcast"]
        assert integer(scheme) == scheme.name.startswith(("int", "uint", "mxint"))
        assert scheme.group == scheme.inner.tile[1]
        assert schemes[scheme.name.upper().replace("_", "-")] is scheme


def test_what_the_issue_names_exists() -> None:
    wanted = [f"fp8_{g}" for g in ("tensor", "channel", "token", "group128", "block128")]
    wanted += [f"fp8_{g}_ue8m0" for g in ("group128", "block128")]
    wanted += [f"int8_{g}" for g in ("tensor", "channel", "token")]
    wanted += [f"{sign}int4_{g}" for sign in ("", "u") for g in ("g32", "g64", "g128", "channel")]
    wanted += ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "nf4"]
    assert all(name in schemes for name in wanted)


def test_default_rules() -> None:
    """The bump at 1.75 for FP4, the smallest power that does not clip elsewhere; 7.5 and 127.5 for integers."""
    for scheme in schemes.values():
        if scheme.inner.format is E8M0:
            assert scheme.inner.rule == ("bump(1.75)" if scheme.element.name == "e2m1" else "rceil"), (
                scheme.name
            )
    assert (schemes["int4_g128"].span, schemes["int8_channel"].span, schemes["fp8_channel"].span) == (
        7.5,
        127.5,
        448,
    )
    inner, outer = schemes["nvfp4"].scales
    assert (inner.format, inner.tile, inner.rule) == (E4M3FN, (1, 16), "amax")
    assert (outer.format, outer.tile, outer.rule, outer.divides) == (FP32, (0, 0), "pow2", False)


@pytest.mark.parametrize(
    ("tile", "weight", "shape"),
    [
        ((0, 0), True, (-1, -1)),
        ((1, 0), True, (-1, 1)),
        ((1, 0), False, (1, -1)),
        ((1, 128), True, (1, 128)),
        ((1, 128), False, (1, 128)),
        ((128, 128), True, (128, 128)),
    ],
)
def test_group_shapes(tile: tuple[int, int], weight: bool, shape: tuple[int, int]) -> None:
    assert group_shape(tile, weight) == shape
    assert parse_tile(f"({shape[0]},{shape[1]})", weight) == tile
    assert parse_tile(f"{tile[0]}x{tile[1]}", weight) == tile


@pytest.mark.parametrize("text", ["", "1", "1x2x3", "axb", "(1,)", "1.5x2"])
def test_tiles_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="not a tile"):
        parse_tile(text)


def test_every_row_survives_copying_and_pickling() -> None:
    """Rows are compared by identity, so a copy that goes to another process has to come back as the row."""
    for fmt in formats.values():
        assert pickle.loads(pickle.dumps(fmt)) is fmt
        assert copy.deepcopy(fmt) is fmt
    spelled = formats["e3m3:bias=3,finite"]
    assert pickle.loads(pickle.dumps(spelled)) == spelled
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    for scheme in schemes.values():
        again = pickle.loads(pickle.dumps(scheme))
        assert again == scheme
        assert np.array_equal(quantize(x, again).dequantize(), quantize(x, scheme).dequantize()), scheme.name


def test_unknown_names_come_with_near_ones() -> None:
    for table, name, near in ((schemes, "nvfp", "nvfp4"), (presets, "fp8_dynamik", "fp8_dynamic")):
        assert name not in table
        with pytest.raises(UsageError, match=f"did you mean.*{near}"):
            table[name]
    with pytest.raises(UsageError, match="unknown arithmetic"):
        as_peer(schemes["nvfp4"], "some-peer")


def test_peers_leave_the_tiles_alone() -> None:
    for scheme in schemes.values():
        for peer in ARITHMETICS:
            changed = as_peer(scheme, peer)
            assert changed.arithmetic is ARITHMETICS[peer]
            assert [s.tile for s in changed.scales] == [s.tile for s in scheme.scales]
            assert changed.element is scheme.element


def test_presets() -> None:
    for preset in presets.values():
        assert preset.excluded == EXCLUDED_ROLES
        assert bool(preset.nearest) == preset.calibrated
        if preset.nearest:
            assert not presets[preset.nearest].calibrated
        assert preset.linear.weight in schemes.values()
        assert preset.linear.accumulate == ("int32" if preset.name in ("int8", "w4a8") else "fp32")
    for name, of in {
        "FP8_DYNAMIC": "fp8_dynamic",
        "W8A8": "int8",
        "W4A16": "w4a16",
        "NVFP4A16": "nvfp4a16",
    }.items():
        assert presets[name] is presets[of]
    assert len([*presets]) == len(presets) == 20


def test_kv_suffixes() -> None:
    for suffix in KV_SUFFIXES:
        preset = presets[f"fp8_dynamic+{suffix}"]
        assert (preset.name, preset.kv, preset.calibrated) == (f"fp8_dynamic+{suffix}", suffix, True)
        assert preset.nearest == "fp8_dynamic"
        assert f"fp8_dynamic+{suffix}" in presets
    assert presets["nvfp4+kv8"].nearest == "nvfp4a16"
    assert "fp8_dynamic+kv9" not in presets
    assert 7 not in presets
    with pytest.raises(UsageError, match="unknown KV cache suffix"):
        presets["fp8_dynamic+kv9"]


def test_smaller_groups() -> None:
    assert presets["w4a16"].with_group(32).linear.weight is schemes["int4_g32"]
    assert presets["w4a16_asym"].with_group(64).linear.weight is schemes["uint4_g64"]
    with pytest.raises(UsageError, match="unknown scheme"):
        presets["w4a16"].with_group(48)


def test_parts_that_do_not_fit_are_refused() -> None:
    x = np.ones((4, 128), np.float32)
    q, asym = quantize(x, schemes["mxfp8"]), quantize(x, schemes["uint4_g32"])
    assert asym.zero is not None
    with pytest.raises(InputError, match="scales do not fit"):
        QTensor(q.scheme, q.codes, (q.scales[0][:3],))
    with pytest.raises(InputError, match="scales do not fit"):
        QTensor(q.scheme, q.codes, (*q.scales, np.ones((1, 1), np.float32)))
    with pytest.raises(InputError, match="zero points and scheme disagree"):
        QTensor(q.scheme, q.codes, q.scales, np.zeros((4, 4), np.uint8))
    with pytest.raises(InputError, match="zero points and scheme disagree"):
        QTensor(asym.scheme, asym.codes, asym.scales)
    with pytest.raises(InputError, match="zero points do not fit"):
        QTensor(asym.scheme, asym.codes, asym.scales, asym.zero[:2])
    block = quantize(np.ones((300, 130), np.float32), schemes["fp8_block128"])
    with pytest.raises(InputError, match="cuts a tile"):
        block.rows(64, 128)
    wrong = replace(schemes["nvfp4"], scales=(schemes["nvfp4"].inner, Scale(FP32, (0, 0), "mse")))
    with pytest.raises(UsageError, match="unknown rule of an outer scale"):
        quantize(x, wrong)


@pytest.mark.parametrize(
    ("preset", "widths", "group"),
    [
        ("w4a16", (256, 384), 128),
        ("w4a16", (256, 192), 64),
        ("w4a16_asym", (96,), 32),
        ("w8a16", (48,), None),
        ("nvfp4a16", (48, 100), 16),  # a format's own group is no choice
        ("fp8_dynamic", (7,), 0),
        ("fp8_block", (100,), 128),
    ],
)
def test_presets_take_the_largest_group_that_divides(
    preset: str, widths: tuple[int, ...], group: int | None
) -> None:
    found = presets[preset].fitting(widths)
    assert (found and found.linear.weight.group) == group
