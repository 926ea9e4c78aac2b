"""Samples of keys and values: files that are read, what is said of them, and what is refused (field case 10)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audit.cases.cache import both, cached
from audit.editing import quantized, write
from narrowcast.audit.cache_sample import read_sample
from narrowcast.audit.findings import Finding
from narrowcast.audit.run import audit
from narrowcast.errors import InputError, NonFiniteError
from narrowcast.numbers.codec import encode
from narrowcast.numbers.formats import BF16

KEYS = np.array([1000, -700, 300, 3.3, 0.01], np.float32)


def found(model: Path, sample: Path) -> list[Finding]:
    return list(audit(model, kv_sample=sample, select=["NC210"], workers=1).findings)


def test_field_case(tmp_path: Path) -> None:
    """2 of 5 beyond 448, recommended 2.232143; a wide cache makes that an information."""
    np.save(tmp_path / "k.npy", KEYS)
    (one,) = found(quantized(tmp_path, "fp8_dynamic"), tmp_path / "k.npy")
    assert one.severity == "info"
    assert one.said.startswith("K or V: 2 of 5 saturate in e4m3 at scale 1.0, 0 in e5m2; with scale 2.232143")
    assert one.wanted == "k_scale 2.232143"
    assert one.facts["saturated_share_at_one"] == 0.4
    assert one.facts["e4m3_db"] > one.facts["e5m2_db_at_one"] > one.facts["e4m3_db_at_one"]


def test_one_that_engines_take(tmp_path: Path) -> None:
    """The config asks for an FP8 cache and has no scale: two of five saturate; with 2.25 in the file, none does."""
    np.savez(tmp_path / "kv.npz", **{"layers.1.k": KEYS.reshape(1, 5), "layers.1.v": KEYS / 4, "mask": KEYS})
    keys, values = found(cached(tmp_path, {}), tmp_path / "kv.npz")
    assert (
        keys.said
        == "K of layer 1: 2 of 5 (40.00%) saturate under the scale of 1.0 that engines take without one"
    )
    assert (keys.severity, values.severity, values.wanted) == ("warning", "info", "v_scale 0.5580357")
    own = cached(tmp_path / "own", both(2.25))
    assert [one.severity for one in found(own, tmp_path / "kv.npz")] == ["info", "info"]
    other = cached(tmp_path / "other", both(2.25, (0,)) | both(0.5, (1,)))
    assert "saturate under model.layers.1.self_attn.k_scale" in found(other, tmp_path / "kv.npz")[0].said


def test_safetensors(tmp_path: Path) -> None:
    """bf16 keys are their own values; names as transformers and engines have them."""
    codes = encode(KEYS, BF16).codes
    names = ("model.layers.7.self_attn.k_proj", "value_cache.3", "past/key", "k_norm.weight", "kv_lora")
    write(tmp_path / "s.safetensors", dict.fromkeys(names, ("BF16", codes)))
    read = {one.name: (one.which, one.layer) for one in read_sample(tmp_path / "s.safetensors")}
    assert read == {names[0]: ("k", 7), names[1]: ("v", 3), names[2]: ("k", None)}
    (first, *_) = read_sample(tmp_path / "s.safetensors")
    assert first.values.tolist() == [1000, -700, 300, 3.296875, float(np.float32(0.010009765625))]


@pytest.mark.parametrize(
    ("name", "array", "error", "words"),
    [
        ("a.npy", np.zeros(0, np.float32), InputError, "empty"),
        ("a.npy", np.array([1, np.nan]), NonFiniteError, "1 of 2"),
        ("a.npy", np.array(["x"]), InputError, "no numbers"),
        ("a.npz", KEYS, InputError, "layers.3.k"),
        ("a.npy", None, InputError, "cannot be read"),
        ("a.safetensors", None, InputError, "a.safetensors"),
        ("missing.npz", None, InputError, "No such file"),
    ],
)
def test_refused(tmp_path: Path, name: str, array: np.ndarray | None, error: type, words: str) -> None:
    file = tmp_path / name
    if array is None:
        if not name.startswith("missing"):
            file.write_bytes(b"nonsense")
    elif name.endswith("npz"):
        np.savez(file, other=array)
    else:
        np.save(file, array)
    with pytest.raises(error) as refusal:
        read_sample(file)
    assert words in str(refusal.value)
    assert str(file) in str(refusal.value)
