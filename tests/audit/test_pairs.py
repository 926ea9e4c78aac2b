"""A matrix beside its parent's: sums against numpy, in every container, and silence on what the toolkit writes."""

from __future__ import annotations

from itertools import pairwise
from math import inf, log10
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowcast
import toys
from audit.editing import edit, parent, quantized
from narrowcast.audit.opening import open_anyway
from narrowcast.audit.pair_sample import SAMPLE, strips
from narrowcast.audit.pair_smoothing import smoothing
from narrowcast.audit.pairs import layer_of, look_at_pair, measure
from narrowcast.audit.parent import usual_underflow
from narrowcast.audit.run import audit
from narrowcast.containers import containers
from narrowcast.errors import UsageError
from narrowcast.jobs.compare import compare
from narrowcast.jobs.matching import Held, held
from narrowcast.numbers.codec import decode_table, to_bf16, widen
from narrowcast.numbers.formats import BF16, E2M1, E4M3FN, INT4, INT8
from narrowcast.store.safetensors import Reader
from narrowcast.tensors.presets import presets

UPSTREAM = Path(__file__).parents[1] / "containers" / "upstream"
FIXTURES = sorted(path.name for path in UPSTREAM.iterdir() if (path / "config.json").is_file())
UP = "model.layers.1.mlp.up_proj"
WRITTEN = [name for name, row in containers.items() if row.spelling is not None]


def matrices(name: str) -> list[Held]:
    opened = open_anyway(UPSTREAM / name).opened
    assert opened is not None
    return [one for one in held(opened).found.values() if one.coded is not None]


@pytest.mark.parametrize("name", FIXTURES)
def test_a_quantized_parent_that_is_the_child(name: str) -> None:
    """Nothing is lost against itself, whatever columns, offsets and factors a container has."""
    for one in matrices(name):
        pair = look_at_pair(one, one)
        assert pair.errors.noise == 0, one.name
        assert pair.errors.signal > 0
        assert not pair.lost


@pytest.mark.parametrize("name", FIXTURES)
def test_sums_of_rows_and_columns(name: str) -> None:
    """Against another matrix of the same shape, summed by numpy: additions in another order, 1 ulp for each."""
    for a, b in pairwise(matrices(name)):
        if a.source.shape != b.source.shape or a.coded is None:
            continue
        n, k = a.source.shape
        x, y = (side.values(0, n).astype(np.float64) for side in (b, a))
        sums = measure(a, a.coded, b)
        close = {"rtol": max(n, k) * 2.0**-52}
        for axis, (signal, noise) in ((1, sums.rows[:2]), (0, sums.columns)):
            np.testing.assert_allclose(signal, (x * x).sum(axis), **close)
            np.testing.assert_allclose(noise, np.square(x - y).sum(axis), **close)
        np.testing.assert_array_equal(sums.row_peaks.view(np.float32), np.abs(x).max(1))
        np.testing.assert_array_equal(sums.column_peaks.view(np.float32), np.abs(x).max(0))
        assert sums.energy(2) + sums.energy(3) + sums.energy(4) <= sums.energy(1) * (1 + 2.0**-50)


def sources(name: str, folder: Path) -> Path:
    if name == "llama":
        return toys.llama(folder, hidden=192, inner=544, layers=1)
    if name == "tied":
        return toys.llama(folder, inner=256, layers=1, shards=3)
    return toys.moe(folder, name, hidden=128, inner=128 if name == "qwen3_moe" else 64)


CASES = [
    pytest.param(container, preset, source, marks=[] if source == "llama" else [pytest.mark.slow])
    for source in ("llama", "tied", "qwen3_moe", "gpt_oss")
    for container in WRITTEN
    for preset in toys.PRESETS
]


@pytest.mark.parametrize(("container", "preset", "source"), CASES)
def test_silent_on_what_is_written(tmp_path: Path, container: str, preset: str, source: str) -> None:
    row = containers[container]
    assert row.spelling is not None
    original = sources(source, tmp_path / "parent")
    options: dict[str, Any] = {"targets": "re:.*experts.*"} if container == "mxfp4" else {}
    try:
        row.spelling(presets[preset].linear, BF16)
        narrowcast.quantize(original, tmp_path / "child", preset, container=container, **options)
    except UsageError:
        return  # the container does not hold it: that is tested elsewhere
    found = audit(tmp_path / "child", against=original, select=["NC7"])
    assert [(one.rule, one.tensor, one.said) for one in found.findings if one.severity != "info"] == []
    assert {one.rule for one in found.findings} <= {"NC740", "NC741"}
    compared = [pair for pair in found.subject.pairs.values() if pair.coded is not None]
    assert compared
    for pair in compared:
        assert abs(pair.gap) < 0.5, pair.name  # other scales of shared or searched kinds, on some rows


def test_what_is_kept_of_pairs(tmp_path: Path) -> None:
    """SQNRs are those of ``compare``, and shares add up."""
    model = quantized(tmp_path, "nvfp4a16")
    found = audit(model, against=parent(tmp_path), select=["NC7"])
    wanted = {one.name: one.sqnr for one in compare(parent(tmp_path), model).tensors}
    pairs = [pair for pair in found.subject.pairs.values() if pair.coded is not None]
    assert len(pairs) == 14
    for pair in pairs:
        assert pair.sqnr == pytest.approx(wanted[pair.name], rel=1e-9)
        shares = (pair.clipping, pair.rounding + pair.beyond, pair.underflow)
        assert sum(map(pair.share, shares)) == pytest.approx(1)
        assert layer_of(pair.name) in (0, 1)
        assert pair.child.role in ("attention", "mlp")


