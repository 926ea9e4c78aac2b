"""Field case 10: KV cache scales that are absent and scales that are 1.0 are two things; what a sample of keys says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audit.cases.cache import both, cached
from audit.editing import parent
from narrowcast.audit.cache_advice import bound, kv_advice
from narrowcast.audit.run import audit
from narrowcast.errors import InputError, NonFiniteError

KEYS = np.array([1000, -700, 300, 3.3, 0.01], np.float32)


def test_sample() -> None:
    advice = kv_advice(KEYS)
    assert (advice.elements, advice.e4m3.saturated, advice.e5m2.saturated) == (5, 2, 0)
    assert advice.e4m3.scale == pytest.approx(2.232143, abs=5e-7)
    # 1000 / s = 448, 700 / s = 313.6 -> 320, 134.4 -> 128, 1.4784 -> 1.5, 0.00448 -> 2 * 2^-9
    wanted = np.array([448, -320, 128, 1.5, 2.0**-8]) * (1000 / 448)
    assert advice.e4m3.decoded == pytest.approx(wanted, rel=1e-6)
    assert [f"{value:.4g}" for value in advice.e4m3.decoded] == [
        "1000",
        "-714.3",
        "285.7",
        "3.348",
        "0.008719",
    ]
    assert "2 of 5 saturate in e4m3 at scale 1.0, 0 in e5m2; with scale 2.232143" in advice.said
    # Clipped to 448: the error is 552 and 252 of a length of 1257; both terms are exact.
    error = 552.0**2 + 252.0**2 + (300 - 288) ** 2
    assert advice.e4m3.sqnr_at_one == pytest.approx(10 * np.log10((KEYS**2.0).sum() / error), abs=1e-3)
    assert advice.e4m3.sqnr > advice.e5m2.sqnr_at_one > advice.e4m3.sqnr_at_one


def test_edge_of_saturation() -> None:
    """464 is rounded to 448 and lost no more than others; its neighbour would have been 480."""
    sample = np.array([464, np.nextafter(np.float32(464), np.float32(500))], np.float32)
    assert kv_advice(sample[:1]).e4m3.saturated == 0
    assert kv_advice(sample).e4m3.saturated == 1


def test_zeros_and_bad_samples() -> None:
    assert kv_advice(np.zeros(4, np.float16)).e4m3.decoded.tolist() == [0] * 4
    with pytest.raises(InputError):
        kv_advice(np.zeros(0))
    with pytest.raises(NonFiniteError):
        kv_advice(np.array([1, np.inf]))


def test_absent_and_one_differ(tmp_path: Path) -> None:
    rules = {}
    for name, tensors in {"absent": {}, "one": both(1.0)}.items():
        done = audit(cached(tmp_path / name, tensors), select=["NC2"])
        rules[name] = {one.rule for one in done.findings if one.severity != "info"}
    assert rules == {"absent": {"NC200"}, "one": {"NC201"}}


def test_bound_is_reached_and_never_passed() -> None:
    """The input that a row is aligned with gives the bound; no input of that length gives more."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((8, 32)).astype(np.float32)
    norm, bias = rng.uniform(0.5, 2, 32).astype(np.float32), rng.standard_normal(8).astype(np.float32)
    limit = bound(weight, norm, bias, False)
    inputs = rng.standard_normal((4096, 32))
    rows = weight * norm
    inputs = np.concatenate([inputs, rows * np.sign(bias)[:, None]])
    inputs *= np.sqrt(32) / np.linalg.norm(inputs, axis=1, keepdims=True)
    reached = np.abs(inputs @ rows.T.astype(np.float64) + bias).max()
    assert reached == pytest.approx(limit, rel=1e-6)
    # Rotary embedding: a pair of both bounds turns into one of √2 of it.
    assert bound(weight, norm, bias, True) == pytest.approx(limit * np.sqrt(2))


def test_parent_says_that_one_will_do(tmp_path: Path) -> None:
    """Weights of 0.02 behind a norm of 0.02: keys and values far below 448."""
    done = audit(cached(tmp_path, {}), against=parent(tmp_path), select=["NC2"])
    (found,) = [one for one in done.findings if one.rule == "NC209"]
    assert found.said.endswith("e4m3 at scale 1.0 saturates nothing")
    assert 0 < found.facts["v"] < found.facts["k"] < 448