@pytest.mark.parametrize("preset", ["fp8_dynamic", "int8", "w4a16_asym", "nvfp4a16"])
def test_finer_scales_keep_more(tmp_path: Path, preset: str) -> None:
    """Of normal weights, each step to smaller tiles gains a little, and none loses."""
    pair = audit(quantized(tmp_path, preset), against=parent(tmp_path), select=["NC741"]).subject.pairs[UP]
    assert pair.kept is not None
    kept = list(pair.kept.by_tile().values())
    assert kept[0] > 10
    assert all(a < b + 0.1 for a, b in pairwise(kept))


def test_dropped_scale_is_named(tmp_path: Path) -> None:
    """Scales of one where they were 1/1800: codes taken as values."""

    def ones(old: np.ndarray) -> np.ndarray:
        return np.full_like(old, 0x3F80) if old.dtype == np.uint16 else np.ones_like(old)

    model = edit(quantized(tmp_path, "fp8_dynamic"), {f"{UP}.weight_scale": ones})
    error = next(one for one in audit(model, against=parent(tmp_path)).findings if one.rule == "NC710")
    assert error.tensor == UP
    assert error.facts["diagnosis"]["name"] in ("scale left out", "scaled by a constant")


def test_many_of_a_kind(tmp_path: Path) -> None:
    """Sums do not depend on threads, nor does what is looked into."""
    original = toys.llama(tmp_path / "parent", layers=12)
    model = quantized(tmp_path, "nvfp4a16")
    names = [
        f"model.layers.{i}.mlp.{n}_proj.weight_packed" for i in range(12) for n in ("up", "gate", "down")
    ]
    edit(model, dict.fromkeys(names, lambda old: (old >> 4) | (old << 4)))
    found = [audit(model, against=original, select=["NC7"], workers=workers) for workers in (1, 3)]
    assert [one.to_json() for one in found[0].findings] == [one.to_json() for one in found[1].findings]
    errors = [one for one in found[0].findings if one.rule == "NC710"]
    assert len(errors) == 36
    assert sum("swapped" in one.said for one in errors) == 32


def test_cast_plain_tensors_are_no_other_model(tmp_path: Path) -> None:
    """Norms in fp16 that were bf16: a rule about coverage says that; their values are the parent's, rounded."""
    model = quantized(tmp_path, "fp8_dynamic")
    name = "model.norm.weight"
    edit(model, {name: ("F16", widen(np.zeros(128, np.uint16), BF16).astype(np.float16))})
    found = audit(model, against=parent(tmp_path), select=["NC702"]).findings
    assert [one.tensor for one in found] == [name]
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(128).astype(np.float32)
    original = edit(parent(tmp_path), {name: ("F32", wide)})
    edit(model, {name: ("BF16", to_bf16(wide))})
    found = audit(model, against=original, select=["NC702"])
    assert found.findings == ()
    assert found.subject.pairs[name].cast


def test_strips() -> None:
    """Whole tiles, in order, inside the matrix, without overlap."""
    for n, k, multiple in (
        (1, 7, 1),
        (352, 128, 1),
        (4096, 4096, 1),
        (4096, 4096, 128),
        (576, 200, 128),
        (5, 1 << 20, 1),
    ):
        found = strips(n, k, multiple)
        assert all(0 <= i < j <= n and i % multiple == 0 for i, j in found)
        assert all(a[1] <= b[0] for a, b in pairwise(found))
        assert sum(j - i for i, j in found) * k <= max(SAMPLE, multiple * k) or found == [(0, n)]
        if n == 4096:
            assert found[-1][1] >= n // 2


def test_usual_underflow() -> None:
    """Shares of a normal distribution that lie within half the smallest step, 16 sigma at the largest code."""
    rng = np.random.default_rng(0)
    x = np.abs(rng.standard_normal(1 << 18))
    for element in (E4M3FN, E2M1, INT4, INT8):
        values = np.unique(np.abs(decode_table(element)[np.isfinite(decode_table(element))]))
        step = values[values > 0].min() / element.max * 16
        share = float((x < step / 2).mean())
        assert usual_underflow(element) == pytest.approx(share, abs=4 * np.sqrt(share / len(x)) + 1e-4)


def test_smoothing_needs_factors() -> None:
    """Factors of rows and columns are found where there are some, and not fitted to what has none."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((64, 256)).astype(np.float32)
    c, r = np.exp2(rng.uniform(-2, 2, 256)), np.exp2(rng.uniform(-1, 1, (64, 1)))
    found = smoothing(a, (a * c * r).astype(np.float32))
    assert found is not None
    assert found.after > 60
    ratio = found.factors / c
    assert ratio.max() / ratio.min() == pytest.approx(1, abs=1e-3)
    assert smoothing(a, rng.standard_normal((64, 256)).astype(np.float32)) is None
    assert smoothing(a[:8], a[:8] * c.astype(np.float32)) is None  # too few rows to tell


def test_expected_is_what_the_scheme_keeps(tmp_path: Path) -> None:
    """Rounding to nearest, by hand: INT8 rows of one matrix, scales amax / 127.5, as the preset makes them."""
    original = parent(tmp_path)
    found = audit(quantized(tmp_path, "int8"), against=original, select=["NC7"]).subject.pairs[UP]
    with Reader(original / "model.safetensors") as reader:
        x = widen(np.array(reader.array(f"{UP}.weight")), BF16).astype(np.float64)
    scale = np.abs(x).max(1, keepdims=True) / 127.5
    y = np.clip(np.rint(x / scale), -128, 127) * scale
    by_hand = 10 * log10(float((x * x).sum() / np.square(x - y).sum()))
    assert found.expected == pytest.approx(by_hand, abs=0.1)
    assert found.sqnr == pytest.approx(found.expected, abs=0.1)
    assert found.gap == pytest.approx(0, abs=0.01)
    assert found.errors.sqnr < inf
